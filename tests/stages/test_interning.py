"""Names of files do not stay in memory, whatever this Python does with interned strings."""

from __future__ import annotations

import pathlib
import sys
from pathlib import Path

import pytest

from stages import interning


def test_the_name_of_a_file_is_freed_with_its_path() -> None:
    name = (Path("inbox") / "".join(("a name", " seen once.png"))).name
    assert sys.getrefcount(name) < interning.IMMORTAL


@pytest.mark.skipif(not hasattr(pathlib, "sys"), reason="since Python 3.13 pathlib is a package")
def test_without_interning_paths_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pathlib, "sys", sys)
    interning.leave_out_of_paths()
    path = Path("inbox") / "".join(("a", "b")) / "c.png"
    assert (path.parts, path.name, path.suffix) == (("inbox", "ab", "c.png"), "c.png", ".png")
    assert sorted(Path(__file__).parent.glob("test_interning.p*")) == [Path(__file__)]
    assert Path("".join(("in", "box"))).parts[0] is not sys.intern("".join(("in", "box")))
