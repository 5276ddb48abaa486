"""Folders that are replaced and removed whole, whenever the process is killed."""

from __future__ import annotations

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
    aside = name_aside(folder)
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        folder.replace(aside)
    new.replace(folder)
    shutil.rmtree(aside, ignore_errors=True)


def restore_folder(folder: Path) -> None:
    """Put back what a process that was killed in `replace_folder` has left aside."""
    aside = name_aside(folder)
    if aside.exists() and not folder.exists():
        aside.replace(folder)


def name_aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")
