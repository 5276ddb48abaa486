"""A file that is the same but for its times, its inode or its mode keeps its row."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from daemon.core.jobs import Ending, JobStatus, Placed
from daemon.ledger.joining import join_repeats
from daemon.ledger.ledger import Ledger
from daemon.ledger.record import Model
from daemon.ledger.rows import repeat_of
from daemon.monitoring.counts import Counts
from stages.registry.registry import ORDER
from tests.daemon_process import Daemon, Place, counts_of, picture
from tests.makers import MODELS, done, failed, make_file, make_job

pytestmark = pytest.mark.anyio


@pytest.fixture
async def kept(ledger: Ledger, inbox: Path) -> Ledger:
    """The inbox keeps its files."""
    await ledger.register([(inbox, 0)], MODELS, kept=[inbox])
    return ledger


async def process(ledger: Ledger, data: bytes = b"data", *, variant: int = 3, **version: Any) -> Ending:
    """A version of a.jpg that is read, ended and published."""
    await ledger.admit([make_file(**version)])
    [job] = await ledger.next_jobs(1, ())
    [ending], *_ = await ledger.end([done(job, variant, data)])
    if ending.status is JobStatus.DONE:
        await ledger.mark_emitted([Placed(job.id)])
    return ending


def images(ledger: Ledger) -> list[tuple[Any, ...]]:
    """The id, status, inode, mtime and ctime of each image."""
    with closing(sqlite3.connect(ledger.path)) as connection:
        return connection.execute(
            "SELECT id, status, inode, mtime_ns, ctime_ns FROM image ORDER BY id"
        ).fetchall()


async def test_a_file_with_the_bytes_of_the_version_before_keeps_its_row(kept: Ledger) -> None:
    first = await process(kept)
    repeat = await process(kept, inode=12, mtime_ns=14, ctime_ns=15)
    assert (first.is_repeat, repeat.is_repeat, repeat.keeps_result) == (False, True, True)
    assert images(kept) == [(first.job.id, JobStatus.DONE, 12, 14, 15)]
    assert (await kept.admit([make_file(inode=12, mtime_ns=14, ctime_ns=15)])).pending == 0
    assert await kept.owed(0, 9) == []


async def test_an_image_that_is_processed_again_keeps_its_own_row(kept: Ledger) -> None:
    """Ledgers of earlier versions have two images with the same bytes for a file that was touched."""
    await process(kept)
    await process(kept, b"other", inode=12)
    await kept.run(lambda c: c.execute("UPDATE image SET digest = (SELECT digest FROM image WHERE id = 1)"))
    await kept.run(lambda c: c.execute("UPDATE image SET status = 0, not_before = 1 WHERE id = 2"))
    [job] = await kept.next_jobs(1, ())
    assert job.has_result
    assert (await kept.end([done(job, data=b"data")])).newest == {2}
    assert [row[0] for row in images(kept)] == [1, 2]


async def test_a_repeat_counts_as_nothing_new() -> None:
    counts = Counts()
    counts.begin({JobStatus.DONE: 1, JobStatus.PENDING: 1})
    counts.finished(repeat_of(done(make_job())))
    assert (counts.of(JobStatus.DONE), counts.of(JobStatus.PENDING), counts.ended.total()) == (1, 0, 0)


async def test_other_bytes_or_another_bin_are_a_new_version(kept: Ledger) -> None:
    await kept.admit([make_file(b"b.jpg")])
    await kept.end([done(job, data=b"other") for job in await kept.next_jobs(1, ())])
    await process(kept)
    assert not (await process(kept, b"other", mtime_ns=14)).is_repeat
    await kept.admit([make_file(mtime_ns=24)])
    [job] = await kept.next_jobs(1, ())
    [ending], *_ = await kept.end([replace(done(job, data=b"other"), bin="receipts")])
    assert ending.status is JobStatus.DONE
    assert len(images(kept)) == 4


async def test_results_of_another_model_are_a_new_version(kept: Ledger, inbox: Path) -> None:
    await process(kept)
    newer = [Model(stage, f"{stage}-2" if stage == "clip" else f"{stage}-1", "") for stage in ORDER]
    await kept.register([(inbox, 0)], newer, kept=[inbox])
    assert not (await process(kept, mtime_ns=14)).is_repeat


async def test_a_version_that_failed_or_is_not_published_is_no_repeat(kept: Ledger) -> None:
    await kept.admit([make_file()])
    [job] = await kept.next_jobs(1, ())
    await kept.end([failed(job)])
    assert not (await process(kept, mtime_ns=14)).is_repeat
    await kept.admit([make_file(mtime_ns=24)])
    [job] = await kept.next_jobs(1, ())
    await kept.end([done(job, data=b"data 2")])  # a crash comes before it is published
    assert not (await process(kept, b"data 2", mtime_ns=34)).is_repeat


async def test_what_was_moved_or_deleted_and_comes_again_is_a_new_image(
    ledger: Ledger, kept: Ledger, inbox: Path
) -> None:
    first = await process(kept)
    await kept.mark_emitted([Placed(first.job.id, b"/done/a.jpg", first.job.version)])
    assert not (await process(kept, mtime_ns=14)).is_repeat
    await ledger.register([(inbox, 0)], MODELS)
    assert not (await process(ledger, mtime_ns=24)).is_repeat


async def test_an_end_that_is_written_at_the_second_try_is_a_repeat_too(
    kept: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    await process(kept)
    tries = []

    def fail_once(*arguments: Any) -> set[int]:
        found = join_repeats(*arguments)
        tries.append(found)
        if len(tries) == 1:
            raise sqlite3.OperationalError("database or disk is full")
        return found

    monkeypatch.setattr("daemon.ledger.ledger.join_repeats", fail_once)
    assert (await process(kept, mtime_ns=14)).is_repeat
    assert len(images(kept)) == 1


def test_a_mode_that_changes_and_a_copy_on_another_disk_give_the_sinks_nothing_new(tmp_path: Path) -> None:
    place = Place(tmp_path, {"output": {"sinks": ["jsonl"]}, "inbox": [{"settle_seconds": 0.05}]})
    for number in range(3):
        place.drop(f"sub/{number}.ppm", picture(number))
    records = tmp_path / "results.jsonl"
    assert place.run_once().returncode == 0
    said = records.read_text()
    assert len(said.splitlines()) == 3
    rows = place.rows("SELECT id, path, status FROM image ORDER BY id")
    with Daemon(place) as daemon:
        changed = place.inbox() / "sub" / "0.ppm"
        changed.chmod(0o600)
        row = (JobStatus.DONE, changed.stat().st_ctime_ns)
        query = "SELECT status, ctime_ns FROM image WHERE path = ?"
        daemon.wait_until(lambda _: place.rows(query, b"sub/0.ppm") == [row], "the new mode")
        daemon.wait_until(lambda status: status["pending"] == 0, "an idle daemon")
        assert (daemon.status()["done"], daemon.status()["gone"]) == (3, 0)
        assert daemon.stop() == 0
    other = tmp_path / "disk"
    shutil.copytree(place.inbox(), other)
    shutil.rmtree(place.inbox())
    other.rename(place.inbox())
    for file in (place.inbox() / "sub").iterdir():
        os.utime(file)
    assert place.run_once().returncode == 0
    assert place.rows("SELECT id, path, status FROM image ORDER BY id") == rows
    assert records.read_text() == said
    assert {json.loads(line)["id"] for line in said.splitlines()} == {row[0] for row in rows}
    assert counts_of(place)["DONE"] == 3
