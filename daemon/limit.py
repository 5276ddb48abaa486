"""`run --once --limit N`: which images are taken, and when all of them are finished."""

from __future__ import annotations

from collections.abc import Iterable

from daemon.jobs import Ending, Job, JobStatus


class Limit:
    """The first N images, each with all its attempts."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken: set[int] = set()
        self._ended = 0
        self.postponed: set[int] = set()  # the taken ones that wait for a retry

    @property
    def room(self) -> int:
        """How many more may be taken."""
        return self._limit - len(self._taken)

    @property
    def left(self) -> int:
        """How many more images must finish to reach the limit."""
        return self._limit - self._ended

    @property
    def is_over(self) -> bool:
        """Whether no more images may be taken. Those in flight may still be postponed."""
        return not (self.room or self.postponed)

    def take(self, jobs: Iterable[Job]) -> None:
        taken = {job.id for job in jobs}
        self._taken |= taken
        self.postponed -= taken

    def take_back(self, job: Job) -> None:
        """It is taken once more later, or another in its place."""
        self._taken.discard(job.id)

    def leave(self, ending: Ending) -> None:
        if ending.status is JobStatus.PENDING:
            self.postponed.add(ending.job.id)
        else:
            self._ended += 1
