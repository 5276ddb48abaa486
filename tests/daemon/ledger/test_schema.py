"""Ledgers of other schemas: an older one, made by hand, is migrated;
a newer one is refused and left untouched."""

from __future__ import annotations

import errno
import os
import queue
import re
import resource
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest

from daemon.core.errors import IdentityDamaged, LedgerDamaged, LedgerTooNew, LedgerUnusable
from daemon.core.jobs import Admitted, Outdated
from daemon.core.messages import Output
from daemon.ledger import checksums, identity, schema, soundness
from daemon.ledger.ledger import Ledger
from daemon.ledger.record import Model
from daemon.ledger.records import Reader
from daemon.ledger.rows import read_stored
from daemon.system.systemd import Notifier
from tests.daemon_process import PATIENCE, NotifySocket, Place, seeded, wait_for
from tests.faults.syscalls import Call, Supervisor
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


def test_an_older_ledger_gets_exactly_the_tables_of_a_new_one_and_keeps_its_rows(
    older: Path, tmp_path: Path
) -> None:
    """A change of the schema needs a migration of older ledgers."""
    schema.connect(older).close()
    schema.connect(tmp_path / "new.sqlite").close()
    assert tables_of(older) == tables_of(tmp_path / "new.sqlite")
    with closing(Reader(older)) as reader:
        (record,) = reader.find("a.jpg")
    assert (record.bin, record.width, record.outputs["ocr"].payload) == (
        "C",
        640,
        b'{"lines":[],"count":0,"area_ratio":0.0}',
    )


@pytest.mark.anyio
async def test_an_older_ledger_knows_its_files_although_their_device_number_has_changed(older: Path) -> None:
    with closing(Ledger(older)) as ledger:
        assert await ledger.register([(Path("/srv/inbox"), 0)], []) == [1]
        assert await ledger.admit([make_file(b"a.jpg"), make_file(b"b.jpg", inode=3)]) == Admitted(0, 0, 0)
        assert (await ledger.admit([make_file(b"a.jpg", inode=3)])).pending == 1


def test_an_older_ledger_is_read_without_being_changed(older: Path) -> None:
    before = older.read_bytes()
    with closing(Reader(older)) as reader:
        reader.check()
        assert [record.damage for record in reader.newest(None, 9)] == ["", ""]
        assert [record.bin for record in reader.finished()] == ["C"]
        assert reader.count_outdated([b"/srv/inbox"], every_stage=True) == Outdated(0), (
            "it does not know which models are current"
        )
    assert older.read_bytes() == before


def test_an_older_ledger_gets_an_id_once_and_the_file_that_has_it_too(older: Path) -> None:
    Ledger(older).close()
    given = identity.read(older.parent)
    assert given
    Ledger(older).close()
    assert identity.read(older.parent) == given


def test_an_older_backup_takes_the_id_of_the_ledger_whose_place_it_takes(older: Path) -> None:
    backup = older.read_bytes()
    Ledger(older).close()
    given = identity.read(older.parent)
    older.write_bytes(backup)
    Ledger(older).close()
    assert identity.read(older.parent) == given


def test_a_ledger_without_its_identity_file_gets_it_again(older: Path) -> None:
    Ledger(older).close()
    given = identity.read(older.parent)
    (older.parent / "identity").unlink()
    Ledger(older).close()
    assert identity.read(older.parent) == given


@pytest.mark.parametrize("content", [b"", b"{", b'{"ledger":7}', b'{"ledger":"a","last_number":-1}'])
def test_an_identity_file_that_is_damaged_is_named(older: Path, content: bytes) -> None:
    Ledger(older).close()
    (older.parent / "identity").write_bytes(content)
    with pytest.raises(
        IdentityDamaged,
        match=r"identity, which says which ledger belongs here, is damaged: .*`visiond repair`",
    ):
        Ledger(older)


DAMAGE = {
    "a column of another name": "PRAGMA writable_schema = 1; UPDATE sqlite_schema SET sql = replace(sql, 'payload', 'paxload')",
    "an index has lost its order": "PRAGMA writable_schema = 1; UPDATE sqlite_schema SET rootpage = 3 WHERE name = 'owed'",
    "a number behind the last": "UPDATE sqlite_sequence SET seq = 1",
    "numbers run out": "UPDATE sqlite_sequence SET seq = 1 << 60",
    "an index that is gone": "DROP INDEX owed",
}


@pytest.mark.parametrize("small", [True, False], ids=["small", "large"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_ledger_with_a_changed_structure_is_found_when_it_is_opened(
    older: Path, monkeypatch: pytest.MonkeyPatch, damage: str, small: bool
) -> None:
    if not small:
        monkeypatch.setattr(soundness, "SMALL_BYTES", 0)
    Ledger(older).close()
    with closing(sqlite3.connect(older)) as connection:
        connection.executescript(DAMAGE[damage])
    if small or "order" not in damage:
        with pytest.raises(LedgerDamaged, match="`visiond repair`"):
            Ledger(older)


def flip_after(path: Path, place: bytes) -> None:
    """Migrate an older ledger, remove what is left of the old tables, and flip a bit of the letter after |."""
    Ledger(path).close()
    with closing(schema.connect(path)) as connection:
        connection.execute("VACUUM")
    data = bytearray(path.read_bytes())
    before, after = place.split(b"|")
    data[data.index(before + after) + len(before)] ^= 0x80
    path.write_bytes(data)


@pytest.mark.parametrize("entry", [b"table|imageimage", b"index|owedimage", b"CR|EATE TABLE image"])
@pytest.mark.parametrize("open_it", [Ledger, Reader], ids=["writing", "reading"])
def test_a_flipped_bit_in_the_list_of_tables_is_damage(
    older: Path, entry: bytes, open_it: Callable[[Path], object]
) -> None:
    """SQLite's message quotes the name or the word, which is then not UTF-8."""
    flip_after(older, entry)
    with pytest.raises(LedgerDamaged, match=r"its list of tables is damaged.*`visiond repair`"):
        open_it(older)


@pytest.mark.parametrize("column", [b"see|n_at REAL", b"KEY,\n    p|ath BLOB"])
def test_a_flipped_bit_in_the_name_of_a_column_is_damage(older: Path, column: bytes) -> None:
    """SQLite's message quotes the damaged name, or the one in our statement."""
    flip_after(older, column)
    with pytest.raises(LedgerDamaged, match="not as visiond makes them"), schema.trouble_named(older):
        with closing(Reader(older)) as reader:
            reader.newest(None, 9)


def test_a_file_that_was_cut_is_refused(older: Path) -> None:
    Ledger(older).close()
    os.truncate(older, older.stat().st_size - 4096)
    with pytest.raises(LedgerDamaged, match="it is cut"):
        Ledger(older)


# Forks for each first start, so that the imports are made once. Prints the process id, then the exit status.
STARTS = """
import os, sys
from pathlib import Path
from daemon.ledger.ledger import Ledger
from tests.faults.syscalls import submit
for line in sys.stdin:
    supervisor, path = line.split("\\t")
    if not (child := os.fork()):
        submit(supervisor)
        Ledger(Path(path.strip())).close()
        os._exit(0)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_first_start_survives_kill_9_at_any_call(tmp_path: Path) -> None:
    """Every ninth of the calls that change files, from a random one on."""
    at, status = seeded().randrange(9), -signal.SIGKILL
    command = [sys.executable, "-P", "-c", STARTS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin
        assert server.stdout
        while status == -signal.SIGKILL:
            folder = tmp_path / str(at)
            folder.mkdir()
            path, started = folder / "state" / "ledger.sqlite", queue.SimpleQueue[int]()

            def decide(_call: Call) -> int:
                if len(supervisor.calls) == at + 1:  # noqa: B023
                    os.kill(started.get(timeout=PATIENCE), signal.SIGKILL)  # noqa: B023
                return 0

            with Supervisor(folder, decide) as supervisor:
                print(supervisor.path, path, sep="\t", file=server.stdin, flush=True)
                started.put(int(server.stdout.readline()))
                status = int(server.stdout.readline())
            Ledger(path).close()
            at += 9
    assert (status, at > 50) == (0, True)


def test_migrations_run_once_and_in_order(older: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        schema, "MIGRATIONS", [*schema.MIGRATIONS, NEXT, "ALTER TABLE image RENAME COLUMN note TO remark;"]
    )
    monkeypatch.setattr(schema, "find_fault", lambda *_, **__: "")  # a new ledger has other tables
    for _ in range(2):
        with closing(schema.connect(older)) as connection:
            assert schema.read_version(older, connection) == schema.newest()
            rows = connection.execute("SELECT remark FROM image ORDER BY id").fetchall()
            assert [row[0] for row in rows] == [None, "truncated: its end is missing"]


def test_a_migration_that_cannot_be_done_leaves_the_ledger_as_it_was(
    older: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tables_of(older)
    monkeypatch.setattr(
        schema, "MIGRATIONS", [*schema.MIGRATIONS, NEXT, "INSERT INTO no_such_table VALUES (1);"]
    )
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


def test_the_message_says_when_the_ledger_cannot_be_opened_for_lack_of_descriptors(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(LedgerUnusable, match=r"cannot open more files.*LimitNOFILE") as caught:
            schema.connect(tmp_path / "ledger.sqlite")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert caught.value.errno == errno.EMFILE
    assert "disk" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("ledger.sqlite", errno.EIO),
        ("identity", errno.EIO),
        ("identity", errno.EDQUOT),
        ("upkeep", errno.EACCES),
    ],
)
def test_a_file_of_the_state_folder_that_cannot_be_read_is_named_and_is_no_defect(
    tmp_path: Path, name: str, number: int
) -> None:
    with pytest.raises(LedgerUnusable, match=rf"{name} cannot be used: {os.strerror(number)}\. Check its"):
        with schema.trouble_named(tmp_path / "ledger.sqlite"):
            raise OSError(number, os.strerror(number), str(tmp_path / name))
    for other in (tmp_path / "no" / name, tmp_path / "missing"):
        with pytest.raises(FileNotFoundError), schema.trouble_named(tmp_path / "ledger.sqlite"):
            other.read_bytes()
    with (
        pytest.raises(OSError, match="Bad file descriptor"),
        schema.trouble_named(tmp_path / "ledger.sqlite"),
    ):
        os.stat(9999)


@pytest.mark.parametrize("tables", [0, 1, 200])
def test_a_ledger_without_tables_is_blank_and_one_whose_list_of_tables_is_on_further_pages_is_not(
    tmp_path: Path, tables: int
) -> None:
    file = tmp_path / "ledger.sqlite"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE dropped (number)")
        for number in range(tables):
            connection.execute(f"CREATE TABLE kept_{number} (number)")
        connection.execute("DROP TABLE dropped")
    is_on_further_pages = file.read_bytes()[soundness.HEADER_BYTES] == 5
    assert (soundness.is_blank(file), is_on_further_pages) == (not tables, tables == 200)


def test_what_a_sink_of_an_older_ledger_does_not_have_comes_after_all_that_was_published(
    tmp_path: Path,
) -> None:
    path = _with_outbox(tmp_path, waiting=[5, 2, 5], delivered=40)
    with closing(schema.connect(path)) as connection:
        numbers = connection.execute("SELECT image FROM publication ORDER BY number").fetchall()
        behind = connection.execute(
            "SELECT image FROM publication, sink WHERE number > place ORDER BY number"
        )
        assert [row[0] for row in numbers] == [1, 3, 4, 2, 5], "image 3 is held, and was published"
        assert [row[0] for row in behind.fetchall()] == [2, 5]
        connection.execute("INSERT INTO publication (image) VALUES (6)")
        assert (
            connection.execute("SELECT number - place FROM publication, sink WHERE image = 6").fetchone()[0]
            == 4
        )


@contextmanager
def empty_ledger(folder: Path, version: int) -> Iterator[tuple[Path, sqlite3.Connection]]:
    """An older ledger without rows."""
    path = folder / "state" / "ledger.sqlite"
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript(SCHEMA_1.read_text() + "".join(schema.MIGRATIONS[: version - 1]))
        for table in ("image", "result", "content", "model", "inbox"):
            connection.execute(f"DELETE FROM {table}")
        connection.execute(f"PRAGMA user_version = {version}")
        yield path, connection


def _with_outbox(tmp_path: Path, *, waiting: list[int], delivered: int) -> Path:
    """A ledger of schema 6 with images 1 to 5, which are published, and an outbox from which
    this many records have left."""
    with empty_ledger(tmp_path, 6) as (path, connection):
        connection.executescript(
            f"INSERT INTO outbox VALUES ({delivered}, 1); DELETE FROM outbox; INSERT INTO sink VALUES ('x', {delivered}, 0);"
        )
        connection.executemany("INSERT INTO outbox (image) VALUES (?)", [(image,) for image in waiting])
        connection.executemany(
            "INSERT INTO image (id, inbox, path, device, inode, size, mtime_ns, ctime_ns, priority, status, seen_at, emitted) "
            "VALUES (?, 1, ?, 0, 1, 1, 1, 1, 0, 1, 0, 1)",
            [(image, b"%d.jpg" % image) for image in range(1, 6)],
        )
        connection.execute("UPDATE image SET emitted = 0, finished_at = 9, not_before = 9 WHERE id = 3")
    return path


def digest_of(number: int) -> bytes:
    return sha256(b"%d" % number).digest()


@pytest.fixture
def unordered(tmp_path: Path) -> Path:
    """A ledger of schema 9: six contents with two results each, and one without results. One of the twelve results is
    damaged."""
    with empty_ledger(tmp_path, 9) as (path, connection):
        connection.execute("INSERT INTO model VALUES (1, 'ocr', 'f', '', 1), (2, 'yolo', 'f', '', 1)")
        for number in range(1, 8):
            content = (digest_of(number), "JPEG", number, 480, 1)
            row = (*content, checksums.of_content(*content))
            connection.execute("INSERT INTO content VALUES (?, ?, ?, ?, ?, ?)", row)
            for model, stage in ((1, "ocr"), (2, "yolo")) if number < 7 else ():
                checksum = checksums.of_result(content[0], Model(stage, "f", ""), Output(b"%d" % number, 0.5))
                result = (content[0], model, b"%d" % number, 0.5, checksum + ((number, model) == (2, 1)))
                connection.execute("INSERT INTO result VALUES (?, ?, ?, ?, ?)", result)
    return path


def test_results_of_an_older_ledger_get_the_order_in_which_they_were_made(unordered: Path) -> None:
    with closing(sqlite3.connect(unordered)) as connection, connection:
        connection.execute("DELETE FROM content WHERE width = 1")  # as a repair removed damaged ones
    with closing(Reader(unordered)) as reader:
        assert len(list(reader.damaged_rows())) == 1
    with closing(schema.connect(unordered)) as connection:
        found = connection.execute(
            "SELECT digest, width, model, payload FROM content LEFT JOIN result ON result.content = content.id "
            "ORDER BY content.id, result.id"
        ).fetchall()
    made = [(digest_of(n), n if n > 1 else 0, model, b"%d" % n) for n in range(1, 7) for model in (1, 2)]
    assert [tuple(row) for row in found] == [*made, (digest_of(7), 7, None, None)]


def test_without_room_to_write_all_results_again_the_ledger_is_unchanged(
    unordered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = unordered.read_bytes()
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage_with(2 * len(before) - 1))
    with pytest.raises(LedgerUnusable, match=r"from schema 9 to 1\d: this needs 1 MiB of free space"):
        schema.connect(unordered)
    assert unordered.read_bytes() == before
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage_with(2 * len(before)))
    schema.connect(unordered).close()


def usage_with(free: int) -> SimpleNamespace:
    return SimpleNamespace(free=free)


def test_a_migration_needs_no_index_of_the_old_tables(
    unordered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of an index may be damaged although the old visiond never read it."""
    monkeypatch.setattr(
        soundness, "SMALL_BYTES", 0
    )  # otherwise the whole of a small ledger is checked, and it is refused
    with closing(sqlite3.connect(unordered)) as connection, connection:
        connection.execute("INSERT INTO result VALUES (?, 3, x'33', 0.5, NULL)", (digest_of(1),))
        query = "SELECT rootpage FROM sqlite_schema WHERE name = 'sqlite_autoindex_result_1'"
        ((page,),) = connection.execute(query).fetchall()
    data = bytearray(unordered.read_bytes())
    place = data.index(digest_of(1) + b"\x02", 4096 * (page - 1))
    assert place < 4096 * page
    data[place] ^= 0x40  # between two others of the same digest
    unordered.write_bytes(data)
    with closing(schema.connect(unordered)) as connection:
        counted = connection.execute("SELECT COUNT(*), COUNT(DISTINCT content) FROM result").fetchone()
    assert tuple(counted) == (13, 6)


def test_a_migration_finds_contents_that_a_search_does_not_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit of an inner page is flipped: a search for most digests behind it ends on the wrong page."""
    monkeypatch.setattr(soundness, "SMALL_BYTES", 0)  # otherwise all of it is checked, and it is refused
    with empty_ledger(tmp_path, 9) as (path, connection):
        contents = [(digest_of(number), "JPEG", 640, 480, 1, None) for number in range(3000)]
        connection.executemany("INSERT INTO content VALUES (?, ?, ?, ?, ?, ?)", contents)
        results = [(digest_of(number), 1, b"{}", 0.5, None) for number in range(3000)]
        connection.executemany("INSERT INTO result VALUES (?, ?, ?, ?, ?)", results)
        query = "SELECT rootpage FROM sqlite_schema WHERE name = 'content'"
        ((page,),) = connection.execute(query).fetchall()
    data, start = bytearray(path.read_bytes()), 4096 * (page - 1)
    (cells,) = struct.unpack_from(">H", data, start + 3)
    (cell,) = struct.unpack_from(">H", data, start + 12 + cells // 2 * 2)
    digests = {digest for digest, *_ in contents}
    place = next(at for at in range(start + cell, start + 4096) if bytes(data[at : at + 32]) in digests)
    data[place] ^= 0x20
    path.write_bytes(data)
    with closing(schema.connect(path)) as connection:
        assert connection.execute("SELECT COUNT(*) FROM content WHERE format = 'JPEG'").fetchone()[0] == 3000


def test_a_repair_of_an_older_ledger_removes_only_what_is_damaged(unordered: Path) -> None:
    """The migration gives rows other ids, as those of pruned rows are free."""
    place = Place(unordered.parent.parent)
    with closing(sqlite3.connect(unordered)) as connection, connection:
        for table in ("result", "content"):
            connection.execute(f"DELETE FROM {table} WHERE digest = ?", (digest_of(1),))
    with closing(Reader(unordered)) as reader:
        _, results, _ = stored_in(reader)
    assert place.command("repair").returncode == 0
    with closing(Reader(unordered)) as reader:
        assert stored_in(reader) == (ANY, results, [])


def test_a_stop_signal_ends_a_migration_and_systemd_waits_for_one_that_goes_on(
    unordered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "STEPS", 50)
    notify = NotifySocket(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", str(notify.path))
    sent = Notifier.starting

    def interrupt(notifier: Notifier, text: str, seconds: float) -> None:
        sent(notifier, text, seconds)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Notifier, "starting", interrupt)
    with pytest.raises(KeyboardInterrupt):
        schema.connect(unordered)
    monkeypatch.setattr(Notifier, "starting", sent)
    told = "STATUS=migrating the ledger\nEXTEND_TIMEOUT_USEC=600000000"
    wait_for(lambda: [notice.text for notice in notify.notices] == [told], "a sign of life")
    notify.close()
    with closing(sqlite3.connect(unordered)) as connection:
        assert schema.read_version(unordered, connection) == 9
    schema.connect(unordered).close()


def test_a_reader_goes_on_when_an_older_ledger_is_migrated(unordered: Path) -> None:
    with closing(Reader(unordered)) as reader:
        before = stored_in(reader)
        schema.connect(unordered).close()
        assert stored_in(reader) == before


def test_stored_results_are_read_the_same_before_and_after_a_migration(unordered: Path) -> None:
    with closing(Reader(unordered)) as reader:
        before = stored_in(reader)
    schema.connect(unordered).close()
    with closing(Reader(unordered)) as reader:
        assert stored_in(reader) == before
    contents, results, damaged = before
    assert (len(contents), len(results)) == (7, 6)
    assert damaged == [f"the result of ocr of the bytes sha256:{digest_of(2).hex()}"]


def stored_in(reader: Reader) -> tuple[Any, Any, list[str]]:
    """Contents, results, and damaged rows."""
    with reader.lend() as connection:
        stored = read_stored(connection, [digest_of(number) for number in range(1, 8)], reader.models)
    return stored.contents, stored.results, list(reader.damaged_rows())
