from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon.ledger.rows import CHUNK, content_row, file_row, keep_contents
from daemon.ledger.schema import connect
from daemon.ledger.statements import run_rows
from tests.makers import make_file, make_job, read

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


def store(connection: sqlite3.Connection, numbers: range) -> None:
    """Images with names and bytes in no order."""
    jobs = [read(make_job(), b"%d" % number) for number in numbers]
    connection.execute("BEGIN IMMEDIATE")
    run_rows(connection, "admit", [file_row(make_file(job.digest), 0, 1e9) for job in jobs])
    keep_contents(connection, [content_row(job) for job in jobs])
    run_rows(
        connection, "keep_result", [(job.digest, model, b"{}", 0.1, 0) for job in jobs for model in (1, 2)]
    )
    connection.execute("COMMIT")


def test_images_and_results_are_stored_without_temporary_files(
    connection: sqlite3.Connection, temporary_files: Path
) -> None:
    """They would be on another disk than the ledger, which may be slow or full."""
    store(connection, range(IMAGES))
    before = temporary_files.stat().st_mtime_ns
    store(connection, range(IMAGES, IMAGES + CHUNK))
    store(connection, range(IMAGES))  # the same bytes again
    assert temporary_files.stat().st_mtime_ns == before


def test_pages_are_counted_again_where_an_older_visiond_did_not_count_them(
    connection: sqlite3.Connection,
) -> None:
    jobs = [read(make_job(), b"%d" % number) for number in range(3)]
    keep_contents(connection, [content_row(job) for job in jobs[:2]])
    jobs[0].pages = 7
    keep_contents(connection, [content_row(job) for job in jobs])
    jobs[0].pages = 1
    keep_contents(connection, [content_row(job) for job in jobs])
    found = run_rows(connection, "contents", [(job.digest,) for job in jobs])
    jobs[0].pages = 7
    assert {tuple(row) for row in found} == {content_row(job) for job in jobs}
