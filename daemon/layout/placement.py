"""Where the stages run. A placement is a list of segments; a segment is a run of stages and the devices that hold it.

"Replicated" is one segment on n devices; "pipelined" is several segments, each with its own devices.
The rest of the code does not know which of them it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from daemon.config.loading import Config
from daemon.config.pipeline import PipelineSection
from daemon.config.values import members_of
from daemon.core.messages import LEAST_GROUP_PIXELS
from daemon.system.gpus import Gpu
from daemon.system.host import Host
from stages.contract.base import FULL_BATCH, StageSpec
from stages.registry.registry import find_backend, find_stage

# GPU memory of a worker in addition to its weights: the CUDA context and its libraries, the largest step of OCR,
# and what each image of a batch takes: in all stages, and also in those for which Descriptor.takes_memory holds.
# Measured on an H100 with images of 1280×960 (docs/performance.md, "Cards with little memory").
CONTEXT_BYTES = 1 << 30
MAPS_BYTES, MAPS_BYTES_OF_FULL_BATCH = 1300 << 20, 3400 << 20
IMAGE_BYTES, HEAVY_IMAGE_BYTES = 16 << 20, 25 << 20
MODELS_BYTES = 970 << 20  # the weights of the standard pack; they are not known yet when the batch is chosen
# What all threads may decode at once takes half of a GPU's free memory, and a quarter of the host's. Bytes of a pixel: on a
# GPU as decoded, turned, and as a page of OCR; on the host as decoded, and the copy that a GPU reads.
GROUP_SHARE, GROUP_PIXEL_BYTES = 2, 8
HOST_GROUP_SHARE, HOST_PIXEL_BYTES = 4, 6
# On four cores three workers did 1.8 times as much as one: docs/performance.md, "On few cores".
CORES_PER_WORKER = Fraction(4, 3)
DEVICES_PER_INTERPRETER = 2  # GPUs that one Python process keeps busy, see docs/performance.md
LEAST_COST = 1e-9  # of a run of stages
WORKER_BYTES = 4 << 30  # host memory, measured in the same way: CUDA's libraries, decoders and pinned buffers


class Batches(NamedTuple):
    """The most images in a batch, of all stages and of those that take much memory for each image."""

    usual: int
    heavy: int  # of stages for which Descriptor.takes_memory holds; 0 without one

    @classmethod
    def of(cls, specs: Iterable[StageSpec]) -> Batches:
        sizes = [(spec.batch_size, find_stage(spec.name).takes_memory) for spec in specs]
        return cls(max(size for size, _ in sizes), max((size for size, takes in sizes if takes), default=0))

    def of_stage(self, name: str) -> int:
        return self.heavy if find_stage(name).takes_memory else self.usual


# The rate with these batches, and with one worker more each time, as a share of the best rate.
RATE_BY_BATCHES = {
    Batches(FULL_BATCH, FULL_BATCH): 1.0,
    Batches(64, 64): 0.92,
    Batches(64, 32): 0.85,
    Batches(32, 32): 0.72,
}
RATE_BY_WORKERS = (0.44, 0.78, 0.95, 1.0, 1.0, 1.0, 1.0, 1.0)  # of the standard job
# At most on one GPU: a single interpreter does not keep an H200 busy. Those after the fifth make photographs of phones and web
# pictures a tenth faster, as finding their boxes of text takes more of a worker's time.
GPU_WORKERS = len(RATE_BY_WORKERS)
SMALL_BATCHES = (Batches(16, 16), Batches(8, 8))  # where there is no memory for larger ones; not measured
CPU_BATCH = 8
# If prefer = "latency": YOLOv8n takes as long for sixteen images as for one.
LATENCY_BATCHES = Batches(8, 8)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of stages and the devices that hold it; a device named twice holds it in two processes. A device may be a
    group, "cuda:0+cuda:1": one process, whose large models are spread over these devices."""

    stages: tuple[str, ...]
    devices: tuple[str, ...]
    label: str = ""  # of a second look

    @property
    def name(self) -> str:
        return self.label or "+".join(self.stages)

    @property
    def first_devices(self) -> list[str]:
        """The device of each worker, of a group the first: images and the models that are not spread are there."""
        return [members_of(device)[0] for device in self.devices]


@dataclass(frozen=True, slots=True)
class Placement:
    segments: tuple[Segment, ...]
    why: str
    # what keeps a GPU from having more workers; empty if the configuration sets their number
    limit: str = field(default="", compare=False)
    costs: Mapping[str, float] = field(default_factory=dict, compare=False)  # measured seconds, by stage


def choose_batches(gpus: Sequence[Gpu], prefer: str) -> Batches:
    """Those with which the GPUs together are fastest, of those for which each has the memory. Without GPUs they are for a
    CPU. prefer: as in [pipeline]."""
    if prefer == "latency":
        return LATENCY_BATCHES
    if not gpus:
        return Batches(CPU_BATCH, CPU_BATCH)

    def count_workers(batches: Batches) -> list[int]:
        need = MODELS_BYTES + working_bytes(batches)
        return [min(gpu.free_bytes // need, GPU_WORKERS) for gpu in gpus]

    rates = {
        batches: rate * sum(RATE_BY_WORKERS[workers - 1] for workers in counts)
        for batches, rate in RATE_BY_BATCHES.items()
        if all(counts := count_workers(batches))
    }
    if rates:
        return max(rates, key=lambda batches: rates[batches])
    return next((batches for batches in SMALL_BATCHES if all(count_workers(batches))), SMALL_BATCHES[-1])


def working_bytes(batches: Batches) -> int:
    """GPU memory of a worker in addition to its weights."""
    maps = MAPS_BYTES_OF_FULL_BATCH if batches.usual >= FULL_BATCH else MAPS_BYTES
    return CONTEXT_BYTES + maps + batches.usual * IMAGE_BYTES + batches.heavy * HEAVY_IMAGE_BYTES


def size_groups(gpus: Sequence[Gpu], threads: int) -> int:
    """Pixels that each of all `threads` of a device's workers may decode at once: in larger groups large photographs cost a
    GPU's stages less. Without GPUs it is for a CPU."""
    shares = (gpu.free_bytes // GROUP_SHARE // GROUP_PIXEL_BYTES // threads for gpu in gpus)
    return max(LEAST_GROUP_PIXELS, min(shares, default=0))


def size_host_groups(host: Host, threads: int) -> int:
    """Pixels that each of all `threads` of this host's workers may have decoded in its memory at once."""
    return max(LEAST_GROUP_PIXELS, host.free_bytes // HOST_GROUP_SHARE // HOST_PIXEL_BYTES // threads)


def plan(
    config: Config,
    gpus: Sequence[Gpu],
    weights: Mapping[str, int],
    host: Host,
    batches: Batches,
    costs: Mapping[str, float] = MappingProxyType({}),
) -> Placement:
    """The placement that the configuration asks for, on this machine's devices.

    weights: bytes of each stage's weights on the device; costs: measured seconds of each stage for an image;
    empty: the usual shares.
    """
    need = sum(weights.values()) + working_bytes(batches)
    stages = tuple(config.stage_names)
    if config.pipeline.segment:
        segments = tuple(
            Segment(tuple(table.stages), tuple(table.devices) * table.workers_per_device)
            for table in config.pipeline.segment
        )
        return Placement(segments, "set by the [[pipeline.segment]] tables", costs=costs)
    devices = config.pipeline.devices or [gpu.device for gpu in gpus] or ["cpu"]
    mode, why = _choose(config.pipeline.placement, devices, gpus, need)
    runs: tuple[Segment, ...] = (Segment(stages, tuple(devices)),)
    if mode == "pipelined":  # auto spreads only for want of memory
        runs = _spread(stages, devices, costs, scarce=config.pipeline.placement == "auto")
    bounds = [_find_bounds(run, len(devices), gpus, weights, host, batches) for run in runs]
    counts = [_count_workers(each, config.pipeline) for each in bounds]
    if mode == "replicated":
        why += f"; workers: {_describe(counts[0], config.pipeline)}"
    return Placement(tuple(map(_staff, runs, counts)), why, _limit(bounds, config.pipeline), costs)


def _describe(counts: Mapping[str, int], section: PipelineSection) -> str:
    said = ", ".join(f"{count} on {device}" for device, count in counts.items() if count)
    is_usual = section.workers_per_device or section.spread == "memory-aware"
    return said if is_usual else f'{said}, by spread = "{section.spread}"'


def share_out(placement: Placement, executors: int) -> list[list[list[int]]]:
    """For each executor, and for each segment, the numbers of its workers there.

    executors: how many are wanted; 0: for a replicated placement one for each device, if there are more than one
    interpreter can feed; for a pipelined one, the number with the highest rate. Each executor has a worker of each
    segment. A device's workers stay together if there are enough devices.
    """
    segments = placement.segments
    unique = len(dict.fromkeys(segments[0].devices))
    if executors:
        wanted = min(executors, *(len(segment.devices) for segment in segments))
    elif len(segments) > 1:
        # max takes the first of equal ones: no more processes than are of use
        wanted = max(_possible_executors(placement), key=lambda number: _estimate_rate(placement, number))
    else:
        wanted = unique if unique > DEVICES_PER_INTERPRETER else 1
    return _deal(placement, wanted)


def _deal(placement: Placement, executors: int) -> list[list[list[int]]]:
    parts: list[list[list[int]]] = [[] for _ in range(executors)]
    for segment in placement.segments:
        unique = list(dict.fromkeys(segment.devices))
        by_device = len(unique) >= executors
        places = [unique.index(device) if by_device else n for n, device in enumerate(segment.devices)]
        for number, part in enumerate(parts):
            part.append([n for n, place in enumerate(places) if place % executors == number])
    return parts


def _best_rate(placement: Placement) -> float:
    """With the best number of executors."""
    return max(_estimate_rate(placement, number) for number in _possible_executors(placement))


def _possible_executors(placement: Placement) -> range:
    """Numbers of executors with which each has all workers of a device of each segment."""
    return range(1, min(len(set(segment.devices)) for segment in placement.segments) + 1)


def _estimate_rate(placement: Placement, executors: int) -> float:
    """Images per unit of cost. An executor is as fast as its slowest segment, and its interpreter feeds no more
    than DEVICES_PER_INTERPRETER devices that would hold all stages."""
    costs = [_cost(segment.stages, placement.costs) for segment in placement.segments]
    fed = DEVICES_PER_INTERPRETER / sum(costs)
    rates = []
    for part in _deal(placement, executors):
        shares = zip(part, placement.segments, costs, strict=True)
        held = [sum(_share_of(n, segment) for n in numbers) / cost for numbers, segment, cost in shares]
        rates.append(min(fed, *held))
    return round(sum(rates), 6)  # so that equal ones are equal


def _share_of(number: int, segment: Segment) -> float:
    """How much of its device a worker has."""
    return 1 / segment.devices.count(segment.devices[number])


def _choose(mode: str, devices: Sequence[str], gpus: Sequence[Gpu], need: int) -> tuple[str, str]:
    """ "replicated" or "pipelined", and why."""
    if mode != "auto":
        return mode, f'placement = "{mode}"'
    used = [gpu for gpu in gpus if gpu.device in devices]
    small = [gpu.name for gpu in used if gpu.free_bytes < need]
    if small:
        why = f"all stages need {need >> 20} MiB, more than is free on {', '.join(small)}"
        if len(devices) > 1:
            return "pipelined", why
        return "replicated", f"{why}, but it is the only device"
    if not used:
        return "replicated", "no GPU is used; the CPU holds all stages"
    return "replicated", f"every {'GPU' if 'cpu' in devices else 'device'} has memory for all stages"


class _Bounds(NamedTuple):
    """How many workers a device may have, by the reason for each bound: its own, and its share of the host."""

    own: dict[str, int]
    share: dict[str, int]

    def all(self) -> dict[str, int]:
        return self.own | self.share

    def workers(self) -> int:
        return max(1, min(self.all().values()))


def _find_bounds(
    run: Segment, sharing: int, gpus: Sequence[Gpu], weights: Mapping[str, int], host: Host, batches: Batches
) -> dict[str, _Bounds]:
    """Those of each device of a run. sharing: how many devices share the host."""
    need = sum(weights[stage] for stage in run.stages) + working_bytes(batches)
    share = {
        f"each worker needs {WORKER_BYTES >> 30} GiB of the host's memory": host.free_bytes
        // (WORKER_BYTES * sharing),
        "three workers need four cores": host.cores // (CORES_PER_WORKER * sharing),
    }
    most = f"more than {GPU_WORKERS} workers on a GPU were not measured"
    memory = f"each worker needs {need >> 20:,} MiB of GPU memory"
    on_cpu = _Bounds({"one worker's models use all cores of the CPU": 1}, {})
    on_gpus = {
        gpu.device: _Bounds({most: GPU_WORKERS, memory: gpu.free_bytes // need}, share) for gpu in gpus
    }
    return {device: on_gpus.get(device, on_cpu) for device in run.devices}


def _limit(bounds: Sequence[Mapping[str, _Bounds]], section: PipelineSection) -> str:
    """What allows the fewest workers, on the device with the fewest; empty if their number is set."""
    if section.workers_per_device:
        return ""
    least = min((each for run in bounds for each in run.values()), key=_Bounds.workers).all()
    return min(least, key=least.__getitem__)


def _count_workers(bounds: Mapping[str, _Bounds], section: PipelineSection) -> dict[str, int]:
    """How many workers each device has. A CPU has one unless a number is set."""
    if section.workers_per_device:
        return dict.fromkeys(bounds, section.workers_per_device)
    counts = {device: each.workers() for device, each in bounds.items()}
    gpus = [device for device, each in bounds.items() if each.share]
    if section.spread == "round-robin":
        counts |= dict.fromkeys(gpus, min((counts[device] for device in gpus), default=0))
    if section.spread == "fill-first":
        left = sum(counts[device] for device in gpus)
        for device in gpus:
            counts[device] = min(left, max(1, min(bounds[device].own.values())))
            left -= counts[device]
    return counts


def _staff(run: Segment, workers: Mapping[str, int]) -> Segment:
    """The run with these workers on its devices, in turns."""
    rounds = range(max(workers.values()))
    return Segment(
        run.stages,
        tuple(device for number in rounds for device in run.devices if number < workers.get(device, 0)),
    )


def _spread(
    stages: tuple[str, ...], devices: Sequence[str], costs: Mapping[str, float], *, scarce: bool
) -> tuple[Segment, ...]:
    """Cut the stages into runs, at most as many as there are devices, so that the rate is highest: fewer runs
    leave more devices for each, so that several executors can have all of them.

    scarce: memory is, so there are as many runs as possible.
    """
    most = min(len(stages), len(devices))
    candidates = [
        _hold(stages, cut, devices, costs)
        for parts in range(most, 0 if most == 1 else most - 1 if scarce else 1, -1)
        for cut in itertools.combinations(range(1, len(stages)), parts - 1)
    ]
    return max(candidates, key=lambda held: _best_rate(Placement(held, "", costs=costs)))


def _hold(
    stages: tuple[str, ...], cut: Sequence[int], devices: Sequence[str], costs: Mapping[str, float]
) -> tuple[Segment, ...]:
    """The runs between these places, each with a device. Each further device goes to the run with the highest
    cost per device."""
    runs = [stages[a:b] for a, b in itertools.pairwise((0, *cut, len(stages)))]
    shares = [1] * len(runs)
    for _ in range(len(devices) - len(runs)):
        costliest = max(range(len(runs)), key=lambda part: _cost(runs[part], costs) / shares[part])
        shares[costliest] += 1
    supply = iter(devices)
    held = [tuple(itertools.islice(supply, share)) for share in shares]
    return tuple(Segment(run, devices) for run, devices in zip(runs, held, strict=True))


def _cost(run: Sequence[str], costs: Mapping[str, float]) -> float:
    """costs: measured ones; empty: the usual ones."""
    return max(LEAST_COST, sum(costs[stage] if costs else find_stage(stage).cost for stage in run))


def spread_over(devices: list[str], spec: StageSpec) -> StageSpec:
    """The spec of a stage in a worker with these devices. An empty list stands for a worker with one device."""
    if devices and find_backend(spec.name, spec.backend).can_spread:
        return msgspec.structs.replace(spec, spread=devices)
    return spec
