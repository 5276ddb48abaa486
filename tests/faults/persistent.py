"""One kind of system call keeps failing for a while in one folder of a running daemon. The daemon waits,
reports the reason once, and continues by itself. Sources that stay where they are because of EACCES
(docs/inboxes.md) are not tested here."""

from __future__ import annotations

import collections
import errno
import os
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.daemon_process import SLACK_SECONDS, Daemon, Place, counts_of, wait_for
from tests.faults.kill import INBOXES
from tests.faults.syscalls import Call, Supervisor

# of a network file system, or a pulled disk
MOUNT = ("ENOTCONN", "ETIMEDOUT", "EHOSTDOWN", "ESTALE", "ENODEV", "EREMOTEIO")
LACK = ("EMFILE", "ENFILE", "ENOMEM")
ROOM = ("ENOSPC", "EDQUOT", "EROFS", "EIO")
# By the folder: each call that is made there, and how it can fail.
KINDS: dict[str, dict[str, tuple[str, ...]]] = {
    "state": {"write": (*ROOM, "ETIMEDOUT", "ESTALE"), "fsync": ("EIO", "ENOSPC", "EDQUOT", "ETIMEDOUT")},
    "results": {
        "open": (*ROOM, *LACK, *MOUNT, "EACCES", "EAGAIN", "EINTR"),
        "write": (*ROOM, *MOUNT, "EAGAIN", "EINTR"),
        "rename": (*ROOM, *MOUNT, "EACCES"),
    },
    # once for all folders of a file system
    "": {"syncfs": ("EIO", "ENOSPC", "EDQUOT", "ETIMEDOUT", "ENOTCONN")},
    "inbox-": {
        "open": ("EIO", *LACK, *MOUNT, "EINTR"),
        "rename": (*ROOM, *MOUNT),
        "unlink": ("EROFS", "EIO", *MOUNT),
    },
    "done": {"rename": (*ROOM, *MOUNT), "open": ("EIO", *LACK, "ENOTCONN", "ETIMEDOUT")},
    "bins": {
        "open": (*ROOM, *LACK, *MOUNT, "EINTR"),
        "write": (*ROOM, *MOUNT),
        "fsync": ("EIO", "ENOSPC", "EDQUOT", "ETIMEDOUT"),
        "rename": (*ROOM, *MOUNT),
    },
}
INTERRUPTIONS = 20  # of a call: no call is interrupted for ever, and each is repeated at once
OBSERVED_SECONDS = 1.5
MOST_CALLS = 200  # failed calls in that time that are no busy loop: a few for each image
MOST_LINES = 12  # of the log in that time: each image may have one, and each folder
GOES_ON_SECONDS = 20.0  # a source that is held is tried again every 5 s or so
ENDED = os.EX_IOERR  # the system has lost accepted writes: the next daemon publishes again


class Fault(NamedTuple):
    folder: str
    call: str
    error: str

    @property
    def bins(self) -> str:
        """The settings with which such calls are made: with bins = "copy", a deleted source is moved there."""
        return "none" if self.folder == "inbox-" and self.call != "open" else "copy"

    def __str__(self) -> str:
        return f"{self.call} in {self.folder or 'any folder'}: {self.error}"


FAULTS = [
    Fault(folder, call, error)
    for folder, calls in KINDS.items()
    for call, errors in calls.items()
    for error in errors
]


@dataclass
class Tally:
    tried: int = 0
    # what the daemon did, by its kind
    endings: collections.Counter[str] = field(default_factory=collections.Counter)
    problems: list[str] = field(default_factory=list)


class Trial:
    """A place, and daemons that run there under a supervisor that makes the chosen calls fail."""

    def __init__(self, folder: Path, bins: str = "copy", **environment: str) -> None:
        inboxes = [{"name": name, "on_success": name, "settle_seconds": 0.1} for name in INBOXES]
        pipeline = {"retry_seconds": 0.2, "rescan_seconds": 0.5}
        self.place = Place(folder, {"inbox": inboxes, "output": {"bins": bins}, "pipeline": pipeline})
        self.tally = Tally()
        self._environment = environment
        self._dropped = 0
        self._fault: Fault | None = None
        self._struck = 0

    def run(self, faults: Iterator[Fault]) -> None:
        """Try each; a daemon that has ended is followed by another."""
        ended = False
        while rest := next(faults, None):
            with Supervisor(self.place.folder, self._decide) as supervisor:
                with Daemon(self.place, supervisor=supervisor.path, environment=self._environment) as daemon:
                    while rest and self._try(daemon, rest):
                        rest = next(faults, None)
                    ended = not daemon.alive()
                    if not ended and daemon.stop() != 0:
                        self.tally.problems.append("it did not end well")
        if ended:  # ended by the last fault: the next daemon publishes the rest
            self.place.run_once()
        self.tally.problems += self.place.judge().problems

    def _decide(self, call: Call) -> int:
        fault = self._fault
        inside = fault and call.path.startswith(os.fsencode(self.place.folder / fault.folder))
        if not fault or not inside or call.name != fault.call or call.path.endswith(b"-shm"):
            return 0
        self._struck += 1
        return (
            0 if fault.error == "EINTR" and self._struck > INTERRUPTIONS else int(getattr(errno, fault.error))
        )

    def _try(self, daemon: Daemon, fault: Fault) -> bool:
        """Whether the daemon is still alive."""
        told = len(daemon.log_text())
        self._struck, self._fault = 0, fault
        self._drop()
        wait_for(lambda: self._struck, f"a call that fails: {fault}")
        self.tally.tried += 1
        try:
            told_of = self._observe(daemon)
        finally:
            self._fault = None
        log = daemon.log_text()[told:]
        self._judge(fault, log, told_of, daemon.alive())
        if not daemon.alive():
            return False
        wait_for(
            lambda: not daemon.alive() or self._is_done(daemon),
            f"all done after {fault}",
            GOES_ON_SECONDS + SLACK_SECONDS,
        )
        return daemon.alive()

    def _drop(self) -> None:
        for name in INBOXES:
            self.place.drop_many(range(self._dropped, self._dropped + 1), name)
            self._dropped += 1

    def _observe(self, daemon: Daemon) -> bool:
        """Wait while it lasts; returns whether the status names a problem at its end."""
        started, seen = time.monotonic(), False
        while time.monotonic() - started < OBSERVED_SECONDS and daemon.alive():
            threading.Event().wait(0.1)
            try:
                seen = bool(daemon.status()["obstacles"])
            except OSError:  # it has just ended, or has no descriptor for us
                continue
        return seen

    def _judge(self, fault: Fault, log: str, told: bool, alive: bool) -> None:
        why = os.strerror(getattr(errno, fault.error))
        lines = log.count("\n")
        if fault.error == "EINTR":
            self.tally.endings["went on at once"] += 1
            return
        if not alive:
            self.tally.endings["ended, and the next went on"] += 1
            if fault.call != "syncfs" or "What is missing is published again" not in log:
                self.tally.problems.append(f"{fault}: it ended: {log[-500:]}")
            return
        self.tally.endings["waited and went on"] += 1
        named = (
            fault.error in log
            or why in log
            or (fault.folder == "state" and "ledger cannot be written" in log)
        )
        if not (named or told):
            self.tally.problems.append(f"{fault}: it does not say why: {log[-500:]}")
        if log.count('"paused"') > 1:
            self.tally.problems.append(f"{fault}: it says so more than once: {log[-800:]}")
        if lines > MOST_LINES:
            self.tally.problems.append(f"{fault}: {lines} lines of log: {log[-800:]}")
        if self._struck > MOST_CALLS:
            self.tally.problems.append(f"{fault}: {self._struck} calls in {OBSERVED_SECONDS} s")

    def _is_done(self, daemon: Daemon) -> bool:
        if counts_of(self.place) != {"DONE": self._dropped}:
            return False
        if any(any(self.place.inbox(name).iterdir()) for name in INBOXES if name != "keep"):
            return False
        status = daemon.status()
        return not (status["pending"] or status["in_flight"] or status["obstacles"])


def keep_failing(folder: Path, chance: random.Random, most: int) -> Tally:
    """A random sample of the faults."""
    some, total = chance.sample(FAULTS, min(most, len(FAULTS))), Tally()
    for bins in ("copy", "none"):
        if faults := [fault for fault in some if fault.bins == bins]:
            (folder / bins).mkdir()
            trial = Trial(folder / bins, bins)
            trial.run(iter(faults))
            total.tried += trial.tally.tried
            total.endings += trial.tally.endings
            total.problems += trial.tally.problems
    return total
