"""Measures how long it takes to rebuild a ledger from its sidecars, and to compare them with it.
No models are needed.

Run: python -m benchmarks.recovery [--images 100000]
"""

from __future__ import annotations

import collections
import os
import tempfile
import time
from pathlib import Path

from benchmarks.harness import read_options
from daemon.config.loading import load
from daemon.core.sidecar import sidecar_paths
from daemon.maintenance import verify as recovery
from daemon.results.destinations import write_sidecar
from daemon.terminal.progress import Progress
from tests.makers import make_record


def measure(folder: Path, images: int) -> None:
    inbox, config = folder / "inbox", load(None)
    for number in range(images):
        name = b"%03d/%06d.jpg" % (number // 1000, number)
        record = make_record(inbox, name, b"%d" % number, id=number + 1, seen_at=time.time() + 1)
        write_sidecar(record, *sidecar_paths(os.fsencode(folder / "results"), name))
    for what, work in (
        ("repair, the ledger lost", recovery.repair),
        ("verify", recovery.verify),
        ("repair", recovery.repair),
    ):
        started = time.monotonic()
        kinds = collections.Counter(finding.kind for finding in work(config, Progress("sidecars")))
        print(f"{what}: {dict(kinds)} in {time.monotonic() - started:.1f} s")
    print(f"the ledger has {os.path.getsize(config.state.path / 'ledger.sqlite') >> 20} MiB")


def main() -> None:
    options = read_options(__doc__, images=100_000)
    with tempfile.TemporaryDirectory(prefix="visiond-recovery-") as folder:
        os.chdir(folder)
        measure(Path(folder), options.images)


if __name__ == "__main__":
    main()
