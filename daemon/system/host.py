"""What this process may use of the machine: cores, and memory within the limits of its cgroup."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from stages.contract.processes import CGROUPS, count_cores, own_cgroup, with_parents

WORKER = "daemon.workers.child"  # in the command of a worker process


@dataclass(frozen=True, slots=True)
class Host:
    cores: int
    free_bytes: int

    @classmethod
    def here(cls, sharers: int = 1) -> Host:
        """sharers: how many processes, this one included, each take an equal share of this machine: of what is free, and of
        what the workers of the others hold already."""
        free = measure_free(psutil.virtual_memory().available, CGROUPS, own_cgroup())
        share = (free + measure_held()) // sharers if sharers > 1 else free
        return cls(max(1, count_cores() // sharers), min(free, share))


def measure_free(available: int, root: Path, group: str) -> int:
    """Bytes: the minimum of the available memory and what the cgroups (version 2) of this process still allow.

    Only anonymous memory counts as used: the kernel drops cached files when memory is needed.
    """
    for folder in with_parents(root, group):
        available = min([available, *_allowed(folder)])
    return max(0, available)


def measure_held() -> int:
    """Bytes of anonymous memory of all of visiond's workers on this machine."""
    workers = (
        process
        for process in psutil.process_iter(["cmdline", "memory_info"])
        if WORKER in (process.info["cmdline"] or ())
    )
    return sum(process.info["memory_info"].rss - process.info["memory_info"].shared for process in workers)


def _allowed(folder: Path) -> list[int]:
    """Bytes that each limit of a cgroup still allows."""
    try:
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        limits = [(folder / name).read_text().strip() for name in ("memory.max", "memory.high")]
        return [int(limit) - int(statistics["anon"]) for limit in limits if limit != "max"]
    except (OSError, ValueError, KeyError):  # the root has no limits, and version 1 has other files
        return []
