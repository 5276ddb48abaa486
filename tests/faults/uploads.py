"""Kills the daemon, or the process that takes uploads, while programs upload images; and looks what became of every upload that
was acknowledged."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.daemon.server.client import Client, list_hidden, open_place, page_process
from tests.daemon_process import Daemon, Place, caption_of, picture, wait_for, with_pauses
from tests.faults.kill import end_orphans

INBOXES = ("keep", "move", "delete")
VICTIMS = ("page", "daemon", "group")
PROGRAMS = 4  # that upload at once
MOST_BETWEEN_KILLS = 60  # images
PAUSE_SECONDS = 0.05  # of a program that got no answer
PAUSES = {f"daemon.server.keeper.{name}": 0.05 for name in ("PAUSE_SECONDS", "LONGEST_PAUSE_SECONDS")}


@dataclass
class Programs:
    """Upload images until they are stopped; each repeats a request until it is acknowledged, as the documentation says."""

    place: Place
    stop: threading.Event = field(default_factory=threading.Event)
    accepted: dict[str, tuple[bytes, str]] = field(
        default_factory=dict
    )  # by address: the bytes, and the inbox
    repeated: int = 0
    refused: list[str] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def run(self) -> None:
        client = Client(self.place)
        while not self.stop.is_set():
            number = next(self._numbers)
            self._upload(client, number, INBOXES[number % len(INBOXES)])

    def _upload(self, client: Client, number: int, inbox: str) -> None:
        data = picture(number, bytes(random.Random(number).randrange(100_000)))
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                answer = client.post(data, f"inbox={inbox}&name={number}.ppm")
                if answer.status == 202:
                    self.accepted[answer.image["result"]] = data, inbox
                else:
                    self.refused.append(f"{number}: {answer.status} {answer.content}")
                return
            self.repeated += 1
            time.sleep(PAUSE_SECONDS)


@dataclass
class Outcome:
    kills: int
    accepted: int
    repeated: int
    orphans: int
    problems: list[str]
    seconds: float

    @property
    def kept(self) -> bool:
        return not self.problems and not self.orphans

    def __str__(self) -> str:
        return (
            f"{self.kills} kills, {self.accepted} uploads acknowledged, {self.repeated} requests repeated: "
            f"{len(self.problems)} without exactly one result, {self.orphans} orphan processes, in {self.seconds:.0f} s"
            + "".join(f"\n{problem}" for problem in self.problems[:5])
        )


def kill_while_uploading(folder: Path, kills: int, chance: random.Random) -> Outcome:
    """Every kill comes when some more uploads have been acknowledged since the last one, and others are under way."""
    started, victims = time.monotonic(), [*VICTIMS] * -(-kills // len(VICTIMS))
    chance.shuffle(victims)
    inboxes = [{"name": name, "on_success": name, "uploads": True, "settle_seconds": 0.1} for name in INBOXES]
    place = open_place(folder, {"inbox": inboxes, "pipeline": {"rescan_seconds": 0.5}})
    environment, programs = with_pauses(PAUSES), Programs(place)
    done = orphans = 0
    with ThreadPoolExecutor(PROGRAMS) as threads:
        running = [threads.submit(programs.run) for _ in range(PROGRAMS)]
        try:
            while done < kills:
                with Daemon(place, environment=environment) as daemon:
                    while done < kills and daemon.alive():
                        wanted = len(programs.accepted) + chance.randint(1, MOST_BETWEEN_KILLS)
                        wait_for(lambda wanted=wanted: len(programs.accepted) >= wanted, "more uploads")
                        time.sleep(chance.uniform(0, 0.02))
                        victim = victims[done]
                        if victim == "page" and (page := page_process(daemon.process.pid)):
                            os.kill(page, signal.SIGKILL)
                        else:
                            daemon.kill(group=victim == "group")
                        done += 1
                orphans += end_orphans(place) if not daemon.alive() else 0
            with Daemon(place, environment=environment) as daemon:
                programs.stop.set()
                for each in running:
                    each.result()
                daemon.wait_until(
                    lambda status: status["done"] >= len(programs.accepted) and not status["in_flight"],
                    "the rest",
                    240,
                )
                problems = [*programs.refused, *_ask(Client(place), programs)]
                # A killed process is a zombie for a while where no parent collects it at once.
                with contextlib.suppress(AssertionError):  # they are listed below
                    wait_for(lambda: not any(list_hidden(place, name) for name in INBOXES), "no rests", 20)
                assert daemon.stop() == 0
        finally:
            programs.stop.set()
    for data, inbox, path in _paths(programs):
        place.expect_contents(path, data, inbox)
    problems += place.judge().problems
    problems += [f"{path} is left of an upload" for name in INBOXES for path in list_hidden(place, name)]
    seconds = time.monotonic() - started
    return Outcome(
        done, len(programs.accepted), programs.repeated, orphans + end_orphans(place), problems, seconds
    )


def _paths(programs: Programs) -> list[tuple[bytes, str, str]]:
    """The bytes, the inbox and the path in it of each upload."""
    return [(data, inbox, address.rpartition("/")[2]) for address, (data, inbox) in programs.accepted.items()]


def _ask(client: Client, programs: Programs) -> list[str]:
    """At the address that was given for each upload."""
    problems = []
    for address, (data, _) in programs.accepted.items():
        answer = client.ask("GET", address)
        record = answer.content.get("record") if answer.status == 200 else None
        if not record or record["caption"]["text"] != caption_of(data):
            problems.append(f"{address}: {answer.status} {str(answer.content)[:200]}")
    return problems
