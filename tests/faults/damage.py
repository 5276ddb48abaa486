"""Flips bits in a ledger: in stored results, where each must be found, and anywhere in its file."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import random
import shutil
import sqlite3
from pathlib import Path
from typing import Any

from tests.daemon_process import Place

IMAGES = 40  # in the ledger whose file is damaged
# The keys of a sidecar that are the same when it is made again.
RESULTS = ("source", "ocr", "objects", "clip", "caption", "bin", "models")


def flip(data: bytes, bit: int) -> bytes:
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


def stored_results(place: Place) -> dict[tuple[bytes, int], bytes]:
    return {
        (digest, model): payload
        for digest, model, payload in place.rows(
            "SELECT digest, model, payload FROM result JOIN content ON content.id = result.content"
        )
    }


def flip_results(place: Place, chance: random.Random, count: int) -> set[str]:
    """Flip a bit in a result of this many images; returns the names of their sidecars."""
    query = """SELECT path, result.id, payload FROM result JOIN content ON content.id = result.content JOIN image USING (digest)
               WHERE status = 1 ORDER BY result.id"""
    results: dict[bytes, list[tuple[int, bytes]]] = {}
    for path, number, payload in place.rows(query):
        results.setdefault(path, []).append((number, payload))
    hit = chance.sample(sorted(results), count)
    with contextlib.closing(sqlite3.connect(place.site.ledger)) as connection, connection:
        for path in hit:
            number, payload = chance.choice(results[path])
            changed = flip(payload, chance.randrange(8 * len(payload)))
            connection.execute("UPDATE result SET payload = ? WHERE id = ?", (changed, number))
    return {f"{os.fsdecode(path)}.json" for path in hit}


def sidecars(place: Place) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in place.site.results.rglob("*.json")}


def named(place: Place, command: str) -> set[str]:
    """The sidecars that `verify` or `repair` reports as damaged in the ledger."""
    amiss = json.loads(place.command(command, "--json").stdout)["amiss"]
    return {Path(entry["file"]).name for entry in amiss if entry["kind"] == "damaged"}


def repair_results(folder: Path, chance: random.Random, count: int) -> tuple[int, int]:
    """Flip a bit in this many results; returns how many `verify` found,
    and for how many `repair` kept the correct one."""
    place = Place(folder)
    place.drop_many(range(count + 6))
    assert place.run_once().returncode == 0
    before, true = sidecars(place), stored_results(place)
    hit = flip_results(place, chance, count)
    found = named(place, "verify")
    assert named(place, "repair") == found
    after = sidecars(place)
    kept = [name for name in hit if after[name] == before[name]]
    assert stored_results(place) == true, "the ledger has another result than it had"
    place.assert_kept(DONE=count + 6)
    return len(found & hit) - len(found - hit), len(kept)


def flip_anywhere(
    folder: Path, chance: random.Random, count: int
) -> tuple[collections.Counter[str], list[str]]:
    """The outcome of this many ledgers with a flipped bit somewhere in the file, and what is wrong.
    Half of the images of such a ledger must still be published, although their sidecars exist."""
    place = Place(folder)
    place.drop_many(range(IMAGES))
    assert place.run_once().returncode == 0
    with contextlib.closing(sqlite3.connect(place.site.ledger)) as connection, connection:
        connection.execute("UPDATE image SET emitted = 0 WHERE id % 2")
    whole, before = place.site.ledger.read_bytes(), sidecars(place)
    outcomes: collections.Counter[str] = collections.Counter()
    problems: list[str] = []
    for _ in range(count):
        for suffix in ("", "-wal", "-shm"):
            Path(f"{place.site.ledger}{suffix}").unlink(missing_ok=True)
        for name, data in before.items():
            (place.site.results / name).write_bytes(data)
        bit = chance.randrange(8 * len(whole))
        place.site.ledger.write_bytes(flip(whole, bit))
        outcome, wrong = _start_and_repair(place, before)
        outcomes[outcome] += 1
        problems += [f"bit {bit}: {line}" for line in wrong]
        for kept in place.site.ledger.parent.glob("*.damaged-*"):
            kept.unlink()
    return outcomes, problems


def _start_and_repair(place: Place, before: dict[str, bytes]) -> tuple[str, list[str]]:
    shutil.copy(place.folder / "state" / "identity", place.folder / "identity")
    run = place.run_once()
    wrong = _lies(place, before, "run")
    if run.returncode not in (0, os.EX_DATAERR):
        wrong.append(f"run ended with {run.returncode}: {run.stderr[-300:]}")
    found = place.command("verify", "--json")
    refused = run.returncode == os.EX_DATAERR
    noticed = (
        "damaged in the ledger" in run.stderr
        or found.returncode == os.EX_DATAERR
        or '"damaged"' in found.stdout
    )
    for command in (("repair",), ("run", "--once")):
        done = place.command(*command)
        # Before the damage was found, the daemon may have written a sidecar that a new ledger cannot use.
        has_left_out = command == ("repair",) and done.returncode == 1 and "left out" in done.stdout
        if done.returncode and not has_left_out:
            wrong.append(
                f"{command[0]} ended with {done.returncode}: {done.stdout[-300:]} {done.stderr[-300:]}"
            )
    wrong += _lies(place, before, "repair")
    shutil.move(place.folder / "identity", place.folder / "state" / "identity")
    return "refused" if refused else "noticed when read" if noticed else "harmless", wrong


def _lies(place: Place, before: dict[str, bytes], after: str) -> list[str]:
    """Sidecars that differ from those before the bit flipped."""
    now = sidecars(place)
    lost = [f"after {after}, {name} is lost" for name in before.keys() - now.keys()]
    return lost + [
        f"after {after}, {name} is false"
        for name in before.keys() & now.keys()
        if _said(now[name]) != _said(before[name])
    ]


def _said(sidecar: bytes) -> dict[str, Any]:
    document = json.loads(sidecar)
    said = {key: document.get(key) for key in RESULTS}
    said["source"] = {key: value for key, value in document["source"].items() if key != "seen_at"}
    return said
