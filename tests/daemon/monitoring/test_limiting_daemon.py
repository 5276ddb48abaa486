"""A real daemon with fake stages says what limits its rate: in its status, its metric and `visiond status`."""

from __future__ import annotations

import os
import urllib.request
from pathlib import Path
from typing import Any

from daemon.monitoring.limits import PARTS
from tests.daemon_process import GLANCE, Daemon, Place, free_port, picture, wait_for

SLOW = {"backend": "fake", "options": {"latency_per_image_seconds": 0.02}}


def place_in(folder: Path, **stages: Any) -> Place:
    return Place(folder, {"stages": stages, "pipeline": {"reuse_results": False}})


def limit_of(daemon: Daemon) -> str:
    part: str = daemon.status()["limit"]["part"]
    return part


def read(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        content: str = answer.read().decode()
    return content


def assert_shown(daemon: Daemon, part: str) -> None:
    """Status, metric and command agree. Between two of these answers the daemon may look again."""

    def agrees() -> bool:
        said = {each: daemon.metric("visiond_limited_by", part=each) for each in PARTS}
        return said == {each: float(each == part) for each in PARTS} and limit_of(daemon) == part

    wait_for(agrees, f"a metric that says {part or 'nothing'}")
    printed = daemon.place.command("status").stdout
    assert (f"limited by {part}: " in printed) if part else ("limited by" not in printed)


def test_the_workers_limit_while_their_threads_wait_for_slow_stages(tmp_path: Path) -> None:
    place, port = place_in(tmp_path, ocr=SLOW), free_port()
    place.configure({"page": {"listen": f"127.0.0.1:{port}"}})
    place.drop_many(range(2000))
    with Daemon(place) as daemon:
        wait_for(lambda: limit_of(daemon), "a part that limits")
        assert_shown(daemon, "workers")
        limit = daemon.status()["limit"]
        assert limit["shares"]["workers"] > 0.9 > limit["cores_busy"]
        assert "workers_per_device" in place.command("status").stdout
        assert "limited by workers: " in read(port, "/state")
        daemon.kill()


def test_the_input_limits_while_files_trickle_in_and_nothing_on_an_idle_daemon(tmp_path: Path) -> None:
    place = place_in(tmp_path)
    with Daemon(place) as daemon:
        wait_for(lambda: daemon.status()["moment"], "a first look at the daemon")
        assert_shown(daemon, "")
        numbers = iter(range(100_000))

        def trickle() -> str:
            number = next(numbers)
            place.drop(f"{number}.ppm", picture(number))
            return limit_of(daemon)

        assert wait_for(trickle, f"a part that limits, with a file each {GLANCE} s") == "input"
        assert_shown(daemon, "input")


def test_reading_limits_while_large_files_wait_for_it(tmp_path: Path) -> None:
    place = place_in(tmp_path)
    place.configure({"pipeline": {"slab_bytes": 512 << 20}})
    for number in range(300):
        file = place.drop(f"{number}.ppm", b"P6\n4096 1024\n255\n%d" % number)
        os.truncate(file, 17 + 3 * 4096 * 1024)  # its pixels need no disk
    with Daemon(place) as daemon:
        assert wait_for(lambda: limit_of(daemon), "a part that limits") == "read"
        daemon.kill()
