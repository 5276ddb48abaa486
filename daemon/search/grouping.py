"""The process that groups near-duplicates: `python -m daemon.search.grouping`, started with one thread for BLAS, as each of
its threads multiplies matrices of its own. It reads a Grouping from standard input, and writes a GroupingState now and then,
until one is the last."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from daemon.core.errors import SearchUnusable
from daemon.core.messages import read_frame, write_frame
from daemon.search.covering import Cover, Note, find_cover
from daemon.search.matrix import open_rows
from daemon.system.gpus import driver_errors, list_gpus
from stages.contract import processes

SILENT_SECONDS = 900.0  # between two reports of the process; then it is killed
NICE = 10  # images come first
GPU_FROM = 200_000  # images; fewer are compared by the CPU before a GPU has begun
GPU_BYTES = 4 << 30  # of GPU memory besides the embeddings: for torch and what it compares at once
ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"), "1")


class Grouping(msgspec.Struct, frozen=True):
    """folder, rows, dim: of the matrix. order: the rows to group, the best first, as int64. near: the least cosine."""

    folder: str
    rows: int
    dim: int
    order: bytes
    near: float
    threads: int


class GroupingState(msgspec.Struct, frozen=True):
    """done: how many images have their group. The last one has a problem, or is_last and what a Cover has, as int64 and
    float64."""

    done: int = 0
    is_last: bool = False
    leaders: bytes = b""
    cosines: bytes = b""
    problem: str = ""


def group_rows(asked: Grouping, note: Note) -> Cover:
    """Raises SearchUnusable."""
    child = subprocess.Popen(
        processes.python("-m", "daemon.search.grouping"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=processes.environment(ONE_THREAD),
    )
    assert child.stdin
    assert child.stdout
    try:
        for state in _listen(child, asked):
            if state.problem:
                raise SearchUnusable(f"images could not be compared: {state.problem}.")
            note(state.done)
            if state.is_last:
                return Cover(np.frombuffer(state.leaders, np.int64), np.frombuffer(state.cosines, np.float64))
    except (OSError, EOFError, msgspec.DecodeError):
        pass  # it was killed, perhaps as memory was short
    finally:
        child.kill()
        status = child.wait()
        for pipe in (child.stdin, child.stdout):
            with contextlib.suppress(BrokenPipeError):  # of what it has not read
                pipe.close()
    raise SearchUnusable(
        f"the process that compares images {processes.describe_end(status)}; it needs about 1 KiB of memory for "
        "each image, and its output is above."
    )


def _listen(child: subprocess.Popen[bytes], asked: Grouping) -> Iterator[GroupingState]:
    assert child.stdin
    assert child.stdout
    write_frame(child.stdin, asked)
    while True:
        late = threading.Timer(SILENT_SECONDS, child.kill)
        late.start()
        try:
            message = read_frame(child.stdout)
        finally:
            late.cancel()
        yield msgspec.msgpack.decode(message, type=GroupingState)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    os.nice(NICE)
    states = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints goes to the log
    asked = msgspec.msgpack.decode(read_frame(sys.stdin.buffer), type=Grouping)

    def report(state: GroupingState) -> None:
        write_frame(states, state)

    try:
        cover = _find(asked, lambda done: report(GroupingState(done)))
    except (OSError, ValueError, MemoryError) as error:
        report(GroupingState(problem=str(error) or "there is too little memory"))
        return
    count = len(cover.leaders)
    report(GroupingState(count, True, cover.leaders.tobytes(), cover.cosines.tobytes()))


def _find(asked: Grouping, note: Note) -> Cover:
    exact = open_rows(Path(asked.folder), asked.rows, asked.dim).exact
    order = np.frombuffer(asked.order, np.int64)
    try:
        if gpu := _choose_gpu(order.size, asked.dim):
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu
            return find_cover(exact, order, asked.near, note=note, device="cuda")
    except _gpu_errors() as error:
        print(
            f"near-duplicates are compared on the CPU, as the GPU failed: {error}",
            file=sys.stderr,
            flush=True,
        )
    return find_cover(exact, order, asked.near, asked.threads, note)


def _gpu_errors() -> tuple[type[Exception], ...]:
    """Others use its memory, this torch has no code for this GPU or for any, or the driver does not answer."""
    return (RuntimeError, AssertionError, *driver_errors())


def _choose_gpu(images: int, dim: int) -> str:
    """The UUID of the GPU with most free memory; "" without one that has twice what is needed, as a daemon's workers may
    want more."""
    if images < GPU_FROM:
        return ""
    gpu = max(list_gpus(), key=lambda gpu: gpu.free_bytes, default=None)
    return gpu.uuid if gpu and gpu.free_bytes >= 2 * (images * dim * 2 + GPU_BYTES) else ""


if __name__ == "__main__":
    main()
