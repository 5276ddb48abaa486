"""What a training tells of itself: a log, one JSON line for some steps each, and a bar on a terminal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


def read_log(log: Path) -> list[dict[str, Any]]:
    """Empty when there is none. A last line without an end was torn by a kill or a full disk, and is passed over."""
    if not log.is_file():
        return []
    return [msgspec.json.decode(line) for line in log.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def cut_log(log: Path, step: int) -> None:
    """Drop what was logged after this step, all of it for 0."""
    kept = [entry for entry in read_log(log) if entry["step"] <= step]
    log.write_bytes(b"".join(msgspec.json.encode(entry) + b"\n" for entry in kept))


class ProgressBar:
    """A bar on a terminal; nothing elsewhere."""

    def __init__(self, name: str, shown: bool) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>5.1f}%"))
        console = Console(stderr=True)
        self.progress = Progress(*columns, TimeRemainingColumn(), console=console, disable=not shown)
        self.task = self.progress.add_task(name, total=1.0)

    def __enter__(self) -> Callable[[float], Any]:
        self.progress.start()
        return lambda done: self.progress.update(self.task, completed=min(done, 1.0))

    def __exit__(self, *_: object) -> None:
        self.progress.stop()
