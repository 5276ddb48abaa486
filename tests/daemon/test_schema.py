"""Ledgers of other schemas: an older one, made by hand, is brought up to date, a newer one refused untouched."""

from __future__ import annotations

import errno
import os
import re
import resource
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from daemon import schema
from daemon.errors import LedgerDamaged, LedgerTooNew, LedgerUnusable
from daemon.jobs import Admitted
from daemon.ledger import Ledger
from daemon.records import Reader
from tests.daemon_process import Place
from tests.makers import make_file

SCHEMA_1 = Path(__file__).with_name("ledger-1.sql")  # as visiond 0.1.0 wrote it; never to be changed
NEXT = "ALTER TABLE image ADD COLUMN note TEXT; UPDATE image SET note = reason || ': ' || detail;"


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """A ledger of schema 1 with an image that is DONE and one that FAILED."""
    path = tmp_path / "state" / "ledger.sqlite"
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SCHEMA_1.read_text())
    return path


def tables_of(path: Path) -> list[str]:
    """The statements that made them, without comments and spaces."""
    with closing(sqlite3.connect(path)) as connection:
        made = connection.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL").fetchall()
    return sorted(re.sub(r"--.*|\s", "", sql) for (sql,) in made)


def test_an_older_ledger_comes_to_have_the_very_tables_of_a_new_one_and_keeps_its_rows(older: Path, tmp_path: Path) -> None:
    """Whoever changes the schema must add what brings older ledgers there."""
    schema.connect(older).close()
    schema.connect(tmp_path / "new.sqlite").close()
    assert tables_of(older) == tables_of(tmp_path / "new.sqlite")
    with closing(Reader(older)) as reader:
        (record,) = reader.find("a.jpg")
    assert (record.bin, record.width, record.outputs["ocr"].payload) == ("C", 640, b'{"lines":[],"count":0,"area_ratio":0.0}')


@pytest.mark.anyio
async def test_an_older_ledger_knows_its_files_whatever_number_their_disk_had(older: Path) -> None:
    with closing(Ledger(older)) as ledger:
        assert await ledger.register([(Path("/srv/inbox"), 0)], []) == [1]
        assert await ledger.admit([make_file(b"a.jpg"), make_file(b"b.jpg", inode=3)]) == Admitted(0, 0, 0)
        assert (await ledger.admit([make_file(b"a.jpg", inode=3)])).pending == 1


def test_migrations_run_once_and_in_order(older: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, NEXT, "ALTER TABLE image RENAME COLUMN note TO remark;"])
    for _ in range(2):
        with closing(schema.connect(older)) as connection:
            assert schema.read_version(older, connection) == schema.newest()
            rows = connection.execute("SELECT remark FROM image ORDER BY id").fetchall()
            assert [row[0] for row in rows] == [None, "truncated: its end is missing"]


def test_a_migration_that_cannot_be_done_leaves_the_ledger_as_it_was(older: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tables_of(older)
    monkeypatch.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, NEXT, "INSERT INTO no_such_table VALUES (1);"])
    with pytest.raises(LedgerDamaged, match="no such table"):
        schema.connect(older)
    assert tables_of(older) == before
    monkeypatch.undo()
    schema.connect(older).close()


def test_a_newer_ledger_is_refused_by_every_command_and_left_untouched(older: Path, tmp_path: Path) -> None:
    place = Place(tmp_path)
    with closing(sqlite3.connect(older)) as connection:
        connection.execute(f"PRAGMA user_version = {schema.newest() + 1}")
    before = older.read_bytes()
    for command in ("run", "verify", "repair", "status", "backup"):
        refused = place.command(command, *([tmp_path / "copy.sqlite"] if command == "backup" else []))
        assert refused.returncode == os.EX_CONFIG, command
        assert "written by a newer visiond" in refused.stderr
    assert older.read_bytes() == before
    with pytest.raises(LedgerTooNew):
        Reader(older)


def test_a_ledger_that_cannot_be_opened_for_want_of_descriptors_says_so(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(LedgerUnusable, match=r"may open no more files at once.*LimitNOFILE") as caught:
            schema.connect(tmp_path / "ledger.sqlite")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert caught.value.errno == errno.EMFILE
    assert "disk" not in str(caught.value)
