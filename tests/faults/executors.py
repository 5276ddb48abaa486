"""Executors of a working daemon that are killed, or that hang, again and again."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

from tests.daemon_process import Daemon, Place, running, wait_for
from tests.faults.kill import Outcome, all_ready, drop_shares, end_orphans, open_place

EXECUTORS = 3
MOST_SECONDS = 0.4  # of work before the next kill


def executors_of(place: Place) -> list[int]:
    """Process ids of its executors."""
    return running("daemon.pipeline.child", place.processes())


def open_executors(folder: Path) -> Place:
    place = open_place(folder, workers=EXECUTORS)
    place.configure({"pipeline": {"executors": EXECUTORS}})
    return place


def kill_executors(folder: Path, kills: int, files: int, chance: random.Random) -> Outcome:
    """Sources stay, move or go, as their inbox says. After each kill all executors are ready again."""
    place, started = open_executors(folder), time.monotonic()
    with Daemon(place) as daemon:
        for number, _ in enumerate(drop_shares(place, kills, files)):
            if number < kills:
                threading.Event().wait(chance.uniform(0, MOST_SECONDS))
                os.kill(chance.choice(executors_of(place)), signal.SIGKILL)
                losses = number + 1
                wait_for(
                    lambda n=losses: (
                        len(list(daemon.events("executor lost", cause="killed by SIGKILL"))) == n
                    ),
                    "its loss",
                )
                daemon.wait_until(all_ready, "its successor")
        daemon.wait_idle(files, 240)
        wait_for(lambda: len(executors_of(place)) == EXECUTORS, "all executors again")
        lost = len(list(daemon.events("executor lost")))
        assert daemon.stop() == 0
    seconds = time.monotonic() - started
    return Outcome(kills, end_orphans(place), place.judge(), seconds, {"seen by the daemon": lost})


def kill_workers(folder: Path, kills: int, files: int, chance: random.Random) -> Outcome:
    """Workers of any executor. After each kill its successor is ready."""
    place, started = open_executors(folder), time.monotonic()
    with Daemon(place) as daemon:

        def count_ready() -> int:
            return len(list(daemon.events("worker ready")))

        for number, _ in enumerate(drop_shares(place, kills, files)):
            if number < kills:
                threading.Event().wait(chance.uniform(0, MOST_SECONDS))
                ready = count_ready()
                os.kill(chance.choice(sorted(daemon.workers())), signal.SIGKILL)
                wait_for(lambda ready=ready: count_ready() > ready, "its successor")
        daemon.wait_idle(files, 240)
        assert daemon.stop() == 0
    return Outcome(kills, end_orphans(place), place.judge(), time.monotonic() - started, {})


def stop_an_executor(folder: Path, files: int) -> Outcome:
    """One executor is stopped by a signal while it works: the others go on, and it is replaced."""
    place, started = open_executors(folder), time.monotonic()
    with Daemon(place) as daemon:
        for _ in drop_shares(place, 0, files):
            pass
        before = daemon.wait_until(lambda s: s["ended_in_this_run"] > files // 10, "work")
        os.kill(executors_of(place)[0], signal.SIGSTOP)
        stopped = time.monotonic()
        daemon.wait_until(
            lambda s: s["ended_in_this_run"] > before["ended_in_this_run"] + files // 10, "work of the others"
        )
        others = time.monotonic() - stopped
        daemon.wait_event("executor lost")
        daemon.wait_idle(files, 120)
        assert daemon.stop() == 0
    figures = {"s until the others had done a tenth of all": others}
    return Outcome(1, end_orphans(place), place.judge(), time.monotonic() - started, figures)
