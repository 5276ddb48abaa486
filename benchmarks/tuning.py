"""Checks `visiond tune` against runs of the standard job: are its predictions within 15 % of the measured rate,
and are the settings that it chose within 5 % of the best found by hand?

    python -m benchmarks.tuning --gpus 1 2 --workers 4 5 6 --batches 64 128
    python -m benchmarks.tuning --gpus 0 --pack mini --count 20 --seconds 5 --workers 1 2 --batches 4 8

For each number of GPUs (0: the CPU) it runs the tuner, then `visiond run --once` with four of the settings that
the tuner measured, and with each number of workers and each size of batches that is given. A run's rate is
that of its middle 70 %, as the tuner's. Exits with 1 if a promise is not kept. It keeps what the tuner found in
FOLDER/tuned-<gpus>.json, and uses that if it is there, so that a long check can be continued.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

import msgspec

from benchmarks.harness import read_options
from daemon.layout.profile import Trial, TunedSettings
from daemon.measure.edit import keys_of, set_keys
from daemon.measure.place import Place
from daemon.measure.steady import measure_rate
from daemon.measure.throwaway import Throwaway
from stages.contract.processes import environment, python
from stages.registry.registry import BUILT_IN

PREDICTION, BEST = 0.15, 0.05
CONFIGURATIONS = 4  # of the tuner's, whose prediction is checked


def tune(place: Place, images: Path, count: int, seconds: float, kept: Path) -> tuple[Trial, list[Trial]]:
    """The best trial and all that worked."""
    if not kept.exists():
        place.prepare(images)
        command = ["tune", "--config", str(place.config_file), "--images", str(images), "--count", str(count)]
        options = ["--seconds", str(seconds), "--dry-run", "--json"]
        run = subprocess.run(
            python("-m", "daemon", *command, *options), stdout=subprocess.PIPE, env=environment(), check=True
        )
        kept.write_bytes(run.stdout)
    answer = json.loads(kept.read_bytes())
    trials = msgspec.convert(answer["profile"]["trials"], list[Trial])
    return msgspec.convert(answer["best"], Trial), [trial for trial in trials if not trial.failure]


def run_once(place: Place, images: list[Path], settings: TunedSettings, least: int) -> float:
    """Images per second of `visiond run --once` with these settings, in the steady part."""
    inbox = place.make_inbox(images, max(2, math.ceil(least / len(images))))
    config = place.prepare(inbox)
    place.config_file.write_text(set_keys(place.config_file.read_text(), keys_of(settings)))
    with Throwaway(config, place.config_file, "--once") as daemon:
        daemon.wait_until_done()
    return measure_rate(sorted(file.stat().st_mtime for file in config.output.results.iterdir()))[0]


def choose_four(trials: list[Trial], best: Trial) -> list[Trial]:
    """The best one, and others from the slowest to the fastest."""
    others = sorted((t for t in trials if t != best), key=lambda trial: trial.images_per_second)
    step = max(1, len(others) // (CONFIGURATIONS - 1))
    return [best, *others[::step][: CONFIGURATIONS - 1]]


def check(place: Place, name: str, devices: int, options: argparse.Namespace) -> bool:
    place.make_pack()
    images = place.make_images(options.count)
    best, trials = tune(
        place, images[0].parent, options.count, options.seconds, place.folder / f"tuned-{name}.json"
    )
    print(
        f"{name}: the tuner chose {best.settings} and predicts {best.images_per_second:,.4g} images/s",
        flush=True,
    )
    measured: list[tuple[TunedSettings, float]] = []
    kept = True

    def measure(settings: TunedSettings) -> float:
        known = next((rate for other, rate in measured if other == settings), None)
        if known is not None:
            return known
        guess = next((t.images_per_second for t in trials if t.settings == settings), best.images_per_second)
        held = settings.workers * settings.batch * 2 * devices
        rate = run_once(place, images, settings, int(max(guess * options.seconds * 2, 8 * held)))
        measured.append((settings, rate))
        return rate

    for trial in choose_four(trials, best):
        rate = measure(trial.settings)
        error = trial.images_per_second / rate - 1
        kept &= abs(error) <= PREDICTION
        print(
            f"  {trial.settings}: {trial.images_per_second:,.4g} predicted, {rate:,.4g} measured, {error:+.1%}",
            flush=True,
        )
    for workers in options.workers:
        for batch in options.batches:
            settings = TunedSettings("replicated", workers, {stage.name: batch for stage in BUILT_IN})
            print(f"  by hand: {settings}: {measure(settings):,.4g}", flush=True)
    fastest, top = max(measured, key=lambda each: each[1])
    loss = 1 - measure(best.settings) / top
    print(f"  best of all: {fastest}: {top:,.4g}; the tuner's choice is {loss:.1%} slower", flush=True)
    return kept and loss <= BEST


def main() -> None:
    options = read_options(
        __doc__,
        folder=Path("bench"),
        pack="",
        gpus=[1],
        count=500,
        seconds=15.0,
        workers=[4, 5, 6],
        batches=[64, 128],
    )
    kept = True
    for number in options.gpus:
        devices = [f"cuda:{index}" for index in range(number)] or ["cpu"]
        place = Place(options.folder, options.pack, [f"devices = {json.dumps(devices)}"])
        kept &= check(place, f"{number}-gpus" if number else "cpu", len(devices), options)
    print("both promises are kept" if kept else "a promise is not kept")
    sys.exit(not kept)


if __name__ == "__main__":
    main()
