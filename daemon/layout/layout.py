"""The configuration applied to this machine: models, GPUs, a placement, and the workers that follow from it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import msgspec

from daemon.config.loading import Config
from daemon.config.second_look import SecondLook
from daemon.config.state import CANARY, KERNELS
from daemon.config.values import GROUP, members_of
from daemon.core.errors import ConfigError, HubUnavailable, ModelsUnusable
from daemon.core.hints import command
from daemon.core.messages import Setup
from daemon.core.slab import Slab
from daemon.ledger.record import Model
from daemon.monitoring.metrics import Metrics
from daemon.placement.devices import (
    address_device,
    describe_short,
    list_useless_groups,
    name_members,
    select_devices,
)
from daemon.placement.placement import (
    CORES_PER_WORKER,
    Batches,
    Placement,
    Segment,
    choose_batches,
    plan,
    size_groups,
    spread_over,
)
from daemon.placement.profile import Machine, Profile, apply, find_tuned
from daemon.results.judge import Judge, Selection
from daemon.system.cores import Cores
from daemon.system.gpus import Gpu, list_gpus
from daemon.system.host import Host
from daemon.workers.compiler import Want
from daemon.workers.kernels import list_wants
from daemon.workers.lane import Lane
from daemon.workers.mps import MpsServer, is_installed
from daemon.workers.pool import Pool
from daemon.workers.seat import Room, Seat
from stages.contract.base import StageSpec
from stages.contract.binning import load_rule
from stages.contract.descriptor import SHARES
from stages.contract.manifest import HubBusy, Manifest, NotPulled, PackError, PackErrors, list_files
from stages.registry.registry import UnknownName, check_options, find_license
from stages.weights import packs

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
        return cls(config, gpus, specs, placement, Cores.of(gpus, devices, CORES_PER_WORKER, sharers))

    def only(self, stage: str) -> Layout:
        """Where this stage runs, without the others."""
        found = [each for each in self.placement.segments if stage in each.stages]
        segments = tuple(dataclasses.replace(each, stages=(stage,)) for each in found)
        return dataclasses.replace(
            self,
            specs={stage: self.specs[stage]},
            placement=dataclasses.replace(self.placement, segments=segments),
        )

    def models(self) -> list[Model]:
        """The models of the stages, as the ledger stores them."""
        return [Model.of(spec) for spec in self.specs.values()]

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

    def wanted_kernels(self) -> list[Want]:
        """The stages that may have kernels, for the GPUs that they run on."""
        return list_wants(self.placement.segments, self.specs, self.gpus)

    def open_lanes(
        self, slab: Slab, metrics: Metrics, part: Sequence[Collection[int]] | None = None
    ) -> list[Lane]:
        """Each segment with its queue and its pool of workers, not started yet.
        part: for each segment, the numbers of the workers that this station has; None: all."""
        segments = self.placement.segments
        held = part or [range(len(segment.devices)) for segment in segments]
        rooms = self._measure_rooms(held)
        return [
            self._open_lane(segment, slab, metrics, numbers, rooms)
            for segment, numbers in zip(segments, held, strict=True)
        ]

    def _measure_rooms(self, held: Sequence[Collection[int]]) -> dict[str, Room]:
        """By device or group of this station: its memory, if it is one of GPUs. held: as `part` of `open_lanes`."""
        users = self._count_users(held)
        on = {name: [gpu for gpu in self.gpus if gpu.device in members_of(name)] for name in self.devices()}
        return {
            name: Room(gpus, list_gpus, alone=all(users[gpu.device] == 1 for gpu in gpus))
            for name, gpus in on.items()
            if gpus
        }

    def _count_users(self, held: Sequence[Collection[int]]) -> Counter[str]:
        """By device: what uses it, this station's workers as one."""
        devices = self.devices()
        looks = [name for look in self.config.second_look for name in look.devices or devices]
        users = Counter(member for name in [*devices, *looks] for member in members_of(name))
        for segment, numbers in zip(self.placement.segments, held, strict=True):
            users.update(device for number, device in enumerate(segment.devices) if number not in numbers)
        return users

    def _open_lane(
        self,
        segment: Segment,
        slab: Slab,
        metrics: Metrics,
        numbers: Collection[int],
        rooms: Mapping[str, Room],
    ) -> Lane:
        """numbers: of its workers; rooms: by device."""
        metrics.begin_segment(segment.name, segment.stages, segment.devices)
        servers = self._open_servers(segment)
        seats = []
        for number in sorted(numbers):
            device = segment.devices[number]
            setup, environment = self.set_up(segment, number, slab.size)
            environment["TRITON_CACHE_DIR"] = str(self.config.state.path / KERNELS)
            seats.append(Seat(setup, device, environment, servers.get(device), room=rooms.get(device)))
        pool = Pool(segment.name, seats, slab.fd, self.config.pipeline, metrics)
        batch = max(self.specs[stage].batch_size for stage in segment.stages)
        return Lane(segment.name, segment.stages, batch, pool)

    def set_up(self, segment: Segment, number: int, slab_bytes: int) -> tuple[Setup, dict[str, str]]:
        """The setup of a segment's worker of this number, and its environment variables."""
        settings = self.config.pipeline
        device, first = segment.devices[number], segment.first_devices[number]
        beside = [other for each in self.placement.segments for other in each.first_devices]
        share, spread = self.cores.share(first, beside), name_members(device)
        workers = beside.count(first)
        own = {"workers": workers, "single": settings.prefer == "latency"}
        specs = [msgspec.structs.replace(self.specs[stage], **own) for stage in segment.stages]
        seen_as, environment = address_device(device, self.gpus, max(LEAST_CPU_THREADS, share))
        setup = Setup(
            name=f"{segment.name}/{number}",
            device=seen_as,
            stages=[spread_over(spread, spec) for spec in specs],
            slab_bytes=slab_bytes,
            threads=settings.threads_per_worker,
            decoders=settings.decoders_per_worker or max(1, share),
            limits=settings.limits(),
            cascade=self.config.binning.thresholds() if settings.mode == "cascade" else None,
            pipeline=self.config.stage_names,
            cores=self.cores.near.get(first, []),
            references=str(self.config.state.path / CANARY),
            group_pixels=size_groups(
                [gpu for gpu in self.gpus if gpu.device in members_of(device)],
                workers * settings.threads_per_worker,
            ),
        )
        return setup, environment

    def _open_servers(self, segment: Segment) -> dict[str, MpsServer]:
        """By device: the MPS server of each GPU with several workers, if MPS is enabled and installed. The workers of
        a group take turns."""
        if not self.config.pipeline.mps or not is_installed():
            return {}
        shared = [
            device
            for device, workers in Counter(segment.devices).items()
            if workers > 1 and device != "cpu" and GROUP not in device
        ]
        return {
            device: MpsServer(address_device(device, self.gpus, 1)[1]["CUDA_VISIBLE_DEVICES"])
            for device in shared
        }


@contextlib.contextmanager
def pack_errors() -> Iterator[None]:
    """Turn errors of packs into ModelsUnusable."""
    try:
        yield
    except (PackError, UnknownName) as error:
        errors = error.errors if isinstance(error, PackErrors) else [error]
        kind = HubUnavailable if isinstance(error, HubBusy) else ModelsUnusable
        raise kind("\n".join(dict.fromkeys(map(explain, errors)))) from errors[0]


def explain(error: Exception) -> str:
    """The message, with the command that downloads what was not pulled."""
    pull = isinstance(error, NotPulled) and command("models", "pull", *filter(None, [error.name]))
    return f"{error} `{pull}` downloads it." if pull else str(error)


def resolve_models(config: Config, gpus: list[Gpu]) -> dict[str, StageSpec]:
    """Each stage with its verified weights. Raises ModelsUnusable, ConfigError."""
    config, gpus = choose_dtypes(config, gpus), used_gpus(config, gpus)
    batches = choose_batches(gpus, config.pipeline.prefer)
    overrides = {}
    for name in config.stage_names:
        section = getattr(config.stages, name).model_dump()
        section["batch_size"] = section["batch_size"] or batches.of_stage(name)
        overrides[name] = section
    with pack_errors():
        pack = open_pack(config, overrides.values())
        specs = packs.resolve_all(pack, config.stage_names, overrides)
    if problems := [*check_options(specs), *list_useless_groups(config, specs)]:
        raise ConfigError(problems)
    return {spec.name: spec for spec in specs}


def open_pack(config: Config, tables: Iterable[Mapping[str, Any]]) -> packs.Pack:
    """The configured pack; an empty one if all stages of these tables are fakes. Raises PackError."""
    folder = config.models.folder
    if all(table["backend"] == "fake" for table in tables):
        return packs.Pack(folder, Manifest(name="none"), folder, folder, base=config.folder)
    return packs.open_pack(config.models.pack, folder, base=config.folder)


def choose_dtypes(config: Config, gpus: Sequence[Gpu]) -> Config:
    """The configuration with a dtype for each stage, which fits all GPUs that it names. How much of their memory
    is free does not matter: a start must not change the fingerprints of results. Raises ConfigError."""
    selected = select_devices(config, gpus, by_memory=False)
    named = used_gpus(selected, gpus)
    sections = {name: getattr(config.stages, name) for name in config.stage_names}
    chosen = {
        name: section.model_copy(update={"dtype": natural_dtype(named)})
        for name, section in sections.items()
        if section.dtype == "auto"
    }
    looks = [
        table.model_copy(update={"dtype": natural_dtype(gpus_of(found, selected, gpus))})
        if table.dtype == "auto"
        else table
        for table, found in zip(config.second_look, selected.second_look, strict=True)
    ]
    stages = config.stages.model_copy(update=chosen)
    return config.model_copy(update={"stages": stages, "second_look": looks})


def gpus_of(look: SecondLook, config: Config, gpus: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs of a second look; none if it names a CPU too."""
    if not look.devices:
        return used_gpus(config, gpus)
    members = {member for name in look.devices for member in members_of(name)}
    return [] if any(name.startswith("cpu") for name in members) else [g for g in gpus if g.device in members]


def find_profile(config: Config, gpus: Sequence[Gpu], specs: Mapping[str, StageSpec]) -> Profile | None:
    """What `visiond tune` measured on this machine with these models."""
    return find_tuned(config.state.path, Machine.of(used_gpus(config, gpus), Host.here().cores, specs))


def use_batch(spec: StageSpec, config: Config) -> StageSpec:
    size: int = getattr(config.stages, spec.name).batch_size
    return msgspec.structs.replace(spec, batch_size=size)


def natural_dtype(gpus: Sequence[Gpu]) -> str:
    """float32 on a CPU; on GPUs the backend's own half precision ("half") if all have bfloat16 (compute capability
    8.0, Ampere)."""
    if not gpus:
        return "float32"
    return "half" if all(float(gpu.compute_capability) >= 8.0 for gpu in gpus) else "float16"


def weights_of(specs: Iterable[StageSpec]) -> dict[str, int]:
    """Bytes of weights by stage: the sizes of their files, which are in half precision if weights are made smaller."""

    def measure(spec: StageSpec) -> int:
        return sum(file.stat().st_size for path in spec.files.values() for file in list_files(Path(path)))

    return {spec.name: int(measure(spec) * SHARES.get(spec.dtype, 1)) for spec in specs}


def used_gpus(config: Config, gpus: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs that the configuration names, or all; none if it names a CPU too,
    as a stage has one dtype for all devices."""
    named = {
        *config.pipeline.devices,
        *(
            name
            for table in config.pipeline.segment
            for device in table.devices
            for name in members_of(device)
        ),
    }
    if any(device.startswith("cpu") for device in named):
        return []
    return [gpu for gpu in gpus if not named or gpu.device in named]


def judge_of(config: Config, inboxes: Mapping[int, bytes]) -> Judge:
    """inboxes: their folders by id. Raises ConfigError."""
    try:
        rule = load_rule(config.binning.rules) if config.binning.rules else None
        looks = [_select(look) for look in config.second_look]
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    return Judge(
        config.binning.thresholds(),
        rule=rule,
        looks=looks,
        inboxes=inboxes,
        cascade=config.stage_names if config.pipeline.mode == "cascade" else (),
        max_attempts=config.pipeline.max_attempts,
        retry_seconds=config.pipeline.retry_seconds,
    )


def _select(look: SecondLook) -> Selection:
    """Raises ValueError."""
    if look.function:
        rule = load_rule(look.function, f"[[second_look]] {look.name}: when")
        return Selection(look.name, "", rule, look.share)
    return Selection(look.name, look.when, share=look.share)


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
