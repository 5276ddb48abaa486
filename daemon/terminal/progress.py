"""A progress bar on stderr with rate and remaining time; without a terminal, a line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import rich.progress
from rich.console import Console

from daemon.monitoring.snapshot import Snapshot
from daemon.system.log import print_line

LINE_SECONDS = 10.0
LATE_SECONDS = 0.5  # what takes no longer than this mostly needs no bar
WAIT_SECONDS = 0.1  # between two updates about something without a number

Thing = TypeVar("Thing")


class Progress:
    """Progress over a number of things that is known from the start or grows."""

    def __init__(self, unit: str, total: int | None = None, *, after: float = 0.0) -> None:
        """after: seconds for which there is no bar yet."""
        self._unit = unit
        self._total = total
        self._started = self._lined_at = time.monotonic()
        self._waited_at = 0.0
        self._bar: rich.progress.Progress | None = None
        if sys.stderr.isatty():
            self._bar = rich.progress.Progress(
                rich.progress.BarColumn(),
                rich.progress.MofNCompleteColumn(),
                rich.progress.TextColumn("{task.fields[rate]}"),
                rich.progress.TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task(unit, total=total, rate="")
        self._bar_at = time.monotonic() + after
        self._loading = ""  # the last line about it
        self.notices: dict[str, str] = {}  # of the daemon's stages, from its last snapshot
        self.outdated = ""  # a sentence about results of earlier models, from its last snapshot

    def __enter__(self) -> Progress:
        if self._bar and time.monotonic() >= self._bar_at:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    @property
    def seconds(self) -> float:
        """Since the work began; for a daemon, since its models were loaded."""
        return time.monotonic() - self._started

    def begin(self, unit: str, total: int | None = None) -> None:
        """Something else is done from now on: its rate and its remaining time begin again."""
        self._unit, self._total, self._started = unit, total, time.monotonic()
        if self._bar:
            self._bar.reset(self._task, total=total, rate="")

    def wait(self, sentence: str) -> bool:
        """Show that something goes on whose end cannot be foreseen. May be called often. Returns true."""
        now = time.monotonic()
        if self._bar and now - self._waited_at >= WAIT_SECONDS:
            self._waited_at = now
            self._draw(total=None, rate=f"{sentence}, {self.seconds:.0f} s")
        elif not self._bar:
            self._print(f"{sentence}, {self.seconds:.0f} s")
        return True

    def _print(self, line: str) -> None:
        """Unless there was one a moment ago."""
        if time.monotonic() - self._lined_at >= LINE_SECONDS:
            self._lined_at = time.monotonic()
            print_line(line)

    def track(self, things: Iterable[Thing]) -> Iterator[Thing]:
        """The same things, each counted when the next one is asked for."""
        for done, thing in enumerate(things, 1):
            yield thing
            self.step(done)

    def step(self, done: int, total: int | None = None, *, note: str = "") -> None:
        """Show that `done` of `total` things are done. note: text to show beside it."""
        total = total or self._total
        total = max(done, total) if total else None  # what was counted before may have grown
        rate = done / self.seconds if self.seconds else 0.0
        note = f", {note}" if note else ""
        if self._bar:
            self._draw(completed=done, total=total, rate=f"{rate:,.1f} {self._unit}/s{note}")
        else:
            of = f" of {total:,}" if total else ""
            left = f", {(total - done) / rate:.0f} s to go" if total and rate else ""
            self._print(f"{done:,}{of} {self._unit}, {rate:,.1f}/s{left}{note}")

    def show(self, snapshot: Snapshot) -> None:
        """Show the daemon's progress since it started."""
        ended, self.notices = snapshot.ended_in_this_run, snapshot.notices
        self.outdated = snapshot.outdated_sentence()
        if snapshot.loading:
            self.load(snapshot.left_in_this_run, snapshot.loading_sentence())
        else:
            note = ", ".join(filter(None, (snapshot.some_loading(), snapshot.looks_sentence())))
            self.step(ended, ended + snapshot.left_in_this_run, note=note)

    def _draw(self, **fields: Any) -> None:
        """Change the bar, and begin to show it when it is time."""
        assert self._bar
        self._bar.update(self._task, **fields)
        if not self._bar.live.is_started and time.monotonic() >= self._bar_at:
            self._bar.start()

    def load(self, waiting: int, sentence: str) -> None:
        """Show what is still to happen before the first thing is done, in the bar, or as a line for each step: loading
        takes seconds to minutes, which do not count for the rate."""
        if self._bar:
            self._bar_at = 0.0  # there is something to say at once
            self._draw(total=waiting or None, rate=sentence)
        elif sentence != self._loading:
            print_line(sentence)
        self._loading = sentence
        self._started = time.monotonic()
