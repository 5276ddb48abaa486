"""What the page's process counts for the daemon's metrics: its requests, by kind and status, and how long each waits for its
answer."""

from __future__ import annotations

import re
import socket
import time

import msgspec
from anyio import sleep
from anyio.to_thread import run_sync
from starlette.datastructures import QueryParams
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from daemon.monitoring.samples import Sample, read_samples
from daemon.monitoring.series import Series
from daemon.search.query import DATES
from daemon.server.asked import CHOICES

REPORT_SECONDS = 1.0  # between two reports of what was counted
# By what is asked for; all others are pages for people. PAGE_KINDS in series.py has them all.
KINDS = re.compile(
    r"(?P<upload>POST /api/images)"
    r"|\w+ /(?:(?P<live>live)|(?P<search>api/search)|(?P<api>api/|events)|(?P<picture>pictures/)"
    r"|(?P<file>static/|images/\d+/(?:original|result)|images/(?:originals|results)\.))"
)
LOOKED_FOR = ("q", *CHOICES, *DATES)  # what makes the gallery a search


class Counting:
    def __init__(self) -> None:
        self.metrics = Series()

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

    def _note(self, kind: str, status: int, seconds: float) -> None:
        self.metrics.page_requests.labels(kind, f"{status // 100}xx").inc()
        self.metrics.page_seconds.labels(kind).observe(seconds)

    async def report(self, connection: socket.socket) -> None:
        """Send the daemon what was counted, whenever that has changed: a line of JSON with samples."""
        sent: list[Sample] = []
        while True:
            if (samples := read_samples(self.metrics.of_page())) != sent:
                line = msgspec.json.encode(samples) + b"\n"
                try:
                    await run_sync(connection.sendall, line, abandon_on_cancel=True)
                except OSError:  # the daemon is ending, and ends this process
                    return
                sent = samples
            await sleep(REPORT_SECONDS)


def kind_of(scope: Scope) -> str:
    """Of a request that has its answer. Without a handler it was refused, or its address leads nowhere."""
    if "endpoint" not in scope:
        return "other"
    if scope["path"] == "/":
        asked = QueryParams(scope["query_string"])
        return "search" if any(asked.get(name) for name in LOOKED_FOR) else "page"
    found = KINDS.match(f"{scope['method']} {scope['path']}")
    return (found and found.lastgroup) or "page"
