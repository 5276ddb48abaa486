"""A prefix of an object store with many objects as the daemon's inbox: is each found and finished once, how fast, and
does memory stay flat?

    make store-setup
    python -m benchmarks.objects [--objects 100000] [--faults 0.02]

A real store (SeaweedFS) runs on this machine. A proxy before it answers a share of the requests with 503, 500 or a
connection that is cut. The stages are fakes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.backlog import ask_until, resident_mebibytes
from tests.daemon.stores.server import BROKEN, BUSY, CUT, Bucket, Fault, proxied, serving
from tests.daemon_process import DEFAULTS, Place, picture

READINGS = 10
PATIENCE_SECONDS = 3600.0


def fill(bucket: Bucket, objects: int) -> None:
    started = time.perf_counter()
    for first in range(0, objects, 5000):
        numbers = range(first, min(first + 5000, objects))
        bucket.put({f"in/{number // 1000:03d}/{number:06d}.ppm": picture(number) for number in numbers})
    print(f"{objects:,} objects put in {time.perf_counter() - started:.0f} s", flush=True)


def run(place: Place, environment: dict[str, str], objects: int) -> None:
    """Work until all are done; prints memory on the way and the rate."""
    started, readings = time.perf_counter(), []
    command = [sys.executable, "-P", "-m", "daemon", "run", "--config", str(place.config)]
    with (place.folder / "log").open("wb") as log:
        daemon = subprocess.Popen(command, env={**os.environ, **environment}, stdout=log, stderr=log)
    try:
        for share in range(1, READINGS + 1):
            with contextlib.suppress(FileNotFoundError):
                ask_until(place.folder, PATIENCE_SECONDS, "done", objects * share // READINGS)
            readings.append(resident_mebibytes(daemon.pid))
        seconds = time.perf_counter() - started
        print(
            f"all done in {seconds:.0f} s, {objects / seconds:,.0f}/s; memory of the daemon at each tenth:",
            end=" ",
        )
        print(f"{', '.join(f'{reading:.0f}' for reading in readings)} MiB", flush=True)
    finally:
        daemon.terminate()
        daemon.wait()


def check(place: Place, objects: int) -> None:
    """Count what was lost, doubled or failed."""
    [(rows, paths, done)] = place.rows(
        "SELECT COUNT(*), COUNT(DISTINCT path), SUM(status = 1 AND emitted = 1) FROM image"
    )
    sidecars = sum(1 for _ in (place.folder / "results").rglob("*.json"))
    [(attempts,)] = place.rows("SELECT SUM(attempts > 1) FROM image")
    print(
        f"{rows:,} rows of {paths:,} objects, {done:,} done and published, {sidecars:,} sidecars: "
        f"{objects - sidecars:,} lost, {rows - paths:,} doubled; {attempts:,} needed a second attempt"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--objects", type=int, default=100_000)
    parser.add_argument("--faults", type=float, default=0.02, help="share of the requests")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder, chance = Path(name), random.Random(0)

        def choose() -> Fault:
            return chance.choice([BUSY, BROKEN, CUT]) if chance.random() < arguments.faults else None

        (folder / "store").mkdir()
        store = stack.enter_context(serving(folder / "store"))
        fill(Bucket(store), arguments.objects)
        proxy = stack.enter_context(proxied(store))
        proxy.fault = lambda asked: choose()
        inbox = {"url": "s3://photos/in"}
        (folder / "place").mkdir()
        place = Place(
            folder / "place", {"inbox": [inbox], "pipeline": DEFAULTS["pipeline"] | {"slab_bytes": 64 << 20}}
        )
        run(place, proxy.environment, arguments.objects)
        print(f"{len(proxy.asked):,} requests, {len(proxy.made):,} with a fault")
        check(place, arguments.objects)
        before = len(proxy.asked)
        started = time.perf_counter()
        place.run_once(prefix=["env", *(f"{key}={value}" for key, value in proxy.environment.items())])
        print(
            f"a run without new objects: {len(proxy.asked) - before:,} requests, {time.perf_counter() - started:.1f} s"
        )
        check(place, arguments.objects)


if __name__ == "__main__":
    main()
