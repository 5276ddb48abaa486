"""The rate of the daemon's workers fed from memory: the same workers and slab, without files,
ledger or sidecars."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import anyio

from daemon.config.loading import Config
from daemon.core.errors import VisiondError, WrongArgument, leaves
from daemon.core.messages import Item
from daemon.core.slab import Slab
from daemon.layout.layout import Layout
from daemon.layout.slabs import size_slab
from daemon.monitoring.metrics import Metrics
from daemon.system.log import set_up as set_up_log
from daemon.workers.batcher import Batcher
from daemon.workers.opening import open_batchers


def measure_ceiling(config: Config, images: list[Path], seconds: float) -> float:
    """Images per second, after every image in the slab has been processed once."""
    set_up_log(config.log.level)
    try:
        return anyio.run(_measure, config, images, seconds, backend_options={"use_uvloop": True})
    except BaseExceptionGroup as group:
        raise next(leaves(group)) from group


async def _measure(config: Config, images: list[Path], seconds: float) -> float:
    layout = Layout.of(config)
    if len(layout.placement.segments) > 1:
        raise WrongArgument(
            "--memory needs workers that hold all stages, but this configuration spreads the stages over devices."
        )
    with closing(Slab(size_slab(layout.config, layout.gpus))) as slab:
        [batcher] = open_batchers(layout, slab, Metrics())
        items = list(fill(slab, images))
        batches = [
            items[start : start + batcher.batch_size] for start in range(0, len(items), batcher.batch_size)
        ]
        async with anyio.create_task_group() as tasks:
            await tasks.start(batcher.pool.run)
            await work(batcher, iter(batches))
            started = time.monotonic()
            done = await work(batcher, until(started + seconds, batches))
            rate = done / (time.monotonic() - started)
            batcher.pool.stop()
    return rate


def fill(slab: Slab, images: list[Path]) -> Iterator[Item]:
    """Copy images into the slab until it is full."""
    for image in images:
        data = image.read_bytes()
        extent = slab.try_reserve(len(data))
        if extent is None:
            return
        slab.window(extent)[:] = data
        yield Item(extent.offset, extent.length, {})


def until(deadline: float, batches: list[list[Item]]) -> Iterator[list[Item]]:
    """Repeat the batches until the deadline."""
    return itertools.takewhile(lambda _: time.monotonic() < deadline, itertools.cycle(batches))


async def work(batcher: Batcher, batches: Iterator[list[Item]]) -> int:
    """Process batch after batch in all threads of all workers; returns the number of images."""
    done = 0

    async def use_thread() -> None:
        nonlocal done
        for items in batches:
            worker = await batcher.pool.reserve()
            reply = await batcher.pool.run_batch(worker, items)
            batcher.pool.release(worker)
            if failed := [outcome.detail for outcome in reply.outcomes if outcome.reason]:
                raise VisiondError(f"The workers failed on {len(failed)} images fed from memory: {failed[0]}")
            done += len(items)

    async with anyio.create_task_group() as tasks:
        for _ in range(sum(slot.setup.threads for slot in batcher.pool.slots)):
            tasks.start_soon(use_thread)
    return done
