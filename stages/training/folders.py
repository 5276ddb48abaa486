"""Folders that are replaced and removed whole, whenever the process is killed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def remove_folder(folder: Path) -> None:
    aside = name_aside(folder)
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        folder.replace(aside)
        shutil.rmtree(aside, ignore_errors=True)


def replace_folder(folder: Path, new: Path) -> None:
    """Put `new` in the folder's place. Between the two renamings only `restore_folder` finds the old one."""
    restore_folder(folder)
    sync_tree(new)
    aside = name_aside(folder)
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        folder.replace(aside)
    new.replace(folder)
    sync(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def restore_folder(folder: Path) -> None:
    """Put back what a process that was killed in `replace_folder` has left aside."""
    aside = name_aside(folder)
    if aside.exists() and not folder.exists():
        aside.replace(folder)


def sync_tree(folder: Path) -> None:
    """Have all that is in a folder outlive a power failure, so that its new name is not all that does."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def sync(path: Path) -> None:
    """A file's content, or what names a folder has."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def name_aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")
