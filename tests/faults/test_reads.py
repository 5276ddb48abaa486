"""Reads that the disk refuses for a while: of the ledger, a sidecar, the index of the search, a name in a folder."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
from pathlib import Path

import pytest

from daemon.core.errors import LedgerDamaged, LedgerUnusable, SearchUnusable
from daemon.inbox import sources
from daemon.ledger import schema, soundness
from daemon.ledger.records import Reader
from daemon.search.index import Index
from tests.daemon_process import Daemon, Place
from tests.faults.syscalls import Call, Supervisor


def worked(folder: Path, images: int = 3) -> Place:
    place = Place(folder)
    place.drop_many(range(images))
    assert place.run_once().returncode == 0
    return place


def of_the_ledger(call: Call) -> int:
    """SQLite turns EIO into SQLITE_CORRUPT."""
    return errno.EIO if call.name == "read" and b"/state/ledger.sqlite" in call.path else 0


def test_a_ledger_whose_log_cannot_be_read_for_a_while_pauses_the_daemon_which_goes_on(
    tmp_path: Path,
) -> None:
    place, failing = Place(tmp_path), list[bool]()

    def decide(call: Call) -> int:
        return errno.EIO if failing and call.name == "read" and call.path.endswith(b"-wal") else 0

    with Supervisor(tmp_path, decide, reads=True) as supervisor:
        with Daemon(place, supervisor=supervisor.path) as daemon:
            place.drop_many(range(5))
            daemon.wait_idle(5)
            failing.append(True)
            place.drop_many(range(5, 10))
            status = daemon.wait_until(lambda status: status["obstacles"], "a pause")
            assert f"{place.site.ledger} cannot be used: disk I/O error" in str(status["obstacles"])
            assert daemon.get("/readyz")[0] == 503
            failing.clear()
            daemon.wait_idle(10)
            daemon.wait_until(lambda status: not status["obstacles"], "the end of the pause")
            assert daemon.stop() == 0
    place.assert_kept(DONE=10)


@pytest.mark.parametrize(
    "command", ["run --once", "list", "status", "show 1", "verify", "repair", "export - -f jsonl"]
)
def test_a_ledger_that_the_disk_does_not_deliver_is_not_called_damaged_by_any_command(
    tmp_path: Path, command: str
) -> None:
    place = worked(tmp_path)
    with Supervisor(tmp_path, of_the_ledger, reads=True) as supervisor:
        refused = place.command(*command.split(), supervisor=supervisor.path)
    assert refused.returncode == os.EX_IOERR, refused.stderr
    assert "its disk" in refused.stderr
    assert not any(word in refused.stderr for word in ("restore", "visiond repair", "Traceback"))
    place.assert_kept(DONE=3)


def test_a_sidecar_that_cannot_be_read_is_unreadable_and_left_alone(tmp_path: Path) -> None:
    place = worked(tmp_path)
    sidecar = bytes(place.site.results / "00001.ppm.json")
    before = Path(os.fsdecode(sidecar)).stat()
    for command in ("verify", "repair"):
        with Supervisor(
            tmp_path,
            lambda call: errno.EIO if call.path == sidecar and call.name in ("open", "read") else 0,
            reads=True,
        ) as supervisor:
            run = place.command(command, "--json", supervisor=supervisor.path)
        assert json.loads(run.stdout)["counts"] == {"whole": 2, "unreadable": 1}
        assert run.returncode == 1
    assert Path(os.fsdecode(sidecar)).stat() == before
    assert place.command("verify").returncode == 0


def test_what_sqlite_calls_damaged_is_so_only_if_a_second_reading_agrees(tmp_path: Path) -> None:
    place = worked(tmp_path)
    claim = sqlite3.DatabaseError("database disk image is malformed")
    claim.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    assert isinstance(schema.explain(place.site.ledger, claim), LedgerUnusable)
    with place.site.ledger.open("r+b") as file:
        file.seek(4096)
        file.write(bytes(3 * 4096))
    assert isinstance(schema.explain(place.site.ledger, claim), LedgerDamaged)


def test_damage_is_not_believed_while_the_disk_does_not_deliver_every_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = worked(tmp_path)
    claim = sqlite3.DatabaseError("database disk image is malformed")
    claim.sqlite_errorcode = sqlite3.SQLITE_CORRUPT

    def refuse(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def say_so_again(*_: object) -> None:
        raise claim

    monkeypatch.setattr(soundness, "check_integrity", say_so_again)
    assert isinstance(schema.explain(place.site.ledger, claim), LedgerDamaged)
    monkeypatch.setattr(os, "pread", refuse)
    assert isinstance(schema.explain(place.site.ledger, claim), LedgerUnusable)


@pytest.mark.parametrize("text", ["Page 7: unable to get the page. error code=8458", "failed to get page 9"])
def test_a_page_that_an_integrity_check_could_not_read_is_an_error_of_the_disk(text: str) -> None:
    class Connection(sqlite3.Connection):
        def execute(self, *_: object) -> sqlite3.Cursor:
            return super().execute("SELECT ?", (text,))

    connection = sqlite3.connect(":memory:", factory=Connection)
    with pytest.raises(sqlite3.DatabaseError) as caught:
        soundness.check_integrity(connection)
    connection.close()
    assert soundness.code_of(caught.value) == sqlite3.SQLITE_IOERR


def test_lack_of_memory_in_sqlite_is_no_damage(tmp_path: Path) -> None:
    trouble = schema.explain(tmp_path / "ledger.sqlite", MemoryError())
    assert isinstance(trouble, LedgerUnusable)
    assert "too little memory" in str(trouble)


def test_an_index_of_the_search_that_the_disk_does_not_deliver_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = Index(tmp_path / "search")
    claim = sqlite3.DatabaseError("database disk image is malformed")
    claim.sqlite_errorcode = sqlite3.SQLITE_CORRUPT

    def refuse(*_: object) -> None:
        raise claim

    monkeypatch.setattr("daemon.search.index._about", refuse)
    with pytest.raises(SearchUnusable) as caught:
        index.about()
    assert (tmp_path / "search" / "index.sqlite").exists()
    assert caught.value.exit_status == os.EX_IOERR
    index.close()


def test_a_name_is_not_taken_for_free_while_the_disk_does_not_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: bytes) -> os.stat_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    monkeypatch.setattr(os, "lstat", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        sources.taken_names(bytes(tmp_path / "a.ppm"), 1)


def test_a_reader_names_the_disk_and_reads_again_when_it_delivers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = worked(tmp_path)
    reader = Reader(place.site.ledger)
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR
    with pytest.raises(LedgerUnusable), reader.lend():
        raise error
    assert len(reader.inboxes()) == 1
    reader.close()
