"""What every address has, whatever it answers: a socket, a token, a certificate, guards and limits. Which list of routes is
served where:

- [http] listen: `Answers.reading` in answers.py. Nothing there changes anything.
- the control socket, for the commands: also `Answers.changing`. It is in the state folder, so file permissions decide who may
  use it.
- [page] listen: `Page.routes` in page/page.py, in a process of its own.

Another list is one more method that returns routes, and one more call of `make_server`, with the guard that it needs.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import anyio
import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from daemon.config.loading import Config
from daemon.config.secrets import clean_secret, read_secret, read_secret_line
from daemon.config.sections import Http
from daemon.config.state import PAGE_TOKEN, socket_address
from daemon.core.errors import ConfigError
from daemon.server.addresses import LOOPBACK_NAMES, Own, host_of
from daemon.server.connections import NO_FORMS, Server
from daemon.system.ownership import hand_over
from stages.contract.files import read_file

FORM_BYTES = 1 << 20  # of a form without files
TOKEN_SECONDS = 1.0  # after which the page's token is read again
HOW_TO_UPLOAD = (
    "Upload by `curl --data-binary @photo.jpg` or, with its name, `curl -F file=@photo.jpg` to /api/images."
)
# For TLS 1.2, the oldest version that is accepted; TLS 1.3 has its own.
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"


def make_server(
    listener: socket.socket,
    routes: Sequence[BaseRoute],
    http: Http | None = None,
    guard: Callable[[ASGIApp], ASGIApp] | None = None,
    tls: ssl.SSLContext | None = None,
    errors: Mapping[Any, Any] | None = None,
    allowed: str = NO_FORMS,
    root_path: str = "",
) -> Server:
    """http: the address; on a loopback address, only its names are answered, against DNS rebinding. guard: decides who may
    read and change. Without both, for a socket that file permissions guard. errors: what answers an exception. allowed: what
    a browser may load or send for an answer. root_path: below which a proxy serves all of it."""
    hosts: set[str] = set()
    if http and http.is_loopback:
        hosts = {*LOOPBACK_NAMES, http.host.lower(), *map(host_of, http.names)}
    guards = [Middleware(Own, hosts, root_path), *([Middleware(guard)] if guard else [])]
    application = Starlette(routes=routes, middleware=guards, exception_handlers=errors)
    # `Own` has taken the slash, and a redirect would name this host.
    application.router.redirect_slashes = False
    return Server(application, listener, tls, allowed, http.proxies if http else ())


@contextlib.asynccontextmanager
async def running(*servers: Server) -> AsyncIterator[None]:
    """Serve while the context is open."""
    async with anyio.create_task_group() as tasks:
        for server in servers:
            tasks.start_soon(server.serve, [])
        try:
            yield
        finally:
            for server in servers:
                server.should_exit = server.force_exit = True


async def read_body(request: Request, most_bytes: int, problem: str) -> bytearray:
    """Raises HTTPException with this problem if it has more bytes, before all of it is read."""
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > most_bytes:
                raise HTTPException(413, problem)
    except ClientDisconnect:  # nobody reads the answer
        raise HTTPException(400, "The request has ended before its body did.") from None
    return body


async def read_form(request: Request) -> dict[str, list[str]]:
    """The fields of a form that a browser sent. Raises HTTPException if it is too large or not text."""
    body = await read_body(request, FORM_BYTES, "The form is too large.")
    try:
        return parse_qs(body.decode())
    except ValueError as error:
        raise HTTPException(400, "The form cannot be read.") from error


def answer_json(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


async def explain_as_json(request: Request, error: Exception) -> Response:
    """To a program, which reads only JSON."""
    if isinstance(error, HTTPException):
        return answer_json({"problem": sentence_of(request, error)}, error.status_code, error.headers)
    return answer_json({"problem": str(error)}, 503)


def sentence_of(request: Request, error: HTTPException) -> str:
    """What is wrong, also where the router found it, which says no more than the name of the status."""
    if error.detail != HTTPStatus(error.status_code).phrase:
        return error.detail
    method, path = request.method, request.scope["path"]
    hint = f" {HOW_TO_UPLOAD}" if method == "PUT" else ""  # as of curl -T
    if error.status_code == 404:
        return f"There is no address {path}.{hint}"
    if error.status_code == 405:
        known = " or ".join(sorted((error.headers or {})["Allow"].split(", ")))
        return f"{path} takes {known}, not {method}.{hint}"
    return error.detail


# Sockets


def listen(http: Http, section: str = "http") -> socket.socket:
    """A listening socket at the address of a section of the configuration. Raises ConfigError."""
    try:
        return socket.create_server(
            (http.host, http.port), family=socket.AF_INET6 if ":" in http.host else socket.AF_INET
        )
    except OSError as error:
        is_named = isinstance(error, socket.gaierror) or not error.errno
        # others repeat the address
        reason = error.strerror or error if is_named else os.strerror(error.errno or 0)
        raise ConfigError(
            [
                f"{section}.listen: cannot listen on {http.listen}: {reason}. Set another address as [{section}] listen."
            ]
        ) from error


def listen_control(path: Path) -> socket.socket:
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


# Tokens and certificates


def read_token(http: Http) -> bytes:
    """Empty if none is configured. Raises ConfigError if the file has no token, is unreadable, or readable for others."""
    return read_secret_line("http.token_file", http.token_file) if http.token_file else b""


def own_token(file: Path) -> bytes:
    """The page's token in a file, made if there is none; only its owner may read it. Raises OSError, ConfigError."""
    if not file.exists():
        partial = file.with_name(f".{file.name}.{os.getpid()}")
        with open(
            os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w"
        ) as opened:
            opened.write(secrets.token_hex(16) + "\n")
            opened.flush()
            os.fsync(opened.fileno())
        hand_over(partial)
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.link(partial, file)
        partial.unlink()
    try:
        return clean_secret(read_file(file))
    except ValueError as error:
        raise ConfigError(
            [f"{file}, the token for changes by the page, {error}. Delete it: a new one is made."]
        ) from None


def read_page_token(config: Config) -> bytes:
    """That of [http], or the page's own: there always is one, as changes need it. Raises OSError, ConfigError."""
    return read_token(config.http) or own_token(config.state.path / PAGE_TOKEN)


class PageToken:
    """The page's token as each request needs it. It may be exchanged: a new one counts within TOKEN_SECONDS."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._clock = config, clock
        self._token, self._read_at = b"", -TOKEN_SECONDS

    def read(self) -> bytes:
        """Raises OSError, ConfigError."""
        if (now := self._clock()) >= self._read_at + TOKEN_SECONDS:
            self._token, self._read_at = read_page_token(self._config), now
        return self._token


def load_certificate(http: Http) -> ssl.SSLContext | None:
    """The TLS context of a server; None if no certificate is configured. Raises ConfigError if the
    certificate or its key is unusable or not secret."""
    if not http.tls_certificate:
        return None
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


def risks(http: Http, section: str = "http") -> list[str]:
    """What an address of the configuration lets others on the network do. There the page always needs a token."""
    if not http.listen or http.is_loopback:
        return []
    found = []
    if section == "http" and not http.token_file:
        found.append(
            f"http.listen: everyone who can reach {http.listen} can read metrics and status; set token_file."
        )
    if not http.tls_certificate:
        found.append(
            f"{section}.listen: traffic of {http.listen} is not encrypted, tokens included; set [http] tls_certificate."
        )
    return found
