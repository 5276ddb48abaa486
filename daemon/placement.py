"""Where the stages run. A placement is a list of segments;
a segment is a run of stages and the devices that hold it.

"Replicated" is one segment on n devices; "pipelined" is several segments, each with its own devices.
The rest of the code does not know which of them it is.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from daemon.config.loading import Config
from daemon.system.gpus import Gpu
from daemon.system.host import Host
from stages.base import FULL_BATCH
from stages.registry import find_stage

# GPU memory of a worker in addition to its weights: the CUDA context and its libraries, the largest step of OCR,
# and what each image of a batch takes. Measured on an H100 with images of 1280×960: 6.1 GB with batches of 64.
CONTEXT_BYTES = 1 << 30
MAPS_BYTES, MAPS_BYTES_OF_FULL_BATCH = 1300 << 20, 3400 << 20
IMAGE_BYTES = 41 << 20
MODELS_BYTES = 970 << 20  # the weights of the standard pack; they are not known yet when the batch is chosen
GPU_WORKERS = 5  # on one GPU: a single interpreter does not keep an H200 busy
# The rate of an H100 with batches of these sizes, and with one worker more each time, as a share of its best rate.
RATE_BY_BATCH = {FULL_BATCH: 1.0, 64: 0.92, 32: 0.72}
RATE_BY_WORKERS = (0.44, 0.78, 0.95, 1.0, 1.0)
SMALL_BATCHES = (16, 8)  # where there is no memory for larger ones; not measured
CORES_PER_WORKER = 3
DEVICES_PER_INTERPRETER = 2  # GPUs that one Python process keeps busy, see docs/performance.md
WORKER_BYTES = 4 << 30  # host memory, measured in the same way: CUDA's libraries, decoders and pinned buffers


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of stages and the devices that hold it; a device named twice holds it in two processes."""

    stages: tuple[str, ...]
    devices: tuple[str, ...]

    @property
    def name(self) -> str:
        return "+".join(self.stages)


@dataclass(frozen=True, slots=True)
class Placement:
    segments: tuple[Segment, ...]
    why: str
    # what keeps a GPU from having more workers; empty if the configuration sets their number
    limit: str = field(default="", compare=False)


def choose_batch(gpus: Sequence[Gpu]) -> int:
    """The batch, in images, with which the GPU with the least free memory is fastest: large batches are fast, but
    leave room for fewer workers."""
    free = min(gpu.free_bytes for gpu in gpus)
    workers = {
        batch: min(free // (MODELS_BYTES + working_bytes(batch)), GPU_WORKERS)
        for batch in (*RATE_BY_BATCH, *SMALL_BATCHES)
    }
    rates = {
        batch: rate * RATE_BY_WORKERS[workers[batch] - 1]
        for batch, rate in RATE_BY_BATCH.items()
        if workers[batch]
    }
    if rates:
        return max(rates, key=lambda batch: rates[batch])
    return next((batch for batch in SMALL_BATCHES if workers[batch]), SMALL_BATCHES[-1])


def working_bytes(batch: int) -> int:
    """GPU memory of a worker in addition to its weights. batch: images of the largest batch."""
    maps = MAPS_BYTES_OF_FULL_BATCH if batch >= FULL_BATCH else MAPS_BYTES
    return CONTEXT_BYTES + maps + batch * IMAGE_BYTES


def plan(
    config: Config, gpus: Sequence[Gpu], weights: Mapping[str, int], host: Host, batch: int
) -> Placement:
    """The placement that the configuration asks for, on this machine's devices.

    weights: bytes of each stage's weights on the device; batch: images of the largest batch.
    """
    need = sum(weights.values()) + working_bytes(batch)
    stages = tuple(config.stage_names)
    if config.pipeline.segment:
        segments = tuple(
            Segment(tuple(table.stages), tuple(table.devices) * table.workers_per_device)
            for table in config.pipeline.segment
        )
        return Placement(segments, "set by the [[pipeline.segment]] tables")
    devices = config.pipeline.devices or [gpu.device for gpu in gpus] or ["cpu"]
    used = [gpu for gpu in gpus if gpu.device in devices]
    mode, why = _choose(config.pipeline.placement, devices, used, need)
    if mode == "pipelined":
        return Placement(_spread(stages, devices, config.pipeline.workers_per_device or 1), why)
    on_gpu = config.pipeline.workers_per_device or _workers(devices, used, need, host)
    on_cpu = config.pipeline.workers_per_device or 1  # one worker's models use all cores
    held = _repeat(devices, on_gpu, on_cpu)
    counts = ", ".join(f"{count} on {device}" for device, count in Counter(held).items())
    limit = "" if config.pipeline.workers_per_device else _limit(devices, used, need, host)
    return Placement((Segment(stages, held),), f"{why}; workers: {counts}", limit)


def share_out(placement: Placement, stations: int) -> list[list[list[int]]]:
    """For each station, and for each segment, the numbers of its workers there.

    stations: how many are wanted; 0: one for each device, if there are more than one interpreter can feed. A
    GPU's workers stay together if there are enough GPUs, and the segments of a pipelined chain always do.
    """
    devices = placement.segments[0].devices
    unique = list(dict.fromkeys(devices))
    enough = len(unique) if len(unique) > DEVICES_PER_INTERPRETER else 1
    wanted = min(stations or enough, len(devices))
    if len(placement.segments) > 1 or wanted <= 1:
        return [[list(range(len(segment.devices))) for segment in placement.segments]]
    numbers = range(len(devices))
    if wanted > len(unique):
        return [[[number for number in numbers if number % wanted == place]] for place in range(wanted)]
    return [
        [[number for number in numbers if unique.index(devices[number]) % wanted == place]]
        for place in range(wanted)
    ]


def _choose(mode: str, devices: Sequence[str], used: Sequence[Gpu], need: int) -> tuple[str, str]:
    """used: the GPUs among the devices."""
    if mode != "auto":
        return mode, f'placement = "{mode}"'
    small = [gpu.name for gpu in used if gpu.free_bytes < need]
    if small and len(devices) > 1:
        return "pipelined", f"all stages need {need >> 20} MiB, more than is free on {', '.join(small)}"
    if small:
        return (
            "replicated",
            f"all stages need {need >> 20} MiB, more than is free on {small[0]}, but it is the only device",
        )
    if not used:
        return "replicated", "no GPU is used; the CPU holds all stages"
    return "replicated", f"every {'GPU' if 'cpu' in devices else 'device'} has memory for all stages"


def _repeat(devices: Sequence[str], on_gpu: int, on_cpu: int) -> tuple[str, ...]:
    """Each device once for each of its workers, in turns."""
    rounds = range(max(on_gpu, on_cpu))
    return tuple(
        device for number in rounds for device in devices if number < (on_cpu if device == "cpu" else on_gpu)
    )


def _workers(devices: Sequence[str], used: Sequence[Gpu], need: int, host: Host) -> int:
    """The number of processes on a GPU that its memory and its share of the host allow."""
    if not used:
        return 1
    return max(1, min(_bounds(devices, used, need, host).values()))


def _limit(devices: Sequence[str], used: Sequence[Gpu], need: int, host: Host) -> str:
    """What allows the fewest workers."""
    if not used:
        return "one worker's models use all cores of the CPU"
    bounds = _bounds(devices, used, need, host)
    return min(bounds, key=lambda name: bounds[name])


def _bounds(devices: Sequence[str], used: Sequence[Gpu], need: int, host: Host) -> dict[str, int]:
    return {
        f"more than {GPU_WORKERS} workers gained nothing on an H200": GPU_WORKERS,
        f"each worker needs {need >> 20:,} MiB of GPU memory": min(gpu.free_bytes for gpu in used) // need,
        f"each worker needs {WORKER_BYTES >> 30} GiB of the host's memory": host.free_bytes
        // (WORKER_BYTES * len(devices)),
        f"each worker needs {CORES_PER_WORKER} cores": host.cores // (CORES_PER_WORKER * len(devices)),
    }


def _spread(stages: tuple[str, ...], devices: Sequence[str], workers: int) -> tuple[Segment, ...]:
    """Cut the stages into at most as many runs as there are devices, so that the most expensive run
    costs as little as possible. Each further device goes to the run with the highest cost per device."""
    parts = min(len(stages), len(devices))
    cuts = itertools.combinations(range(1, len(stages)), parts - 1)
    runs = min(
        ([stages[a:b] for a, b in itertools.pairwise((0, *cut, len(stages)))] for cut in cuts),
        key=lambda runs: max(map(_cost, runs)),
    )
    shares = [1] * parts
    for _ in range(len(devices) - parts):
        costliest = max(range(parts), key=lambda part: _cost(runs[part]) / shares[part])
        shares[costliest] += 1
    supply = iter(devices)
    held = [tuple(itertools.islice(supply, share)) for share in shares]
    return tuple(Segment(run, devices * workers) for run, devices in zip(runs, held, strict=True))


def _cost(run: Sequence[str]) -> float:
    return sum(find_stage(stage).cost for stage in run)
