"""What an actor writes, without Ray: the rows of a unit as one part."""

from __future__ import annotations

import base64
import json
import os
import tarfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from daemon.config.loading import load
from daemon.core.errors import NotWritable
from daemon.core.jobs import JobStatus
from daemon.unpacking.folder import NoRoom
from tests.daemon.unpacking.containers import encrypt, make_pages, make_tar, make_video, make_zip
from tests.daemon_process import Place, picture
from tests.inputs import CATALOGUE
from visiond.cluster import actor
from visiond.cluster.actor import ActorChain
from visiond.cluster.job import Shards
from visiond.cluster.places import ClusterFolder
from visiond.cluster.planning import Planner, to_table
from visiond.cluster.plans import Plans
from visiond.cluster.reading import temporary
from visiond.cluster.reading.fetching import fetch
from visiond.cluster.reading.inputs import InputListing

UNLIKE = {"stage_seconds", "id", "seconds", "finished_at"}  # they differ between any two runs


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """An inbox with good, bad and odd images."""
    place = Place(tmp_path)
    for number, each in enumerate(CATALOGUE):
        place.drop(f"odd/{number}.jpg", each.make())
    place.drop(b"not \xff utf-8.ppm", picture(1))
    place.drop_many(range(20))
    return place


@pytest.fixture
def chain(place: Place) -> Iterator[Callable[..., ActorChain]]:
    made = []

    def make(shards: Shards = Shards.none, **options: Any) -> ActorChain:
        config = load(place.config).model_dump_json().encode()
        made.append(ActorChain(config, str(place.folder / "rows"), str(place.inbox()), shards, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def units(place: Place, size: int) -> list[Any]:
    config = load(place.config)
    plans = Plans.open(ClusterFolder(str(place.folder / "rows")), config, resume=True)
    return [
        to_table(unit)
        for unit in Planner(plans, InputListing(str(place.inbox()), config).inputs(), size).units()
    ]


def rows_of(place: Place) -> list[dict[str, Any]]:
    parts = sorted((place.folder / "rows").glob("part-*.parquet"))
    return [row for part in parts for row in pyarrow.parquet.read_table(part).to_pylist()]


def alike(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in UNLIKE}


def key_of(row: dict[str, Any]) -> str:
    return str(row["path_base64"] or row["path"])


CONTAINERS = {
    "a.zip": make_zip(
        {"1.ppm": picture(31), "deep/2.PPM": picture(32), "notes.txt": b"text", "in.zip": b"x", "x.tmp": b"x"}
    ),
    "odd/b.tar.gz": make_tar(
        {"3.ppm": picture(33), "pages.pdf": make_pages("PDF", 2)}, {"link.jpg": "3.ppm"}
    ),
    "c.tif": make_pages("TIFF", 3),
    "single.tif": make_pages("TIFF", 1),
    "d.mp4": make_video([0, 1]),
    "cut.zip": make_zip({"4.ppm": picture(34)})[:-30],
    "locked.zip": encrypt(make_zip({"5.ppm": picture(35), "6.ppm": picture(36)})),
    "empty.zip": make_zip({}),
}


@pytest.mark.parametrize("kinds", [[], ["zip", "tar", "tiff", "pdf", "video"]])
def test_rows_equal_those_of_the_daemon_file_for_file(
    kinds: list[str], place: Place, chain: Callable[..., ActorChain]
) -> None:
    [inbox] = place.settings["inbox"]
    place.configure({"inbox": [{**inbox, "unpack": kinds}]})
    for name, data in CONTAINERS.items():
        place.drop(name, data)
    annotate = chain()
    counts = [json.loads(annotate(unit).column("counts")[0].as_py()) for unit in units(place, 30)]
    ours = {key_of(row): row for row in rows_of(place)}
    assert len(ours) == len(rows_of(place)) == len(CATALOGUE) + 21 + len(CONTAINERS) + (14 if kinds else 0)
    assert place.run_once().returncode == 1
    assert place.command("export", "results.parquet").returncode == 0
    theirs = {
        key_of(row): row for row in pyarrow.parquet.read_table(place.folder / "results.parquet").to_pylist()
    }
    assert {key for key, row in ours.items() if row["status"] == "DONE"} == theirs.keys()
    for key, row in theirs.items():
        assert alike(row) == {name: value for name, value in ours[key].items() if name in alike(row)}
    failed = place.rows(f"SELECT path, status, reason, detail FROM image WHERE status != {JobStatus.DONE:d}")
    assert len(failed) == len(ours) - len(theirs)
    for path, status, reason, detail in failed:
        row = ours[os.fsdecode(path)]
        assert (row["status"], row["reason"], row["detail"]) == (JobStatus(status).name, reason, detail)
    assert sum(each.get("DONE", 0) for each in counts) == len(theirs)


def test_embeddings_in_half_precision_have_the_same_values(
    place: Place, chain: Callable[..., ActorChain]
) -> None:
    found = []
    for half in (False, True):
        annotate = chain(float16=half)
        for unit in units(place, 30):
            annotate(unit)
        [part, *others] = (place.folder / "rows").glob("part-*.parquet")
        kind = pyarrow.parquet.read_schema(part).field("embedding").type.value_type
        found.append((str(kind), {key_of(row): row["embedding"] for row in rows_of(place)}))
        for file in (part, *others):
            file.unlink()
    assert [kind for kind, _ in found] == ["float", "halffloat"]
    assert found[0][1] == found[1][1]
    assert sum(each is not None for each in found[1][1].values()) > 20


@pytest.mark.parametrize("wanted", [Shards.sidecars, Shards.images])
def test_a_shard_has_the_sidecar_of_each_image_that_is_done_and_the_image_if_it_is_wanted(
    place: Place, chain: Callable[..., ActorChain], wanted: Shards
) -> None:
    annotate = chain(wanted)
    for unit in units(place, 30):
        annotate(unit)
    done = {f"{row['id']:019d}": row for row in rows_of(place) if row["status"] == "DONE"}
    found: dict[str, dict[str, bytes]] = {}
    for shard in (place.folder / "rows").glob("shard-*.tar"):
        with tarfile.open(shard) as tar:
            for member in tar:
                key, ending = member.name.split(".")
                data = tar.extractfile(member)
                assert data
                found.setdefault(key, {})[ending] = data.read()
    assert found.keys() == done.keys()
    for key, row in done.items():
        sidecar = json.loads(found[key].pop("json"))
        assert (sidecar["id"], sidecar["source"]["path"], sidecar["bin"]["name"]) == (
            row["id"],
            row["path"],
            row["bin"],
        )
        name = base64.b64decode(row["path_base64"] or "") or os.fsencode(row["path"])
        file = Path(os.fsdecode(os.path.join(os.fsencode(place.inbox()), name)))
        images = [file.read_bytes()] if wanted is Shards.images else []
        assert [*found[key].values()] == images


def test_a_part_that_exists_has_its_shard(
    place: Place, chain: Callable[..., ActorChain], monkeypatch: pytest.MonkeyPatch
) -> None:
    annotate = chain(Shards.images)
    [unit] = units(place, 1000)

    def fail(*_: object) -> None:
        raise NotWritable("the disk is full.")

    with monkeypatch.context() as patch:
        patch.setattr(actor, "write_shard", fail)
        assert annotate(unit).column("problem")[0].as_py() == "the disk is full."
    assert not rows_of(place)
    assert not annotate(unit).column("problem")[0].as_py()
    assert len([*(place.folder / "rows").glob("shard-*.tar")]) == 1


def test_when_the_temporary_disk_is_full_a_unit_is_left_for_a_later_run(
    place: Place, chain: Callable[..., ActorChain], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise NoRoom(is_new=True)

    [inbox] = place.settings["inbox"]
    place.configure({"inbox": [{**inbox, "unpack": ["zip"]}]})
    place.drop("a.zip", make_zip({"1.ppm": picture(31)}))
    annotate = chain()
    [unit] = units(place, 1000)
    with monkeypatch.context() as patch:
        patch.setattr(temporary, "check_room", fail)
        patch.setattr(temporary, "PAUSES", (0.0,) * 6)
        ended = annotate(unit)
    assert "disk is nearly full. Make room, or set TMPDIR" in ended.column("problem")[0].as_py()
    assert ended.column("status").to_pylist() == [os.EX_IOERR]
    assert not rows_of(place)
    [unit] = units(place, 1000)
    assert not annotate(unit).column("problem")[0].as_py()
    assert "a.zip.unpacked/1.ppm" in {row["path"] for row in rows_of(place) if row["status"] == "DONE"}


def test_a_part_is_written_once_and_its_counts_are_read_when_it_exists(
    place: Place, chain: Callable[..., ActorChain]
) -> None:
    annotate = chain()
    [unit] = units(place, 1000)
    first = annotate(unit)
    [part] = (place.folder / "rows").glob("part-*.parquet")
    before = (part.stat().st_ino, part.stat().st_mtime_ns)
    assert annotate(unit) == first
    assert (part.stat().st_ino, part.stat().st_mtime_ns) == before
    assert len({row["id"] for row in rows_of(place)}) == len(CATALOGUE) + 21


def test_units_are_read_one_after_another_so_that_they_end_one_after_another(
    place: Place, chain: Callable[..., ActorChain], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, overlap = threading.Semaphore(1), threading.Event()

    def fetch_alone(*arguments: Any) -> Iterator[Any]:
        if not reading.acquire(blocking=False):
            overlap.set()
            return
        overlap.wait(0.2)  # another thread has time to begin
        yield from fetch(*arguments)
        reading.release()

    monkeypatch.setattr(actor, "fetch", fetch_alone)
    annotate, parts = chain(), units(place, 30)
    with ThreadPoolExecutor(len(parts)) as threads:
        list(threads.map(annotate, parts))
    assert not overlap.is_set()
    assert len(rows_of(place)) == len(CATALOGUE) + 21


def test_an_actor_that_cannot_load_its_models_says_why(
    place: Place, chain: Callable[..., ActorChain]
) -> None:
    place.configure({"stages": {"ocr": {"options": {"unusable": "no such weights"}}}})
    annotate = chain()
    assert annotate(units(place, 1000)[0]).column("problem").to_pylist() == ["no such weights"]
    assert rows_of(place) == []
