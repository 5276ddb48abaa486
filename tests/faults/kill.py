"""kill -9 at random instants while images are worked on, and the checker's word on what became of them.

    python -m tests.faults.kill --kills 20 --files 5000 --seed 1
    python -m tests.faults.kill --kills 20 --files 5000 --group     the daemon and all its children at once

Prints one line: what was lost, double, torn or wrong, and how many processes were left five seconds after the last kill of
each daemon. Exits 1 when any of these is not 0. The same seed gives the same kills, as far as the machine lets it.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests import checker
from tests.daemon_process import Daemon, Place

INBOXES = ("keep", "move", "delete")  # one for each thing that may become of a source
STARTS = 0.25  # share of the kills that may strike while the daemon starts
SECONDS_PER_IMAGE = 0.001  # of the fake captioner, so that there is work to be killed


@dataclass
class Outcome:
    kills: int
    under_load: int  # of the kills, those that found images not yet at their end
    orphans: int
    verdict: checker.Verdict
    seconds: float

    @property
    def kept(self) -> bool:
        return not self.verdict.problems and not self.orphans

    def __str__(self) -> str:
        v = self.verdict
        return (
            f"{self.kills} kills ({self.under_load} under load), {sum(v.counts.values())} images ({v.counts['DONE']} DONE): "
            f"{len(v.lost)} lost, {len(v.double)} double, {len(v.torn)} torn, {len(v.wrong)} wrong, "
            f"{self.orphans} orphan processes after 5 s, in {self.seconds:.0f} s"
        )


def open_place(folder: Path) -> Place:
    settings = {
        "inbox": [{"name": name, "on_success": name, "settle_seconds": 0.1} for name in INBOXES],
        "stages": {"blip": {"options": {"latency_per_image_seconds": SECONDS_PER_IMAGE}}},
        "pipeline": {"rescan_seconds": 0.5},
    }
    return Place(folder, settings)


def kill_repeatedly(place: Place, kills: int, files: int, chance: random.Random, *, group: bool | None = None) -> Outcome:
    """Drop files a share at a time, kill the daemon in the midst of each, let the last one finish, and judge.

    group: whether its children die with it; None: by chance.
    """
    started = time.monotonic()
    share = files // (kills + 1)
    orphans = under_load = 0
    drop(place, range(share + files % (kills + 1)))
    for number in range(kills):
        at_start = chance.random() < STARTS
        with Daemon(place, ready=False) as daemon:
            if not at_start:
                daemon.wait_ready()
            drop(place, range(files - (kills - number) * share, files - (kills - number - 1) * share))
            wait_or_end(daemon.process, chance.uniform(0, 1.0 if at_start else 1.5 * share * SECONDS_PER_IMAGE))
            daemon.kill(group=chance.random() < 0.5 if group is None else group)
            under_load += count_sidecars(place) < sum(map(len, place.dropped.values()))
            orphans += end_orphans(place)
    with Daemon(place) as daemon:
        daemon.wait_until(lambda status: status["done"] >= files and not status["in_flight"], "the rest of the files", 120)
        assert daemon.stop() == 0
    return Outcome(kills, under_load, orphans, place.judge(), time.monotonic() - started)


def drop(place: Place, numbers: range) -> None:
    for number in numbers:
        place.drop_many(range(number, number + 1), INBOXES[number % len(INBOXES)])


def count_sidecars(place: Place) -> int:
    return sum(1 for _, _, names in os.walk(place.site.results) for name in names if name.endswith(".json"))


def end_orphans(place: Place) -> int:
    """How many processes outlived the daemon by five seconds; they are ended now."""
    orphans = place.orphans(5.0)
    for pid in orphans:
        os.kill(pid, signal.SIGKILL)
    return len(orphans)


def wait_or_end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Let it work so long; a daemon that ends by itself meanwhile is a failure of its own."""
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return
    raise AssertionError(f"the daemon ended by itself, with exit status {status}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--files", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--group", action="store_true", help="kill the daemon's children with it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="visiond-kill-") as folder:
        chance = random.Random(options.seed)
        outcome = kill_repeatedly(open_place(Path(folder)), options.kills, options.files, chance, group=options.group)
    print(f"seed {options.seed}: {outcome}")
    for problem in outcome.verdict.problems[:20]:
        print(f"  {problem}")
    sys.exit(0 if outcome.kept else 1)


if __name__ == "__main__":
    main()
