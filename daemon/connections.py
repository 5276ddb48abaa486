"""Connections of HTTP clients: who keeps one without asking anything loses it, so that slow clients hold up nobody."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_WAITING = 128  # connections that no whole request has come over yet
REQUEST_SECONDS = 10.0  # from a connection, or the end of its last answer, to the end of the next


class Connection(H11Protocol):
    """Closed when a request and its answer take too long, or when it has waited longest and there are too many that wait."""

    waiting: ClassVar[dict[Connection, None]] = {}  # the longest first
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle and not self.cycle.response_complete:
            self.waiting.pop(self, None)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._wait_no_more()

    def _wait(self) -> None:
        self._wait_no_more()
        if self.transport.is_closing():
            return
        self._deadline = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)
        self.waiting[self] = None
        if len(self.waiting) > MOST_WAITING:
            longest = next(iter(self.waiting))
            longest._wait_no_more()
            longest.transport.abort()

    def _wait_no_more(self) -> None:
        self.waiting.pop(self, None)
        if self._deadline:
            self._deadline.cancel()
