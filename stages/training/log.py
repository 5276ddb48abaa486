"""A training's log, one JSON line for some steps each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec


def read_log(log: Path) -> list[dict[str, Any]]:
    """Empty when there is none. A last line without an end was torn by a kill or a full disk, and is passed over."""
    if not log.is_file():
        return []
    return [msgspec.json.decode(line) for line in log.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def cut_log(log: Path, step: int) -> None:
    """Drop what was logged after this step, all of it for 0."""
    kept = [entry for entry in read_log(log) if entry["step"] <= step]
    log.write_bytes(b"".join(msgspec.json.encode(entry) + b"\n" for entry in kept))
