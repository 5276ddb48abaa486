"""Looks once a second at what limits the rate: at the machine, and at what the executors know of themselves."""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from daemon.monitoring.limits import INPUT, PUBLISH, READ, Limit, Moment, find_limit
from daemon.monitoring.processes import CpuTimes
from daemon.monitoring.snapshot import BatcherState, ExecutorState, GpuState, WorkerState
from stages.contract.processes import count_cores

LOOK_SECONDS = 1.0  # between two moments
KEPT = 10  # moments


class Load(NamedTuple):
    """What processes and GPUs do."""

    cpu_seconds: dict[str, float]
    decoders: int
    gpus: Sequence[GpuState]


class Limits:
    """The last moments, and what limited meanwhile."""

    def __init__(self) -> None:
        self.limit = Limit()
        self._moments: deque[Moment] = deque(maxlen=KEPT)
        self._cpu = CpuTimes(os.getpid())
        self._cores = count_cores()

    @property
    def last(self) -> Moment | None:
        return self._moments[-1] if self._moments else None

    def measure(self, ask_gpus: Callable[[], Sequence[GpuState]]) -> Load:
        """Reads files of /proc and asks the driver: call it in a thread."""
        return Load(*self._cpu.read(), ask_gpus())

    def add(
        self,
        states: Sequence[ExecutorState],
        load: Load,
        *,
        ended: int,
        in_flight: int,
        has_files: bool,
        is_paused: bool = False,
    ) -> None:
        """has_files: whether files wait to be read or are unpacked. is_paused: whether it waits until files can be
        read or written again. Meanwhile only reading and publishing limit; and while no worker is ready nothing does, as what
        limited before is no longer true."""
        occupied, waiting = find_waits(states, has_files=has_files)
        self._moments.append(
            Moment(
                at=time.time(),
                ended=ended,
                in_flight=in_flight,
                occupied=occupied,
                waiting=waiting,
                crowded=any(
                    state.waits_for_room and state.batchers[0].queued < state.batchers[0].batch_size
                    for state in states
                ),
                gpu_busy=_measure_busy(states, load.gpus),
                cpu_seconds=load.cpu_seconds,
                decoders=load.decoders,
                cores=self._cores,
            )
        )
        limit = find_limit(self._moments)
        self.limit = (
            Limit() if occupied is None or (is_paused and limit.part not in (READ, PUBLISH)) else limit
        )


def find_waits(
    states: Collection[ExecutorState], *, has_files: bool
) -> tuple[float | None, dict[str, float]]:
    """Shares of the threads of ready workers: those with a batch, of the segment that has most; and what those without one
    wait for. A thread that waits for another segment, or for room in the slab, is not counted.

    The first segment can wait for files, and the last one until earlier results are published.
    """
    threads, busy = Counter[str](), Counter[str]()
    for batcher in chain.from_iterable(state.batchers for state in states):
        threads[batcher.name] += sum(worker.threads for worker in _ready(batcher))
        busy[batcher.name] += sum(worker.busy for worker in _ready(batcher))
    shares = [busy[name] / count for name, count in threads.items() if count]
    waiting = defaultdict[str, float](float)
    for batcher, part in chain.from_iterable(_waits_of(state, has_files=has_files) for state in states):
        free = sum(worker.threads - worker.busy for worker in _ready(batcher))
        waiting[part] += free / max(1, threads[batcher.name])
    return max(shares, default=None), dict(waiting)


def _waits_of(state: ExecutorState, *, has_files: bool) -> Iterator[tuple[BatcherState, str]]:
    """What the free threads of the first and of the last segment wait for."""
    first, last = state.batchers[0], state.batchers[-1]
    if last.queued or state.is_backed_up:
        yield last, PUBLISH
        if last is first:
            return
    if not first.queued and not state.waits_for_room:
        yield first, READ if has_files else INPUT


def _ready(batcher: BatcherState) -> list[WorkerState]:
    return [worker for worker in batcher.workers if worker.state == "ready"]


def _measure_busy(states: Collection[ExecutorState], gpus: Sequence[GpuState]) -> float | None:
    """Of the GPUs that ready workers use, on average; None if none reports it."""
    workers = [worker for state in states for batcher in state.batchers for worker in _ready(batcher)]
    used = {part for worker in workers for part in worker.device.split("+")}
    loads = [gpu.busy for gpu in gpus if gpu.device in used and gpu.busy is not None]
    return sum(loads) / len(loads) if loads else None
