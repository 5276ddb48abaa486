"""Which model each second look runs, on which devices: its table of the configuration applied to this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from daemon.config.loading import Config
from daemon.config.second_look import SecondLook
from daemon.errors import ConfigError
from daemon.layout import CPU_BATCH, Layout, natural_dtype, open_pack, pack_errors, used_gpus, weights_of
from daemon.ledger.record import Model
from daemon.placement import Placement, Segment, working_bytes
from daemon.system.gpus import Gpu
from stages.base import StageSpec
from stages.registry import check_options
from stages.weights import packs

GPU_BATCH = 32  # of a look whose batch_size is 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A second look on this machine. layout: of its one segment."""

    table: SecondLook
    spec: StageSpec
    layout: Layout

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

    @property
    def model(self) -> Model:
        return Model(self.spec.name, self.spec.fingerprint, self.spec.notice)


def lay_out(config: Config) -> tuple[Layout, list[Plan]]:
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
    for table in config.second_look:
        on = [gpu for gpu in used_gpus(config, gpus) if not table.devices or gpu.device in table.devices]
        on = [] if "cpu" in table.devices else on
        section: dict[str, Any] = table.model_dump(
            include={"backend", "model", "dtype", "batch_size", "options"}
        )
        section["batch_size"] = table.batch_size or (GPU_BATCH if on else CPU_BATCH)
        section["dtype"] = table.dtype if table.dtype != "auto" else natural_dtype(on)
        with pack_errors():
            pack = open_pack(config, [section])
            spec = packs.resolve_beside(pack, table.stage, section, specs)
        if problems := check_options([spec]):
            raise ConfigError([f"second_look {table.name}: {problem}" for problem in problems])
        if spec.fingerprint == specs[table.stage].fingerprint:
            problem = f"it has the same model and options as [stages.{table.stage}]; name another model."
            raise ConfigError([f"second_look {table.name}: {problem}"])
        looks[table.name] = spec
    return looks


def _plan(table: SecondLook, spec: StageSpec, layout: Layout) -> Plan:
    held = [device for segment in layout.placement.segments for device in segment.devices]
    devices = table.devices or list(dict.fromkeys(held))
    segment = Segment((table.stage,), tuple(devices) * table.workers_per_device, f"second look {table.name}")
    # A look always runs its stage; and a GPU has one MPS server, which is that of the first looks.
    settings = layout.config.pipeline.model_copy(update={"mode": "full", "mps": False})
    config = layout.config.model_copy(update={"pipeline": settings})
    placed = Placement((segment,), "")
    return Plan(
        table,
        spec,
        dataclasses.replace(layout, config=config, specs={table.stage: spec}, placement=placed),
    )


def room_beside(config: Config, gpus: Sequence[Gpu], looks: Mapping[str, StageSpec]) -> list[Gpu]:
    """The GPUs with the free memory that the workers of second looks leave to those of first looks."""
    needs: dict[str, int] = {}
    for table in config.second_look:
        spec = looks[table.name]
        need = sum(weights_of([spec]).values()) + working_bytes(spec.batch_size)
        for gpu in used_gpus(config, gpus):
            if not table.devices or gpu.device in table.devices:
                needs[gpu.device] = needs.get(gpu.device, 0) + need * table.workers_per_device
    return [
        dataclasses.replace(gpu, free_bytes=max(0, gpu.free_bytes - needs.get(gpu.device, 0))) for gpu in gpus
    ]
