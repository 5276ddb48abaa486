"""How many processes, of how many threads, a GPU wants: images a second of the standard job from memory, for each number.

    python -m benchmarks.workers --workers 1 2 3 4 --threads 2 3

What `visiond bench --memory` measures, over and over; run that first, so that the kernels are compiled.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

from daemon.bench.ceiling import measure_ceiling
from daemon.bench.job import Place


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("bench"), help="of images and weights, as visiond bench has it")
    parser.add_argument("--pack", default="", help="weights, as visiond bench has it")
    parser.add_argument("--count", type=int, default=2000, help="different images, as far as the slab has room")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3, 4], help="processes on each device")
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 3], help="of each process")
    parser.add_argument("--seconds", type=float, default=8.0, help="for each pair")
    arguments = parser.parse_args()
    for workers, threads in itertools.product(arguments.workers, arguments.threads):
        settings = [f"workers_per_device = {workers}", f"threads_per_worker = {threads}"]
        place = Place(arguments.folder, arguments.pack, settings)
        place.make_pack()
        images = place.make_images(arguments.count)
        rate = measure_ceiling(place.prepare(images[0].parent), images, arguments.seconds)
        print(f"{workers} workers of {threads} threads: {rate:.1f} images/s", flush=True)


if __name__ == "__main__":
    main()
