"""The process that serves the page: `python -m daemon.server.process SOCKET_FD LISTENER_FD PARENT_PID` by the daemon; or
`visiond page`, by itself."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from functools import partial

import anyio
import msgspec
import structlog
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from daemon.config.loading import Config
from daemon.config.state import PICTURES, closed_to_others
from daemon.core.errors import VisiondError
from daemon.ledger.records import open_reader
from daemon.search.index import check_ledger
from daemon.search.opening import find_embedder
from daemon.search.searcher import Searcher
from daemon.server.app import LOOPBACK_NAMES, load_certificate, read_token
from daemon.server.connections import Server
from daemon.server.guard import HEADERS, Guard, own_token
from daemon.server.keeper import ParsedConfig
from daemon.server.pages import Page, token_file
from daemon.server.pictures import Pictures
from daemon.system.lines import written_aside
from daemon.system.log import set_up
from daemon.system.stray import catch
from stages.contract.base import Limits
from stages.contract.processes import die_with

log = structlog.get_logger()

NICE = 5  # images come first
CATCH_UP_SECONDS, TROUBLE_SECONDS = 1.0, 30.0


@contextlib.contextmanager
def opened(config: Config) -> Iterator[tuple[Page, Searcher]]:
    """Raises NothingFound without a ledger, SearchUnusable."""
    pipeline = config.pipeline
    limits = Limits(
        pipeline.max_pixels, pipeline.max_aspect_ratio, pipeline.decode_seconds, pipeline.decode_bytes
    )
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(open_reader(config))
        check_ledger(reader)
        searcher = stack.enter_context(
            contextlib.closing(Searcher(config.state.path, reader, find_embedder(config)))
        )
        pictures = Pictures(config.state.path / PICTURES, config.page.pictures_bytes, limits)
        stack.callback(pictures.close)
        yield Page(config, reader, searcher, pictures), searcher


async def serve(
    config: Config, listener: socket.socket, stop: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT)
) -> None:
    """Until one of these signals. Raises VisiondError."""
    http = config.page_http
    read = (
        partial(read_token, config.http) if config.http.token_file else partial(own_token, token_file(config))
    )
    read()  # a token that cannot be read, or not be made, is told now
    with opened(config) as (page, searcher):
        guards = [
            Middleware(
                Guard, read_token=read, reading_is_free=http.is_loopback, is_secure=bool(http.tls_certificate)
            )
        ]
        if http.is_loopback:  # against DNS rebinding
            guards.insert(0, Middleware(TrustedHostMiddleware, allowed_hosts=[*LOOPBACK_NAMES, http.host]))
        application = page.application()
        application.user_middleware = guards
        tls = load_certificate(http) if http.tls_certificate else None
        server = Server(application, listener, tls, HEADERS)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_follow, searcher)
            tasks.start_soon(_stop_at_signal, server, stop)
            await server.serve([])
            tasks.cancel_scope.cancel()


async def _stop_at_signal(server: Server, numbers: Sequence[signal.Signals]) -> None:
    with anyio.open_signal_receiver(*numbers) as received:
        async for _ in received:
            server.should_exit = server.force_exit = True


async def _follow(searcher: Searcher) -> None:
    """Keep the index up to date, so that a search finds it so. A problem is logged once, and tried again."""
    last = ""
    while True:
        problem = ""
        try:
            await anyio.to_thread.run_sync(searcher.catch_up, abandon_on_cancel=True)
        except VisiondError as error:
            problem = str(error)
        if problem and problem != last:
            log.error("the search is not kept up to date", why=problem)
        last = problem
        await anyio.sleep(TROUBLE_SECONDS if problem else CATCH_UP_SECONDS)


def main() -> None:
    connection, listening, parent = map(int, sys.argv[1:])
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    with written_aside():
        set_up(format="json")
        catch()
        with socket.socket(fileno=connection) as ours, ours.makefile("rb") as given:
            config = msgspec.msgpack.decode(given.read(), type=ParsedConfig).read()
        with closed_to_others(), contextlib.suppress(KeyboardInterrupt):
            listener = socket.socket(fileno=listening)
            # A terminal sends SIGINT to the whole group, but only the daemon obeys.
            anyio.run(serve, config, listener, (signal.SIGTERM,), backend_options={"use_uvloop": True})


if __name__ == "__main__":
    main()
