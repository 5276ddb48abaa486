"""Who may read the page and who may change something; and what a browser is allowed to do with an answer.

Reading needs nothing where only this machine can reach the page, otherwise the token. Every change needs the token. A browser
gets a cookie for it; programs send `Authorization: Bearer TOKEN`. A change by cookie must come from the page itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from daemon.config.secrets import clean_secret
from daemon.core.errors import ConfigError
from daemon.server.app import note_wrong_token
from daemon.system.ownership import hand_over

COOKIE = "visiond"
COOKIE_SECONDS = 30 * 86400
FORM_BYTES = 1 << 20
OPEN_PATHS = ("/login", "/static/")  # that need no token anywhere
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = (
    ("content-security-policy", POLICY),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "same-origin"),  # without it a browser hides where a form comes from
    ("cross-origin-resource-policy", "same-origin"),
    ("cross-origin-opener-policy", "same-origin"),
)


class Guard:
    """Answers 401 or 403 instead of the page where somebody may not see or change it."""

    def __init__(
        self, app: ASGIApp, read_token: Callable[[], bytes], *, reading_is_free: bool, is_secure: bool
    ) -> None:
        """read_token: called for each request that has one, as the token may be exchanged. is_secure: the page
        is served by HTTPS."""
        self._app = app
        self._read_token = read_token
        self._reading_is_free = reading_is_free
        self._is_secure = is_secure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault("cache-control", "no-store")
            await send(message)

        request = Request(scope, receive)
        request.state.may_change = self._has_token(request)
        if _bearer(request.headers) and not request.state.may_change:
            await note_wrong_token(scope)
        answer: ASGIApp = self._refuse(request) or self._app
        if request.url.path == "/logout" and answer is self._app:
            answer = RedirectResponse("/", 303)
            answer.delete_cookie(COOKIE, httponly=True, samesite="strict", secure=self._is_secure)
        if request.url.path == "/login" and request.method == "POST" and is_from_page(request.headers):
            try:
                answer = await self._log_in(request)
            except HTTPException as error:
                answer = _say(error.detail, error.status_code)
        await answer(scope, receive, send_guarded)

    def _refuse(self, request: Request) -> Response | None:
        path, changes = request.url.path, request.method not in ("GET", "HEAD")
        if (
            any(path == each or (each.endswith("/") and path.startswith(each)) for each in OPEN_PATHS)
            and not changes
        ):
            return None
        # A browser sends no token by itself, only a cookie.
        if changes and not (is_from_page(request.headers) or _bearer(request.headers)):
            return _say("This request does not come from the page itself.", 403)
        if request.state.may_change or (self._reading_is_free and not changes):
            return None
        if changes or "text/html" not in request.headers.get("accept", ""):
            return _say("This needs the token. Log in at /login, or send: Authorization: Bearer TOKEN", 401)
        return RedirectResponse("/login", 303)

    def _has_token(self, request: Request) -> bool:
        """Where there is a token, the cookie does not count: otherwise a forged change would pass with a wrong token."""
        cookie, bearer = request.cookies.get(COOKIE, ""), _bearer(request.headers)
        if not cookie and not bearer:
            return False
        token = self._read_token()
        # compare_digest takes constant time
        if bearer:
            return hmac.compare_digest(bearer, token)
        return hmac.compare_digest(cookie.encode(), cookie_of(token).encode())

    async def _log_in(self, request: Request) -> Response:
        form = await read_form(request)
        given, to = form.get("token", [""])[0].strip().encode(), own_path(form.get("to", ["/"])[0])
        if not hmac.compare_digest(given, token := self._read_token()):
            await note_wrong_token(request.scope)
            return RedirectResponse(f"/login?wrong=1&to={quote(to)}", 303)
        response = RedirectResponse(to, 303)
        response.set_cookie(
            COOKIE, cookie_of(token), COOKIE_SECONDS, httponly=True, samesite="strict", secure=self._is_secure
        )
        return response


def cookie_of(token: bytes) -> str:
    """What a browser keeps instead of the token itself."""
    return hmac.digest(token, b"cookie of the page", hashlib.sha256).hex()


def own_path(given: str) -> str:
    """An address of this page, to be gone to; "/" if it may lead to another site."""
    return given if re.fullmatch(r"/(?![/\\])[!-\[\]-~]*", given) else "/"


def is_from_page(headers: Headers) -> bool:
    """Whether a browser says that one of our pages sent it: other sites cannot forge this header."""
    origin = headers.get("origin", "")
    if origin and origin != "null":
        return urlsplit(origin).netloc == headers.get("host", "")
    return headers.get("sec-fetch-site", "") == "same-origin"


async def read_form(request: Request) -> dict[str, list[str]]:
    """The fields of a form that a browser sent. Raises HTTPException if it is too large or not text."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > FORM_BYTES:
            raise HTTPException(413, "The form is too large.")
    try:
        return parse_qs(body.decode(), strict_parsing=False)
    except ValueError as error:
        raise HTTPException(400, "The form cannot be read.") from error


def _bearer(headers: Headers) -> bytes:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip().encode() if scheme.lower() == "bearer" else b""


def _say(sentence: str, status: int) -> Response:
    headers = {"www-authenticate": "Bearer"} if status == 401 else None
    return Response(f"{sentence}\n", status, headers, media_type="text/plain; charset=utf-8")


def own_token(file: Path) -> bytes:
    """The token in a file, made if there is none; only its owner may read it. Raises OSError, ConfigError."""
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
        return clean_secret(file.read_bytes())
    except ValueError as error:
        raise ConfigError(
            [f"{file}, the token for changes by the page, {error}. Delete it: a new one is made."]
        ) from None
