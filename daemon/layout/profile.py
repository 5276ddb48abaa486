"""What `visiond tune` has measured on this machine: a file in the state folder.

`auto` uses the chosen settings as long as GPUs, cores and models are the same as when they were measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from daemon.config.loading import Config
from daemon.config.pipeline import PipelineSection
from daemon.config.state import LEDGER, PROFILE
from daemon.core.files import written_whole
from daemon.system.gpus import Gpu
from stages.contract.base import StageSpec
from stages.contract.files import read_file

GAIN = 1.03  # how much faster settings must be to replace others that need less or were tried before
SAFETY = 1.1  # GPU memory of a long run; over 200,000 images it grew by 8 % (docs/performance.md)


class TunedSettings(msgspec.Struct, frozen=True):
    """What the tuner varies. workers: on each device; batches: batch_size by stage."""

    placement: str  # "replicated" or "pipelined"
    workers: int
    batches: dict[str, int]

    @property
    def batch(self) -> int:
        """The most images in a batch of a worker."""
        return max(self.batches.values())

    def __str__(self) -> str:
        sizes = set(self.batches.values())
        batches = (
            f"{self.batch}" if len(sizes) == 1 else ", ".join(f"{s} {n}" for s, n in self.batches.items())
        )
        return f"{self.placement}, {self.workers} worker{'s' * (self.workers != 1)}, batches of {batches}"


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """Settings as measured. failure: why they do not work; empty if they do.

    Bytes are for one worker, at the peak: of its GPU's memory with everything that its process needs there,
    of that the part in tensors, and of the host's memory with its decoders.
    """

    settings: TunedSettings
    images_per_second: float = 0.0
    slowest: float = 0.0  # images per second, of the thirds of the measurement
    fastest: float = 0.0
    images: int = 0  # that were measured
    start_seconds: float = 0.0  # from the start of the process until all workers were ready
    gpu_bytes: int = 0
    tensor_bytes: int = 0
    host_bytes: int = 0
    stage_seconds: dict[str, float] = {}  # for each image: of its batch, divided by the batch's images
    gpu_busy: float | None = None  # 0..1, in the steady part; as in daemon/measure/steady.py
    cores_busy: float | None = None
    limited_by: str = ""
    failure: str = ""

    def count_fitting(self, gpus: Sequence[Gpu]) -> int:
        """How many of its workers on each GPU have memory now."""
        room = [int(gpu.free_bytes / (SAFETY * self.gpu_bytes)) for gpu in gpus if self.gpu_bytes]
        return min([self.settings.workers, *room])

    def seconds_for(self, images: int) -> float:
        """How long this number of images takes, from the start of the process."""
        return self.start_seconds + images / self.images_per_second


class Machine(msgspec.Struct, frozen=True):
    """What a measurement depends on. models: fingerprints by stage, which include dtypes and options."""

    gpus: list[str]  # names, in order; empty without a GPU
    gpu_bytes: list[int]  # their memory
    cores: int
    models: dict[str, str]

    @classmethod
    def of(cls, gpus: Iterable[Gpu], cores: int, specs: Mapping[str, StageSpec]) -> Machine:
        used = list(gpus)
        return cls(
            [gpu.name for gpu in used],
            [gpu.total_bytes for gpu in used],
            cores,
            {name: spec.fingerprint for name, spec in specs.items()},
        )


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """All trials of a search on one machine, in order. sample: the images, in words."""

    machine: Machine
    sample: str
    made_on: str  # date
    trials: list[Trial] = []

    def find(self, settings: TunedSettings) -> Trial | None:
        return next((t for t in self.trials if t.settings == settings and not t.failure), None)

    @property
    def costs(self) -> dict[str, float]:
        """Seconds of each stage for an image: of the first replicated trial that worked, so that they do not
        change while a search goes on. Empty if there is none, or it has not measured every stage."""
        trials = (t for t in self.trials if t.settings.placement == "replicated" and not t.failure)
        costs = next(trials, Trial(settings=TunedSettings("", 0, {}))).stage_seconds
        return costs if costs.keys() == self.machine.models.keys() and all(costs.values()) else {}

    @property
    def best(self) -> Trial | None:
        return choose_best(self.trials)


def choose_best(trials: Iterable[Trial]) -> Trial | None:
    """The first trial that no later one beats by GAIN: a small gain may be noise, and what comes later in a
    search needs more workers or more memory."""
    best: Trial | None = None
    for trial in trials:
        if not trial.failure and (best is None or trial.images_per_second >= GAIN * best.images_per_second):
            best = trial
    return best


def read_profile(folder: Path, *, finished: bool = True) -> Profile | None:
    """The profile in a state folder, or that of an interrupted search; None if there is none that this version can read."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(read_file(folder / _name(finished)), type=Profile)
    return None


def write_profile(folder: Path, profile: Profile, *, finished: bool) -> None:
    """Raises NotWritable."""
    with written_whole(folder / _name(finished), folder / LEDGER, force=True) as partial:
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(profile)) + b"\n")
    if finished:
        (folder / _name(False)).unlink(missing_ok=True)


def _name(finished: bool) -> str:
    return PROFILE if finished else f"{PROFILE}.unfinished"


def find_tuned(folder: Path, machine: Machine) -> Profile | None:
    """The profile, if it is of this machine with these models."""
    profile = read_profile(folder)
    return profile if profile and profile.machine == machine else None


def apply(config: Config, profile: Profile, gpus: Sequence[Gpu]) -> tuple[Config, str] | None:
    """The configuration with the best settings of the profile where it leaves them open, and why. None where
    it leaves nothing open, or if a neighbor has taken so much memory that not even one worker fits. A `spread` that is set
    decides the number of workers, also after a measurement.

    gpus: those that are used.
    """
    section, best = config.pipeline, profile.best
    if best is None:
        return None
    tuned = best.settings
    set_batches = {name: getattr(config.stages, name).batch_size for name in tuned.batches}
    are_workers_set = _sets_workers(section, gpus)
    leaves_nothing = (
        section.segment,
        section.prefer == "latency",
        section.placement not in ("auto", tuned.placement),
        section.placement != "auto" and are_workers_set and all(set_batches.values()),
    )
    fitting = best.count_fitting(gpus)
    if any(leaves_nothing) or fitting < 1:
        return None
    settings = TunedSettings(
        tuned.placement,
        section.workers_per_device if are_workers_set else fitting,  # 0: `spread` decides
        {name: set_batches[name] or batch for name, batch in tuned.batches.items()},
    )
    return fill_in(config, settings), _explain(profile, fitting, settings, gpus)


def _sets_workers(section: PipelineSection, gpus: Sequence[Gpu]) -> bool:
    return section.workers_per_device > 0 or (bool(gpus) and section.spread != "memory-aware")


def fill_in(config: Config, settings: TunedSettings) -> Config:
    """The configuration with exactly these settings."""
    pipeline = {"placement": settings.placement, "workers_per_device": settings.workers}
    stages = {
        name: getattr(config.stages, name).model_copy(update={"batch_size": batch})
        for name, batch in settings.batches.items()
    }
    return config.model_copy(
        update={
            "pipeline": config.pipeline.model_copy(update=pipeline),
            "stages": config.stages.model_copy(update=stages),
        }
    )


def _explain(profile: Profile, fitting: int, settings: TunedSettings, gpus: Sequence[Gpu]) -> str:
    """fitting: the number of workers that the memory that is free now would hold."""
    known = profile.find(settings)
    measured = (
        f"`visiond tune` measured {known.images_per_second:,.4g} images/s with these settings"
        if known
        else ""
    )
    best = profile.best
    if best and settings.workers == fitting < best.settings.workers:
        free = min(gpu.free_bytes for gpu in gpus) >> 20
        short = (
            f"`visiond tune` found {best.settings.workers} workers to be best, but the {free:,} MiB of GPU memory that "
            f"are free now hold only {fitting}"
        )
        return f"{short}; {measured}" if measured else short
    return measured or "as `visiond tune` measured, except for what the configuration sets"
