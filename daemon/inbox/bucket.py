"""A prefix of an object store as the origin of images: see origin.py. An object is read once, straight into the slab,
and never another version than the ledger's. visiond never moves or deletes an object."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

from daemon.core.errors import SourceChanged
from daemon.core.jobs import GONE, Extent, Failure, Job, Read, Version
from daemon.core.slab import Slab
from daemon.core.stores import BUSY, StoreFailed, find_trouble, list_objects, store_errors, store_of
from daemon.core.urls import split_url
from daemon.inbox.walk import Listed, Walk
from daemon.ledger.record import Record
from stages.contract.base import Reason

READERS = 32  # objects of a group that are read at once
PIECE_BYTES = 1 << 20  # of an object, copied at once
ANSWER_SECONDS = 60.0  # for a page of a listing, with all repetitions


class BucketOrigin:
    is_remote, settles, is_ordered = True, False, True
    answer_seconds = (ANSWER_SECONDS, ANSWER_SECONDS)

    def __init__(self, url: str) -> None:
        self.url = url
        self._bucket, self._prefix = split_url(url)
        self._reads = 0  # that wait
        self._heard_at = 0.0  # when one of them last got something, in monotonic seconds
        self._counting = threading.Lock()

    @property
    def _store(self) -> Any:
        return store_of(self._bucket, impatient=True)

    def _key(self, path: bytes) -> str:
        return "/".join(filter(None, (self._prefix, path.decode())))

    def is_there(self) -> bool | None:
        """As a store that does not answer must not stop the start, it is not asked."""
        return self._store is not None

    def sends_events(self) -> bool:
        return False

    # Listing

    def files(self, walk: Walk, subtree: bytes = b"") -> Iterator[Listed | None]:
        after = self._key(walk.after) if walk.after else ""
        try:
            with store_errors(self.url):
                for meta in chain.from_iterable(list_objects(self._store, self._prefix, after)):
                    yield self._judge(meta, walk)
        except OSError as error:  # also a bucket that does not exist
            walk.answer(error)
        else:
            walk.answer(None)

    def _judge(self, meta: Any, walk: Walk) -> Listed | None:
        path = meta["path"][len(self._prefix) :].lstrip("/").encode()
        parts = path.split(b"/")
        if walk.ignored.hides(path) or (len(parts) > 1 and not walk.recursive):
            return None
        if not meta["size"] and not os.path.splitext(parts[-1])[1]:
            return None  # consoles make such objects to show a folder
        trouble = OSError(errno.ENAMETOOLONG, "") if len(path) > walk.longest else None
        if not {b"", b".", b".."}.isdisjoint(parts):  # its sidecar would be in another folder
            trouble = OSError(errno.EINVAL, "a key in it has an empty part, . or ..")
        if trouble:
            walk.unread.note(os.path.dirname(path), trouble)
            return None
        return path, version_of(meta), True

    def _answers(self) -> bool:
        """Whether it can be listed. If it can, an object that cannot be read is itself the cause."""
        return not find_trouble(self.url)

    # Reading

    def read(self, jobs: Sequence[tuple[Job, Extent]], slab: Slab) -> dict[int, Read]:
        group = _Group()
        with ThreadPoolExecutor(min(READERS, len(jobs)), "store") as threads:
            read = list(threads.map(lambda each: self._read(slab, group, *each), jobs))
        return {job.id: each for (job, _), each in zip(jobs, read, strict=True)}

    def _read(self, slab: Slab, group: _Group, job: Job, extent: Extent) -> Read:
        if group.away:  # the others would only wait for the same
            return group.away
        read = self._try(job, extent, slab)
        if isinstance(read, StoreFailed):
            away = read.status == 0 or read.status in BUSY or not self._answers()
            # The store may have come back between the two requests.
            if away or isinstance(read := self._try(job, extent, slab), StoreFailed):
                read = Read(failure=Failure(Reason.UNREADABLE, str(read), transient=True, away=away))
            if away:
                group.away = read
        return read

    def _try(self, job: Job, extent: Extent, slab: Slab) -> Read | StoreFailed:
        """Read an object, or find that it is gone; returns why neither is possible."""
        try:
            with store_errors(self._key(job.path)), self._waiting():
                return self._fetch(job, extent, slab)
        except FileNotFoundError:
            return GONE
        except StoreFailed as error:
            return error

    def silent_seconds(self) -> float:
        return time.monotonic() - self._heard_at if self._reads else 0.0

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        with self._counting:
            if not self._reads:
                self._heard_at = time.monotonic()
            self._reads += 1
        try:
            yield
        finally:
            with self._counting:
                self._reads -= 1

    def _fetch(self, job: Job, extent: Extent, slab: Slab) -> Read:
        import obstore

        answer = obstore.get(self._store, self._key(job.path))
        self._heard_at = time.monotonic()
        if not is_version(job.version, answer.meta):
            return GONE
        # An error keeps this frame until the garbage collection, and the slab cannot be closed while a window is open.
        with slab.window(extent) as window:
            filled = 0
            for piece in answer.stream(min_chunk_size=PIECE_BYTES) if len(window) else ():
                window[filled : filled + len(piece)] = memoryview(piece)
                filled += len(piece)
                self._heard_at = time.monotonic()
            return Read(hashlib.sha256(window).digest()) if filled == len(window) else GONE

    def read_source(self, record: Record) -> bytes:
        import obstore

        with store_errors(self.url):
            answer = obstore.get(self._store, self._key(record.path))
            if is_version(record.version, answer.meta):
                return bytes(answer.bytes())
        raise SourceChanged(errno.ESTALE, "the object has changed since", record.location)

    def why_lost(self, record: Record) -> str:
        """One request for each object would take too long: an object that is gone keeps its result when it is read."""
        return ""


class _Group:
    """What is known while a group of objects is read."""

    away: Read | None = None


def version_of(meta: Any) -> Version:
    """The version of an object. Its size and its ETag are the version; without an ETag, the time of its last change is in
    the ETag's place. Numbers of versions count where the store lists them, as S3 does not. meta: of obstore."""
    number = _digest(meta["version"]) if meta["version"] else 0
    return Version(number, meta["size"], _marks_of(meta)[0], 0)


def is_version(version: Version, meta: Any) -> bool:
    """Whether an object that is being read is the one that was listed."""
    same = version.size == meta["size"] and version.mtime_ns in _marks_of(meta)
    return same and (not version.inode or version.inode == _digest(meta["version"] or ""))


def _marks_of(meta: Any) -> list[int]:
    tag = meta["e_tag"] or ""
    if tag.startswith('W/"'):  # weak; without the mark of quotation it is a part of the tag
        tag = tag[2:]
    tag = tag.strip('"')
    # In answers to a GET the time has whole seconds only.
    return [_digest(mark) for mark in (tag, str(int(meta["last_modified"].timestamp()))) if mark]


def _digest(text: str) -> int:
    """64 bits with a sign, as SQLite stores them."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], signed=True)
