"""SIGTERM at random moments of a daemon's life: while it starts, scans, loads its models, works, and leaves."""

from __future__ import annotations

import collections
import hashlib
import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.checker import DONE
from tests.daemon_process import PATIENCE, Daemon, Place, picture, wait_for

LIFE_SECONDS = 4.0  # within which the signal comes
LOAD_SECONDS = 1.0  # of a fake model
SECONDS_PER_IMAGE = 0.002
PICTURES = 64  # different ones
REPEATED = 0.2  # share of the stops that a second signal follows


@dataclass
class Tally:
    statuses: collections.Counter[int] = field(default_factory=collections.Counter)
    phases: collections.Counter[str] = field(default_factory=collections.Counter)  # that the signal came in
    repeated: int = 0  # stops that a second signal followed
    slowest_seconds: float = 0.0  # from the signal to the end
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        phases = ", ".join(f"{count} at {phase}" for phase, count in self.phases.most_common())
        statuses = ", ".join(f"{count} × exit {status}" for status, count in self.statuses.items())
        return f"{self.statuses.total()} SIGTERMs ({phases}): {statuses}; {self.slowest_seconds:.1f} s the slowest"


def open_place(folder: Path, inboxes: int, entries: int) -> Place:
    """Inboxes with this many files each. They are copies of a few images, as only their number matters."""
    folder.mkdir()
    blip = {"latency_per_image_seconds": SECONDS_PER_IMAGE, "load_seconds": LOAD_SECONDS}
    tables = [{"name": f"n{number}", "settle_seconds": 0} for number in range(inboxes)]
    place = Place(
        folder, {"inbox": tables, "stages": {"blip": {"options": blip}}, "pipeline": {"reuse_results": False}}
    )
    pictures = [(data, hashlib.sha256(data).hexdigest()) for data in map(picture, range(PICTURES))]
    for name in place.dropped:
        for number in range(entries):
            data, digest = pictures[number % PICTURES]
            (place.inbox(name) / f"{number:05d}.ppm").write_bytes(data)
            place.expect(f"{number:05d}.ppm", digest, name)
    return place


def stop_daemons(place: Place, stops: int, chance: random.Random, tally: Tally) -> None:
    """Start a daemon and stop it at a random moment, again and again."""
    for number in range(stops):
        with Daemon(place, ready=False) as daemon:
            wait_for(
                lambda daemon=daemon: not daemon.alive() or obeys(daemon.process.pid), "its signal handlers"
            )
            let_live(daemon, chance.uniform(0, LIFE_SECONDS))
            phase, told = phase_of(daemon), time.monotonic()
            daemon.signal(signal.SIGTERM)
            if chance.random() < REPEATED:
                let_live(daemon, chance.uniform(0, 0.5))
                daemon.signal(signal.SIGTERM)
                tally.repeated += 1
            status = daemon.wait_end(PATIENCE)
            log = daemon.log_text()
        tally.slowest_seconds = max(tally.slowest_seconds, time.monotonic() - told)
        tally.statuses[status] += 1
        tally.phases[phase] += 1
        if status or "Traceback" in log or "Fatal" in log:
            tally.problems.append(f"stop {number}, at {phase}: exit {status}, {log[-600:]}")


def publish_rest(place: Place) -> None:
    """A second signal ends the daemon at once: what is DONE then is published by the next start that has time for it,
    and the last stop may have come before that."""
    rest = f"status = {DONE} AND NOT emitted"
    left = [row for (row,) in place.rows(f"SELECT id FROM image WHERE {rest}")] if place.has_ledger() else []
    if left:
        listed = ", ".join(map(str, left))
        with Daemon(place) as daemon:
            wait_for(
                lambda: not place.rows(f"SELECT 1 FROM image WHERE {rest} AND id IN ({listed})"),
                "the publication of what earlier daemons have left",
            )
            assert daemon.stop() == 0


def let_live(daemon: Daemon, seconds: float) -> None:
    try:
        daemon.process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def obeys(pid: int) -> bool:
    """Whether the process has a handler for SIGTERM: the interpreter takes a moment until our first line."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def phase_of(daemon: Daemon) -> str:
    log = daemon.log_text()
    if '"ready"' in log:
        return "work"
    return "scan and load" if os.path.lexists(daemon.place.folder / "state" / "control.sock") else "start"


def stop_at_any_moment(folder: Path, chance: random.Random, stops: int, entries: int) -> Tally:
    """Half of the stops with one inbox, half with ten."""
    tally = Tally()
    for inboxes in (1, 10):
        place = open_place(folder / str(inboxes), inboxes, entries)
        repeated = tally.repeated
        stop_daemons(place, stops // 2, chance, tally)
        if tally.repeated > repeated:
            publish_rest(place)
        if place.has_ledger():  # otherwise every stop came before there was one
            tally.problems += place.judge(finished=False).problems[:5]
    return tally
