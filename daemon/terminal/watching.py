"""`visiond status --watch`: the state of the daemon, drawn again and again in place; without a terminal, line by line."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from daemon.core.errors import NotAnswering, NotRunning
from daemon.core.hints import quantity
from daemon.core.notices import list_notices
from daemon.monitoring.snapshot import Snapshot, StageState, WorkerState
from daemon.system.signals import interruptible
from daemon.terminal.display import make_table, print_json, printable

RATE_SECONDS = 10.0  # over which the rates of stages are measured
DRAW_SECONDS = 1.0  # between two pictures on a terminal
LINE_SECONDS = 10.0  # between two lines elsewhere
MEBIBYTE = 1 << 20

State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class Observation:
    """What is known at one moment. absence: why there is no answer from a daemon, in a sentence; empty: it answers.
    snapshot: without a daemon, what the ledger has, or what the daemon said last. seen_at: when it was asked for, in
    Unix seconds: it stays the same as long as nothing new is known. rates: of each stage."""

    snapshot: Snapshot
    seen_at: float
    absence: str
    rates: dict[str, StageRate]

    def json(self) -> dict[str, Any]:
        """The snapshot, and how old it is."""
        known: dict[str, Any] = msgspec.to_builtins(self.snapshot)
        return known | {"seen_at": round(self.seen_at, 3), "absence": self.absence}


@dataclass(frozen=True, slots=True)
class StageRate:
    images_per_second: float
    seconds_per_image: float | None  # None: it had no image meanwhile


class StatusPoller:
    """Looks at the daemon again and again, also while it is gone."""

    def __init__(
        self,
        ask: Callable[[], Snapshot],
        read: Callable[[], Snapshot],
        clock: Callable[[], float] = time.monotonic,
        date: Callable[[], float] = time.time,
    ) -> None:
        """ask: the running daemon; raises NotRunning. read: the ledger, which may take seconds."""
        self._ask, self._read, self._clock, self._date = ask, read, clock, date
        self._seen_at = 0.0
        self._past: deque[tuple[float, Snapshot]] = deque()
        self._left: Snapshot | None = None  # what there is to show while there is no daemon
        self._gone_at = ""

    def look(self) -> Observation:
        """Raises VisiondError if there is neither a daemon nor a readable ledger."""
        try:
            snapshot = self._ask()
        except NotAnswering:
            shown = self._past[-1][1] if self._past else self._read_ledger()
            return Observation(shown, self._seen_at, "The daemon does not answer now; it may be busy.", {})
        except NotRunning:
            return self._look_without_daemon()
        self._left, self._gone_at, self._seen_at = None, "", self._date()
        return Observation(snapshot, self._seen_at, "", self._measure(snapshot))

    def _look_without_daemon(self) -> Observation:
        """The ledger is read once: nobody writes to it now."""
        if self._left is None:
            if self._past:
                self._gone_at = f" since {time.strftime('%H:%M:%S')}"
            self._left = self._read_ledger()
            self._past.clear()
        absence = f"No daemon is running{self._gone_at}. This goes on when one starts."
        return Observation(self._left, self._seen_at, absence, {})

    def _read_ledger(self) -> Snapshot:
        snapshot = self._read()
        self._seen_at = self._date()
        return snapshot

    def _measure(self, snapshot: Snapshot) -> dict[str, StageRate]:
        now = self._clock()
        if self._past and snapshot.uptime_seconds < self._past[-1][1].uptime_seconds:  # another daemon
            self._past.clear()
        self._past.append((now, snapshot))
        while now - self._past[0][0] > RATE_SECONDS:
            self._past.popleft()
        then, first = self._past[0]
        before = {stage.name: stage for stage in first.stages}
        return {
            stage.name: _rate_between(before[stage.name], stage, now - then)
            for stage in snapshot.stages
            if stage.name in before and now > then
        }


def _rate_between(before: StageState, after: StageState, seconds: float) -> StageRate:
    images = after.images - before.images
    return StageRate(images / seconds, (after.seconds - before.seconds) / images if images else None)


def watch(watcher: StatusPoller, *, every: float | None = None, as_json: bool = False) -> None:
    """Show what `watcher` sees until Ctrl-C or SIGTERM. every: seconds between two looks; None: one second on a terminal,
    ten elsewhere. as_json: print each snapshot as a line of JSON. Raises VisiondError."""
    # SIGTERM is as Ctrl-C here: the cursor, which is hidden on a terminal, is shown again.
    with contextlib.suppress(KeyboardInterrupt), interruptible(signal.SIGINT, signal.SIGTERM) as check:
        if sys.stdout.isatty() and not as_json:
            _draw(watcher, every or DRAW_SECONDS, check)
        else:
            _write(watcher, every or LINE_SECONDS, check, as_json=as_json)


def _draw(watcher: StatusPoller, every: float, check: Callable[[], None]) -> None:
    screen = Console(highlight=False)
    with Live(console=screen, auto_refresh=False, vertical_overflow="ellipsis") as live:
        while True:
            live.update(picture(watcher.look()), refresh=True)
            check()
            time.sleep(every)


def _write(watcher: StatusPoller, every: float, check: Callable[[], None], *, as_json: bool) -> None:
    while True:
        view = watcher.look()
        if as_json:
            print_json(view.json())
        else:
            print(f"{time.strftime('%H:%M:%S')} {printable(line(view))}")
        sys.stdout.flush()
        check()
        time.sleep(every)


def line(view: Observation) -> str:
    """A view as one line of text."""
    if not view.absence:
        return view.snapshot.sentence()
    known = view.snapshot.sentence().removesuffix(f"; {view.snapshot.absence_sentence()}")
    return f"{view.absence.rstrip('.')}; {known}"


def picture(view: Observation) -> RenderableType:
    """A view as tables. The longest, that of the workers, comes last: it may be cut by a low terminal."""
    return Group(*_parts(view))


def _parts(view: Observation) -> Iterator[RenderableType]:
    now = view.snapshot
    yield _headline(view)
    if not view.absence and now.left_in_this_run:
        yield _bar(now)
    for problem in _problems(now):
        yield Text.from_markup(f"[yellow]{printable(problem)}[/yellow]")
    if (limit := now.limit.sentence()) and not view.absence:
        yield Text.from_markup(f"[dim]{printable(limit)}[/dim]")
    yield Text()
    counts = (now.pending, now.in_flight, now.done, now.failed, now.skipped, now.gone)
    names = ("pending", "in flight", "done", "failed", "skipped", "gone")
    yield make_table(names, [[f"{count:,}" for count in counts]])
    if view.absence:
        return
    for table in (_segments(now), _stages(view), _gpus(now), _sinks(now), _looks(now), _workers(now)):
        if table.row_count:
            yield Text()
            yield table


def _headline(view: Observation) -> Text:
    now = view.snapshot
    if view.absence:
        return Text.from_markup(f"[bold red]{printable(view.absence)}[/bold red]")
    rate = now.loading_sentence() if now.loading else f"{now.images_per_second:,.1f} images/s"
    parts = [
        f"[bold]{printable(rate)}[/bold]",
        f"{now.pending:,} pending",
        *filter(None, [now.some_loading()]),
    ]
    if now.eta_seconds is not None and now.left_in_this_run:
        parts.append(f"{timedelta(seconds=round(now.eta_seconds))} to go")
    running = f"running for {timedelta(seconds=round(now.uptime_seconds))}; Ctrl-C ends this view"
    return Text.from_markup(f"{', '.join(parts)}\n[dim]{running}[/dim]")


def _bar(now: Snapshot) -> RenderableType:
    """Of the images that this daemon has had, those that are finished."""
    total = now.ended_in_this_run + now.left_in_this_run
    grid = Table.grid(padding=(0, 1))
    grid.add_row(
        ProgressBar(total=total, completed=now.ended_in_this_run, width=40),
        f"{now.ended_in_this_run:,} of {total:,} since the start",
    )
    return grid


def _problems(now: Snapshot) -> list[str]:
    unread = (
        f"{quantity(now.unread_folders, 'folder')} in inboxes cannot be read; `visiond status` lists them"
    )
    failures = [run.failure for run in now.upkeep if run.failure]
    looks = [look.problem for look in now.second_looks if look.problem]
    return [
        *now.obstacles,
        *([unread] if now.unread_folders else []),
        *failures,
        *filter(None, [now.refusal_sentence()]),
        *looks,
        *filter(None, [now.outdated_sentence(), now.new_sinks_sentence()]),
        *list_notices(now.notices.items()),
    ]


def _segments(now: Snapshot) -> Table:
    of_segment = _group(now.workers, lambda worker: worker.name.rpartition("/")[0])
    return make_table(
        ("segment", "waiting", "workers ready", "slab"),
        (
            (
                segment.name,
                f"{segment.queued:,}",
                _ready(of_segment.get(segment.name, [])),
                _slab(now, number),
            )
            for number, segment in enumerate(now.segments)
        ),
    )


def _slab(now: Snapshot, number: int) -> str:
    """One slab serves all segments, so it stands in the first row."""
    if number:
        return ""
    return f"{now.slab_used_bytes / MEBIBYTE:,.0f} of {now.slab_size_bytes / MEBIBYTE:,.0f} MiB"


def _stages(view: Observation) -> Table:
    rows = []
    for stage in view.snapshot.stages:
        rate = view.rates.get(stage.name)
        spent = (
            f"{rate.seconds_per_image * 1000:,.2f}" if rate and rate.seconds_per_image is not None else "-"
        )
        speed = f"{rate.images_per_second:,.1f}" if rate else "-"
        rows.append((stage.name, speed, spent, f"{stage.images:,}", f"{stage.reused:,}"))
    return make_table(("stage", "images/s", "ms for each", "images", "reused"), rows)


def _gpus(now: Snapshot) -> Table:
    of_device = _group(now.workers, lambda worker: worker.device)
    return make_table(
        ("GPU", "name", "busy", "used MiB", "total MiB", "workers ready"),
        (
            (
                gpu.device,
                gpu.name,
                "-" if gpu.busy is None else f"{gpu.busy:.0%}",
                f"{gpu.used_bytes // MEBIBYTE:,}",
                f"{gpu.total_bytes // MEBIBYTE:,}",
                _ready(of_device.get(gpu.device, [])),
            )
            for gpu in now.gpus
        ),
    )


def _sinks(now: Snapshot) -> Table:
    return make_table(("sink", "records behind"), ((sink.name, f"{sink.behind:,}") for sink in now.sinks))


def _looks(now: Snapshot) -> Table:
    return make_table(
        ("second look", "waiting", "done", "failed"),
        ((look.name, f"{look.waiting:,}", f"{look.done:,}", f"{look.failed:,}") for look in now.second_looks),
    )


def _workers(now: Snapshot) -> Table:
    return make_table(
        ("worker", "device", "state", "batches", "host MiB", "GPU MiB", "last problem"),
        (
            (
                worker.name,
                worker.device + ", shared" * worker.shared,
                worker.progress,
                f"{worker.batches:,}",
                f"{worker.memory_bytes // MEBIBYTE:,}",
                f"{worker.gpu_bytes // MEBIBYTE:,}",
                worker.problem,
            )
            for worker in now.workers
        ),
    )


def _group(states: Iterable[State], key: Callable[[State], str]) -> dict[str, list[State]]:
    groups: dict[str, list[State]] = {}
    for state in states:
        groups.setdefault(key(state), []).append(state)
    return groups


def _ready(workers: list[WorkerState]) -> str:
    return f"{sum(worker.state == 'ready' for worker in workers)} of {len(workers)}"
