"""The coordinator of an Annotator's executor: hands out the images of calls, and answers each call when all of its
images are finished.

It stands where the daemon has its pipeline and its ledger (see `JobSource` in daemon/pipeline/executor.py). Jobs
are made from the names and bytes that a caller passes, and nothing is stored: an image that a crash interrupts is
passed again by whoever called.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from msgspec.structs import replace

from daemon.core.jobs import GONE, Content, Ending, Extent, Failure, Job, JobStatus, Read, Version
from daemon.core.slab import Slab
from daemon.ledger.record import Committed, Model, Record
from daemon.pipeline.executor import Published
from daemon.results.destinations import Destination, Publication
from daemon.system.clock import steady_seconds
from stages.contract.base import Reason

FEED = 64  # jobs handed out together
LOOK_SECONDS = 1.0  # between two looks whether a call was stopped
NOTHING = Publication([], {}, set(), [])

Known = Mapping[bytes, Content]  # what is known about bytes, by their digests
NONE_KNOWN: Known = MappingProxyType({})
# The name, and one of: the bytes, the error of reading them, or the reason why there is no result.
Image = tuple[str | bytes, bytes | OSError | Failure]


def _size_of(data: bytes | OSError | Failure) -> int:
    return 0 if isinstance(data, OSError | Failure) else len(data)


class Call:
    """The images of one call. Only `Calls` uses it; `wait` is for the thread that called."""

    def __init__(self, root: bytes, known: Known, stopped: Callable[[], object]) -> None:
        self.root, self.known, self.stopped = root, known, stopped
        self.endings: dict[int, Ending] = {}  # by the place of the image, until the call has yielded them
        self.left = 0  # images that are not finished


class Calls:
    """Takes images from threads, and gives them to an executor as jobs.

    held_bytes: a thread that passes more waits until enough of its images are finished. One image may be larger.
    """

    def __init__(self, models: Sequence[Model], held_bytes: int) -> None:
        self.roots: dict[int, bytes] = {}  # the folder or prefix of names, by the number of an inbox
        self.error: BaseException | None = None  # why no call can be answered any more
        self._loop = asyncio.get_running_loop()
        self._models = {model.stage: model for model in models}
        self._most_bytes = held_bytes
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()  # guards everything below
        self._held_bytes = 0
        self._data: dict[int, bytes | OSError | Failure] = {}  # by job
        self._places: dict[int, tuple[Call, int]] = {}  # by job: its call, and its place there
        self._fresh: deque[Job] = deque()
        self._again: list[tuple[float, int, Job]] = []  # a heap: not before, number, job
        self._offered = asyncio.Event()
        self._woken = False

    # The side of the threads that call.

    def answer(
        self,
        images: Iterable[Image],
        root: bytes = b"",
        known: Known = NONE_KNOWN,
        stopped: Callable[[], object] = bool,
    ) -> Iterator[tuple[int, Record]]:
        """The place of each image and its record, as it ends, until all have ended or `stopped` is true. Raises the error of
        the workers, after the records that there are."""
        call = Call(root, known, stopped)
        inbox = self._number_of(root)
        try:
            for place, (name, data) in enumerate(images):
                self._offer(call, place, inbox, os.fsencode(name), data)
                yield from self._take(call)
                if stopped() or (self.error and call.left):
                    break
            over: object = False
            while not over:
                with self._changed:
                    self._wait(lambda: call.endings or self._is_over(call))
                    over = self._is_over(call)
                yield from self._take(call)  # also those that ended just before it was over
            if call.left and self.error:
                raise self.error
        finally:
            self._forget(call)

    def _is_over(self, call: Call) -> object:
        return not call.left or self.error or call.stopped()

    def _take(self, call: Call) -> list[tuple[int, Record]]:
        """Those that have ended since the last time."""
        with self._changed:
            endings, call.endings = call.endings, {}
        return [(place, self._record(ending)) for place, ending in endings.items()]

    def _wait(self, is_over: Callable[[], object]) -> None:
        """With a timeout: the handler of a signal wakes nobody who waits (PEP 475), and a stage that hangs does not either."""
        while not self._changed.wait_for(is_over, LOOK_SECONDS):
            pass

    def _offer(
        self, call: Call, place: int, inbox: int, name: bytes, data: bytes | OSError | Failure
    ) -> None:
        size = _size_of(data)
        with self._changed:
            call.left += 1
            self._wait(
                lambda: (
                    self.error
                    or call.stopped()
                    or not self._held_bytes
                    or self._held_bytes + size <= self._most_bytes
                )
            )
            if self.error:
                return
            job = Job(next(self._numbers), inbox, name, b"", Version(0, size, 0, 0), 0, time.time())
            self._held_bytes += size
            self._data[job.id], self._places[job.id] = data, (call, place)
            self._fresh.append(job)
            if not self._woken:
                self._woken = True
                self._loop.call_soon_threadsafe(self._offered.set)

    def _forget(self, call: Call) -> None:
        """Drop what is left of a call that was given up: its images still run, but nobody waits for them."""
        if call.left:
            with self._changed:
                for job in [job for job, (owner, _) in self._places.items() if owner is call]:
                    self._drop(job)

    def _drop(self, job: int) -> None:
        self._held_bytes -= _size_of(self._data.pop(job))
        del self._places[job]

    def _number_of(self, root: bytes) -> int:
        with self._changed:
            number = next((number for number, known in self.roots.items() if known == root), len(self.roots))
            self.roots[number] = root
            return number

    def _record(self, ending: Ending) -> Record:
        models = [self._models[stage] for stage in ending.content.outputs]
        return Record.of(ending, self.roots[ending.job.inbox], models)

    def fail(self, error: BaseException) -> None:
        """No image will be finished any more: every call raises this error."""
        with self._changed:
            self.error = error
            self._changed.notify_all()

    # The side of the executor.

    async def next_jobs(self, executor: object) -> list[Job]:
        """Wait for images of calls, or for one whose pause before another attempt is over."""
        while True:
            with self._changed:
                now = steady_seconds()
                while self._again and self._again[0][0] <= now:
                    self._fresh.append(heapq.heappop(self._again)[2])
                jobs = [self._fresh.popleft() for _ in range(min(FEED, len(self._fresh)))]
                jobs = [job for job in jobs if job.id in self._places]
                if jobs:
                    return jobs
                self._woken = False
                self._offered.clear()
                pause = self._again[0][0] - now if self._again else None
            try:
                await asyncio.wait_for(self._offered.wait(), pause)
            except TimeoutError:
                continue

    def read(self, jobs: Sequence[tuple[Job, Extent]], slab: Slab) -> dict[int, Read]:
        """Copy each job's bytes into its extent. Runs in a thread."""
        return {job.id: self._copy(job.id, slab.window(extent)) for job, extent in jobs}

    def _copy(self, image: int, window: memoryview) -> Read:
        data = self._data.get(image)
        if data is None:  # its call was given up
            return GONE
        if isinstance(data, Failure):
            return Read(failure=data)
        if isinstance(data, OSError):
            why = data.strerror or str(data) or type(data).__name__
            return Read(failure=Failure(Reason.UNREADABLE, why))
        window[: len(data)] = data
        return Read(hashlib.sha256(data).digest())

    async def note_read(self, read: Mapping[int, Read]) -> dict[int, Content]:
        """As far as the call knows it from before."""
        with self._changed:
            calls = {job: self._places[job][0] for job in read if job in self._places}
        found = {job: call.known.get(read[job].digest) for job, call in calls.items()}
        return {job: content for job, content in found.items() if content}

    async def keep(self, contents: Sequence[Content]) -> None:
        """Nothing is stored between segments."""

    async def blame(self, image: int, deaths: int) -> None:
        """The job itself counts its deaths."""

    async def end(self, endings: Sequence[Ending]) -> Committed:
        """Answer the calls. A job that gets another attempt begins again after its pause."""
        with self._changed:
            for ending in endings:
                job = ending.job
                if job.id not in self._places:
                    continue
                if ending.status is JobStatus.PENDING:
                    again = replace(job, attempts=ending.attempts)
                    heapq.heappush(self._again, (ending.not_before, job.id, again))
                    self._offered.set()
                    continue
                call, place = self._places[job.id]
                call.endings[place] = ending
                call.left -= 1
                self._drop(job.id)
            self._changed.notify_all()
        return Committed(list(endings), set(), {})

    def publish(self, records: Sequence[Record], destinations: Mapping[int, Destination]) -> Publication:
        """The rows go to the caller, and no file is written."""
        return NOTHING

    async def note_published(self, group: Published) -> None:
        pass

    def let_go(self, images: Sequence[int]) -> None:
        """The executor is drained only when no call waits."""
