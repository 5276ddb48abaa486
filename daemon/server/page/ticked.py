"""What can be done with the images that are ticked in the gallery: process them again, or download their files or results."""

from __future__ import annotations

import io
import os
import re
import time
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime

import anyio
from anyio.to_thread import run_sync
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from daemon.config.loading import Config
from daemon.core.jobs import JobStatus
from daemon.ledger.record import Record
from daemon.ledger.records import Reader
from daemon.results.columns import Columns
from daemon.results.export import write_csv, write_jsonl
from daemon.server.app import read_form
from daemon.server.asked import Asked, number_in
from daemon.server.page.pictures import PART, NoPicture, read_source
from daemon.terminal import control

MOST = 500  # downloaded at once: proxies refuse the address of more
MOST_ARCHIVES = 2  # sent at once, each of which has a file in memory
MISSING = "not in this archive.txt"
# Of the times that a zip file can have, a day from its ends: no time zone leads out of it.
OLDEST = datetime(1980, 1, 2, tzinfo=UTC).timestamp()
NEWEST = datetime(2107, 12, 30, tzinfo=UTC).timestamp()
REFUSED = re.compile(r'[\x00-\x1f\x7f"*:<>?\\|]')  # by Windows, in names
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
        return Originals(await self._records(request), self._archives)

    async def results(self, request: Request) -> Response:
        """Of those that are DONE, as in an export."""
        if (format := request.path_params["format"]) not in FORMATS:
            raise HTTPException(404)
        records = [each for each in await self._records(request) if each.status is JobStatus.DONE]
        out = io.BytesIO()
        records = [each for each in records if not each.damage]
        if format == "csv":
            await run_sync(write_csv, out, records, Columns(self._config.stage_names), "utf-8-sig")
        else:
            await run_sync(write_jsonl, out, records)
        return Response(out.getvalue(), headers=_attached(request.url.path), media_type=FORMATS[format])

    async def _records(self, request: Request) -> list[Record]:
        ids = _numbers_in(request.query_params.getlist("id"))
        if not 0 < len(ids) <= MOST:
            raise HTTPException(400, f"Tick 1 to {MOST} images to download them; {len(ids)} are ticked.")
        return await run_sync(self._reader.find_numbers, ids)


def _numbers_in(texts: Iterable[str]) -> list[int]:
    """Of images, each once."""
    return [number for each in dict.fromkeys(texts) if (number := number_in(each))]


class Originals(Response):
    """The files of images in a zip archive, which is sent while it is made."""

    def __init__(self, records: Sequence[Record], limiter: anyio.CapacityLimiter) -> None:
        """limiter: of the archives that are sent at once."""
        super().__init__()
        self._records, self._limiter = records, limiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._limiter:
            answer = StreamingResponse(
                pack(self._records), headers=_attached(scope["path"]), media_type="application/zip"
            )
            await answer(scope, receive, send)


def pack(records: Iterable[Record]) -> Iterator[bytes]:
    """The files of images as a zip archive, in parts that are made as they are asked for. Files that are gone or have changed
    since are listed in one more file."""
    sink, missing, names = _Sink(), "", {MISSING}
    with zipfile.ZipFile(sink, "w") as archive:  # not deflated: pictures are compressed
        for record in records:
            name = _name_of(record)
            while name.lower() in names:  # of another inbox, or for a file system that takes them for equal
                name = f"{record.id} {name.replace('/', ' ')}"
            names.add(name.lower())
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
        if missing:
            archive.writestr(MISSING, missing)
    yield sink.take()


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
    """In an archive: with no letter that a file system refuses, and within the folder where it is unpacked, as the key of a
    store may have any parts."""
    path = os.fsdecode(record.path).encode(errors="replace").decode()
    return "/".join("_" if part in ("", ".", "..") else REFUSED.sub("_", part) for part in path.split("/"))


def _time_of(record: Record) -> tuple[int, int, int, int, int, int]:
    when = time.localtime(min(max(OLDEST, record.version.mtime_ns / 1e9), NEWEST))
    return when.tm_year, when.tm_mon, when.tm_mday, when.tm_hour, when.tm_min, when.tm_sec


def _attached(path: str) -> dict[str, str]:
    return {"content-disposition": f'attachment; filename="visiond-{path.rpartition("/")[2]}"'}
