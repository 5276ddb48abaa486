"""Which requests are for this server, as a reverse proxy may serve it under another name, and below a path.
`PageSection.address` builds what leads there."""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

LOOPBACK_NAMES = ("127.0.0.1", "::1", "localhost")
STRANGE = (
    "On a loopback address only requests for its own names are answered, and this one is for {!a}. If a reverse proxy sends "
    "it, add that name to [http] names in daemon.toml.\n"
)


class Own:
    """Passes on the requests that are for this server, each with the path that its routes have."""

    def __init__(self, app: ASGIApp, hosts: Collection[str], root_path: str = "") -> None:
        """hosts: that a request may be for; empty: any. root_path: taken away, if the proxy has not done so."""
        self._app = app
        self._hosts = hosts
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = Headers(scope=scope).get("host", "")
        if self._hosts and host_of(name) not in self._hosts:
            await PlainTextResponse(STRANGE.format(name), 400)(scope, receive, send)
            return
        path: str = scope["path"]
        if f"{path}/".startswith(f"{self._root_path}/"):
            path = path.removeprefix(self._root_path)
        await self._app({**scope, "path": path.rstrip("/") or "/"}, receive, send)


def host_of(name: str) -> str:
    """Of the header Host, or of a name in daemon.toml: without its port. Empty if it cannot be read."""
    try:
        return urlsplit(f"//{name}").hostname or ""
    except ValueError:
        return ""


def is_from_page(headers: Headers, names: Collection[str] = ()) -> bool:
    """Whether a browser says that one of our pages sent it: other sites cannot forge this header. names: under which a proxy
    serves them."""
    origin = headers.get("origin", "")
    if origin and origin != "null":
        try:
            place = urlsplit(origin).netloc
        except ValueError:  # no address
            return False
        return place == headers.get("host", "") or place in names
    return headers.get("sec-fetch-site", "") == "same-origin"
