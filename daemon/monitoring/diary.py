"""upkeep.json in the state folder: when each upkeep task last ran, and how it ended."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from daemon.config.state import DIARY
from daemon.monitoring.snapshot import Chore


def read_diary(folder: Path) -> list[Chore]:
    """Empty if the file is missing or unreadable; then every task runs again."""
    with contextlib.suppress(OSError, msgspec.DecodeError, msgspec.ValidationError):
        return msgspec.json.decode((folder / DIARY).read_bytes(), type=list[Chore])
    return []


def write_diary(folder: Path, chores: Iterable[Chore]) -> None:
    """Write the file completely or not at all. Raises OSError."""
    partial = folder / f".{DIARY}.partial"
    with partial.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(list(chores))) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / DIARY)
