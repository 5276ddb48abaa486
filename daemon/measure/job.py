"""`visiond bench`: the standard job through the real daemon, compared with the same images one at a time.

The daemon is a separate process, `visiond run --once`, as users start it. The figures come from its output: a
sidecar is written when its result is durable, so its modification time shows when that was; the ledger has
the seconds of the stages.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from daemon.config.loading import Config
from daemon.core.errors import VisiondError
from daemon.layout.layout import Layout
from daemon.ledger.record import Record
from daemon.ledger.records import open_reader
from daemon.measure.ceiling import measure_ceiling
from daemon.measure.meter import INTERVAL_SECONDS, LoadSample, Meter
from daemon.measure.place import NEW_TOKENS, Place, Report, describe_run, run_module
from daemon.measure.steady import Steady, find_steady
from daemon.measure.throwaway import Throwaway

WARM_UP = 2  # single images before the timed ones
PATIENCE_SECONDS = 60.0  # for a single image on an idle daemon
POLL_SECONDS = 0.0005  # between two checks for its sidecar
Print = Callable[[str], None]


class Percentiles(msgspec.Struct, frozen=True):
    """Seconds."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles:
        cuts = statistics.quantiles(seconds, n=100, method="inclusive")
        return cls(cuts[49], cuts[94], cuts[98])


class LookRun(msgspec.Struct, frozen=True):
    """A second look in a run. images_per_second: from the moment that the first worker is loaded to the last sidecar with
    this second look. stage_seconds: per image, as in Run.stage_seconds."""

    name: str
    stage: str
    images: int
    failed: int
    images_per_second: float
    stage_seconds: float


class Run(msgspec.Struct, frozen=True):
    """The standard job once. images_per_second: from the moment that the first worker is loaded to the last sidecar."""

    cold: bool  # without compiled kernels
    wall_seconds: float  # of the whole process
    load_seconds: float  # until the first worker had its models
    images_per_second: float
    # From seen or loaded, whichever is later, to the sidecar; with a backlog mostly waiting time.
    latency: Percentiles
    # Per image: the batch's time divided by its images, including the wait for the device.
    stage_seconds: dict[str, float]
    # Seconds since the start, in order. For an image with a second look, the time at which its first looks ended.
    published_at: list[float]
    samples: list[LoadSample]
    steady: Steady
    second_looks: list[LookRun] = []


class Timings(msgspec.Struct, frozen=True):
    """One image at a time. stage_seconds: sum over all images."""

    images: int
    images_per_second: float
    stage_seconds: dict[str, float]


class JobReport(Report, frozen=True, kw_only=True):
    pack: str
    images: int
    images_per_second: float  # the median of the representative runs
    ratio: float  # to one image at a time
    runs: list[Run]
    one_at_a_time: Timings
    single_image: Percentiles  # from the file's arrival to its sidecar, on an idle daemon
    memory_images_per_second: float | None  # by the same workers, from bytes in memory


def run_bench(
    place: Place,
    count: int,
    *,
    repeat: int = 1,
    cold: int,
    warm: int,
    sample: int,
    single: int,
    memory_seconds: float,
    progress: Print,
) -> JobReport:
    """Run all measurements. repeat: names of each image in the inbox.
    memory_seconds: how long to feed the workers from memory; 0: not at all."""
    progress("images and weights")
    place.make_pack()
    images = place.make_images(count)
    inbox = place.make_inbox(images, repeat)
    runs: list[Run] = []
    for is_cold in [True] * cold + [False] * warm:
        progress(f"run {len(runs) + 1} of {cold + warm}, {'cold' if is_cold else 'warm'}")
        runs.append(run_job(place, inbox, cold=is_cold))
    rate = statistics.median(run.images_per_second for run in representative(runs))
    progress("single images on an idle daemon")
    latency = time_single_images(place, images[: WARM_UP + single])
    config = place.prepare(images[0].parent)
    memory = None
    if memory_seconds:
        progress("workers fed from memory")
        memory = measure_ceiling(config, images, memory_seconds)
    progress("one image at a time")
    timings = time_one_at_a_time(Layout.of(config), images[: 1 + sample])
    return JobReport(
        **describe_run(),
        pack=place.pack,
        images=count * repeat,
        images_per_second=rate,
        ratio=rate / timings.images_per_second,
        runs=runs,
        one_at_a_time=timings,
        single_image=latency,
        memory_images_per_second=memory,
    )


def representative(runs: Sequence[Run]) -> Sequence[Run]:
    """The warm runs, or the cold ones if there are no warm ones."""
    return [run for run in runs if not run.cold] or runs


def run_job(place: Place, inbox: Path, *, cold: bool, unpack: Sequence[str] = ()) -> Run:
    """Run `visiond run --once` over a folder. unpack: as in [[inbox]]. Raises VisiondError if it fails."""
    config = place.prepare(inbox, cold=cold, unpack=unpack)
    with Throwaway(config, place.config_file, "--once") as daemon, Meter(daemon.process.pid, config) as meter:
        daemon.wait_until_done()
        ended = time.time()
    records, written = read_results(config)
    if not records:
        raise VisiondError(f"No image in {inbox} succeeded; `visiond list --status failed` shows why.")
    # A second look writes the sidecar again, so the file's time is not when the first looks ended.
    published = [
        at if not record.looks or record.finished_at is None else record.finished_at
        for at, record in zip(written, records, strict=True)
    ]
    # Fast stages may be done before the next sample: the models were loaded before the first result.
    loaded_at = min(meter.loaded_at, min(written) - INTERVAL_SECONDS)
    waits = [at - max(record.seen_at, loaded_at) for at, record in zip(published, records, strict=True)]
    times = sorted(at - meter.started for at in published)
    return Run(
        cold=cold,
        wall_seconds=ended - meter.started,
        load_seconds=loaded_at - meter.started,
        images_per_second=len(records) / (max(published) - loaded_at),
        latency=Percentiles.of(waits),
        stage_seconds={
            name: statistics.fmean(r.outputs[name].seconds for r in records) for name in config.stage_names
        },
        published_at=times,
        samples=meter.samples,
        steady=find_steady(times, meter),
        second_looks=[
            sum_up(look.name, look.stage, written, records, loaded_at) for look in config.second_look
        ],
    )


def read_results(config: Config, below: bytes = b"") -> tuple[list[Record], list[float]]:
    """What is DONE in this folder of the inbox, and when each of the sidecars was last written, in Unix seconds."""
    with open_reader(config) as reader:
        records = [record for record in reader.finished() if record.path.startswith(below)]
    results = os.fsencode(config.output.results)
    return records, [os.stat(os.path.join(results, record.path + b".json")).st_mtime for record in records]


def sum_up(
    name: str, stage: str, written: Sequence[float], records: Sequence[Record], loaded_at: float
) -> LookRun:
    """What the only second look did. written: when each record's sidecar was last written, by this look if it has one."""
    ended = [
        (at, record.looks[name]) for at, record in zip(written, records, strict=True) if name in record.looks
    ]
    seconds = [look.output.seconds for _, look in ended if look.output]
    last = max((at for at, _ in ended), default=loaded_at)
    rate = len(ended) / (last - loaded_at) if ended else 0.0
    mean = statistics.fmean(seconds) if seconds else 0.0
    return LookRun(name, stage, len(ended), len(ended) - len(seconds), rate, mean)


def time_single_images(place: Place, images: Sequence[Path]) -> Percentiles:
    """Time from a file's arrival by rename, which needs no settling, to its sidecar, on an idle daemon."""
    shutil.rmtree(place.drop, ignore_errors=True)
    place.drop.mkdir()
    config = place.prepare(place.drop)
    with Throwaway(config, place.config_file) as daemon:
        daemon.wait_until_ready()
        seconds = [time_single_image(config, place.drop, image) for image in images]
    return Percentiles.of(seconds[WARM_UP:])


def time_single_image(config: Config, drop: Path, image: Path) -> float:
    part = shutil.copyfile(image, drop / f".{image.name}.part")
    sidecar = config.output.results / f"{image.name}.json"
    started = time.monotonic()
    part.rename(drop / image.name)
    while not sidecar.exists():
        if time.monotonic() > started + PATIENCE_SECONDS:
            raise VisiondError(f"A single image had no sidecar after {PATIENCE_SECONDS:g} s.")
        time.sleep(POLL_SECONDS)
    return time.monotonic() - started


def time_one_at_a_time(
    layout: Layout, images: Sequence[Path], changes: Mapping[str, str] | None = None
) -> Timings:
    """On the first GPU that it sees, or on the CPU. The first image is for warm-up. changes: to the environment."""
    on_cpu = layout.placement.segments[0].devices[0].startswith("cpu")
    task = {
        "stages": list(layout.specs.values()),
        "images": list(map(str, images)),
        "device": "cpu" if on_cpu else "cuda:0",
        "new_tokens": NEW_TOKENS,
    }
    output = run_module("stages.registry.baseline", task=msgspec.json.encode(task), changes=changes)
    spent: dict[str, float] = json.loads(output.splitlines()[-1])
    timed = len(images) - 1
    return Timings(timed, timed / sum(spent.values()), spent)
