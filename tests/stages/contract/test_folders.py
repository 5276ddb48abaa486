"""A folder is replaced whole, even if the process is killed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from stages.contract.folders import replace_folder, restore_folder
from stages.contract.manifest import MANIFEST


@pytest.mark.parametrize("renamings", [0, 1, 2])
def test_a_pack_survives_a_kill_while_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renamings: int
) -> None:
    class Killed(BaseException):
        pass

    def rename(path: Path, target: Path) -> None:
        nonlocal renamings
        renamings -= 1
        if renamings < 0:
            raise Killed
        os.replace(path, target)

    for name in ("pack", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_text(name)
    left = ["pack", "pack", "new"][renamings]
    with monkeypatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(Path, "replace", rename)
        replace_folder(tmp_path / "pack", tmp_path / "new")
    restore_folder(tmp_path / "pack")
    assert (tmp_path / "pack" / MANIFEST).read_text() == left
