"""All addresses of the page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Mount
from starlette.staticfiles import StaticFiles

from daemon.config.loading import Config
from daemon.core.errors import VisiondError
from daemon.ledger.records import Reader
from daemon.search.searcher import Searcher
from daemon.server.events import Events
from daemon.server.page.groups import Groups
from daemon.server.page.images import Images
from daemon.server.page.login import Login
from daemon.server.page.pictures import Pictures
from daemon.server.page.rendering import Renderer
from daemon.server.page.state import StatePage
from daemon.server.page.ticked import Ticked

STATIC = Path(__file__).with_name("static")
# What a browser may load and send for the page, all of it from and to the page itself.
ALLOWED = "script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'"


class Page:
    def __init__(self, config: Config, reader: Reader, searcher: Searcher, pictures: Pictures) -> None:
        self._renderer = Renderer(config)
        self._parts = (
            Images(config, reader, searcher, pictures, self._renderer),
            Groups(config, reader, searcher, self._renderer),
            Ticked(config, reader),
            StatePage(config, searcher, self._renderer),
            Login(config, self._renderer),
            Events(reader),
        )

    def routes(self) -> list[BaseRoute]:
        routes = [route for part in self._parts for route in part.routes()]
        return [*routes, Mount("/static", StaticFiles(directory=STATIC))]

    def errors(self) -> dict[type[Exception], Callable[..., Any]]:
        return {VisiondError: self._renderer.explain, HTTPException: self._renderer.explain}
