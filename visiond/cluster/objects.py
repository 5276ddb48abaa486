"""Reads files and objects by their path or URL: whole, as a stream, or in ranges.

obstore repeats requests that fail, but not if the connection is cut in the middle of an answer; `again` does that, and
waits longer for a store that is away."""

from __future__ import annotations

import io
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, TypeVar

from daemon.errors import VisiondError
from daemon.stores.opening import StoreFailed, find_trouble, list_objects, store_errors, store_of
from daemon.stores.urls import BUCKETS, is_url, split_url

BUFFER_BYTES = 8 << 20
PIECE_BYTES = 1 << 20
LEAST_TRIES, MOST_TRIES = 3, 6  # our own tries; obstore itself may try for minutes in each
PATIENCE_SECONDS = 120.0  # after this time there are only LEAST_TRIES tries
PAUSE_SECONDS = 0.25  # doubled after each try
T = TypeVar("T")


class StoreAway(VisiondError):
    """A store does not answer, or no longer accepts the credentials: no object is the cause."""

    exit_status = os.EX_IOERR


def again(url: str, work: Callable[[], T]) -> T:
    """The result of `work`, which is repeated while the store fails in a way that may pass. Raises StoreFailed, or StoreAway
    if the store cannot be listed either."""
    began = time.monotonic()
    for tried in itertools.count(1):
        try:
            with store_errors(url):
                return work()
        except StoreFailed as error:
            if not error.is_general:
                raise
            is_late = tried >= LEAST_TRIES and time.monotonic() > began + PATIENCE_SECONDS
            if is_late or tried == MOST_TRIES:
                _judge(url, error)
                raise
        time.sleep(PAUSE_SECONDS * 2**tried)
    raise AssertionError


def _judge(url: str, error: StoreFailed) -> None:
    """Raises StoreAway if the store is the cause, and not this object."""
    if url.partition(":")[0] in BUCKETS and find_trouble(url.rpartition("/")[0]):
        raise StoreAway(f"{error}. When the store is back, run the same command with --resume.") from error


def read_object(url: str, offset: int = 0, length: int = 0) -> bytes:
    """All bytes of a file or object, or a range of them. Raises OSError."""
    if not is_url(url):
        with open(url, "rb") as file:
            file.seek(offset)
            return file.read(length) if length else file.read()
    import obstore

    root, path = split_url(url)

    def read() -> bytes:
        store = store_of(root)
        if length:
            return bytes(obstore.get_range(store, path, start=offset, length=length))
        return bytes(obstore.get(store, path).bytes())

    return again(url, read)


def list_again(url: str) -> Iterator[Sequence[Any]]:
    """The objects below a prefix, by page, as mappings of obstore. After an error the listing goes on behind the last
    object; a store that cannot do that lists some objects twice."""
    root, prefix = split_url(url)
    last, pages = "", None

    def next_page() -> Sequence[Any] | None:
        nonlocal pages
        held, pages = pages or list_objects(store_of(root), prefix, last), None
        page = next(held, None)
        pages = held  # after an error this line is not reached, and a new listing begins
        return page

    while (page := again(f"{url}/", next_page)) is not None:
        yield page
        last = page[-1]["path"] if page else last


def open_stream(url: str) -> BinaryIO:
    """A file or object to read from its start to its end, by one request. Raises OSError, also while it is read."""
    if not is_url(url):
        return open(url, "rb")
    import obstore

    root, path = split_url(url)
    answer = again(url, lambda: obstore.get(store_of(root), path))
    return io.BufferedReader(_Stream(url, answer))


def open_object(url: str) -> BinaryIO:
    """A file or object to read and to seek in; its server must answer requests for a range. Raises OSError, also while
    it is read."""
    if not is_url(url):
        return open(url, "rb")
    import obstore

    root, path = split_url(url)
    with store_errors(url):
        return io.BufferedReader(
            _Reader(url, obstore.open_reader(store_of(root), path, buffer_size=BUFFER_BYTES))
        )


class _Stream(io.RawIOBase):
    """The pieces of an answer as a file, because obstore's own objects are not Python files. If the connection is cut, it
    asks for the rest of the same version."""

    def __init__(self, url: str, answer: Any) -> None:
        self._url, self._tag = url, answer.meta["e_tag"]
        self._pieces: Iterator[Any] = iter(answer.stream(PIECE_BYTES))
        self._left, self._read, self._is_cut = memoryview(b""), 0, False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._left:
            self._left = memoryview(again(self._url, self._next_piece) or b"")
            self._read += len(self._left)
        size = min(len(buffer), len(self._left))
        buffer[:size], self._left = self._left[:size], self._left[size:]
        return size

    def _next_piece(self) -> Any:
        """None at the end."""
        import obstore

        if self._is_cut:
            root, path = split_url(self._url)
            options = {"range": {"offset": self._read}} | ({"if_match": self._tag} if self._tag else {})
            self._pieces = iter(obstore.get(store_of(root), path, options=options).stream(PIECE_BYTES))
        self._is_cut = True
        piece = next((piece for piece in self._pieces if len(piece)), None)
        self._is_cut = False
        return piece


class _Reader(io.RawIOBase):
    """obstore's reader of ranges as a file."""

    def __init__(self, url: str, reader: Any) -> None:
        self._url, self._reader = url, reader

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._reader.seek(offset, whence))

    def tell(self) -> int:
        return int(self._reader.tell())

    def readinto(self, buffer: Any) -> int:
        at = self._reader.tell()

        def read() -> Any:
            self._reader.seek(at)
            return self._reader.read(len(buffer))

        piece = memoryview(again(self._url, read))
        buffer[: len(piece)] = piece
        return len(piece)
