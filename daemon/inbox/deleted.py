"""Which files that an inbox had are gone from it: deleted, or ignored by now. Of a folder that is unmounted, replaced or does
not answer, no file is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from daemon.inbox.folder import Folder
from daemon.inbox.unavailable import find_unmounted, why_missing
from daemon.system.mounts import FolderAway
from stages.contract.base import Reason


class SkippedFile(NamedTuple):
    """A file as its row in the ledger has it. seen_at: Unix seconds. reason: why it was skipped."""

    id: int
    inbox: int
    path: bytes
    seen_at: float
    reason: str


class Missing(NamedTuple):
    """The files that are not there. hidden: how many of them may come back, and why this is so of the first."""

    deleted: list[SkippedFile]
    hidden: int = 0
    why: str = ""


def find_ignored(folder: Folder, files: Sequence[SkippedFile]) -> list[SkippedFile]:
    """Those that a scan would pass over. Touches no disk."""
    return [file for file in files if folder.ignored.hides(file.path)]


def find_deleted(folder: Folder, files: Sequence[SkippedFile]) -> Missing:
    """Look for the files; a file that cannot be looked for is there. The inbox is compared with what it was before the look
    and after it, as it may be unmounted in between. Runs in a thread. Raises OSError if it is away."""
    unmounted = find_unmounted(folder)
    missing = [file for file in files if _is_missing(folder, file)]
    why = [why_missing(folder, file.path, file.seen_at, unmounted) for file in missing]
    if missing and find_unmounted(folder) != unmounted:
        raise FolderAway(f"a mount in {os.fsdecode(folder.root)} came or went")
    deleted = [file for file, hidden in zip(missing, why, strict=True) if not hidden]
    return Missing(deleted, len(missing) - len(deleted), next(filter(None, why), ""))


def _is_missing(folder: Folder, file: SkippedFile) -> bool:
    if file.reason == Reason.UNPACKED and folder.settings.on_success != "keep":
        return False  # the daemon itself moved or deleted it
    try:
        os.lstat(os.path.join(folder.root, file.path))
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):  # a damaged path
        return False
    return False
