"""The page's addresses for programs: images are uploaded, asked for, listed and searched, as JSON. /api/openapi.json
describes them (`openapi.py`)."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import anyio
import msgspec
from anyio.to_thread import run_sync
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from daemon.config.loading import Config
from daemon.config.sections import Inbox
from daemon.core.errors import SearchUnusable
from daemon.core.jobs import JobStatus
from daemon.ledger.records import Reader
from daemon.search.following import read_last
from daemon.search.query import DATES, QueryError
from daemon.search.searcher import Searcher
from daemon.server import control
from daemon.server.app import answer_json
from daemon.server.asked import Asked, find_images, number_in, refuse_others, refuse_unknown_bin
from daemon.server.openapi import (
    DAY,
    IMAGES,
    LONGEST_WAIT_SECONDS,
    MOST_IMAGES,
    NEAR_DUPLICATES,
    ORDERS,
    list_parameters,
    make_document,
)
from daemon.server.uploads import Uploads, find_file

if TYPE_CHECKING:
    from daemon.ledger.record import Record
    from daemon.monitoring.series import Series

MOST_WAITS = 256  # requests that wait for results at once; more are answered without
LOOK_SECONDS, LONGEST_LOOK_SECONDS = 0.02, 0.5  # between two looks whether an image has ended
Answer = Callable[[Request], Awaitable[Response]]
THREADS = 4  # that look into inboxes: a dead mount must not use up those of the page


class Api:
    """The handlers. An image is an object as `Record.outline` has it, with its address and its record."""

    def __init__(self, config: Config, reader: Reader, searcher: Searcher, metrics: Series) -> None:
        self.uploads = Uploads(config, reader, metrics)
        self._config = config
        self._reader = reader
        self._searcher = searcher
        self._address = config.page.address
        server = config.page.root_path or "/"
        self._document = make_document(server, reading_is_free=config.page_http.is_private)
        self._waits = 0  # that are under way
        self._lookers = anyio.CapacityLimiter(THREADS)

    def routes(self) -> list[BaseRoute]:
        return [
            _route("/api/images", self.images, "GET", "POST"),
            _route("/api/images/{id:number}", self.image),
            _route("/api/images/by-path/{path:path}", self.image_by_path),
            _route("/api/search", self.search),
            _route("/api/status", self.status),
            _route("/api/openapi.json", self.document),
        ]

    async def images(self, request: Request) -> Response:
        return await (self.upload(request) if request.method == "POST" else self.list(request))

    async def upload(self, request: Request) -> Response:
        """Durable before it answers 202; 200 if all results are there."""
        seconds = _seconds_in(request)
        inbox, files = await self.uploads.receive(request)
        found = await self._wait(inbox, [name for name, _ in files], seconds) if seconds else {}
        images = []
        for name, digest in files:
            path = path_of(inbox, name)
            new = self._unknown(inbox, name, path) | {"digest": f"sha256:{digest}"}
            images.append(self._image_of(found[name], path) if name in found else new)
        has_ended = all(image["status"] != JobStatus.PENDING.name for image in images)
        headers = {"location": images[0]["result"]} if len(images) == 1 else {}
        return answer_json({"images": images}, 200 if has_ended else 202, headers)

    async def list(self, request: Request) -> Response:
        """Images in the order in which they were published, after a number."""
        after, most = _number_in(request, "after", 0), _most_in(request)
        with_record = _wants_records(request)
        if after > (last := await run_sync(read_last, self._reader)):
            raise HTTPException(409, f"The last publication has the number {last}; begin with after=0.")
        found, following = await run_sync(self._reader.published_after, after, most)
        images = [
            {"number": number} | self._image_of(record, with_record=with_record)
            for number, record in found.items()
            if not record.damage  # it is processed again, and comes then
        ]
        return answer_json({"images": images, "after": following, "more": following < last})

    async def image(self, request: Request) -> Response:
        number = request.path_params["id"]
        record = await run_sync(self._reader.find_number, number)
        if record is None:
            raise HTTPException(404, f"There is no image {number}.")
        return answer_json(self._image_of(record))

    async def image_by_path(self, request: Request) -> Response:
        """By its path in the folder of results, which an uploaded file has from the start."""
        given = request.path_params["path"]
        inbox, path = self._locate(given)
        seconds = _seconds_in(request)
        find = partial(run_sync, find_file, self._reader, inbox.root, path)
        if not await find():
            look = partial(run_sync, _is_there, inbox, path, abandon_on_cancel=True, limiter=self._lookers)
            # Asked again, as the daemon may have found and moved it between both looks.
            if not (await look() or await find()):
                raise HTTPException(404, f"There is no image {given}.")
        found = await self._wait(inbox, [path], seconds)
        return answer_json(self._image_of(found[path], given) if found else self._unknown(inbox, path, given))

    async def search(self, request: Request) -> Response:
        """As the page searches."""
        try:
            asked = Asked.of(request)
            _one_of(request, "by", ORDERS)
            _one_of(request, "state", ("done", "failed"))
            for name in DATES:
                _refuse_unfit(request, name, DAY, "a day, for example 2026-11-23")
            _refuse_unfit(request, "group", NEAR_DUPLICATES, "best, others, or the number of an image")
            most, with_record = _most_in(request), _wants_records(request)
            found = await run_sync(find_images, self._searcher, asked, most, True)
        except QueryError as error:
            raise HTTPException(400, str(error)) from error
        except SearchUnusable as error:
            raise HTTPException(409, str(error)) from error
        if asked.bin and not found.hits:
            await run_sync(refuse_unknown_bin, self._reader, asked)
        hits = {hit.image: hit for hit in found.hits}
        records = await run_sync(self._reader.find_numbers, list(hits))
        images = [
            hits[record.id].document() | self._image_of(record, with_record=with_record) for record in records
        ]
        here = asked.values() | {"cursor": found.following, "limit": most if most != IMAGES else 0}
        here["records"] = "false" * (not with_record)
        following = self._address("/api/search", **here) if found.following else None
        return answer_json({"images": images, "following": following, "problem": found.problem})

    async def status(self, _request: Request) -> Response:
        """Without the names of files and folders, as that of [http]."""
        snapshot = await run_sync(control.find_status, self._config)
        return answer_json(snapshot.without_names())

    async def document(self, _request: Request) -> Response:
        return Response(self._document, media_type="application/json")

    def _image_of(self, record: Record, path: str = "", *, with_record: bool = True) -> dict[str, Any]:
        """path: in the folder of results, by which it was asked for."""
        is_whole = record.status is JobStatus.DONE and not record.damage
        result = self._result_of(path) if path else self._address(f"/api/images/{record.id}")
        image = record.outline() | {"result": result}
        if with_record:
            image["record"] = msgspec.Raw(record.sidecar.rstrip()) if is_whole else None
        return image

    def _unknown(self, inbox: Inbox, path: bytes, given: str) -> dict[str, Any]:
        """An image that the daemon has not found yet."""
        root = inbox.root
        return {
            "id": None,
            "status": JobStatus.PENDING.name,
            "inbox": root.decode(errors="replace"),
            "path": path.decode(errors="replace"),
            "location": os.path.join(root, path).decode(errors="replace"),
            "digest": "",
            "finished_at": None,
            "reason": "",
            "detail": "",
            "result": self._result_of(given),
            "record": None,
        }

    def _result_of(self, path: str) -> str:
        """The address of an image's result. path: in the folder of results."""
        return self._address(f"/api/images/by-path/{quote(path)}")

    def _locate(self, given: str) -> tuple[Inbox, bytes]:
        """The inbox and the path in it. Raises HTTPException."""
        name, _, rest = given.partition("/")
        for inbox in self._config.inbox:
            path = rest if inbox.name else given
            if inbox.name in ("", name) and path and "\0" not in path:
                return inbox, path.encode(errors="surrogateescape")
        raise HTTPException(404, f"There is no image {given}.")

    async def _wait(self, inbox: Inbox, paths: Sequence[bytes], seconds: float) -> dict[bytes, Record]:
        """The files that the ledger knows, when none of them is PENDING any more or the time is over."""
        deadline, pause = time.monotonic() + seconds, LOOK_SECONDS
        found: dict[bytes, Record] = {}
        missing = list(paths)
        self._waits += 1
        try:
            while True:
                for path in missing:
                    if record := await run_sync(find_file, self._reader, inbox.root, path):
                        found[path] = record
                missing = [
                    path for path in paths if path not in found or found[path].status is JobStatus.PENDING
                ]
                if not missing or self._waits > MOST_WAITS or time.monotonic() + pause > deadline:
                    return found
                await anyio.sleep(pause)
                pause = min(2 * pause, LONGEST_LOOK_SECONDS)
        finally:
            self._waits -= 1


def _route(path: str, answer: Answer, *methods: str) -> Route:
    """An address that takes the parameters of its description, and no others: a filter that is misspelled would find all."""
    known = {method: list_parameters(path, method) for method in methods or ("GET",)}

    async def answer_known(request: Request) -> Response:
        refuse_others(request, known["GET" if request.method == "HEAD" else request.method])
        return await answer(request)

    return Route(path, answer_known, methods=list(known))


def path_of(inbox: Inbox, path: bytes) -> str:
    """In the folder of results."""
    return "/".join(filter(None, (inbox.name, os.fsdecode(path))))


def _is_there(inbox: Inbox, path: bytes) -> bool:
    """Whether an uploaded file has this name."""
    if inbox.url or b"/" in path or path.startswith(b"."):
        return False
    try:
        return stat.S_ISREG(os.lstat(os.path.join(inbox.root, path)).st_mode)
    except OSError:
        return False


# What is asked for. Each raises HTTPException.


def _number_in(request: Request, name: str, default: int) -> int:
    given = request.query_params.get(name)
    number = default if given is None else number_in(given)
    if number is None:
        raise HTTPException(400, f"{name} must be a number.")
    return number


def _most_in(request: Request) -> int:
    most = _number_in(request, "limit", IMAGES)
    if not 1 <= most <= MOST_IMAGES:
        raise HTTPException(400, f"limit must be a number from 1 to {MOST_IMAGES}.")
    return most


def _seconds_in(request: Request) -> float:
    given = request.query_params.get("wait", "0")
    seconds = float(given) if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,30})?(e-[0-9]{1,3})?", given) else -1.0
    if not 0 <= seconds <= LONGEST_WAIT_SECONDS:
        raise HTTPException(400, f"wait must be a number of seconds from 0 to {LONGEST_WAIT_SECONDS:g}.")
    return seconds


def _wants_records(request: Request) -> bool:
    return _one_of(request, "records", ("true", "false")) != "false"


def _refuse_unfit(request: Request, name: str, pattern: str, wanted: str) -> None:
    given = request.query_params.get(name)
    if given is not None and not re.fullmatch(pattern, given):
        raise HTTPException(400, f"{name} must be {wanted}.")


def _one_of(request: Request, name: str, choices: Sequence[str]) -> str:
    """In small letters; empty if it is not given."""
    given = request.query_params.get(name)
    if given is not None and given.lower() not in choices:
        raise HTTPException(400, f"{name} must be {' or '.join(choices)}.")
    return (given or "").lower()
