"""Who may read and who may change something.

Programs send `Authorization: Bearer TOKEN`, at every address. Only the page knows browsers: there reading needs nothing where
only this machine can reach it, otherwise the token, and every change needs the token. A browser gets a cookie for it. A change
by cookie must come from the page itself.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Collection

import anyio
import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from daemon.core.errors import ConfigError
from daemon.server.addresses import is_from_page
from daemon.server.app import answer_json

log = structlog.get_logger()

WRONG_TOKEN_SECONDS = 0.5  # until the answer
# Where the token is, for who may read that file.
OF_HTTP = "in the file that [http] token_file in daemon.toml names"
OF_PAGE = "in the file page.token in the folder that [state] path in daemon.toml names"
OPEN_PATHS = ("/login", "/static/")  # of the page, that need no token anywhere
ELSEWHERE = (
    "This request does not come from the page itself. If a reverse proxy serves the page, add the name in the browser's "
    "address bar to [http] names in daemon.toml."
)
API = "/api/"
COOKIE = "visiond"
COOKIE_SECONDS = 30 * 86400


class Guard:
    """Answers 401 to requests without the token, if there is one (RFC 6750)."""

    def __init__(self, app: ASGIApp, read_token: Callable[[], bytes], *, place: str = OF_HTTP) -> None:
        """read_token: called for each request, as the token may be exchanged. Empty: none is needed. place: of the token."""
        self._app = app
        self._place = place
        self._read_token = read_token
        self._trouble = ""  # why the token could not be read the last time

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_uncached(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault("cache-control", "no-store")
            await send(message)

        request = Request(scope, receive)
        try:
            request.state.has_token = self.has_token(request)
        except (OSError, ConfigError) as error:
            if str(error) != self._trouble:  # else each request would write a line
                log.warning("the token cannot be read", error=str(error))
            self._trouble = str(error)
            refusal = say("The token cannot be read now; see the log.", 503, as_json=is_api(scope))
            await refusal(scope, receive, send_uncached)
            return
        if bearer_of(request.headers) and not request.state.has_token:
            await note_wrong_token(scope)
        answer: ASGIApp = self.refuse(request) or self._app
        await answer(scope, receive, send_uncached)

    def _token(self) -> bytes:
        token = self._read_token()
        self._trouble = ""
        return token

    def has_token(self, request: Request) -> bool:
        wanted = self._token()
        return not wanted or is_same(bearer_of(request.headers), wanted)

    def refuse(self, request: Request) -> Response | None:
        """The answer to a request that may not pass. Its `state.has_token` is known."""
        if request.state.has_token:
            return None
        return self._refuse_token(request)

    def _refuse_token(self, request: Request, login: str = "") -> Response:
        """login: the address where a browser may log in."""
        is_wrong = bool(bearer_of(request.headers))
        problem = "That is not the token. It is" if is_wrong else "This needs the token. It is"
        how = f"Log in at {login}, or send" if login else "Send"
        sentence = f"{problem} {self._place}. {how}: Authorization: Bearer TOKEN"
        challenge = 'Bearer error="invalid_token"' if is_wrong else "Bearer"
        return say(sentence, 401, as_json=is_api(request.scope), challenge=challenge)


class PageGuard(Guard):
    """Answers 401 or 403 instead of the page where somebody may not see or change it."""

    def __init__(
        self,
        app: ASGIApp,
        read_token: Callable[[], bytes],
        *,
        reading_is_free: bool,
        names: Collection[str] = (),
        login: str = "/login",
        place: str = OF_PAGE,
    ) -> None:
        """read_token: there always is one. names: under which a proxy serves the page. login: its address."""
        super().__init__(app, read_token, place=place)
        self._reading_is_free = reading_is_free
        self._names = names
        self._login = login

    def has_token(self, request: Request) -> bool:
        """Where there is a token, the cookie does not count: otherwise a forged change would pass with a wrong token."""
        if bearer := bearer_of(request.headers):
            return is_same(bearer, self._token())
        # A browser also sends the cookie of another daemon, whose page is above this one.
        cookies = ";".join(request.headers.getlist("cookie")).encode("latin-1").split(b";")
        ours = [each.strip() for each in cookies if each.strip().startswith(f"{COOKIE}=".encode())]
        return any(is_same(each, f"{COOKIE}={cookie_of(self._token())}".encode()) for each in ours)

    def refuse(self, request: Request) -> Response | None:
        headers, reads, as_json = request.headers, request.method in ("GET", "HEAD"), is_api(request.scope)
        may_pass = request.state.has_token or (reads and self._reading_is_free)
        if as_json and not may_pass:
            return self._refuse_token(request)
        # A browser sends no token by itself, only a cookie.
        if not (reads or is_from_page(headers, self._names) or bearer_of(headers)):
            return say(ELSEWHERE, 403, as_json=as_json)
        if may_pass or request.url.path.startswith(OPEN_PATHS):
            return None
        if headers.get("hx-request"):
            # A page is open whose cookie is gone, as somebody logged out in another tab.
            return Response(status_code=204, headers={"HX-Redirect": self._login})
        if not (reads and takes_html(request)):
            return self._refuse_token(request, self._login)
        return RedirectResponse(self._login, 303)


async def note_wrong_token(scope: Scope) -> None:
    """Log it, and wait: as connections are limited, so is the number of tokens that can be tried."""
    host, _ = scope.get("client") or ("", 0)
    log.warning("a request had a wrong token", client=host, path=scope["path"])
    await anyio.sleep(WRONG_TOKEN_SECONDS)


def bearer_of(headers: Headers) -> bytes:
    """The token that a program has sent, or nothing."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip().encode("latin-1") if scheme.lower() == "bearer" else b""


def is_same(given: bytes, wanted: bytes) -> bool:
    """Takes constant time."""
    return hmac.compare_digest(given, wanted)


def cookie_of(token: bytes) -> str:
    """What a browser keeps instead of the token itself."""
    return hmac.digest(token, b"cookie of the page", hashlib.sha256).hex()


def own_path(given: str) -> str:
    """An address of this host, to be gone to; empty if it may lead to another one."""
    return given if re.fullmatch(r"/(?![/\\])[!-\[\]-~]*", given) else ""


def is_api(scope: Scope) -> bool:
    """Whether a program asks, which reads only JSON."""
    path: str = scope["path"]
    return f"{path}/".startswith(API)


def takes_html(request: Request) -> bool:
    """Whether a browser asks, or the script of a page that it shows."""
    return bool(request.headers.get("hx-request")) or "text/html" in request.headers.get("accept", "")


def say(sentence: str, status: int, *, as_json: bool = False, challenge: str = "") -> Response:
    headers = {"www-authenticate": challenge} if challenge else None
    if as_json:
        return answer_json({"problem": sentence}, status, headers)
    return Response(f"{sentence}\n", status, headers, media_type="text/plain; charset=utf-8")
