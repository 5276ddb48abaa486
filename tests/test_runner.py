"""The runner of `make test` itself: it ends, and reports what went wrong, when one of its own processes dies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.daemon_process import PATIENCE

ROOT = Path(__file__).parent.parent
DIES = "import os, signal\ndef test_dies():\n    os.kill(os.getpid(), signal.SIGSEGV)\ndef test_is_never_reached():\n    pass\n"


def test_a_test_process_that_dies_in_its_last_file_fails_the_run_and_does_not_hang_it(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"test_{number}.py").write_text("def test_passes():\n    pass\n")
    (tmp_path / "test_9.py").write_text(DIES)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        ROOT / "pyproject.toml",
        "--rootdir",
        tmp_path,
        "--numprocesses",
        "2",
        tmp_path,
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert run.returncode == 1
    assert "crashed while running 'test_9.py::test_dies'" in run.stdout
