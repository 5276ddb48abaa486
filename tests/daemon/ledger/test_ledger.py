from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from anyio import to_thread, wait_all_tasks_blocked
from msgspec.structs import replace

from daemon.core.errors import ConfigError, LedgerDamaged, LedgerUnusable
from daemon.core.jobs import (
    Admitted,
    Attempt,
    Content,
    Ending,
    File,
    Job,
    JobStatus,
    Placed,
    Version,
    Waiting,
)
from daemon.ledger.ledger import Ledger
from daemon.ledger.record import Model, Record
from daemon.ledger.records import Reader
from daemon.ledger.rows import checksums_of
from daemon.ledger.writer import GROUP
from daemon.system.clock import steady_seconds
from stages.contract.base import Reason
from stages.registry.registry import ORDER
from tests.daemon_process import PATIENCE
from tests.makers import (
    MODELS,
    VERSION,
    Commits,
    admit,
    complete,
    content_of,
    done,
    failed,
    known_versions,
    make_file,
    make_job,
    make_outputs,
    postponed,
)

pytestmark = pytest.mark.anyio

HOUR = 3600.0


def counts(ledger: Ledger) -> dict[str, int]:
    """The number of images by state, as another connection sees it, without empty states."""
    reader = Reader(ledger.path)
    try:
        return {status.name: count for status, count in reader.counts().items() if count}
    finally:
        reader.close()


def find(ledger: Ledger, path: str) -> Record:
    reader = Reader(ledger.path)
    try:
        [record] = reader.find(path)
    finally:
        reader.close()
    return record


@contextlib.asynccontextmanager
async def reopened(ledger: Ledger, inbox: Path, models: list[Model] = MODELS) -> AsyncIterator[Ledger]:
    """The ledger as a new daemon finds it."""
    ledger.close()
    again = Ledger(ledger.path)
    assert await again.register([(inbox, 0)], models) == [1]
    yield again
    again.close()


def sidecars(records: Iterable[Record]) -> list[bytes]:
    return [record.sidecar for record in records]


def paths(jobs: list[Job]) -> list[bytes]:
    return [job.path for job in jobs]


# Admitting


async def test_a_version_is_admitted_once(ledger: Ledger) -> None:
    files = [make_file(b"a.jpg"), make_file(b"b.jpg")]
    assert await ledger.admit(files) == Admitted(pending=2, skipped=0, replaced=0)
    assert await ledger.admit(files) == Admitted(pending=0, skipped=0, replaced=0)
    assert counts(ledger) == {"PENDING": 2}


async def test_a_version_that_is_finished_is_not_admitted_again(ledger: Ledger) -> None:
    jobs = await admit(ledger, b"done.jpg", b"failed.jpg")
    await complete(ledger, done(jobs[0]), failed(jobs[1]))
    assert await ledger.admit([make_file(job.path) for job in jobs]) == Admitted(0, 0, 0)


@pytest.mark.parametrize("field", VERSION._fields)
async def test_a_change_of_any_figure_is_a_new_version_and_the_old_one_is_gone(
    ledger: Ledger, field: str
) -> None:
    await ledger.admit([make_file(), make_file(b"other.jpg")])
    changed = make_file()._replace(version=VERSION._replace(**{field: 99}))
    assert await ledger.admit([changed]) == Admitted(pending=1, skipped=0, replaced=1)
    assert counts(ledger) == {"PENDING": 2, "GONE": 1}
    assert getattr(find(ledger, "a.jpg").version, field) == 99


async def test_a_file_whose_disk_has_another_number_since_a_reboot_is_the_same_version(
    ledger: Ledger, inbox: Path
) -> None:
    (inbox / "a.jpg").write_bytes(b"image")
    status: Any = os.stat(inbox / "a.jpg")
    names = ("st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")
    rebooted: Any = SimpleNamespace(
        st_dev=status.st_dev + 1, **{name: getattr(status, name) for name in names}
    )
    assert (await ledger.admit([File(1, b"a.jpg", Version.of(status))])).pending == 1
    assert await ledger.admit([File(1, b"a.jpg", Version.of(rebooted))]) == Admitted(0, 0, 0)
    with contextlib.closing(Reader(ledger.path)) as reader:
        assert known_versions(reader, [b"a.jpg"]) == {(b"a.jpg", *Version.of(rebooted))}


async def test_a_new_version_leaves_the_result_of_an_older_one_alone(ledger: Ledger) -> None:
    [job] = await admit(ledger, b"a.jpg")
    await complete(ledger, done(job))
    assert await ledger.admit([make_file(size=99)]) == Admitted(pending=1, skipped=0, replaced=0)
    assert counts(ledger) == {"PENDING": 1, "DONE": 1}


@pytest.mark.parametrize("field", ["mtime_ns", "inode"])
async def test_a_file_with_figures_beyond_64_bits_is_admitted(
    ledger: Ledger, inbox: Path, field: str
) -> None:
    (inbox / "a.jpg").write_bytes(b"image")
    os.utime(inbox / "a.jpg", (1.4e10, 1.4e10))
    status: Any = os.stat(inbox / "a.jpg")
    if field == "inode":
        names = ("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")
        status = SimpleNamespace(
            **{name: 2**63 + 1 if name == "st_ino" else getattr(status, name) for name in names}
        )
    file = File(1, b"a.jpg", Version.of(status))
    with anyio.fail_after(PATIENCE):
        assert await ledger.admit([file]) == Admitted(1, 0, 0)


async def test_a_version_that_was_gone_and_is_there_again_is_pending_again(ledger: Ledger) -> None:
    [job] = await admit(ledger, b"a.jpg")
    await ledger.end([Ending(job, JobStatus.GONE, 2e9, 0)])
    reader = Reader(ledger.path)
    known = known_versions(reader, [b"a.jpg"])
    reader.close()
    assert known == set()
    files = [make_file(b"a.jpg"), make_file(b"b.jpg")]
    assert await ledger.admit(files) == Admitted(pending=2, skipped=0, replaced=0, returned=1)
    assert paths(await ledger.next_jobs(9, ())) == [b"a.jpg", b"b.jpg"]


async def test_an_irregular_file_is_skipped_and_never_handed_out(ledger: Ledger) -> None:
    assert await ledger.admit([make_file(regular=False)]) == Admitted(pending=0, skipped=1, replaced=0)
    assert await ledger.next_jobs(9, ()) == []
    assert find(ledger, "a.jpg").reason == Reason.NOT_REGULAR


async def test_a_backlog_larger_than_any_statement_is_admitted_whole(ledger: Ledger) -> None:
    files = [make_file(b"%d.jpg" % number) for number in range(1000)]
    assert (await ledger.admit(files)).pending == 1000
    assert paths(await ledger.next_jobs(2000, ())) == [file.path for file in files]


# The order of jobs


async def test_jobs_are_handed_out_once_and_oldest_first(ledger: Ledger) -> None:
    await ledger.admit([make_file(b"%d.jpg" % number) for number in range(5)])
    jobs = [await ledger.next_jobs(2, ()) for _ in range(4)]
    assert [paths(part) for part in jobs] == [[b"0.jpg", b"1.jpg"], [b"2.jpg", b"3.jpg"], [b"4.jpg"], []]


async def test_an_inbox_of_higher_priority_goes_first_whenever_it_has_something(
    ledger: Ledger, inbox: Path, tmp_path: Path
) -> None:
    _, low, high = await ledger.register([(inbox, 0), (tmp_path / "low", -1), (tmp_path / "high", 7)], MODELS)
    await ledger.admit(
        [
            make_file(b"1", inbox=low),
            make_file(b"2", inbox=1),
            make_file(b"3", inbox=high),
            make_file(b"4", inbox=low),
        ]
    )
    assert paths(await ledger.next_jobs(3, ())) == [b"3", b"2", b"1"]
    await ledger.admit([make_file(b"5", inbox=high)])
    assert paths(await ledger.next_jobs(3, ())) == [b"5", b"4"]


async def test_a_new_priority_holds_for_what_is_waiting_already(
    ledger: Ledger, inbox: Path, tmp_path: Path
) -> None:
    _, urgent = await ledger.register([(inbox, 0), (tmp_path / "urgent", 0)], MODELS)
    await ledger.admit([make_file(b"1"), make_file(b"2", inbox=urgent)])
    await ledger.register([(inbox, 0), (tmp_path / "urgent", 5)], MODELS)
    assert paths(await ledger.next_jobs(2, ())) == [b"2", b"1"]


async def test_an_image_to_be_tried_again_waits_for_its_time_and_then_goes_first(ledger: Ledger) -> None:
    jobs = await admit(ledger, b"later.jpg", b"due.jpg", b"overdue.jpg")
    now = time.time()
    await ledger.end(
        [postponed(job, at) for job, at in zip(jobs, (now + HOUR, now - 1, now - 2), strict=True)]
    )
    await ledger.admit([make_file(b"new.jpg")])
    again = await ledger.next_jobs(9, ())
    assert paths(again) == [b"overdue.jpg", b"due.jpg", b"new.jpg"]
    assert [job.attempts for job in again] == [1, 1, 0]
    pause = await ledger.seconds_to_next_try(0)
    assert pause == pytest.approx(HOUR, abs=60)
    assert await ledger.seconds_to_next_try(3) == 0, "one has become due since"


async def test_after_a_restart_nothing_waits_longer_than_its_own_pause(ledger: Ledger) -> None:
    jobs = await admit(ledger, b"first.jpg", b"third.jpg", b"soon.jpg")
    jobs[1] = replace(jobs[1], attempts=2)
    now = steady_seconds()
    await ledger.end(
        [postponed(job, at) for job, at in zip(jobs, (now + HOUR, now + HOUR, now + 1), strict=True)]
    )
    await ledger.bound_waits(retry_seconds=100.0, longest_seconds=300.0)
    rows = ledger._connection.execute("SELECT not_before FROM image ORDER BY id").fetchall()
    assert [row[0] - now for row in rows] == pytest.approx([100, 300, 1], abs=30)


async def test_images_that_are_put_back_are_due_independent_of_the_clock(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    [job] = await admit(ledger, b"a.jpg")
    await ledger.end([failed(job)])
    await ledger.mark_emitted([Placed(job.id)])
    with monkeypatch.context() as forward:
        forward.setattr("daemon.ledger.ledger.time.time", lambda: 4e9)
        assert await ledger.put_back(JobStatus.FAILED, [job.id]) == 1
    assert paths(await ledger.next_jobs(9, ())) == [b"a.jpg"]


async def test_jobs_in_flight_are_not_handed_out_again(ledger: Ledger) -> None:
    jobs = await admit(ledger, b"1.jpg", b"2.jpg")
    await ledger.end([postponed(job, 1.0) for job in jobs])
    [first] = await ledger.next_jobs(1, ())
    assert paths(await ledger.next_jobs(9, {first.id})) == [b"2.jpg"]


async def test_rows_of_an_inbox_that_was_left_out_are_returned_once_it_is_included(
    ledger: Ledger, inbox: Path, tmp_path: Path
) -> None:
    _, other = await ledger.register([(inbox, 0), (tmp_path / "other", 0)], MODELS)
    await ledger.admit([make_file(b"1", inbox=other), make_file(b"2"), make_file(b"3", inbox=other)])
    [second] = await ledger.next_jobs(9, (), {1})
    assert second.path == b"2"
    assert paths(await ledger.next_jobs(9, {second.id}, {1, other})) == [b"1", b"3"]


async def test_rows_of_an_inbox_that_is_no_longer_configured_wait_for_it(tmp_path: Path) -> None:
    with contextlib.closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        (old,) = await ledger.register([(tmp_path / "old", 0)], [])
        await ledger.admit([File(old, b"a.jpg", VERSION)])
    with contextlib.closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        await ledger.register([(tmp_path / "new", 0)], [])
        assert await ledger.next_jobs(10, ()) == []
    with contextlib.closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        await ledger.register([(tmp_path / "old", 0)], [])
        assert [job.path for job in await ledger.next_jobs(10, ())] == [b"a.jpg"]


async def test_without_anything_to_try_again_there_is_no_time_to_wait_for(ledger: Ledger) -> None:
    await admit(ledger, b"a.jpg")
    assert await ledger.seconds_to_next_try(0) is None


async def test_retry_makes_failed_images_pending_with_a_fresh_set_of_attempts(ledger: Ledger) -> None:
    jobs = await admit(ledger, b"failed.jpg", b"done.jpg")
    await complete(ledger, failed(jobs[0]), done(jobs[1]))
    await ledger.mark_emitted([Placed(job.id) for job in jobs])
    await ledger.admit([make_file(b"new.jpg")])
    assert await ledger.put_back(JobStatus.FAILED, [jobs[0].id, jobs[1].id, 12345]) == 1
    assert [(job.path, job.attempts) for job in await ledger.next_jobs(9, ())] == [
        (b"failed.jpg", 0),
        (b"new.jpg", 0),
    ]
    assert find(ledger, "failed.jpg").reason == ""


async def test_a_failed_image_is_not_retried_before_its_file_has_been_moved(ledger: Ledger) -> None:
    (job,) = await admit(ledger, b"a.jpg")
    await ledger.end([failed(job)])
    assert await ledger.put_back(JobStatus.FAILED, [job.id]) == 0
    await ledger.mark_emitted([Placed(job.id)])
    assert await ledger.put_back(JobStatus.FAILED, [job.id]) == 1


async def test_a_failed_image_that_was_moved_is_tried_where_it_lies_now(ledger: Ledger) -> None:
    [job] = await admit(ledger, b"a.jpg")
    await complete(ledger, failed(job))
    moved = VERSION._replace(inode=9, ctime_ns=10)
    await ledger.mark_emitted([Placed(job.id, b"/failed/a.jpg", moved)])
    await ledger.put_back(JobStatus.FAILED, [job.id])
    [again] = await ledger.next_jobs(9, ())
    assert (again.location, again.version) == (b"/failed/a.jpg", moved)


async def publish(ledger: Ledger, path: bytes = b"a.jpg") -> Record:
    """An image that is done and published."""
    [job] = await admit(ledger, path)
    await complete(ledger, done(job))
    await ledger.mark_emitted([Placed(job.id)])
    return find(ledger, os.fsdecode(path))


async def test_an_image_that_is_processed_again_reuses_its_results_and_is_published_again(
    ledger: Ledger,
) -> None:
    before = await publish(ledger)
    assert await ledger.put_back(JobStatus.DONE, [before.id, 12345]) == 1
    [again] = await ledger.next_jobs(9, ())
    known = await ledger.recall({again.id: before.digest})
    assert known[again.id].outputs == before.outputs
    await complete(ledger, replace(done(again), bin="receipts"))
    assert [(record.id, record.bin) for record in await ledger.owed(0, 9)] == [(before.id, "receipts")]


async def test_a_result_whose_file_is_gone_before_it_is_processed_again_stays(ledger: Ledger) -> None:
    before = await publish(ledger)
    await ledger.put_back(JobStatus.DONE, [before.id])
    [again] = await ledger.next_jobs(9, ())
    await ledger.end([postponed(again, 1.0)])
    assert (await ledger.end([Ending(again, JobStatus.GONE, 3e9, 0)])).newest == {before.id}
    assert find(ledger, "a.jpg").sidecar == before.sidecar
    assert await ledger.owed(0, 9) == []


async def test_a_result_whose_file_is_replaced_before_it_is_processed_again_stays(ledger: Ledger) -> None:
    before = await publish(ledger)
    await ledger.put_back(JobStatus.DONE, [before.id])
    assert await ledger.admit([make_file(size=99)]) == Admitted(
        pending=1, skipped=0, replaced=0, results_kept=1
    )
    assert find(ledger, str(before.id)).sidecar == before.sidecar


async def test_only_the_newest_version_of_a_file_is_processed_again_once_it_is_published(
    ledger: Ledger,
) -> None:
    old = await publish(ledger)
    await ledger.admit([make_file(size=99)])
    [job] = await ledger.next_jobs(9, ())
    await complete(ledger, done(job))
    assert await ledger.put_back(JobStatus.DONE, [old.id, job.id]) == 0
    await ledger.mark_emitted([Placed(job.id)])
    assert await ledger.put_back(JobStatus.DONE, [old.id, job.id]) == 1


async def test_the_oldest_image_that_waits_is_known(ledger: Ledger) -> None:
    assert await ledger.oldest_pending() is None
    before = time.time()
    jobs = await admit(ledger, b"1.jpg", b"2.jpg")
    oldest = await ledger.oldest_pending()
    assert oldest is not None
    assert before <= oldest <= time.time()
    with contextlib.closing(Reader(ledger.path)) as reader:
        assert reader.count_waiting() == {jobs[0].inbox: Waiting(2, oldest)}
        await ledger.end([postponed(jobs[0], 1e12), done(jobs[1])])
        assert reader.count_waiting() == {jobs[0].inbox: Waiting(1, oldest)}
        assert await ledger.oldest_pending() is None
        await ledger.end([done(jobs[0])])
        assert reader.count_waiting() == {}


# Endings


async def test_an_ended_image_keeps_all_that_is_known_of_it(ledger: Ledger) -> None:
    jobs = await admit(ledger, b"done.jpg", b"failed.jpg")
    records = await complete(ledger, done(jobs[0]), failed(jobs[1]))
    assert sidecars(find(ledger, path) for path in ("done.jpg", "failed.jpg")) == sidecars(records)
    assert [record.status for record in records] == [JobStatus.DONE, JobStatus.FAILED]
    assert records[0].outputs == make_outputs()
    assert (records[0].width, records[0].height, records[0].format, records[0].bin) == (640, 480, "JPEG", "A")
    assert (records[1].reason, records[1].detail) == (Reason.TRUNCATED, "its end is missing")


async def test_a_job_ends_only_once(ledger: Ledger) -> None:
    [job] = await admit(ledger, b"a.jpg")
    assert (await ledger.end([done(job)])).newest == {job.id}
    assert (await ledger.end([failed(job)])).newest == set()
    assert counts(ledger) == {"DONE": 1}


async def test_the_end_of_a_file_that_was_replaced_is_refused(ledger: Ledger) -> None:
    replaced, mate = await admit(ledger, b"a.jpg", b"b.jpg")
    await ledger.admit([make_file(b"a.jpg", size=99)])
    assert (await ledger.end([done(replaced), done(mate)])).newest == {mate.id}
    assert (await ledger.end([failed(replaced), postponed(replaced, 1.0)])).newest == set()
    assert counts(ledger) == {"PENDING": 1, "DONE": 1, "GONE": 1}
    assert find(ledger, str(replaced.id)).detail == "replaced by a newer version"


@pytest.mark.parametrize("status", [JobStatus.SKIPPED, JobStatus.GONE])
async def test_a_file_that_is_no_image_or_was_deleted_is_not_done_and_not_published(
    ledger: Ledger, status: JobStatus
) -> None:
    [job] = await admit(ledger, b"a.txt")
    assert (await ledger.end([Ending(job, status, 2e9, 1)])).newest == {job.id}
    assert counts(ledger) == {status.name: 1}
    assert await ledger.owed(0, 9) == []


async def test_an_unpublished_image_is_returned_until_it_is_published(ledger: Ledger, inbox: Path) -> None:
    jobs = await admit(ledger, b"1.jpg", b"2.jpg", b"3.jpg")
    records = await complete(ledger, done(jobs[0]), failed(jobs[1]), done(jobs[2]))
    assert sidecars(await ledger.owed(0, 9)) == sidecars(records)
    assert sidecars(await ledger.owed(0, 2)) == sidecars(records[:2])
    assert sidecars(await ledger.owed(jobs[0].id, 9)) == sidecars(records[1:])
    await ledger.mark_emitted([Placed(jobs[0].id), Placed(jobs[1].id)])
    async with reopened(ledger, inbox) as again:
        assert sidecars(await again.owed(0, 9)) == sidecars(records[2:])


async def test_a_reason_that_is_not_utf_8_is_kept(ledger: Ledger) -> None:
    (job,) = await admit(ledger, b"a.jpg")
    assert (await ledger.end([failed(job, detail="name \udcff")])).newest == {job.id}


async def test_two_versions_whose_source_was_moved_once_can_both_be_marked(ledger: Ledger) -> None:
    for ctime in (1, 2):
        await ledger.admit([make_file(ctime_ns=ctime)])
        await complete(ledger, *(done(job) for job in await ledger.next_jobs(1, ())))
    await ledger.mark_emitted(
        [Placed(number, b"/done/a.jpg", VERSION._replace(ctime_ns=3)) for number in (1, 2)]
    )
    assert await ledger.owed(0, 9) == []


async def test_a_failed_image_that_is_done_at_last_is_published_again(ledger: Ledger) -> None:
    [job] = await admit(ledger, b"a.jpg")
    await complete(ledger, failed(job))
    await ledger.mark_emitted([Placed(job.id)])
    await ledger.put_back(JobStatus.FAILED, [job.id])
    [again] = await ledger.next_jobs(9, ())
    assert await ledger.owed(0, 9) == []
    await complete(ledger, done(again))
    assert [record.status for record in await ledger.owed(0, 9)] == [JobStatus.DONE]


# Results


async def recall(ledger: Ledger, data: bytes) -> Content:
    job = make_job()
    return (await ledger.recall({job.id: content_of(data).digest})).get(job.id, Content())


async def test_the_same_bytes_under_the_same_models_are_answered_from_the_ledger(
    ledger: Ledger, inbox: Path
) -> None:
    [job] = await admit(ledger, b"a.jpg")
    await complete(ledger, done(job, data=b"bytes"))
    async with reopened(ledger, inbox) as again:
        twin, stranger = await recall(again, b"bytes"), await recall(again, b"other bytes")
    assert (twin.outputs, twin.format, twin.width, twin.height) == (make_outputs(), "JPEG", 640, 480)
    assert (stranger.outputs, stranger.width) == ({}, 0)


async def test_two_images_with_the_same_bytes_are_both_published_with_the_results_in_the_ledger(
    ledger: Ledger,
) -> None:
    first, second = await admit(ledger, b"a.jpg", b"b.jpg")
    records = [
        record
        for job, variant in ((first, 3), (second, 4))
        for record in await complete(ledger, done(job, variant, b"x"))
    ]
    assert sidecars(records) == sidecars([find(ledger, "a.jpg"), find(ledger, "b.jpg")])
    assert records[0].outputs == records[1].outputs


def judge_again(attempts: list[Attempt]) -> list[Ending]:
    return [done(each.job, data=b"x", outputs=each.content.outputs) for each in attempts]


async def test_the_bin_is_judged_by_the_answers_that_are_published(ledger: Ledger) -> None:
    first, second = await admit(ledger, b"a.jpg", b"b.jpg")
    await complete(ledger, done(first, 0, b"x"))
    said = done(second, 3, b"x")
    [ending], *_ = await ledger.end([said], judge_again)
    first_record = find(ledger, "a.jpg")
    assert (ending.bin, ending.criteria) == (first_record.bin, first_record.criteria)
    assert find(ledger, "b.jpg").bin == ending.bin != said.bin


async def test_an_image_that_failed_stays_failed_though_the_ledger_has_other_results_of_its_bytes(
    ledger: Ledger,
) -> None:
    first, second = await admit(ledger, b"a.jpg", b"b.jpg")
    await complete(ledger, done(first, 0, b"an image"))
    own = failed(second, Reason.MEMORY, outputs=make_outputs(3, ["ocr"]))
    [ending], *_ = await ledger.end([own], judge_again)
    assert (ending.status, ending.failure) == (JobStatus.FAILED, own.failure)
    assert ending.content.outputs["ocr"] == find(ledger, "a.jpg").outputs["ocr"]


async def test_an_end_that_is_written_at_the_second_try_is_the_one_that_is_published(ledger: Ledger) -> None:
    first, second = await admit(ledger, b"a.jpg", b"b.jpg")
    await complete(ledger, done(first, 0, b"x"))
    gate, committed = threading.Event(), []

    async def end() -> None:
        committed.append(await ledger.end([done(second, 3, b"x")], judge_again))

    def fail(connection: sqlite3.Connection) -> None:
        raise sqlite3.IntegrityError

    async def spoil() -> None:
        """Let the transaction fail that it shares with the end."""
        with pytest.raises(sqlite3.IntegrityError):
            await ledger.run(fail)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ledger.run, lambda connection: gate.wait())
        tasks.start_soon(end)
        tasks.start_soon(spoil)
        await wait_all_tasks_blocked()
        gate.set()
    [[[ending], _, records]] = committed
    assert find(ledger, "b.jpg").bin == ending.bin == find(ledger, "a.jpg").bin
    assert records[second.id].sidecar == find(ledger, "b.jpg").sidecar


async def test_only_a_changed_model_runs_again(ledger: Ledger, inbox: Path) -> None:
    [job] = await admit(ledger, b"a.jpg")
    await complete(ledger, done(job, data=b"bytes"))
    models = [Model("clip", "clip-2", "") if model.stage == "clip" else model for model in MODELS]
    async with reopened(ledger, inbox, models) as changed:
        assert set((await recall(changed, b"bytes")).outputs) == {"ocr", "yolo", "blip"}
    async with reopened(ledger, inbox, MODELS) as restored:
        assert set((await recall(restored, b"bytes")).outputs) == set(ORDER)


async def test_each_image_keeps_the_models_that_made_its_result(ledger: Ledger, inbox: Path) -> None:
    [job] = await admit(ledger, b"a.jpg")
    await complete(ledger, done(job, data=b"bytes"))
    async with reopened(
        ledger, inbox, [Model(stage, f"{stage}-2", "random weights") for stage in ORDER]
    ) as later:
        [job] = await admit(later, b"b.jpg")
        await complete(later, done(job, variant=6, data=b"bytes"))
    assert [find(ledger, path).outputs for path in ("a.jpg", "b.jpg")] == [make_outputs(3), make_outputs(6)]
    assert find(ledger, "a.jpg").models == MODELS
    assert {model.notice for model in find(ledger, "b.jpg").models} == {"random weights"}


async def test_outputs_of_an_unfinished_image_survive_a_crash(ledger: Ledger, inbox: Path) -> None:
    await admit(ledger, b"a.jpg")
    content = content_of(b"bytes", make_outputs(stages=["ocr", "yolo"]))
    await ledger.keep([content])
    async with reopened(ledger, inbox) as again:
        assert await recall(again, b"bytes") == content
        assert paths(await again.next_jobs(9, ())) == [b"a.jpg"]


async def test_a_failed_image_keeps_the_results_of_its_other_stages(ledger: Ledger) -> None:
    [job] = await admit(ledger, b"a.jpg")
    await ledger.end([failed(job, outputs=make_outputs(stages=["ocr"]))])
    assert set((await recall(ledger, b"an image")).outputs) == {"ocr"}


async def test_a_damaged_result_is_made_again_unless_a_newer_version_has_replaced_it(ledger: Ledger) -> None:
    for time_ns in (1, 2):
        await ledger.admit([make_file(mtime_ns=time_ns)])
        [job] = await ledger.next_jobs(1, ())
        await ledger.end([done(job, data=b"%d" % time_ns)])
    changes = await ledger.annotate_again([1, 2])
    assert changes == [(JobStatus.DONE, JobStatus.GONE), (JobStatus.DONE, JobStatus.PENDING)]


# Transactions


class Gate:
    """Holds up the writing thread after each commit, until it is opened."""

    def __init__(self, commits: Commits) -> None:
        self.made = 0
        self._begun, self._open = threading.Event(), threading.Event()
        commits.observe = self._hold

    def _hold(self, seconds: float) -> None:
        self.made += 1
        self._begun.set()
        self._open.wait()

    async def closed(self) -> None:
        """Wait until the writing thread waits."""
        await to_thread.run_sync(self._begun.wait)

    def open(self) -> None:
        self._open.set()


async def test_requests_that_come_together_share_a_commit(ledger: Ledger, commits: Commits) -> None:
    gate = Gate(commits)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ledger.admit, [make_file(b"first.jpg")])
        await gate.closed()
        for number in range(GROUP):
            tasks.start_soon(ledger.admit, [make_file(b"%d.jpg" % number)])
        await wait_all_tasks_blocked()
        gate.open()
    assert gate.made == 2
    assert counts(ledger) == {"PENDING": GROUP + 1}


async def test_a_request_that_fails_affects_no_other_request_of_its_group(
    ledger: Ledger, commits: Commits
) -> None:
    gate = Gate(commits)
    outcomes: list[object] = []

    async def ask(file: File) -> None:
        try:
            outcomes.append(await ledger.admit([file]))
        except sqlite3.IntegrityError as error:
            outcomes.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ledger.admit, [make_file(b"first.jpg")])
        await gate.closed()
        for path in (b"good.jpg", None, b"fine.jpg"):
            tasks.start_soon(ask, make_file(path))  # type: ignore[arg-type]
            await wait_all_tasks_blocked()
        gate.open()
    assert [type(outcome) for outcome in outcomes] == [Admitted, sqlite3.IntegrityError, Admitted]
    assert paths(await ledger.next_jobs(9, ())) == [b"first.jpg", b"good.jpg", b"fine.jpg"]


async def test_checksums_are_right_when_results_of_the_same_bytes_were_stored_first_and_then_undone(
    ledger: Ledger, commits: Commits
) -> None:
    """An executor computed checksums for its own results. At the first try the ledger had other results, at the second
    try none."""
    first, second = await admit(ledger, b"a.jpg", b"b.jpg")
    gate, tries, stored = Gate(commits), [], done(first, variant=3, data=b"same")
    ending = done(second, variant=4, data=b"same")
    ending = replace(ending, checksums=checksums_of(ending.content, ledger.record_of(ending), MODELS))

    def refuse(connection: sqlite3.Connection) -> None:
        raise sqlite3.IntegrityError

    def store_first(connection: sqlite3.Connection) -> None:
        tries.append(connection)
        if len(tries) == 2:
            refuse(connection)
        ledger.results.write(connection, [(stored.content, None)])

    async def fail(work: Callable[[sqlite3.Connection], Any]) -> None:
        with pytest.raises(sqlite3.IntegrityError):
            await ledger.run(work)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ledger.admit, [make_file(b"other.jpg")])
        await gate.closed()
        tasks.start_soon(fail, store_first)
        await wait_all_tasks_blocked()
        tasks.start_soon(ledger.end, [ending])
        await wait_all_tasks_blocked()
        tasks.start_soon(fail, refuse)
        await wait_all_tasks_blocked()
        gate.open()
    assert len(tries) == 2
    with contextlib.closing(Reader(ledger.path)) as reader:
        reader.check()


async def test_a_request_is_done_whole_or_not_at_all(ledger: Ledger) -> None:
    files = [make_file(b"%d.jpg" % number) for number in range(500)]
    with pytest.raises(sqlite3.IntegrityError):
        await ledger.admit([*files, make_file(None)])  # type: ignore[arg-type]
    assert counts(ledger) == {}


async def test_a_full_disk_is_an_error_of_the_system_and_changes_nothing(ledger: Ledger) -> None:
    await ledger.admit([make_file(b"before.jpg")])
    connection = ledger._connection
    [pages] = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    files = [make_file(b"%d.jpg" % number) for number in range(2000)]
    with pytest.raises(LedgerUnusable, match="cannot be used: database or disk is full"):
        await ledger.admit(files)
    assert counts(ledger) == {"PENDING": 1}
    connection.execute("PRAGMA max_page_count = 1000000")
    assert (await ledger.admit(files)).pending == 2000


async def test_closing_finishes_what_was_asked_for(ledger: Ledger) -> None:
    async with anyio.create_task_group() as tasks:
        for number in range(50):
            tasks.start_soon(ledger.admit, [make_file(b"%d.jpg" % number)])
        await wait_all_tasks_blocked()
        ledger.close()
    assert counts(ledger) == {"PENDING": 50}


# Opening


async def test_pending_images_are_pending_after_a_restart(ledger: Ledger, inbox: Path) -> None:
    jobs = await admit(ledger, b"1.jpg", b"2.jpg", b"3.jpg")
    await complete(ledger, done(jobs[1]))
    async with reopened(ledger, inbox) as again:
        assert paths(await again.next_jobs(9, ())) == [b"1.jpg", b"3.jpg"]


@pytest.mark.parametrize(
    "content",
    [b"no database at all, but long enough to be taken for one" * 90, b"SQLite format 3\0" + b"\xff" * 5000],
)
def test_a_damaged_file_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(content)
    with pytest.raises(LedgerDamaged, match=r"ledger.sqlite cannot be used: .*`visiond repair`"):
        Ledger(path)
    assert path.read_bytes() == content


def test_a_ledger_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").mkdir()
    with pytest.raises(LedgerUnusable, match=r"ledger\.sqlite cannot be used"):
        Ledger(tmp_path / "ledger.sqlite")


def make_database(path: Path, script: str) -> bytes:
    connection = sqlite3.connect(path)
    connection.executescript(script)
    connection.close()
    return path.read_bytes()


@pytest.mark.parametrize("version", [0, 70])  # also a higher one than any ledger has
def test_another_programs_database_is_refused_and_left_alone(tmp_path: Path, version: int) -> None:
    path = tmp_path / "ledger.sqlite"
    content = make_database(path, f"CREATE TABLE photos (id); PRAGMA user_version = {version};")
    with pytest.raises(
        ConfigError, match=r"is a database of another program. Name another folder in \[state\] path"
    ):
        Ledger(path)
    assert path.read_bytes() == content


# What was reported as durable is durable, also after kill -9.

WRITER = """
import anyio, itertools, sys
from pathlib import Path
from daemon.ledger.ledger import Ledger
from tests.makers import MODELS, done, make_file

async def main():
    ledger = Ledger(Path(sys.argv[1]))
    await ledger.register([(Path("/inbox"), 0)], MODELS)
    for number in itertools.count(1, 4):
        names = [b"%d.jpg" % n for n in range(number, number + 4)]
        await ledger.admit([make_file(name) for name in names])
        print(*(f"PENDING:{name.decode()}" for name in names), flush=True)
        jobs = await ledger.next_jobs(3, ())
        ended = (await ledger.end([done(job) for job in jobs])).newest
        print(*(f"DONE:{job.path.decode()}" for job in jobs if job.id in ended), flush=True)

anyio.run(main)
"""


@pytest.mark.parametrize("lines", [1, 2, 7, 40])
def test_rows_that_were_reported_as_durable_survive_kill_9(tmp_path: Path, lines: int) -> None:
    path = tmp_path / "ledger.sqlite"
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        reported = [writer.stdout.readline().split() for _ in range(lines)]
        writer.kill()
        reported += [line.split() for line in writer.stdout if line.endswith("\n")]
    states = {name: state for line in reported for state, name in (entry.split(":") for entry in line)}
    Ledger(path).close()  # recovers
    reader = Reader(path)
    records = [record for name in states for record in reader.find(name)]
    reader.close()
    assert len(records) == len(states)
    ended = {record.path.decode() for record in records if record.status is JobStatus.DONE}
    assert {name for name, state in states.items() if state == "DONE"} <= ended
    assert all(record.outputs == make_outputs() for record in records if record.status is JobStatus.DONE)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
