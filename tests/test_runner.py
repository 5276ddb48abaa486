"""The runner of `make test` itself: it says what it left out, and it ends when one of its own processes dies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.conftest import pytest_terminal_summary
from tests.daemon_process import PATIENCE

ROOT = Path(__file__).parent.parent
DIES = "import os, signal\ndef test_dies():\n    os.kill(os.getpid(), signal.SIGSEGV)\ndef test_is_never_reached():\n    pass\n"


class Screen:
    """What pytest prints at the end of a run with these skipped tests."""

    verbosity = -1  # make test

    def __init__(self, *reasons: str) -> None:
        reports = [SimpleNamespace(longrepr=("test_a.py", 7, f"Skipped: {reason}")) for reason in reasons]
        self.stats = {"skipped": reports} if reports else {}
        self.lines: list[str] = []

    def write_sep(self, mark: str, title: str) -> None:
        self.lines.append(title)

    def write_line(self, line: str) -> None:
        self.lines.append(line)


def test_a_run_ends_with_what_was_skipped_by_reason_and_the_command_that_installs_what_is_missing() -> None:
    screen: Any = Screen("needs CUDA", *["Prometheus is not installed: make tools"] * 3)
    pytest_terminal_summary(screen)
    assert screen.lines == [
        "4 skipped",
        "     3 Prometheus is not installed: make tools",
        "     1 needs CUDA",
        "`make tools` installs what 3 of them need.",
    ]


def test_a_run_without_skipped_tests_says_nothing_of_them() -> None:
    screen: Any = Screen()
    pytest_terminal_summary(screen)
    assert screen.lines == []


def test_a_test_process_that_dies_in_its_last_file_fails_the_run_and_does_not_hang_it(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"test_{number}.py").write_text("def test_passes():\n    pass\n")
    (tmp_path / "test_9.py").write_text(DIES)
    command: list[str | Path] = [
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
