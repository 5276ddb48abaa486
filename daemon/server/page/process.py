"""The process that serves the page: `python -m daemon.server.page.process SOCKET_FD LISTENER_FD PARENT_PID` by the daemon; or
`visiond page`, by itself."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
from collections.abc import Sequence

import anyio
import msgspec
from starlette.types import ASGIApp

from daemon.config.loading import Config
from daemon.config.state import closed_to_others
from daemon.ledger.records import open_reader
from daemon.search.opening import keep_up_to_date, make_searcher
from daemon.server.api import Api
from daemon.server.app import PageToken, load_certificate, make_server, running
from daemon.server.counting import Counting
from daemon.server.guard import OF_HTTP, OF_PAGE, PageGuard
from daemon.server.keeper import ParsedConfig
from daemon.server.page.page import ALLOWED, Page
from daemon.server.page.pictures import Pictures
from daemon.system.lines import written_aside
from daemon.system.log import set_up
from daemon.system.printed import catch
from stages.contract.processes import die_with

NICE = 5  # images come first


async def serve(
    config: Config,
    listener: socket.socket,
    stop: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
    daemon: socket.socket | None = None,
) -> None:
    """Until one of these signals. daemon: gets what is counted. Raises VisiondError: NothingFound without a ledger,
    SearchUnusable."""
    http, token, counting = config.page_http, PageToken(config), Counting()
    token.read()  # one that cannot be read, or not be made, is told now

    def guard(app: ASGIApp) -> ASGIApp:
        guarded = PageGuard(
            app,
            token.read,
            reading_is_free=http.is_private,
            names=http.names,
            login=config.page.address("/login"),
            place=OF_HTTP if config.http.token_file else OF_PAGE,
        )
        return counting.count(guarded)

    with (
        open_reader(config) as reader,
        contextlib.closing(make_searcher(config, reader)) as searcher,
        contextlib.closing(Pictures.of(config)) as pictures,
    ):
        page = Page(config, reader, searcher, pictures)
        tls = load_certificate(http)
        api = Api(config, reader, searcher, counting.metrics)
        routes = [*api.routes(), *page.routes()]
        server = make_server(
            listener, routes, http, guard, tls, page.errors(), ALLOWED, config.page.root_path
        )
        async with running(server), anyio.create_task_group() as tasks:
            tasks.start_soon(keep_up_to_date, searcher)
            tasks.start_soon(api.uploads.clear)
            if daemon:
                tasks.start_soon(counting.report, daemon)
            with anyio.open_signal_receiver(*stop) as received:
                await anext(received)
            tasks.cancel_scope.cancel()


def main() -> None:
    connection, listening, parent = map(int, sys.argv[1:])
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    with written_aside():
        set_up(format="json")
        catch()
        ours = socket.socket(fileno=connection)
        with ours.makefile("rb") as given:
            config = msgspec.msgpack.decode(given.read(), type=ParsedConfig).read()
        with ours, closed_to_others(), contextlib.suppress(KeyboardInterrupt):
            listener = socket.socket(fileno=listening)
            gc.freeze()  # what is loaded by now stays: to look at all of it again and again takes 0.1 s each time
            gc.set_threshold(10_000, 20, 20)  # to look at all requests that are under way finds little
            # A terminal sends SIGINT to the whole group, but only the daemon obeys.
            anyio.run(serve, config, listener, (signal.SIGTERM,), ours, backend_options={"use_uvloop": True})


if __name__ == "__main__":
    main()
