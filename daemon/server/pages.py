"""The page's addresses, and what each shows. Work that may block runs in threads."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import anyio
import msgspec
from anyio import to_thread
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from daemon import __version__
from daemon.config.loading import Config
from daemon.config.state import CONTROL, PAGE_TOKEN
from daemon.core.errors import LedgerUnusable, NotRunning, VisiondError
from daemon.core.hints import quantity
from daemon.core.jobs import JobStatus
from daemon.ledger.record import Record
from daemon.ledger.records import Reader
from daemon.ledger.soundness import MOST
from daemon.monitoring.notices import list_notices
from daemon.monitoring.snapshot import Snapshot
from daemon.search.following import encode_events, read_last
from daemon.search.index import SearchUnusable
from daemon.search.query import Query, QueryError
from daemon.search.searcher import NEWEST, By, Found, Searcher
from daemon.server.asked import Asked, address
from daemon.server.guard import own_path, read_form
from daemon.server.pictures import DECODERS, NoPicture, Pictures, draw_reason
from daemon.server.settings import list_tables
from daemon.server.views import document_of, raw_of, suggest, view_of, visible
from daemon.terminal import control

T = TypeVar("T")

EVENT_SECONDS, KEEP_ALIVE_SECONDS = 0.5, 15.0
MOST_STREAMS = 128  # of events at once: other requests need connections too
SHOWN = 48  # images at once
THUMBNAIL, PICTURE = 320, 1600  # pixels of the longer side
HUGE_PIXELS, HUGE_BYTES = 24_000_000, 64 << 20  # an image takes seconds to become a thumbnail
WEEK = "private, max-age=604800, immutable"  # for addresses that name the content
STATIC = Path(__file__).with_name("static")


class Page:
    """The handlers of all addresses."""

    def __init__(self, config: Config, reader: Reader, searcher: Searcher, pictures: Pictures) -> None:
        self._config = config
        self._reader = reader
        self._searcher = searcher
        self._pictures = pictures
        self._few = anyio.CapacityLimiter(DECODERS)
        self._huge = anyio.CapacityLimiter(DECODERS - 1)
        self._streams = 0  # of events, that are open
        self._templates = Environment(
            loader=PackageLoader("daemon.server"),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=StrictUndefined,
        )
        self._templates.globals |= {"version": __version__, "url": address, "quantity": quantity}
        self._templates.filters["short"] = shorten

    def application(self) -> Starlette:
        routes = [
            Route("/", self.gallery),
            Route("/images/{id:number}", self.image),
            Route("/images/{id:number}/like", self.like),
            Route("/images/{id:number}/result.json", self.result),
            Route("/images/{id:number}/again", self.again, methods=["POST"]),
            Route("/pictures/{id:number}/{digest}/{size}", self.picture),
            Route("/retry", self.retry, methods=["POST"]),
            Route("/live", self.live),
            Route("/state", self.state),
            Route("/events", self.events),
            Route("/settings", self.settings),
            Route("/login", self.login),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]
        errors = {VisiondError: self.explain, HTTPException: self.explain}
        return Starlette(routes=routes, exception_handlers=errors)

    # Looking

    async def gallery(self, request: Request) -> Response:
        """All images that fit, newest or best first. htmx asks for what follows, without the rest of the page."""
        asked, problem, found = Asked(), "", Found()
        try:
            asked = Asked.of(request)
            found = await _in_thread(partial(self._find, asked))
        except (QueryError, SearchUnusable) as error:
            problem = str(error)
        hits = {hit.image: hit.score for hit in found.hits}
        records = await _in_thread(lambda: self._reader.find_numbers(list(hits)))
        behind, place = await _in_thread(
            lambda: (self._searcher.behind(), self._searcher.index.about().place)
        )
        views = [view_of(record, hits[record.id]) for record in records]
        values = {
            "asked": asked,
            "behind": behind if behind > SHOWN else 0,
            "views": views,
            "following": address("/", **asked.values() | {"cursor": found.following})
            if found.following
            else "",
            "warming": address("/", **asked.values()) if found.is_warming else "",
            "newest": 0 if asked.cursor else place,
            "problem": problem or found.problem,
            "refused": bool(problem),
            "notices": list_notices((model.stage, model.notice) for each in records for model in each.models),
        }
        if _wants_cards(request):
            return self._show(request, "cards.html", values | {"is_part": True})
        bins, inboxes = await _in_thread(lambda: (self._reader.bins(), self._reader.inboxes()))
        names = [visible(os.fsdecode(path)) for path in inboxes.values()]
        choices = {
            "bins": sorted(filter(None, bins)),
            "inboxes": names,
            "suggested": suggest(views),
            "is_part": False,
        }
        return self._show(request, "gallery.html", values | choices)

    def _find(self, asked: Asked) -> Found:
        self._searcher.catch_up()
        query = asked.query()
        if query.sentence and asked.by != "newest":
            return self._searcher.best(query, By(asked.by), asked.cursor, SHOWN, wait=False)
        return self._searcher.newest(query, asked.cursor or NEWEST, SHOWN)

    async def image(self, request: Request) -> Response:
        record = await self._record(request)
        document = document_of(record)
        criteria: dict[str, Any] = document.get("bin", {}).get("criteria", {})
        values = {
            "view": view_of(record),
            "record": record,
            "location": visible(os.fsdecode(record.location)),
            "document": document,
            "criteria": criteria,
            "notices": list_notices((model.stage, model.notice) for model in record.models),
            "raw": raw_of(record),
        }
        return self._show(request, "image.html", values)

    async def like(self, request: Request) -> Response:
        number = min(request.path_params["id"], MOST)
        problem, found = "", Found()
        try:
            found = await _in_thread(lambda: self._like(number))
        except VisiondError as error:
            problem = str(error)
        hits = {hit.image: hit.score for hit in found.hits}
        records = await _in_thread(lambda: self._reader.find_numbers(list(hits)))
        views = [view_of(record, hits[record.id]) for record in records]
        return self._show(request, "like.html", {"views": views, "problem": problem})

    def _like(self, image: int) -> Found:
        self._searcher.catch_up()
        return self._searcher.like(image)

    async def result(self, request: Request) -> Response:
        record = await self._record(request)
        if record.damage:
            raise HTTPException(503, f"{record.damage} of image {record.id} is damaged in the ledger.")
        return Response(record.sidecar, media_type="application/json")

    async def picture(self, request: Request) -> Response:
        """A thumbnail, or a picture for the image's own page. The digest in the address lets browsers keep it."""
        record = await self._record(request)
        side = {"small": THUMBNAIL, "large": PICTURE}.get(request.path_params["size"])
        if side is None:
            raise HTTPException(404)
        try:
            content = await to_thread.run_sync(self._pictures.find, record, side)
            if content is None:
                # Few at a time: each has a whole file in memory. Huge ones take seconds, and leave a decoder for the others.
                huge = record.width * record.height > HUGE_PIXELS or record.version.size > HUGE_BYTES
                async with self._huge if huge else contextlib.nullcontext():
                    content = await to_thread.run_sync(self._pictures.get, record, side, limiter=self._few)
        except NoPicture as error:
            return Response(draw_reason(str(error)), media_type="image/svg+xml")
        return Response(content, headers={"cache-control": WEEK}, media_type="image/webp")

    async def live(self, request: Request) -> Response:
        """The line on top of each page, again every two seconds. `newest`: the last publication when the gallery was shown."""
        seen = _number_in(request.query_params.get("newest", "")) or 0
        snapshot = await self._snapshot()
        fresh = 0
        if seen:
            found = await _in_thread(lambda: self._searcher.newest(Query(), NEWEST, SHOWN))
            fresh = sum(hit.number > seen for hit in found.hits)
        return self._show(request, "live.html", {"snapshot": snapshot, "fresh": fresh, "most": SHOWN})

    async def events(self, request: Request) -> Response:
        """Server-sent events: each image that is published after a number, or after the last one that was received."""
        given = request.headers.get("last-event-id") or request.query_params.get("after", "")
        last = await _in_thread(partial(read_last, self._reader))
        if given and _number_in(given) is None:
            raise HTTPException(400, "after must be the number of a publication; begin with after=0.")
        place = last if (number := _number_in(given)) is None else number
        if place > last:
            raise HTTPException(409, f"The last publication has the number {last}; begin with after=0.")
        if self._streams >= MOST_STREAMS:
            raise HTTPException(503, f"{MOST_STREAMS} programs follow the events already. Try again later.")

        return StreamingResponse(self._follow(place), media_type="text/event-stream")

    async def _follow(self, place: int) -> AsyncIterator[bytes]:
        self._streams += 1
        try:
            yield b": visiond\n\n"
            idle = 0.0
            while True:
                try:
                    events, following = await _in_thread(partial(encode_events, self._reader, place))
                except LedgerUnusable:  # it is read again; the line on top of the page says why
                    events, following = [], place
                for number, line in events:
                    yield b"id: %d\ndata: %b\n\n" % (number, line)
                if following == place:
                    await anyio.sleep(EVENT_SECONDS)
                    if (idle := idle + EVENT_SECONDS) >= KEEP_ALIVE_SECONDS:
                        yield b":\n\n"  # or something on the way cuts the connection
                        idle = 0.0
                place = following
        finally:
            self._streams -= 1

    async def state(self, request: Request) -> Response:
        snapshot = await self._snapshot()
        template = "workers.html" if request.headers.get("hx-request") else "state.html"
        return self._show(
            request, template, {"snapshot": snapshot, "notices": list_notices(snapshot.notices.items())}
        )

    async def settings(self, request: Request) -> Response:
        """Every key of the configuration; secrets are in files of their own, of which only the name is shown."""
        tables = [*list_tables(self._config.model_dump(mode="json"))]
        return self._show(request, "settings.html", {"tables": tables, "folder": self._config.folder})

    async def login(self, request: Request) -> Response:
        """`to`: the page from which somebody comes, and to which the login leads back."""
        before = urlsplit(request.headers.get("referer", ""))
        came = before._replace(scheme="", netloc="", fragment="").geturl() if before.path != "/login" else ""
        values = {
            "wrong": "wrong" in request.query_params,
            "file": token_file(self._config),
            "to": own_path(request.query_params.get("to") or came),
        }
        return self._show(request, "login.html", values)

    # Changing

    async def again(self, request: Request) -> Response:
        record = await self._record(request)
        await _in_thread(lambda: control.put_back(self._config, record.status, [record.id]))
        return RedirectResponse(f"/images/{record.id}", 303)

    async def retry(self, request: Request) -> Response:
        """Failed images back to pending: those that are ticked, or all."""
        form = await read_form(request)
        ids = [number for each in form.get("id", []) if (number := _number_in(each) or 0) <= MOST]
        if "all" in form:
            ids = await _in_thread(self._reader.failed_ids)
        count = await _in_thread(lambda: control.put_back(self._config, JobStatus.FAILED, ids))
        return RedirectResponse(address("/", state="failed", queued=count), 303)

    # What they share

    async def _record(self, request: Request) -> Record:
        number = request.path_params["id"]
        found = await _in_thread(lambda: self._reader.find_numbers([number])) if number <= MOST else []
        if not found:
            raise HTTPException(404, f"There is no image {number}.")
        return found[0]

    async def _snapshot(self) -> Snapshot:
        """Of the running daemon; without one, as the ledger shows."""

        def ask() -> Snapshot:
            try:
                return msgspec.convert(
                    control.ask(self._config.state.path / CONTROL, "GET", "/api/status"), Snapshot
                )
            except NotRunning:
                return control.find_status(self._config)

        return await _in_thread(ask)

    def _show(self, request: Request, template: str, values: Mapping[str, object]) -> Response:
        shared = {
            "may_change": request.state.may_change,
            "path": request.url.path,
            "queued": request.query_params.get("queued", ""),
        }
        content = self._templates.get_template(template).render(shared | dict(values))
        return Response(
            content, media_type="text/html; charset=utf-8", headers={"vary": "HX-Request, HX-Target"}
        )

    async def explain(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 503
        sentence = error.detail if isinstance(error, HTTPException) else str(error)
        response = self._show(request, "error.html", {"sentence": sentence, "status": status})
        response.status_code = status
        return response


class _Number(IntegerConvertor):
    """Python refuses to read numbers of thousands of digits."""

    regex = f"[0-9]{{1,{len(str(MOST))}}}"


register_url_convertor("number", _Number())


def _number_in(text: str) -> int | None:
    """None if it is no number; MOST + 1 for one of more digits than the ledger can have."""
    if re.fullmatch(_Number.regex, text):
        return int(text)
    return MOST + 1 if re.fullmatch("[0-9]+", text) else None


def _wants_cards(request: Request) -> bool:
    """Whether htmx asks only for images that follow, and not for all that another search finds."""
    return bool(request.headers.get("hx-request")) and request.headers.get("hx-target") != "results"


def shorten(value: object) -> str:
    """A number with few digits; a dash for nothing."""
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def token_file(config: Config) -> Path:
    """The file with the token that changes need."""
    return Path(config.http.token_file) if config.http.token_file else config.state.path / PAGE_TOKEN


async def _in_thread(work: Callable[[], T]) -> T:
    return await to_thread.run_sync(work)
