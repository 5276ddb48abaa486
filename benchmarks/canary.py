"""Measures whether the canary notices planted faults, whether it ever suspects right answers, and how long a look takes.

    python -m benchmarks.canary --looks 300

Also what it costs to read the answers to the user's images (daemon/workers/stream.py).
The models of the mini pack, in one thread, on a GPU if there is one. For each dtype: so many looks at healthy models, also
with batches of one image and with the reference of float32 in place of their own (another kind of GPU differs less); then
each fault, planted after the first look. A busy worker looks once in three thousand images, so 70 looks stand for 200,000.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Sequence
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.harness import TEMPORARY, read_options, spread, work_folder
from daemon.core.messages import Batch, Item, Setup
from daemon.workers.canary import MOST_READ, READ_SECONDS, Canary
from daemon.workers.chain import Chain
from daemon.workers.known_images import draw_known
from stages.contract.base import Limits
from stages.weights import packs
from tests.daemon.workers.wrong_answers import FAULTS

ROUNDS = 20
STAGES = ("ocr", "yolo", "clip", "blip")
DTYPES = {"float32": {}, "half": {}, "int8": {"ocr": "half", "yolo": "half", "blip": "half"}}
say = functools.partial(print, flush=True)


def main() -> None:
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    options = read_options(__doc__, looks=300, dtypes=list(DTYPES), folder=TEMPORARY, device=device)
    precise: list[Any] = []
    with work_folder(options.folder) as folder:
        for dtype in options.dtypes:
            chain = open_chain(folder, options.device, dtype, batch_size=8)
            canary = Canary(chain)
            measure_good(f"{dtype}, batches of 8", canary, options.looks)
            if precise:
                own, canary._reference = canary._reference, precise
                measure_good(f"{dtype}, with the reference of {options.dtypes[0]}", canary, options.looks)
                canary._reference = own
            precise = precise or canary._reference
            single = open_chain(folder, options.device, dtype, batch_size=1)
            measure_good(f"{dtype}, batches of 1", Canary(single), options.looks)
            measure_faults(dtype, chain, canary)
            measure_reading(dtype, chain)


def open_chain(folder: Path, device: str, dtype: str, batch_size: int) -> Chain:
    pack = packs.open_pack("mini", folder / "models", base=folder)
    settings: dict[str, dict[str, Any]] = {
        stage: {
            "backend": "",
            "dtype": DTYPES[dtype].get(stage, dtype),
            "batch_size": batch_size,
            "options": {},
        }
        for stage in STAGES
    }
    specs = packs.resolve_all(pack, STAGES, settings)
    references = str(folder / "references")
    setup = Setup(
        "worker", device, specs, 0, 1, 1, Limits(), None, [*STAGES], rehearse=True, references=references
    )
    chain = Chain(setup, memoryview(b""))
    chain.load()
    return chain


def measure_good(what: str, canary: Canary, looks: int) -> None:
    """Every difference counts, also one that does not come again."""
    alarms: list[tuple[str, str]] = []
    seconds: list[float] = []
    for _ in range(looks):
        began = time.perf_counter()
        alarms += canary._look().items()
        seconds.append(time.perf_counter() - began)
    milliseconds = spread([1000 * each for each in seconds])
    say(
        f"{what}: {looks} looks, {len(alarms)} false alarms {sorted(set(alarms))}; ms of a look: {milliseconds}"
    )


def measure_reading(what: str, chain: Chain) -> None:
    """As the worker's thread uses a core, of batches with as many images as are read."""
    known = draw_known(chain.setup.limits)
    items, place = [], 0
    for picture in islice(cycle(known), MOST_READ):
        items.append(Item(place, len(picture), {}))
        place += len(picture)
    reply = chain.run(Batch(0, items), memoryview(b"".join(islice(cycle(known), MOST_READ))))
    seconds = []
    for _ in range(ROUNDS):
        canary = Canary(chain, count(0.0, READ_SECONDS).__next__)
        began = time.thread_time()
        for _ in range(100):
            canary.note(reply)
        seconds.append((time.thread_time() - began) / 100)
    share = statistics.median(seconds) / READ_SECONDS
    batches = spread([1e6 * each for each in seconds])
    say(f"{what}: µs to read the answers to {MOST_READ} images: {batches}; {share:.3%} of a core at most")


def measure_faults(dtype: str, chain: Chain, canary: Canary) -> None:
    missed = [fault for fault in FAULTS if not is_noticed(fault, chain.stages, canary)]
    say(f"{dtype}: {len(FAULTS) - len(missed)} of {len(FAULTS)} planted faults noticed; not {missed}")


def is_noticed(fault: str, stages: Sequence[Any], canary: Canary) -> bool:
    name, plant = FAULTS[fault]
    stage = next(stage for stage in stages if stage.name == name)
    with mock.patch.object(stage, "run", plant(stage.run)):
        return name in canary.look()


if __name__ == "__main__":
    main()
