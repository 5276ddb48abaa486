"""Which model each second look runs, on which devices: its table of the configuration applied to this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from daemon.config.loading import Config
from daemon.config.second_look import SecondLook
from daemon.config.values import GROUP, members_of
from daemon.core.errors import ConfigError
from daemon.layout.devices import gpus_of
from daemon.layout.layout import Layout
from daemon.layout.models import choose_dtypes, open_pack, pack_errors, weights_of
from daemon.layout.placement import CPU_BATCH, Batches, Placement, Segment, working_bytes
from daemon.layout.slabs import CPU_SLAB, GPU_SLAB
from daemon.system.gpus import Gpu
from stages.contract.base import StageSpec
from stages.contract.manifest import PackError, name_place
from stages.registry.registry import UnknownName, check_options, find_backend
from stages.weights import packs

GPU_BATCH = 32  # of a look whose batch_size is 0


@dataclass(frozen=True, slots=True)
class LookPlan:
    """A second look on this machine. layout: of its one segment. shares_devices: whether first looks use one of its
    devices."""

    table: SecondLook
    spec: StageSpec
    layout: Layout
    shares_devices: bool

    @property
    def name(self) -> str:
        return self.table.name

    @property
    def segment(self) -> Segment:
        [segment] = self.layout.placement.segments
        return segment

    def describe(self) -> str:
        """What it does, for people."""
        chosen = f"chosen by {self.table.when}" if self.table.function else f"of bin {self.table.when}"
        share = f"{self.table.share:.0%} of the images" if self.table.share < 1 else "images"
        devices = ", ".join(dict.fromkeys(self.segment.devices))
        source = self.table.model or self.spec.backend
        return f"{share} {chosen} get {self.spec.name} again, by {source} on {devices}"


def lay_out(config: Config) -> tuple[Layout, list[LookPlan]]:
    """The layout of first looks, which leaves GPU memory to second looks; and the plan of each second look.
    Raises ModelsUnusable, and ConfigError for an option or device that does not exist."""
    looks: dict[str, StageSpec] = {}

    def leave_room(config: Config, gpus: list[Gpu], specs: Mapping[str, StageSpec]) -> list[Gpu]:
        looks.update(resolve_looks(config, gpus, specs))
        return room_beside(config, gpus, looks)

    layout = Layout.of(config, leave_room)
    return layout, [_plan(table, looks[table.name], layout) for table in layout.config.second_look]


def resolve_looks(
    config: Config, gpus: Sequence[Gpu], specs: Mapping[str, StageSpec]
) -> dict[str, StageSpec]:
    """By name of the look: its stage with verified weights. specs: of the first looks.
    Raises ModelsUnusable, ConfigError."""
    looks = {}
    for table in choose_dtypes(config, gpus).second_look:
        on = gpus_of(table, config, gpus)
        section: dict[str, Any] = table.model_dump(
            include={"backend", "model", "dtype", "batch_size", "options"}
        )
        section["batch_size"] = table.batch_size or (GPU_BATCH if on else CPU_BATCH)
        with pack_errors():
            pack = open_pack(config, [section])
            try:
                spec = packs.resolve_beside(pack, table.stage, section, specs)
            except (PackError, UnknownName) as error:
                name_place(error, f"second_look {table.name}")
                raise
        if problems := check_options([spec]):
            raise ConfigError([f"second_look {table.name}: {problem}" for problem in problems])
        if spec.fingerprint == specs[table.stage].fingerprint:
            problem = f"it has the same model and options as [stages.{table.stage}]; name another model."
            raise ConfigError([f"second_look {table.name}: {problem}"])
        group = next((name for name in table.devices if GROUP in name), "")
        if group and not find_backend(spec.name, spec.backend).can_spread:
            problem = f'"{group}" is a group, but this model cannot be spread over several devices'
            raise ConfigError([f"second_look {table.name}: {problem}; write each device by itself."])
        looks[table.name] = spec
    return looks


def _plan(table: SecondLook, spec: StageSpec, layout: Layout) -> LookPlan:
    devices = table.devices or layout.devices()
    segment = Segment((table.stage,), tuple(devices) * table.workers_per_device, f"second look {table.name}")
    # A look always runs its stage; and a GPU has one MPS server, and first looks use it.
    slab = layout.config.pipeline.slab_bytes or (GPU_SLAB if "cuda:" in "".join(devices) else CPU_SLAB)
    changes = {"mode": "full", "mps": False, "slab_bytes": slab, "prefer": "throughput"}
    settings = layout.config.pipeline.model_copy(update=changes)
    config = layout.config.model_copy(update={"pipeline": settings})
    placed = Placement((segment,), "")
    own = dataclasses.replace(layout, config=config, specs={table.stage: spec}, placement=placed)
    used, of_first_looks = (
        {member for device in each.devices() for member in members_of(device)} for each in (own, layout)
    )
    return LookPlan(table, spec, own, bool(used & of_first_looks))


def room_beside(config: Config, gpus: Sequence[Gpu], looks: Mapping[str, StageSpec]) -> list[Gpu]:
    """The GPUs, with the memory that second looks need subtracted."""
    needs: dict[str, int] = {}
    for table in config.second_look:
        spec = looks[table.name]
        need = sum(weights_of([spec]).values()) + working_bytes(Batches.of([spec]))
        for gpu in gpus_of(table, config, gpus):
            needs[gpu.device] = needs.get(gpu.device, 0) + need * table.workers_per_device
    return [
        dataclasses.replace(gpu, free_bytes=max(0, gpu.free_bytes - needs.get(gpu.device, 0))) for gpu in gpus
    ]
