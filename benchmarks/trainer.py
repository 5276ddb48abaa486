"""Measures how the trainer scales on GPUs, and whether a run that
is killed and resumed has the same curve as one that was not killed.

    python -m benchmarks.trainer scaling [--processes 1 2] [--seconds 40] [--kind blip]
    python -m benchmarks.trainer resume [--kind blip] [--processes 1]

The images are noise and the captions are random: the arithmetic is the same as in a real training.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np

from stages.contract.processes import environment, python
from stages.scenes.drawing import COLORS
from stages.scenes.shapes import LABELS
from stages.training.examples import Example, Spot, open_pixels, write_lines
from stages.training.job import Job
from stages.training.log import read_log
from stages.training.mini import Sizes
from stages.training.trainer import LOG, Settings

EXAMPLES = 16_384


def write_noise(folder: Path, count: int) -> None:
    rng, random = np.random.default_rng(1), Random(1)
    pixels = open_pixels(folder, count, Sizes().image_size)
    for place in range(count):
        pixels[place] = rng.integers(0, 255, pixels.shape[1:], np.uint8)
    lines = []
    for _ in range(count):
        label, color = random.randrange(len(LABELS)), random.randrange(len(COLORS))
        caption = f"a {tuple(COLORS)[color]} {LABELS[label]} on a {random.choice(tuple(COLORS))} background"
        spot = Spot(label, color, 1, random.random(), random.random())
        lines.append(msgspec.json.encode(Example(caption, [caption], {LABELS[label]: 1.0}, [spot], True)))
    write_lines(folder, lines)


def start(job: Job, processes: int) -> subprocess.Popen[bytes]:
    """Start a training by `accelerate launch`, also for one process, so that the overhead is the same."""
    file = Path(job.folder).with_suffix(".json")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.encode(job))
    spread = ["--multi_gpu"] if processes > 1 else []
    launch = [
        "-m",
        "accelerate.commands.launch",
        *spread,
        "--num_processes",
        str(processes),
        "--num_machines",
        "1",
    ]
    plain = ["--mixed_precision", "no", "--dynamo_backend", "no", "-m", "stages.training.job", str(file)]
    return subprocess.Popen(python(*launch, *plain), env=environment())


def read_entries(job: Job) -> list[dict[str, Any]]:
    return read_log(Path(job.folder) / LOG)


def measure_scaling(kind: Any, counts: Sequence[int], seconds: float, folder: Path) -> dict[str, Any]:
    """Images per second by number of processes, each with the same batch size."""
    rates = {}
    for count in counts:
        settings = Settings(batch_size=512 * count, seconds=seconds, checkpoint_every=0)
        job = Job(
            kind=kind,
            folder=str(folder / f"{kind}-{count}"),
            examples=str(folder / "noise"),
            settings=settings,
        )
        if start(job, count).wait():
            raise RuntimeError(f"the training on {count} GPUs failed")
        entries = read_entries(job)
        rates[count] = statistics.median(entry["images_per_second"] for entry in entries[len(entries) // 4 :])
    return {"kind": kind, "images_per_second": rates, "ratio": rates[counts[-1]] / rates[counts[0]]}


def check_resume(kind: Any, processes: int, folder: Path) -> dict[str, Any]:
    """Compare the losses of a run that is not killed with those
    of one that is killed in the middle and resumed, bit for bit."""
    settings = Settings(batch_size=256, steps=60, log_every=1, checkpoint_every=10, deterministic=True)
    common = {"kind": kind, "examples": str(folder / "noise"), "settings": settings}
    whole = Job(**common, folder=str(folder / f"{kind}-whole"))
    if start(whole, processes).wait():
        raise RuntimeError("the uninterrupted training failed")
    killed = Job(**common, folder=str(folder / f"{kind}-killed"), resume=True)
    process = start(killed, processes)
    while len(read_entries(killed)) < settings.steps // 2:
        if process.poll() is not None:
            raise RuntimeError("the training ended before it could be killed")
        time.sleep(0.02)
    kill_family(process)
    at = len(read_entries(killed))
    if start(killed, processes).wait():
        raise RuntimeError("the resumed training failed")
    curves = [[entry["loss"] for entry in read_entries(job)] for job in (whole, killed)]
    apart = max(abs(one - other) for one, other in zip(*curves, strict=True))
    return {
        "kind": kind,
        "processes": processes,
        "killed_at_step": at,
        "same": curves[0] == curves[1],
        "largest_difference": apart,
    }


def kill_family(process: subprocess.Popen[bytes]) -> None:
    """Kill the launcher's children and then the launcher, with SIGKILL."""
    listing = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=False
    )
    for child in listing.stdout.split():
        subprocess.run(["kill", "-9", child], check=False)
    process.kill()
    process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("scaling", "resume"))
    parser.add_argument("--kind", choices=("clip", "blip"), default="blip")
    parser.add_argument("--processes", type=int, nargs="+", default=[1])
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--examples", type=int, default=EXAMPLES)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_noise(folder / "noise", options.examples)
        if options.what == "scaling":
            print(json.dumps(measure_scaling(options.kind, options.processes, options.seconds, folder)))
        else:
            print(json.dumps(check_resume(options.kind, options.processes[0], folder)))


if __name__ == "__main__":
    main()
