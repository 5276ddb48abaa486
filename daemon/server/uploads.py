"""POST /api/images: programs hand over files, which become files of an inbox before the answer.

A body is streamed to the disk, a few hundred KiB in memory at a time. The answer comes when the file would survive a power
failure. Nothing else is new: the daemon finds the file in its inbox like any other.
"""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import anyio
import structlog
from anyio.to_thread import run_sync
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from daemon.config.loading import Config
from daemon.config.sections import Inbox
from daemon.core.errors import Refusal, VisiondError
from daemon.core.jobs import JobStatus
from daemon.ledger.record import Record
from daemon.ledger.records import Reader
from daemon.ledger.statements import SQL
from daemon.monitoring.series import Series
from daemon.server.app import HOW_TO_UPLOAD
from daemon.server.incoming import WRITE_BYTES, Incoming, NameTaken, Receiver, UploadTooLarge
from stages.contract.base import ImageError, Reason

log = structlog.get_logger()

MOST_UPLOADS = 128  # requests at once
CLEAR_SECONDS = 1.0  # between two looks whether another server has ended
MOST_FILES = 64  # in one request
THREADS = 16  # that flush, and half as many that write: a dead mount must not use up those of the page
COUNT_SECONDS = 1.0  # between two counts of what waits …
COUNT_REST = 20  # … which are followed by at least as many times their duration of rest
# What curl sends as, with -d and with --data-binary.
URLENCODED = b"application/x-www-form-urlencoded"
LOST_BY_CURL = b"\0\r\n"  # with -d: every image has some of these bytes
HOW_TO_SEND = f"`curl -d` removes line ends and zero bytes from a file. {HOW_TO_UPLOAD}"
BUSY_SECONDS, BEHIND_SECONDS, FULL_SECONDS = 1, 5, 60  # after which a program may try again


OF_STATUS = {
    400: Refusal.REQUEST,
    403: Refusal.INBOX,
    404: Refusal.INBOX,
    409: Refusal.CHANGED,
    413: Refusal.SIZE,
    415: Refusal.FORMAT,
    503: Refusal.AWAY,
}


class UploadRefused(HTTPException):
    """An upload is not taken. why: if the status does not say it."""

    def __init__(
        self, status: int, sentence: str, retry_seconds: int = 0, why: Refusal | None = None
    ) -> None:
        super().__init__(status, sentence, {"retry-after": str(retry_seconds)} if retry_seconds else None)
        self.why = why or OF_STATUS[status]


class Uploads:
    """The inboxes that take uploads."""

    def __init__(self, config: Config, reader: Reader, metrics: Series) -> None:
        self._metrics = metrics
        self._page = config.page
        self._reader = reader
        self._receivers = {
            inbox.name: Receiver(inbox, partial(self._has_taken, config, inbox))
            for inbox in config.inbox
            if inbox.uploads
        }
        self._open = 0  # requests
        self._announced = 0  # bytes that their bodies have
        self._waiting: dict[bytes, int] = {}  # images, by inbox
        self._next_count_at = 0.0  # monotonic; math.inf: one is under way
        self._writers = ThreadPoolExecutor(THREADS // 2, "upload")
        self._flushers = anyio.CapacityLimiter(THREADS)

    async def clear(self) -> None:
        """Remove what servers that were killed have left. One that is killed while the disk is slow takes a while to end."""
        async with anyio.create_task_group() as tasks:
            for receiver in self._receivers.values():
                tasks.start_soon(self._clear, receiver)

    async def _clear(self, receiver: Receiver) -> None:
        while True:
            try:
                if not await run_sync(receiver.clear, abandon_on_cancel=True, limiter=self._flushers):
                    return
            except OSError as error:
                log.warning(
                    "unfinished uploads are not removed", inbox=receiver.settings.place, why=str(error)
                )
                return
            await anyio.sleep(CLEAR_SECONDS)

    async def receive(self, request: Request) -> tuple[Inbox, list[tuple[bytes, str]]]:
        """The name and the digest of each file of a request: they are in their inbox now, durable. Raises UploadRefused,
        LedgerUnusable."""
        count = self._metrics.uploads.labels
        try:
            inbox, files = await self._receive(request)
        except UploadRefused as error:
            count("refused", error.why).inc()
            raise
        except VisiondError:
            count("refused", Refusal.LEDGER).inc()
            raise
        placed = [each for each in files if not each.temporary]
        count("accepted" if placed else "repeated", "").inc()
        self._metrics.upload_bytes.inc(sum(each.size for each in placed))
        return inbox, [(os.fsencode(each.name), each.digest) for each in files]

    async def _receive(self, request: Request) -> tuple[Inbox, list[Incoming]]:
        receiver, announced = self._receiver(request.query_params.get("inbox", "")), _length_of(request)
        await self._admit(receiver)
        files: list[Incoming] = []
        self._open, self._announced = self._open + 1, self._announced + announced
        try:
            await self._fill(request, receiver, files)
            _check_names(receiver, files)
            await receiver.commit(files, self._announced, self._flushers)
        except ClientDisconnect:  # nobody reads the answer
            raise UploadRefused(
                400, "The request has ended before its body did.", why=Refusal.CUT_OFF
            ) from None
        except UploadTooLarge as error:
            raise UploadRefused(413, _problem(files, str(error))) from None
        except ImageError as error:
            if error.reason is Reason.EMPTY:
                raise UploadRefused(400, _problem(files, error.detail)) from None
            hint = f" {HOW_TO_SEND}" * (_type_of(request)[0] == URLENCODED)
            raise UploadRefused(415, _problem(files, error.detail) + hint) from None
        except NameTaken as error:
            raise UploadRefused(409, str(error)) from None
        except VisiondError:  # of the ledger
            raise
        except OSError as error:
            raise _explain(receiver, error) from error
        finally:
            self._open, self._announced = self._open - 1, self._announced - announced
            if any(each.temporary for each in files):
                with anyio.CancelScope(shield=True):
                    await run_sync(receiver.discard, files, limiter=self._flushers)
        root = receiver.settings.root
        self._waiting[root] = self._waiting.get(root, 0) + len(files)
        return receiver.settings, files

    # What is refused

    def _receiver(self, name: str) -> Receiver:
        if not self._receivers:
            raise UploadRefused(
                403, "No inbox takes uploads. Set uploads = true in an [[inbox]] of daemon.toml."
            )
        if len(self._receivers) == 1 and not name:
            return next(iter(self._receivers.values()))
        if name not in self._receivers:
            which = f"No inbox {name} takes uploads" if name else "Several inboxes take uploads"
            known = f"; name one with ?inbox=: {', '.join(self._receivers)}"
            if not any(self._receivers):
                known = ": the one that does has no `name` in daemon.toml, so leave ?inbox= out"
            raise UploadRefused(404 if name else 400, f"{which}{known}.")
        return self._receivers[name]

    async def _admit(self, receiver: Receiver) -> None:
        """Raises UploadRefused if no body is taken now."""
        if self._open >= MOST_UPLOADS:
            raise _later(f"{MOST_UPLOADS} uploads are under way.", BUSY_SECONDS, Refusal.BUSY)
        if await self._count(receiver.settings) >= self._page.uploads_waiting:
            raise _later(
                f"{self._page.uploads_waiting:,} images of this inbox wait already ([page] uploads_waiting).",
                BEHIND_SECONDS,
                Refusal.WAITING,
            )

    async def _count(self, inbox: Inbox) -> int:
        """How many images of an inbox wait: as of the last count, and those that were uploaded since."""
        started = time.monotonic()
        if started >= self._next_count_at:
            self._next_count_at = math.inf
            try:
                self._waiting = await run_sync(_count_waiting, self._reader)
            finally:
                ended = time.monotonic()
                self._next_count_at = ended + max(COUNT_SECONDS, COUNT_REST * (ended - started))
        return self._waiting.get(inbox.root, 0)

    def _has_taken(self, config: Config, inbox: Inbox, name: bytes, digest: str) -> bool:
        """Whether the ledger has this file, where the daemon moves or deletes files."""
        if config.keeps_in_place(inbox):
            return False
        record = find_file(self._reader, inbox.root, name)
        if record is None or record.status is JobStatus.GONE:
            return False
        if record.digest:
            return record.digest.hex() == digest
        # One without a digest that has ended was not even read, and may have left.
        return record.status is not JobStatus.PENDING

    # What is received

    async def _fill(self, request: Request, receiver: Receiver, files: list[Incoming]) -> None:
        """Write the files of the body, and add each to `files` as soon as there is one."""
        most_bytes = self._page.upload_bytes
        kind, options = _type_of(request)
        is_form, length = kind == b"multipart/form-data", _length_of(request)
        if not is_form and length > most_bytes:
            raise UploadTooLarge(most_bytes)
        boundary = options.get(b"boundary", b"")
        parts = _read_form(request, boundary) if is_form else _read_whole(request, kind == URLENCODED)
        async for part in parts:
            match part:
                case Begun(name):
                    if len(files) >= MOST_FILES:
                        raise UploadRefused(413, f"The form has more than {MOST_FILES} files.")
                    files.append(Incoming(name, most_bytes, receiver.settings.unpack))
                    # A full disk is found before the body is read.
                    if length >= WRITE_BYTES and len(files) == 1:
                        await self._begin(receiver, files[-1])
                case bytes():
                    files[-1].add(part)
                case None:
                    files[-1].finish()
                    if files[-1].file:  # otherwise each file of a form would keep a descriptor
                        await run_sync(files[-1].flush, limiter=self._flushers)
            # Of all of them, as a form may have many small ones.
            if sum(len(each.unwritten) for each in files) >= WRITE_BYTES:
                await self._begin(receiver, files[-1])
                await receiver.write(files[-1], self._writers)

    async def _begin(self, receiver: Receiver, each: Incoming) -> None:
        if each.file is None:
            await run_sync(receiver.begin, each, self._announced, limiter=self._flushers)


def _problem(files: Sequence[Incoming], detail: str) -> str:
    """Of the file that was being received: a form has several."""
    return ": ".join(filter(None, (files[-1].given if files else "", f"{detail}.")))


def _check_names(receiver: Receiver, files: Sequence[Incoming]) -> None:
    """Raises UploadRefused."""
    if not files:
        raise UploadRefused(400, "No part of the form has a file name. `curl -F file=@photo.jpg` sends one.")
    if ignored := next((each.name for each in files if receiver.ignores(each)), ""):
        raise UploadRefused(400, f"The inbox ignores {ignored}: see its `ignore` in daemon.toml.")


def _count_waiting(reader: Reader) -> dict[bytes, int]:
    roots = reader.inboxes()
    return {roots[number]: waiting.images for number, waiting in reader.count_waiting().items()}


def find_file(reader: Reader, inbox: bytes, path: bytes) -> Record | None:
    """The newest version of a file, as the ledger knows it. inbox: its folder, or its URL."""
    numbers = [number for number, root in reader.inboxes().items() if root == inbox]
    with reader.lend() as connection:
        rows = [row for each in numbers for row in connection.execute(SQL["find_by_path"], (each, path))]
    return next(iter(reader.assemble(rows, tolerant=True)), None)


class Begun(NamedTuple):
    """A file begins, with the name that the program gave it, or an empty one."""

    name: str


# What a body has, in order: for each file its beginning, its bytes, and None at its end.
Parts = AsyncIterator[Begun | bytes | None]


async def _read_whole(request: Request, may_be_spoiled: bool) -> Parts:
    """may_be_spoiled: by `curl -d`. Raises UploadRefused."""
    yield Begun(request.query_params.get("name", ""))
    size = 0
    async for part in request.stream():
        may_be_spoiled = may_be_spoiled and not any(byte in part for byte in LOST_BY_CURL)
        size += len(part)
        yield part
    if may_be_spoiled and size:
        raise UploadRefused(
            415,
            f"The body is a form, or `curl -d` has sent it, or the @ before the name of the file is missing. {HOW_TO_SEND}",
        )
    yield None


async def _read_form(request: Request, boundary: bytes) -> Parts:
    """Raises UploadRefused."""
    form = _Form()
    try:
        parser = MultipartParser(boundary, form.callbacks())
        async for part in request.stream():
            parser.write(part)
            for found in form.take():
                yield found
    except MultipartParseError as error:
        raise UploadRefused(400, f"The form cannot be read: {error}") from error
    if not form.is_whole:
        raise UploadRefused(400, "The form has ended before its last boundary; nothing of it is kept.")


class _Form:
    """Takes what a parser finds in a form. Parts without a file name are left out."""

    def __init__(self) -> None:
        self.is_whole = False
        self._found: list[Begun | bytes | None] = []
        self._field = self._value = b""
        self._named: dict[bytes, bytes] = {}
        self._is_file = False

    def callbacks(self) -> Any:
        return {
            "on_part_begin": self._named.clear,
            "on_header_field": self._take_field,
            "on_header_value": self._take_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._begin,
            "on_part_data": self._take_data,
            "on_part_end": self._end,
            "on_end": self._end_form,
        }

    def take(self) -> list[Begun | bytes | None]:
        found, self._found = self._found, []
        return found

    def _take_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _take_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        self._named[self._field.lower()] = self._value
        self._field = self._value = b""

    def _begin(self) -> None:
        _, options = parse_options_header(self._named.get(b"content-disposition", b""))
        self._is_file = b"filename" in options
        if self._is_file:
            self._found.append(Begun(options[b"filename"].decode(errors="replace")))

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._found.append(data[start:end])

    def _end(self) -> None:
        if self._is_file:
            self._found.append(None)

    def _end_form(self) -> None:
        self.is_whole = True


def _type_of(request: Request) -> tuple[bytes, dict[bytes, bytes]]:
    """The type of the body, and its options."""
    return parse_options_header(request.headers.get("content-type", ""))


def _length_of(request: Request) -> int:
    """Of the body, as the request says; 0 if it does not."""
    given = request.headers.get("content-length", "")
    return int(given) if given.isascii() and given.isdecimal() and len(given) < 19 else 0


def _later(sentence: str, seconds: int, why: Refusal) -> UploadRefused:
    return UploadRefused(429, f"{sentence} Try again later.", seconds, why)


def _explain(receiver: Receiver, error: OSError) -> UploadRefused:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _later("The disk of the inbox is full.", FULL_SECONDS, Refusal.DISK)
    why = f"The inbox {receiver.settings.place} cannot be written: {error.strerror or error}."
    return UploadRefused(503, why, FULL_SECONDS)
