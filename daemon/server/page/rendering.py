"""Answers made from templates."""

from __future__ import annotations

from collections.abc import Mapping

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from daemon import __version__
from daemon.config.loading import Config
from daemon.core.hints import quantity
from daemon.monitoring.overview import FILTERS
from daemon.server.app import explain_as_json, sentence_of
from daemon.server.guard import is_api, say, takes_html
from daemon.server.page.views import milliseconds, name_day

SIZES = ("small", "medium", "large")  # of the cards


def coded(text: str) -> Markup:
    """A sentence as on the terminal; the commands between backticks become code."""
    kinds = Markup("{}"), Markup("<code>{}</code>")
    return Markup().join(kinds[place % 2].format(part) for place, part in enumerate(text.split("`")))


class Renderer:
    def __init__(self, config: Config) -> None:
        self._is_private = config.page_http.is_private
        self._templates = Environment(
            loader=PackageLoader("daemon.server.page"),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=StrictUndefined,
        )
        self._templates.globals |= {"version": __version__, "url": config.page.address, "quantity": quantity}
        self._templates.filters |= {
            "milliseconds": milliseconds,
            "name_day": name_day,
            "coded": coded,
            **FILTERS,
        }

    def show(self, request: Request, template: str, values: Mapping[str, object]) -> Response:
        shared = {
            "may_read": request.state.has_token or self._is_private,
            "may_change": request.state.has_token,
            "path": request.url.path,
            "sizes": SIZES,
            "size": size if (size := request.cookies.get("visiond-size")) in SIZES else "medium",
            "queued": request.query_params.get("queued", ""),
        }
        content = self._templates.get_template(template).render(shared | dict(values))
        return Response(
            content, media_type="text/html; charset=utf-8", headers={"vary": "HX-Request, HX-Target"}
        )

    async def explain(self, request: Request, error: Exception) -> Response:
        """As HTML to a browser, and in one line to a program."""
        if is_api(request.scope):
            return await explain_as_json(request, error)
        status = error.status_code if isinstance(error, HTTPException) else 503
        sentence = sentence_of(request, error) if isinstance(error, HTTPException) else str(error)
        if takes_html(request):
            response = self.show(request, "error.html", {"sentence": sentence, "status": status})
            response.status_code = status
        else:
            response = say(sentence, status)
        response.headers.update(getattr(error, "headers", None) or {})
        return response
