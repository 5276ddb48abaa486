"""`visiond tune`: makes a sample, measures one setting after another, and keeps what it found."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from daemon.config.loading import Config
from daemon.config.state import TUNING, closed_to_others, lock_state
from daemon.core.errors import AlreadyRunning, ConfigError, NothingFound, VisiondError
from daemon.core.files import written_into
from daemon.core.hints import command, quantity
from daemon.layout.devices import select_devices, used_gpus
from daemon.layout.models import choose_dtypes, resolve_models
from daemon.layout.profile import Machine, Profile, Trial, read_profile, write_profile
from daemon.measure.search import Space, judge, next_settings
from daemon.measure.throwaway import Say
from daemon.measure.trial import Bench
from daemon.system.gpus import Gpu, list_gpus
from daemon.system.host import Host
from stages.contract.base import StageSpec

SEED = 0  # of the standard images, and of the choice among the user's
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".tif", ".tiff", ".bmp", ".ppm", ".avif", ".heic")


@dataclass(frozen=True, slots=True)
class TuningPlan:
    """What to measure. images: a folder; None: images of the standard job."""

    images: Path | None
    count: int  # of different images
    seconds: float  # of each measurement, roughly

    def describe(self, count: int) -> str:
        """Where this number of images is from."""
        return f"{quantity(count, 'image')} of {self.images or 'the standard job'}"


Report = Callable[[int, Trial], None]  # gets the number of a trial, and the trial


def tune(
    config: Config,
    order: TuningPlan,
    *,
    keep: bool,
    force: bool,
    say: Say,
    reporting: AbstractContextManager[Report],
) -> Profile:
    """Search until no step gains. Each trial is kept at once, so that an interrupted search can be continued.

    keep: whether to write the profile. force: measure although a daemon is running. reporting: entered when nothing stands in
    the way of measuring.
    """
    gpus = list_gpus()
    config = select_devices(choose_dtypes(config, gpus), gpus)
    specs = resolve_models(config, gpus)
    refuse_needless(config)
    used, host = used_gpus(config, gpus), Host.here()
    devices = config.pipeline.devices or [gpu.device for gpu in used] or ["cpu"]
    space = find_space(specs, used, host, len(devices))
    machine = Machine.of(used, host.cores, specs)
    with alone(config, force=force), work_folder(config) as folder, reporting as report:
        say("preparing images")
        sample = make_sample(order, folder / "sample")
        bench = Bench(config, folder, sample, devices, order.seconds)
        profile = start_profile(config, machine, order.describe(len(sample)))
        for number, trial in enumerate(profile.trials, 1):
            report(number, trial)
        while settings := next_settings(space, profile.trials):
            named = partial(_say_named, say, f"trial {len(profile.trials) + 1}: {settings}")
            bench.profile = profile
            measured = bench.measure(settings, named)
            trial = judge(space, measured)
            profile = msgspec.structs.replace(profile, trials=[*profile.trials, trial])
            report(len(profile.trials), trial)
            if keep:
                write_profile(config.state.path, profile, finished=False)
        if not profile.best:
            raise VisiondError(f"No settings worked. The last ones: {profile.trials[-1].failure}.")
        if keep:
            write_profile(config.state.path, profile, finished=True)
    return profile


def find_space(specs: Mapping[str, StageSpec], gpus: Sequence[Gpu], host: Host, devices: int) -> Space:
    """gpus: that may be used."""
    return Space(
        placements=("replicated", "pipelined") if devices > 1 and len(specs) > 1 else ("replicated",),
        batches={name: spec.batch_size for name, spec in specs.items()},
        most_workers=max(1, host.cores // devices),
        devices=devices,
        gpu_bytes=min((gpu.free_bytes for gpu in gpus), default=None),
        host_bytes=host.free_bytes,
    )


def _say_named(say: Say, name: str, text: str) -> None:
    say(f"{name}: {text}")


def start_profile(config: Config, machine: Machine, sample: str) -> Profile:
    """The profile of an interrupted search with the same images, or an empty one."""
    old = read_profile(config.state.path, finished=False)
    if old and (old.machine, old.sample) == (machine, sample):
        return old
    return Profile(machine=machine, sample=sample, made_on=time.strftime("%Y-%m-%d"))


def refuse_needless(config: Config) -> None:
    """Raises ConfigError if nothing that is measured would be used."""
    if config.pipeline.prefer == "latency":
        raise ConfigError(
            [
                f"pipeline.prefer: `{command('tune')}` looks for the highest rate, not for the lowest latency. Set "
                '"throughput" first.'
            ]
        )
    if config.pipeline.segment:
        raise ConfigError(
            [
                "pipeline.segment: the placement is set by [[pipeline.segment]] tables, so there is nothing to tune. "
                "Remove them first."
            ]
        )


@contextlib.contextmanager
def alone(config: Config, *, force: bool) -> Iterator[None]:
    """Holds the lock of the state folder, so that no daemon runs or starts here. Raises AlreadyRunning."""
    if force:
        with closed_to_others():
            yield
        return
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock_state(config.state.path))
        except AlreadyRunning as error:
            raise AlreadyRunning(
                f"{error} Its work and its GPU memory would falsify the figures; --force measures all the same."
            ) from None
        yield


@contextlib.contextmanager
def work_folder(config: Config) -> Iterator[Path]:
    """A folder in the state folder, so on the kind of disk that the daemon will have. It is removed at the
    end, also after Ctrl-C; what a killed process has left, now."""
    state = config.state.path
    with written_into(state):
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        for leftover in state.glob(f"{TUNING}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=TUNING, dir=state))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_sample(order: TuningPlan, folder: Path) -> list[Path]:
    """Copies of some of the user's images, or new ones of the standard job. Raises NothingFound."""
    if order.images is None:
        from stages.scenes.generator import standard_job

        standard_job(folder, order.count, SEED)
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    found = sorted(itertools.islice(find_images(order.images), 100_000))
    if not found:
        raise NothingFound(f"There are no images in {order.images}; name another folder with --images.")
    chosen = random.Random(SEED).sample(found, min(order.count, len(found)))
    folder.mkdir()
    return [
        Path(shutil.copyfile(image, folder / f"{number:06d}{image.suffix}"))
        for number, image in enumerate(chosen)
    ]


def find_images(folder: Path) -> Iterator[Path]:
    for where, _, names in os.walk(folder):
        for name in names:
            path = Path(where, name)
            if path.suffix.lower() in SUFFIXES and path.is_file() and not path.is_symlink():
                yield path
