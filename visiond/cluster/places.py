"""Where files are read and written: a folder, or a prefix of an object store. Credentials come from the environment,
in the store's usual way, and are never logged."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple, Protocol
from urllib.parse import quote

from daemon.errors import NotWritable
from daemon.ledger.files import sync_folder
from daemon.stores.opening import store_errors, store_of
from daemon.stores.urls import is_url, split_url

PARTIAL = ".partial"


class Entry(NamedTuple):
    """A file or object. version: changes when its bytes do, as far as the place can tell."""

    name: bytes  # relative to the place
    size: int  # bytes
    version: bytes


class Place(Protocol):
    """url: absolute, without a slash at its end."""

    url: str

    def names(self, folder: str) -> Iterator[str]:
        """The names of the files in a sub-folder, without those of folders in it; none if it does not exist."""

    def read(self, name: str) -> bytes:
        """All bytes of a file. Raises OSError."""

    def write_whole(self, name: str, data: bytes) -> bool:
        """Create a file, whole or not at all, so that it outlives a power failure. Returns False, and writes nothing,
        if it exists. Raises NotWritable."""

    def clean(self) -> None:
        """Remove what writers that were killed have left."""


def open_place(text: str) -> Place:
    """A folder, or s3://bucket/prefix and so on. Raises MissingLibrary, StoreFailed."""
    return Bucket(text) if is_url(text) else Folder(text)


class Folder:
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
            with open(partial, "xb") as out:
                out.write(data)
                out.flush()
                os.fsync(out.fileno())
            try:
                os.link(partial, file)  # a rename would replace the file of another writer
            except FileExistsError:
                return False
            finally:
                os.unlink(partial)
            sync_folder(os.fsencode(folder))
        except OSError as error:
            raise NotWritable(f"{file} cannot be written: {error.strerror or error}.") from error
        return True

    def clean(self) -> None:
        for folder in ("", "_visiond"):
            for name in self.names(folder):
                if name.startswith(".") and name.endswith(PARTIAL):
                    with contextlib.suppress(OSError):
                        os.unlink(os.path.join(self.url, folder, name))


class Bucket:
    """A prefix of an object store. A put is whole by itself; If-None-Match keeps what is there."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._root, self._prefix = split_url(self.url)

    def names(self, folder: str) -> Iterator[str]:
        import obstore

        prefix = "/".join(filter(None, (self._prefix, folder)))
        with store_errors(self.url):
            for meta in obstore.list_with_delimiter(store_of(self._root), prefix or None)["objects"]:
                yield meta["path"].rpartition("/")[2]

    def read(self, name: str) -> bytes:
        return read_object(f"{self.url}/{quote(name)}")

    def write_whole(self, name: str, data: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        try:
            with store_errors(self.url):
                obstore.put(
                    store_of(self._root),
                    f"{self._prefix}/{name}".lstrip("/"),
                    data,
                    mode="create",
                    use_multipart=False,
                )
        except AlreadyExistsError:
            return False
        return True

    def clean(self) -> None:
        """A put that is interrupted leaves nothing."""


def read_object(url: str, offset: int = 0, length: int = 0) -> bytes:
    """All bytes of a file or object, or a range of them. Raises OSError."""
    if not is_url(url):
        with open(url, "rb") as file:
            file.seek(offset)
            return file.read(length) if length else file.read()
    import obstore

    root, path = split_url(url)
    with store_errors(url):
        store = store_of(root)
        if length:
            return bytes(obstore.get_range(store, path, start=offset, length=length))
        return bytes(obstore.get(store, path).bytes())


def open_object(url: str) -> BinaryIO:
    """A file or object to read and to seek in. Raises OSError."""
    if not is_url(url):
        return open(url, "rb")
    import obstore

    root, path = split_url(url)
    with store_errors(url):
        reader: BinaryIO = obstore.open_reader(store_of(root), path, buffer_size=1 << 23)
        return reader
