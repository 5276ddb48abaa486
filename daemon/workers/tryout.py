"""The child process that builds stages and tries each on a test page, as a worker would: registry.build, load,
decode, run. It imports no more than a worker does."""

from __future__ import annotations

import os
import sys
import time

import msgspec

from daemon.messages import Batch, Item, Setup
from daemon.workers.chain import Chain, draw_page
from stages.base import StageSpec, StageUnusable
from stages.processes import die_with


class Tryout(msgspec.Struct, frozen=True):
    """What became of one stage. problem: a sentence, where it could not be built or failed on the page."""

    stage: str
    device: str = ""
    load_seconds: float = 0.0
    run_seconds: float = 0.0
    problem: str = ""
    answer: bytes = b""  # the JSON that it gave


class Order(msgspec.Struct, frozen=True):
    """What a child is to try. known: what stages that ran elsewhere said of the page."""

    setup: Setup
    known: dict[str, bytes]


def main() -> None:
    """Entry of the child process: `python -m daemon.workers.tryout PARENT_PID`, the order on standard input, a line for each
    stage on standard output."""
    die_with(int(sys.argv[1]))
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints goes to the log
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Order)
    page, known = draw_page(order.setup.limits), dict(order.known)
    for spec in order.setup.stages:
        tryout = try_stage(order.setup, spec, page, known)
        known |= {spec.name: tryout.answer} if tryout.answer else {}
        os.write(answers, msgspec.json.encode(tryout) + b"\n")
    os._exit(os.EX_OK)  # as a worker does


def try_stage(setup: Setup, spec: StageSpec, page: bytes, known: dict[str, bytes]) -> Tryout:
    """The stage by itself, as a worker builds and asks it."""
    chain = Chain(msgspec.structs.replace(setup, stages=[spec], cascade=None), memoryview(page))
    try:
        load_seconds = chain.load()[spec.name]
        started = time.perf_counter()
        (outcome,) = chain.run(Batch(0, [Item(0, len(page), known)])).outcomes
    except StageUnusable as error:
        return Tryout(spec.name, problem=str(error))
    except Exception as error:  # noqa: BLE001 - whatever a stage raises is what there is to report
        return Tryout(spec.name, problem=f"it cannot be built: {type(error).__name__}: {' '.join(str(error).split())}.")
    if outcome.reason:
        return Tryout(spec.name, problem=f"it is built, but fails on a test page: {outcome.reason}: {outcome.detail}.")
    return Tryout(
        spec.name,
        load_seconds=round(load_seconds, 3),
        run_seconds=round(time.perf_counter() - started, 3),
        answer=outcome.outputs[spec.name].payload,
    )


if __name__ == "__main__":
    main()
