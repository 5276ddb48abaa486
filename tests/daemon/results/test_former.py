"""What was published under the name that a file had before is removed, and nothing of another image."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest

from daemon.core.jobs import File, Job, JobStatus, Version
from daemon.ledger.ledger import Ledger
from daemon.ledger.record import Record
from daemon.pipeline.schedule import Schedule
from daemon.results.destinations import Destination
from daemon.results.outbox import Outbox
from daemon.results.publisher import Publisher, clear_former
from daemon.system.retry import Retry
from tests.makers import MODELS, done, drop, open_destination

pytestmark = pytest.mark.anyio


def files_in(root: Path, *folders: str) -> list[str]:
    found = [file for folder in folders for file in (root / folder).rglob("*.*")]
    return sorted(os.fspath(file.relative_to(root)) for file in found if file.is_symlink() or file.is_file())


def renamed(root: Path, destination: Destination, **fields: object) -> Record:
    """An image that was published as a.jpg, and then as b.jpg."""
    record = drop(root, **fields)  # type: ignore[arg-type]
    destination.publish(record, set())
    target = root / "inbox" / "b.jpg"
    os.rename(root / "inbox" / "a.jpg", target)
    place = {"path": b"b.jpg", "location": os.fsencode(target), "version": Version.of(target.stat())}
    record = replace(record, former=(b"a.jpg",), **place)  # type: ignore[arg-type]
    destination.publish(record, set())
    return record


@pytest.mark.parametrize("bins", ["none", "link", "copy"])
async def test_sidecar_and_bin_of_the_old_name_are_removed(tmp_path: Path, bins: str) -> None:
    destination = open_destination(tmp_path, bins)
    record = renamed(tmp_path, destination)
    folders = clear_former([record], {1: destination})
    clear_former([record], {1: destination})  # after a crash, again
    in_bins = ["bins/A/b.jpg"] if bins != "none" else []
    assert files_in(tmp_path, "results", "bins") == [*in_bins, "results/b.jpg.json"]
    assert destination.results in folders
    assert (os.path.join(destination.bins, b"A") in folders) == (bins != "none")


async def test_a_reason_under_the_old_name_is_removed(tmp_path: Path) -> None:
    destination = open_destination(tmp_path)
    failure = {"status": JobStatus.FAILED, "reason": "truncated", "bin": "", "models": []}
    clear_former([renamed(tmp_path, destination, **failure)], {1: destination})
    assert files_in(tmp_path, "failed", "results") == ["failed/b.jpg.json"]


@pytest.mark.parametrize("bins", ["link", "copy"])
async def test_what_a_new_file_has_under_the_old_name_stays(tmp_path: Path, bins: str) -> None:
    destination = open_destination(tmp_path, bins)
    record = renamed(tmp_path, destination)
    destination.publish(drop(tmp_path, data=b"new", id=8), set())
    clear_former([record], {1: destination})
    assert files_in(tmp_path, "results", "bins") == [
        "bins/A/a.jpg",
        "bins/A/b.jpg",
        "results/a.jpg.json",
        "results/b.jpg.json",
    ]
    assert json.loads((tmp_path / "results" / "a.jpg.json").read_bytes())["id"] == 8


class Site:
    """An inbox, and a publisher with its ledger."""

    def __init__(self, ledger: Ledger, root: Path, inbox: int) -> None:
        self.ledger, self.root, self.schedule = ledger, root, Schedule()
        self.schedule.settle({inbox}, ())
        self.destination = open_destination(root)
        self.publisher = Publisher(ledger, {inbox: self.destination}, Outbox(), Retry(), self.schedule)
        self.number = inbox

    def file(self, name: str, before: str = "") -> File:
        version = Version.of((self.root / "inbox" / name).stat())
        return File(self.number, name.encode(), version, before=(before.encode(),) * bool(before))

    async def take(self, file: File) -> Job:
        await self.ledger.admit([file])
        [job] = await self.ledger.next_jobs(9, ())
        return job

    async def process(self, name: str, data: bytes) -> None:
        (self.root / "inbox" / name).write_bytes(data)
        await self.ledger.end([done(await self.take(self.file(name)), data=data)])
        await self.publisher.publish_owed({self.number})

    async def rename(self, old: str, new: str, data: bytes) -> None:
        """The file has another name, and its row too, but nothing is published yet."""
        os.rename(self.root / "inbox" / old, self.root / "inbox" / new)
        [ending], *_ = await self.ledger.end([done(await self.take(self.file(new, old)), data=data)])
        assert ending.is_repeat
        self.publisher.note_renamed({self.number})

    def owner(self, name: str) -> int:
        number: int = json.loads((self.root / "results" / f"{name}.json").read_bytes())["id"]
        return number


@pytest.fixture
async def site(ledger: Ledger, tmp_path: Path) -> Site:
    inbox = tmp_path / "inbox"
    inbox.mkdir(exist_ok=True)
    [number] = await ledger.register([(inbox, 0)], MODELS, kept=[inbox])
    return Site(ledger, tmp_path, number)


async def test_the_results_get_the_new_name_at_the_next_try(site: Site) -> None:
    await site.process("a.jpg", b"data")
    await site.rename("a.jpg", "b.jpg", b"data")
    await site.publisher.try_again()
    assert files_in(site.root, "results") == ["results/b.jpg.json"]
    assert await site.ledger.owed(0, 9) == []


async def test_the_results_get_the_new_name_after_a_crash(site: Site) -> None:
    await site.process("a.jpg", b"data")
    await site.rename("a.jpg", "b.jpg", b"data")
    next_life = Site(site.ledger, site.root, site.number)
    await next_life.publisher.publish_owed({site.number})
    assert files_in(site.root, "results") == ["results/b.jpg.json"]
    assert await site.ledger.owed(0, 9) == []


async def test_nothing_is_removed_while_somebody_works_on_a_new_file_of_the_old_name(site: Site) -> None:
    await site.process("a.jpg", b"data")
    await site.rename("a.jpg", "b.jpg", b"data")
    assert site.schedule.hold({(site.number, b"a.jpg")}, site)
    await site.publisher.try_again()
    assert files_in(site.root, "results") == ["results/a.jpg.json"]
    site.schedule.release({(site.number, b"a.jpg")}, site)
    await site.publisher.try_again()
    assert files_in(site.root, "results") == ["results/b.jpg.json"]


async def test_an_older_image_does_not_get_the_sidecar_of_a_newer_one(site: Site) -> None:
    """Its file had the newer one's name for a moment."""
    await site.process("a.jpg", b"1")
    await site.process("b.jpg", b"2")
    await site.rename("a.jpg", "c.jpg", b"1")
    await site.rename("b.jpg", "c.jpg", b"2")
    assert site.schedule.hold({(site.number, b"a.jpg")}, site)
    await site.publisher.try_again()
    site.schedule.release({(site.number, b"a.jpg")}, site)
    await site.publisher.try_again()
    assert (site.owner("c.jpg"), files_in(site.root, "results")) == (2, ["results/c.jpg.json"])
    assert await site.ledger.owed(0, 9) == []


async def test_the_folders_of_the_old_name_are_flushed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    (site.root / "inbox" / "old").mkdir()
    await site.process("old/a.jpg", b"data")
    await site.rename("old/a.jpg", "b.jpg", b"data")
    flushed: set[bytes] = set()

    def note(folders: Collection[bytes]) -> None:
        flushed.update(folders)

    monkeypatch.setattr("daemon.results.publisher.sync_folders", note)
    await site.publisher.try_again()
    assert os.fsencode(site.root / "results" / "old") in flushed
