"""The rates of chat models, BLIP-2 and page readers with recorded steps and without, on the first GPU.

    python -m benchmarks.decoding --folder /tmp/models --models qwen3-vl-2b,smolvlm2-500m,blip2-opt-2.7b --batches 32,128
    python -m benchmarks.decoding --tiny --models qwen3_vl,blip-2 --batches 3   # on a CPU, to try the program

The models and the options are those of benchmarks.models: published sizes, random weights, captions of exactly 20 tokens.
Prints a Markdown table, one row as soon as it is measured. "Equal" counts the texts of a batch that are the same with and
without recorded steps, in the dtype that is measured; "in float32" counts those of a batch of three images at a batch size
of four, so that the recording has a row that no text uses.

--tiny takes the small models of the tests, by their type in config.json. Without a GPU the recordings are emulated: then
rates say nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch

from benchmarks.architectures import ARCHITECTURES
from benchmarks.models import describe, make_model
from daemon.bench.alone import time_stage
from daemon.bench.job import Place, make_once
from daemon.bench.models import IMAGES
from daemon.layout.layout import natural_dtype
from daemon.system.gpus import list_gpus
from stages.contract.base import Image, OutOfMemory, StageSpec
from stages.images.devices import hold_device, pixels_of
from stages.pretrained.language import LanguageStage
from stages.registry import registry
from stages.training.score import read_batches
from tests.stages import captioners, readers
from tests.stages.emulation import emulate_recordings

MODELS = "qwen3-vl-2b,smolvlm2-500m,blip2-opt-2.7b,lighton-ocr-1b"
HEAD = (
    "| model | batch | growing cache, images/s | recorded, images/s | times as fast | equal | in float32 "
    "| lengths | recording, s | cache, GB |\n|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Bench:
    device: str
    dtype: str
    seconds: float
    images: Sequence[Image]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("bench"), help="folder where weights and images are created"
    )
    parser.add_argument("--models", default=MODELS, help="names, separated by commas")
    parser.add_argument("--batches", default="32,128", help="batch sizes, separated by commas")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="minimum duration of each measurement, in seconds"
    )
    parser.add_argument("--dtype", default="", help="for example float32")
    parser.add_argument("--tiny", action="store_true", help="the small models of the tests")
    given = parser.parse_args()
    gpus = list_gpus()[:1]
    device = gpus[0].device if gpus else "cpu"
    count = 4 if given.tiny else IMAGES
    [images] = read_batches(Place(given.folder).make_images(count), count, device)
    bench = Bench(device, given.dtype or natural_dtype(gpus), given.seconds, images)
    print(HEAD, flush=True)
    with contextlib.nullcontext() if gpus else emulate_recordings():
        for name in given.models.split(","):
            make = describe_tiny(name) if given.tiny else describe_model(name, given.folder)
            spec, exact = make(bench.dtype), compare_in_float32(make("float32"), bench)
            for size in map(int, given.batches.split(",")):
                print(describe_rates(name, spec, size, bench, exact), flush=True)


def describe_model(name: str, folder: Path) -> Callable[[str], StageSpec]:
    """A model of the published size: its spec for a dtype."""
    [stage] = [stage for stage, models in ARCHITECTURES.items() if name in models]
    return partial(describe, stage, make_model(stage, name, folder / name), folder)


def describe_tiny(kind: str) -> Callable[[str], StageSpec]:
    folder = Path(tempfile.mkdtemp(prefix="tiny-"))
    makers = {**captioners.CAPTIONERS, **readers.READERS}
    stage = "ocr" if kind in readers.READERS else "blip"
    return partial(describe, stage, make_once(folder / kind, makers[kind]), folder)


def describe_rates(name: str, spec: StageSpec, size: int, bench: Bench, exact: str) -> str:
    """A line of the table."""
    try:
        stage = load(spec, size, bench.device)
        batch = list(itertools.islice(itertools.cycle(bench.images), size))
        stage.release_steps()
        growing, expected = time_stage(stage, batch, bench.seconds), write(stage, batch)
        started = time.perf_counter()
        with hold_device(stage.lock):
            stage.record_steps()
        seconds = time.perf_counter() - started
        if not stage.steps or not stage.steps.memory:
            return f"| {name} | {size} | {growing:,.4g} | no recorded steps | | | {exact} | | | |"
        lengths = ", ".join(map(str, stage.steps.lengths))
        gigabytes = sum(part.nbytes for part in stage.steps.memory.parts) / 1e9
        recorded, found = time_stage(stage, batch, bench.seconds), write(stage, batch)
    except OutOfMemory as error:
        return f"| {name} | {size} | {str(error).splitlines()[0]} | | | | {exact} | | | |"
    kept = "" if stage.steps else ", released"  # a batch did not fit beside the cache
    rates = f"{growing:,.4g} | {recorded:,.4g}{kept} | {recorded / growing:.2f}"
    equal = f"{count_equal(expected, found)} of {size}"
    return f"| {name} | {size} | {rates} | {equal} | {exact} | {lengths} | {seconds:.1f} | {gigabytes:.1f} |"


def compare_in_float32(spec: StageSpec, bench: Bench) -> str:
    """How many of three texts are the same with recorded steps as without them."""
    stage = load(spec, 4, bench.device)
    if not stage.steps:
        return "no recorded steps"
    recorded = write(stage, bench.images[:3])
    stage.release_steps()
    return f"{count_equal(write(stage, bench.images[:3]), recorded)} of 3"


def load(spec: StageSpec, size: int, device: str) -> LanguageStage:
    gc.collect()  # the model before
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    stage = registry.build(msgspec.structs.replace(spec, batch_size=size), device)
    assert isinstance(stage, LanguageStage), f"the backend {spec.backend} does not use transformers' generate"
    stage.load()
    return stage


def write(stage: LanguageStage, images: Sequence[Image]) -> list[list[int]]:
    with hold_device(stage.lock):
        tokens: list[list[int]] = stage.forward(pixels_of(images)).tolist()
    return tokens


def count_equal(texts: Sequence[object], others: Sequence[object]) -> int:
    return sum(one == other for one, other in zip(texts, others, strict=True))


if __name__ == "__main__":
    warnings.simplefilter("always", RuntimeWarning)  # why there are no recorded steps
    main()
