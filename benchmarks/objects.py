"""The daemon with many objects in a store as its inbox, and another prefix of the store as its output: is each object
found, finished and uploaded once, how fast, and does memory stay flat?

    make store-setup
    python -m benchmarks.objects [--objects 100000] [--faults 0.02] [--images]

A real store (SeaweedFS) runs on this machine. A proxy before it answers a share of the requests with 503, 500 or a
connection that is cut. For three seconds of each half minute it answers every request with ExpiredToken. While the
daemon works, objects are added, replaced and deleted, so that listings change while they are read. The stages are
fakes. The sink `store` uploads the sidecars; with --images, it also uploads each image into its bin.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.backlog import ask_until, resident_mebibytes
from daemon.control import ask
from tests.daemon.stores.server import BROKEN, BUSY, CUT, EXPIRED, Bucket, Fault, proxied, serving
from tests.daemon_process import DEFAULTS, Place, picture

READINGS = 10
PATIENCE_SECONDS = 3600.0
EXPIRED_SECONDS, EVERY_SECONDS = 3.0, 30.0
SAMPLE = 2000  # uploads that are compared byte for byte


class Objects:
    """What is in the inbox, and a thread that changes it."""

    def __init__(self, bucket: Bucket, count: int) -> None:
        self.now = {f"{number // 1000:03d}/{number:06d}.ppm": number for number in range(count)}
        self.made: collections.Counter[str] = collections.Counter()
        self._bucket, self._numbers = bucket, iter(range(count, 10 * count))
        self._left = random.Random(1).sample(sorted(self.now), min(5000, count // 4))  # each is changed once
        self._ended = threading.Event()
        started = time.perf_counter()
        for first in range(0, count, 5000):
            self._put(dict(list(self.now.items())[first : first + 5000]))
        print(f"{count:,} objects put in {time.perf_counter() - started:.0f} s", flush=True)

    def _put(self, objects: dict[str, int]) -> None:
        self._bucket.put({f"in/{name}": picture(number) for name, number in objects.items()})

    @contextlib.contextmanager
    def changing(self) -> collections.abc.Iterator[None]:
        thread = threading.Thread(target=self._change)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _change(self) -> None:
        while not self._ended.wait(1.0) and len(self._left) > 20:
            replaced = {self._left.pop(): next(self._numbers) for _ in range(4)}
            folders = [self._left[place].partition("/")[0] for place in range(4)]
            added = {
                f"{folder}/new-{number}.ppm": number
                for folder, number in zip(folders, self._numbers, strict=False)
            }
            deleted = [self._left.pop() for _ in range(2)]
            self._put(replaced | added)
            self._bucket.delete(*(f"in/{name}" for name in deleted))
            self.now |= replaced | added
            for name in deleted:
                del self.now[name]
            self.made.update(replaced=len(replaced), added=len(added), deleted=len(deleted))


def run(place: Place, environment: dict[str, str], objects: int) -> None:
    """Run the daemon until all objects are done and uploaded; print its memory meanwhile, and the rate."""
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
        while (status := ask(place.folder / "state" / "control.sock", "GET", "/api/status"))["sinks"][0][
            "behind"
        ]:
            if time.perf_counter() > started + PATIENCE_SECONDS:
                raise TimeoutError(f"{status['sinks'][0]}")
            time.sleep(0.2)
        print(
            f"{objects:,} done in {seconds:.0f} s, {objects / seconds:,.0f}/s, and uploaded "
            f"{time.perf_counter() - started - seconds:.1f} s later; memory of the daemon at each tenth: "
            f"{', '.join(f'{reading:.0f}' for reading in readings)} MiB",
            flush=True,
        )
    finally:
        daemon.terminate()
        daemon.wait()


def check(place: Place, objects: Objects, bucket: Bucket, *, images: bool) -> None:
    """Count what was lost, doubled or failed, and compare uploads with the files in the daemon's folders."""
    rows = place.rows("SELECT path, digest, status, emitted, attempts, bin FROM image ORDER BY id")
    done = [(path.decode(), digest) for path, digest, status, *_ in rows if status == 1]
    last = dict(done)
    lost = sum(
        last.get(name) != hashlib.sha256(picture(number)).digest() for name, number in objects.now.items()
    )
    failed = sum(status in (2, 3) for _, _, status, *_ in rows)
    waits = sum(not (status and emitted) for _, _, status, emitted, *_ in rows if status in (0, 1))
    again = sum(attempts > 1 for *_, attempts, _ in rows)
    print(
        f"{len(objects.now):,} objects, {len(rows):,} versions: {lost:,} lost, {len(done) - len({*done}):,} doubled, "
        f"{failed:,} failed, {waits:,} not finished; {again:,} needed a second attempt"
    )
    keys = bucket.names("out/results")
    expected = {f"out/results/{name}.json" for name in last}
    sample = random.Random(2).sample(sorted(expected), min(SAMPLE, len(expected)))
    unlike = sum(bucket.get(key) != (place.folder / key.removeprefix("out/")).read_bytes() for key in sample)
    print(
        f"{len(keys):,} uploads: {len(expected - {*keys}):,} missing, {len({*keys} - expected):,} too many; of "
        f"{len(sample):,} that were compared, {unlike:,} differ"
    )
    if images:
        bins = {path.decode(): name for path, _, status, _, _, name in rows if status == 1}
        found = {*bucket.names("out/bins")}
        missing = sum(f"out/bins/{bins[name]}/{name}" not in found for name in objects.now)
        print(f"{len(found):,} images in bins, {missing:,} missing")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--objects", type=int, default=100_000)
    parser.add_argument("--faults", type=float, default=0.02, help="share of the requests")
    parser.add_argument("--images", action="store_true", help="upload the images too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder, chance = Path(name), random.Random(0)

        def choose() -> Fault:
            if time.monotonic() % EVERY_SECONDS < EXPIRED_SECONDS:
                return EXPIRED
            return chance.choice([BUSY, BROKEN, CUT]) if chance.random() < arguments.faults else None

        (folder / "store").mkdir()
        bucket = Bucket(stack.enter_context(serving(folder / "store")))
        objects = Objects(bucket, arguments.objects)
        proxy = stack.enter_context(proxied(bucket.port))
        proxy.fault = lambda asked: choose()
        output = {"sinks": ["store"], "store": {"url": "s3://photos/out", "images": arguments.images}}
        pipeline = DEFAULTS["pipeline"] | {"slab_bytes": 64 << 20}
        (folder / "place").mkdir()
        settings = {"inbox": [{"url": "s3://photos/in"}], "pipeline": pipeline, "output": output}
        place = Place(folder / "place", settings)
        with objects.changing():
            run(place, proxy.environment, arguments.objects)
        print(f"{len(proxy.asked):,} requests; faults: {dict(collections.Counter(map(str, proxy.made)))}")
        print(f"changed meanwhile: {dict(objects.made)}")
        proxy.fault = lambda asked: None
        before, started = len(proxy.asked), time.perf_counter()
        place.run_once(prefix=["env", *(f"{key}={value}" for key, value in proxy.environment.items())])
        print(f"a last run: {len(proxy.asked) - before:,} requests, {time.perf_counter() - started:.1f} s")
        check(place, objects, bucket, images=arguments.images)


if __name__ == "__main__":
    main()
