"""Groups of near-duplicates side by side, as `visiond duplicates` has found them last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anyio.to_thread import run_sync
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from daemon.config.loading import Config
from daemon.core.errors import SearchUnusable
from daemon.core.sidecar import timestamp
from daemon.ledger import publications
from daemon.ledger.records import Reader
from daemon.search.duplicates import NearBest, about_groups, has_newer_model, read_groups, stage_of
from daemon.search.searcher import Hit, Searcher
from daemon.server.asked import number_in
from daemon.server.page.rendering import Renderer
from daemon.server.page.ticked import MOST
from daemon.server.page.views import View, view_of

SHOWN = 12  # groups at once
MOST_IMAGES = 24  # of a group


class Groups:
    def __init__(self, config: Config, reader: Reader, searcher: Searcher, renderer: Renderer) -> None:
        self._reader = reader
        self._searcher = searcher
        self._address = config.page.address
        self._show = renderer.show

    def routes(self) -> list[BaseRoute]:
        return [Route("/duplicates", self.duplicates)]

    async def duplicates(self, request: Request) -> Response:
        first = number_in(request.query_params.get("cursor", "")) or 0
        values: dict[str, Any] = {"kept": None, "problem": "", "most_downloaded": MOST}
        try:
            values |= await run_sync(self._find, first)
        except SearchUnusable as error:
            values["problem"] = str(error)
        return await run_sync(self._show, request, "duplicates.html", values)

    def _find(self, first: int) -> dict[str, Any]:
        """first: of the groups to show, whose others have most bytes if it is 0. Raises SearchUnusable."""
        self._searcher.catch_up()
        self._searcher.extend_groups()
        index = self._searcher.index
        if not (kept := about_groups(index)):
            return {}
        groups = [
            (first + at, *self._views(each)) for at, each in enumerate(read_groups(index, first, SHOWN), 1)
        ]
        with self._reader.lend() as ledger:
            since = publications.read_last(ledger) - kept.last
        return {
            "kept": kept,
            "made_at": timestamp(kept.made_at),
            "since": since,
            "stage": stage_of(self._reader, kept),
            "has_newer_model": has_newer_model(self._reader, index, kept),
            "groups": [(*numbers, views) for *numbers, views in groups if len(views) > 1],
            "before": first and self._address("/duplicates", cursor=max(0, first - SHOWN)),
            "after": first + SHOWN < kept.groups and self._address("/duplicates", cursor=first + SHOWN),
        }

    def _views(self, group: Sequence[NearBest]) -> tuple[int, list[View]]:
        """How many of its images are still there, and the first of these."""
        cosines = {each.best: each.cosine for each in group}
        with self._reader.lend() as ledger:
            shown = publications.read_shown_images(ledger, [*cosines])
        records = self._reader.find_numbers([image for image in cosines if image in shown][:MOST_IMAGES])
        best = records[0].id if records else 0
        views = [view_of(r, Hit(0, r.id, None if r.id == best else cosines[r.id])) for r in records]
        return len(shown), views
