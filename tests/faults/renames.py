"""Renames files while they are processed, and kills the daemon; every file keeps its number, whatever happens."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

from tests.daemon_process import Place, picture
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
