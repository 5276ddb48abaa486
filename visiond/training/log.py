"""The progress of a training: a log with a JSON line for every few steps, and a bar on a terminal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


def read_log(log: Path) -> list[dict[str, Any]]:
    """The lines of a log; empty if there is none. A last line without a newline is incomplete and ignored."""
    if not log.is_file():
        return []
    return [
        msgspec.json.decode(line)
        for line in log.read_bytes().splitlines(keepends=True)
        if line.endswith(b"\n")
    ]


def cut_log(log: Path, step: int) -> None:
    """Remove the lines after this step; all lines for 0."""
    kept = [entry for entry in read_log(log) if entry["step"] <= step]
    log.write_bytes(b"".join(msgspec.json.encode(entry) + b"\n" for entry in kept))


class ProgressBar:
    """A bar, if the output is a terminal."""

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
