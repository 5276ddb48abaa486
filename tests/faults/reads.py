"""Reads and writes of a working daemon fail at random: of the ledger with its -wal and -shm, of the results, and of the
inboxes. It pauses, names the disk and goes on; a ledger that is sound is never called damaged."""

from __future__ import annotations

import collections
import errno
import os
import random
import threading
import time
from pathlib import Path
from typing import NamedTuple

from tests import checker
from tests.daemon_process import PATIENCE, Daemon, Place, counts_of, wait_for
from tests.faults.kill import INBOXES
from tests.faults.syscalls import Call, Supervisor

ERRORS = (errno.EIO, errno.ENOSPC, errno.ENOMEM)
# Where calls fail, and which. A failed syncfs ends the daemon by design: it is left out.
TARGETS = {
    b"state/ledger.sqlite": ("read", "stat", "open", "write", "fsync", "truncate"),
    b"results": ("read", "stat", "open", "write", "rename"),
    b"inbox-": ("list", "stat", "open", "read"),
    b"done": ("stat", "rename"),
}
SHARES = (0.1, 0.5, 1.0)  # of these calls
MOST_SECONDS = 1.7  # that one fault lasts
PAUSE_SECONDS = 0.1  # between two shares of files
DROPPED = 2  # files in each


class Outcome(NamedTuple):
    faults: int
    failed: collections.Counter[str]  # calls, by name
    endings: list[int]  # exit statuses of daemons that ended by themselves
    named: int  # faults during which the status named a disk
    verdict: checker.Verdict

    def __str__(self) -> str:
        calls = ", ".join(f"{count} × {name}" for name, count in sorted(self.failed.items()))
        return (
            f"{self.faults} faults ({calls}), {self.named} of them in the status; ends: {self.endings or 0}; "
            f"{sum(self.verdict.counts.values())} images ({self.verdict.counts['DONE']} DONE), "
            f"{len(self.verdict.problems)} violations{''.join(self.verdict.problems[:5])}"
        )


class Trouble:
    """Decides which calls fail now."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.failed: collections.Counter[str] = collections.Counter()
        self._folder, self._chance = os.fsencode(folder) + b"/", chance
        self._now: tuple[bytes, tuple[str, ...], float, int] | None = None

    def begin(self) -> None:
        place = self._chance.choice(list(TARGETS))
        calls = self._chance.choice([TARGETS[place], TARGETS[place][:1], TARGETS[place][:2]])
        self._now = place, calls, self._chance.choice(SHARES), self._chance.choice(ERRORS)

    def end(self) -> None:
        self._now = None

    def decide(self, call: Call) -> int:
        if not (now := self._now):
            return 0
        place, calls, share, error = now
        if call.name not in calls or not call.path.startswith(self._folder + place):
            return 0
        if self._chance.random() >= share:
            return 0
        self.failed[call.name] += 1
        return error


def fail_reads(folder: Path, chance: random.Random, seconds: float) -> Outcome:
    """Let files arrive and calls fail for this long; then all that has arrived must be done without help."""
    inboxes = [{"name": name, "on_success": name, "settle_seconds": 0.1} for name in INBOXES]
    # Many attempts: an image that cannot be read for seconds is not to blame.
    pipeline = {"rescan_seconds": 0.5, "retry_seconds": 0.2, "max_attempts": 100}
    place = Place(folder, {"inbox": inboxes, "pipeline": pipeline, "output": {"sinks": ["jsonl"]}})
    trouble, endings, dropped, faults, named = Trouble(folder, chance), [], 0, 0, 0
    until = 0.0  # counts from the first daemon that is ready
    while not until or time.monotonic() < until:
        with Supervisor(folder, trouble.decide, reads=True) as supervisor:
            with Daemon(place, supervisor=supervisor.path) as daemon:
                until = until or time.monotonic() + seconds
                while time.monotonic() < until and daemon.alive():
                    trouble.begin()
                    faults, over, told = (
                        faults + 1,
                        time.monotonic() + chance.uniform(0.1, MOST_SECONDS),
                        False,
                    )
                    while time.monotonic() < over and daemon.alive():
                        for number in range(dropped, dropped + DROPPED):
                            place.drop_many(range(number, number + 1), INBOXES[number % len(INBOXES)])
                        dropped += DROPPED
                        threading.Event().wait(PAUSE_SECONDS)
                        told = told or _names_a_disk(daemon)
                    named += told
                    trouble.end()
                    threading.Event().wait(PAUSE_SECONDS)
                if daemon.alive():
                    wait_for(
                        lambda daemon=daemon, files=dropped: (
                            not daemon.alive() or _is_done(place, daemon, files)
                        ),
                        "the rest",
                        2 * PATIENCE,
                    )
                endings += [daemon.stop()] if daemon.alive() else [daemon.wait_end()]
                if endings[-1]:
                    print(daemon.log_text()[-3000:])
    return Outcome(faults, trouble.failed, [status for status in endings if status], named, place.judge())


def _names_a_disk(daemon: Daemon) -> bool:
    try:
        return bool(daemon.status()["obstacles"])
    except OSError:  # it has just ended
        return False


def _is_done(place: Place, daemon: Daemon, files: int) -> bool:
    """Whether each has its result, and each source that leaves its inbox has left it."""
    left = place.rows("SELECT COUNT(*) FROM image WHERE NOT emitted")[0][0]
    status = daemon.status()
    busy = status["pending"] or status["in_flight"] or status["obstacles"]
    return counts_of(place) == {"DONE": files} and not (left or busy)
