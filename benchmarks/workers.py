"""Measures images per second from memory for several numbers of workers and threads,
to find the best for a GPU.

    python -m benchmarks.workers --workers 1 2 3 4 --threads 2 3
    python -m benchmarks.workers --workers 1 2 --threads 1 --pack /tmp/models/qwen3-vl-2b --pipeline 'stages = ["blip"]'

It repeats the measurement of `visiond bench --memory`; run that first, so that the kernels are compiled. The second line is for
one model, for example one that `python -m benchmarks.models` has made.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

from daemon.measure.ceiling import measure_ceiling
from daemon.measure.place import Place


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("bench"),
        help="folder for images and weights, as for visiond bench",
    )
    parser.add_argument("--pack", default="", help="pack, as for visiond bench")
    parser.add_argument(
        "--count", type=int, default=2000, help="number of different images, as far as they fit into the slab"
    )
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[1, 2, 3, 4], help="worker processes on each device"
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 3], help="threads of each worker")
    parser.add_argument("--seconds", type=float, default=8.0, help="duration for each combination")
    parser.add_argument("--pipeline", action="append", default=[], help="a line for [pipeline]")
    arguments = parser.parse_args()
    for workers, threads in itertools.product(arguments.workers, arguments.threads):
        settings = [f"workers_per_device = {workers}", f"threads_per_worker = {threads}", *arguments.pipeline]
        place = Place(arguments.folder, arguments.pack, settings)
        place.make_pack()
        images = place.make_images(arguments.count)
        rate = measure_ceiling(place.prepare(images[0].parent), images, arguments.seconds)
        print(f"{workers} workers of {threads} threads: {rate:.1f} images/s", flush=True)


if __name__ == "__main__":
    main()
