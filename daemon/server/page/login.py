"""A token becomes a cookie, and the cookie goes away."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from daemon.config.loading import Config
from daemon.config.state import PAGE_TOKEN
from daemon.server.app import read_form, read_page_token
from daemon.server.guard import COOKIE, COOKIE_SECONDS, cookie_of, is_same, note_wrong_token, own_path
from daemon.server.page.rendering import Renderer


class Login:
    def __init__(self, config: Config, renderer: Renderer) -> None:
        self._config = config
        self._address = config.page.address
        self._show = renderer.show

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/login", self.login),
            Route("/login", self.log_in, methods=["POST"]),
            Route("/logout", self.log_out, methods=["GET", "POST"]),
        ]

    async def login(self, request: Request) -> Response:
        """`to`: the page from which somebody comes, and to which the login leads back."""
        before = urlsplit(request.headers.get("referer", ""))
        is_login = before.path == self._address("/login")
        came = "" if is_login else before._replace(scheme="", netloc="", fragment="").geturl()
        values = {
            "wrong": "wrong" in request.query_params,
            "file": self._config.http.token_file or self._config.state.path / PAGE_TOKEN,
            "to": own_path(request.query_params.get("to") or came) or self._address("/"),
        }
        return self._show(request, "login.html", values)

    async def log_in(self, request: Request) -> Response:
        form = await read_form(request)
        given = form.get("token", [""])[0].strip().encode()
        to = own_path(form.get("to", [""])[0]) or self._address("/")
        if not is_same(given, token := read_page_token(self._config)):
            await note_wrong_token(request.scope)
            return RedirectResponse(self._address("/login", wrong=1, to=to), 303)
        response = RedirectResponse(to, 303)
        response.set_cookie(COOKIE, cookie_of(token), COOKIE_SECONDS, **self._sent(request))
        return response

    async def log_out(self, request: Request) -> Response:
        response = RedirectResponse(self._address("/"), 303)
        response.delete_cookie(COOKIE, **self._sent(request))
        return response

    def _sent(self, request: Request) -> Any:
        """How a browser may send its cookie: only to this page and, if it has come by TLS, only by TLS."""
        secure = request.scope["scheme"] == "https"
        path = self._config.page.root_path or "/"
        return {"path": path, "secure": secure, "httponly": True, "samesite": "strict"}
