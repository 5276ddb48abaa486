"""Rows of skipped files that are gone: real folders, mounts and SQLite."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from daemon.config.sections import Inbox
from daemon.core.jobs import Ending, Failure, File, Job, JobStatus, Placed, Version
from daemon.inbox import deleted, unavailable
from daemon.inbox.watcher import Watcher
from daemon.ledger import publications
from daemon.ledger.ledger import Ledger
from daemon.ledger.reading import Stopped
from daemon.ledger.records import Reader
from daemon.maintenance import forgetting, pruning
from daemon.maintenance.forgetting import Forgotten, forget_skipped, remove
from daemon.monitoring.counts import Counts
from daemon.monitoring.metrics import Metrics
from daemon.system.mounts import FolderIdentity, Mount
from stages.contract.base import Reason
from tests.daemon.maintenance.test_pruning import seen_by_others
from tests.daemon_process import Daemon, Place, picture, seeded, until, wait_for
from tests.faults.test_disk import mounted
from tests.makers import Commits, done, failed

pytestmark = pytest.mark.anyio

COARSE = 5  # CLOCK_REALTIME_COARSE, by which Linux stamps files: up to some milliseconds late


async def stamped_later() -> None:
    """Wait until whatever changes now is stamped after all that has been seen."""
    now = time.time()
    await until(lambda: time.clock_gettime(COARSE) > now)


class Site:
    """An inbox with skipped files, and the daemon's parts that forget them."""

    def __init__(self, inbox: Path, ledger: Ledger) -> None:
        self.inbox, self.ledger = inbox, ledger
        self.metrics = Metrics()
        self.reader = Reader(ledger.path)
        self.watcher = Watcher({}, self.reader, 60.0, self.metrics)

    async def start(self, **settings: Any) -> None:
        """What a start of the daemon does: the first scan."""
        there = {1: Inbox(**{"path": self.inbox, "settle_seconds": 0.0} | settings)}
        self.watcher = Watcher(there, self.reader, 60.0, self.metrics)
        await self.watcher.run(self._admit, once=True)
        self.metrics.counts = Counts()
        self.metrics.counts.begin(self.reader.counts())

    async def _admit(self, files: list[File]) -> None:
        await self.ledger.admit([file._replace(regular=False) for file in files])  # as if each was a link

    async def drop(self, *paths: str, data: bytes = b"no image") -> None:
        """Files that are skipped."""
        for path in paths:
            (self.inbox / path).parent.mkdir(parents=True, exist_ok=True)
            (self.inbox / path).write_bytes(data)
        await self.start()
        await stamped_later()

    async def forget(self, stop: Callable[[], bool] = lambda: False) -> Forgotten:
        return await forget_skipped(self.ledger, self.watcher.folders, self.metrics.counts, stop)

    def listed(self, *states: JobStatus) -> list[str]:
        """The files whose newest version has one of these states: skipped, unless others are named."""
        wanted = states or (JobStatus.SKIPPED,)
        found = [record for state in wanted for record in self.reader.newest(state, 9999)]
        assert self.metrics.counts.of(JobStatus.SKIPPED) == self.reader.counts()[JobStatus.SKIPPED]
        return sorted(os.fsdecode(record.path) for record in found)


@pytest.fixture
async def site(inbox: Path, ledger: Ledger) -> AsyncIterator[Site]:
    made = Site(inbox, ledger)
    await made.start()
    yield made
    made.reader.close()


def rows(ledger: Ledger, query: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(ledger.path)) as connection:
        return connection.execute(query).fetchall()


# What is forgotten


async def test_files_that_were_deleted_leave_the_list_and_those_that_are_there_stay(site: Site) -> None:
    await site.drop("a.txt", "there.txt", "folder/b.txt", "folder/inner/c.txt", "file/d.txt")
    (site.inbox / "a.txt").unlink()
    shutil.rmtree(site.inbox / "folder")
    shutil.rmtree(site.inbox / "file")
    (site.inbox / "file").touch()
    forgotten = await site.forget()
    assert site.listed() == ["there.txt"]
    assert forgotten.sentence() == "forgot skipped files: 4 deleted"
    assert (await site.forget()).sentence() == "no skipped file is gone"


async def test_files_that_the_inbox_ignores_since_leave_the_list_though_they_are_there(site: Site) -> None:
    await site.drop("a.txt", "notes/b.md", "notes/c.md", "d.md")
    await site.start(ignore=["notes/", "a.*"])
    assert (await site.forget()).sentence() == "forgot skipped files: 3 ignored"
    assert site.listed() == ["d.md"]
    await site.start()
    assert site.listed() == [
        "a.txt",
        "d.md",
        "notes/b.md",
        "notes/c.md",
    ]  # without the patterns they are found again


async def test_all_versions_of_a_file_go(site: Site) -> None:
    for data in (b"one", b"another", b"the third"):
        await site.drop("log.txt", data=data)
    assert rows(site.ledger, "SELECT COUNT(*) FROM image") == [(3,)]
    (site.inbox / "log.txt").unlink()
    assert (await site.forget()).deleted == 3
    assert rows(site.ledger, "SELECT COUNT(*) FROM image") == [(0,)]


@pytest.mark.parametrize(("on_success", "left"), [("keep", []), ("move", ["a.zip"]), ("delete", ["a.zip"])])
async def test_an_archive_that_the_daemon_itself_took_out_of_the_inbox_stays(
    site: Site, on_success: str, left: list[str]
) -> None:
    await site.drop("a.zip")
    await site.ledger.run(lambda connection: connection.execute("UPDATE image SET reason = 'unpacked'"))
    (site.inbox / "a.zip").unlink()
    await site.start(on_success=on_success)
    await site.forget()
    assert site.listed() == left


async def test_of_a_store_no_object_is_asked_for_and_only_ignored_ones_go(
    ledger: Ledger, inbox: Path
) -> None:
    await ledger.register([(inbox, 0), (b"s3://bucket/scans", 0)], [])
    for path in (b"a.txt", b"b.md"):
        await ledger.admit([File(2, path, Version(1, 2, 3, 4), regular=False)])
    with contextlib.closing(Reader(ledger.path)) as reader:
        watcher = Watcher({2: Inbox(url="s3://bucket/scans", ignore=["*.md"])}, reader, 60.0, Metrics())
        done = await forget_skipped(ledger, watcher.folders, Metrics().counts, lambda: False)
        assert done.sentence() == "forgot skipped files: 1 ignored"
        assert [record.path for record in reader.newest(JobStatus.SKIPPED, 9)] == [b"a.txt"]


async def test_rows_of_inboxes_that_are_not_configured_stay(site: Site) -> None:
    await site.drop("a.txt")
    (site.inbox / "a.txt").unlink()
    assert await forget_skipped(site.ledger, {}, site.metrics.counts, lambda: False) == Forgotten()
    assert site.listed() == ["a.txt"]


# What is not known to be deleted


def put_away(inbox: Path) -> None:
    inbox.rename(inbox.with_name("aside"))


def put_another(inbox: Path) -> None:
    """A folder in its place, from which something was deleted since."""
    put_away(inbox)
    inbox.mkdir()
    (inbox / "new").touch()
    (inbox / "new").unlink()


@pytest.mark.parametrize("hide", [put_away, put_another])
@pytest.mark.parametrize("meanwhile", [False, True])
async def test_nothing_is_forgotten_while_the_inbox_is_away_or_another_folder_has_its_place(
    site: Site, monkeypatch: pytest.MonkeyPatch, hide: Callable[[Path], None], meanwhile: bool
) -> None:
    await site.drop("a.txt", "folder/b.txt")
    real, hiding = deleted._is_missing, [hide]

    def look(*of: Any) -> bool:
        """During the look it goes away."""
        if hiding:
            hiding.pop()(site.inbox)
        return real(*of)

    if meanwhile:
        monkeypatch.setattr(deleted, "_is_missing", look)
    else:
        hide(site.inbox)
    forgotten = await site.forget()
    assert site.listed() == ["a.txt", "folder/b.txt"]
    assert forgotten.deleted == forgotten.hidden == 0
    assert str(site.inbox) in forgotten.away[1]
    assert "its skipped files stay" in forgotten.sentence()


@contextlib.contextmanager
def unmounted(folder: Path) -> Iterator[None]:
    subprocess.run(["umount", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-t", "tmpfs", "visiond-test", folder], check=True)


async def test_an_inbox_that_is_empty_in_place_of_its_mount_at_the_start_loses_no_row(
    tmp_path: Path, ledger: Ledger
) -> None:
    disk = tmp_path / "disk"
    with mounted(disk, "1m"):
        site = Site(disk, ledger)
        await site.drop("a.txt", "folder/b.txt")
        with unmounted(disk):
            await site.start()
            forgotten = await site.forget()
            assert (forgotten.deleted, forgotten.hidden) == (0, 2)
            assert f"touch {disk}" in forgotten.sentence()
            assert site.listed() == ["a.txt", "folder/b.txt"]
            os.utime(disk)  # as the sentence says
            assert (await site.forget()).deleted == 2
        site.reader.close()


async def test_a_new_empty_folder_in_its_place_at_the_start_loses_no_row(site: Site) -> None:
    if not FolderIdentity.of(bytes(site.inbox)).born:
        pytest.skip("this file system does not say when a folder was made")
    await site.drop("a.txt")
    put_away(site.inbox)
    site.inbox.mkdir()
    await site.start()
    assert (await site.forget()).hidden == 1
    assert site.listed() == ["a.txt"]


@pytest.mark.parametrize("restarted", [False, True])
async def test_files_below_a_mount_in_the_inbox_stay_while_it_is_not_mounted(
    site: Site, restarted: bool
) -> None:
    disk = site.inbox / "disk"
    with mounted(disk, "1m"):
        await site.drop("a.txt", "disk/b.txt")
        (site.inbox / "a.txt").unlink()
        with unmounted(disk):
            if restarted:
                await site.start()
            else:
                os.utime(disk)  # so that only the list of mounts shows it
            assert (await site.forget()).deleted == 1
            assert site.listed() == ["disk/b.txt"]


async def test_a_mount_that_goes_during_the_look_makes_no_file_deleted(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = site.inbox / "disk"
    with mounted(disk, "1m"), contextlib.ExitStack() as going:
        await site.drop("disk/b.txt", "disk/c.txt")
        real = deleted._is_missing

        def look(folder: Any, file: deleted.SkippedFile) -> bool:
            if file.path == b"disk/b.txt":
                going.enter_context(unmounted(disk))
                os.utime(disk)
            return real(folder, file)

        monkeypatch.setattr(deleted, "_is_missing", look)
        forgotten = await site.forget()
        assert site.listed() == ["disk/b.txt", "disk/c.txt"]
        assert "came or went" in forgotten.sentence()


async def test_files_below_a_place_that_is_mounted_when_it_is_used_stay_while_it_is_not(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.drop("disk/b.txt")
    (site.inbox / "disk" / "b.txt").unlink()
    place = bytes(site.inbox / "disk")
    automatic, disk = Mount(place, b"autofs", b"0:50", b"/"), Mount(place, b"nfs4", b"0:51", b"/")
    monkeypatch.setattr(unavailable, "list_mounts", lambda: [automatic])
    assert (await site.forget()).hidden == 1
    monkeypatch.setattr(unavailable, "list_mounts", lambda: [automatic, disk])
    assert (await site.forget()).deleted == 1


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ELOOP])
async def test_a_file_that_cannot_be_looked_for_is_there(
    site: Site, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    await site.drop("a.txt")
    (site.inbox / "a.txt").unlink()

    def refuse(path: bytes) -> None:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(deleted, "os", SimpleNamespace(path=os.path, lstat=refuse))
    assert await site.forget() == Forgotten()
    assert site.listed() == ["a.txt"]


async def test_an_inbox_that_could_not_be_scanned_or_does_not_answer_loses_no_row(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.drop("a.txt")
    (site.inbox / "a.txt").unlink()
    there, hangs = site.watcher.folders[1], threading.Event()
    there.trouble = "Input/output error"
    assert "cannot be read: Input/output error" in (await site.forget()).sentence()
    there.trouble, there.first_scanned_at = "", 0.0
    assert "has not been scanned yet" in (await site.forget()).sentence()
    there.first_scanned_at = 1.0
    monkeypatch.setattr(there, "origin", SimpleNamespace(is_remote=False, answer_seconds=(0.05, 0.05)))
    monkeypatch.setattr(forgetting, "find_deleted", lambda *_: hangs.wait(30))
    try:
        assert str(site.inbox) in (await site.forget()).sentence()
    finally:
        hangs.set()
    assert site.listed() == ["a.txt"]


# Other rows


async def version(ledger: Ledger, path: bytes, number: int, *, regular: bool = True) -> Job:
    await ledger.admit([File(1, path, Version(number, number, number, number), regular)])
    return next(iter(await ledger.next_jobs(1, ())), Job(0, 1, path, b"", Version(0, 0, 0, 0), 0, 0.0))


def skip(job: Job) -> Ending:
    return Ending(job, JobStatus.SKIPPED, 2e9, 1, failure=Failure(Reason.NOT_AN_IMAGE, "no image"))


async def publish(ledger: Ledger, *endings: Ending) -> None:
    await ledger.end(endings)
    await ledger.mark_emitted([Placed(ending.job.id) for ending in endings])


@pytest.mark.parametrize("end", [done, failed])
async def test_a_version_before_that_was_done_or_failed_is_not_the_newest_again(
    site: Site, end: Callable[[Job], Ending]
) -> None:
    await publish(site.ledger, end(await version(site.ledger, b"scan", 1)))
    for number in (2, 3):
        await site.ledger.end([skip(await version(site.ledger, b"scan", number))])
    await site.start()
    before = site.reader.counts()
    await stamped_later()
    os.utime(site.inbox)
    assert (await site.forget()).deleted == 2
    assert site.listed() == []
    assert site.listed(JobStatus.GONE) == ["scan"]
    assert site.listed(JobStatus.DONE, JobStatus.FAILED) == []
    after = site.reader.counts()
    assert (after[JobStatus.SKIPPED], after[JobStatus.GONE]) == (0, 1)
    same = (JobStatus.DONE, JobStatus.FAILED, JobStatus.PENDING)
    assert [before[state] for state in same] == [after[state] for state in same]
    assert site.metrics.counts.of(JobStatus.GONE) == 1


async def test_only_rows_that_are_skipped_and_nothing_else_are_removed(site: Site) -> None:
    ledger = site.ledger
    await version(ledger, b"waits.jpg", 1)
    await publish(ledger, done(await version(ledger, b"done.jpg", 2)))
    await publish(ledger, failed(await version(ledger, b"failed.jpg", 3)))
    await ledger.end([Ending(await version(ledger, b"gone.jpg", 4), JobStatus.GONE, 2e9, 0)])
    for path in (b"plain", b"moved", b"had-a-result"):
        await ledger.end([skip(await version(ledger, path, 5))])
    await ledger.run(
        lambda c: c.execute(
            "UPDATE image SET location = CAST('/f' AS BLOB) WHERE CAST(path AS TEXT) = 'moved'"
        )
    )
    await ledger.run(
        lambda c: c.execute("UPDATE image SET models = '[1]' WHERE CAST(path AS TEXT) = 'had-a-result'")
    )
    query = "SELECT * FROM image WHERE CAST(path AS TEXT) <> 'plain'"
    before, ids = rows(ledger, query), [number for (number,) in rows(ledger, "SELECT id FROM image")]
    assert len(before) == 6
    removed = await ledger.run(partial(remove, ids=ids, why="deleted"))
    assert (len(removed.dropped), removed.left) == (1, [])
    assert rows(ledger, query) == before
    assert rows(ledger, "SELECT COUNT(*) FROM image") == [(6,)]


async def test_a_sink_that_waits_for_a_number_is_not_behind_for_ever(site: Site) -> None:
    ledger = site.ledger
    await ledger.run(partial(publications.open_sinks, names=["jsonl"]))
    await publish(ledger, failed(await version(ledger, b"a", 1)))
    [(number,)] = rows(ledger, "SELECT id FROM image")
    await ledger.run(
        lambda c: c.execute("UPDATE image SET status = 3, reason = 'not-an-image' WHERE id = ?", (number,))
    )
    assert await ledger.run(partial(remove, ids=[number], why="deleted")) == ([], [number])
    assert site.reader.published_after(0, 9) == ({}, 1)
    await ledger.run(partial(publications.move, name="jsonl", number=1))
    await ledger.run(lambda c: c.execute("UPDATE image SET status = 3 WHERE id = ?", (number,)))
    assert await ledger.run(partial(remove, ids=[number], why="deleted")) == ([number], [])
    assert rows(ledger, "SELECT COUNT(*) FROM publication") == [(0,)]


def test_after_any_history_of_a_file_forgetting_changes_nothing_that_others_see(tmp_path: Path) -> None:
    chance = seeded()
    ledger = Ledger(tmp_path / "ledger.sqlite")
    insert = "INSERT INTO image VALUES (?, 1, ?, 0, ?, 1, 1, 1, 0, ?, 1, 1, 0, ?, NULL, ?, ?, '{}', NULL, NULL, 1, ?, 0, NULL)"
    with contextlib.closing(ledger), contextlib.closing(sqlite3.connect(ledger.path)) as connection:
        connection.execute("INSERT INTO inbox (id, path) VALUES (1, CAST('/inbox' AS BLOB))")
        connection.execute("INSERT INTO model (id, stage, fingerprint, notice) VALUES (1, 'ocr', 'x', '')")
        for number in range(1, 4001):
            status = chance.choices(list(JobStatus), (1, 3, 3, 6, 2))[0]
            has_result = status is JobStatus.DONE or chance.random() < 0.1
            row = (number, b"%d" % chance.randrange(1500), number, status)
            location = b"/done/%d" % number if chance.random() < 0.1 else None
            models, emitted = "[1]" if has_result else None, chance.random() < 0.8
            connection.execute(insert, (*row, location, models, "A", emitted))
        connection.commit()

        def see() -> dict[str, Any]:
            seen = seen_by_others(ledger.path)
            listed = {number for (number,) in connection.execute("SELECT id FROM image WHERE status <> 3")}
            return seen | {"list": [number for number in seen["list"] if number in listed]}

        before = see()
        ids = chance.sample(range(1, 4001), 3000)
        removed = remove(connection, ids, "deleted")
        connection.commit()
        assert see() == before
        assert len(removed.dropped) > 400
        assert len(removed.left) > 50


# Bounds and interruptions


async def test_many_rows_go_in_small_groups_that_leave_time_for_others(
    site: Site, commits: Commits, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.drop(*(f"{number}.txt" for number in range(100)))
    for file in site.inbox.iterdir():
        file.unlink()
    monkeypatch.setattr(pruning, "CHUNK", 10)
    monkeypatch.setattr(pruning, "PORTION", 30)
    made: list[float] = []
    commits.observe = made.append
    assert (await site.forget()).deleted == 100
    assert len(made) == 10
    assert site.listed() == []


async def test_rows_that_come_meanwhile_are_for_the_next_time(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.drop("a.txt", "b.txt")
    monkeypatch.setattr(pruning, "CHUNK", 1)
    monkeypatch.setattr(pruning, "PORTION", 1)
    admitted = iter(range(5))
    looked: list[bytes] = []

    def look(folder: Any, files: Iterable[deleted.SkippedFile]) -> deleted.Missing:
        looked.extend(file.path for file in files)
        new = File(1, b"new-%d" % next(admitted), Version(9, 9, 9, 9), regular=False)
        anyio.from_thread.run(site.ledger.admit, [new])
        return deleted.Missing([])

    monkeypatch.setattr(forgetting, "find_deleted", look)
    await site.forget()
    assert sorted(looked) == [b"a.txt", b"b.txt"]


async def test_what_stops_it_leaves_whole_rows_and_the_next_time_goes_on(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.drop(*(f"{number}.txt" for number in range(9)))
    for file in site.inbox.iterdir():
        file.unlink()
    monkeypatch.setattr(pruning, "CHUNK", 3)
    asked = iter([False, True])
    with pytest.raises(Stopped):
        await site.forget(lambda: next(asked))
    assert len(site.listed()) == 6
    assert (await site.forget()).deleted == 6


async def test_a_file_that_comes_back_while_its_row_is_removed_is_found_by_the_next_scan(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.drop("a.txt")
    aside = site.inbox.with_name("aside.txt")
    (site.inbox / "a.txt").rename(aside)
    real = forgetting.remove

    def remove_late(connection: sqlite3.Connection, **of: Any) -> Any:
        aside.rename(site.inbox / "a.txt")
        return real(connection, **of)

    monkeypatch.setattr(forgetting, "remove", remove_late)
    assert (await site.forget()).deleted == 1
    await site.start()
    assert site.listed() == ["a.txt"]


# The daemon and the commands


def test_a_run_forgets_deleted_files_and_one_that_comes_back_is_skipped_again(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.drop("a.ppm", picture(1))
    notes = place.inbox() / "notes.txt"
    for _ in range(2):
        notes.write_text("no image")
        assert place.run_once().returncode == 0
        assert place.rows("SELECT CAST(path AS TEXT), reason FROM image WHERE status = 3") == [
            ("notes.txt", "not-an-image")
        ]
        notes.unlink()
        assert place.run_once().returncode == 0
        assert place.rows("SELECT CAST(path AS TEXT), status FROM image") == [("a.ppm", JobStatus.DONE)]
    assert place.rows("SELECT seq > MAX(id) FROM image, sqlite_sequence WHERE name = 'image'") == [(1,)]


def test_a_run_that_is_not_to_forget_does_not(tmp_path: Path) -> None:
    place = Place(tmp_path, {"upkeep": {"forget_days": 0}})
    (place.inbox() / "notes.txt").write_text("no image")
    place.run_once()
    (place.inbox() / "notes.txt").unlink()
    place.run_once()
    assert place.rows("SELECT COUNT(*) FROM image") == [(1,)]


def test_the_daemon_forgets_them_and_its_counts_and_lists_say_so(tmp_path: Path) -> None:
    upkeep = {"quiet_hours": "", "verify_days": 0, "vacuum_days": 0}
    place = Place(tmp_path, {"upkeep": upkeep | {"forget_days": 0}})
    place.drop("a.ppm", picture(1))
    notes = place.inbox() / "notes.txt"
    notes.write_text("no image")
    place.drop("there.txt", b"no image")
    with Daemon(place) as daemon:
        daemon.wait_until(lambda status: status["skipped"] == 2, "skipped files")
        assert daemon.stop() == 0
    notes.unlink()
    place.configure({"upkeep": {"forget_days": 1}})
    with Daemon(place) as daemon:
        status = daemon.wait_until(lambda s: [run["outcome"] for run in s["upkeep"]] == ["done"], "upkeep")
        assert status["upkeep"][0]["detail"] == "forgot skipped files: 1 deleted"
        assert daemon.status()["skipped"] == 1
        assert "notes.txt" not in place.command("list", "--status", "skipped").stdout
        assert "there.txt" in place.command("list", "--status", "skipped").stdout
        assert daemon.stop() == 0
    place.assert_kept(DONE=1, SKIPPED=1)


def test_a_kill_in_the_middle_loses_nothing_and_the_next_start_forgets_the_rest(tmp_path: Path) -> None:
    upkeep = {"quiet_hours": "", "verify_days": 0, "vacuum_days": 0}
    place = Place(tmp_path, {"upkeep": upkeep})
    place.drop("a.ppm", picture(1))
    assert place.run_once().returncode == 0
    insert = (
        "WITH RECURSIVE n (i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM n WHERE i < 20000) INSERT INTO image "
        "(inbox, path, device, inode, size, mtime_ns, ctime_ns, priority, status, seen_at, reason) "
        "SELECT 1, CAST(i || '.txt' AS BLOB), 0, i, 1, i, i, 0, 3, 1e9, 'empty' FROM n"
    )
    with contextlib.closing(sqlite3.connect(place.site.ledger)) as connection, connection:
        connection.execute(insert)

    def left() -> int:
        [(number,)] = place.rows("SELECT COUNT(*) FROM image WHERE status = 3")
        return int(number)

    with Daemon(place) as daemon:
        wait_for(lambda: left() < 20_000, "the first rows that go")
        daemon.kill()
    assert 0 < left() < 20_000
    assert left() % pruning.CHUNK == 20_000 % pruning.CHUNK, "whole groups"
    with Daemon(place) as daemon:
        daemon.wait_until(lambda status: status["skipped"] == 0, "the others")
        assert daemon.stop() == 0
    assert left() == 0
    place.assert_kept(DONE=1)
