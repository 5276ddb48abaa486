"""Makes one system call after another fail, each in a separate daemon: it must report the failure or recover,
and never report anything wrong."""

from __future__ import annotations

import collections
import errno
import os
import random
from dataclasses import dataclass, field
from pathlib import Path

from tests.daemon_process import Place
from tests.faults.kill import INBOXES
from tests.faults.syscalls import Call, Supervisor

FAULTS = dict.fromkeys(("open", "fsync", "syncfs", "rename", "unlink", "truncate"), errno.EIO)
FAULTS |= dict.fromkeys(("write", "mkdir", "link"), errno.ENOSPC)


@dataclass
class Tally:
    failed: collections.Counter[str] = field(default_factory=collections.Counter)  # calls, by name
    endings: collections.Counter[str] = field(default_factory=collections.Counter)  # how the daemon ended
    problems: list[str] = field(default_factory=list)


def count_calls(folder: Path) -> int:
    """About how many calls can fail: the order of threads is not always the same."""
    place = make_place(folder)
    with Supervisor(folder, lambda call: 0) as supervisor:
        assert place.run_once(supervisor=supervisor.path).returncode == 0
    return sum(concerns(place, call) for call in supervisor.calls)


def make_place(folder: Path) -> Place:
    """An image for each thing that may happen to a source."""
    folder.mkdir()
    inboxes = [{"name": name, "on_success": name, "settle_seconds": 0.1} for name in INBOXES]
    place = Place(folder, {"inbox": inboxes, "output": {"bins": "copy"}})
    for number, name in enumerate(INBOXES):
        place.drop_many(range(number, number + 1), name)
    return place


def concerns(place: Place, call: Call) -> bool:
    """Whether the call is on the ledger, the results or the images."""
    return call.path.split(os.fsencode(place.folder) + b"/")[1].startswith(
        (b"state", b"results", b"inbox", b"done", b"bins")
    )


def fail_call(folder: Path, number: int, tally: Tally) -> None:
    """Make the call with this number fail once; then let another daemon do the rest."""
    place = make_place(folder)
    struck: list[Call] = []

    def decide(call: Call) -> int:
        nonlocal number
        number -= concerns(place, call)
        if number == -1 and not struck:
            struck.append(call)
            return FAULTS[call.name]
        return 0

    with Supervisor(folder, decide) as supervisor:
        first = place.run_once(supervisor=supervisor.path)
    if not struck:
        return
    where = f"{struck[0]} failed with {os.strerror(FAULTS[struck[0].name])}"
    tally.failed[struck[0].name] += 1
    if first.returncode == 0:
        tally.endings["paused and went on" if '"paused"' in first.stderr else "went on"] += 1
        tally.problems += [f"{where}, it exited 0, and {problem}" for problem in place.judge().problems]
    else:
        tally.endings["ended with a message"] += 1
        said = any(word in first.stderr for word in ("visiond:", '"level": "warning"', '"level": "error"'))
        if not said or "Traceback" in first.stderr:
            tally.problems.append(
                f"{where}: it ended with status {first.returncode} and {first.stderr[-500:]}"
            )
        if place.has_ledger():
            false = [
                line
                for line in place.judge(finished=False).problems
                if "without a sidecar" in line or "integrity" in line
            ]
            tally.problems += [f"{where}: a false DONE: {line}" for line in false]
    if place.run_once().returncode:
        tally.problems.append(f"{where}: the next daemon did not mend it")
    tally.problems += [f"{where}, and then {problem}" for problem in place.judge().problems]


def fail_calls(folder: Path, chance: random.Random, most: int) -> Tally:
    """Make each call fail or, if a number is given, a random sample of this size."""
    total = count_calls(folder / "count")
    tally = Tally()
    for number in sorted(chance.sample(range(total), min(most, total))):
        fail_call(folder / str(number), number, tally)
    return tally
