"""Measures what an exchange of models costs: the rate before, during and after it, and the longest time without a finished
image.

    python -m benchmarks.exchange [--stations 1 2] [--load-seconds 0 2] [--rounds 3]
    python -m benchmarks.exchange --standard bench [--repeat 40] [--pipeline workers_per_device=5]

Without --standard with fake stages: each station takes 5 ms for an image, and its models take some seconds to load.
With it, the standard job of `visiond bench` on all GPUs: 1,000 different images, each under --repeat names. Kernels are
compiled in a first run that is not counted.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.backlog import ask_until
from benchmarks.overhead import make_files
from daemon.bench.job import Place
from daemon.control import ask
from daemon.system.gpus import list_gpus

IMAGE_SECONDS = 0.005
BEFORE_SECONDS, AFTER_SECONDS = 4.0, 4.0  # of work that is measured before and after an exchange
STANDARD_SECONDS = 12.0  # the same with the standard job
STANDARD_IMAGES = 1000
PATIENCE_SECONDS = 300.0
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
    longest: float  # without a finished image, from the reload on
    memory: tuple[float, float, float]  # of all GPUs before, at most during, and after it. GB


def configure(folder: Path, stations: int, load: float, salt: int) -> Path:
    file = folder / "daemon.toml"
    file.write_text(CONFIG.format(stations=stations, image=IMAGE_SECONDS, load=load, salt=salt) + OTHERS)
    return file


def measure(file: Path, around: tuple[float, float], configure: Callable[[], object]) -> Cost:
    """Run the daemon until some seconds after the exchange, and stop it before it has done all files.

    around: seconds before and after the exchange. configure: writes the configuration with other models.
    """
    folder, before, after = file.parent, *around
    control = folder / "state" / "control.sock"
    daemon = subprocess.Popen([sys.executable, "-P", "-m", "daemon", "run", "--config", file])
    try:
        ask_until(folder, PATIENCE_SECONDS, "ended_in_this_run", 100)
        times = [time.time()]
        time.sleep(before)
        memory = [used_gigabytes()]
        configure()
        times.append(time.time())
        ask(control, "POST", "/reload")
        while (exchange := ask(control, "GET", "/api/status")["exchange"])["outcome"] == "running":
            memory.append(used_gigabytes())
            time.sleep(0.05)
        times.append(time.time())
        time.sleep(after)
        memory.append(used_gigabytes())
        times.append(time.time())
        if exchange["outcome"] != "done":
            sys.exit(f"the models were not exchanged: {exchange}")
        if not ask(control, "GET", "/api/status")["pending"]:
            sys.exit("no image was left at the end; give more --files, or a higher --repeat")
    finally:
        daemon.terminate()
        daemon.wait()
    finished = read_ends(folder / "state" / "ledger.sqlite")
    rates = [sum(a <= end < b for end in finished) / (b - a) for a, b in itertools.pairwise(times)]
    inside = [end for end in finished if times[1] - 1 <= end < times[3]]
    longest = max(b - a for a, b in itertools.pairwise(inside))
    return Cost(*rates, times[2] - times[1], longest, (memory[0], max(memory), memory[-1]))


def measure_fakes(folder: Path, stations: int, load: float) -> Cost:
    file = configure(folder, stations, load, 0)
    return measure(file, (BEFORE_SECONDS, AFTER_SECONDS), lambda: configure(folder, stations, load, 1))


def measure_standard(place: Place, inbox: Path) -> Cost:
    """Exchanges all models of the standard job for the same ones with another `conf` of YOLO."""
    place.prepare(inbox)
    text = place.config_file.read_text()
    changed = text + "[stages.yolo]\noptions = { conf = 0.3 }\n"
    return measure(
        place.config_file,
        (STANDARD_SECONDS, STANDARD_SECONDS),
        lambda: place.config_file.write_text(changed),
    )


def used_gigabytes() -> float:
    return sum(gpu.used_bytes for gpu in list_gpus()) / 1e9


def read_ends(ledger: Path) -> Sequence[float]:
    """When images became DONE, in Unix seconds."""
    with contextlib.closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as connection:
        rows = connection.execute("SELECT finished_at FROM image WHERE status = 1 ORDER BY finished_at")
        return [row[0] for row in rows]


def describe(figures: Sequence[float], unit: str) -> str:
    return f"{statistics.median(figures):,.1f} {unit} ({min(figures):,.1f} to {max(figures):,.1f})"


def show(costs: Sequence[Cost]) -> None:
    for name in ("before", "during", "after"):
        print(f"  {name}: {describe([getattr(cost, name) for cost in costs], 'images/s')}")
    print(f"  exchange: {describe([cost.seconds for cost in costs], 's')}")
    print(f"  longest time without a finished image: {describe([cost.longest for cost in costs], 's')}")
    if any(cost.memory[1] for cost in costs):
        for number, when in enumerate(("before", "at most during it", "after")):
            print(f"  GPU memory {when}: {describe([cost.memory[number] for cost in costs], 'GB')}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stations", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--load-seconds", type=float, nargs="+", default=[0, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--files", type=int, default=15_000)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--standard", type=Path, metavar="FOLDER", help="as --folder of visiond bench")
    parser.add_argument("--images", type=int, default=STANDARD_IMAGES, help="with --standard")
    parser.add_argument("--repeat", type=int, default=40, help="with --standard: names of each image")
    parser.add_argument("--pack", default="", help="with --standard: as for visiond bench")
    parser.add_argument("--pipeline", nargs="*", default=[], help="with --standard: its lines in [pipeline]")
    options = parser.parse_args()
    if options.standard:
        place = Place(options.standard, options.pack, options.pipeline)
        place.make_pack()
        images = place.make_images(options.images)
        inbox = place.make_inbox(images, options.repeat)
        place.prepare(images[0].parent)
        place.start("--once").wait()
        show([measure_standard(place, inbox) for _ in range(options.rounds)])
        return
    for stations, load in itertools.product(options.stations, options.load_seconds):
        costs = []
        for number in range(options.rounds):
            folder = Path(tempfile.mkdtemp(prefix="visiond-bench-", dir=options.folder))
            try:
                make_files(folder / "inbox", options.files, number)
                costs.append(measure_fakes(folder, stations, load))
            finally:
                shutil.rmtree(folder)
        print(f"{stations} stations, {load:g} s to load")
        show(costs)


if __name__ == "__main__":
    main()
