"""Connections of HTTP clients. A client that sends no complete request is disconnected, so
that slow clients delay nobody. Clients cannot use up the file descriptors that the work needs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import anyio
import h11
import structlog
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from daemon.system.scarcity import RAISE

log = structlog.get_logger()

MOST_CONNECTIONS = 512  # more get a 503
MOST_HANDSHAKES = 128  # of TLS, at once
HANDSHAKE_SECONDS = 5.0  # for a handshake, and for the shutdown of TLS
RESERVED_FILES = 32  # descriptors kept for the work; a third, if there are fewer than 96
LEAST_CONNECTIONS = 2  # accepted even then, so that somebody can read the status
WARNING_SECONDS = 60.0  # between two warnings about few descriptors
SCARCE_SECONDS = 0.01  # pause after a client when descriptors are few
ACCEPT_SECONDS = 0.2  # pause after an accept that failed for lack of descriptors
MOST_WAITING = 128  # connections without a complete request yet
# For a whole request, from the start of the connection or the end of its last answer; and for each part of the
# answer that the client has to take before there is room for more.
REQUEST_SECONDS = 10.0
LATE_SECONDS = 1.0  # a deadline that is noticed so much too late counts from anew
# … a body may take longer, if so many bytes of it have come in each such time.
LEAST_BYTES = 64 << 10

# Of all answers. Whoever serves scripts, styles or forms says so to its server.
HEADERS = (
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "same-origin"),  # without it a browser hides where a form comes from
    ("cross-origin-resource-policy", "same-origin"),
    ("cross-origin-opener-policy", "same-origin"),
)
POLICY = "default-src 'none'; base-uri 'none'; frame-ancestors 'none'; "
NO_FORMS = "form-action 'none'"


class Connection(H11Protocol):
    """Is closed when the client takes too long to send a request or to take the answer, or when too many connections wait and
    it has waited longest. One over the control socket does not make room for clients of the network."""

    waiting: ClassVar[dict[Connection, None]] = {}  # the longest first
    _deadline: asyncio.TimerHandle | None = None
    _received = 0  # bytes since the deadline was set

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        super().data_received(data)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if not self._is_answering():
            return
        self.waiting.pop(self, None)
        if self.cycle is not before and self.cycle.more_body:
            self._limit_time()
        if not self.cycle.more_body:  # the rest is the server's time
            self._wait_no_more()
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in self.headers}:
            # Something before this server may take what follows for another request (RFC 9112, 6.1).
            self.cycle.keep_alive = False

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._is_answering():
            self._limit_time()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._is_answering():
            self._wait_no_more()

    def _is_answering(self) -> bool:
        return bool(self.cycle) and not self.cycle.response_complete

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._wait_no_more()

    def _wait(self) -> None:
        if not self._limit_time() or self.transport.get_extra_info("socket").family == socket.AF_UNIX:
            return
        self.waiting[self] = None
        if len(self.waiting) > MOST_WAITING:
            self.let_go()

    @classmethod
    def let_go(cls) -> bool:
        """Close the connection that has waited longest; returns whether there was one."""
        if longest := next(iter(cls.waiting), None):
            longest._wait_no_more()
            longest.transport.abort()
        return longest is not None

    def _limit_time(self) -> bool:
        """Returns False if the connection is being closed already."""
        self._wait_no_more()
        if self.transport.is_closing():
            return False
        self._deadline = self.loop.call_later(REQUEST_SECONDS, self._end_if_slow)
        self._received = 0
        return True

    def _end_if_slow(self) -> None:
        """Unless enough of a body has come, or this server does not take it faster."""
        assert self._deadline
        if self.loop.time() > self._deadline.when() + LATE_SECONDS:
            # This machine stood still, or slept. uvloop calls its timers before it reads what has come meanwhile.
            self._deadline = self.loop.call_later(REQUEST_SECONDS, self._end_if_slow)
            return
        is_receiving = self._is_answering() and self.cycle.more_body
        if is_receiving and (self._received >= LEAST_BYTES or self.flow.read_paused):
            self._limit_time()
        else:
            self.transport.abort()

    def _wait_no_more(self) -> None:
        self.waiting.pop(self, None)
        if self._deadline:
            self._deadline.cancel()


def _is_our_error(record: logging.LogRecord) -> bool:
    """False for protocol errors that a client causes after its request was refused."""
    return not (record.exc_info and isinstance(record.exc_info[1], h11.LocalProtocolError))


class Server(uvicorn.Server):
    """Serves an app at a listening socket, with or without TLS. It accepts the clients itself,
    as uvicorn does not limit TLS handshakes; run it with `serve([])`."""

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        tls: ssl.SSLContext | None = None,
        allowed: str = NO_FORMS,
        proxies: Sequence[str] = (),
    ) -> None:
        """allowed: what a browser may load or send for an answer, as in a Content-Security-Policy. proxies: whose word counts
        for where a request is from, and whether it came by TLS."""
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",  # otherwise invalid requests fill the log
                server_header=False,
                headers=[*HEADERS, ("content-security-policy", POLICY + allowed)],
                limit_concurrency=MOST_CONNECTIONS,
                forwarded_allow_ips=list(proxies),
            )
        )
        logging.getLogger("uvicorn.error").addFilter(_is_our_error)
        listener.setblocking(False)
        listener.listen(self.config.backlog)
        self._listener = listener
        self._tls: dict[str, Any] = {}
        if tls:
            self._tls = {
                "ssl": tls,
                "ssl_handshake_timeout": HANDSHAKE_SECONDS,
                "ssl_shutdown_timeout": HANDSHAKE_SECONDS,
            }
        self._warned_at = -WARNING_SECONDS
        self._arriving = 0  # accepted clients that are not connected yet
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
            except OSError:  # no descriptor is left
                await anyio.sleep(ACCEPT_SECONDS)
            else:
                if placed := await self._place(client):
                    self._arriving += 1
                    tasks.start_soon(self._welcome, placed)

    async def _place(self, client: socket.socket) -> socket.socket | None:
        """The client, if it does not take a descriptor from the work; if it would, in the place of another
        one. If that is not possible either, it is closed: None.
        """
        if self._may_stay(client):
            return client
        with client:
            self._end_longest_handshake() or Connection.let_go()
            # Wait until that one is closed; its client may reconnect at once.
            await anyio.sleep(SCARCE_SECONDS)
            with contextlib.suppress(OSError):
                # Move to the lowest free number; otherwise the numbers in between would fill up behind it.
                moved = client.dup()
                if self._may_stay(moved):
                    return moved
                moved.close()
        return None

    def _may_stay(self, client: socket.socket) -> bool:
        few = len(self.server_state.connections) + self._arriving < LEAST_CONNECTIONS
        return not self._is_scarce(client) or few

    def _is_scarce(self, client: socket.socket) -> bool:
        """Whether this client uses a descriptor that is reserved for the work. The
        kernel gives the lowest free number: a high one means that most are in use."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if most == resource.RLIM_INFINITY or client.fileno() < most - min(RESERVED_FILES, most // 3):
            return False
        if time.monotonic() - self._warned_at > WARNING_SECONDS:
            self._warned_at = time.monotonic()
            log.warning(
                "HTTP clients are refused, to keep file descriptors for the work", limit=most, fix=RAISE
            )
        return True

    async def _welcome(self, client: socket.socket) -> None:
        """Connect a client. A failed handshake is ignored. If there are too many, the longest one is stopped."""
        with anyio.CancelScope() as scope, contextlib.suppress(OSError):
            if self._tls:
                # A plain connection takes no time, and uvloop forgets to report the loss of one that is cancelled.
                self._handshakes[scope] = None
            if len(self._handshakes) > MOST_HANDSHAKES:
                self._end_longest_handshake()
            try:
                await asyncio.get_running_loop().connect_accepted_socket(self._connect, client, **self._tls)
            finally:
                self._arriving -= 1
                self._handshakes.pop(scope, None)

    def _end_longest_handshake(self) -> bool:
        """Stop the longest handshake; returns whether there was one."""
        longest = next(iter(self._handshakes), None)
        if longest:
            del self._handshakes[longest]
            longest.cancel()
        return longest is not None

    def _connect(self) -> Connection:
        return Connection(self.config, self.server_state, self.lifespan.state)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: the service handles signals."""
        yield
