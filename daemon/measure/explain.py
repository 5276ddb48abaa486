"""What `visiond plan` says: where the stages run, how fast that is, and what limits it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from daemon.config.loading import Config
from daemon.config.pipeline import LATENCY
from daemon.core.hints import command
from daemon.layout.devices import describe_gpu, used_gpus
from daemon.layout.models import resolve_models, weights_of
from daemon.layout.placement import (
    CORES_PER_WORKER,
    LATENCY_BATCHES,
    WORKER_BYTES,
    Batches,
    Placement,
    Segment,
    plan,
)
from daemon.layout.profile import Machine, TunedSettings, find_tuned
from daemon.layout.recorded import find_rates
from daemon.layout.second_looks import lay_out
from daemon.system.cores import Cores
from daemon.system.gpus import Gpu
from daemon.system.host import Host
from stages.contract.base import StageSpec
from stages.contract.processes import count_cores

AMPLE = Host(cores=1 << 20, free_bytes=1 << 50)  # of a host that is not known


class Explanation(msgspec.Struct, frozen=True):
    """A placement with what is known about it. images_per_second: None if these settings were not measured
    on this machine."""

    segments: list[Segment]
    why: str
    batches: dict[str, int]
    limit: str
    images_per_second: float | None
    sentences: list[str]


def explain(config: Config) -> Explanation:
    """For this machine."""
    layout, looks = lay_out(config)
    used = used_gpus(layout.config, layout.gpus)
    machine = Machine.of(used, count_cores(), layout.specs)
    profile = find_tuned(config.state.path, machine)
    specs = list(layout.specs.values())
    settings = settings_of(layout.placement, specs)
    trial = profile.find(settings) if profile else None
    if profile and trial:
        rate = (
            f"Expected rate: {trial.images_per_second:,.4g} images/s. `visiond tune` measured it on {profile.made_on} "
            f"with {profile.sample}."
        )
        total = sum(trial.stage_seconds.values())
        shares = [f"{name} {seconds / total:.0%}" for name, seconds in trial.stage_seconds.items() if total]
        rates = [rate, f"Time of the stages: {', '.join(shares)}."]
    else:
        how = f"; `{command('tune')}` measures it" if config.pipeline.prefer == "throughput" else ""
        rates = [f"Expected rate: not known for this machine with these models{how}.", *compare(used)]
    seconds = [f"Second look {look.name}: {look.describe()}." for look in looks]
    sentences = [
        *_describe(layout.placement, specs, used),
        *_prefer(config, specs),
        *seconds,
        *_name(used),
        *_bind(layout.cores),
        *rates,
    ]
    return _explanation(layout.placement, specs, trial.images_per_second if trial else None, sentences)


def explain_other(config: Config, gpus: list[Gpu]) -> Explanation:
    """For a machine with these GPUs. What the configuration says about devices, workers and batches is for
    this machine, so it is left out. Raises ModelsUnusable, ConfigError."""
    config = open_settings(config)
    specs = list(resolve_models(config, gpus).values())
    placement = plan(config, gpus, weights_of(specs), AMPLE, Batches.of(specs))
    workers = sum(len(segment.devices) for segment in placement.segments)
    is_tunable = config.pipeline.prefer == "throughput"
    how = f" `{command('tune')}` measures it on that machine." if is_tunable else ""
    sentences = [
        *_describe(placement, specs, gpus),
        *_prefer(config, specs),
        f"That needs at least {math.ceil(workers * CORES_PER_WORKER)} cores and {workers * WORKER_BYTES >> 30} GiB of "
        "the host's memory; with less there are fewer workers.",
        f"Expected rate: not known; only memory was considered.{how}",
        *compare(gpus),
    ]
    return _explanation(placement, specs, None, sentences)


def open_settings(config: Config) -> Config:
    """The configuration with everything that depends on the machine at its default."""
    pipeline = {
        "placement": "auto",
        "workers_per_device": LATENCY["workers_per_device"] if config.pipeline.prefer == "latency" else 0,
        "devices": [],
        "segment": [],
        "min_free_gpu_bytes": 0,
    }
    stages = {
        name: getattr(config.stages, name).model_copy(update={"batch_size": 0}) for name in config.stage_names
    }
    return config.model_copy(
        update={
            "pipeline": config.pipeline.model_copy(update=pipeline),
            "stages": config.stages.model_copy(update=stages),
        }
    )


def settings_of(placement: Placement, specs: Sequence[StageSpec]) -> TunedSettings:
    most = max(Counter(placement.segments[0].devices).values())
    mode = "replicated" if len(placement.segments) == 1 else "pipelined"
    return TunedSettings(mode, most, {spec.name: spec.batch_size for spec in specs})


def describe_duration(seconds: float) -> str:
    """ "40 seconds", "3.8 hours", "12 days"."""
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= 2 * size:
            return (
                f"{seconds / size:.2g} {unit}s" if seconds < 100 * size else f"{seconds / size:,.0f} {unit}s"
            )
    return f"{seconds:.0f} seconds"


def _describe(placement: Placement, specs: Sequence[StageSpec], gpus: Sequence[Gpu]) -> list[str]:
    cards = Counter(f"{gpu.name} with {gpu.free_bytes >> 30} GiB free" for gpu in gpus)
    have = ", ".join(f"{n} × {card}" for card, n in cards.items())
    lines = [f"Devices: {have}." if cards else "Devices: the CPU; no GPU is used."]
    for segment in placement.segments:
        held = ", ".join(f"{n} on {device}" for device, n in Counter(segment.devices).items())
        lines.append(f"Workers with {' → '.join(segment.stages)}: {held}.")
    sizes = {spec.name: spec.batch_size for spec in specs}
    same = len(set(sizes.values())) == 1
    shown = f"up to {max(sizes.values())} images" if same else ", ".join(f"{n} {s}" for n, s in sizes.items())
    lines.append(f"Batches: {shown}.")
    lines.append(f"Reason: {placement.why}.")
    if placement.limit:
        lines.append(f"Limit: {placement.limit}.")
    return lines


def _prefer(config: Config, specs: Sequence[StageSpec]) -> list[str]:
    if config.pipeline.prefer == "throughput":
        return []
    most = LATENCY | {f"batch_size of {spec.name}": LATENCY_BATCHES.usual for spec in specs}
    used = {name: getattr(config.pipeline, name) for name in LATENCY}
    used |= {f"batch_size of {spec.name}": spec.batch_size for spec in specs}
    larger = [f"{name} is {value}" for name, value in used.items() if value > most[name]]
    why = f" But images wait for others because of daemon.toml: {', '.join(larger)}." if larger else ""
    return [
        "Preference: latency; models are prepared for single images, and what `visiond tune` measured is not used."
        f"{why}"
    ]


def _name(gpus: Sequence[Gpu]) -> list[str]:
    names = ", ".join(map(describe_gpu, gpus))
    how = "[pipeline] devices can choose GPUs by each of these names, and by part of the second"
    return [f"In use: {names}; {how}."] if gpus else []


def _bind(cores: Cores) -> list[str]:
    near = ", ".join(f"{device} on {listed}" for device, listed in cores.describe().items())
    return [f"Cores near the GPUs, on which their workers run: {near}."] if near else []


def compare(gpus: Sequence[Gpu]) -> list[str]:
    """What GPUs of this kind did with the models of the standard job."""
    return [
        f"For comparison: {r.gpus} × {r.card} ran the standard job at {r.images_per_second:,} images/s, with {r.workers} "
        f"workers on each and batches of {r.batch} ({r.source})."
        for r in find_rates(list(gpus))
    ]


def _explanation(
    placement: Placement, specs: Sequence[StageSpec], rate: float | None, sentences: list[str]
) -> Explanation:
    batches = {spec.name: spec.batch_size for spec in specs}
    return Explanation(list(placement.segments), placement.why, batches, placement.limit, rate, sentences)
