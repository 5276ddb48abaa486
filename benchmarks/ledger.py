"""Measures the ledger alone: made-up results of four stages, without files, executors and workers.

    python -m benchmarks.ledger --images 100000 --rounds 3 --folder /dev/shm

Each round begins with an empty ledger. Prints images per second from the first admission to the last mark of a
publication, and the CPU time of the writing thread for each image. Groups of images are in work at the same time,
as they are with several executors.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import TEMPORARY, read_options, spread
from daemon.core.jobs import Content, Ending, File, Job, JobStatus, Placed, Version
from daemon.core.messages import Output
from daemon.ledger.ledger import Ledger
from daemon.ledger.record import Model

OUTPUTS = {
    "ocr": Output(b'{"lines": []}' * 8, 0.01),
    "yolo": Output(b'{"objects": []}' * 4, 0.01),
    "clip": Output(b'{"embedding": "AAAAAAAAAAAAAAAAAAAAAAAA"}', 0.01),
    "blip": Output(b'{"text": "a red house"}', 0.01),
}
ADMITTED = 256  # files in one request


class Round(NamedTuple):
    images_per_second: float
    thread_seconds: float  # of CPU time, for each image


async def measure(folder: Path, images: int, group: int, groups: int) -> Round:
    ledger = Ledger(folder / "ledger.sqlite")
    await ledger.register([(folder / "inbox", 0)], [Model(stage, "1", "") for stage in OUTPUTS])
    began, before = time.perf_counter(), await ledger.run(lambda _: time.thread_time())
    admission = asyncio.create_task(admit(ledger, images))
    in_work: dict[asyncio.Task[None], list[Job]] = {}
    published = 0
    while published < images:
        busy = {job.id for jobs in in_work.values() for job in jobs}
        jobs = await ledger.next_jobs(group, busy) if len(in_work) < groups else []
        if jobs:
            in_work[asyncio.create_task(annotate(ledger, jobs))] = jobs
        elif in_work:
            ended, _ = await asyncio.wait(in_work, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                await task
                published += len(in_work.pop(task))
    await admission
    seconds = time.perf_counter() - began
    spent = await ledger.run(lambda _: time.thread_time()) - before
    ledger.close()
    return Round(images / seconds, spent / images)


async def admit(ledger: Ledger, images: int) -> None:
    for start in range(0, images, ADMITTED):
        numbers = range(start, min(start + ADMITTED, images))
        await ledger.admit(
            [File(1, b"%07d.jpg" % n, Version(n, 200, 10**18 + n, 10**18 + n)) for n in numbers]
        )


async def annotate(ledger: Ledger, jobs: list[Job]) -> None:
    """What an executor asks of the ledger for a group of images."""
    digests = [hashlib.sha256(job.path).digest() for job in jobs]
    await ledger.recall({job.id: digest for job, digest in zip(jobs, digests, strict=True)})
    contents = [Content(digest, "JPEG", 64, 48, outputs=dict(OUTPUTS)) for digest in digests]
    now, pairs = time.time(), zip(jobs, contents, strict=True)
    await ledger.end(
        [Ending(job, JobStatus.DONE, now, 1, "A", b"{}", content=content) for job, content in pairs]
    )
    await ledger.mark_emitted([Placed(job.id) for job in jobs])


def main() -> None:
    # group: images in one request of an executor; groups: in work at the same time
    options = read_options(__doc__, images=100_000, group=128, groups=8, rounds=3, folder=TEMPORARY)
    rounds: list[Round] = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            rounds.append(asyncio.run(measure(Path(folder), options.images, options.group, options.groups)))
    print(f"{spread([r.images_per_second for r in rounds])} images/s")
    print(
        f"{spread([r.thread_seconds * 1e6 for r in rounds])} µs of CPU time of the writing thread for each image"
    )


if __name__ == "__main__":
    main()
