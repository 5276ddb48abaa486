"""NUMA: which cores are near a GPU, and how a process is kept on them.

On a host with several sockets, memory and GPUs are attached to one socket each. A process on another one reaches
them over a slower link. The kernel allocates memory where it is first touched, so a process that moves to the
right cores before it allocates has its memory there too.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from daemon.system.gpus import Gpu
from stages.contract.processes import count_cores

SYSFS = Path("/sys")
NEAR_CORES_PER_WORKER = 3  # if a GPU's node has fewer, its workers use those of other nodes too
FARTHEST = 255  # the largest distance that there is; also for one that is not known


class Cores(msgspec.Struct, frozen=True):
    """total: how many the daemon may use, or one of several Annotators on this machine. near: by device, the cores on
    which its workers run; a device that is not in it has workers on any core."""

    total: int
    near: dict[str, list[int]] = {}

    @classmethod
    def of(cls, gpus: Sequence[Gpu], devices: Sequence[str], sharers: int = 1) -> Cores:
        """devices: of each worker. sharers: as for `Host.here`."""
        allowed, workers = os.sched_getaffinity(0), Counter(devices)
        nodes = read_nodes(SYSFS)
        places = {gpu.device: find_node(gpu, SYSFS) for gpu in gpus if gpu.device in workers}
        on_node = Counter(places[device] for device in devices if device in places)
        near: dict[str, list[int]] = {}
        for device, node in places.items():
            if node in nodes:
                cores = find_near(node, nodes, allowed, NEAR_CORES_PER_WORKER * on_node[node])
                near |= {device: sorted(cores)} if cores else {}
        return cls(max(1, count_cores() // sharers), near)

    def common(self, devices: Iterable[str]) -> list[int]:
        """The cores of all these devices, if they are the same; otherwise none."""
        found = {tuple(self.near.get(device, ())) for device in devices}
        return list(found.pop()) if len(found) == 1 else []

    def share(self, device: str, devices: Sequence[str]) -> float:
        """How many cores there are for each worker on a device. devices: of each worker."""
        share = self.total / len(devices)
        if near := self.near.get(device):
            sharers = sum(bool(set(near) & set(self.near.get(other, near))) for other in devices)
            share = min(share, len(near) / sharers)
        return share

    def describe(self) -> dict[str, str]:
        """By device: "0-31,64-95"."""
        return {device: write_list(cores) for device, cores in self.near.items()}


class Node(msgspec.Struct, frozen=True):
    """A NUMA node with its cores. distances: to each node, as the firmware reports them."""

    cores: frozenset[int]
    distances: dict[int, int]


def read_nodes(root: Path) -> dict[int, Node]:
    """The nodes that have cores, by number."""
    folders = {int(folder.name[4:]): folder for folder in root.glob("devices/system/node/node[0-9]*")}
    nodes = {}
    for number, folder in sorted(folders.items()):
        with contextlib.suppress(OSError, ValueError):
            cores = read_list((folder / "cpulist").read_text())
            distances = map(int, (folder / "distance").read_text().split())
            if cores:
                nodes[number] = Node(cores, dict(zip(sorted(folders), distances, strict=False)))
    return nodes


def find_node(gpu: Gpu, root: Path) -> int:
    """The node of a GPU; -1 if it is not known."""
    with contextlib.suppress(OSError, ValueError):
        return int((root / "bus/pci/devices" / gpu.bus_id / "numa_node").read_text()) if gpu.bus_id else -1
    return -1


def find_near(node: int, nodes: Mapping[int, Node], allowed: Iterable[int], wanted: int) -> frozenset[int]:
    """The allowed cores of a node. While these are fewer than are wanted, also those of the nearest others: some
    processors have several small nodes, and GPUs on only a part of them.

    Empty if there is no reason to choose: one node, none of its cores allowed, or all cores needed.
    """
    usable = frozenset(allowed)
    distances = nodes[node].distances
    found = nodes[node].cores & usable
    if not found:
        return frozenset()
    for distance in sorted({distances.get(other, FARTHEST) for other in nodes if other != node}):
        if len(found) >= wanted:
            break
        for other, its in nodes.items():
            if distances.get(other, FARTHEST) == distance:
                found |= its.cores & usable
    return found if found != usable else frozenset()


def bind(cores: Iterable[int]) -> None:
    """Run this process, and all that it starts, only on those of these cores that it may use already. None of
    them: change nothing."""
    near = frozenset(cores)
    for thread in os.listdir("/proc/self/task") if near else ():
        with contextlib.suppress(OSError):  # the thread has ended, or there is no such core that it may use
            os.sched_setaffinity(int(thread), os.sched_getaffinity(int(thread)) & near)


def read_list(text: str) -> frozenset[int]:
    """The numbers in a list of Linux: "0-3,8"."""
    numbers = set[int]()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def write_list(numbers: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
