"""The child process that builds stages and tries each on two test images, as a worker would: build, load, decode, run.

It imports no more than a worker does. The two images differ in size, and both are in one batch: a
stage that only works on images of one size is found here, and not by the user's first mixed batch.
"""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Sequence

import msgspec

from daemon.core.messages import Batch, Item, Setup
from daemon.workers.chain import Chain
from daemon.workers.known_images import draw_page
from stages.contract.base import Limits, StageSpec, StageUnusable
from stages.contract.processes import die_with
from stages.registry import registry

IMAGES = 2


class Tryout(msgspec.Struct, frozen=True):
    """What became of one stage."""

    stage: str
    device: str = ""
    import_seconds: float = 0.0  # of its libraries, as far as no stage before it has imported them
    load_seconds: float = 0.0
    run_seconds: float = 0.0
    problem: str = ""  # a sentence: it cannot be built, or fails on an image
    warning: str = ""  # a sentence: it works, but only on one image at a time
    answers: tuple[bytes, ...] = ()  # its result as JSON, for each image

    @property
    def summary(self) -> str:
        libraries = f"{self.import_seconds:.1f}"
        before, then = ("", "") if libraries == "0.0" else (f"imports its libraries in {libraries} s, ", ",")
        loads = f"{before}loads in {self.load_seconds:.1f} s{then}"
        return f"{loads} and processes two test images in {self.run_seconds:.1f} s"


class TrialRequest(msgspec.Struct, frozen=True):
    """What a child is to try. known: for each image, the results of stages that were tried in other children."""

    setup: Setup
    known: list[dict[str, bytes]]


def main() -> None:
    """Entry point of the child process: `python -m daemon.workers.tryout PARENT_PID`. Reads
    the order from standard input and writes a line for each stage to standard output."""
    die_with(int(sys.argv[1]))
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints goes to the log
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=TrialRequest)
    images, known = draw_images(order.setup.limits), [dict(results) for results in order.known]
    for spec in order.setup.stages:
        tryout = try_stage(order.setup, spec, images, known)
        note(tryout, known)
        os.write(answers, msgspec.json.encode(tryout) + b"\n")
    os._exit(os.EX_OK)  # as a worker does


def draw_images(limits: Limits) -> list[bytes]:
    """A page, and the left part of it in portrait: another size, and within the same limits."""
    from PIL import Image as Picture

    page, file = draw_page(limits), io.BytesIO()
    picture = Picture.open(io.BytesIO(page))
    width, height = picture.size
    picture.crop((0, 0, -(-height * height // width), height)).save(file, "JPEG")
    return [page, file.getvalue()]


def try_stage(
    setup: Setup, spec: StageSpec, images: Sequence[bytes], known: Sequence[dict[str, bytes]]
) -> Tryout:
    """Build one stage and run it on all images at once, as a worker does."""
    chain = TryoutChain(
        msgspec.structs.replace(setup, stages=[spec], cascade=None), memoryview(b"".join(images))
    )
    offsets = [sum(map(len, images[:number])) for number in range(len(images))]
    items = [Item(*item) for item in zip(offsets, map(len, images), known, strict=True)]
    try:
        started = time.perf_counter()
        registry.find_class(spec)
        import_seconds = time.perf_counter() - started
        load_seconds = chain.load()[spec.name]
        started = time.perf_counter()
        outcomes = chain.run(Batch(0, items)).outcomes
    except StageUnusable as error:
        return Tryout(spec.name, problem=str(error))
    except Exception as error:  # noqa: BLE001 - whatever a stage raises is what there is to report
        return Tryout(
            spec.name, problem=f"it cannot be built: {type(error).__name__}: {' '.join(str(error).split())}."
        )
    for outcome in outcomes:
        if outcome.reason:
            size = f"{outcome.width}×{outcome.height}"
            problem = f"it is built, but fails on a test image of {size}: {outcome.reason}: {outcome.detail}."
            return Tryout(spec.name, problem=problem)
    return Tryout(
        spec.name,
        import_seconds=round(import_seconds, 3),
        load_seconds=round(load_seconds, 3),
        run_seconds=round(time.perf_counter() - started, 3),
        warning=chain.warning,
        answers=tuple(outcome.outputs[spec.name].payload for outcome in outcomes),
    )


def note(tryout: Tryout, known: Sequence[dict[str, bytes]]) -> None:
    """Give a stage's answers to the stages after it."""
    for results, answer in zip(known, tryout.answers, strict=False):  # a stage that failed has none
        results[tryout.stage] = answer


class TryoutChain(Chain):
    """Notes an error that a batch raises and its images alone do not: a worker halves such a batch and says nothing."""

    warning = ""

    def _note_failed_batch(self, error: Exception) -> None:
        cause = f"{type(error).__name__}: {' '.join(str(error).split())}"
        self.warning = (
            f"it fails on two images of different size in one batch, and is slow for that: {cause}."
        )


if __name__ == "__main__":
    main()
