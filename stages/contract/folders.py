"""Replaces and removes folders atomically, even if the process is killed."""

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
    """Replace the folder by `new`. Between the two renames only `restore_folder` finds the old one."""
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
    """Restore the old folder if a process was killed in `replace_folder`."""
    aside = name_aside(folder)
    if aside.exists() and not folder.exists():
        aside.replace(folder)


def sync_tree(folder: Path) -> None:
    """Flush everything in a folder to the disk, so that it survives a power failure together with its new name."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def sync(path: Path | bytes) -> None:
    """Flush a file's content, or a folder's entries. Raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def name_aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")
