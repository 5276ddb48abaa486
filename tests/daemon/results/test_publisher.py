"""An image that could not leave its inbox is tried again, and never blocks a later version."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from daemon.core.jobs import File, Job, JobStatus, Version
from daemon.ledger.ledger import Ledger
from daemon.ledger.record import Record
from daemon.ledger.records import Reader
from daemon.pipeline.schedule import Schedule
from daemon.results.destinations import Destination, Publication, publish_records
from daemon.results.outbox import Outbox
from daemon.results.publisher import Publisher
from daemon.results.sinks import JsonlSink
from daemon.system.mounts import FolderAway
from daemon.system.retry import Retry
from tests.makers import MODELS, done, open_destination

pytestmark = pytest.mark.anyio


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    (tmp_path / "inbox").mkdir()
    opened = Ledger(tmp_path / "ledger.sqlite")
    assert await opened.register([(tmp_path / "inbox", 0)], MODELS) == [1]
    yield opened
    opened.close()


def write(file: Path, data: bytes) -> File:
    file.write_bytes(data)
    return File(1, os.fsencode(file.name), Version.of(file.stat()))


async def end(ledger: Ledger, file: Path, data: bytes) -> Job:
    """A new version of the file that has its result."""
    await ledger.admit([write(file, data)])
    [job] = await ledger.next_jobs(1, ())
    await ledger.end([done(job, data=data)])
    return job


def make_schedule() -> Schedule:
    """Of an inbox of which nothing is owed."""
    schedule = Schedule()
    schedule.settle({1}, ())
    return schedule


def publish(publisher: Publisher, destinations: Mapping[int, Destination], record: Record) -> Publication:
    """As an executor does."""
    publication = publish_records([record], destinations)
    publisher.note(publication)
    return publication


def refuse(*_: Any) -> None:
    raise OSError(errno.EROFS, "Read-only file system")


async def test_an_image_that_is_held_leaves_later_and_is_published_once(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destinations = {1: open_destination(tmp_path, on_success="delete")}
    opened = Reader(ledger.path)
    outbox = await Outbox.open(
        ledger, opened, {"jsonl": JsonlSink(tmp_path / "results.jsonl")}, lambda images: None
    )
    publisher = Publisher(ledger, destinations, outbox, Retry(), make_schedule())
    job = await end(ledger, tmp_path / "inbox" / "a.jpg", b"image")
    with monkeypatch.context() as patch:
        patch.setattr("daemon.inbox.sources.delete", refuse)
        await publisher.confirm(
            [publish(publisher, destinations, ledger.record_of(done(job, data=b"image")))]
        )
        await publisher.try_again()
    assert publisher.held_back() == [
        f"an image cannot leave its inbox: {tmp_path}/inbox/a.jpg: Read-only file system"
    ]
    assert len(await ledger.owed(0, 10)) == 1
    assert opened.published_after(0, 10)[1] == 1, "its record is published before it leaves"
    await publisher.try_again()
    assert publisher.held_back() == []
    assert await ledger.owed(0, 10) == []
    assert not list((tmp_path / "inbox").iterdir())
    assert opened.published_after(0, 10)[1] == 1
    opened.close()


@pytest.mark.parametrize("restarts", [1, 2])
async def test_an_image_that_is_held_through_restarts_goes_to_a_sink_once_and_its_next_result_too(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int
) -> None:
    destinations = {1: open_destination(tmp_path, on_success="move")}
    opened = Reader(ledger.path)

    async def start() -> Publisher:
        sinks = {"jsonl": JsonlSink(tmp_path / "results.jsonl")}
        outbox = await Outbox.open(ledger, opened, sinks, lambda images: None)
        return Publisher(ledger, destinations, outbox, Retry(), make_schedule())

    job = await end(ledger, tmp_path / "inbox" / "a.jpg", b"image")
    with monkeypatch.context() as patch:
        patch.setattr("daemon.inbox.sources.move", refuse)
        for _ in range(restarts):
            publisher = await start()
            await publisher.publish_owed({1})
            assert publisher.held_back()
            await publisher.try_again()
    publisher = await start()
    await publisher.publish_owed({1})
    assert (tmp_path / "done" / "a.jpg").exists()
    assert await ledger.owed(0, 10) == []
    assert opened.published_after(0, 10)[1] == 1

    assert await ledger.put_back(JobStatus.DONE, [job.id]) == 1
    [again] = await ledger.next_jobs(1, ())
    first = done(again, data=b"image")
    await ledger.end([replace(first, at=first.at + 1)])
    await publisher.publish_owed({1})
    assert opened.published_after(0, 10)[1] == 2
    opened.close()


async def test_a_line_of_the_jsonl_output_that_a_crash_has_torn_is_ended_before_the_next(
    ledger: Ledger, tmp_path: Path
) -> None:
    file, job = tmp_path / "results.jsonl", await end(ledger, tmp_path / "inbox" / "a.jpg", b"image")
    record = ledger.record_of(done(job, data=b"image"))
    file.write_bytes(record.sidecar + b'{"schema":"visi')
    await JsonlSink(file).append([record])
    assert file.read_bytes() == record.sidecar + b'{"schema":"visi\n' + record.sidecar


async def test_an_earlier_version_that_is_held_never_replaces_a_later_one(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = make_schedule()
    destinations = {1: open_destination(tmp_path, on_success="move")}
    publisher = Publisher(ledger, destinations, Outbox(), Retry(), schedule)
    file, sidecar = tmp_path / "inbox" / "a.jpg", tmp_path / "results" / "a.jpg.json"
    with monkeypatch.context() as patch:
        patch.setattr("daemon.inbox.sources.move", refuse)
        earlier = await end(ledger, file, b"earlier")
        publish(publisher, destinations, ledger.record_of(done(earlier, data=b"earlier")))
        later = await end(ledger, file, b"later one")
        schedule.hold({(1, later.path)}, later)
        record = ledger.record_of(done(later, data=b"later one"))
        publish(publisher, destinations, record)
        await publisher.try_again()
        assert sidecar.read_bytes() == record.sidecar
    publication = publish(publisher, destinations, record)
    await publisher.try_again()
    assert sidecar.read_bytes() == record.sidecar
    await publisher.confirm([publication])
    assert await ledger.owed(0, 10) == []
    assert (tmp_path / "done" / "a.jpg").read_bytes() == b"later one"


async def test_nobody_else_gets_a_file_whose_earlier_version_is_being_published(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await end(ledger, tmp_path / "inbox" / "a.jpg", b"image")
    schedule, files = Schedule(), {(1, b"a.jpg")}
    publisher = Publisher(ledger, {1: open_destination(tmp_path)}, Outbox(), Retry(), schedule)
    free: list[bool] = []

    def publish_and_look(*arguments: Any) -> Publication:
        free.append(schedule.hold(files, "another"))
        return publish_records(*arguments)

    monkeypatch.setattr("daemon.results.publisher.publish_records", publish_and_look)
    await publisher.publish_owed({1})
    assert free == [False]
    assert schedule.hold(files, "another")


async def test_held_images_are_not_tried_again_before_all_that_a_crash_left_behind_is_published(
    ledger: Ledger, tmp_path: Path
) -> None:
    schedule, sidecar = Schedule(), tmp_path / "results" / "a.jpg.json"
    publisher = Publisher(ledger, {1: open_destination(tmp_path)}, Outbox(), Retry(), schedule)
    await end(ledger, tmp_path / "inbox" / "a.jpg", b"image")
    publisher.note(Publication([], {1: "a full disk"}, set(), [], 0.0))
    await publisher.try_again()
    assert (publisher.held_back(), sidecar.exists()) == (["a full disk"], False)
    schedule.settle({1}, ())
    await publisher.try_again()
    assert (publisher.held_back(), sidecar.exists()) == ([], True)


async def test_what_is_owed_while_held_images_are_tried_again_is_left_to_whoever_settles_it(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("daemon.results.publisher.OWED", 1)
    schedule, results = make_schedule(), tmp_path / "results"
    publisher = Publisher(ledger, {1: open_destination(tmp_path)}, Outbox(), Retry(), schedule)
    for name in ("a.jpg", "b.jpg"):
        await end(ledger, tmp_path / "inbox" / name, b"image")

    def publish_and_lose(*arguments: Any) -> Publication:
        schedule.unsettle()
        return publish_records(*arguments)

    monkeypatch.setattr("daemon.results.publisher.publish_records", publish_and_lose)
    publisher.note(Publication([], {1: "a full disk"}, set(), [], 0.0))
    await publisher.try_again()
    assert [file.name for file in results.iterdir()] == ["a.jpg.json"]
    await publisher.publish_owed({1})
    assert len([*results.iterdir()]) == 2


async def test_what_did_not_fit_on_the_disk_is_taken_out_of_the_jsonl_output(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each try would leave a part of the lines, and take the room that comes free from the results."""
    file, job = tmp_path / "results.jsonl", await end(ledger, tmp_path / "inbox" / "a.jpg", b"image")
    record, write = ledger.record_of(done(job, data=b"image")), os.write
    await JsonlSink(file).append([record])

    def write_a_part(fd: int, data: bytes) -> int:
        if len(data) <= 100:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[:-100])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_a_part)
        with pytest.raises(OSError, match="No space"):
            await JsonlSink(file).append([record])
    assert file.read_bytes() == record.sidecar
    await JsonlSink(file).append([record])
    assert file.read_bytes() == 2 * record.sidecar


async def test_the_name_of_a_new_jsonl_output_is_flushed_again_if_that_failed(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power failure could take a file that the ledger says has its records."""
    file, job = tmp_path / "results.jsonl", await end(ledger, tmp_path / "inbox" / "a.jpg", b"image")
    record, flushed = ledger.record_of(done(job, data=b"image")), list[Path]()

    def fail_once(folder: Path) -> None:
        flushed.append(folder)
        if len(flushed) == 1:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("daemon.results.sinks.sync", fail_once)
    with pytest.raises(OSError, match="Input/output"):
        await JsonlSink(file).append([record])
    await JsonlSink(file).append([record])
    assert flushed == [tmp_path, tmp_path]
    assert file.read_bytes() == record.sidecar


async def test_what_was_published_before_a_folder_came_back_is_not_marked_but_owed(
    ledger: Ledger, tmp_path: Path
) -> None:
    destinations = {1: open_destination(tmp_path)}
    publisher = Publisher(ledger, destinations, Outbox(), Retry(), Schedule())
    publisher.check_folders()
    job = await end(ledger, tmp_path / "inbox" / "a.jpg", b"image")
    before = publish(publisher, destinations, ledger.record_of(done(job, data=b"image")))
    results, aside = os.fsdecode(destinations[1].results), tmp_path / "aside"
    os.rename(results, aside)
    os.mkdir(results)
    with pytest.raises(FolderAway):
        publisher.check_folders()
    os.rmdir(results)
    os.rename(aside, results)
    assert not await publisher.confirm([before])
    assert [record.id for record in await ledger.owed(0, 10)] == [job.id]
    await publisher.publish_owed({1})
    assert not await ledger.owed(0, 10)
