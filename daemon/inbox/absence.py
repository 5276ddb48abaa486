"""Inboxes whose images cannot be read for now because their mount or disk has gone away.
The images themselves are fine."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from daemon.config.loading import Config, find_shared_folders
from daemon.errors import ConfigError
from daemon.inbox.origin import origin_of
from daemon.jobs import Ending, Failure, Job
from daemon.system.mounts import ask, describe_missing

log = structlog.get_logger()

REST_SECONDS = 5.0  # between tries with a few images
TRIES = 3  # after these, `run --once` no longer waits
TRY_SECONDS = 120.0  # after which a try is taken for lost, with the station that made it


def check_inboxes(config: Config) -> None:
    """Raises ConfigError when an inbox does not exist. It is not created, because that might hide a missing mount.
    Also when folders that must be apart are not, through links or mounts. Raises MissingLibrary."""
    there = [(inbox, origin_of(inbox.root).is_there()) for inbox in config.inbox]
    for inbox in [inbox for inbox, answer in there if answer is None]:
        log.warning(
            "inbox does not answer; its mount may be dead; other inboxes are processed", path=inbox.place
        )
    if missing := [inbox.path for inbox, answer in there if answer is False]:
        raise ConfigError([describe_missing(path) for path in missing])
    if problems := ask(lambda: find_shared_folders(config)):
        raise ConfigError(problems)


class Judge(Protocol):
    def failed(self, job: Job, failure: Failure, now: float) -> Ending:
        """Another attempt, or FAILED."""


@dataclass(slots=True)
class _Absence:
    why: str
    until: float  # monotonic seconds
    tries: int
    is_tried: bool = False  # images are being read to see whether it is back


class Absences:
    """Which inboxes are away, as shown by reading their images. While one is away,
    few of its images are tried. Logged once."""

    def __init__(self, roots: Mapping[int, bytes]) -> None:
        self._roots = roots
        self._absent: dict[int, _Absence] = {}

    def note(self, jobs: Sequence[Job]) -> None:
        """Note whether these jobs could be read."""
        failed = {job.inbox: job.failure.detail for job in jobs if job.failure and job.failure.away}
        some_read = {job.inbox for job in jobs if job.digest}
        # If others of the group could not be read, as while a store throttles, it is not back yet.
        for inbox in (some_read - failed.keys()) & self._absent.keys():
            log.info("inbox can be read again", path=os.fsdecode(self._roots[inbox]))
            del self._absent[inbox]
        for inbox, why in failed.items():
            if inbox not in self._absent:
                log.warning(
                    "images of an inbox cannot be read; they wait",
                    path=os.fsdecode(self._roots[inbox]),
                    error=why,
                )
            known, now = self._absent.get(inbox), time.monotonic()
            if known is None or known.is_tried or now >= known.until:  # else they belong to the last try
                tries = known.tries + 1 if known and inbox not in some_read else 1
                self._absent[inbox] = _Absence(why, now + REST_SECONDS, tries)
        for absence in [self._absent[inbox] for inbox in {job.inbox for job in jobs} & self._absent.keys()]:
            if absence.is_tried:  # its images are gone, or to blame themselves: others are tried
                absence.until, absence.is_tried = time.monotonic(), False

    def keep(self, hidden: Sequence[Job], endings: list[Ending], judge: Judge) -> None:
        """Let these images wait, instead of being GONE: `endings` gets other entries for them."""
        self.note(hidden)
        kept = {job.id: judge.failed(job, job.failure, time.time()) for job in hidden if job.failure}
        endings[:] = [kept.get(ending.job.id, ending) for ending in endings]

    def begin(self, inboxes: Collection[int]) -> None:
        """Images of these inboxes are handed out. If one is away, no more follow until they have been read: a store may
        answer late, and other inboxes must not wait for it."""
        for absence in [self._absent[inbox] for inbox in inboxes if inbox in self._absent]:
            absence.until, absence.is_tried = time.monotonic() + TRY_SECONDS, True

    def resting(self) -> set[int]:
        """The inboxes that should not be tried now."""
        now = time.monotonic()
        return {inbox for inbox, absence in self._absent.items() if now < absence.until}

    def lasting(self) -> set[int]:
        """The inboxes that have been tried often enough for `run --once` to end."""
        return {inbox for inbox, absence in self._absent.items() if absence.tries >= TRIES}

    def away(self) -> set[int]:
        return set(self._absent)

    def held_back(self) -> list[str]:
        return [
            f"images of inbox {os.fsdecode(self._roots[inbox])} cannot be read: {absence.why}; they wait"
            for inbox, absence in self._absent.items()
        ]
