"""Measures the cost of a scrape: how long GET /metrics takes, how many bytes and series it has, and how much CPU time an
idle daemon uses for it. With fake stages, idle and at work.

Run: python -m benchmarks.scrape [--scrapes 100] [--workers 1]
"""

from __future__ import annotations

import argparse
import http.client
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.backlog import ask_until
from benchmarks.overhead import FAKES, make_files
from daemon.control import ask

CONFIG = """\
[[inbox]]
settle_seconds = 0
[output]
sinks = ["jsonl"]
[http]
listen = "127.0.0.1:{port}"
[log]
level = "warning"
[pipeline]
workers_per_device = {workers}
"""
IMAGES = 200  # that are done before, so that every series has a value
BUSY_IMAGES, BUSY_PAUSE_SECONDS = 20_000, 0.02
START_SECONDS = 60.0
ACCEPT = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"  # as Prometheus asks


@dataclass(frozen=True)
class Cost:
    milliseconds: list[float]  # of each scrape
    bytes: int  # of the last one
    series: int
    cpu_milliseconds: float  # of the daemon, for each scrape; its work included

    def __str__(self) -> str:
        steps = statistics.quantiles(self.milliseconds, n=100)
        return (
            f"{statistics.median(self.milliseconds):.1f} ms (p5 {steps[4]:.1f}, p95 {steps[94]:.1f}), "
            f"{self.series} series, {self.bytes / 1024:.0f} KiB"
        )


@contextmanager
def running(folder: Path, port: int, workers: int) -> Iterator[int]:
    """A daemon that has done some images. Yields its process id."""
    (folder / "daemon.toml").write_text(CONFIG.format(port=port, workers=workers) + FAKES)
    make_files(folder / "inbox", IMAGES, 0)
    command = [sys.executable, "-P", "-m", "daemon", "run", "--config", str(folder / "daemon.toml")]
    with subprocess.Popen(command) as daemon:
        try:
            ask_until(folder, START_SECONDS, "done", IMAGES)
            yield daemon.pid
        finally:
            daemon.terminate()
            daemon.wait(START_SECONDS)


def scrape(port: int) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/metrics", headers={"Accept": ACCEPT})
        return connection.getresponse().read()
    finally:
        connection.close()


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def measure(pid: int, port: int, scrapes: int, pause_seconds: float) -> Cost:
    """pause_seconds: after each scrape."""
    times, body, pause = [], b"", threading.Event()
    before = cpu_seconds(pid)
    for _ in range(scrapes):
        started = time.perf_counter()
        body = scrape(port)
        times.append(1000 * (time.perf_counter() - started))
        pause.wait(pause_seconds)
    used = cpu_seconds(pid) - before
    series = sum(not line.startswith(b"#") for line in body.splitlines())
    return Cost(times, len(body), series, 1000 * used / scrapes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scrapes", type=int, default=100)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--port", type=int, default=19464)
    options = parser.parse_args()
    print(
        f"{len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, {options.workers} workers"
    )
    with tempfile.TemporaryDirectory(prefix="visiond-scrape-") as name:
        folder = Path(name)
        with running(folder, options.port, options.workers) as pid:
            idle = measure(pid, options.port, options.scrapes, 0.0)
            print(f"idle:    {idle}; {idle.cpu_milliseconds:.1f} ms of CPU time", flush=True)
            make_files(folder / "inbox" / "more", BUSY_IMAGES, 1)
            costs = measure(pid, options.port, options.scrapes, BUSY_PAUSE_SECONDS)
            left: Any = ask(folder / "state" / "control.sock", "GET", "/api/status")["pending"]
            print(f"at work: {costs}; {left} images still pending at the end")


if __name__ == "__main__":
    main()
