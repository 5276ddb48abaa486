"""Reads files and objects by their path or URL: whole, as a stream, or in ranges.

obstore repeats requests that fail, but not if the connection is cut in the middle of an answer; that is done here. And
`again` waits longer for a bucket that is away. A web server gets only obstore's own tries, as lists of the web have
many URLs whose servers are gone."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, TypeVar
from urllib.parse import urlsplit

from daemon.core.errors import VisiondError
from daemon.core.stores import (
    CREDENTIALS,
    StoreFailed,
    StoreUnusable,
    list_objects,
    store_errors,
    store_of,
    try_listing,
)
from daemon.core.urls import BUCKETS, is_url, split_url

BUFFER_BYTES = 8 << 20
PIECE_BYTES = 1 << 20
# How long tries are repeated. obstore itself may repeat the last request for as long again.
PATIENCE_SECONDS = 180.0
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.25, 15.0  # between tries; doubled after each
T = TypeVar("T")


class StoreAway(VisiondError):
    """A store does not answer, or no longer accepts the credentials: no object is the cause."""

    exit_status = os.EX_IOERR


class NoStore(VisiondError):
    """The environment does not say how to open a store: no object is the cause, and no waiting helps."""

    exit_status = os.EX_CONFIG


def locate(url: str) -> tuple[Any, str]:
    """The store of a URL, and the path in it. Raises NoStore, or StoreUnusable if the URL itself is wrong."""
    try:
        root, path = split_url(url)
        return store_of(root), path
    except StoreUnusable as error:
        if _is_in_bucket(url):
            raise NoStore(f"{error}.") from None
        raise
    except ValueError as error:
        raise StoreUnusable(f"{url.partition('?')[0]}: this is no URL: {error}") from None


def _is_in_bucket(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in BUCKETS and bool(parts.netloc)


def again(url: str, work: Callable[[], T], *, is_open: bool = False) -> T:
    """The result of `work`, which is repeated while the store fails in a way that may pass: for PATIENCE_SECONDS if it
    is a bucket, or a web server that has begun to answer (is_open). Raises StoreFailed, or StoreAway if the store
    cannot be listed either."""
    is_patient = is_open or _is_in_bucket(url)
    deadline, pause, is_judged = time.monotonic() + PATIENCE_SECONDS, PAUSE_SECONDS, False
    while True:
        try:
            with store_errors(url):
                return work()
        except StoreFailed as error:
            if not (error.is_general and is_patient) or is_judged:
                raise
            if time.monotonic() >= deadline:
                _judge(url, error)
                is_judged = True  # one more try, as the store may just have come back
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def _judge(url: str, error: StoreFailed) -> None:
    """Raises StoreAway if the store is the cause, and not this object. A store may refuse the listing alone."""
    if not _is_in_bucket(url):
        return
    try:
        try_listing(url.rpartition("/")[0])
    except StoreFailed as trouble:
        if trouble.is_general:
            end = "it accepts the credentials" if trouble.code in CREDENTIALS else "the store is back"
            raise StoreAway(f"{error}. When {end}, run the same command with --resume.") from error
    except FileNotFoundError:
        pass  # the store answers


def read_object(url: str, offset: int = 0, length: int = 0) -> bytes:
    """All bytes of a file or object, or a range of them. Raises OSError."""
    if not is_url(url):
        with open(url, "rb") as file:
            file.seek(offset)
            return file.read(length) if length else file.read()
    import obstore
    from obstore.exceptions import BaseError

    store, path = locate(url)
    options: Any = {"range": (offset, offset + length)} if length else {}

    def read() -> bytes:
        answer = obstore.get(store, path, options=options)
        try:
            return bytes(answer.bytes())
        except (BaseError, OSError):  # the answer was cut
            return bytes(obstore.get(store, path, options=options).bytes())

    return again(url, read)


def list_again(url: str) -> Iterator[Sequence[Any]]:
    """The objects below a prefix, by page, as mappings of obstore. After an error the listing goes on behind the last
    object; a store that cannot do that lists some objects twice."""
    store, prefix = locate(url)
    last, pages = "", None

    def next_page() -> Sequence[Any] | None:
        nonlocal pages
        held, pages = pages or list_objects(store, prefix, last), None
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

    store, path = locate(url)
    answer = again(url, lambda: obstore.get(store, path))
    return io.BufferedReader(_Stream(url, answer))


def open_object(url: str) -> BinaryIO:
    """A file or object to read and to seek in; its server must answer requests for a range. Raises OSError, also while
    it is read."""
    if not is_url(url):
        return open(url, "rb")
    import obstore

    store, path = locate(url)

    def open_reader() -> Any:
        try:
            with store_errors(url):
                return obstore.open_reader(store, path, buffer_size=BUFFER_BYTES)
        except StoreFailed as error:
            if error.status not in (400, 403):
                raise
        # The answer to this HEAD has no body, and so no code that says whether the credentials are the cause. The
        # answer to a GET has one.
        obstore.get_range(store, path, start=0, length=1)
        return obstore.open_reader(store, path, buffer_size=BUFFER_BYTES)

    return io.BufferedReader(_Reader(url, again(url, open_reader)))


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
            self._left = memoryview(again(self._url, self._next_piece, is_open=True) or b"")
            self._read += len(self._left)
        size = min(len(buffer), len(self._left))
        buffer[:size], self._left = self._left[:size], self._left[size:]
        return size

    def _next_piece(self) -> Any:
        """None at the end."""
        import obstore

        if self._is_cut:
            store, path = locate(self._url)
            options = {"range": {"offset": self._read}} | ({"if_match": self._tag} if self._tag else {})
            self._pieces = iter(obstore.get(store, path, options=options).stream(PIECE_BYTES))
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

        piece = memoryview(again(self._url, read, is_open=True))
        buffer[: len(piece)] = piece
        return len(piece)
