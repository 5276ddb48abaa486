"""The process that compiles the GPU kernels of all stages, once for all workers of a host.

It has a pool of processes without a GPU: first each stage's variants are found in one of them, then each
variant is compiled in one. kernels.py starts it, and holds the folder's lock until it ends.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec

from stages.contract.base import StageSpec
from stages.contract.processes import die_with
from stages.kernels.cache import mark_of
from stages.kernels.variants import (
    Variant,
    compile_utilities,
    compile_variant,
    find_variants,
    has_driver,
    import_triton,
)
from stages.registry import registry

LONGEST_PROBLEM = 300  # characters


class Want(msgspec.Struct, frozen=True):
    """The kernels of a stage, for GPUs of one compute capability."""

    spec: StageSpec
    capability: str


class CompileRequest(msgspec.Struct, frozen=True):
    folder: str
    wants: list[Want]
    processes: int


class CompileProgress(msgspec.Struct, frozen=True):
    """How far it is: kernels that have been compiled or were there, and those that are known so far."""

    done: int
    known: int
    problem: str = ""  # why something could not be compiled, in a sentence


def main() -> None:
    """Entry point of the process: `python -m daemon.workers.compiler PARENT_PID`. Reads the order from standard
    input, and writes a line for each step to standard output."""
    die_with(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this process
    output = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=CompileRequest)
    with ProcessPoolExecutor(order.processes, get_context("spawn"), _begin, (os.getpid(),)) as pool:
        for step in compile_all(order, pool):
            os.write(output, msgspec.json.encode(step) + b"\n")


def compile_all(order: CompileRequest, pool: Executor) -> Iterator[CompileProgress]:
    """Compile everything that the order wants. A stage gets its mark when all of its kernels are compiled."""
    last = CompileProgress(0, 0)
    try:
        for last in _compile_all(order, pool):
            yield last
    except BrokenExecutor:
        yield msgspec.structs.replace(last, problem="a process that compiled kernels was killed, or crashed")


def _compile_all(order: CompileRequest, pool: Executor) -> Iterator[CompileProgress]:
    plans = {pool.submit(find_variants_of, want): want for want in order.wants}
    pool.submit(compile_utilities)
    for _ in range(order.processes):
        pool.submit(import_triton)  # starts the other processes already
    compiled: dict[Variant, Future[None]] = {}
    waiting: set[Future[Any]] = {*plans}
    while waiting:
        ended, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        problem = ""
        for future in ended:
            if error := future.exception():
                problem = describe(error)
            elif future in plans:
                waiting |= submit_new(future.result(), compiled, pool)
        yield CompileProgress(sum(map(_succeeded, compiled.values())), len(compiled), problem)
    for plan in filter(_succeeded, plans):
        if all(_succeeded(compiled[variant]) for variant in plan.result()):
            leave_mark(Path(order.folder), plans[plan])


def _succeeded(future: Future[Any]) -> bool:
    return future.done() and not future.exception()


def submit_new(
    variants: Iterable[Variant], compiled: dict[Variant, Future[None]], pool: Executor
) -> set[Future[Any]]:
    """Have those compiled that are not among the compiled yet, and add them to these."""
    new = [variant for variant in dict.fromkeys(variants) if variant not in compiled]
    signatures = {variant.signature for variant in compiled}
    for variant in new:
        is_first = variant.signature not in signatures
        signatures.add(variant.signature)
        compiled[variant] = pool.submit(compile_variant, variant, with_launcher=is_first)
    return {compiled[variant] for variant in new}


def find_variants_of(want: Want) -> list[Variant]:
    kind = registry.find_class(want.spec)
    return find_variants(lambda: kind.launch_kernels(want.spec), want.capability)


def leave_mark(folder: Path, want: Want) -> None:
    """Without a driver the launchers are missing, so the next start has to look again."""
    if has_driver():
        with suppress(OSError):  # as on a full disk: the next start looks again
            mark_of(folder, want.spec, want.capability).touch()


def describe(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:LONGEST_PROBLEM]


def _begin(parent: int) -> None:
    die_with(parent)
    warnings.simplefilter("ignore")  # the workers show them
    signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    main()
