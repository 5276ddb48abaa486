"""Measures how much second looks slow first looks down on real devices.

    python -m benchmarks.sharing --folder /tmp/sharing
    python -m benchmarks.sharing --folder /tmp/sharing --model clip-l14 --count 3000
    python -m benchmarks.sharing --folder /tmp/sharing --pack mini --model ./my-clip --stage clip --count 24 --images 24

First looks are the standard job of `visiond bench` on one GPU (or the CPU). A larger model of one stage takes second looks at
a share of the images: on the same GPU, and if there are two, on the other one. It has random weights in its published size,
or it is the model in a folder. One daemon does all phases, one after another: each share on each device, and no
second looks before and after each. A phase has --count images, and begins when the second looks of the phase before have ended.

The rate of a phase is the slope of its first looks between a fifth and four fifths of them. It is compared with the mean of the
two phases without second looks before and after it, because the rate of a GPU drifts. S is the rate of second looks
alone, whose images wait until the GPU is idle. If L second looks per second are done in a phase on the same GPU, they take
L / S of the GPU's time, and leave 1 - L / S of the rate without second looks. The column `of what is left` compares the rate
of first looks with that. Second looks on another GPU leave everything.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import re
import shutil
import sqlite3
import statistics
import subprocess
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from daemon.bench.job import NEW_TOKENS, Machine, Place, make_once, run_idle, run_module
from daemon.config.loading import load
from daemon.config.state import LEDGER
from daemon.system.gpus import list_gpus
from stages.contract.processes import environment, python

SAME, OTHER = "same", "other"  # the names of the second looks
SHARES = [0.01, 0.05, 0.2]
WARM_UP_SHARE = 0.2
HELD = 0.001  # second looks/s, which is practically none
MEASURED = slice(0.2, 0.8)  # of a phase's first looks, in the order in which they ended
POLL_SECONDS = 0.1
PATIENCE_SECONDS = 300.0  # for a phase
NAMED = re.compile(r"\d+-(?P<look>[a-z]+)-(?P<share>[\d.]+)/")


def fits_same(record: dict[str, Any]) -> bool:
    return fits(SAME, record["path"])


def fits_other(record: dict[str, Any]) -> bool:
    return fits(OTHER, record["path"])


def fits(look: str, path: str) -> bool:
    """The name of an image says which look gets which share of its phase."""
    named = NAMED.match(path)
    return bool(named and named["look"] == look and zlib.crc32(path.encode()) < float(named["share"]) * 2**32)


@dataclass
class Phase:
    """look: "" for none. finished: when each first look ended, in order. looks: times, and how many second looks had been done
    at each."""

    look: str
    share: float
    finished: list[float] = field(default_factory=list)
    looks: list[tuple[float, int]] = field(default_factory=list)

    @property
    def window(self) -> list[float]:
        return cut(self.finished)

    @property
    def rate(self) -> float:
        """First looks/s."""
        return slope(self.window)

    @property
    def looks_rate(self) -> float:
        """Second looks/s while the rate of first looks was measured."""
        first, last = self.window[0], self.window[-1]
        inside = [(at, done) for at, done in self.looks if first <= at <= last]
        return statistics.linear_regression(*zip(*inside, strict=True)).slope if len(inside) > 1 else 0.0


def cut(times: Sequence[float]) -> list[float]:
    """The part that is measured. The first batches wait for files, and during the last ones some workers have no work."""
    return list(times[int(MEASURED.start * len(times)) : int(MEASURED.stop * len(times))])


def slope(times: Sequence[float]) -> float:
    """Events per second: the slope of a line through all of them. The images of a batch end together, so the first and the
    last event alone would say less."""
    return statistics.linear_regression(times, range(len(times))).slope


class Bench:
    """A daemon with the second looks, and the ledger that it writes."""

    def __init__(self, place: Place, images: Sequence[Path], tables: dict[str, dict[str, Any]]) -> None:
        """tables: of the second looks, by name, without their limits."""
        self.place, self.images, self.tables = place, images, tables
        self.ledger = place.home / "state" / LEDGER
        self.number = 0  # of phases

    def configure(self, limits: dict[str, float] | None = None) -> None:
        """Write the configuration with these limits of second looks, images/s."""
        lines = [self.start_of_configuration]
        for name, table in self.tables.items():
            entries = table | {"images_per_second": (limits or {}).get(name, 0.0)}
            lines += ["[[second_look]]", f"name = {json.dumps(name)}"]
            lines += [f"{key} = {write_value(value)}" for key, value in entries.items()]
        self.place.config_file.write_text("\n".join(lines) + "\n")

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        shutil.rmtree(self.place.drop, ignore_errors=True)
        self.place.drop.mkdir(parents=True)
        shutil.copyfile(
            self.images[0], self.place.drop / f"first{self.images[0].suffix}"
        )  # an empty inbox is not read
        self.place.prepare(self.place.drop)
        self.start_of_configuration = self.place.config_file.read_text()
        self.configure()
        with run_idle(self.place, load(self.place.config_file)):
            yield

    def run(self, look: str, share: float, count: int) -> Phase:
        """Run a phase until its second looks have ended."""
        phase, before = Phase(look, share), self.last_image()
        self.drop(phase, count)
        self.wait(phase, before, count)
        self.finish_looks(phase, before)
        return phase

    def finish_looks(self, phase: Phase, before: int) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            waiting, done = self.count_looks(phase.look)
            phase.looks.append((time.time(), done))
            if not waiting:
                return
            self.check(before, deadline)
            time.sleep(POLL_SECONDS)

    def run_alone(self, count: int) -> float:
        """Second looks/s on the first GPU after all first looks have ended."""
        self.set_limits({SAME: HELD})
        phase, before = Phase(SAME, 1.0), self.last_image()
        self.drop(phase, count)
        self.wait(phase, before, count)
        self.set_limits({})
        phase.looks.clear()
        self.finish_looks(phase, before)
        least, most = phase.looks[0][1], phase.looks[-1][1]
        bounds = [least + part * (most - least) for part in (MEASURED.start, MEASURED.stop)]
        middle = [(at, done) for at, done in phase.looks if bounds[0] <= done <= bounds[1]]
        # Nearly all looks may end together, and then there are too few counts in the middle.
        used = middle if len(middle) > 1 else phase.looks
        if used[0][1] == used[-1][1]:
            raise SystemExit("all second looks ended before they could be counted; use a larger --count")
        return statistics.linear_regression(*zip(*used, strict=True)).slope

    def set_limits(self, limits: dict[str, float]) -> None:
        self.configure(limits)
        command = python("-m", "daemon", "reload", "--config", str(self.place.config_file))
        subprocess.run(command, check=True, env=environment(), stdout=subprocess.DEVNULL)

    def drop(self, phase: Phase, count: int) -> None:
        """Put images into the inbox, in a folder whose name says what becomes of them. They are hard links. Another link to an
        image changes its inode, so an image that is still there would become a new version: the folder of the phase before
        is removed first, and this one appears whole."""
        self.number += 1
        for old in self.place.drop.glob("*/"):
            shutil.rmtree(old)
        name = f"{self.number}-{phase.look or 'none'}-{phase.share:g}"
        part = self.place.folder / f"{name}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        for index in range(count):
            image = self.images[index % len(self.images)]
            (part / f"{index:06}{image.suffix}").hardlink_to(image)
        part.rename(self.place.drop / name)

    def wait(self, phase: Phase, before: int, count: int) -> None:
        """Until all first looks have ended. before: the last image of the phase before."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        asked = "SELECT finished_at FROM image WHERE id > ? AND status = 1 ORDER BY finished_at"
        while len(phase.finished) < count:
            time.sleep(POLL_SECONDS)
            self.check(before, deadline)
            phase.looks.append((time.time(), self.count_looks(phase.look)[1]))
            phase.finished = [at for (at,) in self.read(asked, before)]

    def check(self, before: int, deadline: float) -> None:
        """Stop if an image fails, or if there is no end."""
        asked = "SELECT path, status, detail FROM image WHERE id > ? AND status NOT IN (0, 1) LIMIT 1"
        if failed := self.read(asked, before):
            raise SystemExit(f"a first look failed: {failed[0]}")
        if failed := self.read(
            "SELECT detail FROM look WHERE image > ? AND reason IS NOT NULL LIMIT 1", before
        ):
            raise SystemExit(f"a second look failed: {failed[0][0]}")
        if time.monotonic() > deadline:
            raise SystemExit(f"a phase did not end within {PATIENCE_SECONDS:g} s")

    def last_image(self) -> int:
        return int(self.read("SELECT COALESCE(MAX(id), 0) FROM image")[0][0])

    def count_looks(self, name: str) -> tuple[int, int]:
        """How many images wait for the look, and how many have had it."""
        asked = "SELECT COUNT(not_before), COUNT(*) - COUNT(not_before) FROM look WHERE name = ?"
        [(waiting, done)] = self.read(asked, name)
        return waiting, done

    def read(self, query: str, *parameters: object) -> list[tuple[Any, ...]]:
        with contextlib.closing(
            sqlite3.connect(f"file:{self.ledger}?mode=ro", uri=True, timeout=30)
        ) as found:
            return found.execute(query, parameters).fetchall()


def write_value(value: object) -> str:
    """A value of TOML."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {write_value(item)}" for key, item in value.items()) + " }"
    return json.dumps(value)


def make_tables(stage: str, model: Path, devices: Sequence[str]) -> dict[str, dict[str, Any]]:
    """devices: the one of first looks, and another one if this machine has two."""
    options: dict[str, Any] = {}
    if stage == "blip":  # as in the standard job
        options = {"max_new_tokens": NEW_TOKENS, "force_tokens": NEW_TOKENS}
    common = {"stage": stage, "model": str(model), "options": options}
    return {
        name: {"when": f"benchmarks.sharing:fits_{name}", "devices": [device], **common}
        for name, device in zip((SAME, OTHER), devices, strict=False)
    }


def make_inputs(place: Place, stage: str, model: str, images: int) -> tuple[list[Path], Path]:
    """Returns the images and the model of second looks; also makes the weights of first looks."""

    def make_model() -> Path:
        if "/" in model:
            return Path(model).absolute()
        ask = ("benchmarks.sharing", "--only-make", model, "--stage", stage)
        return make_once(place.folder / model, lambda part: run_module(*ask, "--folder", str(part)))

    with ThreadPoolExecutor() as pool:
        made, _ = pool.submit(make_model), pool.submit(place.make_pack)
        pictures = place.make_images(images)
        return pictures, made.result()


def print_phase(phase: Phase, base: float, alone: float) -> None:
    """base: first looks/s without second looks."""
    left = base * (1 - phase.looks_rate / alone) if phase.look == SAME else base
    where = {SAME: "the same GPU", OTHER: "the other GPU"}[phase.look]
    print(
        f"| {phase.share:.0%} on {where} | {phase.rate:,.1f} | {phase.looks_rate:,.1f} | {base:,.1f} | "
        f"{phase.rate / base:.3f} | {left / base:.3f} | {phase.rate / left:.3f} |",
        flush=True,
    )


def measure(bench: Bench, shares: Sequence[float], count: int) -> None:
    looks = list(bench.tables)
    with bench.running():
        for look in looks:  # kernels of these shapes, and what a first batch prepares
            bench.run(look, WARM_UP_SHARE, max(2, count // 4))
        bases, phases = [bench.run("", 0.0, count).rate], []
        for look, share in itertools.product(looks, shares):
            phases.append(bench.run(look, share, count))
            bases.append(bench.run("", 0.0, count).rate)
        alone = bench.run_alone(max(2, count // 2))
    print(f"without second looks: {', '.join(f'{base:,.1f}' for base in bases)} first looks/s")
    print(f"second looks alone on the GPU of first looks: {alone:,.1f}/s\n")
    print(
        "| second looks | first looks/s | second looks/s | first looks/s without | ratio | left for first looks |",
        end="",
    )
    print(" of what is left |\n|---|---|---|---|---|---|---|")
    for phase, around in zip(phases, itertools.pairwise(bases), strict=True):
        print_phase(phase, statistics.fmean(around), alone)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("bench"), help="as for visiond bench")
    parser.add_argument("--pack", default="", help="of first looks, as for visiond bench")
    parser.add_argument("--stage", default="blip", help="of second looks")
    parser.add_argument(
        "--model", default="blip-large", help="a name of benchmarks.architectures, or a folder"
    )
    parser.add_argument("--images", type=int, default=500, help="different ones")
    parser.add_argument("--count", type=int, default=5000, help="first looks in a phase")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--pipeline", action="append", default=[], help="a line for [pipeline]")
    parser.add_argument("--only-make", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only_make:  # in a process of its own, so that no memory of a GPU stays in use
        from benchmarks.architectures import ARCHITECTURES

        ARCHITECTURES[given.stage][given.only_make](given.folder)
        return
    devices = [gpu.device for gpu in list_gpus()[:2]] or ["cpu"]
    place = Place(given.folder, given.pack, [f"devices = {json.dumps(devices[:1])}", *given.pipeline])
    images, model = make_inputs(place, given.stage, given.model, given.images)
    machine = Machine.this()
    print(
        f"{', '.join(machine.gpus) or 'no GPU'}, {machine.cores} cores; second looks: {given.stage}, {given.model}"
    )
    measure(Bench(place, images, make_tables(given.stage, model, devices)), given.shares, given.count)


if __name__ == "__main__":
    main()
