"""Kills the driver, an actor or a node of a Ray cluster at random moments while images are processed.

The cluster is Ray's own for tests: several nodes on this machine, each with processes and a store of its own. INPUT is
a list in which each image stands twice, with a text of its own for each row.
"""

from __future__ import annotations

import collections
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet
import pytest

from stages.contract import processes
from tests.daemon_process import PATIENCE, caption_of, picture

NODES = 3
PART_IMAGES = 50
SECONDS_PER_IMAGE = 0.002  # of the fake captioner, so that kills interrupt work
MARK = "VISIOND_FAULTS_FOLDER"  # in the environment of all processes of this cluster, and of no other
LONGEST_RUN = 1200.0  # seconds, after which a run counts as hung
CONFIG = """
[pipeline]
slab_bytes = 16777216
load_timeout_seconds = 60.0
batch_timeout_seconds = 20.0
retry_seconds = 0.05
""" + "".join(
    f'[stages.{name}]\nbackend = "fake"\n'
    + (
        f"[stages.{name}.options]\nlatency_per_image_seconds = {SECONDS_PER_IMAGE}\n"
        if name == "blip"
        else ""
    )
    for name in ("ocr", "yolo", "clip", "blip")
)


@dataclass
class Outcome:
    kills: collections.Counter[str] = field(default_factory=collections.Counter)
    runs: int = 0  # of the driver
    ended_itself: int = 0  # drivers that ended with an error of their own, and were started again
    hung: int = 0
    images: int = 0
    lost: int = 0
    double: int = 0
    wrong: int = 0
    orphans: int = 0
    seconds: float = 0.0

    @property
    def kept(self) -> bool:
        return not (self.lost or self.double or self.wrong or self.hung or self.orphans)

    def __str__(self) -> str:
        killed = ", ".join(f"{count} of {what}" for what, count in sorted(self.kills.items()))
        return (
            f"{self.kills.total()} kills ({killed}) in {self.runs} runs; {self.images:,} images: {self.lost} lost, "
            f"{self.double} double, {self.wrong} wrong, {self.hung} hung, {self.orphans} orphan workers, "
            f"{self.ended_itself} drivers ended by themselves, in {self.seconds:.0f} s"
        )


class Site:
    """The images, a cluster, and the driver that works there."""

    def __init__(self, folder: Path, images: int) -> None:
        cluster_utils = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed: make tools")
        self.folder = folder
        self.list, self.output = folder / "list.parquet", folder / "rows"
        self.rows = [(f"{number // 2:06d}.ppm", f"said {number}") for number in range(images)]
        self.captions = {}
        for number, (name, _) in enumerate(self.rows[::2]):
            (folder / name).write_bytes(picture(number))
            self.captions[name] = caption_of(picture(number))
        pyarrow.parquet.write_table(
            pyarrow.table([*zip(*self.rows, strict=True)], ["url", "said"]), self.list, row_group_size=400
        )
        (folder / "daemon.toml").write_text(CONFIG)
        self.environment = processes.environment({"RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": ""})
        os.environ["PYTHONPATH"] = self.environment["PYTHONPATH"]  # for the processes of the cluster
        os.environ[MARK] = self.environment[MARK] = str(folder)
        head = {"num_cpus": 0, "object_store_memory": 100 << 20, "include_dashboard": False}
        self.cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self._add_node() for _ in range(NODES)]

    def _add_node(self) -> Any:
        return self.cluster.add_node(num_cpus=1, object_store_memory=100 << 20)

    def start(self) -> subprocess.Popen[bytes]:
        words = [
            "ray",
            "run",
            str(self.list),
            str(self.output),
            "--keep-all",
            "--resume",
            "--address",
            self.cluster.address,
        ]
        words += ["--config", str(self.folder / "daemon.toml"), "--part-images", str(PART_IMAGES)]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "daemon", *words, "--chains", str(NODES)],
                env=self.environment,
                cwd=self.folder,
                stdout=log,
                stderr=log,
            )

    def actors(self) -> list[psutil.Process]:
        """The processes of Ray that hold an Annotator."""
        return [p for p in self._processes() if any("MapWorker" in word for word in p.info["cmdline"])]

    def workers(self) -> list[psutil.Process]:
        """The worker processes of Annotators."""
        return [p for p in self._processes() if "daemon.workers.child" in p.info["cmdline"]]

    def _processes(self) -> Iterator[psutil.Process]:
        """Those of this cluster: others on this machine may use Ray too."""
        for process in psutil.process_iter(["cmdline", "environ"]):
            if (process.info["environ"] or {}).get(MARK) == str(self.folder) and process.info["cmdline"]:
                yield process

    def parts(self) -> int:
        return len(list(self.output.glob("part-*.parquet")))

    def kill(self, what: str, driver: subprocess.Popen[bytes], chance: random.Random) -> bool:
        """Whether there was something to kill."""
        if what == "drivers":
            driver.kill()
            driver.wait()
            return True
        if what == "nodes":
            node = self.nodes.pop(chance.randrange(len(self.nodes)))
            self.cluster.remove_node(node, allow_graceful=False)
            self.nodes.append(self._add_node())
            return True
        actors = self.actors()
        if actors:
            chance.choice(actors).send_signal(signal.SIGKILL)
        return bool(actors)

    def judge(self, outcome: Outcome) -> None:
        found: collections.Counter[int] = collections.Counter()
        for part in self.output.glob("part-*.parquet"):
            columns = ["row", "path", "caption", "said"]
            for row in pyarrow.parquet.read_table(part, columns=columns).to_pylist():
                found[row["row"]] += 1
                name = os.path.basename(row["path"])
                is_right = (name, row["said"]) == self.rows[row["row"]]
                outcome.wrong += not is_right or row["caption"] != self.captions[name]
        outcome.images += len(self.rows)
        outcome.lost += len(self.rows) - len(found)
        outcome.double += sum(count - 1 for count in found.values())

    def close(self) -> int:
        """Stop the cluster. Returns how many workers of Annotators are left."""
        self.cluster.shutdown()
        deadline = time.monotonic() + PATIENCE
        while (left := len(self.workers())) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left


def kill_cluster(folder: Path, kills: int, images: int, chance: random.Random) -> Outcome:
    """Kill after random numbers of parts; then let the last driver finish, and judge."""
    outcome, began = Outcome(), time.monotonic()
    site = Site(folder, images)
    parts_in_all = -(-images // PART_IMAGES)
    driver = site.start()
    outcome.runs, started = 1, time.monotonic()
    try:
        while (done := outcome.kills.total()) < kills:
            # Half of what is left for each, as parts are also made while something is killed.
            share = max(0, parts_in_all - site.parts()) // (kills - done)
            wanted = site.parts() + chance.randrange(share + 1)
            last, seen_at = site.parts(), time.monotonic()
            while (parts := site.parts()) < wanted and time.monotonic() - seen_at < LONGEST_RUN:
                if parts > last:
                    last, seen_at = parts, time.monotonic()
                if driver.poll() is not None:
                    if driver.returncode == 0:
                        break
                    outcome.ended_itself += 1
                    driver, outcome.runs = site.start(), outcome.runs + 1
                time.sleep(0.05)
            time.sleep(chance.uniform(0, 0.5))
            if driver.poll() == 0:
                break  # all is done: the kills so far are what there was room for
            what = chance.choice(("drivers", "actors", "actors", "nodes"))
            outcome.kills[what] += site.kill(what, driver, chance)
            print(
                f"{outcome.kills.total()}: {what}, {site.parts()} parts, {time.monotonic() - began:.0f} s",
                file=sys.stderr,
            )
            if what == "drivers":
                driver, outcome.runs, started = site.start(), outcome.runs + 1, time.monotonic()
        started = time.monotonic()
        while (status := _wait(driver, started)) not in (0, None):
            outcome.ended_itself += 1
            driver, outcome.runs = site.start(), outcome.runs + 1
        outcome.hung += status is None
    finally:
        driver.kill()
        driver.wait()
        outcome.orphans = site.close()
    site.judge(outcome)
    outcome.seconds = time.monotonic() - began
    return outcome


def _wait(driver: subprocess.Popen[bytes], started: float) -> int | None:
    """Its exit status; None if it hangs."""
    try:
        return driver.wait(max(1.0, started + LONGEST_RUN - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
