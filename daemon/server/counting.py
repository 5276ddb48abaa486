"""What the page's process counts for the daemon's metrics: its requests, by kind and status, and how long each waits for its
answer."""

from __future__ import annotations

import re
import socket
import time

import anyio
import msgspec
from anyio.to_thread import run_sync
from starlette.datastructures import QueryParams
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from daemon.monitoring.samples import read_samples
from daemon.monitoring.series import PageKind, Series
from daemon.search.query import DATES, GROUP
from daemon.server.asked import CHOICES

REPORT_SECONDS = 1.0  # at least, between two reports of what was counted
# The first that matches method and path; all others are pages for people.
KINDS = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        ("POST /api/images", PageKind.UPLOAD),
        (r"\w+ /live", PageKind.LIVE),
        (r"\w+ /api/search", PageKind.SEARCH),
        (r"\w+ /(api/|events)", PageKind.API),
        (r"\w+ /pictures/", PageKind.PICTURE),
        (r"\w+ /(static/|images/\d+/(original|result)|images/(originals|results)\.)", PageKind.FILE),
    )
)
LOOKED_FOR = ("q", GROUP, *CHOICES, *DATES)  # what makes the gallery a search


class Counting:
    def __init__(self) -> None:
        self.metrics = Series()
        self._noted = anyio.Event()  # there is something that was not reported yet

    def count(self, app: ASGIApp) -> ASGIApp:
        """The same application, whose requests are counted when their answers begin: a large file may take its time, and
        events never end."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            began, status = time.perf_counter(), 0

            async def send_counted(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                    self._note(kind_of(scope), status, time.perf_counter() - began)
                await send(message)

            try:
                await app(scope, receive, send_counted)
            finally:
                if not status:  # a bug: what is around the application answers
                    self._note(kind_of(scope), 500, time.perf_counter() - began)

        return counted

    def _note(self, kind: PageKind, status: int, seconds: float) -> None:
        self.metrics.page_requests.labels(kind, f"{status // 100}xx").inc()
        self.metrics.page_seconds.labels(kind).observe(seconds)
        self._noted.set()

    async def report(self, connection: socket.socket) -> None:
        """Send the daemon what was counted, once a second while there are requests: a line of JSON with samples."""
        while True:
            await self._noted.wait()
            self._noted = anyio.Event()
            line = msgspec.json.encode(read_samples(self.metrics.of_page())) + b"\n"
            try:
                await run_sync(connection.sendall, line, abandon_on_cancel=True)
            except OSError:  # the daemon is ending, and ends this process
                return
            await anyio.sleep(REPORT_SECONDS)


def kind_of(scope: Scope) -> PageKind:
    """Of a request that has its answer. Without a handler it was refused, or its address leads nowhere."""
    if "endpoint" not in scope:
        return PageKind.OTHER
    if scope["path"] == "/":
        asked = QueryParams(scope["query_string"])
        return PageKind.SEARCH if any(asked.get(name) for name in LOOKED_FOR) else PageKind.PAGE
    wanted = f"{scope['method']} {scope['path']}"
    return next((kind for pattern, kind in KINDS if pattern.match(wanted)), PageKind.PAGE)
