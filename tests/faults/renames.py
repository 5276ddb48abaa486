"""Renames files while they are processed, and kills the daemon; every file keeps its number, whatever happens."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.daemon_process import Daemon, Place, picture
from tests.faults.syscalls import Call, Supervisor

IMAGES = 3


class Renamed(Place):
    """A place whose images are DONE, and then get other names: those of a folder, and one in it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        output = {"sinks": ["jsonl"], "bins": "link"}
        super().__init__(folder, {"output": output, "inbox": [{"settle_seconds": 0.05}]})
        for number in range(IMAGES):
            self.drop(f"old/{number}.ppm", picture(number))
        assert self.run_once().returncode == 0
        (self.inbox() / "old").rename(self.inbox() / "new")
        self.before = self.state()

    def state(self) -> dict[str, Any]:
        """What the daemon has to keep, under the old name or the new one."""
        rows = self.rows("SELECT id, path, status, emitted FROM image WHERE status <> 4 ORDER BY id")
        files = {
            name: sorted(
                os.fspath(file.relative_to(self.folder)) for file in (self.folder / name).rglob("*.*")
            )
            for name in ("results", "bins")
        }
        return {"rows": rows, "sink": (self.folder / "results.jsonl").read_bytes(), **files}

    def problems(self) -> list[str]:
        """What is not as if nobody had ever used the old name."""
        wanted = self.before | {
            "rows": [(row[0], row[1].replace(b"old/", b"new/"), *row[2:]) for row in self.before["rows"]]
        }
        for name in ("results", "bins"):
            wanted[name] = [file.replace("/old/", "/new/") for file in self.before[name]]
        found = [f"{name}: {value!r}" for name, value in self.state().items() if value != wanted[name]]
        if (verified := self.command("verify")).returncode:
            found.append(f"verify: {verified.stdout}{verified.stderr}")
        return found


def kill_at(folder: Path, number: int) -> tuple[bool, list[str]]:
    """Kill the daemon that finds the new names at the call with this number. Whether it came so far; and what is wrong after
    the next daemon."""
    place = Renamed(folder)
    killed: list[Call] = []

    def decide(call: Call) -> int:
        nonlocal number
        number -= is_of_results(place, call)
        if number < 0 and not killed:
            killed.append(call)
            os.kill(supervisor.asker, signal.SIGKILL)
        return 0

    with Supervisor(folder, decide) as supervisor:
        place.run_once(supervisor=supervisor.path)
    if not killed:
        return False, []
    again = place.run_once()
    where = f"killed at {killed[0]}"
    found = [f"{where}: the next daemon ended with {again.stderr[-500:]}"] if again.returncode else []
    return True, found + [f"{where}: {problem}" for problem in place.problems()]


def is_of_results(place: Place, call: Call) -> bool:
    """Whether the call changes the ledger, results or bins."""
    under = call.path.removeprefix(os.fsencode(place.folder) + b"/")
    return under.startswith((b"state/ledger", b"results/", b"bins/")) and call.name not in ("open", "mkdir")


def kill_while_renaming(folder: Path, chance: random.Random, most: int) -> tuple[int, list[str]]:
    """Kill one daemon after another, each at another call, or at a random sample. Returns how many, and the problems."""
    with Supervisor((whole := Renamed(folder / "whole")).folder, lambda call: 0) as supervisor:
        assert whole.run_once(supervisor=supervisor.path).returncode == 0
    total = sum(is_of_results(whole, call) for call in supervisor.calls)
    kills, problems = 0, whole.problems()
    for number in sorted(chance.sample(range(total), min(most, total))):
        came, found = kill_at(folder / str(number), number)
        kills += came
        problems += found
    return kills, problems


class Restless(Place):
    """A place whose files get other names again and again, each for some milliseconds."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        settings = {
            "output": {"sinks": ["jsonl"], "bins": "link"},
            "inbox": [{"settle_seconds": 0.05}],
            "pipeline": {"rescan_seconds": 0.3},
            "stages": {"blip": {"options": {"latency_per_image_seconds": 0.01}}},
        }
        super().__init__(folder, settings)
        self.files: list[Path] = []
        self._chance, self._numbers_of_names = chance, itertools.count()

    def act(self) -> None:
        """Add a file, or change the names of one, of two, or of a folder."""
        acts: list[Callable[[], object]] = [
            self._add,
            self._rename,
            self._rename,
            self._there_and_back,
            self._swap,
            self._rename_folder,
            self._replace,
        ]
        self._chance.choice(acts if len(self.files) > 1 else [self._add])()
        time.sleep(self._chance.random() * 0.02)

    def _free(self) -> Path:
        target = self.inbox() / self._chance.choice("xyz") / f"{next(self._numbers_of_names)}.ppm"
        target.parent.mkdir(exist_ok=True)
        return target

    def _add(self, target: Path | None = None) -> None:
        target = target or self._free()
        self.drop(os.fspath(target.relative_to(self.inbox())), picture(next(self._numbers_of_names)))
        self.files.append(target)

    def _rename(self) -> Path:
        number = self._chance.randrange(len(self.files))
        old, self.files[number] = self.files[number], self._free()
        old.rename(self.files[number])
        return old

    def _there_and_back(self) -> None:
        file, other = self._chance.choice(self.files), self._free()
        file.rename(other).rename(file)

    def _swap(self) -> None:
        one, two = self._chance.sample(self.files, 2)
        other = one.rename(self._free())
        two.rename(one)
        other.rename(two)

    def _rename_folder(self) -> None:
        folder = self._chance.choice(self.files).parent
        target = self.inbox() / f"folder-{next(self._numbers_of_names)}"
        folder.rename(target)
        self.files = [target / file.name if file.parent == folder else file for file in self.files]

    def _replace(self) -> None:
        self._add(self._rename())

    def newest(self) -> dict[Path, tuple[Any, ...]]:
        """By file: number, state, whether it is published, and digest of the newest row."""
        rows = self.rows("SELECT path, id, status, emitted, digest FROM image ORDER BY id")
        return {self.inbox() / os.fsdecode(path): tuple(row) for path, *row in rows}

    def is_settled(self) -> bool:
        """Whether each file is DONE and published, with its own bytes."""
        rows, digests = (
            self.newest(),
            {file: hashlib.sha256(file.read_bytes()).digest() for file in self.files},
        )
        return all(
            rows.get(file, ())[1:] == (1, 1, digest) for file, digest in digests.items()
        ) and not self.rows("SELECT 1 FROM image WHERE status = 0 OR emitted = 0 AND status IN (1, 2)")

    def problems(self, *, killed: bool) -> list[str]:
        told = [json.loads(line)["id"] for line in (self.folder / "results.jsonl").read_text().splitlines()]
        found = [] if killed or len(told) == len(set(told)) else ["the sink was given something again"]
        for file, (number, *_) in self.newest().items():
            if file not in self.files:
                continue
            name = f"{file.relative_to(self.inbox())}"
            found += (
                [] if self.sidecar(name)["id"] == number else [f"the sidecar of {name} is of another image"]
            )
            found += [] if number in told else [f"the sink was not given {name}"]
        if (verified := self.command("verify")).returncode:
            found.append(f"verify: {verified.stdout}{verified.stderr}")
        return found


def rename_at_random(
    folder: Path, chance: random.Random, acts: int, kills: int
) -> tuple[int, int, list[str]]:
    """Change names while a daemon works, and kill it now and then. Returns how many files there are, how many images besides
    (a file that takes the name of a newer image counts as a new one), and the problems."""
    place = Restless(folder, chance)
    for life in range(kills + 1):
        with Daemon(place) as daemon:
            for _ in range(acts // (kills + 1)):
                place.act()
            if life < kills:
                daemon.process.kill()
                daemon.process.wait(10)
                continue
            daemon.wait_until(lambda _: place.is_settled(), "all files to be DONE")
            assert daemon.stop() == 0
    [[images]] = place.rows("SELECT COUNT(*) FROM image WHERE status = 1")
    return len(place.files), images - len(place.files), place.problems(killed=kills > 0)
