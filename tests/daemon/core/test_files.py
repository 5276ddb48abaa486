"""Files and folders are flushed."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from daemon.core import files
from daemon.core.files import NotSynced, sync_file_system, sync_folders


def test_what_a_disk_has_lost_is_told_to_everybody_who_flushes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system tells it once: to an unpacking archive, for example, when results are lost."""
    answers = [errno.EIO]

    def syncfs(_fd: int) -> int:
        ctypes.set_errno(answers.pop() if (lost := bool(answers)) else 0)
        return -lost

    monkeypatch.setattr(files, "_libc", SimpleNamespace(syncfs=syncfs))
    monkeypatch.setattr(files, "_lost", {})
    folder = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(NotSynced):
        sync_file_system(folder)
    os.close(folder)
    with pytest.raises(NotSynced, match="Input/output error"):
        sync_folders([bytes(tmp_path)])
    sync_folders([b"/proc"])  # another one
