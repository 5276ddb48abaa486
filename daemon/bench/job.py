"""`visiond bench`: the standard job through the real daemon, compared with the same images one at a time.

The daemon is a separate process, `visiond run --once`, as users start it. The figures come from its output: a
sidecar is written when its result is durable, so its modification time shows when that was; the ledger has
the seconds of the stages.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import msgspec

from daemon import __version__
from daemon.bench.ceiling import measure_ceiling
from daemon.bench.meter import INTERVAL_SECONDS, Meter, Sample
from daemon.config.loading import Config, load
from daemon.config.state import KERNELS
from daemon.control import find_snapshot
from daemon.core.errors import VisiondError
from daemon.layout.layout import Layout
from daemon.ledger.record import Record
from daemon.ledger.records import open_reader
from daemon.system.gpus import driver_version, list_gpus
from stages.contract.processes import count_cores, environment, python
from stages.scenes.truth import TRUTH

NEW_TOKENS = 12  # of each caption, forced
WARM_UP = 2  # single images before the timed ones
PATIENCE_SECONDS = 60.0  # for a single image on an idle daemon
POLL_SECONDS = 0.0005  # between two checks for its sidecar
ROOT = Path(__file__).parent.parent
Print = Callable[[str], None]

CONFIG = """\
# Made by `visiond bench`; each run writes it again.
[[inbox]]
path = {inbox}
settle_seconds = 0
[http]
listen = ""
[log]
level = "warning"
[models]
pack = {pack}
folder = {models}
[stages.blip]
options = {{ max_new_tokens = {tokens}, force_tokens = {tokens} }}
[pipeline]
reuse_results = false
{pipeline}
"""


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
    samples: list[Sample]
    second_looks: list[LookRun] = []


class Timings(msgspec.Struct, frozen=True):
    """One image at a time. stage_seconds: sum over all images."""

    images: int
    images_per_second: float
    stage_seconds: dict[str, float]


class Machine(msgspec.Struct, frozen=True):
    gpus: list[str]
    driver: str | None
    torch: str
    python: str
    cores: int

    @classmethod
    def this(cls) -> Machine:
        names = [gpu.name for gpu in list_gpus()]
        return cls(names, driver_version(), version("torch"), sys.version.split()[0], count_cores())


class Report(msgspec.Struct, frozen=True, kw_only=True):
    command: list[str]
    version: str
    commit: str | None
    machine: Machine
    pack: str
    images: int
    images_per_second: float  # the median of the representative runs
    ratio: float  # to one image at a time
    runs: list[Run]
    one_at_a_time: Timings
    single_image: Percentiles  # from the file's arrival to its sidecar, on an idle daemon
    memory_images_per_second: float | None  # by the same workers, from bytes in memory


class Place:
    """The folder of a benchmark: images and weights, which stay for the next one, and a daemon's own folders."""

    def __init__(
        self, folder: Path, pack: str = "", pipeline: Sequence[str] = (), second_look: str = ""
    ) -> None:
        """pack: as in [models]; "" for random weights. pipeline: lines for that table of the configuration.
        second_look: a [[second_look]] table of the configuration."""
        self.folder = folder.absolute()
        self.home = self.folder / "daemon"
        self.config_file = self.home / "daemon.toml"
        self.drop = self.folder / "drop"
        self.pack = str(Path(pack).absolute()) if "/" in pack else pack or str(self.folder / "pack")
        self._pipeline = "\n".join([*pipeline, second_look])

    def make_pack(self) -> None:
        """Make the published architectures with random weights, unless they exist or a pack was named."""
        if self.pack == str(self.folder / "pack"):
            make_once(self.folder / "pack", lambda part: run_module("stages.training.published", str(part)))

    def make_images(self, count: int) -> list[Path]:
        """Make the images of the standard job, unless they exist."""
        from stages.scenes.generator import standard_job

        inbox = make_once(self.folder / f"images-{count}", lambda part: standard_job(part, count, seed=0))
        return [path for path in sorted(inbox.iterdir()) if path.name != TRUTH]

    def make_inbox(self, images: Sequence[Path], repeat: int) -> Path:
        """A folder with each image under `repeat` names. The daemon treats each name as a separate image."""
        if repeat == 1:
            return images[0].parent
        return make_once(
            self.folder / f"images-{len(images)}x{repeat}", lambda part: link_images(images, repeat, part)
        )

    def prepare(self, inbox: Path, *, cold: bool = False) -> Config:
        """Remove ledger and results, and write the configuration. Keeps compiled kernels unless `cold`."""
        for path in (self.home / "results", *self.home.glob("state/*")):
            if path.is_file():
                path.unlink()
            elif cold or path.name != KERNELS:
                shutil.rmtree(path, ignore_errors=True)
        self.home.mkdir(parents=True, exist_ok=True)
        strings = {"inbox": inbox, "pack": self.pack, "models": Path("models").absolute()}
        quoted = {key: json.dumps(str(value)) for key, value in strings.items()}
        self.config_file.write_text(CONFIG.format(**quoted, tokens=NEW_TOKENS, pipeline=self._pipeline))
        return load(self.config_file)

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        """Start the daemon. Its progress and its errors go to stderr."""
        command = python("-m", "daemon", "run", "--config", str(self.config_file), *options)
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment()
        )


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
) -> Report:
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
    return Report(
        command=sys.argv,
        version=__version__,
        commit=find_commit(),
        machine=Machine.this(),
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


def run_job(place: Place, inbox: Path, *, cold: bool) -> Run:
    """Run `visiond run --once` over a folder. Raises VisiondError if it fails."""
    config = place.prepare(inbox, cold=cold)
    with place.start("--once") as daemon, Meter(daemon.pid, config) as meter:
        status = daemon.wait()
        ended = time.time()
    if status:
        raise VisiondError(f"`visiond run --once` ended with status {status}; its messages are above.")
    with open_reader(config) as reader:
        records = list(reader.finished())
    results = os.fsencode(config.output.results)
    written = [os.stat(os.path.join(results, record.path + b".json")).st_mtime for record in records]
    # A second look writes the sidecar again, so the file's time is not when the first looks ended.
    published = [
        at if not record.looks or record.finished_at is None else record.finished_at
        for at, record in zip(written, records, strict=True)
    ]
    # Fast stages may be done before the next sample: the models were loaded before the first result.
    loaded_at = min(meter.loaded_at, min(written) - INTERVAL_SECONDS)
    waits = [at - max(record.seen_at, loaded_at) for at, record in zip(published, records, strict=True)]
    return Run(
        cold=cold,
        wall_seconds=ended - meter.started,
        load_seconds=loaded_at - meter.started,
        images_per_second=len(records) / (max(published) - loaded_at),
        latency=Percentiles.of(waits),
        stage_seconds={
            name: statistics.fmean(r.outputs[name].seconds for r in records) for name in config.stage_names
        },
        published_at=sorted(at - meter.started for at in published),
        samples=meter.samples,
        second_looks=[
            sum_up(look.name, look.stage, written, records, loaded_at) for look in config.second_look
        ],
    )


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
    with run_idle(place, config):
        seconds = [time_single_image(config, place.drop, image) for image in images]
    return Percentiles.of(seconds[WARM_UP:])


@contextmanager
def run_idle(place: Place, config: Config) -> Iterator[None]:
    """A daemon whose workers have all loaded their models."""
    deadline = time.monotonic() + config.pipeline.load_timeout_seconds
    with place.start() as daemon:
        try:
            while not (
                (snapshot := find_snapshot(config))
                and all(worker.state == "ready" for worker in snapshot.workers)
            ):
                if daemon.poll() is not None or time.monotonic() > deadline:
                    raise VisiondError("The daemon did not become ready; its messages are above.")
                time.sleep(0.1)
            yield
        finally:
            daemon.terminate()


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


def link_images(images: Sequence[Path], repeat: int, folder: Path) -> None:
    folder.mkdir()
    for copy, image in itertools.product(range(repeat), images):
        (folder / f"{copy:04}-{image.name}").hardlink_to(image)


def make_once(target: Path, make: Callable[[Path], object]) -> Path:
    """Make a folder by calling `make`, completely or not at all."""
    if not target.exists():
        part = target.with_name(f"{target.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.parent.mkdir(parents=True, exist_ok=True)
        make(part)
        part.rename(target)
    return target


def run_module(
    module: str, *arguments: str, task: bytes = b"", changes: Mapping[str, str] | None = None
) -> bytes:
    """Run a module that needs torch in a separate process; returns its output. Raises VisiondError."""
    result = subprocess.run(
        python("-m", module, *arguments), input=task, stdout=subprocess.PIPE, env=environment(changes)
    )
    if result.returncode:
        raise VisiondError(
            f"python -m {module} ended with status {result.returncode}; its messages are above."
        )
    return result.stdout


def find_commit() -> str | None:
    """The commit of the source tree, with -dirty if files differ; None for an installed package."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        return None
    described = subprocess.run(
        ["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    return described.stdout.strip() or None
