"""What `python -m benchmarks.figures` leaves of parts that succeed, fail or hang."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks import figures
from benchmarks.figures import PARTS, Part, main
from tests.daemon_process import wait_for

GOOD = Part("good", 60, ("-c", "print('41.5 images/s in', 'FOLDER')"))
BAD = Part("bad", 60, ("-c", "raise SystemExit('no GPU')"))
HANGING = Part(
    "hanging",
    3,
    ("-c", "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(99)'])"),
)


def test_each_part_leaves_its_log_and_the_next_one_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="True"):
        main(["--output", str(tmp_path / "logs"), "--folder", str(tmp_path)], [BAD, GOOD])
    assert (tmp_path / "logs" / "good.log").read_text() == f"41.5 images/s in {tmp_path}\n"
    shown = capsys.readouterr().out
    assert "== bad: exited with status 1" in shown
    assert "no GPU" in shown


def test_a_part_that_hangs_is_ended_with_all_that_it_has_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[int] = []

    def stop(process: subprocess.Popen[bytes]) -> None:
        groups.append(process.pid)
        figures_stop(process)

    figures_stop = figures.stop
    monkeypatch.setattr(figures, "stop", stop)
    monkeypatch.setattr(figures, "LEAST_SECONDS", 0.0)
    with pytest.raises(SystemExit, match="True"):
        main(["--output", str(tmp_path)], [HANGING])
    assert "== hanging: cut off after" in capsys.readouterr().out
    [group] = groups
    wait_for(lambda: not is_alive(group), "the end of what the part has started")


def is_alive(group: int) -> bool:
    """Whether any process of the group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_without_time_no_part_is_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    with pytest.raises(SystemExit, match="True"):
        main(["--output", str(tmp_path), "--seconds", "0"], [GOOD])
    assert "== good: not begun" in capsys.readouterr().out
    assert time.monotonic() - started < 5
    assert not list(tmp_path.iterdir())


def test_every_part_names_a_module_that_exists() -> None:
    modules = [part.arguments[1] for part in PARTS if part.arguments[0] == "-m"]
    assert len(modules) == len(PARTS)
    assert all(importlib.util.find_spec(module) for module in modules)
