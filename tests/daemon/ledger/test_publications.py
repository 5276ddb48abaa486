"""The numbers of publications: who reads on from one sees every image that has changed since, once."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from daemon.core.jobs import JobStatus, Placed
from daemon.ledger import publications, records
from daemon.ledger.ledger import Ledger
from daemon.ledger.records import Reader
from daemon.maintenance.pruning import prune
from tests.makers import MODELS, done, make_file

pytestmark = pytest.mark.anyio


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    opened = Ledger(tmp_path / "ledger.sqlite")
    await opened.register([(Path("/srv/inbox"), 0)], MODELS)
    yield opened
    opened.close()


@pytest.fixture
def reader(ledger: Ledger) -> Iterator[Reader]:
    with closing(Reader(ledger.path)) as opened:
        yield opened


async def publish(ledger: Ledger, *paths: bytes, size: int = 3) -> None:
    await ledger.admit([make_file(path, size=size) for path in paths])
    await annotate(ledger)


async def annotate(ledger: Ledger) -> None:
    endings = [done(job) for job in await ledger.next_jobs(100, ())]
    await ledger.end(endings)
    await ledger.mark_emitted([Placed(ending.job.id) for ending in endings])


def images_after(reader: Reader, number: int = 0) -> dict[int, int]:
    return {number: record.id for number, record in reader.published_after(number, 100)[0].items()}


async def test_an_image_that_is_published_again_has_only_its_new_number(
    ledger: Ledger, reader: Reader
) -> None:
    await publish(ledger, b"a.jpg", b"b.jpg")
    assert images_after(reader) == {1: 1, 2: 2}
    await ledger.put_back(JobStatus.DONE, [1])
    await annotate(ledger)
    assert images_after(reader) == {2: 2, 3: 1}
    assert images_after(reader, 2) == {3: 1}


async def test_a_version_that_is_published_marks_earlier_ones_and_no_later_one(ledger: Ledger) -> None:
    for size in (3, 4, 5):
        await ledger.admit([make_file(b"a.jpg", size=size)])
        await ledger.end([done(job) for job in await ledger.next_jobs(100, ())])
    assert [record.id for record in await ledger.owed(0, 10)] == [1, 2, 3]
    await ledger.mark_emitted([Placed(2)], superseding=True)
    assert [record.id for record in await ledger.owed(0, 10)] == [3]


async def test_an_image_that_is_held_is_numbered_once(ledger: Ledger, reader: Reader) -> None:
    await ledger.admit([make_file(b"a.jpg")])
    await ledger.end([done(job) for job in await ledger.next_jobs(1, ())])
    assert await ledger.mark_emitted([Placed(1, is_held=True)]) == {1: 1}
    assert await ledger.mark_emitted([Placed(1, is_held=True)]) == {}
    assert await ledger.mark_emitted([Placed(1)]) == {}
    assert images_after(reader) == {1: 1}


async def test_pruning_takes_the_numbers_of_what_it_removes(ledger: Ledger, reader: Reader) -> None:
    await publish(ledger, b"a.jpg")
    await publish(ledger, b"a.jpg", size=4)
    await prune(ledger, 1e12)
    with reader.lend() as connection:
        assert [tuple(row) for row in connection.execute("SELECT number, image FROM publication")] == [(2, 2)]


async def test_a_backup_is_of_one_moment_and_its_progress_ends_with_all(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "BACKUP_PAGES", 1)
    await publish(ledger, b"a.jpg")
    with closing(sqlite3.connect(ledger.path)) as writer, closing(Reader(ledger.path)) as reader:
        seen: list[tuple[int, int]] = []

        def step(done: int, total: int) -> None:
            seen.append((done, total))
            if len(seen) < 4:
                with writer:
                    writer.execute("UPDATE image SET seen_at = seen_at + 1")  # as a daemon that goes on

        before = writer.execute("SELECT seen_at FROM image").fetchone()
        reader.back_up(tmp_path / "copy.sqlite", step)
    with closing(sqlite3.connect(tmp_path / "copy.sqlite")) as copy:
        assert copy.execute("SELECT seen_at FROM image").fetchone() == before
    assert len(seen) > 10
    assert seen[-1][0] == seen[-1][1]


async def test_a_restored_backup_shows_by_its_starts(ledger: Ledger, tmp_path: Path) -> None:
    await publish(ledger, b"a.jpg")
    (tmp_path / "copy").mkdir()
    with closing(Reader(ledger.path)) as reader:
        reader.back_up(tmp_path / "copy" / "ledger.sqlite")
    shutil.copy(tmp_path / "identity", tmp_path / "copy" / "identity")
    starts = []
    for folder in (tmp_path, tmp_path / "copy"):
        with closing(Ledger(folder / "ledger.sqlite")) as later:
            await later.register([], MODELS)
            starts.append(await later.run(lambda connection: publications.read_starts(connection, 1)))
    (first, here), (also_first, there) = starts
    assert first == also_first == (1, first.token, 0)
    assert here[::2] == there[::2] == (2, 1)
    assert here.token != there.token
