from __future__ import annotations

import contextlib
import random
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from daemon.core.jobs import Ending, JobStatus
from daemon.ledger.joining import file_row
from daemon.ledger.record import Record
from daemon.ledger.rows import (
    CHUNK,
    Results,
    checksums_of,
    content_row,
    end_row,
    keep_contents,
)
from daemon.ledger.schema import connect
from daemon.ledger.statements import SQL, run_rows
from tests.makers import MODELS, content_of, done, failed, make_file, make_job, make_outputs

IMAGES = 4 * CHUNK  # enough that new digests are on pages all over the tables


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(connect(tmp_path / "ledger.sqlite")) as opened:
        yield opened


@pytest.fixture
def temporary_files(tmp_path: Path, connection: sqlite3.Connection) -> Iterator[Path]:
    """The folder where SQLite makes them; they have no names there."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    connection.execute(f"PRAGMA temp_store_directory = '{folder}'")  # of all connections of this process
    yield folder
    connection.execute("PRAGMA temp_store_directory = ''")


def store(connection: sqlite3.Connection, numbers: Iterable[int]) -> None:
    """Images with names and bytes in no order, which end in no order."""
    known = sorted([content_of(b"%d" % number) for number in numbers], key=lambda each: each.digest)
    files = [file_row(make_file(content.digest), 0, 1e9) for content in known]
    connection.execute("BEGIN IMMEDIATE")
    taken = run_rows(connection, "admit", files) or run_rows(connection, "admit_again", files)
    keep_contents(connection, [content_row(content) for content in known])
    results = [(content.digest, model, b"{}", 0.1, 0) for content in known for model in (1, 2)]
    run_rows(connection, "keep_result", results)
    assert len(taken) == len(known)
    ids = dict(connection.execute("SELECT path, id FROM image").fetchall())
    endings = [
        Ending(
            make_job(content.digest, id=ids[content.digest]),
            JobStatus.DONE,
            2e9,
            1,
            "A",
            b"{}",
            content=content,
        )
        for content in known
    ]
    run_rows(connection, "end", [end_row(ending, Record.of(ending, b"/inbox", []), {}) for ending in endings])
    run_rows(connection, "emitted", [(ending.job.id,) for ending in endings])
    connection.execute("COMMIT")


@pytest.mark.parametrize("make", [done, failed])
def test_checksums_that_an_executor_computed_are_those_of_the_rows(
    make: Callable[..., Ending], connection: sqlite3.Connection
) -> None:
    results = Results()
    results.start(connection, MODELS)
    stored = []
    for computes in (False, True):
        ending = make(make_job(), outputs=make_outputs())
        record: Record | None = Record.of(ending, b"/inbox", MODELS)
        if computes:
            ending = replace(ending, checksums=checksums_of(ending.content, record, MODELS))
            record = None
        connection.execute("BEGIN")
        results.write(connection, [(ending.content, ending.checksums)])
        rows = connection.execute("SELECT * FROM result, content").fetchall()
        stored.append((rows, end_row(ending, record, results.numbers)))
        connection.execute("ROLLBACK")
    assert stored[0] == stored[1]
    assert len(stored[0][0]) == len(MODELS)


def test_images_and_results_are_stored_without_temporary_files(
    connection: sqlite3.Connection, temporary_files: Path
) -> None:
    """They could be on another disk, which may be slow or full."""
    store(connection, range(IMAGES))
    before = temporary_files.stat().st_mtime_ns
    store(connection, range(IMAGES, IMAGES + CHUNK))
    assert temporary_files.stat().st_mtime_ns == before


def test_files_that_are_there_again_are_admitted_without_temporary_files(
    connection: sqlite3.Connection, temporary_files: Path
) -> None:
    store(connection, range(IMAGES))
    connection.execute("UPDATE image SET status = ?", (JobStatus.GONE,))
    before = temporary_files.stat().st_mtime_ns
    store(connection, random.Random(1).sample(range(IMAGES), CHUNK))
    assert temporary_files.stat().st_mtime_ns == before
    [[done]] = connection.execute("SELECT COUNT(*) FROM image WHERE status = ?", (JobStatus.DONE,))
    assert done == CHUNK


def test_a_file_that_the_daemon_has_moved_is_no_older_version_that_is_there_again(
    connection: sqlite3.Connection,
) -> None:
    """The moved one has another time of change, and the scan may have read the file just before."""
    files = [file_row(make_file(ctime_ns=time), 0, 1e9) for time in (5, 6)]
    assert len(run_rows(connection, "admit", files)) == 2
    connection.execute("UPDATE image SET status = ? WHERE ctime_ns = 5", (JobStatus.GONE,))
    connection.execute(
        "UPDATE image SET location = '/moved', status = ? WHERE ctime_ns = 6", (JobStatus.DONE,)
    )
    for statement in ("admit", "admit_again"):
        assert run_rows(connection, statement, files[:1]) == []


def test_pages_are_counted_again_where_an_older_visiond_did_not_count_them(
    connection: sqlite3.Connection,
) -> None:
    known = [content_of(b"%d" % number) for number in range(3)]
    counted = [replace(known[0], pages=7), *known[1:]]
    keep_contents(connection, [content_row(content) for content in known[:2]])
    keep_contents(connection, [content_row(content) for content in counted])
    keep_contents(connection, [content_row(content) for content in known])
    found = run_rows(connection, "contents", [(content.digest,) for content in known])
    assert {tuple(row) for row in found} == {content_row(content) for content in counted}


def test_a_damaged_format_that_is_written_again_keeps_the_results_of_its_bytes(
    connection: sqlite3.Connection,
) -> None:
    store(connection, range(3))
    before = connection.execute("SELECT * FROM result ORDER BY id").fetchall()
    content = content_of(b"1")
    digest = [(content.digest,)]
    connection.execute(SQL["forget_content"], *digest)
    assert run_rows(connection, "contents", digest) == []
    keep_contents(connection, [content_row(content)])
    assert [tuple(row) for row in run_rows(connection, "contents", digest)] == [content_row(content)]
    assert connection.execute("SELECT * FROM result ORDER BY id").fetchall() == before
    assert len(run_rows(connection, "results", digest)) == 2
