"""HTTP: metrics, health and status over TCP, read only; what changes anything only over the control socket.

The control socket lies in the state folder, so that the file system says who may use it.
"""

from __future__ import annotations

import contextlib
import html
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import msgspec
import uvicorn
from anyio import to_thread
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from daemon import __version__
from daemon.config import Config
from daemon.connections import Connection
from daemon.errors import ConfigError
from daemon.ledger import Ledger
from daemon.metrics import Metrics
from daemon.status import Status

LOOPBACK = ("127.0.0.1", "[::1]", "localhost")
MOST_CONNECTIONS = 512  # further ones are answered 503

INDEX = """\
<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>visiond</title>
<h1>visiond {version}</h1>
<p>{sentence}</p>
<ul>
<li><a href="/api/status">/api/status</a>: counts, rate, time to go and workers, as JSON</li>
<li><a href="/healthz">/healthz</a>: whether images can be processed</li>
<li><a href="/readyz">/readyz</a>: whether images get through, and what is in their way</li>
<li><a href="/metrics">/metrics</a>: for Prometheus</li>
</ul>
</html>
"""


@contextlib.asynccontextmanager
async def serve(config: Config, status: Status, metrics: Metrics, ledger: Ledger, control: Path) -> AsyncIterator[None]:
    """Serve while the context is open. Raises ConfigError when the address cannot be had."""
    pages = Pages(status, metrics, ledger)
    with contextlib.ExitStack() as sockets:  # a server that was told to leave before it had begun closes none
        listeners = [(sockets.enter_context(_listen_control(control)), pages.control())]
        if config.http.listen:
            host = config.http.listen.rpartition(":")[0]
            listeners.append((sockets.enter_context(listen(config.http.listen)), pages.public(host)))
        async with anyio.create_task_group() as tasks:
            servers = []
            for listener, app in listeners:
                server = _Server(
                    uvicorn.Config(app, http=Connection, log_config=None, lifespan="off", limit_concurrency=MOST_CONNECTIONS)
                )
                servers.append(server)
                tasks.start_soon(server.serve, [listener])
            try:
                yield
            finally:
                for server in servers:
                    server.should_exit = server.force_exit = True
    with contextlib.suppress(FileNotFoundError):
        os.unlink(control)


class Pages:
    """What is answered."""

    def __init__(self, status: Status, metrics: Metrics, ledger: Ledger) -> None:
        self._status = status
        self._metrics = metrics
        self._ledger = ledger

    def public(self, host: str) -> Starlette:
        """Read-only pages. On a loopback address only its names are answered to, against DNS rebinding."""
        guard = [Middleware(TrustedHostMiddleware, allowed_hosts=list(LOOPBACK))] if host in LOOPBACK else []
        return Starlette(routes=self._reading(), middleware=guard)

    def control(self) -> Starlette:
        return Starlette(routes=[*self._reading(), Route("/retry", self.retry, methods=["POST"])])

    def _reading(self) -> list[Route]:
        return [
            Route("/", self.index),
            Route("/metrics", self.metrics),
            Route("/healthz", self.healthz),
            Route("/readyz", self.readyz),
            Route("/api/status", self.status),
        ]

    async def index(self, _request: Request) -> Response:
        sentence = html.escape(self._status.snapshot().sentence())
        return Response(INDEX.format(version=__version__, sentence=sentence), media_type="text/html")

    async def metrics(self, request: Request) -> Response:
        await self._status.refresh()
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        body = await to_thread.run_sync(encode, self._metrics.registry)
        return Response(body, headers={"content-type": content_type})

    async def healthz(self, _request: Request) -> Response:
        """200 while images can be processed; "degraded" and why when some worker cannot."""
        ailments, dead = self._status.ailments(), self._status.is_dead()
        state = "dead" if dead else "degraded" if ailments else "ok"
        return _json({"status": state, "problems": ailments}, 503 if dead else 200)

    async def readyz(self, _request: Request) -> Response:
        """200 while images get through; 503 and what is in their way when they do not."""
        obstacles = self._status.obstacles()
        return _json({"ready": not obstacles, "problems": obstacles}, 503 if obstacles else 200)

    async def status(self, _request: Request) -> Response:
        return _json(self._status.snapshot())

    async def retry(self, request: Request) -> Response:
        ids = msgspec.json.decode(await request.body(), type=list[int])
        retried = await self._ledger.retry(ids)
        self._status.retried(retried)
        return _json({"retried": retried})


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the service's business."""
        yield


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def listen(address: str) -> socket.socket:
    """A listening socket at "host:port". Raises ConfigError."""
    host, _, port = address.rpartition(":")
    try:
        return socket.create_server((host.strip("[]"), int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error  # its own text names the address once more
        raise ConfigError(
            [f"http.listen: {address} cannot be had: {reason}. Name another address in [http] listen."]
        ) from error


def _listen_control(path: Path) -> socket.socket:
    """The state folder is locked for this process, so what lies there is a left-over."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
    except OSError as error:
        raise ConfigError([f"state.path: a socket cannot be made at {path}: {error.strerror or error}."]) from error
    path.chmod(0o600)
    return listener
