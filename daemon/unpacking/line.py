"""The line of files that are to be unpacked: which one comes next, and when to ask the ledger for it."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import anyio

from daemon.jobs import Job
from daemon.ledger.ledger import Ledger
from daemon.ledger.waiting import has_containers
from daemon.limit import Limit
from daemon.system.retry import Retry

PAUSE_SECONDS = 1.0  # between two questions
PAUSE_SHARE, LONGEST_PAUSE_SECONDS = 20, 5.0  # at least so many times as long as the answer took; at most


class Source(Protocol):
    """What a line needs of the pipeline."""

    ledger: Ledger
    retry: Retry
    limit: Limit | None
    found_all: bool
    in_flight: dict[int, Job]

    def answering(self) -> set[int]: ...
    def must_wait(self, job: Job) -> bool: ...
    def take(self, job: Job) -> bool: ...


class Line:
    """Several tasks may wait for the next file; one of them asks."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._asking = anyio.Lock()
        self._woken = anyio.Event()
        self._is_closed = False

    def close(self) -> None:
        """Nothing comes any more."""
        self._is_closed = True

    def wake(self) -> None:
        """There may be more."""
        self._woken.set()

    async def has_more(self) -> bool:
        """Whether files wait that can be unpacked in this run."""
        if not self._has_room():
            return False
        source = self._source
        work = partial(has_containers, inboxes=source.answering())
        answer: bool = await source.retry("ledger", source.ledger.run, work)
        return answer

    async def next(self) -> Job:
        """Wait for the next file. It is in work from then on."""
        async with self._asking:
            while True:
                self._woken = anyio.Event()  # before the question, so that no answer in between is missed
                asked_at = anyio.current_time()
                if job := await self._find():
                    return job
                # With many images that are to be processed again the answer takes long, and the ledger has other work.
                answered_in = anyio.current_time() - asked_at
                await anyio.sleep(min(LONGEST_PAUSE_SECONDS, PAUSE_SHARE * answered_in))
                with anyio.move_on_after(PAUSE_SECONDS):
                    await self._woken.wait()

    async def _find(self) -> Job | None:
        source, limit = self._source, self._source.limit
        if not self._has_room():
            return None
        jobs = await source.retry(
            "ledger",
            source.ledger.next_jobs,
            1,
            source.in_flight,
            source.answering(),
            None if limit is None or limit.room else limit.postponed,
            containers=True,
        )
        if not jobs:
            return None
        if source.must_wait(jobs[0]):  # an earlier version of the same file is in work
            source.ledger.read_again()
            return None
        source.take(jobs[0])
        if limit:
            limit.take(jobs)
        return jobs[0]

    def _has_room(self) -> bool:
        """With a limit, none until all files are found: the highest priority comes first."""
        limit = self._source.limit
        return not self._is_closed and (limit is None or (self._source.found_all and not limit.is_over))
