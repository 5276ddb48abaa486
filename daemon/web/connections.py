"""Connections of HTTP clients: who keeps one without asking anything loses it, so that slow clients hold up nobody. Nor do
clients take the descriptors that the work needs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import anyio
import h11
import structlog
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from daemon.system.scarcity import RAISE

log = structlog.get_logger()

MOST_CONNECTIONS = 512  # further ones are answered 503
MOST_HANDSHAKES = 128  # of TLS, under way
HANDSHAKE_SECONDS = 5.0  # for one, and for the farewell
RESERVED_FILES = 32  # descriptors that are left to the work; a third, where there are fewer than a hundred
LEAST_CONNECTIONS = 2  # that are taken in all the same: somebody must be able to ask how things stand
SAY_SECONDS = 60.0  # between two words on a lack of descriptors
SCARCE_SECONDS = 0.01  # between two clients where descriptors are few
ACCEPT_SECONDS = 0.2  # between two tries where descriptors are short
MOST_WAITING = 128  # connections that no whole request has come over yet
REQUEST_SECONDS = 10.0  # from a connection, or the end of its last answer, to the end of the next


# The pages have no scripts, styles or pictures, and nobody is to put them into a frame.
HEADERS = [
    ("x-content-type-options", "nosniff"),
    ("content-security-policy", "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
]


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
            self.let_go()

    @classmethod
    def let_go(cls) -> bool:
        """Of the connection that has waited longest; whether there was one."""
        if longest := next(iter(cls.waiting), None):
            longest._wait_no_more()
            longest.transport.abort()
        return longest is not None

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
                server_header=False,
                headers=HEADERS,
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
        self._said_at = -SAY_SECONDS
        self._arriving = 0  # clients that are taken in and not connected yet
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
                is_scarce = self._is_scarce(client)
                if is_scarce and not self._make_room():
                    client.close()
                else:
                    self._arriving += 1
                    tasks.start_soon(self._welcome, client)
                if is_scarce:  # who was let go of may be back at once
                    await anyio.sleep(SCARCE_SECONDS)

    def _is_scarce(self, client: socket.socket) -> bool:
        """Whether this client has one of the descriptors that are left to the work. Their numbers are given from the lowest: a
        client with a high one has come when most are in use."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if most == resource.RLIM_INFINITY or client.fileno() < most - min(RESERVED_FILES, most // 3):
            return False
        if time.monotonic() - self._said_at > SAY_SECONDS:
            self._said_at = time.monotonic()
            log.warning("HTTP clients are refused, to keep descriptors for the work", limit=most, mend=RAISE)
        return True

    def _make_room(self) -> bool:
        """Whether one more may come in, if need be in the place of another."""
        if len(self.server_state.connections) + self._arriving < LEAST_CONNECTIONS:
            return True
        return self._end_longest_handshake() or Connection.let_go()

    async def _welcome(self, client: socket.socket) -> None:
        """The handshake, whose failure is the client's business; the one that has taken longest makes room for the next."""
        with anyio.CancelScope() as scope, contextlib.suppress(OSError):
            self._handshakes[scope] = None
            if len(self._handshakes) > MOST_HANDSHAKES:
                self._end_longest_handshake()
            try:
                await asyncio.get_running_loop().connect_accepted_socket(self._connect, client, **self._tls)
            finally:
                self._arriving -= 1
                self._handshakes.pop(scope, None)

    def _end_longest_handshake(self) -> bool:
        """Whether there was one."""
        longest = next(iter(self._handshakes), None)
        if longest:
            del self._handshakes[longest]
            longest.cancel()
        return longest is not None

    def _connect(self) -> Connection:
        return Connection(self.config, self.server_state, self.lifespan.state)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the service's business."""
        yield
