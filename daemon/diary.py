"""What upkeep was done when, and how it ended: a small file in the state folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from daemon.snapshot import Chore
from daemon.state import DIARY


def read_diary(folder: Path) -> list[Chore]:
    """Nothing where there is no such file, or none that can be read: then everything is done again."""
    with contextlib.suppress(OSError, msgspec.DecodeError, msgspec.ValidationError):
        return msgspec.json.decode((folder / DIARY).read_bytes(), type=list[Chore])
    return []


def write_diary(folder: Path, chores: Iterable[Chore]) -> None:
    """Whole or not at all. Raises OSError."""
    partial = folder / f".{DIARY}.partial"
    with partial.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(list(chores))) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / DIARY)
