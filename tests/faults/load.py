"""A daemon under long load, or while other programs misbehave: measures its rate, open files and memory."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil

from tests.daemon.inbox.test_inputs import PIXELS
from tests.daemon_process import (
    SLACK_SECONDS,
    Daemon,
    Place,
    make_certificate,
    picture,
    running,
    wait_for,
)
from tests.faults.kill import Rate, all_ready

T = TypeVar("T")

IMAGES_PER_SECOND = 80  # that the fake captioner allows: well below what the machine can do
WINDOW_SECONDS = 2.0  # with the slow clients and without, in turns
LEAST_ACTS = 50  # in a window; on a free machine there are 100 or more
REQUEST = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nX-"  # half of one
HELLO = b"\x16\x03\x01\x02\x00"  # the head of a TLS handshake's first record
LEDGER_CACHE = 64 << 20  # bytes at most: cache_size in daemon/ledger/schema.py
INBOX = [{"on_success": "delete", "settle_seconds": 0}]
CHILDREN = {"workers": "daemon.workers.child", "decoders": "stages.images.decoder"}
AFTER_A_PDF = 10  # where scans are drawn from, and photographs, so that the sixth has 48 megapixels


def beset_by_slow_clients(
    folder: Path, clients: int, windows: int, begin: bytes
) -> tuple[float, list[float]]:
    """The pipeline's rate while this many clients have sent an incomplete request, as a share of its rate
    without them, and the 99th percentile of /healthz in seconds during that. By HTTPS, if they begin a
    handshake."""
    place = Place(
        folder, {"stages": {"blip": {"options": {"latency_per_image_seconds": 1 / IMAGES_PER_SECOND}}}}
    )
    certificate = make_certificate(folder) if begin == HELLO else {}
    place.configure({"http": {"listen": "127.0.0.1:0"} | certificate})
    place.drop_many(range(round((3 * windows * WINDOW_SECONDS + SLACK_SECONDS) * IMAGES_PER_SECOND)))
    calm, beset, answers = Rate(), Rate(), list[float]()
    with Daemon(place) as daemon:
        dial = partial(daemon.dial, folder / certificate["tls_certificate"] if certificate else None)
        daemon.wait_until(lambda status: status["done"] > 50, "work")
        for _ in range(windows):
            calm.add(*watch(daemon))
            with slow_clients(daemon.port, clients, begin):
                beset.add(*watch(daemon, lambda: answers.append(time_healthz(dial))))
        assert daemon.status()["pending"], "there was not work enough"
    return beset.per_second / calm.per_second, statistics.quantiles(answers, n=100)


def watch(daemon: Daemon, act: Callable[[], object] = bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Its status before and after a period in which something is done repeatedly. A machine that stands still for
    a while makes the period longer."""
    before = daemon.status()
    deadline, acts = time.monotonic() + WINDOW_SECONDS, 0
    while time.monotonic() < deadline or acts < LEAST_ACTS:
        act()
        acts += 1
        threading.Event().wait(0.01)
    ended = before["ended_in_this_run"]
    return before, daemon.wait_until(lambda status: status["ended_in_this_run"] > ended, "an image")


def time_healthz(dial: Callable[[], http.client.HTTPConnection]) -> float:
    started = time.monotonic()
    with contextlib.closing(dial()) as connection:
        connection.request("GET", "/healthz")
        assert connection.getresponse().status == 200
    return time.monotonic() - started


@contextlib.contextmanager
def slow_clients(port: int, count: int, begin: bytes) -> Iterator[None]:
    """Clients that have sent the beginning of a request, and never send the rest."""
    with contextlib.ExitStack() as clients:
        for _ in range(count):
            client = clients.enter_context(socket.create_connection(("127.0.0.1", port)))
            with contextlib.suppress(ConnectionError):  # it had to make room for a later one
                client.sendall(begin)
        yield


def open_files(daemon: Daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))


def resident(daemon: Daemon) -> int:
    return int(psutil.Process(daemon.process.pid).memory_info().rss)


def grow(folder: Path, files: int) -> tuple[int, float]:
    """How many more files the daemon has open after this number of images than after a tenth of them,
    and by how many bytes per image its memory grew in the second half."""
    place = Place(folder, {"inbox": INBOX})
    samples = list(
        look_at_tenths(place, files, place.drop_many, lambda daemon: (open_files(daemon), resident(daemon)))
    )
    return samples[-1][0] - samples[0][0], (samples[-1][1] - samples[4][1]) / (files // 2)


def grow_mixed(folder: Path, files: int, kinds: Mapping[str, int]) -> list[dict[str, int]]:
    """The memory of a daemon, its workers and their decoders after each tenth of this number of images."""
    pipeline = {"slab_bytes": 0}  # as large as users have it
    place = Place(folder, {"inbox": INBOX, "pipeline": pipeline, "stages": {"clip": PIXELS}})
    draw = draw_inputs(kinds)

    def drop(numbers: range) -> None:
        for number in numbers:
            place.drop(f"{number:05}", draw(number))

    return list(look_at_tenths(place, files, drop, memory_of, 1800))


def draw_inputs(kinds: Mapping[str, int]) -> Callable[[int], bytes]:
    """Images by number, no two with the same bytes. kinds: how many different ones of each kind of `visiond bench --inputs`."""
    from stages.scenes.inputs import DRAW, stamp

    originals = [
        DRAW[kind](random.Random(f"{kind} {index}"), index)[1]
        for kind, count in kinds.items()
        for index in range(AFTER_A_PDF, AFTER_A_PDF + count)
    ]
    return lambda number: stamp(originals[number % len(originals)], number)


def look_at_tenths(
    place: Place, files: int, drop: Callable[[range], None], look: Callable[[Daemon], T], timeout: float = 300
) -> Iterator[T]:
    """What it sees of the daemon when each tenth of the images is done."""
    with Daemon(place) as daemon:
        for step in range(10):
            drop(range(step * files // 10, (step + 1) * files // 10))
            daemon.wait_idle((step + 1) * files // 10, timeout)
            yield look(daemon)
        assert daemon.stop() == 0
    place.assert_kept(DONE=files)


def memory_of(daemon: Daemon) -> dict[str, int]:
    """Bytes of each kind of its processes, without SQLite's cache. What several share is divided among them."""
    processes = daemon.place.processes()
    pids = {name: running(module, processes) for name, module in CHILDREN.items()} | {
        "daemon": [daemon.process.pid]
    }
    memory = {name: sum(psutil.Process(pid).memory_full_info().pss for pid in pids[name]) for name in pids}
    [(ledger,)] = daemon.place.rows("SELECT page_count * page_size FROM pragma_page_count, pragma_page_size")
    memory["daemon"] -= min(ledger, LEDGER_CACHE)
    return memory


def drop_while_stopped(folder: Path, files: int) -> float:
    """Seconds until files that came while the daemon could not listen are all in the ledger."""
    place = Place(folder)
    with Daemon(place) as daemon:
        daemon.signal(signal.SIGSTOP)
        place.drop_many(range(files))
        daemon.signal(signal.SIGCONT)
        started = time.monotonic()
        wait_for(
            lambda: place.rows("SELECT COUNT(*) FROM image") == [(files,)], "every file in the ledger", 60
        )
        seconds = time.monotonic() - started
        daemon.wait_idle(files, 300)
    place.assert_kept(DONE=files)
    return seconds


def lose_the_ledger(folder: Path, files: int) -> float:
    """Seconds that `visiond repair` takes for the ledger of this number of images, without their sources."""
    place = Place(folder, {"inbox": [{"on_success": "delete", "settle_seconds": 0}]})
    with Daemon(place) as daemon:
        place.drop_many(range(files))
        daemon.wait_idle(files, 600)
        assert daemon.stop() == 0
    place.site.ledger.unlink()
    started = time.monotonic()
    assert place.command("repair").returncode == 0
    seconds = time.monotonic() - started
    place.assert_kept(DONE=files)
    return seconds


def lose_a_device(folder: Path) -> str:
    """The workers of one of two slots die until the slot is closed; the other slot goes on."""
    place = Place(folder, {"pipeline": {"workers_per_device": 2}})
    with Daemon(place) as daemon:
        lost = kill_until_closed(daemon, "ocr+yolo+clip+blip/0")
        place.drop_many(range(50))
        daemon.wait_idle(50)
        health = daemon.get("/healthz")[1]["status"]
    place.assert_kept(DONE=50)
    return f"{lost} deaths closed its slot, health {health}, 50 of 50 DONE by the other"


def kill_until_closed(daemon: Daemon, name: str) -> int:
    """Kill every worker of a slot as soon as it is ready; returns how many it took."""
    killed: set[int] = set()

    def closed() -> bool:
        for pid in {event["pid"] for event in daemon.events("worker ready", worker=name)} - killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        return any(daemon.events("worker slot closed: its workers keep dying", worker=name))

    wait_for(closed, "its slot to be closed", 60)
    return len(killed)


def take_a_worker(folder: Path) -> float:
    """SIGKILL, as the OOM killer sends it, to the one worker with an image in flight;
    seconds until that image is DONE."""
    device = folder / "device"  # which a worker makes when it begins
    slow = {"latency_seconds": 0.5, "device_file": str(device)}
    place = Place(folder, {"stages": {"blip": {"options": slow}}})
    with Daemon(place) as daemon:
        place.drop("a.ppm", picture(1))
        wait_for(device.exists, "an image in a worker's hands")
        [worker] = daemon.workers()
        os.kill(worker, signal.SIGKILL)
        started = time.monotonic()
        daemon.wait_idle(1)
        seconds = time.monotonic() - started
        assert daemon.wait_until(all_ready, "its successor")
        assert daemon.stop() == 0
    place.assert_kept(DONE=1)
    return seconds
