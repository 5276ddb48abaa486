"""Connections of HTTP clients: who keeps one without asking anything loses it, so that slow clients hold up nobody."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator
from typing import Any, ClassVar

import anyio
import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 512  # further ones are answered 503
MOST_HANDSHAKES = 128  # of TLS, under way
HANDSHAKE_SECONDS = 5.0  # for one, and for the farewell
ACCEPT_SECONDS = 0.2  # between two tries where descriptors are short
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


def _is_ours(record: logging.LogRecord) -> bool:
    """An answer to a request that was refused already is the client's doing."""
    return not (record.exc_info and isinstance(record.exc_info[1], h11.LocalProtocolError))


class Server(uvicorn.Server):
    """Serves an app at a listening socket, with or without TLS. It takes in the clients itself, as uvicorn does not limit
    TLS handshakes: to be run with `serve([])`."""

    def __init__(self, app: ASGIApp, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",  # else whoever sends nonsense fills the log
                limit_concurrency=MOST_CONNECTIONS,
            )
        )
        logging.getLogger("uvicorn.error").addFilter(_is_ours)
        listener.setblocking(False)
        listener.listen(self.config.backlog)
        self._listener = listener
        self._tls: dict[str, Any] = {}
        if tls:
            self._tls = {"ssl": tls, "ssl_handshake_timeout": HANDSHAKE_SECONDS, "ssl_shutdown_timeout": HANDSHAKE_SECONDS}
        self._handshakes: dict[anyio.CancelScope, None] = {}  # the longest first

    async def main_loop(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._accept, tasks)
            await super().main_loop()
            tasks.cancel_scope.cancel()

    async def _accept(self, tasks: anyio.abc.TaskGroup) -> None:
        while True:
            try:
                client, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            except OSError:  # no descriptor is left for it
                await anyio.sleep(ACCEPT_SECONDS)
            else:
                tasks.start_soon(self._welcome, client)

    async def _welcome(self, client: socket.socket) -> None:
        """The handshake, whose failure is the client's business; the one that has taken longest makes room for the next."""
        with anyio.CancelScope() as scope, contextlib.suppress(OSError):
            self._handshakes[scope] = None
            if len(self._handshakes) > MOST_HANDSHAKES:
                longest = next(iter(self._handshakes))
                del self._handshakes[longest]
                longest.cancel()
            try:
                await asyncio.get_running_loop().connect_accepted_socket(self._connect, client, **self._tls)
            finally:
                self._handshakes.pop(scope, None)

    def _connect(self) -> Connection:
        return Connection(self.config, self.server_state, self.lifespan.state)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the service's business."""
        yield
