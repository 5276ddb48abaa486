"""The names of files are freed, also by a Python that never frees an interned string."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from pathlib import Path

import pytest

from stages.contract import interning
from stages.contract.processes import environment, python

OWN_SYS = pytest.mark.skipif(
    sys.version_info >= (3, 13), reason="since Python 3.13 pathlib.sys is not what paths use"
)


@pytest.mark.parametrize(
    ("version", "is_changed"),
    [("3, 11, 7", False), ("3, 12, 0", True), ("3, 12, 6", True), ("3, 12, 7", False)],
)
def test_every_process_stops_interning_if_its_python_never_frees_a_string(
    version: str, is_changed: bool
) -> None:
    program = f"import sys; sys.version_info = ({version}); import stages, pathlib; print(repr(vars(pathlib).get('sys')))"
    run = subprocess.run(python("-c", program), env=environment(), capture_output=True, text=True, check=True)
    assert ("interning._Sys" in run.stdout) == is_changed


@OWN_SYS
def test_without_interning_a_part_of_a_path_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pathlib, "sys", sys)
    interning.stop_in_pathlib()
    assert Path("".join(("in", "box"))).parts[0] is not sys.intern("".join(("in", "box")))


@OWN_SYS
def test_paths_work_as_before_without_interning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pathlib, "sys", sys)
    interning.stop_in_pathlib()
    path = Path("inbox") / "".join(("a", "b")) / "c.png"
    assert (path.parts, path.name, path.suffix) == (("inbox", "ab", "c.png"), "c.png", ".png")
    assert sorted(Path(__file__).parent.glob("test_interning.p*")) == [Path(__file__)]
