"""A log that nobody reads: standard error is a pipe that is full after the first bad images."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.daemon_process import Daemon, Place, picture


class Unread(NamedTuple):
    rate_kept: float
    dropped: int  # lines
    healthy: bool  # /healthz answered 200, with the pipe full
    stop_seconds: float
    status: int  # of its exit
    problems: list[str]


class Run(NamedTuple):
    images_per_second: float
    dropped: int
    healthy: bool
    stop_seconds: float
    status: int
    problems: list[str]


@contextmanager
def pipe(*, read: bool) -> Iterator[int]:
    """The writing end of a pipe, with or without a reader."""
    reader, writer = os.pipe()

    def drink() -> None:
        while os.read(reader, 1 << 16):
            pass

    thread = threading.Thread(target=drink, daemon=True)
    if read:
        thread.start()
    yield writer
    os.close(writer)
    if read:
        thread.join()
    os.close(reader)


def leave_unread(folder: Path, bad: int, good: int, pairs: int) -> Unread:
    """Runs with and without a reader in turns. Returns the last one's figures
    and the median ratio of the rates. No pairs: one run without a reader."""
    without = work(folder / "unread", bad, good, read=False)
    rates = [1.0] * (not pairs)
    for number in range(pairs):
        with_reader = work(folder / f"{number}-read", bad, good, read=True)
        without = work(folder / f"{number}-unread", bad, good, read=False)
        rates.append(without.images_per_second / with_reader.images_per_second)
    return Unread(statistics.median(rates), *without[1:])


def work(folder: Path, bad: int, good: int, *, read: bool) -> Run:
    folder.mkdir()
    place = Place(folder, {"pipeline": {"rescan_seconds": 30}})
    for number in range(good + bad):
        if number * good // (good + bad) < (number + 1) * good // (good + bad):
            # one of the good, evenly among the bad
            place.drop(f"{number:05d}.ppm", picture(number))
        else:
            place.drop(f"{number:05d}-{'long-' * 30}.jpg", b"no image %d" % number)
    with pipe(read=read) as writer, Daemon(place, stderr=writer) as daemon:
        daemon.wait_idle(good + bad, 300)
        healthy = daemon.get("/healthz")[0] == 200
        dropped = int(daemon.metric("visiond_log_lines_dropped_total"))
        stopping = time.monotonic()
        status = daemon.stop()
        stop_seconds = time.monotonic() - stopping
    [(first, last)] = place.rows("SELECT MIN(finished_at), MAX(finished_at) FROM image")
    verdict = place.judge()
    kept = verdict.counts == {"DONE": good, "FAILED": bad}
    problems = verdict.problems + ([] if kept else [str(verdict.counts)])
    return Run((good + bad) / (last - first), dropped, healthy, stop_seconds, status, problems)
