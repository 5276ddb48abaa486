"""Publishes what is durable in the ledger to files, and
tries again to move sources that could not leave their inbox."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import anyio
import msgspec
import structlog
from anyio import to_thread

from daemon.core.errors import ResultsLost
from daemon.core.files import NotSynced, sync_folders
from daemon.core.jobs import Change, JobStatus, Placed
from daemon.core.sidecar import sidecar_paths
from daemon.inbox.sources import WRITTEN, find_changed
from daemon.ledger.ledger import Ledger
from daemon.ledger.publications import read_last
from daemon.ledger.record import Record
from daemon.results.damage import leave_out_damaged
from daemon.results.destinations import Destination, Publication, check_folders, publish_records
from daemon.results.outbox import Outbox
from daemon.system.retry import Retry
from stages.contract.files import NotAFile, read_file

log = structlog.get_logger()

OWED = 128  # images published together
FAILURES = 1000  # of those that were moved, the last ones are looked at again
PAUSE_SECONDS = 5.0  # between attempts for held images


class Holds(Protocol):
    """Who has which file, and of which inboxes something may be owed: pipeline/schedule.py."""

    def hold_each(self, files: Iterable[tuple[int, bytes]], holder: object) -> set[tuple[int, bytes]]: ...
    def release(self, files: Iterable[tuple[int, bytes]], holder: object) -> None: ...
    def unsettled(self, inboxes: Collection[int]) -> set[int]: ...


class Publisher:
    """Publishes one group of images at a time, in the order of the ledger."""

    def __init__(
        self,
        ledger: Ledger,
        destinations: Mapping[int, Destination],
        outbox: Outbox,
        retry: Retry,
        holds: Holds,
        note_changes: Callable[[Sequence[Change]], None] = lambda changes: None,
    ) -> None:
        """holds: who has which file. note_changes: called with what became of images whose results are damaged."""
        self._ledger = ledger
        self._destinations = destinations
        self._outbox = outbox
        self._retry = retry
        self._holds = holds
        self._note_changes = note_changes
        self._turn, self._trying = anyio.Lock(), anyio.Lock()
        self._held: dict[int, str] = {}  # inboxes that sources cannot leave, and why
        self._held_of_late: set[int] = set()
        self._renamed: set[int] = set()  # inboxes with results whose files have other names now
        self._wake = anyio.Event()  # set when there are more of these
        self._is_away = False  # a folder of results, as last looked at
        self._returned_at = 0.0  # when one was last seen to be back (monotonic)

    def held_back(self) -> list[str]:
        return list(self._held.values())

    def note_renamed(self, inboxes: Collection[int]) -> None:
        """Files of these inboxes were renamed: their results get the new names soon."""
        self._renamed |= set(inboxes)
        self._wake.set()

    def note(self, publication: Publication) -> None:
        """Note which inboxes sources could not leave. Records are kept only if there is a sink."""
        if not self._outbox.deliveries:
            publication.records.clear()
        for inbox, why in publication.held.items():
            if inbox not in self._held:
                level = logging.INFO if why.endswith(WRITTEN) else logging.ERROR
                log.log(level, "an image is not where it belongs", why=why)
            self._held[inbox] = why
        self._held_of_late |= publication.held.keys()

    async def confirm(self, publications: Sequence[Publication]) -> bool:
        """Flush them to the disk, and then mark them in the ledger. False if some may have gone elsewhere, because a
        folder was away for a while: these are owed. Raises ResultsLost."""
        folders = set[bytes]().union(*(publication.folders for publication in publications))
        await self._retry.in_thread("results", self._sync, folders)
        all_begun = publications
        publications = [each for each in all_begun if each.begun_at >= self._returned_at]
        placed = [placed for publication in publications for placed in publication.placed]
        added = await self._ledger.mark_emitted(placed, superseding=bool(self._held))
        if self._outbox.deliveries:
            await self._tell_sinks(added, {r.id: r for each in publications for r in each.records})
        return len(publications) == len(all_begun)

    async def _tell_sinks(self, added: Mapping[int, int], records: Mapping[int, Record]) -> None:
        """added: image by number. records: by image."""
        if added:
            self._outbox.add({number: records[image] for number, image in added.items()})
        if any(record.former for record in records.values()):
            self._outbox.note_renamed(await self._retry("ledger", self._ledger.run, read_last))

    async def watch(self, interval_seconds: Callable[[], float]) -> None:
        """Look at the folders of results at this interval, which may change: work is paused, and says so, while one is
        away. And look at what has failed."""
        while True:
            await self._retry.in_thread("results", self.check_folders)
            await self.look_again()
            await anyio.sleep(interval_seconds())

    async def look_again(self) -> None:
        """Let images be processed again that FAILED, were moved, and have changed since: their upload had only paused."""
        failures = await self._ledger.moved_failures(FAILURES)
        if changed := await to_thread.run_sync(find_changed, failures):
            again = await self._retry("ledger", self._ledger.put_back, JobStatus.FAILED, changed, changed)
            self._note_changes([Change(JobStatus.FAILED, JobStatus.PENDING)] * again)
            log.info("images that had failed have changed since; they are processed again", images=again)

    def check_folders(self) -> None:
        """Raises FolderAway if one is missing or another one, OSError. Runs in a thread."""
        try:
            for destination in self._destinations.values():
                destination.check()
        except OSError:
            self._is_away = True
            raise
        if self._is_away:
            self._is_away, self._returned_at = False, time.monotonic()

    async def publish_owed(self, inboxes: set[int], *, again: bool = False) -> None:
        """Publish the images of these inboxes that have ended and are not in work.
        again: they are held, and have been published except for their sources."""
        self._held_of_late -= inboxes
        last = 0
        while inboxes:
            async with self._turn:
                if not (records := await self._ledger.owed(last, OWED)):
                    break
                before, last = last, records[-1].id
                wanted = inboxes - self._holds.unsettled(inboxes) if again else inboxes
                publication = await self._publish_free([r for r in records if r.inbox in wanted], inboxes)
            if not await self.confirm([publication]):
                last = before
        for inbox in inboxes - self._held_of_late:
            self._held.pop(inbox, None)

    async def _publish_free(self, records: Sequence[Record], inboxes: set[int]) -> Publication:
        """Publish those whose files nobody else holds: a sidecar must not follow a later version's. inboxes: as of
        `publish_owed`."""
        files = {r.id: {(r.inbox, path) for path in (r.path, *r.former)} for r in records}
        held = self._holds.hold_each(set().union(*files.values()), self)
        free = [record for record in records if files[record.id] <= held]
        if len(free) < len(records):  # the others may still be held
            self._held_of_late |= self._held.keys() & inboxes
            self._renamed |= {r.inbox for r in records if r.former and not files[r.id] <= held}
        try:
            sound, changes = await leave_out_damaged(self._ledger, free)
            self._note_changes(changes)
            return await self._publish(sound)
        finally:
            self._holds.release(held, self)

    async def try_again(self) -> None:
        async with self._trying:
            renamed = self._renamed - self._holds.unsettled(self._renamed)
            self._renamed -= renamed
            inboxes = self._held.keys() | renamed
            try:
                await self.publish_owed(inboxes - self._holds.unsettled(inboxes), again=True)
            except BaseException:
                self._renamed |= renamed
                raise

    async def release(self) -> None:
        """Try held images again, at intervals that leave most of the time to other images."""
        while True:
            started, self._wake = time.monotonic(), anyio.Event()
            await self.try_again()
            with anyio.move_on_after(PAUSE_SECONDS + 10 * (time.monotonic() - started)):
                await self._wake.wait()

    async def _publish(self, records: Sequence[Record]) -> Publication:
        present = [record for record in records if not record.is_replaced]
        publication = await self._retry.in_thread("results", publish_records, present, self._destinations)
        for record in records:
            if record.is_replaced:
                publication.placed.append(Placed(record.id))
                publication.records.append(record)
        if renamed := [record for record in records if record.former]:
            folders = await self._retry.in_thread("results", clear_former, renamed, self._destinations)
            publication.folders.update(folders)
        self.note(publication)
        return publication

    def _sync(self, folders: set[bytes]) -> None:
        """Runs in a thread."""
        try:
            sync_folders(folders)
        except NotSynced as error:
            # The system has dropped what it could not write, so another call would not help.
            raise ResultsLost(f"{error}. What is missing is published again at the next start.") from error
        # After the flush: what is marked is in the folders that were flushed.
        self.check_folders()


# What was published under a name that a file had before. To remove it may be done again, and never touches what another
# image has there.


def clear_former(records: Sequence[Record], destinations: Mapping[int, Destination]) -> set[bytes]:
    """records: as they are published now. Returns the folders in which something was removed. Runs in a thread. Raises
    OSError if the disk fails."""
    check_folders(records, destinations)
    folders: set[bytes] = set()
    for record in records:
        if destination := destinations.get(record.inbox):
            for path in record.former:
                folders |= _clear(destination, replace(record, path=path, bin=""))
    return folders


def _clear(destination: Destination, record: Record) -> set[bytes]:
    """Remove what the image of a record, which has its old path, has there. Returns the folders of that."""
    results = sidecar_paths(destination.results, record.path)
    reasons = destination.reason_paths(record) + destination.numbered_reason_paths(record)
    owners = {file: _owner_of(file) for file in results + reasons}
    mine = [file for file, owner in owners.items() if owner == record.id]
    for file in mine:
        destination.attempt(record, partial(os.unlink, file))
    is_taken = any(owners[file] not in (None, record.id) for file in results)
    folders = {os.path.dirname(file) for file in mine}
    if record.status is JobStatus.DONE and destination.bins_mode in ("link", "copy") and not is_taken:
        destination.attempt(record, partial(destination.leave_other_bins, record, folders))
    return folders


class _Numbered(msgspec.Struct):
    id: int


def _owner_of(file: bytes) -> int | None:
    """The image whose sidecar or reason a file is; None if there is no such file."""
    nothing = FileNotFoundError, NotADirectoryError, IsADirectoryError, NotAFile
    with contextlib.suppress(*nothing, msgspec.DecodeError):
        return msgspec.json.decode(read_file(file), type=_Numbered).id
    return None
