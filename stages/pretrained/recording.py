"""Recording of GPU work, so that Python need not start each kernel again: CUDA graphs."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

TRIALS = 2  # libraries initialize themselves during the first runs, which cannot be recorded

_recording = threading.Lock()  # CUDA records one graph at a time in a process


class Recorder(Protocol):
    def record(self, work: Callable[[], object], rewind: Callable[[], object]) -> Callable[[], None]:
        """Returns a function that repeats the work on the same memory, with the values that are there by then.

        work: reads and writes only tensors that stay where they are, and copies nothing to the host.
        rewind: undoes what a run of the work leaves behind for the next; called before each run and at the end.
        """


class CudaRecorder:
    """Records CUDA graphs. They share the memory for intermediate values, so only one may run at a time."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def record(self, work: Callable[[], object], rewind: Callable[[], object]) -> Callable[[], None]:
        """As of Recorder. Call it while a stage loads: later, other threads use the device, and their work could
        make the recording fail. Raises torch's errors."""
        with _recording, torch.cuda.device(self.device):
            self._try_out(work, rewind)
            rewind()
            graph = torch.cuda.CUDAGraph()
            with (
                without_collection(),
                torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"),
            ):
                work()
            rewind()
        return graph.replay

    def _try_out(self, work: Callable[[], object], rewind: Callable[[], object]) -> None:
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            for _ in range(TRIALS):
                rewind()
                work()
        current.wait_stream(self.stream)


@contextmanager
def without_collection() -> Iterator[None]:
    """While a graph is recorded, Python must not collect garbage: the graphs of a model that is no longer used may be
    among it, and CUDA ends a recording when another graph is destroyed."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
