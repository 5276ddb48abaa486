"""Measures the daemon's own limit, and how it grows with the number of executors: four fake stages, no GPU.

    python -m benchmarks.executors --executors 1 2 4 --workers 8 --files 200000 --rounds 3 --folder /dev/shm

With --pipelined OCR has half of the workers, and the other stages have the other half. --capacity slows
the workers down to this rate, all together, as GPUs would: does the daemon keep up with them?

Each round has new files, and first runs the bare loop of benchmarks/overhead.py over them. Prints images per
second from the first image seen to the last one published, the same for the middle 70 % of the images, which
leaves out the start of the processes, and the CPU time for each image of the daemon with its executors.
"""

from __future__ import annotations

import os
from collections import defaultdict

from benchmarks.harness import FAKES, TEMPORARY, Run, make_files, read_options, run_fakes, spread, work_folder
from benchmarks.overhead import run_bare
from daemon.monitoring.limits import IN_DAEMON


def configure(executors: int, workers: int, *, pipelined: bool, capacity: float) -> str:
    """capacity: images per second of all workers; 0: they take no time."""
    half = max(1, workers // 2)
    segments = "".join(
        f'[[pipeline.segment]]\nstages = {stages}\ndevices = ["cpu"]\nworkers_per_device = {half}\n'
        for stages in (["ocr"], ["yolo", "clip", "blip"])
    )
    seconds = (half if pipelined else workers) / capacity if capacity else 0
    pace = f"[stages.blip.options]\nlatency_per_image_seconds = {seconds}\n" if capacity else ""
    return f"[pipeline]\nstations = {executors}\nworkers_per_device = {workers}\n{segments * pipelined}{FAKES}{pace}"


def main() -> None:
    options = read_options(
        __doc__,
        executors=[1, 2, 4],
        workers=8,
        pipelined=False,
        capacity=0.0,
        files=200_000,
        rounds=3,
        folder=TEMPORARY,
    )
    runs: dict[int, list[Run]] = defaultdict(list)
    bare: list[float] = []
    for number in range(options.rounds):
        for executors in sorted(options.executors, reverse=number % 2 == 1):
            with work_folder(options.folder) as folder:
                make_files(folder / "inbox", options.files, number)
                if len(bare) == number:
                    bare.append(run_bare(folder / "inbox", folder))
                    print(f"round {number + 1}, bare loop: {bare[-1]:,.0f} images/s", flush=True)
                settings = configure(
                    executors, options.workers, pipelined=options.pipelined, capacity=options.capacity
                )
                run = run_fakes(folder, settings, metered=True)
            runs[executors].append(run)
            print(
                f"round {number + 1}, {executors} executors: {run.whole:,.0f} images/s, middle {run.middle:,.0f}; CPU for an "
                f"image: {1e6 * run.cpu_seconds.get(IN_DAEMON, 0.0) / options.files:.0f} µs",
                flush=True,
            )
    print(
        f"{options.files:,} files, {options.workers} workers, {len(os.sched_getaffinity(0))} cores, median (range)\n"
        f"  bare loop: {spread(bare)}"
    )
    for executors, found in sorted(runs.items()):
        whole, middle = spread([run.whole for run in found]), spread([run.middle for run in found])
        print(f"{executors:3} executors: {whole}, middle {middle}")


if __name__ == "__main__":
    main()
