"""Server-sent events: what is published, as it happens."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
from anyio.to_thread import run_sync
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from daemon.core.errors import LedgerUnusable
from daemon.ledger.records import Reader
from daemon.search.following import encode_events, read_last
from daemon.server.asked import number_in, refuse_others

EVENT_SECONDS, KEEP_ALIVE_SECONDS = 0.5, 15.0
MOST_STREAMS = 128  # of events at once: other requests need connections too


class Events:
    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._streams = 0  # that are open

    def routes(self) -> list[BaseRoute]:
        return [Route("/events", self.events)]

    async def events(self, request: Request) -> Response:
        """Each image that is published after a number, or after the last one that was received."""
        refuse_others(request, ["after"])
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
