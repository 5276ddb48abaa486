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

from daemon.search.covering import find_cover
from daemon.search.matrix import open_rows
from daemon.search.tower import receive, send

NICE = 10  # images come first
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
        rows = open_rows(Path(asked.folder), asked.rows, asked.dim)
        order = np.frombuffer(asked.order, np.int64)
        cover = find_cover(
            rows.exact, order, asked.near, asked.threads, lambda done: report(GroupingState(done))
        )
    except (OSError, ValueError, MemoryError) as error:
        report(GroupingState(problem=str(error) or "there is too little memory"))
        return
    report(GroupingState(len(order), True, cover.leaders.tobytes(), cover.cosines.tobytes()))


if __name__ == "__main__":
    main()
