"""Where the images of an inbox are: a folder, or a prefix of an object store. Whatever differs between the two is
behind this interface; nothing else asks which of them an inbox is."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Protocol

from daemon.core.jobs import Extent, Job, Read
from daemon.core.slab import Slab
from daemon.core.urls import is_url
from daemon.inbox.bucket import BucketOrigin
from daemon.inbox.disk import FolderOrigin
from daemon.inbox.walk import Listed, Walk
from daemon.ledger.record import Record


class Origin(Protocol):
    """is_remote: reading waits for a network, so many images are read at once, and beside those of other inboxes.
    settles: a new image may still be growing. is_ordered: it is listed in the order of the paths, so a listing that
    was interrupted can go on. answer_seconds: how long its first and any further answer may take."""

    @property
    def is_remote(self) -> bool: ...
    @property
    def settles(self) -> bool: ...
    @property
    def is_ordered(self) -> bool: ...
    @property
    def answer_seconds(self) -> tuple[float, float]: ...

    def is_there(self) -> bool | None:
        """Whether it exists; None if that is not known, because it does not answer. Raises MissingLibrary,
        StoreUnusable."""

    def sends_events(self) -> bool:
        """Whether this machine hears of each change in it. Raises OSError."""

    def files(self, walk: Walk, subtree: bytes = b"") -> Iterator[Listed | None]:
        """Every file, and None now and then, so that a caller sees that it goes on. walk: what to leave out, and whom
        to inform. Errors are not raised: `walk.answer` gets them."""

    def read(self, jobs: Sequence[tuple[Job, Extent]], slab: Slab) -> dict[int, Read]:
        """Read each job's file into its extent; returns what came of that, by image. Raises OSError if no file at all can
        be read for now; it may then be called again."""

    def silent_seconds(self) -> float:
        """How long no read has heard anything; 0 if none waits, or if that is not known."""

    def read_source(self, record: Record) -> bytes:
        """The bytes of an image that has ended. Raises OSError: FileNotFoundError, SourceChanged."""

    def why_lost(self, record: Record) -> str:
        """Why an image cannot be read again, as far as that is known without a network; empty if it can."""


def origin_of(root: bytes) -> Origin:
    """A new one, whose `silent_seconds` are its own. root: the absolute path of a folder, or the URL of a store."""
    return BucketOrigin(os.fsdecode(root)) if is_url(os.fsdecode(root)) else FolderOrigin(root)
