"""The progress of a training: a log with a JSON line for every few steps, curves, and a bar on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


def draw_curves(logs: Mapping[str, Path], picture: Path) -> None:
    """Plot each training's losses over its seconds, side by side, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(logs), 4), layout="tight")
    for axes, (model, log) in zip(figure.subplots(1, len(logs), squeeze=False)[0], logs.items(), strict=True):
        entries = [entry for entry in read_log(log) if "scores" not in entry]
        for name in entries[0]:
            if name in ("loss", "caption", "tag", "grounding") or name.startswith("train/"):
                axes.plot(
                    [entry["elapsed"] for entry in entries], [entry[name] for entry in entries], label=name
                )
        axes.set(title=model, xlabel="seconds", yscale="log")
        axes.legend()
    figure.savefig(picture)


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
