"""Faults that only a real GPU can have. Without one, fakes replace it: test_workers.py and load.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from daemon.core.messages import Batch, Item, Reply, Setup
from daemon.workers.chain import Chain
from stages.contract.base import Limits
from stages.weights.packs import open_pack, resolve
from tests.daemon_process import STAGES, Daemon, Place
from tests.inputs import jpeg, picture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.timeout(900),  # kernels may have to be compiled first
]

LOADED_SECONDS = 600.0
BATCH = 256

ASSERTING = """
import os, torch
from stages.contract.base import DeviceLost
from stages.images.devices import device_errors, synchronize

for attempt in ("an index out of range", "and nothing works any more"):
    try:
        with device_errors():
            torch.zeros(1, device="cuda")[torch.tensor([5], device="cuda")]
            synchronize("cuda")
    except DeviceLost:
        print(attempt, flush=True)
os._exit(0)
"""


def test_a_batch_that_a_real_gpu_has_no_memory_for_is_halved_and_no_image_fails() -> None:
    """In a process of its own: the limit is on all memory that a process has, other tests' models too."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        first, second = pool.submit(exceed_memory).result()
    assert first.out_of_memory
    assert {(outcome.reason, outcome.detail) for outcome in first.outcomes} == {("", "")}
    assert second.out_of_memory == 0  # a size that did not fit is not tried again


def exceed_memory() -> tuple[Reply, Reply]:
    """The replies to the first batch that does not fit, and to the next one. As if another process used the rest of
    the GPU, this one's memory is limited to less and less of what a batch needs."""
    spec = resolve(open_pack("mini", Path()), "yolo", {"batch_size": BATCH})
    chain = Chain(
        Setup("w", "cuda:0", [spec], 0, 1, 1, Limits(), None, ["yolo"]), memoryview(jpeg(picture(320, 240)))
    )
    chain.load()
    batch = Batch(0, [Item(0, len(chain._slab), {})] * BATCH)
    chain.run(batch)
    torch.cuda.reset_peak_memory_stats()
    chain.run(batch)
    needed = torch.cuda.max_memory_allocated() / torch.cuda.get_device_properties(0).total_memory
    for percent in range(100, 50, -2):
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(needed * percent / 100)
        reply = chain.run(batch)
        if reply.out_of_memory:
            break
    return reply, chain.run(batch)


def test_a_real_device_side_assert_is_a_lost_device_and_stays_one() -> None:
    told = subprocess.run(
        [sys.executable, "-c", ASSERTING], capture_output=True, text=True, check=False, timeout=300
    )
    assert told.stdout.splitlines() == ["an index out of range", "and nothing works any more"]


@pytest.mark.parametrize("workers", [1, 2])  # two of them share it by MPS, where that is installed
def test_a_worker_killed_on_a_real_gpu_is_replaced_there_and_its_images_are_done(
    workers: int, tmp_path: Path
) -> None:
    pipeline = {"devices": ["cuda:0"], "workers_per_device": workers}
    place = Place(tmp_path, {"stages": {name: {"backend": ""} for name in STAGES}, "pipeline": pipeline})
    place.drop_many(range(40))
    place.captions.clear()  # which the fake looks for
    with Daemon(place, ready=False) as daemon:
        daemon.wait_ready(LOADED_SECONDS)
        os.kill(daemon.workers()[0], signal.SIGKILL)
        daemon.wait_event("worker lost", cause="killed by SIGKILL")
        daemon.wait_idle(40, LOADED_SECONDS)
        assert daemon.stop() == 0
    place.assert_kept(DONE=40)
