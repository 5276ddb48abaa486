"""Kills the daemon at random moments while it unpacks archives, and lets the checker judge each member and each
archive."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from typing import Any

from tests.daemon.unpacking.containers import make_zip
from tests.daemon_process import Daemon, Place, picture
from tests.faults.kill import INBOXES, Outcome, end_orphans, let_work

MEMBERS = 8  # of an archive
DAMAGED = 5  # of so many archives, one has a member that cannot be read
GIVE_UP_SECONDS = 2.0  # on the next archive
LATENCY_SECONDS = 0.002  # of an image, so that members wait while archives arrive


def open_place(folder: Path) -> Place:
    inboxes: list[dict[str, Any]] = [
        {"name": name, "on_success": name, "settle_seconds": 0.1, "unpack": ["zip"]} for name in INBOXES
    ]
    latency = {"blip": {"options": {"latency_per_image_seconds": LATENCY_SECONDS}}}
    return Place(folder, {"inbox": inboxes, "stages": latency, "pipeline": {"rescan_seconds": 0.5}})


def drop_archive(place: Place, number: int) -> int:
    """Drop one into the inbox whose turn it is; returns how many members can be read."""
    inbox = INBOXES[number % len(INBOXES)]
    members = {f"{index}.ppm": picture(MEMBERS * number + index) for index in range(MEMBERS)}
    data = bytearray(make_zip(members))
    if not number % DAMAGED:
        del members["0.ppm"]
        data[50] ^= 0xFF  # in the bytes of the first
    for name, content in members.items():
        place.expect_contents(f"{number}.zip.unpacked/{name}", content, inbox)
    place.drop(f"{number}.zip", bytes(data), inbox)
    return len(members)


def let_unpack(place: Place, seconds: float) -> None:
    """Wait until a folder has got its name, and then this long: its members may not have rows yet."""
    before, deadline, pause = count_folders(place), time.monotonic() + GIVE_UP_SECONDS, threading.Event()
    while count_folders(place) == before and time.monotonic() < deadline:
        pause.wait(0.001)
    pause.wait(seconds)


def count_folders(place: Place) -> int:
    return sum(name.endswith(".unpacked") for inbox in INBOXES for name in os.listdir(place.inbox(inbox)))


def kill_while_unpacking(folder: Path, kills: int, archives: int, chance: random.Random) -> Outcome:
    """Drop archives in shares, kill the daemon during each, let the last one finish, and judge."""
    started = time.monotonic()
    place, files, orphans, busy = open_place(folder), 0, 0, 0
    for kill in range(kills):
        for number in range(archives * kill // kills, archives * (kill + 1) // kills):
            files += drop_archive(place, number)
        with Daemon(place, ready=chance.random() < 0.5) as daemon:
            if chance.random() < 0.5:
                let_work(daemon.process, chance.uniform(0, 1.0))
            else:
                let_unpack(place, chance.uniform(0, 0.05))
            daemon.kill(group=chance.random() < 0.5)
            orphans += end_orphans(place)
        if place.has_ledger():
            busy += place.rows("SELECT COUNT(*) FROM image WHERE status = 0 AND priority > 5000000")[0][0] > 0
    with Daemon(place) as daemon:
        daemon.wait_until(
            lambda s: s["done"] >= files and not s["pending"] and not s["in_flight"], "the rest", 300
        )
        assert daemon.stop() == 0
    figures: dict[str, float] = {"with archives that waited": busy}
    return Outcome(kills, orphans, place.judge(), time.monotonic() - started, figures)
