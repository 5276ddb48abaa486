"""What a start finds after another one that was killed."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from daemon.config.state import IDENTITY
from daemon.ledger import identity, schema
from daemon.ledger.statements import SQL


def kill_before_the_checkpoint(folder: Path) -> Path:
    """The ledger of a first start that was killed when its tables were only in the -wal."""
    whole, killed = folder / "whole.sqlite", folder / "state" / "ledger.sqlite"
    killed.parent.mkdir()
    with closing(sqlite3.connect(whole)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(
            f"BEGIN; {SQL['schema']} PRAGMA application_id = {schema.APPLICATION_ID}; "
            f"PRAGMA user_version = {schema.newest()}; COMMIT"
        )
        for end in ("", "-wal"):  # before it is closed, because closing moves the -wal into it
            shutil.copy(f"{whole}{end}", f"{killed}{end}")
    return killed


def test_the_tables_are_in_the_main_file_before_the_identity_is_written(tmp_path: Path) -> None:
    path = kill_before_the_checkpoint(tmp_path)
    connection, _ = identity.open_ledger(path)
    with closing(connection):
        without_wal = shutil.copy(path, tmp_path / "without_wal.sqlite")
    assert (path.parent / IDENTITY).exists()
    with closing(sqlite3.connect(without_wal)) as connection:
        assert connection.execute("SELECT COUNT(*) FROM image").fetchone() == (0,)
