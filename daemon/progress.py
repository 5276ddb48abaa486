"""A progress bar on stderr with rate and time to go; without a terminal, a line now and then."""

from __future__ import annotations

import sys
import time
from types import TracebackType

import rich.progress
from rich.console import Console

from daemon.status import Snapshot

LINE_SECONDS = 10.0


class Progress:
    """A bar over a number of things that is known from the start, or grows."""

    def __init__(self, unit: str, total: int | None = None, *, shown: bool = True) -> None:
        self._unit = unit
        self._total = total
        self._started = time.monotonic()
        self._lined_at = self._started
        self._bar: rich.progress.Progress | None = None
        if shown and sys.stderr.isatty():
            self._bar = rich.progress.Progress(
                rich.progress.BarColumn(),
                rich.progress.MofNCompleteColumn(),
                rich.progress.TextColumn("{task.fields[rate]}"),
                rich.progress.TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task(unit, total=total, rate="")
        self._shown = shown

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def step(self, done: int, total: int | None = None) -> None:
        """So many are done by now, of so many."""
        total = total or self._total
        seconds = time.monotonic() - self._started
        rate = done / seconds if seconds else 0.0
        if self._bar:
            self._bar.update(self._task, completed=done, total=total, rate=f"{rate:,.1f} {self._unit}/s")
        elif self._shown and time.monotonic() - self._lined_at >= LINE_SECONDS:
            self._lined_at = time.monotonic()
            of = f" of {total}" if total else ""
            left = f", {(total - done) / rate:.0f} s to go" if total and rate else ""
            print(f"{done}{of} {self._unit}, {rate:,.1f}/s{left}", file=sys.stderr)

    def show(self, snapshot: Snapshot) -> None:
        """The daemon's progress since it started."""
        ended = snapshot.ended_in_this_run
        self.step(ended, ended + snapshot.pending)
