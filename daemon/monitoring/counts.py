"""How many images are in each state, without asking the ledger: metrics,
status and exit statuses all come from here. And what waits in each inbox, which the ledger counts now and then."""

from __future__ import annotations

import contextlib
import math
import sqlite3
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import anyio
from anyio import to_thread

from daemon.core.errors import VisiondError
from daemon.core.jobs import Admitted, Change, Ending, JobStatus, Waiting

COUNT_SECONDS = 0.5  # a scrape's wait for a count of what waits
LEAST_SECONDS = 1.0  # between two counts
REST = 50  # between two counts, as a multiple of what one takes
RATE_SECONDS = 30.0  # over which the pace is measured
MINUTES = 60  # whose counts are kept
FIRST_SECONDS = 3.0  # of other workers, in which little is finished


@dataclass(slots=True)
class Counts:
    """Begins with what the ledger held at the start, and follows each change."""

    states: Counter[JobStatus] = field(default_factory=Counter)  # images in the ledger by state
    ended: Counter[JobStatus] = field(default_factory=Counter)  # images that have left PENDING in this run
    # When the first of the images came that are PENDING now, in monotonic seconds, and how many were finished by then.
    began: tuple[float, int] = (0.0, 0)

    def begin(self, states: Mapping[JobStatus, int]) -> None:
        self.states.update(states)

    def of(self, status: JobStatus) -> int:
        """Images in this state. Events of one image may arrive out of order,
        so for a moment the sum can be below zero."""
        return max(0, self.states[status])

    @property
    def finished_in_this_run(self) -> int:
        """DONE and FAILED."""
        return self.ended[JobStatus.DONE] + self.ended[JobStatus.FAILED]

    def outcomes(self) -> Counter[JobStatus]:
        """The number of images that reached each state in this run, and of those that are PENDING."""
        return self.ended + Counter({JobStatus.PENDING: self.of(JobStatus.PENDING)})

    def admitted(self, admitted: Admitted) -> None:
        self._note_work()
        self.states[JobStatus.PENDING] += admitted.pending - admitted.replaced - admitted.results_kept
        self.states[JobStatus.DONE] += admitted.results_kept
        self.states[JobStatus.FAILED] -= admitted.failures_replaced
        self.states[JobStatus.GONE] += admitted.left - admitted.returned
        for status, images in ((JobStatus.SKIPPED, admitted.skipped), (JobStatus.GONE, admitted.replaced)):
            self.states[status] += images
            self.ended[status] += images

    def finished(self, ending: Ending) -> None:
        """An attempt has ended."""
        if ending.status is JobStatus.PENDING:
            return
        self.states[JobStatus.PENDING] -= 1
        if ending.is_repeat:  # its row is gone
            self.states[JobStatus.GONE] += ending.left or 0
            return
        self.states[JobStatus.DONE if ending.keeps_result else ending.status] += 1
        self.ended[ending.status] += not ending.keeps_result

    def put_back(self, status: JobStatus, images: int) -> None:
        """Images of this state are PENDING again."""
        self._note_work()
        self.states[JobStatus.PENDING] += images
        self.states[status] -= images

    def _note_work(self) -> None:
        """Images are about to be PENDING."""
        if not self.of(JobStatus.PENDING):
            self.began = (time.monotonic(), self.finished_in_this_run)

    def changed(self, changes: Sequence[Change]) -> None:
        """Images whose results are damaged are PENDING again or, if a newer version has replaced them, GONE."""
        for before, after in changes:
            self.states[before] -= 1
            self.states[after] += 1

    def pruned(self, status: JobStatus) -> None:
        """A row of this state was deleted. Of a file that FAILED only the newest version is counted,
        and that one stays."""
        self.states[status] -= status is not JobStatus.FAILED


class Pace:
    """How many images a second the workers that are ready now finish, over the last half minute at most.

    An idle time before, and the time in which the successor of a lost worker loads its models, say nothing about what is
    to come. In the first seconds after the workers have changed, each counts as much as one before did.
    """

    def __init__(self) -> None:
        # Monotonic seconds, and the images finished by then.
        self._samples: deque[tuple[float, int]] = deque()
        self._workers: Collection[object] = ()  # the ready ones
        self._each = 0.0  # images a second of each worker before them

    def measure(self, now: float, counts: Counts, workers: Collection[object]) -> float:
        """workers: the workers that are ready. Called every few seconds."""
        if workers != self._workers:
            if self._workers and self._samples:
                self._each = self._pace(self._samples[-1], counts) / len(self._workers)
            self._workers = workers
            self._samples.clear()
        self._samples.append((now, counts.finished_in_this_run))
        while now - self._samples[0][0] > RATE_SECONDS:
            self._samples.popleft()
        return self._pace(self._samples[-1], counts)

    def _pace(self, last: tuple[float, int], counts: Counts) -> float:
        (now, done), (then, before) = last, max(self._samples[0], counts.began)
        if now - then < FIRST_SECONDS and self._each:
            return self._each * len(self._workers)
        return (done - before) / (now - then) if self._workers and now > then else 0.0


class Hour:
    """How many images were finished in each of the last minutes. It begins with the daemon."""

    def __init__(self) -> None:
        self._minutes = deque([0], maxlen=MINUTES)  # the last one goes on
        self._minute: int | None = None
        self._finished = 0  # when it was noted last

    def note(self, now: float, finished: int) -> list[int]:
        """The counts, oldest first. now: monotonic seconds; finished: images so far. What was finished since the last call
        counts for this minute, so call it every few seconds."""
        minute = int(now // 60)
        passed = 0 if self._minute is None else minute - self._minute
        self._minutes.extend([0] * min(passed, MINUTES))
        self._minutes[-1] += finished - self._finished
        self._minute, self._finished = minute, finished
        return [*self._minutes]


class WaitingCount:
    """The images that wait, counted now and then: with a million of them that takes half a second."""

    def __init__(
        self, count: Callable[[], dict[int, Waiting]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """count: by inbox; called in a thread. Raises VisiondError, sqlite3.Error."""
        self._count, self._clock = count, clock
        self._last: dict[int, Waiting] = {}
        self._again_at = 0.0  # infinite while it is being counted
        self._has_begun = False

    async def count(self) -> dict[int, Waiting]:
        """The last count; waits COUNT_SECONDS at most for a new one, when it is time for that."""
        if self._clock() >= self._again_at:
            self._again_at, self._has_begun = math.inf, False
            try:
                with anyio.move_on_after(COUNT_SECONDS):
                    await to_thread.run_sync(self._count_again, abandon_on_cancel=True)
            finally:
                if not self._has_begun:  # no thread was free
                    self._again_at = self._clock()
        return self._last

    def _count_again(self) -> None:
        self._has_begun = True
        started = self._clock()
        try:
            with contextlib.suppress(VisiondError, sqlite3.Error):  # reported elsewhere
                self._last = self._count()
        finally:
            now = self._clock()
            self._again_at = now + max(LEAST_SECONDS, REST * (now - started))
