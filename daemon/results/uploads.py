"""A sink that uploads sidecars, and images if asked, to an object store. Each image has one key for its sidecar and one in
its bin, so an upload that is repeated changes nothing."""

from __future__ import annotations

import contextlib
import hashlib
import http
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog
from anyio import to_thread

from daemon.config.output import StoreSection
from daemon.core.errors import MissingLibrary
from daemon.core.jobs import JobStatus
from daemon.core.sidecar import sidecar_paths
from daemon.core.stores import CREDENTIALS, StoreFailed, store_errors, store_of
from daemon.core.urls import is_url, split_url
from daemon.inbox.disk import why_not_deleted
from daemon.inbox.origin import origin_of
from daemon.ledger.record import Record
from daemon.system.mounts import FolderAway
from daemon.system.scarcity import AWAY, SCARCE

log = structlog.get_logger()

UPLOADS = 16  # at once
LONGEST_KEY = 1024  # bytes, of S3 and GCS
PROBE = ".visiond-check"  # a name that no object has
_UNFIT = re.compile(r"[\x00-\x1f\x7f]")  # obstore refuses these in a key


class StoreSink:
    """Records that are DONE or FAILED: <url>/results/<inbox's name>/<path>.json, the last state of each image.
    With images, those that are DONE: <url>/bins/<bin>/<inbox's name>/<path>."""

    def __init__(self, settings: StoreSection, names: Mapping[bytes, str]) -> None:
        """names: of the inboxes, by their roots."""
        self._settings = settings
        self._names = names
        self._bucket, self._prefix = split_url(settings.url)
        self._bins: set[str] | None = None  # that may have images; None: not listed yet
        # What was uploaded of a group that then failed, by key: otherwise a store that refuses one request of a hundred
        # would never take a whole group.
        self._uploaded: dict[str, int] = {}

    def problem(self) -> str:
        """Without a request."""
        if not self._settings.url:
            return "[output.store] url is not set"
        try:
            _ = self._store
        except MissingLibrary as error:
            return str(error).rstrip(".")
        except StoreFailed as error:
            return str(error)
        return ""

    def ask_store(self) -> str:
        """As `problem`, but asks the store for an object that does not exist, which may take many seconds. A store that
        accepts the credentials and allows no reading (403) is no problem, as it may still allow uploads."""
        if problem := self.problem():
            return problem
        import obstore

        try:
            with contextlib.suppress(FileNotFoundError), store_errors(self._settings.url):
                obstore.get(self._store, self._key(PROBE))
        except StoreFailed as error:
            may_upload = error.status == http.HTTPStatus.FORBIDDEN and error.code not in CREDENTIALS
            return "" if may_upload else str(error)
        return ""

    async def append(self, records: Sequence[Record]) -> None:
        """Raises StoreFailed if not all of it could be uploaded."""
        # A later version of a file, or its next state, has the same key.
        last = {(record.inbox, record.path): record for record in records}
        await to_thread.run_sync(self._upload_all, [*last.values()], abandon_on_cancel=True)

    def _upload_all(self, records: Sequence[Record]) -> None:
        if self._settings.images:
            self._leave_other_bins(records)
        with ThreadPoolExecutor(UPLOADS, "upload") as threads:
            list(threads.map(self._upload, records))
        self._uploaded.clear()

    def _upload(self, record: Record) -> None:
        """The image first: whoever sees a sidecar can count on it."""
        if self._settings.images and record.status is JobStatus.DONE and (image := _read_source(record)):
            self._put(self._key("bins", record.bin, self._folder(record), fit_key(record.path)), image)
        sidecar = fit_key(sidecar_paths(b"", record.path)[0], ".json")
        self._put(self._key("results", self._folder(record), sidecar), record.sidecar)

    def _put(self, key: str, data: bytes) -> None:
        import obstore

        if self._uploaded.get(key) == hash(data):
            return
        with store_errors(f"{self._bucket}/{key}"):
            obstore.put(self._store, key, data, use_multipart=False)
        self._uploaded[key] = hash(data)

    def _leave_other_bins(self, records: Sequence[Record]) -> None:
        """Another rule, or an earlier version of the file, may have put images into other bins."""
        if self._bins is None:
            self._bins = self._list_bins()
        left = [
            self._key("bins", name, self._folder(record), fit_key(record.path))
            for record in records
            for name in self._bins
            if record.status is not JobStatus.DONE or name != record.bin
        ]
        for key in left:
            self._uploaded.pop(key, None)
        if left:
            self._delete(left)
        self._bins |= {record.bin for record in records if record.bin}

    def _list_bins(self) -> set[str]:
        import obstore

        with store_errors(self._settings.url):
            found = obstore.list_with_delimiter(self._store, self._key("bins"))["common_prefixes"]
        return {name.rpartition("/")[2] for name in found}

    def _delete(self, keys: Sequence[str]) -> None:
        """Most of them do not exist. S3 does not mind; for other stores the first one is an error."""
        import obstore

        with contextlib.suppress(FileNotFoundError), store_errors(self._settings.url):
            obstore.delete(self._store, keys)
            return
        for key in keys:
            with contextlib.suppress(FileNotFoundError), store_errors(self._settings.url):
                obstore.delete(self._store, key)

    @property
    def _store(self) -> Any:
        return store_of(self._bucket, impatient=True)

    def _folder(self, record: Record) -> str:
        """Of the inbox; by its number, if it is no longer configured."""
        return self._names.get(record.inbox_path, f"inbox-{record.inbox}")

    def _key(self, *parts: str) -> str:
        return "/".join(filter(None, (self._prefix, *parts)))


def fit_key(path: bytes, suffix: str = "") -> str:
    """A path as a part of a key; a digest of it, if a store would refuse it. suffix: of the digest's key."""
    text = path.decode(errors="replace")
    if text.encode() == path and len(path) <= LONGEST_KEY // 2 and not _UNFIT.search(text):
        return text
    suffix = suffix or fit_suffix(text)
    return f"~{hashlib.sha256(path).hexdigest()}{suffix}"


def fit_suffix(name: str) -> str:
    found = re.search(r"\.[A-Za-z0-9]{1,8}$", name)
    return found[0] if found else ""


def _read_source(record: Record) -> bytes | None:
    """The image; None if it can no longer be read. Raises StoreFailed, OSError if it may be there again later."""
    try:
        return origin_of(record.inbox_path).read_source(record)
    except StoreFailed:
        raise
    except OSError as error:
        if error.errno in SCARCE or error.errno in AWAY:
            raise
        path = os.fsdecode(record.location)
        is_missing = isinstance(error, FileNotFoundError) and not is_url(path)
        if is_missing and (why := why_not_deleted(record.inbox_path, record.path, record.seen_at)):
            raise FolderAway(f"{path} cannot be read: {why}") from error
        log.warning("image not uploaded; its sidecar is", path=path, error=error.strerror or str(error))
        return None
