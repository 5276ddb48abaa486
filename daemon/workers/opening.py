"""The batchers of an executor: a queue and a pool of workers for each segment of a layout, with the memory and the MPS servers
that these workers share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from daemon.config.state import KERNELS
from daemon.config.values import GROUP, members_of
from daemon.core.slab import Slab
from daemon.layout.devices import address_device
from daemon.layout.layout import Layout
from daemon.layout.placement import Segment
from daemon.monitoring.metrics import Metrics
from daemon.system.gpus import list_gpus
from daemon.workers.batcher import Batcher
from daemon.workers.mps import MpsServer, is_installed
from daemon.workers.pool import Pool
from daemon.workers.slot import Room, Slot


def open_batchers(
    layout: Layout, slab: Slab, metrics: Metrics, part: Sequence[Collection[int]] | None = None
) -> list[Batcher]:
    """Each segment with its queue and its pool of workers, not started yet.
    part: for each segment, the numbers of the workers that this executor has; None: all."""
    segments = layout.placement.segments
    held = part or [range(len(segment.devices)) for segment in segments]
    rooms = _measure_rooms(layout, held)
    return [
        _open_batcher(layout, segment, slab, metrics, numbers, rooms)
        for segment, numbers in zip(segments, held, strict=True)
    ]


def _measure_rooms(layout: Layout, held: Sequence[Collection[int]]) -> dict[str, Room]:
    """By device or group of this executor: its memory, if it is one of GPUs. held: as `part` of `open_batchers`."""
    users = _count_users(layout, held)
    on = {name: [gpu for gpu in layout.gpus if gpu.device in members_of(name)] for name in layout.devices()}
    return {
        name: Room(gpus, list_gpus, alone=all(users[gpu.device] == 1 for gpu in gpus))
        for name, gpus in on.items()
        if gpus
    }


def _count_users(layout: Layout, held: Sequence[Collection[int]]) -> Counter[str]:
    """By device: what uses it, this executor's workers as one."""
    devices = layout.devices()
    looks = [name for look in layout.config.second_look for name in look.devices or devices]
    users = Counter(member for name in [*devices, *looks] for member in members_of(name))
    for segment, numbers in zip(layout.placement.segments, held, strict=True):
        users.update(device for number, device in enumerate(segment.devices) if number not in numbers)
    return users


def _open_batcher(
    layout: Layout,
    segment: Segment,
    slab: Slab,
    metrics: Metrics,
    numbers: Collection[int],
    rooms: Mapping[str, Room],
) -> Batcher:
    """numbers: of its workers; rooms: by device."""
    metrics.begin_segment(segment.name, segment.stages, segment.devices)
    servers = _open_servers(layout, segment)
    slots = []
    for number in sorted(numbers):
        device = segment.devices[number]
        setup, environment = layout.set_up(segment, number, slab.size)
        environment["TRITON_CACHE_DIR"] = str(layout.config.state.path / KERNELS)
        slots.append(Slot(setup, device, environment, servers.get(device), room=rooms.get(device)))
    pool = Pool(segment.name, slots, slab.fd, layout.config.pipeline, metrics)
    batch = max(layout.specs[stage].batch_size for stage in segment.stages)
    return Batcher(segment.name, segment.stages, batch, pool)


def _open_servers(layout: Layout, segment: Segment) -> dict[str, MpsServer]:
    """By device: the MPS server of each GPU with several workers, if MPS is enabled and installed. The workers of
    a group take turns."""
    if not layout.config.pipeline.mps or not is_installed():
        return {}
    shared = [
        device
        for device, workers in Counter(segment.devices).items()
        if workers > 1 and device != "cpu" and GROUP not in device
    ]
    return {
        device: MpsServer(address_device(device, layout.gpus, 1)[1]["CUDA_VISIBLE_DEVICES"])
        for device in shared
    }
