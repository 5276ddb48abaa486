"""Kills a daemon while its worker hangs with the interpreter
lock held: the worker cannot notice that the daemon is gone."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.daemon_process import Daemon, Place, picture, wait_for

LOOKS = 8  # polls in a row that find the image in flight: any other is done after two


def kill_while_a_worker_hangs(folder: Path, rounds: int) -> int:
    """The number of processes that were left behind."""
    place = Place(
        folder,
        {"stages": {"ocr": {"options": {"fail": {"HANG": "hang"}}}}, "pipeline": {"max_attempts": 1000}},
    )
    left = 0
    for number in range(rounds):
        with Daemon(place) as daemon:
            place.drop(f"{number}.ppm", picture(number, b"HANG"))
            wait_hanging(daemon)
            assert daemon.workers()
            daemon.kill()
            orphans = place.orphans()
            left += len(orphans)
            for pid in orphans:
                os.kill(pid, signal.SIGKILL)
    return left


def wait_hanging(daemon: Daemon) -> None:
    looks = 0

    def stays() -> bool:
        nonlocal looks
        looks = looks + 1 if daemon.status()["in_flight"] else 0
        return looks >= LOOKS

    wait_for(stays, "an image that does not come back")
