"""Recording of GPU work, so that Python need not start each kernel again: CUDA graphs."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor

from stages.contract.base import PREPARED, RECORDING, StageSpec
from stages.images.devices import device_errors, synchronize
from stages.pretrained.soundness import first_line

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
        PREPARED[RECORDING] += 1
        return graph.replay

    def _try_out(self, work: Callable[[], object], rewind: Callable[[], object]) -> None:
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            for _ in range(TRIALS):
                rewind()
                work()
        current.wait_stream(self.stream)


def choose_recorder(device: str) -> Recorder | None:
    return CudaRecorder(device) if device.startswith("cuda") else None


_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


@contextmanager
def recording_single(spec: StageSpec, device: str) -> Iterator[bool]:
    """For a part of `load` that runs single images while the device is held: each Recorded function records its work on them.
    Yields whether it does, which is only on a GPU, for a stage that is to be fast for single images."""
    recorder = choose_recorder(device) if spec.single else None
    token = _recorder.set(recorder)
    try:
        yield recorder is not None
    finally:
        _recorder.reset(token)


class Recorded:
    """A function of a batch that has recordings for single images of some shapes: for one image, Python takes longer to start
    the kernels than a GPU to run them. It runs as before for all others.

    The answer to a single image is overwritten by the next one's."""

    def __init__(self, work: Callable[[Tensor], Tensor]) -> None:
        self.work = work
        # By shape: the memory of the input, what repeats the work, and the memory of the answer.
        self.recordings: dict[torch.Size, tuple[Tensor, Callable[[], None], Tensor]] = {}

    def __call__(self, batch: Tensor) -> Tensor:
        if (recorder := _recorder.get()) and len(batch) == 1 and batch.shape not in self.recordings:
            self._record(batch, recorder)
        if not (recording := self.recordings.get(batch.shape)):
            return self.work(batch)
        given, replay, answer = recording
        given.copy_(batch)
        replay()
        return answer

    def _record(self, batch: Tensor, recorder: Recorder) -> None:
        given, answers = batch.clone(), [batch]

        def work() -> None:
            answers[0] = self.work(given)

        try:
            self.recordings[batch.shape] = given, recorder.record(work, lambda: None), answers[0]
        except RuntimeError as error:  # no memory, or work that waits for the GPU
            with device_errors():
                synchronize(str(batch.device))
            why = first_line(error)
            message = f"single images take longer, as work on them cannot be recorded as a CUDA graph: {why}"
            warnings.warn(message, RuntimeWarning, stacklevel=3)


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
