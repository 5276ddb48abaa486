from __future__ import annotations

from pathlib import Path

import pytest

from stages.scenes import photographs
from stages.scenes.photographs import find_photographs


def test_photographs_are_those_of_a_folder_or_of_installed_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "b.jpg").touch()
    (tmp_path / "a.jpg").touch()
    assert [path.name for path in find_photographs(tmp_path)] == ["a.jpg", "b.jpg"]
    assert {"bus.jpg", "zidane.jpg", "grace_hopper.jpg"} <= {path.name for path in find_photographs()}
    monkeypatch.setattr(photographs, "PHOTOGRAPHS", {("no_such_package", "data"): ("a.jpg",)})
    assert find_photographs() == []
