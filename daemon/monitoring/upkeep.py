"""upkeep.json in the state folder: when each upkeep task last ran, and how it ended."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from daemon.config.state import UPKEEP
from daemon.monitoring.snapshot import UpkeepRun


def read_upkeep(folder: Path) -> list[UpkeepRun]:
    """Empty if the file is missing or unreadable; then every task runs again."""
    with contextlib.suppress(OSError, msgspec.DecodeError, msgspec.ValidationError):
        return msgspec.json.decode((folder / UPKEEP).read_bytes(), type=list[UpkeepRun])
    return []


def write_upkeep(folder: Path, runs: Iterable[UpkeepRun]) -> None:
    """Write the file completely or not at all. Raises OSError."""
    partial = folder / f".{UPKEEP}.partial"
    with partial.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(list(runs))) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / UPKEEP)
