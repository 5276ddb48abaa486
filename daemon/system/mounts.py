"""The file systems of inboxes: whether one answers, and whether it sends events."""

from __future__ import annotations

import os
import re
import shlex
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from daemon.system.scarcity import PASSING

T = TypeVar("T")

ANSWER_SECONDS = 2.0  # after that a folder is reported as not answering
NETWORK_FILE_SYSTEMS = re.compile(
    rb"nfs\d?|cifs|smb\d?|smbfs|9p|afs|ceph|glusterfs|lustre|beegfs|gpfs|fuse\..*|virtiofs|vboxsf"
)


def is_there(folder: Path) -> bool | None:
    """Whether the folder exists; None if its file system does not answer in time, or with an error that may pass."""

    def look() -> bool | None:
        try:
            os.stat(folder)
        except OSError as error:
            return None if error.errno in PASSING else False
        return os.path.isdir(folder)

    return ask(look)


def ask(look: Callable[[], T]) -> T | None:
    """What a function finds that looks at files; None if their file system does not answer in time,
    as with a dead network mount."""
    answers: list[T] = []
    thread = threading.Thread(target=lambda: answers.append(look()), name="look", daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    return answers[0] if answers else None


def describe_missing(inbox: Path) -> str:
    """Why an inbox is not a folder, and the fix."""
    if os.path.lexists(inbox) and not os.path.islink(inbox):
        return f"inbox {inbox} is a file; it must be the folder that images are dropped into."
    return (
        f"inbox {inbox} does not exist; create it ({shlex.join(['mkdir', '-p', str(inbox)])}), or mount it."
    )


def is_network_mount(path: Path) -> bool:
    """Whether a folder is on a network file system, which sends no events for changes by other machines."""
    mounts = []
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        fields, _, kind = line.partition(b" - ")
        mounts.append((fields.split()[4].decode("unicode_escape").encode("latin-1"), kind.split()[0]))
    target = os.fsencode(path.resolve())
    holding = [
        mount
        for mount in mounts
        if mount[0] == b"/" or target == mount[0] or target.startswith(mount[0] + b"/")
    ]
    return bool(holding and NETWORK_FILE_SYSTEMS.fullmatch(max(holding, key=lambda mount: len(mount[0]))[1]))
