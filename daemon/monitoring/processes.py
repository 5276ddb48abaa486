"""CPU time of a daemon's processes, by kind, as /proc has it."""

from __future__ import annotations

import os
from typing import NamedTuple

from daemon.monitoring.limits import IN_DAEMON, IN_DECODERS, IN_UNPACKERS, IN_WORKERS, OWNERS
from stages.contract.processes import read_stat

KINDS = {  # by module
    b"stages.images.decoder": IN_DECODERS,
    b"daemon.workers.child": IN_WORKERS,
    b"daemon.unpacking.child": IN_UNPACKERS,
}
TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")


class _Stat(NamedTuple):
    parent: int
    seconds: float  # of CPU time so far


class CpuTimes:
    """Of a process and all below it. A child of a worker or decoder that runs another module counts as that worker's."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._foreign: set[int] = set()  # processes that are not below it, so that each is looked at once
        self._kinds: dict[int, str] = {}  # by pid
        self._spent: dict[int, float] = {}  # CPU seconds of those that live
        self._ended = dict.fromkeys(OWNERS, 0.0)

    def read(self) -> tuple[dict[str, float], int]:
        """CPU seconds by kind, with those of processes that have ended; and how many decoders there are."""
        found = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self._foreign &= found
        stats = {pid: stat for pid in sorted(found - self._foreign) if (stat := _read_stat(pid))}
        for pid in self._kinds.keys() - stats.keys():
            self._ended[self._kinds.pop(pid)] += self._spent.pop(pid)
        for pid, stat in stats.items():
            if self._belongs(pid, stats):
                self._kinds[pid], self._spent[pid] = self._kind_of(pid, stat.parent), stat.seconds
            else:
                self._foreign.add(pid)
        total = dict(self._ended)
        for pid, seconds in self._spent.items():
            total[self._kinds[pid]] += seconds
        return total, sum(kind == IN_DECODERS for kind in self._kinds.values())

    def _belongs(self, pid: int, stats: dict[int, _Stat]) -> bool:
        """Whether it is below the process: one that was stays so when its parent has ended."""
        while pid in stats:
            if pid == self._pid or pid in self._kinds:
                return True
            pid = stats[pid].parent
        return False

    def _kind_of(self, pid: int, parent: int) -> str:
        """Until a new process has its own program, it looks like its parent. Decoders start no others."""
        if self._kinds.get(pid) == IN_DECODERS:
            return IN_DECODERS
        return _read_kind(pid) or self._kinds.get(parent, IN_DAEMON)


def _read_stat(pid: int) -> _Stat | None:
    """None if it has ended."""
    if not (fields := read_stat(pid)):
        return None
    return _Stat(int(fields[1]), (int(fields[11]) + int(fields[12])) * TICK_SECONDS)


def _read_kind(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return ""
    return next((KINDS[word] for word in words if word in KINDS), "")
