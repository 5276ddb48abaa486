"""What workers reach from bytes in memory, without the daemon: the ceiling that the standard job is held against.

Each of P processes holds the whole chain and runs T threads, each taking one batch after another from the same files.
Run: python -m benchmarks.worker --folder F [--processes 1 2 4] [--threads 2] [--seconds 10], where F is a folder that
benchmarks.standard has filled (its --folder), with its daemon.toml.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from daemon.chain import Chain
from daemon.config import load
from daemon.gpus import list_gpus
from daemon.messages import Batch, Item, Setup
from daemon.service import resolve_models

START_SECONDS = 300.0


def make_setup(folder: Path, threads: int, decoders: int) -> Setup:
    config = load(folder / "daemon.toml")
    gpus = list_gpus()
    specs, _ = resolve_models(config, gpus)
    return Setup(
        name="bench",
        device="cuda:0" if gpus else "cpu",
        stages=list(specs.values()),
        slab_bytes=0,
        threads=threads,
        decoders=decoders,
        limits=config.pipeline.limits(),
        cascade=None,
        pipeline=config.stage_names,
    )


def load_files(inbox: Path, batch_size: int) -> tuple[memoryview, list[Batch]]:
    """All files' bytes one behind the other, as in the daemon's slab, and full batches of them."""
    files = [path.read_bytes() for path in sorted(inbox.iterdir())]
    ends = itertools.accumulate(map(len, files))
    items = [Item(end - len(data), len(data), {}) for end, data in zip(ends, files, strict=True)]
    starts = range(0, len(items) - batch_size + 1, batch_size)
    return memoryview(b"".join(files)), [Batch(start, items[start : start + batch_size]) for start in starts]


def serve(line: Connection, folder: Path, threads: int, decoders: int) -> None:
    """A child: load, say so, then run for as many seconds as each message says and answer with (images, seconds, stages)."""
    setup = make_setup(folder, threads, decoders)
    slab, batches = load_files(folder / "inbox", max(spec.batch_size for spec in setup.stages))
    chain = Chain(setup, slab)
    chain.load()
    for batch in batches:
        chain.run(batch)
    line.send("ready")
    while seconds := line.recv():
        line.send(run(chain, batches, threads, seconds))


def run(chain: Chain, batches: Sequence[Batch], threads: int, seconds: float) -> tuple[int, float, dict[str, float]]:
    images, spent, lock = 0, Counter[str](), threading.Lock()
    started = ended = time.perf_counter()

    def work(number: int) -> None:
        nonlocal images, ended
        for batch in itertools.islice(itertools.cycle(batches), number * len(batches) // threads, None):
            reply = chain.run(batch)
            assert not any(outcome.reason for outcome in reply.outcomes)
            with lock:
                images += len(batch.items)
                ended = time.perf_counter()
                spent.update({call.stage: call.seconds for call in reply.runs})
            if ended - started > seconds:
                return

    team = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    return images, ended - started, dict(spent)


def measure(folder: Path, processes: int, threads: int, seconds: float, decoders: int) -> dict[str, object]:
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(processes)]
    children = [context.Process(target=serve, args=(theirs, folder, threads, decoders)) for _, theirs in pipes]
    started = time.perf_counter()
    for child in children:
        child.start()
    for ours, _ in pipes:
        if not ours.poll(START_SECONDS):
            raise TimeoutError(f"a worker was not ready within {START_SECONDS:g} s")
        ours.recv()
    loaded = time.perf_counter() - started
    for ours, _ in pipes:
        ours.send(seconds)
    answers = [ours.recv() for ours, _ in pipes]
    for (ours, _), child in zip(pipes, children, strict=True):
        ours.send(0)
        child.join()
    images = sum(count for count, _, _ in answers)
    stages = Counter[str]()
    for _, _, spent in answers:
        stages.update(spent)
    return {
        "processes": processes,
        "threads": threads,
        "images_per_second": round(images / max(took for _, took, _ in answers), 1),
        "ready_seconds": round(loaded, 1),
        "stage_milliseconds_per_image": {stage: round(1000 * spent / images, 3) for stage, spent in stages.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--decoders", type=int, default=2)
    options = parser.parse_args()
    for processes, threads in itertools.product(options.processes, options.threads):
        print(json.dumps(measure(options.folder, processes, threads, options.seconds, options.decoders)), flush=True)


if __name__ == "__main__":
    main()
