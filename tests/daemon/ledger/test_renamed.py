"""A file that is renamed within its inbox keeps its row: the same number and result, and nothing new for the sinks."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from daemon.config.output import FOLDER_SINKS
from daemon.config.sections import Inbox
from daemon.core.jobs import Admitted, Ending, File, Job, JobStatus, Placed, Version
from daemon.inbox.folder import open_folder
from daemon.ledger import looks, publications
from daemon.ledger.joining import Name, find_other_names
from daemon.ledger.ledger import Ledger
from daemon.ledger.record import Record
from daemon.ledger.records import Reader
from daemon.ledger.statements import SQL
from daemon.results.outbox import Outbox
from daemon.system.mounts import FolderIdentity
from tests.daemon_process import Daemon, Place, picture
from tests.makers import MODELS, done, failed, make_file, make_job

pytestmark = pytest.mark.anyio


class Taken:
    """A sink."""

    def __init__(self) -> None:
        self.paths: list[bytes] = []

    async def append(self, records: Sequence[Record]) -> None:
        self.paths += [record.path for record in records]

    def problem(self) -> str:
        return ""


@pytest.fixture
async def kept(ledger: Ledger, inbox: Path) -> Ledger:
    """The inbox keeps its files."""
    await ledger.register([(inbox, 0)], MODELS, kept=[inbox])
    return ledger


@pytest.fixture
def reader(kept: Ledger) -> Iterator[Reader]:
    with closing(Reader(kept.path)) as opened:
        yield opened


def found(path: bytes, before: bytes = b"", **version: Any) -> File:
    """A file that was found; a rename gives it another change time."""
    return make_file(path, **version)._replace(before=(before,) * bool(before))


async def take(ledger: Ledger, *files: File) -> list[Job]:
    await ledger.admit(files)
    return await ledger.next_jobs(9, ())


async def end(ledger: Ledger, job: Job, data: bytes = b"data") -> Ending:
    [ending], *_ = await ledger.end([done(job, data=data)])
    return ending


async def process(
    ledger: Ledger, path: bytes, before: bytes = b"", data: bytes = b"data", **version: int
) -> Ending:
    """A file that is read, ended and published."""
    [job] = await take(ledger, found(path, before, **version))
    ending = await end(ledger, job, data)
    if ending.status is JobStatus.DONE:
        await ledger.mark_emitted([Placed(job.id)])
    return ending


def rows(ledger: Ledger) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(ledger.path)) as connection:
        return connection.execute("SELECT id, path, status, ctime_ns FROM image ORDER BY id").fetchall()


NOW = 1 << 62  # a change time later than that of any file
DONE, GONE, PENDING = JobStatus.DONE, JobStatus.GONE, JobStatus.PENDING


# The rows


async def test_a_file_with_a_new_name_keeps_its_row(kept: Ledger, reader: Reader) -> None:
    await process(kept, b"a.jpg")
    ending = await process(kept, b"b.jpg", b"a.jpg", ctime_ns=6)
    assert (ending.is_repeat, ending.left, ending.keeps_result) == (True, 1, True)
    assert rows(kept) == [(1, b"b.jpg", DONE, 6), (3, b"a.jpg", GONE, 5)]
    [record] = await kept.owed(0, 9)
    assert (record.id, record.path, record.former, record.damage) == (1, b"b.jpg", (b"a.jpg",), "")
    assert [(each.status, each.detail) for each in reader.find("a.jpg")] == [(GONE, "renamed to b.jpg")]
    reader.check()
    assert (await kept.admit([found(b"b.jpg", ctime_ns=6)])).pending == 0


async def test_a_renamed_file_has_a_new_number_for_the_search_and_its_old_one_for_sinks(
    kept: Ledger, reader: Reader
) -> None:
    await kept.run(lambda connection: publications.open_sinks(connection, ["quick", "slow"]))
    await process(kept, b"a.jpg")
    await process(kept, b"other.jpg", inode=9, data=b"other")
    await kept.run(lambda connection: publications.move(connection, "quick", 2))
    await process(kept, b"b.jpg", b"a.jpg", ctime_ns=6)
    assert await kept.mark_emitted([Placed(1)]) == {}
    assert await kept.owed(0, 9) == []
    assert {n: r.id for n, r in reader.published_after(0, 9)[0].items()} == {2: 2, 3: 1}
    for_sinks, last = reader.published_after(0, 9, for_sinks=True)
    assert ({n: (r.id, r.path) for n, r in for_sinks.items()}, last) == (
        {1: (1, b"b.jpg"), 2: (2, b"other.jpg")},
        2,
    )
    assert reader.published_after(2, 9, for_sinks=True) == ({}, 2)
    assert {name: behind for name, (behind, _) in reader.sinks().items()} == {"quick": 0, "slow": 3}


@pytest.mark.parametrize("sink", ["store", *sorted(FOLDER_SINKS)])
async def test_a_sink_whose_objects_have_the_names_of_files_gets_a_renamed_one(
    kept: Ledger, reader: Reader, sink: str
) -> None:
    """Otherwise a new file of the old name would replace the only object that it has."""
    await process(kept, b"a.jpg")
    sinks = {name: Taken() for name in (sink, "webhook")}
    outbox = await Outbox.open(kept, reader, sinks, lambda changes: None)
    await process(kept, b"b.jpg", b"a.jpg", ctime_ns=6)
    await kept.mark_emitted([Placed(1)])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outbox.run)
        outbox.note_renamed(2)
        await outbox.finish()
    assert (sinks[sink].paths, sinks["webhook"].paths) == ([b"b.jpg"], [])
    assert {name: behind for name, (behind, _) in reader.sinks().items()} == {sink: 0, "webhook": 0}


async def test_a_renamed_file_that_is_processed_again_is_given_to_sinks_again(
    kept: Ledger, reader: Reader
) -> None:
    await process(kept, b"a.jpg")
    await process(kept, b"b.jpg", b"a.jpg", ctime_ns=6)
    await kept.mark_emitted([Placed(1)])
    await kept.put_back(DONE, [1])
    [job] = await kept.next_jobs(1, ())
    ending = done(job, data=b"data")
    await kept.end([Ending(job, DONE, ending.at + 1, 1, ending.bin, ending.criteria)])
    assert await kept.mark_emitted([Placed(1)]) == {3: 1}
    assert list(reader.published_after(0, 9, for_sinks=True)[0]) == [3]


async def test_a_file_that_waits_gets_its_new_name_and_is_read_once(kept: Ledger) -> None:
    assert await kept.admit([found(b"a.jpg")]) == Admitted(1, 0, 0)
    assert await kept.admit([found(b"b.jpg", b"a.jpg", ctime_ns=6)]) == Admitted(0, 0, 0, renamed=1, left=1)
    assert rows(kept) == [(1, b"b.jpg", PENDING, 6), (2, b"a.jpg", GONE, 5)]
    [job] = await kept.next_jobs(9, ())
    assert (job.id, job.path) == (1, b"b.jpg")
    assert (await end(kept, job)).status is DONE
    assert await kept.mark_emitted([Placed(1)]) == {1: 1}


@pytest.mark.parametrize("status", [DONE, GONE])
async def test_an_attempt_under_the_old_name_comes_to_nothing(kept: Ledger, status: JobStatus) -> None:
    """It had read the file before it was renamed, or has not found it afterwards."""
    [job] = await take(kept, found(b"a.jpg"))
    await kept.admit([found(b"b.jpg", b"a.jpg", ctime_ns=6)])
    read = done(job, data=b"data")
    assert (await kept.end([read if status is DONE else Ending(job, status, 2e9, 0)])).newest == set()
    [again] = await kept.next_jobs(9, ())
    assert (again.id, again.path) == (1, b"b.jpg")
    assert (await kept.end([done(again, data=b"data")])).newest == {1}


async def test_other_bytes_are_another_image(kept: Ledger) -> None:
    """A file that was changed in place, or a new one with the inode of a deleted one, may have the same size and time."""
    await process(kept, b"a.jpg")
    ending = await process(kept, b"b.jpg", b"a.jpg", b"other", ctime_ns=6)
    assert (ending.status, ending.is_repeat) == (DONE, False)
    assert [row[:3] for row in rows(kept)] == [(1, b"a.jpg", DONE), (2, b"b.jpg", DONE)]
    assert await kept.run(lambda connection: connection.execute("SELECT * FROM renamed").fetchall()) == []


async def test_a_file_that_failed_keeps_its_failure(kept: Ledger) -> None:
    [job] = await take(kept, found(b"a.jpg"))
    await kept.end([failed(job)])
    await kept.mark_emitted([Placed(1)])
    [job] = await take(kept, found(b"b.jpg", b"a.jpg", ctime_ns=6))
    [ending], *_ = await kept.end([failed(job)])
    assert (ending.is_repeat, ending.failure) == (True, None)
    assert [row[:3] for row in rows(kept)] == [(1, b"b.jpg", JobStatus.FAILED), (3, b"a.jpg", GONE)]
    [record] = await kept.owed(0, 9)
    assert (record.reason, record.former, record.damage) == ("truncated", (b"a.jpg",), "")


async def test_a_file_that_no_longer_fails_under_its_new_name_is_another_image(kept: Ledger) -> None:
    [job] = await take(kept, found(b"a.jpg"))
    await kept.end([failed(job)])
    await kept.mark_emitted([Placed(1)])
    assert not (await process(kept, b"b.jpg", b"a.jpg", b"an image", ctime_ns=6)).is_repeat


async def test_a_rename_waits_until_the_image_is_published(kept: Ledger) -> None:
    """Its first sidecar is being written under the old name."""
    [job] = await take(kept, found(b"a.jpg"))
    await end(kept, job)
    [renamed] = await take(kept, found(b"b.jpg", b"a.jpg", ctime_ns=6))
    ending = await end(kept, renamed)
    assert (ending.status, ending.attempts, ending.failure) == (PENDING, 0, None)
    assert await kept.mark_emitted([Placed(1)]) == {1: 1}
    assert (await end(kept, renamed)).is_repeat
    [again] = await take(kept, found(b"c.jpg", b"b.jpg", ctime_ns=7))
    assert (await end(kept, again)).status is PENDING, "its sidecar is being moved"
    await kept.mark_emitted([Placed(1)])
    assert (await end(kept, again)).is_repeat
    assert [(r.id, r.path, r.former) for r in await kept.owed(0, 9)] == [(1, b"c.jpg", (b"b.jpg",))]


async def test_an_image_whose_source_cannot_leave_is_not_waited_for(kept: Ledger) -> None:
    [job] = await take(kept, found(b"a.jpg"))
    await end(kept, job)
    await kept.mark_emitted([Placed(1, is_held=True)])
    ending = await process(kept, b"b.jpg", b"a.jpg", ctime_ns=6)
    assert (ending.status, ending.is_repeat) == (DONE, False)


async def test_there_and_back_is_the_same_row(kept: Ledger) -> None:
    await process(kept, b"a.jpg")
    await process(kept, b"b.jpg", b"a.jpg", ctime_ns=6)
    await kept.mark_emitted([Placed(1)])
    assert (await process(kept, b"a.jpg", b"b.jpg", ctime_ns=7)).left == 0
    await kept.mark_emitted([Placed(1)])
    assert [row[:3] for row in rows(kept)] == [(1, b"a.jpg", DONE), (5, b"b.jpg", GONE)]
    folder = await process(kept, b"b.jpg", b"a.jpg", ctime_ns=7)
    assert folder.is_repeat, "a folder's new name changes no time of its files"


async def test_there_and_back_before_it_is_read_is_the_same_row(kept: Ledger) -> None:
    await kept.admit([found(b"a.jpg")])
    await kept.admit([found(b"b.jpg", b"a.jpg", ctime_ns=6)])
    await kept.admit([found(b"a.jpg", b"b.jpg", ctime_ns=7)])
    assert [row[:3] for row in rows(kept) if row[2] != GONE] == [(1, b"a.jpg", PENDING)]


async def test_a_new_file_under_the_old_name_is_a_new_image(kept: Ledger) -> None:
    await process(kept, b"a.jpg")
    await process(kept, b"a.jpg", inode=9, data=b"new")
    assert (await process(kept, b"b.jpg", b"a.jpg", ctime_ns=6)).left == 0
    assert [row[:3] for row in rows(kept)] == [(1, b"b.jpg", DONE), (2, b"a.jpg", DONE)]


async def test_two_files_that_swap_their_names_swap_their_rows(kept: Ledger) -> None:
    await process(kept, b"a.jpg", data=b"1")
    await process(kept, b"b.jpg", inode=9, data=b"2")
    first, second = await take(
        kept, found(b"b.jpg", b"a.jpg", ctime_ns=6), found(b"a.jpg", b"b.jpg", inode=9, ctime_ns=6)
    )
    assert (await end(kept, first, b"1")).status is PENDING, "the file with its name may have left too"
    assert (await end(kept, second, b"2")).is_repeat
    assert (await end(kept, first, b"1")).is_repeat
    assert [row[:3] for row in rows(kept)] == [(1, b"b.jpg", DONE), (2, b"a.jpg", DONE)]


async def test_a_file_that_replaces_a_newer_image_is_a_new_version_of_that(kept: Ledger) -> None:
    await process(kept, b"a.jpg", data=b"1")
    await process(kept, b"b.jpg", inode=9, data=b"2")
    assert not (await process(kept, b"b.jpg", b"a.jpg", b"1", ctime_ns=6)).is_repeat
    assert [row[:3] for row in rows(kept)] == [(1, b"a.jpg", DONE), (2, b"b.jpg", DONE), (3, b"b.jpg", DONE)]


async def test_a_file_that_replaces_an_older_image_keeps_its_row(kept: Ledger, reader: Reader) -> None:
    await process(kept, b"b.jpg", inode=9, data=b"2")
    await process(kept, b"a.jpg", data=b"1")
    assert (await process(kept, b"b.jpg", b"a.jpg", b"1", ctime_ns=6)).is_repeat
    await kept.mark_emitted([Placed(2)])
    assert [record.id for record in reader.published()] == [2]


async def test_older_versions_of_a_file_do_not_come_back_when_it_is_renamed(
    kept: Ledger, reader: Reader
) -> None:
    await process(kept, b"a.jpg", data=b"old", inode=9)
    await process(kept, b"a.jpg")
    await process(kept, b"b.jpg", b"a.jpg", ctime_ns=6)
    await kept.mark_emitted([Placed(2)])
    assert [record.id for record in reader.published()] == [2]
    assert [record.id for record in reader.finished()] == [2]


async def test_a_second_look_is_not_lost_with_the_old_name(kept: Ledger) -> None:
    """It was due before the new name was known, or is at work on the old one while that changes."""
    kept.look_names = ["close"]
    [job] = await take(kept, found(b"a.jpg"))
    await kept.end([replace(done(job, data=b"data"), looks=("close",))])
    await kept.mark_emitted([Placed(1)])

    async def miss(path: bytes) -> None:
        gone = Ending(make_job(path), GONE, 2e9, 0)
        await kept.run(lambda c: looks.end(c, "close", [gone], kept.models, 1, ()))

    async def wanted() -> list[tuple[Any, ...]]:
        rows = await kept.run(lambda c: c.execute("SELECT image, name, not_before FROM look").fetchall())
        return [tuple(row) for row in rows]

    await miss(b"a.jpg")
    assert await wanted() == []
    [job] = await take(kept, found(b"b.jpg", b"a.jpg", ctime_ns=6))
    await kept.end([replace(done(job, data=b"data"), looks=("close",))])
    assert await wanted() == [(1, "close", 0)]
    await miss(b"a.jpg")
    assert await wanted() == [(1, "close", 0)]


async def test_an_inbox_that_deletes_its_files_has_no_renames(ledger: Ledger, inbox: Path) -> None:
    """The same bytes may be delivered again, and get the inode of the file that was deleted."""
    await ledger.register([(inbox, 0)], MODELS)
    await process(ledger, b"a.jpg")
    assert not (await process(ledger, b"b.jpg", b"a.jpg", ctime_ns=6)).is_repeat


async def test_a_damaged_row_is_not_renamed(kept: Ledger) -> None:
    await process(kept, b"a.jpg")
    await kept.run(lambda connection: connection.execute("UPDATE image SET checksum = checksum + 1"))
    assert not (await process(kept, b"b.jpg", b"a.jpg", ctime_ns=6)).is_repeat


async def test_other_names_are_looked_up_by_an_index(kept: Ledger) -> None:
    plan = await kept.run(plan_of)
    assert any("SEARCH other USING INDEX files (inode=? AND mtime_ns=?)" in step for step in plan)


async def test_few_other_names_are_looked_at_where_all_files_have_one_inode(
    kept: Ledger, reader: Reader
) -> None:
    await kept.admit([found(b"%d.jpg" % number) for number in range(20)])
    with reader.lend() as connection:
        [names] = find_other_names(connection, [found(b"new.jpg")]).values()
    assert [name.path for name in names] == [b"%d.jpg" % number for number in range(19, 11, -1)]


def plan_of(connection: sqlite3.Connection) -> list[str]:
    query = SQL["other_names"].replace(":rows", "(1, 2, 3), (4, 5, 6)")
    return [row["detail"] for row in connection.execute(f"EXPLAIN QUERY PLAN {query}", (1,))]


# The daemon


class Home(Place):
    """A place whose files the tests rename; the checker expects the rest under the new names."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        output = {"sinks": ["jsonl"], "bins": "link"} | settings.pop("output", {})
        inbox = {"settle_seconds": 0.05} | settings.pop("inbox", {})
        super().__init__(
            folder, {"output": output, "inbox": [inbox], "pipeline": {"rescan_seconds": 0.2}, **settings}
        )
        self.left: set[bytes] = set()

    def rename(self, old: str, new: str) -> None:
        """Of a file or a folder."""
        target = self.inbox() / new
        target.parent.mkdir(parents=True, exist_ok=True)
        (self.inbox() / old).rename(target)
        names, before = self.dropped[""], os.fsencode(old)
        for path in [path for path in names if path == before or path.startswith(before + b"/")]:
            names[os.fsencode(new) + path[len(before) :]] = list(names[path])
            self.left.add(path)

    def images(self) -> dict[str, tuple[int, int]]:
        """By path, the number and the state of what is there."""
        query = "SELECT path, id, status FROM image WHERE status <> 4 ORDER BY path"
        return {os.fsdecode(path): (number, status) for path, number, status in self.rows(query)}

    def process(self) -> None:
        done = self.run_once()
        assert done.returncode == 0, done.stderr

    def told(self) -> list[int]:
        """The images that the sink has got, in this order."""
        return [json.loads(line)["id"] for line in (self.folder / "results.jsonl").read_text().splitlines()]

    def results(self, folder: str = "results") -> list[str]:
        root = self.folder / folder
        return sorted(
            str(file.relative_to(root)) for file in root.rglob("*") if not file.is_dir() or file.is_symlink()
        )

    def assert_true(self) -> None:
        verdict = self.judge(deleted=frozenset(self.left - set(map(os.fsencode, self.images()))))
        assert not verdict.problems, "\n".join(verdict.problems[:20])
        verified = self.command("verify")
        assert verified.returncode == 0, verified.stdout + verified.stderr


def test_a_folder_that_is_renamed_keeps_its_rows_and_gives_the_sinks_nothing_new(tmp_path: Path) -> None:
    place = Home(tmp_path)
    for number in range(5):
        place.drop(f"a/{number}.ppm", picture(number))
    place.process()
    said = (tmp_path / "results.jsonl").read_bytes()
    before = place.images()
    bins = [name.replace("/a/", "/b/") for name in place.results("bins")]
    place.rename("a", "b")
    place.process()
    assert place.images() == {f"b{path[1:]}": image for path, image in before.items()}
    assert (tmp_path / "results.jsonl").read_bytes() == said
    assert place.results() == [f"b/{number}.ppm.json" for number in range(5)]
    assert place.results("bins") == bins
    assert all(link.resolve().exists() for link in (tmp_path / "bins").rglob("*.ppm"))
    assert place.sidecar("b/0.ppm")["source"]["path"] == "b/0.ppm"
    place.assert_true()
    assert "renamed to b/0.ppm" in place.command("show", "a/0.ppm").stdout
    place.process()
    assert (tmp_path / "results.jsonl").read_bytes() == said


def test_images_are_found_by_the_new_names_of_their_files(tmp_path: Path) -> None:
    place = Home(tmp_path)
    place.drop("winter.ppm", picture(1))
    place.process()
    assert place.command("search", "winter").stdout.count("winter.ppm") == 1
    place.rename("winter.ppm", "summer.ppm")
    place.process()
    assert "summer.ppm" in place.command("search", "summer").stdout
    assert "ppm" not in place.command("search", "winter").stdout
    ((number, _),) = place.images().values()
    assert place.told() == [number]
    assert "jsonl  0 " in place.command("status").stdout, "no record is missing"


@pytest.mark.parametrize("polls", [False, True])
def test_a_daemon_at_work_gives_renamed_files_their_rows(tmp_path: Path, polls: bool) -> None:
    place = Home(tmp_path, inbox={"watch": "poll" if polls else "inotify"}, output={"bins": "copy"})
    for name in ("a.ppm", "folder/b.ppm", "stays.ppm"):
        place.drop(name, picture(len(name)))
    with Daemon(place) as daemon:
        daemon.wait_until(lambda status: status["done"] == 3, "three images")
        before = place.images()
        place.rename("a.ppm", "A.PPM")
        place.rename("folder", "other/deep")
        names = ["A.PPM.json", "other/deep/b.ppm.json", "stays.ppm.json"]
        daemon.wait_until(lambda _: place.results() == names, "the new names")
        daemon.wait_until(lambda status: (status["pending"], status["gone"]) == (0, 2), "the counts")
        assert daemon.status()["done"] == 3
        daemon.wait_until(lambda _: len(place.results("bins")) == 3, "the bins")
        assert daemon.stop() == 0
    assert place.images() == {
        "A.PPM": before["a.ppm"],
        "other/deep/b.ppm": before["folder/b.ppm"],
        "stays.ppm": before["stays.ppm"],
    }
    assert sorted(place.told()) == sorted(number for number, _ in before.values())
    place.assert_true()


def test_hard_links_are_images_of_their_own(tmp_path: Path) -> None:
    place = Home(tmp_path)
    file = place.drop("a.ppm", picture(1))
    place.process()
    os.link(file, place.inbox() / "b.ppm")
    place.expect_contents("b.ppm", picture(1))
    place.process()
    assert len({number for number, _ in place.images().values()}) == 2
    assert len(place.told()) == 2
    assert place.results() == ["a.ppm.json", "b.ppm.json"]


def test_a_copy_with_the_same_time_is_an_image_of_its_own(tmp_path: Path) -> None:
    place = Home(tmp_path)
    file = place.drop("a.ppm", picture(1))
    place.process()
    shutil.copy2(file, place.inbox() / "b.ppm")
    place.expect_contents("b.ppm", picture(1))
    place.process()
    assert len(place.told()) == 2


def test_a_file_that_was_changed_in_place_and_renamed_while_nobody_looked_is_read_again(
    tmp_path: Path,
) -> None:
    """Tools that rotate a photo in place keep its size and its time."""
    place = Home(tmp_path)
    file = place.drop("a.ppm", picture(1))
    place.process()
    status = file.stat()
    with file.open("r+b") as opened:
        opened.write(picture(2))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_ino) == (status.st_size, status.st_ino)
    file.rename(place.inbox() / "b.ppm")
    place.expect_contents("b.ppm", picture(2))
    place.process()
    assert len(place.told()) == 2
    assert place.results() == ["a.ppm.json", "b.ppm.json"]


def use_inode_again(deleted: os.stat_result, file: Path, data: bytes, spare: Path) -> None:
    """Make a file with the inode and the time of a deleted one. spare: a folder for what gets other inodes."""
    for number in range(64):
        file.write_bytes(data)
        if file.stat().st_ino == deleted.st_ino:
            os.utime(file, ns=(deleted.st_atime_ns, deleted.st_mtime_ns))
            return
        file.rename(spare / f"spare-{number}")
    pytest.skip("this file system does not use an inode again")


def test_a_new_file_with_the_inode_size_and_time_of_a_deleted_one_is_read(tmp_path: Path) -> None:
    """Frames of a camera have one size and the same two seconds; a deleted file's inode is used again at once."""
    place = Home(tmp_path)
    file = place.drop("a.ppm", picture(1))
    place.process()
    status = file.stat()
    file.unlink()
    other = place.inbox() / "b.ppm"
    use_inode_again(status, other, picture(2), tmp_path)
    place.expect_contents("b.ppm", picture(2))
    place.process()
    assert len(place.told()) == 2


def test_a_rename_into_another_inbox_is_a_new_image_and_one_into_an_ignored_folder_leaves_it(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path, {"inbox": [{"name": name, "settle_seconds": 0.05} for name in ("one", "two")]})
    place.drop("a.ppm", picture(1), "one")
    place.drop("b.ppm", picture(2), "one")
    assert place.run_once().returncode == 0
    (place.inbox("one") / "a.ppm").rename(place.inbox("two") / "a.ppm")
    (place.inbox("one") / ".hidden").mkdir()
    (place.inbox("one") / "b.ppm").rename(place.inbox("one") / ".hidden" / "b.ppm")
    assert place.run_once().returncode == 0
    rows = place.rows("SELECT inbox, path, status FROM image ORDER BY id")
    assert rows == [(1, b"a.ppm", DONE), (1, b"b.ppm", DONE), (2, b"a.ppm", DONE)]


def test_a_file_that_failed_keeps_its_row_and_its_reason_gets_the_new_name(tmp_path: Path) -> None:
    place = Home(tmp_path)
    place.drop("a.jpg", b"no image")
    place.run_once()
    before = place.images()
    place.rename("a.jpg", "b.jpg")
    place.run_once()
    assert place.images() == {"b.jpg": before["a.jpg"]}
    assert place.results("failed") == ["b.jpg.json"]
    place.assert_true()


def test_a_file_that_is_renamed_while_it_is_in_work_is_one_image(tmp_path: Path) -> None:
    place = Home(tmp_path, stages={"blip": {"options": {"latency_per_image_seconds": 0.3}}})
    with Daemon(place) as daemon:
        for number in range(3):
            place.drop(f"{number}.ppm", picture(number))
        daemon.wait_until(lambda status: status["in_flight"] > 0, "work")
        for number in range(3):
            place.rename(f"{number}.ppm", f"b/{number}.ppm")
        names = {f"b/{number}.ppm" for number in range(3)}
        daemon.wait_until(
            lambda _: {name for name, (_, s) in place.images().items() if s == DONE} == names, "the end"
        )
        daemon.wait_until(
            lambda _: place.results() == sorted(f"{name}.json" for name in names), "the results"
        )
        assert daemon.stop() == 0
    assert len(place.images()) == 3
    assert sorted(place.told()) == sorted(number for number, _ in place.images().values())
    place.assert_true()


@pytest.mark.parametrize("watch", ["auto", "poll"])
def test_files_that_wait_and_are_renamed_while_the_daemon_is_down_keep_their_rows(
    tmp_path: Path, watch: str
) -> None:
    slow = {"blip": {"options": {"latency_per_image_seconds": 60}}}
    settle_seconds = 3 if watch == "poll" else 0.05
    place = Home(tmp_path, stages=slow, inbox={"watch": watch, "settle_seconds": settle_seconds})
    with Daemon(place) as daemon:
        for number in range(4):
            place.drop(f"{number}.ppm", picture(number))
        daemon.wait_until(lambda _: len(place.images()) == 4, "their rows")
        daemon.kill(group=True)
    before = place.images()
    place.rename("0.ppm", "b/0.ppm")
    place.rename("1.ppm", "one.ppm")
    (place.inbox() / "2.ppm").unlink()
    place.left.add(b"2.ppm")
    place.configure({"stages": {"blip": {"options": {"latency_per_image_seconds": 0}}}})
    place.process()
    names = {"b/0.ppm": "0.ppm", "one.ppm": "1.ppm", "3.ppm": "3.ppm"}
    assert place.images() == {new: (before[old][0], DONE) for new, old in names.items()}
    place.assert_true()


def test_names_that_differ_in_letters_or_accents_alone_are_one_file_where_the_file_system_says_so(
    inbox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_folder(1, Inbox(path=inbox))
    for old, new in (
        ("photo.jpg", "Photo.JPG"),
        ("PIter/a.jpg", "Piter/a.jpg"),
        ("caf\u00e9.jpg", "cafe\u0301.jpg"),
    ):
        file = inbox / new
        file.parent.mkdir(exist_ok=True)
        (inbox / old).parent.mkdir(exist_ok=True)
        file.write_bytes(b"data")
        found = File(1, os.fsencode(new), Version.of(file.stat()))
        status = file.stat()
        with monkeypatch.context() as patch:
            patch.setattr("daemon.inbox.folder.os.lstat", lambda path, status=status: status)
            renamed = folder.note_renamed(
                {found: False}, {found: [Name(os.fsencode(old), NOW), Name(b"other.jpg", NOW)]}
            )
        assert [each.before for each in renamed] == [(os.fsencode(old),)]
        os.link(file, inbox / old)  # where it does not, they are two
        assert [
            each.before
            for each in folder.note_renamed({found: False}, {found: [Name(os.fsencode(old), NOW)]})
        ] == [()]


def test_a_folder_that_cannot_be_looked_into_has_not_lost_its_files(
    inbox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, found = open_folder(1, Inbox(path=inbox)), make_file(b"b.jpg")

    def refuse(path: bytes) -> os.stat_result:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("daemon.inbox.folder.os.lstat", refuse)
    assert [each.before for each in folder.note_renamed({found: False}, {found: [Name(b"a.jpg", NOW)]})] == [
        ()
    ]


async def test_a_mount_that_comes_back_is_known_by_the_images_that_are_left(
    kept: Ledger, reader: Reader
) -> None:
    """And not looked for under the names that they have left."""
    await process(kept, b"a.jpg")
    await process(kept, b"b.jpg", b"a.jpg", ctime_ns=6)
    assert [file.path for file in reader.files_of(1)] == [b"b.jpg"]


async def test_what_is_owed_under_an_old_name_is_not_foreign(tmp_path: Path) -> None:
    place = Home(tmp_path)
    place.drop("a.ppm", picture(1))
    place.process()
    with closing(sqlite3.connect(place.site.ledger)) as connection:
        connection.execute(
            "UPDATE image SET path = CAST('b.ppm' AS BLOB), checksum = NULL, emitted = 0, not_before = finished_at"
        )
        connection.execute("INSERT INTO renamed (image, path) VALUES (1, CAST('a.ppm' AS BLOB))")
        connection.commit()
    assert place.command("verify").returncode == 0


def test_a_file_that_is_delivered_again_after_it_was_deleted_is_a_new_image(tmp_path: Path) -> None:
    """With the same bytes and the same time, and the inode of the one before."""
    place = Home(tmp_path)
    file = place.drop("monday.ppm", picture(1))
    place.process()
    status = file.stat()
    born = FolderIdentity.of_file(os.fsencode(file)).born
    file.unlink()
    again = place.inbox() / "tuesday.ppm"
    use_inode_again(status, again, picture(1), tmp_path)
    if not born:
        pytest.skip("this file system does not say when a file was made")
    place.process()
    assert len(place.told()) == 2


def test_a_file_that_was_renamed_before_an_upgrade_keeps_its_row(tmp_path: Path) -> None:
    """The ledger of schema 11 has neither the index nor the tables."""
    place = Home(tmp_path)
    place.drop("a.ppm", picture(1))
    place.process()
    before = place.images()
    with closing(sqlite3.connect(place.site.ledger)) as connection:
        connection.executescript(
            "DROP INDEX files; DROP INDEX told; DROP TABLE renamed; ALTER TABLE publication DROP COLUMN told; "
            "ALTER TABLE model DROP COLUMN provenance; PRAGMA user_version = 11;"
        )
    place.rename("a.ppm", "b.ppm")
    place.process()
    assert place.images() == {"b.ppm": before["a.ppm"]}
    assert place.told() == [before["a.ppm"][0]]
