"""Kills daemons while second looks run: neither answer may be lost, changed or given to another image."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

from tests.daemon_process import Daemon, Place, wait_for
from tests.faults.kill import Outcome, end_orphans

LOOK = "pages"
SECONDS = 0.1  # that each second look takes, so that kills interrupt some
ENDED = "SELECT COUNT(*) FROM look WHERE not_before IS NULL"
WAITING = "SELECT COUNT(*) FROM look WHERE not_before IS NOT NULL"
FIRST = "SELECT COUNT(*) FROM image WHERE status = 1"


def open_looks(folder: Path, files: int) -> Place:
    """A daemon with a second look at the images of bin A."""
    options = {"salt": 7, "latency_per_image_seconds": SECONDS}
    table = {"name": LOOK, "when": "A", "stage": "ocr", "backend": "fake", "options": options}
    place = Place(folder, {"second_look": [table]})
    place.drop_many(range(files))
    return place


def kill_looks(folder: Path, kills: int, files: int, chance: random.Random) -> Outcome:
    """Kill each daemon between two of its second looks, let the last one finish, and compare with an undisturbed run."""
    started = time.monotonic()
    place, calm = (open_looks(folder / name, files) for name in ("killed", "calm"))
    orphans = in_work = 0
    for _ in range(kills):
        with Daemon(place) as daemon:
            enough = count(place, ENDED) + chance.randrange(1, 4)
            wait_for(lambda n=enough: count(place, ENDED) >= n or is_finished(place, files), "second looks")
            in_work += count(place, WAITING) > 0
            daemon.kill(group=chance.random() < 0.5)
            orphans += end_orphans(place)
    for each in (place, calm):
        assert each.run_once().returncode == 0
    verdict = place.judge()
    expected, found = answers(calm), answers(place)
    verdict.lost += [f"{path} has no sidecar" for path in expected.keys() - found.keys()]
    for path in expected.keys() & found.keys():
        for answer in ("first", "second"):
            if found[path][answer] != expected[path][answer]:
                named = "lost" if found[path][answer] is None else "wrong"
                getattr(verdict, named).append(f"{path}: its {answer} answer")
    looked = sum(each["second"] is not None for each in expected.values())
    figures = {"while second looks waited": float(in_work), "second looks": float(looked)}
    return Outcome(kills, orphans, verdict, time.monotonic() - started, figures)


def is_finished(place: Place, files: int) -> bool:
    return count(place, FIRST) == files and count(place, WAITING) == 0


def count(place: Place, query: str) -> int:
    [[number]] = place.rows(query)
    return int(number)


def answers(place: Place) -> dict[str, dict[str, Any]]:
    """By path, what the sidecar has from the first and from the second model."""
    found = {}
    for file in place.site.results.glob("*.json"):
        document = json.loads(file.read_bytes())
        second = document.get("second_looks", {}).get(LOOK, {})
        found[file.name] = {"first": document["ocr"], "second": second.get("result")}
    return found
