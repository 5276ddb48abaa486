"""The configuration applied to this machine: models, GPUs, a placement, and the setup of each worker that follows from it."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path

import msgspec

from daemon.config.loading import Config
from daemon.config.state import CANARY
from daemon.config.values import members_of
from daemon.core.messages import Setup
from daemon.layout.devices import address_device, describe_short, name_members, select_devices, used_gpus
from daemon.layout.models import choose_dtypes, resolve_models, weights_of
from daemon.layout.placement import (
    Batches,
    Placement,
    Segment,
    plan,
    size_groups,
    size_host_groups,
    spread_over,
)
from daemon.layout.profile import Machine, Profile, apply, find_tuned
from daemon.system.cores import Cores
from daemon.system.gpus import Gpu, list_gpus
from daemon.system.host import Host
from stages.contract.base import StageSpec
from stages.registry.registry import find_license

# With one thread torch uses slower convolutions: OCR takes 1.3 times the CPU time, even on one core
LEAST_CPU_THREADS = 2


LeaveRoom = Callable[[Config, list[Gpu], Mapping[str, StageSpec]], list[Gpu]]


def leave_all(config: Config, gpus: list[Gpu], specs: Mapping[str, StageSpec]) -> list[Gpu]:
    return gpus


@dataclass(frozen=True, slots=True)
class Layout:
    config: Config  # it names devices of `gpus` only
    gpus: list[Gpu]
    specs: dict[str, StageSpec]  # of each stage, with its verified weights
    placement: Placement
    cores: Cores

    @classmethod
    def of(
        cls,
        config: Config,
        leave_room: LeaveRoom = leave_all,
        gpus: list[Gpu] | None = None,
        sharers: int = 1,
    ) -> Layout:
        """leave_room: returns the GPUs with the memory that other workers of this daemon leave. gpus: None: those of this
        machine. sharers: as for `Host.here`. Raises ModelsUnusable, and ConfigError for an option or device that does not
        exist."""
        gpus = list_gpus() if gpus is None else gpus
        short = describe_short(config, gpus)
        config = select_devices(choose_dtypes(config, gpus), gpus)
        specs = resolve_models(config, gpus)
        profile = find_profile(config, gpus, specs)
        costs = profile.costs if profile else {}
        placed, why = (profile and apply(config, profile, used_gpus(config, gpus))) or (config, "")
        if why:
            specs = {name: use_batch(spec, placed) for name, spec in specs.items()}
        room = leave_room(config, gpus, specs)
        placement = plan(
            placed, room, weights_of(specs.values()), Host.here(sharers), Batches.of(specs.values()), costs
        )
        # What comes before the counts is not the user's choice if it was measured.
        reasons = [why, placement.why.partition("; ")[2]] if why else [placement.why]
        placement = dataclasses.replace(placement, why="; ".join(filter(None, [*reasons, short])))
        devices = [device for segment in placement.segments for device in segment.first_devices]
        return cls(config, gpus, specs, placement, Cores.of(gpus, devices, sharers))

    def only(self, stage: str) -> Layout:
        """Where this stage runs, without the others."""
        found = [each for each in self.placement.segments if stage in each.stages]
        segments = tuple(dataclasses.replace(each, stages=(stage,)) for each in found)
        return dataclasses.replace(
            self,
            specs={stage: self.specs[stage]},
            placement=dataclasses.replace(self.placement, segments=segments),
        )

    def notices(self) -> dict[str, str]:
        """The notice of each stage whose weights have one."""
        return {spec.name: spec.notice for spec in self.specs.values() if spec.notice}

    def licenses(self) -> dict[str, str]:
        """By backend, the license of each library in use that asks something of those who use it."""
        specs = self.specs.values()
        found = {spec.backend: find_license(spec.name, spec.backend, spec.paths) for spec in specs}
        return {backend: license_ for backend, license_ in found.items() if license_}

    def devices(self) -> list[str]:
        """Each device once."""
        held = [device for segment in self.placement.segments for device in segment.devices]
        return list(dict.fromkeys(held))

    def set_up(self, segment: Segment, number: int, slab_bytes: int) -> tuple[Setup, dict[str, str]]:
        """The setup of a segment's worker of this number, and its environment variables."""
        settings = self.config.pipeline
        device, first = segment.devices[number], segment.first_devices[number]
        beside = [other for each in self.placement.segments for other in each.first_devices]
        share, spread = self.cores.share(first, beside), name_members(device)
        workers = beside.count(first)
        own = {"workers": workers, "single": settings.prefer == "latency"}
        specs = [msgspec.structs.replace(self.specs[stage], **own) for stage in segment.stages]
        seen_as, environment = address_device(device, self.gpus, max(LEAST_CPU_THREADS, int(share)))
        setup = Setup(
            name=f"{segment.name}/{number}",
            device=seen_as,
            stages=[spread_over(spread, spec) for spec in specs],
            slab_bytes=slab_bytes,
            threads=settings.threads_per_worker,
            # Rounded up: workers seldom use all of theirs at a time.
            decoders=settings.decoders_per_worker or math.ceil(share),
            limits=settings.limits(),
            cascade=self.config.binning.thresholds() if settings.mode == "cascade" else None,
            pipeline=self.config.stage_names,
            cores=self.cores.near.get(first, []),
            references=str(self.config.state.path / CANARY),
            group_pixels=size_groups(
                [gpu for gpu in self.gpus if gpu.device in members_of(device)],
                workers * settings.threads_per_worker,
            ),
            host_group_pixels=size_host_groups(Host.here(), len(beside) * settings.threads_per_worker),
        )
        return setup, environment


def find_profile(config: Config, gpus: Sequence[Gpu], specs: Mapping[str, StageSpec]) -> Profile | None:
    """What `visiond tune` measured on this machine with these models."""
    return find_tuned(config.state.path, Machine.of(used_gpus(config, gpus), Host.here().cores, specs))


def use_batch(spec: StageSpec, config: Config) -> StageSpec:
    size: int = getattr(config.stages, spec.name).batch_size
    return msgspec.structs.replace(spec, batch_size=size)


def _read_code(function: str) -> str:
    """The code of a user's function "module:function", as text; or empty."""
    module = function.partition(":")[0]
    origin = (importlib.util.find_spec(module) or ModuleSpec("", None)).origin if module else None
    return Path(origin).read_bytes().hex() if origin and os.path.isfile(origin) else ""


def digest_settings(config: Config, specs: Mapping[str, StageSpec]) -> str:
    """A digest of what decides the results and bins of images: models, thresholds,
    the code of the user's rule, the mode."""
    code = _read_code(config.binning.rules)
    fingerprints = {name: spec.fingerprint for name, spec in sorted(specs.items())}
    looks = [(look.model_dump(), _read_code(look.function)) for look in config.second_look]
    settings = [fingerprints, config.binning.model_dump(), config.pipeline.mode, code, *looks]
    return hashlib.sha256(msgspec.json.encode(settings)).hexdigest()[:16]
