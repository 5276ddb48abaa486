"""What the daemon itself answers: metrics, health and status over TCP, read-only; and by the control socket also the requests
of the commands, which change something."""

from __future__ import annotations

import contextlib
import html
import os
import ssl
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated

import msgspec
import structlog
from anyio import to_thread
from prometheus_client.exposition import choose_encoder
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from daemon import __version__
from daemon.config.loading import Config
from daemon.config.state import CONTROL
from daemon.core.errors import ConfigError, WrongArgument
from daemon.core.jobs import JobStatus
from daemon.core.notices import list_notices
from daemon.ledger.soundness import MOST
from daemon.maintenance.keeping import ModelAnswers
from daemon.server.app import (
    answer_json,
    explain_as_json,
    listen,
    listen_control,
    load_certificate,
    make_server,
    read_body,
    read_token,
    risks,
    running,
)
from daemon.server.guard import Guard
from daemon.server.status import Status

log = structlog.get_logger()

PUT_BACK = (JobStatus.FAILED.name, JobStatus.DONE.name)
PUT_BACK_IMAGES = 10_000  # in one request
PUT_BACK_BYTES = 20 * PUT_BACK_IMAGES
ANSWERS_BYTES = 64 << 20
Number = Annotated[int, msgspec.Meta(ge=1, le=MOST)]
Numbers = Annotated[list[Number], msgspec.Meta(max_length=PUT_BACK_IMAGES)]

INDEX = """\
<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>visiond</title>
<h1>visiond {version}</h1>
<p>{sentence}</p>
{notices}<ul>
<li><a href="api/status">/api/status</a>: counts, rate, remaining time and workers, as JSON</li>
<li><a href="healthz">/healthz</a>: whether images can be processed</li>
<li><a href="readyz">/readyz</a>: whether images get through, and if not, why</li>
<li><a href="metrics">/metrics</a>: for Prometheus</li>
</ul>
</html>
"""


class Answers:
    """The handlers of all requests, and the token and the certificate of [http] as they were read last."""

    def __init__(self, status: Status) -> None:
        self._status = status
        self._token = b""  # empty: none is needed
        self._tls: ssl.SSLContext | None = None

    @contextlib.asynccontextmanager
    async def serve(self, config: Config, *, pages_matter: bool = True) -> AsyncIterator[str]:
        """Serve while the context is open. Yields the URL of the pages, or "" without pages. Raises
        ConfigError if the token or the certificate is unusable or, with pages_matter, the address is in use."""
        http, control = config.http, config.state.path / CONTROL
        with contextlib.ExitStack() as sockets:  # a server that is stopped before it starts closes no socket
            commands, explain = [*self.changing(), *self.reading()], {HTTPException: explain_as_json}
            servers = [make_server(sockets.enter_context(listen_control(control)), commands, errors=explain)]
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
                self.configure(config)
                guard = partial(Guard, read_token=lambda: self._token)
                servers.append(make_server(listener, self.reading(), http, guard, self._tls, explain))
                url = http.url_at(listener.getsockname()[1])
            async with running(*servers):
                yield url
        with contextlib.suppress(OSError):  # the next daemon removes it
            os.unlink(control)

    def configure(self, config: Config) -> None:
        """Read the token and the certificate, also again: new connections use what is in the files then.
        Raises ConfigError, and changes nothing."""
        http = config.http
        if not http.listen:
            return
        token, tls = read_token(http), load_certificate(http)
        if self._tls and tls:
            self._tls.load_cert_chain(http.tls_certificate, http.tls_key or None)
        else:
            self._tls = tls
        self._token = token

    def reading(self) -> list[Route]:
        return [
            Route("/", self.index),
            Route("/metrics", self.metrics),
            Route("/healthz", self.healthz),
            Route("/readyz", self.readyz),
            Route("/api/status", self.status),
        ]

    def changing(self) -> list[Route]:
        return [
            Route("/api/status", self.status_with_names),
            Route("/put-back/{status}", self.put_back, methods=["POST"]),
            Route("/lost", self.note_lost, methods=["POST"]),
            Route("/answers", self.keep_answers, methods=["POST"]),
            Route("/prune", self.prune, methods=["GET", "POST"]),
            Route("/reload", self.reload, methods=["POST"]),
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
        body = await to_thread.run_sync(encode, self._status.metrics)
        return Response(body, headers={"content-type": content_type})

    async def healthz(self, _request: Request) -> Response:
        """200 while images can be processed; "degraded" with the reasons if some worker is not ready."""
        problems, dead = self._status.unhealthy(), self._status.is_dead()
        state = "dead" if dead else "degraded" if problems else "ok"
        return answer_json({"status": state, "problems": problems}, 503 if dead else 200)

    async def readyz(self, _request: Request) -> Response:
        """200 while images get through, otherwise 503 with the reasons. Unreadable folders are only a
        warning: they block no other images, and often only their owner can open them. Failed upkeep is shown
        too."""
        problems, warnings, upkeep = self._status.unready(), self._status.warnings(), self._status.upkeep
        more = {"warnings": warnings, "upkeep": upkeep.failures() if upkeep else []}
        shown = {name: lines for name, lines in more.items() if lines}
        return answer_json({"ready": not problems, "problems": problems} | shown, 503 if problems else 200)

    async def status(self, _request: Request) -> Response:
        """Without the names of folders and files in an inbox, which readers of the pages should not see."""
        return answer_json((await self._status.complete_snapshot()).without_names())

    async def status_with_names(self, _request: Request) -> Response:
        return answer_json(await self._status.complete_snapshot())

    async def put_back(self, request: Request) -> Response:
        """Queue at most PUT_BACK_IMAGES images of one status again. Anything else is refused with a sentence. With
        ?distrust=1 their results are not used again."""
        name = request.path_params["status"]
        if name not in PUT_BACK:
            known = " or ".join(PUT_BACK)
            raise HTTPException(404, f"images that are {name} cannot be queued again, only {known}")
        ids = await _read_ids(request)
        distrust = request.query_params.get("distrust") == "1"
        return answer_json({"images": await self._status.put_back(JobStatus[name], ids, distrust=distrust)})

    async def note_lost(self, request: Request) -> Response:
        """A redo could not read the files of these images."""
        return answer_json({"images": await self._status.note_lost(await _read_ids(request))})

    async def keep_answers(self, request: Request) -> Response:
        """Keep answers of models that are not in use yet. Anything else is refused with a sentence."""
        most = f"the request has more than {ANSWERS_BYTES} bytes; send fewer answers at once"
        body = await read_body(request, ANSWERS_BYTES, most)
        try:
            groups = msgspec.json.decode(body, type=list[ModelAnswers])
            return answer_json({"images": await self._status.keep_answers(groups)})
        except (msgspec.DecodeError, WrongArgument) as error:
            raise HTTPException(400, f"expected answers of models: {error}") from error

    async def prune(self, request: Request) -> Response:
        """POST starts to prune what ended before the Unix time in its body.
        POST and GET answer with the progress."""
        upkeep = self._status.upkeep
        assert upkeep is not None
        if request.method == "POST":
            upkeep.prune_soon(msgspec.json.decode(await request.body(), type=float))
        return answer_json(upkeep.pruning)

    async def reload(self, _request: Request) -> Response:
        """Read the configuration again; answers with what has changed."""
        assert self._status.reloading is not None
        return answer_json(await self._status.reloading.reload())


async def _read_ids(request: Request) -> list[int]:
    """The numbers in the body, at most PUT_BACK_IMAGES. Raises HTTPException."""
    most = f"the request has more than {PUT_BACK_BYTES} bytes; name at most {PUT_BACK_IMAGES} images"
    body = await read_body(request, PUT_BACK_BYTES, most)
    try:
        return msgspec.json.decode(body, type=Numbers)
    except msgspec.DecodeError as error:
        wanted = f"expected a list of at most {PUT_BACK_IMAGES} numbers from 1 to {MOST}"
        raise HTTPException(400, f"{wanted}: {error}") from error
