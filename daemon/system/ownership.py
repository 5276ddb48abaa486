"""Whose files are those that root makes in folders of a daemon's account?"""

from __future__ import annotations

import os
from pathlib import Path


def hand_over(made: Path) -> None:
    """Run by root: give a file or folder that was just made to the owner of the folder that it is in, who could not
    use it otherwise. Raises OSError."""
    if os.geteuid() == 0:
        folder = made.parent.stat()
        # A link is not followed: the owner of the folder could make it lead to a file of root's.
        os.chown(made, folder.st_uid, folder.st_gid, follow_symlinks=False)


def make_folder(folder: Path) -> None:
    """With folders above it, for its owner only, if there is none; its owner is that of the folder above it. Raises OSError."""
    if not folder.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        hand_over(folder)
