"""Shows whether memory or rate drift over a long job: images of the standard job with many names each,
results not reused.

    python -m benchmarks.drift --count 2000 --repeat 100

Prints a line for each part of the images: rate, and peak memory of the GPUs, the workers and the daemon.
Each line is printed at once, so that an interrupted run has printed what it measured.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from daemon.control import find_snapshot
from daemon.measure.meter import Meter, Sample
from daemon.measure.place import Place

POLL_SECONDS = 0.1


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
    parser.add_argument("--count", type=int, default=2000, help="number of different images")
    parser.add_argument("--repeat", type=int, default=100, help="names of each image")
    parser.add_argument("--parts", type=int, default=10)
    arguments = parser.parse_args()
    place = Place(arguments.folder, arguments.pack)
    place.make_pack()
    inbox = place.make_inbox(place.make_images(arguments.count), arguments.repeat)
    images = arguments.count * arguments.repeat
    config = place.prepare(inbox)
    with place.start("--once") as daemon, Meter(daemon.pid, config) as meter:
        marks = [images * part // arguments.parts for part in range(1, arguments.parts + 1)]
        before, since, seen = 0, 0.0, 0
        while daemon.poll() is None and marks:
            time.sleep(POLL_SECONDS)
            snapshot = find_snapshot(config)
            if snapshot is None or not snapshot.done:
                continue
            now = time.monotonic()
            if not before:
                before, since = snapshot.done, now
            elif snapshot.done >= marks[0]:
                rate, seen_now = (snapshot.done - before) / (now - since), len(meter.samples)
                print(
                    f"{snapshot.done:7,} images, {rate:6.1f}/s, {describe(meter.samples[seen:seen_now])}",
                    flush=True,
                )
                before, since, seen = snapshot.done, now, seen_now
                marks = [mark for mark in marks if mark > snapshot.done]
        status = daemon.wait()
    print(f"status {status}, {describe(meter.samples[seen:])}")
    sys.exit(status)


def describe(samples: list[Sample]) -> str:
    """The peak of each, in MiB."""
    if not samples:
        return "no samples"
    gpus = max(sum(sample.gpu_used_bytes) for sample in samples)
    workers, daemon = (
        max(sample.workers_bytes for sample in samples),
        max(sample.daemon_bytes for sample in samples),
    )
    return f"GPUs {gpus >> 20:,} MiB, workers {workers >> 20:,}, daemon {daemon >> 20:,}"


if __name__ == "__main__":
    main()
