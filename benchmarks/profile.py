"""Profiles a worker by stage and by GPU kernel: batches of the standard job from memory, in one process.

    python -m benchmarks.profile --count 1000 --batch 128
    python -m benchmarks.profile --kind phone --count 256

--kind is one of `visiond bench --inputs`, which measures how fast the daemon is; this shows where its time goes.
"""

from __future__ import annotations

import gc
import itertools
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import read_options
from daemon.core.messages import Batch
from daemon.core.slab import ALIGNMENT, Slab
from daemon.layout.layout import Layout
from daemon.measure.ceiling import fill
from daemon.measure.inputs import PDF, STANDARD, list_files
from daemon.measure.place import Place
from daemon.monitoring.metrics import Metrics
from daemon.workers.chain import Chain
from daemon.workers.child import keep_memory
from daemon.workers.opening import open_batchers
from stages.contract.base import Image, ImageError, Result, Stage
from stages.images.devices import BACKGROUND

WARM_UP, PROFILED = 3, 4  # batches
NAME = 100  # characters of a kernel's name


def main() -> None:
    # seconds: for each number of threads; top: kernels to list
    arguments = read_options(
        __doc__, folder=Path("bench"), kind=STANDARD, count=512, batch=128, seconds=4.0, top=40
    )
    keep_memory()
    chain, batches = load(Place(arguments.folder), arguments.kind, arguments.count, arguments.batch)
    chain.run(batches[0])
    for thread in threading.enumerate():
        if thread.name == BACKGROUND:  # it compiles
            thread.join()
    for batch in batches[:WARM_UP]:
        chain.run(batch)
    for threads in (1, 2, 3):
        print(
            f"{threads} threads: {measure_rate(chain, batches, threads, arguments.seconds):.1f} images/s",
            flush=True,
        )
    print_stages(chain, batches[:PROFILED])
    if torch.cuda.is_available():
        print_memory(chain, batches[:PROFILED])
        print_kernels(chain, batches[:PROFILED], arguments.top)


def load(place: Place, kind: str, count: int, size: int) -> tuple[Chain, list[Batch]]:
    """A worker's chain, as the daemon makes it, and batches in memory."""
    place.make_pack()
    images = [file for file in list_files(place, kind, count) if file.suffix != PDF]
    config = place.prepare(place.drop)
    layout = Layout.of(config)
    slab = Slab(sum(ALIGNMENT + image.stat().st_size for image in images))
    items = list(fill(slab, images))
    slot = open_batchers(layout, slab, Metrics())[0].pool.slots[0]
    os.environ.update(slot.environment)
    stages = [msgspec.structs.replace(stage, batch_size=size) for stage in slot.setup.stages]
    chain = Chain(msgspec.structs.replace(slot.setup, stages=stages), slab.view)
    chain.load()
    gc.unfreeze()  # otherwise libraries report leaks at the end
    return chain, [Batch(start, items[start : start + size]) for start in range(0, len(items), size)]


def measure_rate(chain: Chain, batches: Sequence[Batch], threads: int, seconds: float) -> float:
    """Images per second with this number of threads."""
    supply, lock, done = itertools.cycle(batches), threading.Lock(), Counter[str]()
    started = time.perf_counter()

    def work() -> None:
        while time.perf_counter() < started + seconds:
            with lock:
                batch = next(supply)
            chain.run(batch)
            with lock:
                done["images"] += len(batch.items)

    team = [threading.Thread(target=work) for _ in range(threads)]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    return done["images"] / (time.perf_counter() - started)


def print_stages(chain: Chain, batches: Sequence[Batch]) -> None:
    spent = defaultdict[str, float](float)
    for run in itertools.chain.from_iterable(chain.run(batch).runs for batch in batches):
        spent[run.stage] += run.seconds
    images = sum(len(batch.items) for batch in batches)
    print(
        "ms per image, one thread:",
        ", ".join(f"{stage} {1000 * seconds / images:.2f}" for stage, seconds in spent.items()),
    )


def print_memory(chain: Chain, batches: Sequence[Batch]) -> None:
    """The most GPU memory that each stage has beside what is there before it runs, and what the process has."""
    peaks = Counter[str]()

    def watch(stage: Stage) -> None:
        run = stage.run

        def watched(images: Sequence[Image]) -> list[Result | ImageError]:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            answers = run(images)
            peaks[stage.name] = max(peaks[stage.name], torch.cuda.max_memory_allocated() - before)
            return answers

        stage.run = watched  # type: ignore[method-assign]

    for stage in chain.stages:
        watch(stage)
    for batch in batches:
        chain.run(batch)
    own = ", ".join(f"{stage} {peak >> 20:,}" for stage, peak in peaks.items())
    held, kept = torch.cuda.memory_allocated() >> 20, torch.cuda.memory_reserved() >> 20
    free, total = torch.cuda.mem_get_info()
    print(
        f"MiB of GPU memory while a stage runs: {own}; between batches {held:,}; kept by PyTorch {kept:,}, "
        f"in use on the device {(total - free) >> 20:,}"
    )
    for stage in chain.stages:
        del stage.run


def print_kernels(chain: Chain, batches: Sequence[Batch], top: int) -> None:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for batch in batches:
            chain.run(batch)
        torch.cuda.synchronize()
    spent, calls = Counter[str](), Counter[str]()
    for event in profiler.events():
        if event.device_type.name == "CUDA":
            spent[event.name] += event.device_time_total
            calls[event.name] += 1
    images = sum(len(batch.items) for batch in batches)
    print(f"{spent.total() / images:.0f} µs of GPU time per image, {calls.total() / images:.1f} kernels")
    for name, microseconds in spent.most_common(top):
        print(f"{microseconds / images:9.2f} µs {calls[name]:6} × {name[:NAME]}")


if __name__ == "__main__":
    main()
