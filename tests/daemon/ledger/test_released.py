"""The state folder of an earlier version can be used: its ledger is migrated,
and no image is processed again."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from daemon.config.loading import parse
from daemon.layout.models import resolve_models
from tests.daemon_process import STAGES, Place, picture

# frozen; one for each version with a ledger of another form
RELEASED = sorted(Path(__file__).parent.glob("released-*"))
# The files that were there and must still be there, by the row's number.
FILES = {
    8: ("kept/a.ppm", 1),
    5: ("kept/sub/b.ppm", 7),
    2: ("kept/third.ppm", 8),
    10: ("kept/waiting.ppm", 4),
}
OTHERS = {3: ("kept/broken.jpg", b"no picture"), 4: ("kept/notes.txt", b"words")}
MOVED = {7: ("done/moved/c.ppm", picture(3)), 6: ("failed/moved/cut.jpg", b"not one")}
KNOWN = {"pending": 1, "done": 5, "failed": 2, "skipped": 1, "gone": 1}
NO_MODEL = {name: {"options": {"fail": {"": "raise"}}} for name in STAGES}  # every call of a model fails


def restore(released: Path, folder: Path) -> Place:
    """A place as that version left it. The files have new inodes and times,
    so these are written into the ledger."""
    names = [
        {"name": "kept", "settle_seconds": 0.1},
        {"name": "moved", "on_success": "move", "settle_seconds": 0.1},
    ]
    place = Place(folder, {"inbox": names})
    for sidecar in (file for top in ("results", "failed") for file in (released / top).rglob("*.json")):
        target = folder / sidecar.relative_to(released)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(sidecar.read_text().replace("FOLDER", str(folder)))
    place.site.ledger.parent.mkdir()
    script = (released / "ledger.sql").read_text()
    script = script.replace("FOLDERHEX", os.fsencode(folder).hex()).replace("FOLDER", str(folder))
    inboxes = {number: (f"inbox-{name}", picture(seed)) for number, (name, seed) in FILES.items()}
    inboxes |= {number: (f"inbox-{name}", data) for number, (name, data) in OTHERS.items()}
    with closing(sqlite3.connect(place.site.ledger)) as connection, connection:
        connection.executescript(script)
        for number, (name, data) in (inboxes | MOVED).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
            status = os.stat(folder / name)
            figures = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, number)
            connection.execute("UPDATE image SET inode = ?, mtime_ns = ?, ctime_ns = ? WHERE id = ?", figures)
    return place


def counted(place: Place, *command: str) -> dict[str, Any]:
    answer = place.command(*command, "--json")
    assert answer.returncode == 0, answer.stderr
    counts: dict[str, Any] = json.loads(answer.stdout)
    return counts


def states(place: Place) -> dict[str, int]:
    return {name: count for name, count in counted(place, "status").items() if name in KNOWN}


@pytest.mark.parametrize("released", RELEASED, ids=lambda folder: folder.name)
def test_a_damaged_ledger_of_an_earlier_version_can_be_repaired_and_prune_finds_the_same_before_and_after(
    released: Path, tmp_path: Path
) -> None:
    place = restore(released, tmp_path)
    with closing(sqlite3.connect(place.site.ledger)) as connection, connection:
        connection.execute(
            "DELETE FROM result WHERE model = 2 AND digest = (SELECT digest FROM image WHERE id = 8)"
        )
        connection.execute("INSERT INTO content VALUES (zeroblob(32), 'PPM', 8, 8)")  # of no image
    assert "warning ledger: the next start migrates it" in place.command("check", "--quick").stdout
    prunable = counted(place, "prune", "--dry-run")["amounts"]
    assert counted(place, "repair")["counts"] == {"whole": 5, "damaged": 1}
    assert counted(place, "prune", "--dry-run")["amounts"] == prunable
    assert counted(place, "verify")["counts"] == {"whole": 6}


@pytest.mark.parametrize("released", RELEASED, ids=lambda folder: folder.name)
def test_everything_that_an_earlier_version_left_is_there_and_nothing_is_processed_again(
    released: Path, tmp_path: Path
) -> None:
    place = restore(released, tmp_path)
    assert states(place) == KNOWN
    assert counted(place, "verify")["counts"] == {"whole": 6}
    sidecars = {file: file.read_bytes() for file in place.site.results.rglob("*.json")}
    rows = place.rows(
        "SELECT id, path, digest, bin, criteria, reason, finished_at, location FROM image ORDER BY id"
    )
    place.configure({"stages": NO_MODEL, "pipeline": {"max_attempts": 1}})
    assert place.run_once().returncode == 1  # pending images run a model
    assert states(place) == KNOWN | {"pending": 0, "failed": 3}
    assert {file: file.read_bytes() for file in place.site.results.rglob("*.json")} == sidecars
    kept = place.rows(
        "SELECT id, path, digest, bin, criteria, reason, finished_at, location FROM image WHERE id < 10"
    )
    assert sorted(kept) == rows[:9]
    assert place.rows("PRAGMA integrity_check") == [("ok",)]
    assert counted(place, "verify")["counts"] == {"whole": 7}
    for name in ("a.ppm", "sub/b.ppm", "third.ppm"):
        document = counted(place, "show", str(place.inbox("kept") / name))
        assert document.pop("provenance")  # the ledger knows it since this start
        assert document == place.sidecar(name, "kept")
    assert "4 images in" in place.command("export", tmp_path / "all.parquet").stdout
    place.configure({"stages": {name: {"options": {"fail": {}}} for name in STAGES}})
    shutil.rmtree(place.site.results)
    assert counted(place, "repair")["counts"] == {"missing": 4, "whole": 3}
    repaired = {file: json.loads(file.read_bytes()) for file in place.site.results.rglob("*.json")}
    assert all(document.pop("provenance") for document in repaired.values())
    assert repaired == {file: json.loads(data) for file, data in sidecars.items()}


# stages whose answers were changed since; the changelog describes the changes
RENEWED = {"released-0.1.0": {"ocr", "yolo", "clip", "blip"}}


@pytest.mark.parametrize("released", RELEASED, ids=lambda folder: folder.name)
def test_the_mini_packs_models_are_the_same_ones(released: Path, tmp_path: Path) -> None:
    """Otherwise `redo --stale` would process all images again,
    and every model would run again for equal bytes."""
    specs = resolve_models(parse({}, tmp_path), [])
    fingerprints = json.loads((released / "fingerprints.json").read_text())
    changed = {stage for stage, spec in specs.items() if spec.fingerprint != fingerprints[stage]}
    assert changed == RENEWED.get(released.name, set())
