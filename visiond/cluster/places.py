"""Where files are read and written: a folder, or a prefix of an object store. Credentials come from the environment,
in the store's usual way, and are never logged."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from typing import Protocol
from urllib.parse import quote

from daemon.core.errors import NotWritable
from daemon.core.urls import is_url, split_url
from stages.contract.folders import sync
from visiond.cluster.reading.objects import again, locate, read_object

PARTIAL = ".partial"


class ClusterPlace(Protocol):
    """url: absolute, without a slash at its end."""

    url: str

    def names(self, folder: str) -> Iterator[str]:
        """The names of the files in a sub-folder, without those of folders in it; none if it does not exist."""

    def read(self, name: str) -> bytes:
        """All bytes of a file. Raises OSError."""

    def write_whole(self, name: str, data: bytes) -> bool:
        """Create a file, whole or not at all, so that it outlives a power failure. Returns False, and writes nothing, if it
        exists; a store may return True if it has the same bytes. Raises NotWritable, StoreFailed, StoreAway, NoStore."""

    def clean(self) -> None:
        """Remove what writers that were killed have left."""


def open_place(text: str) -> ClusterPlace:
    """A folder, or s3://bucket/prefix and so on. Reaches no store yet."""
    return Bucket(text) if is_url(text) else ClusterFolder(text)


class ClusterFolder:
    def __init__(self, path: str) -> None:
        self.url = os.path.abspath(os.path.expanduser(path))

    def names(self, folder: str) -> Iterator[str]:
        with contextlib.suppress(FileNotFoundError), os.scandir(os.path.join(self.url, folder)) as entries:
            yield from (entry.name for entry in entries)

    def read(self, name: str) -> bytes:
        with open(os.path.join(self.url, name), "rb") as file:
            return file.read()

    def write_whole(self, name: str, data: bytes) -> bool:
        file = os.path.join(self.url, name)
        folder, base = os.path.split(file)
        partial = os.path.join(folder, f".{base}.{secrets.token_hex(4)}{PARTIAL}")
        try:
            os.makedirs(folder, exist_ok=True)
            with open(partial, "xb", opener=_for_owner_and_group) as out:
                out.write(data)
                out.flush()
                os.fsync(out.fileno())
            try:
                os.link(partial, file)  # a rename would replace the file of another writer
            except FileExistsError:
                return False
            finally:
                os.unlink(partial)
            sync(os.fsencode(folder))
        except OSError as error:
            raise NotWritable(f"{file} cannot be written: {error.strerror or error}.") from error
        return True

    def clean(self) -> None:
        for folder in ("", "_visiond"):
            for name in self.names(folder):
                if name.startswith(".") and name.endswith(PARTIAL):
                    with contextlib.suppress(OSError):
                        os.unlink(os.path.join(self.url, folder, name))


def _for_owner_and_group(path: str, flags: int) -> int:
    """As all results: they have the text of images."""
    return os.open(path, flags, 0o640)


class Bucket:
    """A prefix of an object store. A put is whole by itself; If-None-Match keeps what is there."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._prefix = split_url(self.url)[1]

    def names(self, folder: str) -> Iterator[str]:
        import obstore

        prefix = "/".join(filter(None, (self._prefix, folder)))
        store, _ = locate(self.url)
        found = again(f"{self.url}/", lambda: obstore.list_with_delimiter(store, prefix or None))
        for meta in found["objects"]:
            yield meta["path"].rpartition("/")[2]

    def read(self, name: str) -> bytes:
        return read_object(f"{self.url}/{quote(name)}")

    def write_whole(self, name: str, data: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        store, _ = locate(self.url)
        key = f"{self._prefix}/{name}".lstrip("/")

        def put() -> None:
            obstore.put(store, key, data, mode="create", use_multipart=False)

        try:
            again(f"{self.url}/", put)
        except AlreadyExistsError:
            # The store may have taken a put whose answer was lost, and obstore or `again` has repeated it.
            return self.read(name) == data
        return True

    def clean(self) -> None:
        """A put that is interrupted leaves nothing."""
