"""Takes published records to the sinks. Each sink follows the ledger's publications by itself: it has its own
place there and its own retries, and no sink waits for another one, nor does anything else wait for a sink.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import anyio
import structlog
from anyio import to_thread

from daemon.core.errors import VisiondError
from daemon.core.hints import command
from daemon.core.jobs import Change, JobStatus
from daemon.ledger import publications
from daemon.ledger.ledger import Ledger
from daemon.ledger.publications import SinkPlace
from daemon.ledger.record import Record
from daemon.ledger.records import Reader
from daemon.monitoring.snapshot import SinkState, describe_behind
from daemon.results.damage import leave_out_damaged
from daemon.results.sinks import Sink, check_settings, describe_found

log = structlog.get_logger()

GROUP = 128  # records that a sink gets at once
# After a group, unless the next one is full: few full groups cost less than many small ones.
GATHER_SECONDS = 0.05
PAUSE_SECONDS = 1.0  # after the first failure; doubled after each further one
LONGEST_PAUSE_SECONDS = 60.0
LAST_TRIES = 3  # when the daemon ends
SILENT_SECONDS = 30.0  # that a sink may take for one group before this counts as a problem
DRAIN_SECONDS = 5.0  # that a daemon which stops waits for all sinks
RECENT = 4 * GROUP  # records in memory: reading one from the ledger costs about 0.1 ms
RECENT_BYTES = 16 << 20  # of their results; their sidecars may take as much again


class Recent:
    """The last records that were published, so that a sink that keeps up needs no reading of the ledger:
    at most RECENT, with at most RECENT_BYTES."""

    def __init__(self) -> None:
        # Without gaps in the numbers.
        self._records: deque[tuple[int, Record]] = deque()
        self._sizes: deque[int] = deque()  # of each, in bytes
        self._bytes = 0

    def add(self, records: Mapping[int, Record]) -> None:
        """records: by number."""
        for number, record in sorted(records.items()):
            if self._records and self._records[-1][0] != number - 1:
                self._records.clear()
                self._sizes.clear()
                self._bytes = 0
            self._records.append((number, record))
            self._sizes.append(size := record.result_bytes)
            self._bytes += size
            while len(self._records) > RECENT or self._bytes > RECENT_BYTES:
                self._records.popleft()
                self._bytes -= self._sizes.popleft()

    def after(self, number: int) -> list[tuple[int, Record]]:
        """The next records and their numbers, at most GROUP;
        none if the first of them is no longer here."""
        if not self._records or (start := number + 1 - self._records[0][0]) < 0:
            return []
        return list(itertools.islice(self._records, start, start + GROUP))


class Delivery:
    """One sink and its place among the publications."""

    def __init__(
        self,
        name: str,
        sink: Sink,
        place: SinkPlace,
        recent: Recent,
        ledger: Ledger,
        reader: Reader,
        note_changes: Callable[[Sequence[Change]], None],
    ) -> None:
        """note_changes: called with what became of images whose results are damaged."""
        self.name = name
        self.place = place
        self.last = place.number  # the highest number of a publication
        self._started_at = place.number
        self._earlier = 0  # the last number of earlier runs, until the sink has it
        self.done_before = 0  # images, if the sink is new
        self._sink = sink
        self._recent = recent
        self._ledger = ledger
        self._reader = reader
        self._note_changes = note_changes
        # What the sink has taken; the place in the ledger may still be behind it.
        self._accepted = place.number
        self._failure = ""  # why the last try failed
        self._called_at = math.inf  # monotonic seconds
        self._wake = anyio.Event()
        self._is_finishing = False
        self._tries_left = LAST_TRIES
        self._ended = anyio.Event()

    @property
    def behind(self) -> int:
        """How many records the sink does not have yet."""
        return self.last - self.place.number

    def problem(self) -> str:
        """Why the sink does not take records now, in a sentence; otherwise empty."""
        why = self._failure
        if not why and (silent := time.monotonic() - self._called_at) > SILENT_SECONDS:
            why = f"it has not answered for {silent:.0f} s"
        return describe_behind(self.name, self.behind, why)

    def state(self) -> SinkState:
        return SinkState(
            name=self.name,
            behind=self.behind,
            succeeded_at=self.place.succeeded_at,
            problem=self.problem(),
            earlier=0 if self.place.succeeded_at else self.done_before,
        )

    def note_earlier(self, last: int) -> None:
        """Note that earlier runs left records up to this number."""
        self._earlier = last if last > self._started_at else 0
        self.note_last(last)

    def note_last(self, last: int) -> None:
        """Note that there are records up to this number."""
        self.last = max(self.last, last)
        if not self._failure:  # else it is tried again when its pause is over
            self._wake.set()

    async def run(self) -> None:
        """Deliver until `finish` is called and the sink has everything, or fails."""
        pause = PAUSE_SECONDS
        while self.behind or not self._is_finishing:
            if not self.behind:
                await self._sleep(math.inf)
                continue
            try:
                await self._deliver()
            except Exception as error:  # noqa: BLE001 - whatever goes wrong in one output must stop nothing else
                self._fail(error)
                self._tries_left -= self._is_finishing
                if not self._tries_left:
                    break
                await self._sleep(PAUSE_SECONDS if self._is_finishing else pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            else:
                pause = PAUSE_SECONDS
                self._note_success()
                if self.behind < GROUP and not self._is_finishing:
                    await anyio.sleep(GATHER_SECONDS)
        self._ended.set()

    def _note_success(self) -> None:
        if self._failure:
            log.info("sink accepts records again", sink=self.name, after=self._failure)
            self._failure = ""
        if self._earlier and self.place.number >= self._earlier:
            log.info(
                "sink has received what earlier runs could not deliver",
                sink=self.name,
                records=self._earlier - self._started_at,
            )
            self._earlier = 0

    async def finish(self) -> None:
        """Wait until the sink has everything, fails LAST_TRIES times more, or takes too long for a group."""
        self._is_finishing = True
        self._wake.set()
        place = -1
        while not self._ended.is_set() and self.place.number != place:
            place = self.place.number
            with anyio.move_on_after(SILENT_SECONDS):
                await self._ended.wait()

    def give_up(self) -> None:
        """Note that this daemon delivers nothing more."""
        if self.behind and not self._failure:
            self._failure = "there was no time for the rest"

    async def _sleep(self, seconds: float) -> None:
        """Wait until there is something to do, for at most this long."""
        self._wake = anyio.Event()
        with anyio.move_on_after(seconds):
            await self._wake.wait()

    async def _deliver(self) -> None:
        """Give the sink its next records, then move its place:
        a crash in between repeats records and drops none."""
        records, number = await self._next_records()
        if records:
            await self._append(records)
        self._accepted = number
        self.place = await self._ledger.run(partial(publications.move, name=self.name, number=self._accepted))

    async def _next_records(self) -> tuple[list[Record], int]:
        """At most GROUP, and the number up to which there are no others."""
        if recent := self._recent.after(self._accepted):
            return [record for _, record in recent], recent[-1][0]
        last = self.last
        read = partial(self._reader.published_after, for_sinks=self.name not in publications.BY_PATH)
        found, number = await to_thread.run_sync(read, self._accepted, GROUP)
        sound, changes = await leave_out_damaged(self._ledger, list(found.values()))
        self._note_changes(changes)
        return sound, number if number > self._accepted else last

    async def _append(self, records: Sequence[Record]) -> None:
        self._called_at = time.monotonic()
        try:
            await self._sink.append(records)
        finally:
            self._called_at = math.inf

    def _fail(self, error: Exception) -> None:
        why = str(error) or type(error).__name__
        if not self._failure:
            event = "sink does not accept records; they are kept and tried again"
            log.error(event, sink=self.name, why=why, exc_info=not isinstance(error, OSError | VisiondError))
        self._failure = why


def _warn_of_new(sinks: Mapping[str, Sink], new: Sequence[str], done: int) -> None:
    """done: images that those that are new lack."""
    if done:
        event = "new sinks get images that finish from now on, and not what is DONE already"
        log.warning(event, sinks=new, done=done, fix=command("redo", "--all"))
    for sentence in describe_found(sinks, new):
        log.warning(sentence)


class Outbox:
    """All sinks that are configured, each with its delivery."""

    def __init__(self, deliveries: Sequence[Delivery] = (), recent: Recent | None = None) -> None:
        self.deliveries = deliveries
        self._recent = recent or Recent()
        self._drain_seconds = math.inf
        self._finishing: anyio.CancelScope | None = None

    @classmethod
    async def open(
        cls,
        ledger: Ledger,
        reader: Reader,
        sinks: Mapping[str, Sink],
        note_changes: Callable[[Sequence[Change]], None],
    ) -> Outbox:
        """Go on from each sink's place in the ledger; a new sink gets the records that are published from now on. Raises
        ConfigError."""
        check_settings(sinks.values())
        opened = await ledger.run(partial(publications.open_sinks, names=sinks.keys()))
        for name, records in opened.dropped.items():
            if records:
                log.warning(
                    "sink is no longer configured; it has not received its last records",
                    sink=name,
                    records=records,
                )
        places, recent = opened.places, Recent()
        deliveries = [
            Delivery(name, sink, places[name], recent, ledger, reader, note_changes)
            for name, sink in sinks.items()
        ]
        done = reader.counts()[JobStatus.DONE] if opened.added else 0
        for delivery in deliveries:
            delivery.note_earlier(opened.last)
            delivery.done_before = done if delivery.name in opened.added else 0
        _warn_of_new(sinks, opened.added, done)
        return cls(deliveries, recent)

    def add(self, records: Mapping[int, Record]) -> None:
        """Note that these records are published. records: by number."""
        self._recent.add(records)
        for delivery in self.deliveries:
            delivery.note_last(max(records))

    def note_renamed(self, last: int) -> None:
        """Note that images whose files were renamed have numbers up to this one."""
        for delivery in self.deliveries:
            if delivery.name in publications.BY_PATH:
                delivery.note_last(last)

    def problems(self) -> list[str]:
        """A sentence for each sink that does not take records now."""
        return [problem for delivery in self.deliveries if (problem := delivery.problem())]

    async def run(self) -> None:
        """Deliver until `finish` has been called."""
        async with anyio.create_task_group() as tasks:
            for delivery in self.deliveries:
                tasks.start_soon(delivery.run)

    async def finish(self) -> None:
        """Deliver what is left. A sink that fails or does not answer is given up; its
        records stay in the ledger. During a drain all sinks together have DRAIN_SECONDS."""
        with anyio.CancelScope() as self._finishing:
            self._limit()
            async with anyio.create_task_group() as tasks:
                for delivery in self.deliveries:
                    tasks.start_soon(delivery.finish)
        for delivery in self.deliveries:
            delivery.give_up()

    def drain(self, seconds: float = math.inf) -> None:
        """Limit the time that `finish` takes."""
        self._drain_seconds = min(seconds, DRAIN_SECONDS)
        self._limit()

    def _limit(self) -> None:
        if self._finishing and self._drain_seconds < math.inf:
            self._finishing.deadline = anyio.current_time() + self._drain_seconds
