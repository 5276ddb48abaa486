"""The process that groups near-duplicates: `python -m daemon.search.grouping`, started with one thread for BLAS, as each of
its threads multiplies matrices of its own. It reads a Grouping from standard input, and writes a GroupingState now and then,
until one is the last."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import msgspec
import numpy as np

from daemon.search.covering import Cover, Note, find_cover
from daemon.search.matrix import open_rows
from daemon.search.tower import receive, send
from daemon.system.gpus import list_gpus

NICE = 10  # images come first
GPU_FROM = 200_000  # images; fewer are compared by the CPU before a GPU has begun
GPU_BYTES = 4 << 30  # of its memory, besides the embeddings: for torch and what it compares at once
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


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    os.nice(NICE)
    states = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints goes to the log
    asked = msgspec.msgpack.decode(receive(sys.stdin.buffer), type=Grouping)

    def report(state: GroupingState) -> None:
        send(states, msgspec.msgpack.encode(state))

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
    if gpu := _choose_gpu(order.size, asked.dim):
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
        try:
            return find_cover(exact, order, asked.near, note=note, device="cuda")
        except RuntimeError as error:  # of CUDA: others use its memory, or this torch has no code for it
            print(f"near-duplicates are grouped without a GPU: {error}", file=sys.stderr, flush=True)
    return find_cover(exact, order, asked.near, asked.threads, note)


def _choose_gpu(images: int, dim: int) -> str:
    """The UUID of the GPU with most free memory; "" without one that has twice what is needed, as a daemon's workers may
    want more."""
    if images < GPU_FROM:
        return ""
    gpu = max(list_gpus(), key=lambda gpu: gpu.free_bytes, default=None)
    return gpu.uuid if gpu and gpu.free_bytes >= 2 * (images * dim * 2 + GPU_BYTES) else ""


if __name__ == "__main__":
    main()
