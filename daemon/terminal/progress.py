"""A progress bar on stderr with rate and remaining time; without a terminal, a line every ten seconds."""

from __future__ import annotations

import sys
import time
from types import TracebackType

import rich.progress
from rich.console import Console

from daemon.monitoring.snapshot import Snapshot
from daemon.system.log import print_line

LINE_SECONDS = 10.0


class Progress:
    """Progress over a number of things that is known from the start or grows."""

    def __init__(self, unit: str, total: int | None = None, *, shown: bool = True) -> None:
        self._unit = unit
        self._total = total
        self._started = self._lined_at = time.monotonic()
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
        self._loading = ""  # the last line about it
        self.notices: dict[str, str] = {}  # of the daemon's stages, from its last snapshot
        self.outdated = ""  # a sentence about results of earlier models, from its last snapshot

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    @property
    def seconds(self) -> float:
        """Since the work began; for a daemon, since its models were loaded."""
        return time.monotonic() - self._started

    def step(self, done: int, total: int | None = None, *, note: str = "") -> None:
        """Show that `done` of `total` things are done. note: text to show beside it."""
        total = total or self._total
        rate = done / self.seconds if self.seconds else 0.0
        note = f", {note}" if note else ""
        if self._bar:
            self._bar.update(
                self._task, completed=done, total=total, rate=f"{rate:,.1f} {self._unit}/s{note}"
            )
        elif self._shown and time.monotonic() - self._lined_at >= LINE_SECONDS:
            self._lined_at = time.monotonic()
            of = f" of {total}" if total else ""
            left = f", {(total - done) / rate:.0f} s to go" if total and rate else ""
            print_line(f"{done}{of} {self._unit}, {rate:,.1f}/s{left}{note}")

    def show(self, snapshot: Snapshot) -> None:
        """Show the daemon's progress since it started."""
        ended, self.notices = snapshot.ended_in_this_run, snapshot.notices
        self.outdated = snapshot.outdated_sentence()
        if snapshot.loading:
            self.load(snapshot.left_in_this_run, snapshot.loading_sentence())
        else:
            note = ", ".join(filter(None, (snapshot.some_loading(), snapshot.looks_sentence())))
            self.step(ended, ended + snapshot.left_in_this_run, note=note)

    def load(self, waiting: int, sentence: str) -> None:
        """Show what is still to happen before the first thing is done, in the bar, or as a line for each step: loading
        takes seconds to minutes, which do not count for the rate."""
        if self._bar:
            self._bar.update(self._task, total=waiting or None, rate=sentence)
        elif self._shown and sentence != self._loading:
            print_line(sentence)
        self._loading = sentence
        self._started = time.monotonic()
