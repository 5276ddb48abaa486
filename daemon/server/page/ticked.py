"""What can be done with the images that are ticked in the gallery: process them again, or download their files or results."""

from __future__ import annotations

import io
import itertools
import os
import re
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime

import anyio
import structlog
from anyio.to_thread import run_sync
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import Message, Receive, Scope, Send

from daemon.config.loading import Config
from daemon.core.jobs import JobStatus
from daemon.exports.columns import ExportColumns
from daemon.exports.export import write_csv, write_jsonl
from daemon.ledger.record import Record
from daemon.ledger.records import Reader
from daemon.server import control
from daemon.server.app import read_form
from daemon.server.asked import Asked, number_in, refuse_others
from daemon.server.page.pictures import PART, NoPicture, read_source

log = structlog.get_logger()

MOST = 500  # downloaded at once: proxies refuse the address of more
MOST_ARCHIVES = 2  # sent at once, each of which has a file in memory
RETRY_SECONDS = 30  # after which another one may be asked for
# What a reader has to take, as others wait for its place; and how far it may fall behind that.
LEAST_BYTES_PER_SECOND, LATE_SECONDS = 128 << 10, 60.0
LONGEST_SAID = 40  # letters of what is no number
MISSING = "not in this archive.txt"
# Of the times that a zip file can have, a day from its ends: no time zone leads out of it.
OLDEST = datetime(1980, 1, 2, tzinfo=UTC).timestamp()
NEWEST = datetime(2107, 12, 30, tzinfo=UTC).timestamp()
# By Windows: in names, at their ends, and as names, whatever follows the first dot. . and .. lead out of a folder.
REFUSED = re.compile(r'[\x00-\x1f\x7f"*:<>?\\|]')
ENDS = re.compile(r"[. ](?=[. ]*$)")
DEVICES = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³]) *(\.|$)", re.IGNORECASE)
# Results as `visiond export` writes them, with the mark at the start that spreadsheets want.
FORMATS = {"csv": "text/csv; charset=utf-8", "jsonl": "application/jsonl"}


class Ticked:
    def __init__(self, config: Config, reader: Reader) -> None:
        self._config = config
        self._reader = reader
        self._archives = anyio.CapacityLimiter(MOST_ARCHIVES)

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/images/again", self.again, methods=["POST"]),
            Route("/images/originals.zip", self.originals),
            Route("/images/results.{format}", self.results),
        ]

    async def again(self, request: Request) -> Response:
        """Those that are ticked back to pending, done or failed; or all that failed. Then the same list once more."""
        asked, form = Asked.of(request), await read_form(request)
        ids = _numbers_in(form.get("id", []))
        statuses = [JobStatus.DONE, JobStatus.FAILED]
        if "all" in form:
            ids, statuses = await run_sync(self._reader.failed_ids), [JobStatus.FAILED]
        counts = [await run_sync(control.put_back, self._config, status, ids) for status in statuses]
        here = asked.values() | {"queued": str(sum(counts))}
        return RedirectResponse(self._config.page.address("/", **here), 303)

    async def originals(self, request: Request) -> Response:
        records, absent = await self._records(request)
        return Originals(records, self._archives, absent)

    async def results(self, request: Request) -> Response:
        """Of those that are DONE, as in an export."""
        if (format := request.path_params["format"]) not in FORMATS:
            raise HTTPException(404)
        found, _ = await self._records(request)
        records = [each for each in found if each.status is JobStatus.DONE and not each.damage]
        if not records:
            raise HTTPException(409, "None of these images has a result: only those that are DONE have one.")
        out = io.BytesIO()
        if format == "csv":
            await run_sync(write_csv, out, records, ExportColumns(self._config.stage_names), "utf-8-sig")
        else:
            await run_sync(write_jsonl, out, records)
        return Response(out.getvalue(), headers=_attached(request.url.path), media_type=FORMATS[format])

    async def _records(self, request: Request) -> tuple[list[Record], list[int]]:
        """Also the numbers that no image has. Raises HTTPException if there is none of the images."""
        refuse_others(request, ["id"])
        ids = _numbers_in(request.query_params.getlist("id"))
        if not 0 < len(ids) <= MOST:
            raise HTTPException(400, f"Tick 1 to {MOST} images to download them; {len(ids)} are ticked.")
        records = await run_sync(self._reader.find_numbers, ids)
        known = {record.id for record in records}
        absent = [number for number in ids if number not in known]
        if not records:
            which = f"image {absent[0]}" if len(absent) == 1 else "image of these numbers"
            raise HTTPException(404, f"There is no {which}.")
        return records, absent


def _numbers_in(texts: Iterable[str]) -> list[int]:
    """Of images, each once. Raises HTTPException."""
    numbers = []
    for text in texts:
        if (number := number_in(text)) is None:
            raise HTTPException(
                400, f"id must be the number of an image, and {text[:LONGEST_SAID]!r} is none."
            )
        numbers.append(number)
    return list(dict.fromkeys(numbers))


class Originals(Response):
    """The files of images in a zip archive, which is sent while it is made."""

    def __init__(
        self, records: Sequence[Record], limiter: anyio.CapacityLimiter, absent: Sequence[int] = ()
    ) -> None:
        """limiter: of the archives that are sent at once. absent: numbers that were asked for, and that no image has."""
        super().__init__()
        self._records, self._limiter, self._absent = records, limiter, absent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises HTTPException if too many are being sent, or if none of the files is there."""
        try:
            self._limiter.acquire_nowait()
        except anyio.WouldBlock:
            raise HTTPException(
                503,
                f"{MOST_ARCHIVES} downloads of files are being sent already. Try again when one of them has ended.",
                {"retry-after": str(RETRY_SECONDS)},
            ) from None
        try:
            parts = pack(self._records, self._absent) if scope["method"] != "HEAD" else iter((b"",))
            first = await run_sync(next, parts)  # it is known with the first file that there is one
            parts = itertools.chain((first,), parts)
            answer = StreamingResponse(parts, headers=_attached(scope["path"]), media_type="application/zip")
            await answer(scope, receive, PacedSend(send).send)
        except NoPicture as error:
            raise HTTPException(404, str(error)) from None
        except TakenTooSlowly:
            log.warning("a download was ended: its reader took too little", path=scope["path"])
        finally:
            self._limiter.release()


class TakenTooSlowly(Exception):
    """By whoever asked for it."""


class PacedSend:
    """Ends an answer whose reader takes too little. The time in which its parts are made does not count."""

    def __init__(self, send: Send, clock: Callable[[], float] = time.monotonic) -> None:
        self._send, self._clock = send, clock
        self._seconds = LATE_SECONDS  # left for the next part

    async def send(self, message: Message) -> None:
        """Raises TakenTooSlowly."""
        started = self._clock()
        with anyio.move_on_after(self._seconds) as limit:
            await self._send(message)
        if limit.cancelled_caught:
            raise TakenTooSlowly
        earned = len(message.get("body", b"")) / LEAST_BYTES_PER_SECOND
        self._seconds = min(LATE_SECONDS, self._seconds + earned - (self._clock() - started))


def pack(records: Iterable[Record], absent: Iterable[int] = ()) -> Iterator[bytes]:
    """The files of images as a zip archive, in parts that are made as they are asked for. Files that are gone or have changed
    since are listed in one more file, and so are the numbers that no image has. Raises NoPicture if all files are."""
    sink, names = _Sink(), Names()
    missing = "".join(f"There is no image {number}.\n" for number in absent)
    with zipfile.ZipFile(sink, "w") as archive:  # not deflated: pictures are compressed
        for record in records:
            name = names.choose(record)
            try:
                content = memoryview(read_source(record))
            except NoPicture as error:
                missing += f"{name}: {error}\n"
                continue
            entry = zipfile.ZipInfo(name, _time_of(record))
            entry.file_size, entry.external_attr = len(content), 0o644 << 16
            with archive.open(entry, "w") as opened:
                for at in range(0, len(content), PART):
                    opened.write(content[at : at + PART])
                    yield sink.take()
            del content  # or the next file would be read while this one is in memory
        if not archive.namelist():
            raise NoPicture(f"None of these images has a file to download. {missing.splitlines()[0]}")
        if missing:
            archive.writestr(MISSING, missing)
    yield sink.take()


class Names:
    """Of files in an archive, so that all of them can be unpacked on any file system."""

    def __init__(self) -> None:
        self._files, self._folders = {MISSING}, set[str]()

    def choose(self, record: Record) -> str:
        """Its path, or if that is taken, also by a folder or for a file system to which case is nothing, with its number."""
        name = _name_of(record)
        while self._is_taken(name.lower()):
            name = f"{record.id} {name.replace('/', ' ')}"
        self._files.add(name.lower())
        self._folders.update(_folders_of(name.lower()))
        return name

    def _is_taken(self, name: str) -> bool:
        is_one = name in self._files or name in self._folders
        return is_one or not self._files.isdisjoint(_folders_of(name))


def _folders_of(name: str) -> list[str]:
    """Those that it is in."""
    return [name[:place] for place, letter in enumerate(name) if letter == "/"]


class _Sink(io.BytesIO):
    """What was written since it was last asked."""

    def tell(self) -> int:
        raise io.UnsupportedOperation("an archive that is sent has no way back")

    def take(self) -> bytes:
        part = self.getvalue()
        self.seek(0)
        self.truncate()
        return part


def _name_of(record: Record) -> str:
    """In an archive: with nothing that a file system refuses, and within the folder where it is unpacked, as the key of a
    store may have any parts."""
    path = os.fsdecode(record.path).encode(errors="replace").decode()
    parts = [ENDS.sub("_", REFUSED.sub("_", part)) or "_" for part in path.split("/")]
    return "/".join(f"_{part}" if DEVICES.match(part) else part for part in parts)


def _time_of(record: Record) -> tuple[int, int, int, int, int, int]:
    when = time.localtime(min(max(OLDEST, record.version.mtime_ns / 1e9), NEWEST))
    return when.tm_year, when.tm_mon, when.tm_mday, when.tm_hour, when.tm_min, when.tm_sec


def _attached(path: str) -> dict[str, str]:
    return {"content-disposition": f'attachment; filename="visiond-{path.rpartition("/")[2]}"'}
