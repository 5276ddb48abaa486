"""What the daemon does, and how it is set."""

from __future__ import annotations

from anyio.to_thread import run_sync
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from daemon.config.loading import Config
from daemon.core.notices import list_notices
from daemon.monitoring.overview import LastHour, Overview
from daemon.search.query import Query
from daemon.search.searcher import NEWEST, Searcher
from daemon.server import control
from daemon.server.asked import SHOWN, number_in
from daemon.server.page.rendering import Renderer


class StatePage:
    def __init__(self, config: Config, searcher: Searcher, renderer: Renderer) -> None:
        self._config = config
        self._searcher = searcher
        self._overview = Overview(config, lambda: searcher.reasons())
        self._show = renderer.show

    def routes(self) -> list[BaseRoute]:
        return [Route("/live", self.live), Route("/state", self.state), Route("/settings", self.settings)]

    async def live(self, request: Request) -> Response:
        """The line on top of each page, again every two seconds. `newest`: the last publication when the gallery was shown."""
        seen = number_in(request.query_params.get("newest", "")) or 0
        snapshot = await run_sync(control.find_status, self._config)
        fresh = 0
        if seen:
            found = await run_sync(self._searcher.newest, Query(), NEWEST, SHOWN)
            fresh = sum(hit.number > seen for hit in found.hits)
        return self._show(request, "live.html", {"snapshot": snapshot, "fresh": fresh, "most": SHOWN})

    async def state(self, request: Request) -> Response:
        snapshot = await run_sync(control.find_status, self._config)
        template = "workers.html" if request.headers.get("hx-request") else "state.html"
        await self._overview.look()
        await run_sync(self._overview.count, snapshot.failed)
        values = {
            "snapshot": snapshot,
            "notices": list_notices(snapshot.notices.items()),
            "hour": LastHour.of(snapshot.minutes),
            "rooms": self._overview.rooms(),
            "reasons": self._overview.reasons,
            "are_last": self._overview.are_last,
        }
        return self._show(request, template, values)

    async def settings(self, request: Request) -> Response:
        """Every key of the configuration, first those that differ from the defaults; secrets are in files of their own, of
        which only the name is shown."""
        values = {"tables": self._overview.settings, "folder": self._config.folder}
        return self._show(request, "settings.html", values)
