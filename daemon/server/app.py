"""HTTP: metrics, health and status over TCP, read-only. Requests that change anything use the control socket.

The control socket is in the state folder, so file permissions decide who may use it.
"""

from __future__ import annotations

import contextlib
import hmac
import html
import os
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

import anyio
import msgspec
import structlog
from anyio import to_thread
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from daemon import __version__
from daemon.config.loading import Config
from daemon.config.secrets import read_secret, read_secret_line
from daemon.config.sections import Http
from daemon.config.state import CONTROL, socket_address
from daemon.core.errors import ConfigError
from daemon.core.jobs import JobStatus
from daemon.ledger.ledger import Ledger
from daemon.ledger.soundness import MOST
from daemon.monitoring.metrics import Metrics
from daemon.monitoring.notices import list_notices
from daemon.server.connections import Server
from daemon.server.status import Status

log = structlog.get_logger()

PUT_BACK = (JobStatus.FAILED.name, JobStatus.DONE.name)
WRONG_TOKEN_SECONDS = 0.5  # until the answer
PUT_BACK_IMAGES = 10_000  # in one request
PUT_BACK_BYTES = 20 * PUT_BACK_IMAGES
Number = Annotated[int, msgspec.Meta(ge=1, le=MOST)]
decode_ids = msgspec.json.Decoder(Annotated[list[Number], msgspec.Meta(max_length=PUT_BACK_IMAGES)]).decode
LOOPBACK_NAMES = ("127.0.0.1", "[::1]", "localhost")
# For TLS 1.2, the oldest version that is accepted; TLS 1.3 has its own.
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"

INDEX = """\
<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>visiond</title>
<h1>visiond {version}</h1>
<p>{sentence}</p>
{notices}<ul>
<li><a href="/api/status">/api/status</a>: counts, rate, remaining time and workers, as JSON</li>
<li><a href="/healthz">/healthz</a>: whether images can be processed</li>
<li><a href="/readyz">/readyz</a>: whether images get through, and if not, why</li>
<li><a href="/metrics">/metrics</a>: for Prometheus</li>
</ul>
</html>
"""


@contextlib.asynccontextmanager
async def serve(
    config: Config,
    status: Status,
    metrics: Metrics,
    ledger: Ledger,
    credentials: Credentials,
    *,
    pages_matter: bool = True,
) -> AsyncIterator[str]:
    """Serve while the context is open. Yields the URL of the pages, or "" without pages. Raises
    ConfigError if the token or the certificate is unusable or, with pages_matter, the address is in use."""
    pages, http, control = Pages(status, metrics, ledger), config.http, config.state.path / CONTROL
    with contextlib.ExitStack() as sockets:  # a server that is stopped before it starts closes no socket
        servers = [Server(pages.control(), sockets.enter_context(_listen_control(control)))]
        url = ""
        try:
            listener = sockets.enter_context(listen(http)) if http.listen else None
        except ConfigError as error:
            if pages_matter:
                raise
            log.warning("HTTP pages are off for this run", why=str(error))
            listener = None
        if listener:
            for risk in risks(http):
                log.warning("HTTP is open to the network", risk=risk)
            credentials.read(http)
            servers.append(Server(pages.public(http, credentials), listener, credentials.tls))
            url = http.url_at(listener.getsockname()[1])
        async with anyio.create_task_group() as tasks:
            for server in servers:
                tasks.start_soon(server.serve, [])
            try:
                yield url
            finally:
                for server in servers:
                    server.should_exit = server.force_exit = True
    with contextlib.suppress(OSError):  # the next daemon removes it
        os.unlink(control)


class Pages:
    """The handlers of all requests."""

    def __init__(self, status: Status, metrics: Metrics, ledger: Ledger) -> None:
        self._status = status
        self._metrics = metrics
        self._ledger = ledger

    def public(self, http: Http, credentials: Credentials) -> Starlette:
        """The read-only pages. On a loopback address they answer only to its names, against DNS rebinding."""
        guards = [Middleware(RequireToken, credentials=credentials)]
        if http.is_loopback:
            allowed = [*LOOPBACK_NAMES, http.host]
            guards.insert(0, Middleware(TrustedHostMiddleware, allowed_hosts=allowed))
        return Starlette(routes=self._reading(), middleware=guards)

    def control(self) -> Starlette:
        changing = [
            Route("/put-back/{status}", self.put_back, methods=["POST"]),
            Route("/lost", self.note_lost, methods=["POST"]),
            Route("/prune", self.prune, methods=["GET", "POST"]),
            Route("/reload", self.reload, methods=["POST"]),
        ]
        return Starlette(routes=[Route("/api/status", self.status_with_names), *self._reading(), *changing])

    def _reading(self) -> list[Route]:
        return [
            Route("/", self.index),
            Route("/metrics", self.metrics),
            Route("/healthz", self.healthz),
            Route("/readyz", self.readyz),
            Route("/api/status", self.status),
        ]

    async def index(self, _request: Request) -> Response:
        snapshot = self._status.snapshot()
        notices = "".join(
            f"<p><strong>{html.escape(line)}</strong></p>\n"
            for line in list_notices(snapshot.notices.items())
        )
        page = INDEX.format(version=__version__, sentence=html.escape(snapshot.sentence()), notices=notices)
        return Response(page, media_type="text/html")

    async def metrics(self, request: Request) -> Response:
        await self._status.refresh()
        try:
            encode, content_type = choose_encoder(request.headers.get("accept", ""))
        except TypeError:  # from the library, for a version that is not a number
            return Response("no such version of the format\n", 406)
        body = await to_thread.run_sync(encode, self._metrics)
        return Response(body, headers={"content-type": content_type})

    async def healthz(self, _request: Request) -> Response:
        """200 while images can be processed; "degraded" with the reasons if some worker is not ready."""
        problems, dead = self._status.unhealthy(), self._status.is_dead()
        state = "dead" if dead else "degraded" if problems else "ok"
        return _json({"status": state, "problems": problems}, 503 if dead else 200)

    async def readyz(self, _request: Request) -> Response:
        """200 while images get through, otherwise 503 with the reasons. Unreadable folders are only a
        warning: they block no other images, and often only their owner can open them. Failed upkeep is shown
        too."""
        problems, warnings, upkeep = self._status.unready(), self._status.warnings(), self._status.upkeep
        answer: dict[str, object] = {"ready": not problems, "problems": problems}
        answer |= {"warnings": warnings} if warnings else {}
        if failures := upkeep.failures() if upkeep else []:
            answer["upkeep"] = failures
        return _json(answer, 503 if problems else 200)

    async def status(self, _request: Request) -> Response:
        """Without the names of folders in an inbox, which readers of the pages should not see."""
        return _json(msgspec.structs.replace(await self._status.complete_snapshot(), unread=[]))

    async def status_with_names(self, _request: Request) -> Response:
        return _json(await self._status.complete_snapshot())

    async def put_back(self, request: Request) -> Response:
        """Queue at most PUT_BACK_IMAGES images of one status again. Anything else is refused with a sentence."""
        name = request.path_params["status"]
        if name not in PUT_BACK:
            return _json(
                {"problem": f"images that are {name} cannot be queued again, only {' or '.join(PUT_BACK)}"},
                404,
            )
        ids = await _read_ids(request)
        if isinstance(ids, Response):
            return ids
        status = JobStatus[name]
        images = await self._ledger.put_back(status, ids)
        self._status.put_back(status, images)
        return _json({"images": images})

    async def note_lost(self, request: Request) -> Response:
        """A redo could not read the files of these images."""
        ids = await _read_ids(request)
        if isinstance(ids, Response):
            return ids
        images = await self._ledger.note_lost(ids)
        self._status.note_lost()
        return _json({"images": images})

    async def prune(self, request: Request) -> Response:
        """POST starts to prune what ended before the Unix time in its body.
        POST and GET answer with the progress."""
        upkeep = self._status.upkeep
        assert upkeep is not None
        if request.method == "POST":
            upkeep.prune_soon(msgspec.json.decode(await request.body(), type=float))
        return _json(upkeep.pruning)

    async def reload(self, _request: Request) -> Response:
        """Read the configuration again; answers with what has changed."""
        assert self._status.reloading is not None
        return _json(await self._status.reloading.reload())


class Credentials:
    """The token and the certificate of the pages."""

    def __init__(self) -> None:
        self.token = b""  # empty: none is needed
        self.tls: ssl.SSLContext | None = None

    def read(self, http: Http) -> None:
        """Read the files, also again: new connections use what is in them then.
        Raises ConfigError, and changes nothing."""
        token = read_token(http) if http.token_file else b""
        tls = load_certificate(http) if http.tls_certificate else None
        if self.tls and tls:
            self.tls.load_cert_chain(http.tls_certificate, http.tls_key or None)
        else:
            self.tls = tls
        self.token = token


class RequireToken:
    """Answers 401 to requests without the token, if there is one (RFC 6750)."""

    def __init__(self, app: ASGIApp, credentials: Credentials) -> None:
        self._app = app
        self._credentials = credentials

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scheme, _, token = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        wanted = self._credentials.token
        # compare_digest takes constant time.
        if not wanted or (scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), wanted)):
            await self._app(scope, receive, send)
        else:
            if token:
                await note_wrong_token(scope)
            await Response(
                "this page needs a token: Authorization: Bearer ...\n", 401, {"www-authenticate": "Bearer"}
            )(scope, receive, send)


async def note_wrong_token(scope: Scope) -> None:
    """Log it, and wait: as connections are limited, so is the number of tokens that can be tried."""
    host, _ = scope.get("client") or ("", 0)
    log.warning("a request had a wrong token", client=host, path=scope["path"])
    await anyio.sleep(WRONG_TOKEN_SECONDS)


def read_token(http: Http) -> bytes:
    """Raises ConfigError if the file has no token, is unreadable, or readable for others."""
    return read_secret_line("http.token_file", http.token_file)


def load_certificate(http: Http) -> ssl.SSLContext:
    """The TLS context of a server. Raises ConfigError if the
    certificate or its key is unusable or not secret."""
    read_secret(
        "http.tls_key" if http.tls_key else "http.tls_certificate", http.tls_key or http.tls_certificate
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers(CIPHERS)
    try:
        context.load_cert_chain(http.tls_certificate, http.tls_key or None)
    except OSError as error:
        cause = None if isinstance(error, ssl.SSLError) else error  # which has numbers of its own in errno
        problem = f"the certificate or its key is unusable: {error.strerror or error}"
        raise ConfigError([f"http.tls_certificate: {problem}."]) from cause
    return context


def risks(http: Http) -> list[str]:
    """What this configuration lets others on the network do."""
    if not http.listen or http.is_loopback:
        return []
    found = []
    if not http.token_file:
        found.append(
            f"http.listen: everyone who can reach {http.listen} can read metrics and status; set token_file."
        )
    if not http.tls_certificate:
        found.append(
            f"http.listen: traffic of {http.listen} is not encrypted, tokens included; set tls_certificate."
        )
    return found


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def listen(http: Http, section: str = "http") -> socket.socket:
    """A listening socket at the address of a section of the configuration. Raises ConfigError."""
    try:
        return socket.create_server(
            (http.host, http.port), family=socket.AF_INET6 if ":" in http.host else socket.AF_INET
        )
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error  # its own text repeats the address
        raise ConfigError(
            [
                f"{section}.listen: cannot listen on {http.listen}: {reason}. Set another address as [{section}] listen."
            ]
        ) from error


def _listen_control(path: Path) -> socket.socket:
    """The state folder is locked for this process, so an existing socket is stale."""
    try:
        listener = socket.socket(socket.AF_UNIX)
        path.unlink(missing_ok=True)
        with socket_address(path) as address:
            listener.bind(address)
        path.chmod(0o600)
    except OSError as error:
        raise ConfigError(
            [f"state.path: cannot create the socket {path}: {error.strerror or error}."]
        ) from error
    return listener


async def _read_ids(request: Request) -> list[int] | Response:
    """The numbers in the body, at most PUT_BACK_IMAGES; else the answer with what is wrong."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > PUT_BACK_BYTES:
            return _json(
                {
                    "problem": f"the request has more than {PUT_BACK_BYTES} bytes; name at most {PUT_BACK_IMAGES} images"
                },
                413,
            )
    try:
        ids: list[int] = decode_ids(body)
        return ids
    except msgspec.DecodeError as error:
        return _json(
            {"problem": f"expected a list of at most {PUT_BACK_IMAGES} numbers from 1 to {MOST}: {error}"},
            400,
        )
