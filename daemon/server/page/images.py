"""The gallery, and one image with its files and pictures. Work that may block runs in threads."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

import anyio
from anyio.to_thread import run_sync
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from daemon.config.loading import Config
from daemon.core.errors import SearchUnusable, VisiondError
from daemon.core.jobs import JobStatus
from daemon.core.notices import list_notices
from daemon.ledger.record import notices_of
from daemon.search.duplicates import read_group_of
from daemon.search.query import UNPUBLISHED, Query, QueryError
from daemon.search.searcher import UNCUT, Found, Searcher
from daemon.server import control
from daemon.server.asked import SHOWN, Asked, find_images
from daemon.server.page.pictures import DECODERS, NoPicture, Original, Pictures, draw_reason, read_making
from daemon.server.page.rendering import Renderer
from daemon.server.page.ticked import MOST
from daemon.server.page.views import View, describe_one, is_copy, suggest, view_of, visible

if TYPE_CHECKING:
    from daemon.ledger.record import Record
    from daemon.ledger.records import Reader

MOST_FILES = 4  # sent at once, each of which is in memory
THUMBNAIL, PICTURE, FINE = 320, 1600, 4096  # pixels of the longer side
HUGE_PIXELS, HUGE_BYTES = 24_000_000, 64 << 20  # an image takes seconds to become a thumbnail
BINS_REST = 100  # times as long as it took to list the bins, for which all images are looked at, until that is done again
WEEK = "private, max-age=604800, immutable"  # for addresses that name the content


class Images:
    def __init__(
        self, config: Config, reader: Reader, searcher: Searcher, pictures: Pictures, renderer: Renderer
    ) -> None:
        self._config = config
        self._reader = reader
        self._searcher = searcher
        self._pictures = pictures
        self._few = anyio.CapacityLimiter(DECODERS)
        self._huge = anyio.CapacityLimiter(DECODERS - 1)
        self._files = anyio.CapacityLimiter(MOST_FILES)
        self._address = config.page.address
        self._show = renderer.show
        self._bins, self._bins_until = list[str](), 0.0

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/", self.gallery),
            Route("/images/{id:number}", self.image),
            Route("/images/{id:number}/like", self.like),
            Route("/images/{id:number}/result.json", self.result),
            Route("/images/{id:number}/made", self.made),
            Route("/images/{id:number}/waits", self.waits),
            Route("/images/{id:number}/original", self.original),
            Route("/images/{id:number}/again", self.again, methods=["POST"]),
            Route("/pictures/{id:number}/{digest}/{size}", self.picture),
        ]

    # Looking

    async def gallery(self, request: Request) -> Response:
        """All images that fit, newest or best first. htmx asks for what follows, without the rest of the page."""
        asked, query, found, is_refused = Asked(), Query(), Found(), False
        try:
            asked = Asked.of(request)
            query = asked.query()
            found = await run_sync(find_images, self._searcher, asked, SHOWN)
        except (QueryError, SearchUnusable) as error:
            found, is_refused = Found(problem=str(error)), True
        records, views = await self._views(found, query)
        behind, about = await run_sync(self._searcher.behind), await run_sync(self._searcher.index.about)
        here = asked.values()
        has_days = not is_refused and asked.has_days
        following = {"cursor": found.following, "day": views[-1].day if views and has_days else ""}
        values = {
            "asked": asked,
            "behind": behind if behind > SHOWN else 0,
            "views": views,
            "following": found.following and self._address("/", **here | following),
            "day": request.query_params.get("day", ""),
            "has_days": has_days,
            "has_results": asked.state not in UNPUBLISHED,
            "warming": found.is_warming and self._address("/", **here),
            "again": self._address("/images/again", **here | {"cursor": 0}),
            "uncut": UNCUT * found.is_uncut,
            "most_downloaded": MOST,
            "newest": 0 if asked.cursor else about.place,
            "problem": found.problem,
            "refused": is_refused,
            "notices": list_notices(notices_of(records)),
            "is_part": _wants_cards(request),
        }
        if _wants_cards(request):
            return await run_sync(self._show, request, "cards.html", values)
        choices = await run_sync(self._choices)
        return await run_sync(
            self._show, request, "gallery.html", values | choices | {"suggested": suggest(views)}
        )

    def _choices(self) -> dict[str, list[str]]:
        """Of the fields beside the search box."""
        started = time.monotonic()
        if started >= self._bins_until:
            self._bins = sorted(filter(None, self._reader.bins()))
            self._bins_until = started + BINS_REST * (time.monotonic() - started)
        inboxes = [visible(os.fsdecode(path)) for path in self._reader.inboxes().values()]
        return {"bins": self._bins, "inboxes": inboxes}

    async def _views(self, found: Found, query: Query) -> tuple[list[Record], list[View]]:
        hits = {hit.image: hit for hit in found.hits}
        records = await run_sync(self._reader.find_numbers, list(hits))
        return records, [view_of(record, hits[record.id], query.terms) for record in records]

    async def image(self, request: Request) -> Response:
        record = await self._record(request)
        asked = Asked.of_list(request, self._address("/"))
        newer, older = await run_sync(self._beside, asked, record.id)
        values = describe_one(record) | {
            "origin": asked,
            "group": await run_sync(self._count_group, record.id),
            "before": newer and self._address(f"/images/{newer}", **asked.values()),
            "after": older and self._address(f"/images/{older}", **asked.values()),
            "notices": list_notices(record.notices()),
        }
        return self._show(request, "image.html", values)

    def _count_group(self, image: int) -> int:
        """Near-duplicates, with itself; 0 without any."""
        with contextlib.suppress(SearchUnusable):  # the gallery says why
            return len(read_group_of(self._searcher.index, image))
        return 0

    def _beside(self, asked: Asked, image: int) -> tuple[int, int]:
        try:
            self._searcher.catch_up()
            return self._searcher.beside(asked.query(), image, asked.ranking, asked.by)
        except SearchUnusable:  # the gallery says why
            return 0, 0

    async def like(self, request: Request) -> Response:
        problem, found = "", Found()
        try:
            found = await run_sync(self._like, request.path_params["id"])
        except VisiondError as error:
            problem = str(error)
        record = await self._record(request)
        _, views = await self._views(found, Query())
        copies = [view for view in views if is_copy(view, record)]
        others = [view for view in views if view not in copies]
        return self._show(request, "like.html", {"copies": copies, "others": others, "problem": problem})

    def _like(self, image: int) -> Found:
        self._searcher.catch_up()
        return self._searcher.like(image)

    async def result(self, request: Request) -> Response:
        record = await self._record(request)
        if record.damage:
            raise HTTPException(503, f"{record.damage} of image {record.id} is damaged in the ledger.")
        return Response(record.sidecar, media_type="application/json")

    async def made(self, request: Request) -> Response:
        """When and with which camera. Apart from the page, as a file may be far away, or its disk not answer."""
        values: dict[str, object] = {"id": request.path_params["id"], "rows": [], "problem": ""}
        try:
            values["rows"] = await run_sync(read_making, await self._record(request), limiter=self._few)
        except NoPicture as error:
            values["problem"] = f"It cannot be read when it was made: {error}"
        return self._show(request, "made.html", values | {"is_whole": not request.headers.get("hx-request")})

    async def waits(self, request: Request) -> Response:
        """The page of an image that waits asks this again and again, and is loaded anew when its result is there."""
        is_over = (await self._record(request)).status is not JobStatus.PENDING
        return Response(status_code=204, headers={"HX-Refresh": "true"} if is_over else None)

    async def original(self, request: Request) -> Original:
        """The file itself: in the browser, or as a download."""
        return Original(
            await self._record(request), self._files, as_download="download" in request.query_params
        )

    async def picture(self, request: Request) -> Response:
        """A thumbnail, a picture for the image's page, or one to zoom into. The digest in the address lets browsers keep it."""
        record = await self._record(request)
        side = {"small": THUMBNAIL, "large": PICTURE, "fine": FINE}.get(request.path_params["size"])
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
            # What is beside the picture says already why the image failed.
            why = str(error) if str(error) != record.detail else ""
            return Response(draw_reason(why), media_type="image/svg+xml")
        return Response(content, headers={"cache-control": WEEK}, media_type="image/webp")

    # Changing

    async def again(self, request: Request) -> Response:
        record = await self._record(request)
        if record.status not in (JobStatus.DONE, JobStatus.FAILED):
            why = f"Image {record.id} is {record.status.name}: only images that are DONE or FAILED can be processed again."
            raise HTTPException(409, why)
        await run_sync(control.put_back, self._config, record.status, [record.id])
        asked = Asked.of_list(request, self._address("/"))
        return RedirectResponse(self._address(f"/images/{record.id}", **asked.values()), 303)

    # What they share

    async def _record(self, request: Request) -> Record:
        number = request.path_params["id"]
        found = await run_sync(self._reader.find_numbers, [number])
        if not found:
            raise HTTPException(404, f"There is no image {number}.")
        return found[0]


def _wants_cards(request: Request) -> bool:
    """Whether htmx asks only for images that follow, and not for all that another search finds."""
    return bool(request.headers.get("hx-request")) and request.headers.get("hx-target") != "results"
