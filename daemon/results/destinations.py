"""Publishes results to files: sidecars, bins, the failed folder, and the source itself.

All of these follow from the ledger and can be written again at any time: each step first checks
whether it has been done. A file appears complete: it is written under another name, and then renamed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import structlog

from daemon.config.loading import Config
from daemon.config.sections import Inbox
from daemon.core.errors import SourceChanged
from daemon.core.files import create, temporary_name
from daemon.core.jobs import JobStatus, Placed
from daemon.core.sidecar import is_reason_of, sidecar_paths
from daemon.inbox import sources
from daemon.inbox.sources import WRITTEN, numbered_name
from daemon.inbox.walk import LONGEST_PATH
from daemon.ledger.record import Record
from daemon.system.mounts import KnownFolder, ask, describe_obstacle
from daemon.system.scarcity import AWAY, SCARCE
from stages.contract.binning import BINS

log = structlog.get_logger()
Answer = TypeVar("Answer")

ADDED_TO_PATHS = 128  # bytes, at most
# These may be temporary.
DISK_TROUBLE = (errno.EIO, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, *AWAY, *SCARCE)
_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)
_INBOX, _BIN = "an image cannot leave its inbox", "an image cannot get into its bin"


class Held(Exception):
    """A source cannot be moved or deleted for now, or its bin not be filled, for the reason given. Everything else of its
    image is published. placed: where the source is now."""

    def __init__(self, why: str, placed: Placed) -> None:
        super().__init__(why)
        self.placed = placed


@dataclass(frozen=True, slots=True)
class Publication:
    """What has been published.

    held: inboxes with images that are not where they belong, and why; these have to be published again.
    folders: those in which files were added or removed.
    records: of these images, if there is a sink.
    begun_at: monotonic seconds.
    """

    placed: list[Placed]
    held: dict[int, str]
    folders: set[bytes]
    records: list[Record]
    begun_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Destination:
    """The folders for one inbox's images, with the sub-folder of the inbox; absolute."""

    inbox: bytes
    results: bytes
    failed: bytes
    done: bytes
    bins: bytes
    bins_mode: str  # "none", "link", "copy" or "move"
    on_success: str  # "keep", "move" or "delete"
    known_bins: set[bytes]  # other folders there are not the daemon's
    known: Sequence[KnownFolder]  # those of the above that are written to, in this order

    @classmethod
    def of(
        cls, inbox: Inbox, config: Config, bins: Iterable[str] = (), known: Sequence[KnownFolder] = ()
    ) -> Destination:
        """bins: those that a rule has named before now. known: its folders, if they have been looked at."""
        output = config.output
        name = os.fsencode(inbox.name)
        folders = (output.results, output.failed, output.done, output.bins_folder)
        names = {os.fsencode(name) for name in (*BINS, *bins)}
        results, failed, done, folder = (
            os.path.join(os.fsencode(folder), name).rstrip(b"/") for folder in folders
        )
        mode, fate = output.bins, inbox.on_success
        if (mode, fate) == ("copy", "delete"):  # the same as a move, which overwrites nothing
            mode, fate = "move", "keep"
        if inbox.url:  # objects stay where they are
            mode, fate = "none", "keep"
        written = [results, failed, *[done] * (fate == "move"), *[folder] * (mode != "none")]
        known = known or [KnownFolder(each) for each in written]
        return cls(inbox.root, results, failed, done, folder, mode, fate, names, known)

    def check(self) -> None:
        """Raises FolderAway if one of its folders is not the same any more, OSError."""
        for folder in self.known:
            folder.check()

    @property
    def longest_path(self) -> int:
        """The longest path of a file in the inbox, in bytes, for which all that is published
        still fits into a path, with the name of a bin, a number, or a temporary name added."""
        return (
            LONGEST_PATH - max(map(len, (self.results, self.failed, self.done, self.bins))) - ADDED_TO_PATHS
        )

    def publish(self, record: Record, folders: set[bytes]) -> Placed:
        """Write the sidecar or the reason, fill the bin, and move the source. It may be called again. folders: gets those
        in which files were added or removed.

        Raises OSError when a result cannot be written, and Held. Nothing is lost then.
        """
        if self.on_success == "move" or self.bins_mode == "move" or record.status is not JobStatus.DONE:
            self.check()  # a source that is moved below a mount point would be hard to find
        if record.status is JobStatus.DONE:
            folders.add(os.path.dirname(write_sidecar(record, *sidecar_paths(self.results, record.path))))
            return self._place(record, folders)
        placed = self._move(record, folders)  # first, as the reason is named after the moved image
        folders.add(os.path.dirname(write_sidecar(record, *self.paths_of(record, placed.location))))
        self.known[1].check()  # it exists from now on
        if self.bins_mode == "link":
            self.attempt(record, lambda: self.leave_other_bins(record, folders))
        return placed

    def send_away(self, record: Record) -> None:
        """Move or delete a file whose contents are images of their own now, as the inbox says; a reason of an earlier
        attempt goes. It may be called again. Raises Held; OSError if the disk is full or fails."""
        self.check()
        self.attempt(record, lambda: self._forget_reason(record, set()))
        if self.on_success == "delete":
            _put(record, _INBOX, record.location, lambda: sources.delete(record))
        elif self.on_success == "move" or record.has_moved:  # with "keep" out of the failed folder
            done = os.path.join(self.done, record.path)
            _put(record, _INBOX, done, lambda: sources.move(record, done))

    def paths_of(self, record: Record, location: bytes | None = None) -> tuple[bytes, bytes]:
        """The two possible paths of its sidecar or its reason. location: where the file is,
        if not where the record says."""
        if record.status is JobStatus.DONE:
            return sidecar_paths(self.results, record.path)
        return self.reason_paths(record, location)

    def numbered_reason_paths(self, record: Record) -> tuple[bytes, bytes]:
        """The paths of a reason that was written when another version had its name in the failed folder."""
        return sidecar_paths(self.failed, numbered_name(record.path, record.id))

    def reason_paths(self, record: Record, location: bytes | None = None) -> tuple[bytes, bytes]:
        """A reason is named after its image if that is in the failed folder, else after
        the path in the inbox, unless another version has this name in the failed folder."""
        folder, location = os.path.join(self.failed, b""), location or record.location
        if location.startswith(folder):
            return sidecar_paths(self.failed, location.removeprefix(folder))
        if os.path.lexists(folder + record.path) and not _could_be_a_reason(record.path):
            return self.numbered_reason_paths(record)
        return sidecar_paths(self.failed, record.path)

    def new_place_of(self, record: Record) -> bytes | None:
        """Where its source goes when it is published; None if it stays."""
        if record.status is not JobStatus.DONE:
            stays = self.on_success == "keep" and self.bins_mode != "move"
            stays |= _could_be_a_reason(record.path)
            return None if stays else os.path.join(self.failed, record.path)
        if self.bins_mode == "move":
            return self._bin_of(record)
        return os.path.join(self.done, record.path) if self.on_success == "move" else None

    def _bin_of(self, record: Record) -> bytes:
        return os.path.join(self.bins, os.fsencode(record.bin), record.path)

    def _place(self, record: Record, folders: set[bytes]) -> Placed:
        """folders: as of `publish`."""
        self.attempt(record, lambda: self._forget_reason(record, folders))
        held, placed = None, Placed(record.id)
        try:
            placed = self._move(record, folders)
        except Held as trouble:  # its bin can still be filled
            held = trouble
        self.known_bins.add(os.fsencode(record.bin))
        if self.bins_mode in ("link", "copy"):
            present = where_it_is(record, placed)
            try:
                folders.add(self._fill_bin(present))
            except Held as trouble:
                held = held or Held(str(trouble), placed)
            self.attempt(record, lambda: self.leave_other_bins(present, folders))
        if self.on_success == "delete":
            _put(record, _INBOX, record.location, lambda: sources.delete(record), SCARCE)
            folders.add(os.path.dirname(record.location))
        if held:
            raise held
        return placed

    def _forget_reason(self, record: Record, folders: set[bytes]) -> None:
        """Remove the reason of an attempt or an earlier version that failed, unless it is next to that version's file.
        folders: as of `publish`."""
        if self.known[1].was_missing:  # nothing had failed yet
            return
        for first, second in (self.reason_paths(record), self.numbered_reason_paths(record)):
            with contextlib.suppress(FileNotFoundError):  # without the first there is no second
                with contextlib.suppress(NotADirectoryError):
                    os.lstat(first)
                for path in (first, second):
                    if is_reason_of(record.path, path) and unlink(path):
                        folders.add(os.path.dirname(path))

    def leave_other_bins(self, record: Record, folders: set[bytes]) -> None:
        """Remove it from other bins: an earlier version of the file, or an earlier rule, may have put it there. folders: as
        of `publish`."""
        for name in self.known_bins - {os.fsencode(record.bin)}:
            path = os.path.join(self.bins, name, record.path)
            if (
                path != record.location
                and (self.bins_mode != "link" or os.path.islink(path))
                and unlink(path)
            ):
                folders.add(os.path.dirname(path))

    def attempt(self, record: Record, step: Callable[[], object]) -> None:
        """Remove something of earlier, which other files or permissions may make impossible: then it is skipped and logged.
        Raises OSError if that may pass, as when the disk is full or fails."""
        try:
            step()
        except OSError as error:
            if error.errno in DISK_TROUBLE:
                raise
            log.warning(
                "a file of an earlier result cannot be removed; it stays",
                image=os.fsdecode(record.location),
                error=str(error),
            )

    def _fill_bin(self, record: Record) -> bytes:
        """Returns the bin's folder that has it. Raises Held, OSError."""
        target = self._bin_of(record)
        if self.bins_mode == "copy":
            _put(record, _BIN, target, lambda: sources.copy(record, target))
        else:
            _put(record, _BIN, target, lambda: sources.link(record.location, target))
        return os.path.dirname(target)

    def _move(self, record: Record, folders: set[bytes]) -> Placed:
        """Move the source to its place. folders: as of `publish`. Raises Held."""
        if (new_place := self.new_place_of(record)) is None:
            return Placed(record.id)
        moved = _put(record, _INBOX, new_place, lambda: sources.move(record, new_place), SCARCE)
        if moved and moved.location:
            folders |= {os.path.dirname(record.location), os.path.dirname(moved.location)}
        return moved or Placed(record.id)


def _put(
    record: Record,
    what: str,
    target: bytes,
    step: Callable[[], Answer],
    passing: Collection[int] = DISK_TROUBLE,
) -> Answer | None:
    """Do a step that puts a source, or something that leads to it, to `target`. Raises Held if something is in the way that a
    person can remove; OSError for the passing errors."""
    try:
        return step()
    except SourceChanged:  # the new version has a row of its own
        return None
    except OSError as error:
        if error.errno in passing:
            raise
        why = describe_obstacle(error, record.location, target)
        raise Held(f"{what}: {os.fsdecode(record.location)}: {why}", Placed(record.id)) from error


def remember_folders(destinations: Iterable[Destination]) -> None:
    """Look at their folders for the first time. A dead mount is left out. Runs in a thread."""

    def look() -> None:
        for destination in destinations:
            with contextlib.suppress(OSError):  # it is reported when something is written
                destination.check()

    ask(look)


def open_destinations(config: Config) -> dict[bytes, Destination]:
    """The destinations by the inbox's path."""
    return {inbox.root: Destination.of(inbox, config) for inbox in config.inbox}


def publish_records(records: Sequence[Record], destinations: Mapping[int, Destination]) -> Publication:
    """Publish each record; records of inboxes that are no longer configured wait. Runs in a thread. Raises OSError."""
    published = Publication([], {}, set(), [])
    check_folders(records, destinations)
    for record in records:
        if destination := destinations.get(record.inbox):
            folders: set[bytes] = set()
            try:
                placed = destination.publish(record, folders)
            except Held as trouble:
                if published.held.get(record.inbox, WRITTEN).endswith(WRITTEN):  # a fault is named first
                    published.held[record.inbox] = str(trouble)
                placed = msgspec.structs.replace(trouble.placed, is_held=True)
            published.placed.append(placed)
            if placed.location or not placed.is_held:
                published.folders.update(folders)
            published.records.append(where_it_is(record, placed))
    check_folders(records, destinations)
    return published


def where_it_is(record: Record, placed: Placed) -> Record:
    """The record with the place of its file after publishing."""
    if placed.location and placed.version:
        return dataclasses.replace(record, location=placed.location, version=placed.version)
    return record


def check_folders(records: Sequence[Record], destinations: Mapping[int, Destination]) -> None:
    """Raises FolderAway if these records cannot be, or have not been, published to their own folders; OSError."""
    for inbox in {record.inbox for record in records} & destinations.keys():
        destinations[inbox].check()


def publish_sidecars(records: Sequence[Record], destinations: Mapping[int, Destination]) -> Publication:
    """Write only the sidecars of images that were published before: users may have emptied the bins. Runs in a
    thread."""
    published = Publication([], {}, set(), [])
    check_folders(records, destinations)
    for record in records:
        if destination := destinations.get(record.inbox):
            path = write_sidecar(record, *destination.paths_of(record))
            published.placed.append(Placed(record.id))
            published.folders.add(os.path.dirname(path))
            published.records.append(record)
    check_folders(records, destinations)
    return published


def write_sidecar(record: Record, first: bytes, second: bytes) -> bytes:
    """Write the record to its first path or, if a folder or another file
    is in the way or the path is too long, to the second; returns which."""
    try:
        write_whole(first, record.sidecar)
    except OSError as error:
        if error.errno in DISK_TROUBLE:
            raise
        write_whole(second, record.sidecar)
        return second
    return first


def _could_be_a_reason(path: bytes) -> bool:
    """Images with such a name are never moved to the failed folder."""
    return path.endswith(b".json")


def write_whole(path: bytes, data: bytes) -> None:
    """Write a file that appears complete or not at all.
    It is on the disk once `sync_folders` has been called."""
    temporary = temporary_name(path)
    fd = create(temporary)
    try:
        try:
            while data:
                data = data[os.write(fd, data) :]
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def unlink(path: bytes) -> bool:
    """Remove a file, unless there is a folder, or a parent folder is a file or a link to nowhere. Returns whether it did."""
    try:
        os.unlink(path)
    except OSError as error:
        if error.errno not in _NOTHING_THERE:
            raise
        return False
    return True
