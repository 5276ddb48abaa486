"""The page's addresses, and what each shows. Work that may block runs in threads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import anyio
from anyio.to_thread import run_sync
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from daemon import __version__
from daemon.config.loading import Config
from daemon.config.state import PAGE_TOKEN
from daemon.core.errors import LedgerUnusable, VisiondError
from daemon.core.hints import quantity
from daemon.core.jobs import JobStatus
from daemon.ledger.record import Record
from daemon.ledger.records import Reader
from daemon.monitoring.notices import list_notices
from daemon.search.following import encode_events, read_last
from daemon.search.index import SearchUnusable
from daemon.search.query import Query, QueryError
from daemon.search.searcher import NEWEST, Found, Searcher
from daemon.server.app import explain_as_json, read_body, read_page_token
from daemon.server.guard import COOKIE, COOKIE_SECONDS, cookie_of, is_api, is_same, note_wrong_token, own_path
from daemon.server.pictures import DECODERS, NoPicture, Pictures, draw_reason
from daemon.server.views import (
    Asked,
    View,
    document_of,
    find_images,
    list_tables,
    number_in,
    raw_of,
    shorten,
    suggest,
    view_of,
    visible,
)
from daemon.terminal import control

EVENT_SECONDS, KEEP_ALIVE_SECONDS = 0.5, 15.0
MOST_STREAMS = 128  # of events at once: other requests need connections too
SHOWN = 48  # images at once
THUMBNAIL, PICTURE = 320, 1600  # pixels of the longer side
HUGE_PIXELS, HUGE_BYTES = 24_000_000, 64 << 20  # an image takes seconds to become a thumbnail
WEEK = "private, max-age=604800, immutable"  # for addresses that name the content
STATIC = Path(__file__).with_name("static")
# What a browser may load and send for the page, all of it from and to the page itself.
ALLOWED = "script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'"
FORM_BYTES = 1 << 20
SIZES = ("small", "medium", "large")  # of the cards


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
        self._address = config.page.address
        self._templates = Environment(
            loader=PackageLoader("daemon.server"),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=StrictUndefined,
        )
        self._templates.globals |= {"version": __version__, "url": self._address, "quantity": quantity}
        self._templates.filters["short"] = shorten

    def routes(self) -> list[BaseRoute]:
        return [
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
            Route("/login", self.log_in, methods=["POST"]),
            Route("/logout", self.log_out, methods=["GET", "POST"]),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]

    def errors(self) -> dict[type[Exception], Callable[..., Any]]:
        return {VisiondError: self.explain, HTTPException: self.explain}

    # Looking

    async def gallery(self, request: Request) -> Response:
        """All images that fit, newest or best first. htmx asks for what follows, without the rest of the page."""
        asked, query, problem, found = Asked(), Query(), "", Found()
        try:
            asked = Asked.of(request)
            query = asked.query()
            found = await run_sync(find_images, self._searcher, asked, SHOWN)
        except (QueryError, SearchUnusable) as error:
            problem = str(error)
        records, views = await self._views(found, query)
        behind, about = await run_sync(self._searcher.behind), await run_sync(self._searcher.index.about)
        here = asked.values()
        values = {
            "asked": asked,
            "behind": behind if behind > SHOWN else 0,
            "views": views,
            "following": found.following and self._address("/", **here | {"cursor": found.following}),
            "warming": found.is_warming and self._address("/", **here),
            "newest": 0 if asked.cursor else about.place,
            "problem": problem or found.problem,
            "refused": bool(problem),
            "notices": list_notices((model.stage, model.notice) for each in records for model in each.models),
            "is_part": _wants_cards(request),
        }
        if _wants_cards(request):
            return self._show(request, "cards.html", values)
        choices = await run_sync(self._choices)
        return self._show(request, "gallery.html", values | choices | {"suggested": suggest(views)})

    def _choices(self) -> dict[str, list[str]]:
        """Of the fields beside the search box."""
        inboxes = [visible(os.fsdecode(path)) for path in self._reader.inboxes().values()]
        return {"bins": sorted(filter(None, self._reader.bins())), "inboxes": inboxes}

    async def _views(self, found: Found, query: Query) -> tuple[list[Record], list[View]]:
        hits = {hit.image: hit for hit in found.hits}
        records = await run_sync(self._reader.find_numbers, list(hits))
        return records, [view_of(record, hits[record.id], query.terms) for record in records]

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
        problem, found = "", Found()
        try:
            found = await run_sync(self._like, request.path_params["id"])
        except VisiondError as error:
            problem = str(error)
        _, views = await self._views(found, Query())
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
            content = await run_sync(self._pictures.find, record, side)
            if content is None:
                # Few at a time: each has a whole file in memory. Huge ones take seconds, and leave a decoder for the others.
                huge = record.width * record.height > HUGE_PIXELS or record.version.size > HUGE_BYTES
                async with self._huge if huge else contextlib.nullcontext():
                    content = await run_sync(self._pictures.get, record, side, limiter=self._few)
        except NoPicture as error:
            return Response(draw_reason(str(error)), media_type="image/svg+xml")
        return Response(content, headers={"cache-control": WEEK}, media_type="image/webp")

    async def live(self, request: Request) -> Response:
        """The line on top of each page, again every two seconds. `newest`: the last publication when the gallery was shown."""
        seen = number_in(request.query_params.get("newest", "")) or 0
        snapshot = await run_sync(control.find_status, self._config)
        fresh = 0
        if seen:
            found = await run_sync(self._searcher.newest, Query(), NEWEST, SHOWN)
            fresh = sum(hit.number > seen for hit in found.hits)
        return self._show(request, "live.html", {"snapshot": snapshot, "fresh": fresh, "most": SHOWN})

    async def events(self, request: Request) -> Response:
        """Server-sent events: each image that is published after a number, or after the last one that was received."""
        given = request.headers.get("last-event-id") or request.query_params.get("after", "")
        last = await run_sync(read_last, self._reader)
        number = number_in(given)
        if given and number is None:
            raise HTTPException(400, "after must be the number of a publication; begin with after=0.")
        place = last if number is None else number
        if place > last:
            raise HTTPException(409, f"The last publication has the number {last}; begin with after=0.")
        if self._streams >= MOST_STREAMS:
            raise HTTPException(503, f"{MOST_STREAMS} programs follow the events already. Try again later.")

        # nginx would keep events until it has 8 KiB of them.
        headers = {"x-accel-buffering": "no"}
        return StreamingResponse(self._follow(place), headers=headers, media_type="text/event-stream")

    async def _follow(self, place: int) -> AsyncIterator[bytes]:
        self._streams += 1
        try:
            yield b": visiond\n\n"
            idle = 0.0
            while True:
                try:
                    events, following = await run_sync(encode_events, self._reader, place)
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
        snapshot = await run_sync(control.find_status, self._config)
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
        is_login = before.path == self._address("/login")
        came = "" if is_login else before._replace(scheme="", netloc="", fragment="").geturl()
        values = {
            "wrong": "wrong" in request.query_params,
            "file": self._config.http.token_file or self._config.state.path / PAGE_TOKEN,
            "to": own_path(request.query_params.get("to") or came) or self._address("/"),
        }
        return self._show(request, "login.html", values)

    async def log_in(self, request: Request) -> Response:
        form = await read_form(request)
        given = form.get("token", [""])[0].strip().encode()
        to = own_path(form.get("to", [""])[0]) or self._address("/")
        if not is_same(given, token := read_page_token(self._config)):
            await note_wrong_token(request.scope)
            return RedirectResponse(self._address("/login", wrong=1, to=to), 303)
        response = RedirectResponse(to, 303)
        response.set_cookie(COOKIE, cookie_of(token), COOKIE_SECONDS, **self._sent(request))
        return response

    async def log_out(self, request: Request) -> Response:
        response = RedirectResponse(self._address("/"), 303)
        response.delete_cookie(COOKIE, **self._sent(request))
        return response

    def _sent(self, request: Request) -> Any:
        """How a browser may send its cookie: only to this page and, if it has come by TLS, only by TLS."""
        secure = request.scope["scheme"] == "https"
        path = self._config.page.root_path or "/"
        return {"path": path, "secure": secure, "httponly": True, "samesite": "strict"}

    # Changing

    async def again(self, request: Request) -> Response:
        record = await self._record(request)
        await run_sync(control.put_back, self._config, record.status, [record.id])
        return RedirectResponse(self._address(f"/images/{record.id}"), 303)

    async def retry(self, request: Request) -> Response:
        """Failed images back to pending: those that are ticked, or all."""
        form = await read_form(request)
        ids = [number for each in form.get("id", []) if (number := number_in(each))]
        if "all" in form:
            ids = await run_sync(self._reader.failed_ids)
        count = await run_sync(control.put_back, self._config, JobStatus.FAILED, ids)
        return RedirectResponse(self._address("/", state="failed", queued=count), 303)

    # What they share

    async def _record(self, request: Request) -> Record:
        number = request.path_params["id"]
        found = await run_sync(self._reader.find_numbers, [number])
        if not found:
            raise HTTPException(404, f"There is no image {number}.")
        return found[0]

    def _show(self, request: Request, template: str, values: Mapping[str, object]) -> Response:
        shared = {
            "may_read": request.state.has_token or self._config.page_http.is_private,
            "may_change": request.state.has_token,
            "path": request.url.path,
            "sizes": SIZES,
            "size": size if (size := request.cookies.get("visiond-size")) in SIZES else "medium",
            "queued": request.query_params.get("queued", ""),
        }
        content = self._templates.get_template(template).render(shared | dict(values))
        return Response(
            content, media_type="text/html; charset=utf-8", headers={"vary": "HX-Request, HX-Target"}
        )

    async def explain(self, request: Request, error: Exception) -> Response:
        if is_api(request.scope):
            return await explain_as_json(request, error)
        status = error.status_code if isinstance(error, HTTPException) else 503
        sentence = error.detail if isinstance(error, HTTPException) else str(error)
        response = self._show(request, "error.html", {"sentence": sentence, "status": status})
        response.status_code = status
        return response


async def read_form(request: Request) -> dict[str, list[str]]:
    """The fields of a form that a browser sent. Raises HTTPException if it is too large or not text."""
    body = await read_body(request, FORM_BYTES, "The form is too large.")
    try:
        return parse_qs(body.decode())
    except ValueError as error:
        raise HTTPException(400, "The form cannot be read.") from error


def _wants_cards(request: Request) -> bool:
    """Whether htmx asks only for images that follow, and not for all that another search finds."""
    return bool(request.headers.get("hx-request")) and request.headers.get("hx-target") != "results"
