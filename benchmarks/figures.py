"""Runs all measurements that need a GPU, one after another, each with a time limit and a log of its own.

    python -m benchmarks.figures --output figures
    python -m benchmarks.figures --output figures --only two-gpus inputs cluster --seconds 540

For machines that are only there for a short time: what has ended is in the folder, whatever happens afterwards. --seconds
limits all parts together; a part that is cut off says so. All parts share one folder for images and weights.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stages.contract.processes import ROOT, describe_end, environment, python

SHOWN_LINES = 25
STOP_SECONDS = 10.0
LEAST_SECONDS = 20.0  # with less left, a part is not begun


@dataclass(frozen=True)
class Part:
    """arguments: of Python; FOLDER and OUTPUT stand for the two folders. seconds: the most that it may take."""

    name: str
    seconds: float
    arguments: tuple[str, ...]


def part(name: str, seconds: float, command: str) -> Part:
    return Part(name, seconds, tuple(command.split()))


SCALING = "-m daemon bench --folder FOLDER --cold 0 --count 1000 --json OUTPUT"
INPUTS = "-m daemon bench --folder FOLDER --inputs standard,web,phone,screen,scan,mixed"
PARTS = (
    part(
        "two-gpus",
        120,
        "-m pytest -p no:cacheprovider -p no:benchmark -q -m gpu -k two_gpus -n 4 tests/stages/blip tests/stages/reading",
    ),
    part("scaling", 560, f"{SCALING}/scaling.json --gpus 1,2 --repeat 12 --warm 3 --sample 6"),
    part("answers", 200, f"{SCALING}/answers.json --gpus 1,2 --repeat 2 --warm 1 --sample 2 --pack mini"),
    part("cluster", 300, "-m benchmarks.cluster standard --folder FOLDER --repeat 8 --rounds 2"),
    part(
        "qwen",
        240,
        "-m benchmarks.models --folder FOLDER --only qwen3-vl-2b --stock-best --pipeline --seconds 1 --batches 32 64",
    ),
    part(
        "small-weights",
        150,
        "-m benchmarks.models --folder FOLDER --only qwen3-vl-2b,clip-l14 --dtype float8 --alone --seconds 1 --batches 32",
    ),
    part("inputs", 560, f"{INPUTS} --warm 1 --json OUTPUT/inputs.json"),
    part(
        "tuning-1",
        400,
        "-m benchmarks.tuning --folder FOLDER --gpus 1 --seconds 5 --workers 5 --batches 64 128",
    ),
    part(
        "tuning-2", 400, "-m benchmarks.tuning --folder FOLDER --gpus 2 --seconds 5 --workers 5 --batches 128"
    ),
)


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [each.name for each in parts]
    parser.add_argument(
        "--only", nargs="+", default=names, choices=names, metavar="PART", help=", ".join(names)
    )
    parser.add_argument("--folder", type=Path, default=Path("bench"), help="for images and weights")
    parser.add_argument("--output", type=Path, required=True, help="folder for the logs and reports")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="the most for all parts together")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + options.seconds
    failed = False
    for name in options.only:
        [chosen] = [each for each in parts if each.name == name]
        seconds = min(chosen.seconds, until - time.monotonic())
        if seconds < LEAST_SECONDS:
            print(f"== {name}: not begun, because the time is used up", flush=True)
            failed = True
        else:
            failed |= not run(chosen, seconds, options.folder.absolute(), options.output.absolute())
    sys.exit(failed)


def run(chosen: Part, seconds: float, folder: Path, output: Path) -> bool:
    """Whether it succeeded. Prints the end of its log, which is in `output`."""
    places = {"FOLDER": str(folder), "OUTPUT": str(output)}
    command = python(*(replace(argument, places) for argument in chosen.arguments))
    file = output / f"{chosen.name}.log"
    started = time.monotonic()
    with file.open("wb") as log:
        # A session of its own, so that all that it has started can be ended.
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=log, stderr=log, start_new_session=True
        )
        try:
            ended = describe_end(process.wait(seconds))
        except subprocess.TimeoutExpired:
            ended = "cut off"
        finally:
            stop(process)
    print(f"== {chosen.name}: {ended} after {time.monotonic() - started:.0f} s", flush=True)
    print(*file.read_text(errors="replace").splitlines()[-SHOWN_LINES:], sep="\n", flush=True)
    return process.returncode == 0


def replace(argument: str, places: dict[str, str]) -> str:
    for name, place in places.items():
        argument = argument.replace(name, place)
    return argument


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it has started and that has not ended yet."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signum)
            process.wait(STOP_SECONDS)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait()


if __name__ == "__main__":
    main()
