"""The child process that measures one model alone on a device: `python -m daemon.measure.alone`.

It reads an Order from standard input; the last line of its standard output is a Measurement. Images are decoded
before the clock starts, and one thread runs the stage: this is the rate of the model with what visiond does before
and after it, without files, decoding or other stages.
"""

from __future__ import annotations

import gc
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import psutil

from daemon.measure.models import GAIN, Measurement, ModelRate, RateRequest
from stages.contract.base import DeviceLost, Image, ImageError, OutOfMemory, Stage, StageUnusable
from stages.images.images import read_batches
from stages.registry import registry

REHEARSALS = 2  # calls before the clock starts: kernels are compiled, graphs captured


def main() -> None:
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=RateRequest)
    print(msgspec.json.encode(measure(order)).decode())


def measure(order: RateRequest) -> Measurement:
    """The rate at each batch size, until a larger batch is no faster or does not fit."""
    [images] = read_batches(list(map(Path, order.images)), len(order.images), order.device)
    rates: list[ModelRate] = []
    load_seconds, peak, problem = 0.0, 0, ""
    for size in order.batch_sizes:
        spec = msgspec.structs.replace(order.spec, batch_size=size)
        try:
            registry.find_class(spec)  # imports its libraries, which is not part of loading the model
            started = time.perf_counter()
            stage = registry.build(spec, order.device)
            stage.load()
            load_seconds = load_seconds or time.perf_counter() - started
            rate = time_stage(stage, list(itertools.islice(itertools.cycle(images), size)), order.seconds)
        except (StageUnusable, OutOfMemory, DeviceLost, ImageError) as error:
            problem = "" if rates and isinstance(error, OutOfMemory) else str(error)
            break
        rates.append(ModelRate(size, rate))
        peak = measure_memory(order.device)
        del stage
        gc.collect()
        if len(rates) > 1 and rate < GAIN * max(earlier.images_per_second for earlier in rates[:-1]):
            break
    return Measurement(rates, load_seconds, peak, problem)


def time_stage(stage: Stage, images: Sequence[Image], seconds: float) -> float:
    """Images per second. Raises ImageError if the stage cannot do one of them."""
    return len(images) / time_calls(lambda: run(stage, images), seconds)


def time_calls(call: Callable[[], object], seconds: float) -> float:
    """Seconds for each call, on average over at least this time, after some rehearsals."""
    for _ in range(REHEARSALS):
        call()
    started, calls, spent = time.perf_counter(), 0, 0.0
    while spent < seconds:
        call()
        calls, spent = calls + 1, time.perf_counter() - started
    return spent / calls


def run(stage: Stage, images: Sequence[Image]) -> None:
    for answer in stage.run(images):
        if isinstance(answer, ImageError):
            raise answer


def measure_memory(device: str) -> int:
    """Bytes: of the GPU, the most that PyTorch had reserved; of a CPU, what this process has now."""
    if device.startswith("cuda"):
        import torch  # nothing under daemon/ imports it with itself

        return torch.cuda.max_memory_reserved(device)
    return int(psutil.Process().memory_info().rss)


if __name__ == "__main__":
    main()
