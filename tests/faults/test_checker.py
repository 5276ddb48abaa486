"""The checker notices each fault: one thing at a time is spoiled in a finished run."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.daemon_process import Place

SETTINGS = {"output": {"bins": "link"}}
CONTENT = "SELECT content.id FROM content JOIN image USING (digest) WHERE path = CAST('00003.ppm' AS BLOB)"
SIDECAR = "results/00003.ppm.json"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = Place(tmp_path_factory.mktemp("finished"), SETTINGS)
    place.drop_many(range(6))
    place.drop("bad.jpg", b"no picture")
    assert place.run_once().returncode == 1
    place.assert_kept(DONE=6, FAILED=1)
    return place


def sql(place: Place, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(place.site.ledger)) as connection, connection:
        connection.execute(statement)


def edit(place: Place, change: dict[str, object], sidecar: str = SIDECAR) -> None:
    file = place.folder / sidecar
    file.write_text(json.dumps(json.loads(file.read_text()) | change) + "\n")


def cut(place: Place) -> None:
    file = place.folder / SIDECAR
    file.write_bytes(file.read_bytes()[:-40])


def copy_sidecar(place: Place) -> None:
    shutil.copy(place.folder / SIDECAR, place.folder / "results" / "second.json")


def answer_for_another(place: Place) -> None:
    """Wrong in the ledger and in the sidecar: only the fakes' rule shows it."""
    caption: dict[str, object] = {"text": "a picture of 99 things", "similarity": None}
    blip = "SELECT id FROM model WHERE stage = 'blip'"
    sql(
        place,
        f"UPDATE result SET payload = '{json.dumps(caption)}' WHERE model = ({blip}) AND content = ({CONTENT})",
    )
    edit(place, {"caption": caption})


SPOILS: dict[str, tuple[str, Callable[[Place], object]]] = {
    "a row is gone": ("lost", lambda p: sql(p, "DELETE FROM image WHERE path = CAST('00003.ppm' AS BLOB)")),
    "a row is pending": ("lost", lambda p: sql(p, "UPDATE image SET status = 0 WHERE id = 3")),
    "a sidecar is gone": ("lost", lambda p: (p.folder / SIDECAR).unlink()),
    "a reason is gone": ("lost", lambda p: (p.folder / "failed/bad.jpg.json").unlink()),
    "a source is gone": ("lost", lambda p: (p.folder / "inbox/00003.ppm").unlink()),
    "a row is not published": ("lost", lambda p: sql(p, "UPDATE image SET emitted = 0 WHERE id = 3")),
    "a version has two rows": (
        "double",
        lambda p: sql(
            p,
            "INSERT INTO image SELECT 99, inbox, path, 1, inode, size, mtime_ns, ctime_ns, priority, status, seen_at,"
            " attempts, not_before, location, digest, models, bin, criteria, reason, detail, finished_at, emitted, deaths, NULL"
            " FROM image WHERE id = 3",
        ),
    ),
    "a row has two sidecars": ("double", copy_sidecar),
    "a sidecar is cut": ("torn", cut),
    "a sidecar holds NaN": ("torn", lambda p: edit(p, {"score": float("nan")})),
    "a temporary file is left": ("torn", lambda p: (p.folder / "results/.visiond-1.tmp").touch()),
    "another schema": ("wrong", lambda p: edit(p, {"schema": "visiond/2"})),
    "another id": ("wrong", lambda p: edit(p, {"id": 12345})),
    "another path": ("wrong", lambda p: edit(p, {"source": {"path": "00001.ppm"}})),
    "another caption": ("wrong", lambda p: edit(p, {"caption": {"text": "a lie", "similarity": None}})),
    "another reason": ("wrong", lambda p: edit(p, {"reason": "pixels"}, "failed/bad.jpg.json")),
    "another digest in the ledger": (
        "wrong",
        lambda p: sql(p, "UPDATE image SET digest = zeroblob(32) WHERE id = 3"),
    ),
    "a result is gone": (
        "wrong",
        lambda p: sql(p, f"DELETE FROM result WHERE content = ({CONTENT})"),
    ),
    "in no bin": ("wrong", lambda p: next((p.folder / "bins").glob("*/00003.ppm")).unlink()),
    "the answer of another image": ("wrong", answer_for_another),
}


@pytest.mark.parametrize("spoil", SPOILS)
def test_the_checker_notices(spoil: str, finished: Place, tmp_path: Path) -> None:
    copy = Place(tmp_path, SETTINGS)
    shutil.copytree(finished.folder, tmp_path, dirs_exist_ok=True, symlinks=True)
    copy.dropped, copy.captions = finished.dropped, finished.captions
    sql(copy, f"UPDATE inbox SET path = CAST('{copy.inbox()}' AS BLOB)")
    assert copy.judge().problems == []
    kind, act = SPOILS[spoil]
    act(copy)
    assert getattr(copy.judge(), kind), f"{copy.judge().problems}"
