"""Sends signals at random moments while images are processed, and lets the checker judge the outcome."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncinotify import Inotify, Mask

from tests import checker
from tests.daemon_process import SLACK_SECONDS, Daemon, Place, meanwhile, running, wait_for
from tests.forked import Forked

INBOXES = ("keep", "move", "delete")  # one for each thing that may happen to a source
STARTS = 0.25  # share of the kills that may come while the daemon starts
# Of the fake captioner, so that kills interrupt work: a share takes longer than a busy machine takes to send a signal.
SECONDS_PER_IMAGE = 0.003
# delays of the fake model, for daemons that drain
LATENCIES = (0.0, 0.001, 0.01)
SLOWER = 2  # times SECONDS_PER_IMAGE, while workers are killed
DRAIN_SECONDS = 10.0
BETWEEN_DECODERS = 10  # images at most, from one that is killed to the next
BETWEEN_KILLS_SECONDS = 0.5  # under load
MOST_BACKLOG = 3_000  # images
DONE_PATHS = f"SELECT path FROM image WHERE status = {checker.DONE}"


@dataclass
class Outcome:
    kills: int
    orphans: int
    verdict: checker.Verdict
    seconds: float
    figures: dict[str, float]  # of this kind of kill

    @property
    def kept(self) -> bool:
        return not self.verdict.problems and not self.orphans

    def __str__(self) -> str:
        v = self.verdict
        figures = "".join(f", {value:.4g} {name}" for name, value in self.figures.items())
        return (
            f"{self.kills} kills{figures}; {sum(v.counts.values())} images ({v.counts['DONE']} DONE): "
            f"{len(v.lost)} lost, {len(v.double)} double, {len(v.torn)} torn, {len(v.wrong)} wrong, "
            f"{self.orphans} orphan processes after 5 s, in {self.seconds:.0f} s{''.join(v.problems[:5])}"
        )


def open_place(folder: Path, workers: int = 1, *, seconds_per_image: float = SECONDS_PER_IMAGE) -> Place:
    inboxes = [{"name": name, "on_success": name, "settle_seconds": 0.1} for name in INBOXES]
    latency = seconds_per_image * (SLOWER if workers > 1 else 1)
    settings = {
        "inbox": inboxes,
        "stages": {"blip": {"options": {"latency_per_image_seconds": latency}}},
        "pipeline": {"rescan_seconds": 0.5, "workers_per_device": workers},
    }
    return Place(folder, settings)


def kill_daemons(
    place: Place, kills: int, files: int, chance: random.Random, *, group: bool | None = None
) -> Outcome:
    """Drop files in shares, kill the daemon during each, let the last one finish, and judge. The moments are random,
    and spread evenly over one and a half times the time that a share takes.

    group: whether its children are killed too; None: at random.
    """
    started = time.monotonic()
    shares = drop_shares(place, kills, files)
    readings = Readings(place)
    orphans = under_load = 0
    next(shares)
    latency = place.settings["stages"]["blip"]["options"]["latency_per_image_seconds"]
    seconds_per_image = latency / place.settings["pipeline"]["workers_per_device"]
    for number in chance.sample(range(kills), kills):
        moment, at_start = (number + chance.random()) / kills, chance.random() < STARTS
        with Daemon(place, ready=not at_start) as daemon:
            busy = 1.5 * seconds_per_image * next(shares)
            let_work(daemon.process, moment * (1.0 if at_start else busy))
            daemon.kill(group=chance.random() < 0.5 if group is None else group)
            under_load += count_sidecars(place) < sum(map(len, place.dropped.values()))
            orphans += end_orphans(place)
        readings.count()
    finish(place, files)
    readings.count()
    verdict = place.judge()
    verdict.double += [f"{name} was DONE, and was read again" for name in readings.needless]
    figures = {
        "under load": under_load,
        "images read again at each": (readings.times.total() - files) / kills,
    }
    return Outcome(kills, orphans, verdict, time.monotonic() - started, figures)


def drain_daemons(place: Place, kills: int, files: int, chance: random.Random) -> Outcome:
    """The same with SIGTERM, with inboxes of any size, also empty ones, and models of any speed.
    Each daemon must exit 0, in time, with no work half done."""
    started = time.monotonic()
    shares = drop_shares(place, kills, files, chance)
    orphans, slowest, half_done = 0, 0.0, []
    next(shares)
    for _ in range(kills):
        latency = chance.choice(LATENCIES)
        place.configure({"stages": {"blip": {"options": {"latency_per_image_seconds": latency}}}})
        with Daemon(place) as daemon:
            let_work(
                daemon.process, chance.uniform(0, 0.1 + 1.5 * max(latency, SECONDS_PER_IMAGE) * next(shares))
            )
            told = time.monotonic()
            assert daemon.stop() == 0
            slowest = max(slowest, time.monotonic() - told)
            orphans += end_orphans(place)
        half_done += place.judge(finished=False).problems
    assert slowest < DRAIN_SECONDS + SLACK_SECONDS, f"a drain took {slowest:.1f} s"
    finish(place, files)
    verdict = place.judge()
    verdict.torn += half_done
    return Outcome(kills, orphans, verdict, time.monotonic() - started, {"s the slowest": slowest})


def kill_workers(place: Place, kills: int, waiting: int, chance: random.Random) -> Outcome:
    """One daemon with several workers, of which one at random is killed again and again. So many images wait each time: the
    slot of a worker that dies again and again without an answer is closed. The others' rate is measured."""
    started, dropped = time.monotonic(), 0
    calm, shaken = Rate(), Rate()
    with Daemon(place) as daemon:
        workers = len(daemon.workers())
        for number in range(kills):
            before = daemon.wait_until(all_ready, "all workers")
            wanted = before["ended_in_this_run"] + waiting
            place.drop_many(range(dropped, wanted), INBOXES[number % len(INBOXES)])
            dropped = max(dropped, wanted)
            least = before["ended_in_this_run"] + waiting // 30
            after = daemon.wait_until(
                lambda s, least=least: s["ended_in_this_run"] >= least and all_ready(s), "more work"
            )
            calm.add(before, after)
            shaken.add(kill_one(daemon, chance), daemon.wait_until(all_ready, "its successor"))
        daemon.wait_idle(dropped, 120)
        assert daemon.stop() == 0
    kept = shaken.per_second / calm.per_second * workers / (workers - 1)
    return Outcome(
        kills,
        end_orphans(place),
        place.judge(),
        time.monotonic() - started,
        {"of their rate kept by the others": kept},
    )


def kill_under_load(folder: Path, lives: int, kills: int, chance: random.Random) -> Outcome:
    """In each of some lives of a daemon, a ready worker is killed twice a second while files come faster than they are done,
    so that batches are sent to workers in the moment in which they die. One that loads is left alone: the daemon gives up
    if several in a row die before they answer, and a busy machine loads for longer than half a second."""
    started, ended, verdict = time.monotonic(), list[int](), checker.Verdict()
    orphans = files = 0
    for life in range(lives):
        (folder / str(life)).mkdir()
        place = Place(folder / str(life), {"pipeline": {"workers_per_device": 2}})
        with Daemon(place) as daemon:
            dropped = done = 0
            for _ in range(kills):
                deadline = time.monotonic() + BETWEEN_KILLS_SECONDS
                while time.monotonic() < deadline and dropped - done < MOST_BACKLOG:
                    place.drop_many(range(dropped, dropped + 20))
                    dropped += 20
                threading.Event().wait(max(0.0, deadline - time.monotonic()))
                if not daemon.alive():
                    break
                done = daemon.status()["ended_in_this_run"]
                workers = wait_for(
                    lambda daemon=daemon: not daemon.alive() or daemon.ready_workers(), "a ready worker"
                )
                if isinstance(workers, list):
                    os.kill(chance.choice(workers), signal.SIGKILL)
            if daemon.alive():
                daemon.wait_idle(dropped, 240)
                daemon.stop()
            ended.append(daemon.wait_end())
        orphans, files = orphans + end_orphans(place), files + dropped
        judged = place.judge()
        verdict.counts += judged.counts
        verdict.wrong += judged.problems
    verdict.wrong += [f"a daemon ended with {status}" for status in ended if status]
    return Outcome(lives * kills, orphans, verdict, time.monotonic() - started, {"lives": lives})


def kill_one(daemon: Daemon, chance: random.Random) -> dict[str, Any]:
    """Kill one of its workers in a moment; returns the status just before."""
    threading.Event().wait(chance.uniform(0, 0.1))
    victim = chance.choice(sorted(daemon.workers()))
    losses = len(list(daemon.events("worker lost")))
    before = daemon.status()
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: len(list(daemon.events("worker lost"))) > losses, "its loss")
    return before


class Readings:
    """How many daemons have read each image of a place, as the kernel reports it. The next daemon
    may read images again that were in flight at a kill, but not those that were DONE: it opens these at most, to ask
    whether somebody still writes to them."""

    def __init__(self, place: Place) -> None:
        self.times: collections.Counter[str] = collections.Counter()
        self.needless: set[str] = set()
        self._place = place
        self._done: set[str] = set()
        self._inotify = Inotify(sync_timeout=0)
        for name in place.dropped:
            self._inotify.add_watch(place.inbox(name), Mask.ACCESS)

    def count(self) -> None:
        """Check between two daemons."""
        read = {str(event.name) for event in self._inotify if not event.mask & Mask.ISDIR}
        self.times.update(read)
        self.needless |= self._done & read
        there = self._place.has_ledger()  # a daemon may be killed before it has made one
        self._done = {os.fsdecode(path) for (path,) in self._place.rows(DONE_PATHS)} if there else set()


class Rate:
    """Images divided by time, summed over parts of a run."""

    def __init__(self) -> None:
        self.images = 0
        self.seconds = 0.0

    def add(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        self.images += after["ended_in_this_run"] - before["ended_in_this_run"]
        self.seconds += after["uptime_seconds"] - before["uptime_seconds"]

    @property
    def per_second(self) -> float:
        return self.images / self.seconds if self.seconds else 0.0


@contextlib.contextmanager
def kill_decoders(place: Place, chance: random.Random) -> Iterator[list[int]]:
    """After every few images, kill -9 a random decoder, as the kernel does if memory runs out; yields the killed."""
    killed, due = list[int](), 0

    def kill_one() -> None:
        nonlocal due
        decoders = running("stages.images.decoder", place.processes())
        if decoders and (done := count_sidecars(place)) >= due:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid := chance.choice(decoders), signal.SIGKILL)
                killed.append(pid)
                due = done + chance.randint(1, BETWEEN_DECODERS)

    with meanwhile(kill_one):
        yield killed
    assert killed


def all_ready(status: dict[str, Any]) -> bool:
    return all(worker["state"] == "ready" for worker in status["workers"])


def drop_shares(place: Place, kills: int, files: int, chance: random.Random | None = None) -> Iterator[int]:
    """Drop the files in kills + 1 shares, one at each step, over all inboxes; yields the number each time.
    The shares have equal or random sizes."""
    bounds = [files * step // (kills + 1) for step in range(kills + 2)]
    if chance:
        bounds[1:-1] = sorted(chance.choices(range(files + 1), k=kills))
    for start, end in itertools.pairwise(bounds):
        for number in range(start, end):
            place.drop_many(range(number, number + 1), INBOXES[number % len(INBOXES)])
        yield end - start


def let_work(process: subprocess.Popen[bytes] | Forked, seconds: float) -> None:
    """A daemon that ends by itself before that is a separate failure."""
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return
    raise AssertionError(f"the daemon ended by itself, with exit status {status}")


def finish(place: Place, files: int) -> None:
    """The last daemon processes the rest."""
    with Daemon(place) as daemon:
        daemon.wait_until(
            lambda status: status["done"] >= files and not status["in_flight"], "the rest of the files", 120
        )
        assert daemon.stop() == 0


def count_sidecars(place: Place) -> int:
    return sum(1 for _, _, names in os.walk(place.site.results) for name in names if name.endswith(".json"))


def end_orphans(place: Place) -> int:
    """The number of processes that are alive five seconds after the daemon; ends them."""
    orphans = place.orphans()
    for pid in orphans:
        os.kill(pid, signal.SIGKILL)
    return len(orphans)
