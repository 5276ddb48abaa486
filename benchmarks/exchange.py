"""Measures what an exchange of models costs: the rate before, during and after it, and the longest time without a finished
image. With fake stages: each station takes 5 ms for an image, and its models take some seconds to load.

Run: python -m benchmarks.exchange [--stations 1 2] [--load-seconds 0 2] [--rounds 3]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.backlog import ask_until
from benchmarks.overhead import make_files
from daemon.control import ask

IMAGE_SECONDS = 0.005
BEFORE_SECONDS, AFTER_SECONDS = 4.0, 4.0  # of work that is measured before and after an exchange
PATIENCE_SECONDS = 120.0
CONFIG = """\
[[inbox]]
settle_seconds = 0
[http]
listen = ""
[page]
listen = ""
[log]
level = "error"
[pipeline]
stations = {stations}
workers_per_device = {stations}
queue_images = 64
[stages.ocr]
backend = "fake"
batch_size = 32
options = {{ latency_per_image_seconds = {image}, load_seconds = {load}, salt = {salt} }}
"""
OTHERS = "".join(f'[stages.{name}]\nbackend = "fake"\nbatch_size = 32\n' for name in ("yolo", "clip", "blip"))


@dataclass(frozen=True)
class Cost:
    """Images per second, and seconds."""

    before: float
    during: float
    after: float
    seconds: float  # of the exchange
    longest: float  # without a finished image, during the exchange


def configure(folder: Path, stations: int, load: float, salt: int) -> Path:
    file = folder / "daemon.toml"
    file.write_text(CONFIG.format(stations=stations, image=IMAGE_SECONDS, load=load, salt=salt) + OTHERS)
    return file


def measure(folder: Path, stations: int, load: float) -> Cost:
    """Run the daemon until some seconds after the exchange, and stop it before it has done all files."""
    file, control = configure(folder, stations, load, 0), folder / "state" / "control.sock"
    daemon = subprocess.Popen([sys.executable, "-P", "-m", "daemon", "run", "--config", file])
    try:
        ask_until(folder, PATIENCE_SECONDS, "ended_in_this_run", 100)
        times = [time.time()]
        time.sleep(BEFORE_SECONDS)
        configure(folder, stations, load, 1)
        times.append(time.time())
        ask(control, "POST", "/reload")
        while ask(control, "GET", "/api/status")["exchange"]["outcome"] == "running":
            time.sleep(0.05)
        times.append(time.time())
        time.sleep(AFTER_SECONDS)
        times.append(time.time())
        if not ask(control, "GET", "/api/status")["pending"]:
            sys.exit("no image was left at the end; give more --files")
    finally:
        daemon.terminate()
        daemon.wait()
    finished = read_ends(folder / "state" / "ledger.sqlite")
    rates = [sum(a <= end < b for end in finished) / (b - a) for a, b in itertools.pairwise(times)]
    inside = [end for end in finished if times[1] - 1 <= end < times[2] + 1]
    longest = max(b - a for a, b in itertools.pairwise(inside))
    return Cost(*rates, times[2] - times[1], longest)


def read_ends(ledger: Path) -> Sequence[float]:
    """When images became DONE, in Unix seconds."""
    with contextlib.closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as connection:
        rows = connection.execute("SELECT finished_at FROM image WHERE status = 1 ORDER BY finished_at")
        return [row[0] for row in rows]


def describe(figures: Sequence[float], unit: str) -> str:
    return f"{statistics.median(figures):,.1f} {unit} ({min(figures):,.1f} to {max(figures):,.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stations", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--load-seconds", type=float, nargs="+", default=[0, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--files", type=int, default=15_000)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    for stations, load in itertools.product(options.stations, options.load_seconds):
        costs = []
        for number in range(options.rounds):
            folder = Path(tempfile.mkdtemp(prefix="visiond-bench-", dir=options.folder))
            try:
                make_files(folder / "inbox", options.files, number)
                costs.append(measure(folder, stations, load))
            finally:
                shutil.rmtree(folder)
        print(f"{stations} stations, {load:g} s to load")
        for name in ("before", "during", "after"):
            print(f"  {name}: {describe([getattr(cost, name) for cost in costs], 'images/s')}")
        print(f"  exchange: {describe([cost.seconds for cost in costs], 's')}")
        print(f"  longest time without a finished image: {describe([cost.longest for cost in costs], 's')}")


if __name__ == "__main__":
    main()
