"""Files in an inbox."""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path

import pytest

from daemon.system import beneath
from daemon.system.beneath import rename_to_free


@pytest.mark.parametrize("refusal", [0, errno.EINVAL, errno.ENOSYS])
def test_a_file_gets_a_name_only_if_that_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    """Also where the system does not know the call, or the file system, as NFS."""

    def refuse(*_: object) -> int:
        ctypes.set_errno(refusal)
        return -1

    if refusal:
        monkeypatch.setattr(beneath, "_RENAMEAT2", refuse)
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("old")
    new.write_text("new")
    with pytest.raises(FileExistsError):
        rename_to_free(bytes(old), bytes(new))
    assert (old.read_text(), new.read_text()) == ("old", "new")
    new.unlink()
    rename_to_free(bytes(old), bytes(new))
    assert not old.exists()
    with pytest.raises(FileNotFoundError):
        rename_to_free(bytes(old), bytes(new) + b"er")
