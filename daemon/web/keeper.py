"""Keeps the process of the page running. Whatever becomes of it, the daemon's work goes on."""

from __future__ import annotations

import time
from contextlib import suppress

import anyio
import msgspec
import structlog
from anyio import to_thread

from daemon.config.loading import Config
from daemon.errors import ConfigError
from daemon.stations.relay import Relayed
from daemon.system import children
from daemon.web.app import listen
from stages.processes import describe_end

log = structlog.get_logger()

MODULE = "daemon.page.process"
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0  # before it is started again
LASTING_SECONDS = 60.0  # a process that ran so long was not broken from the start


async def keep_page(config: Config) -> None:
    """Serve the page until cancelled. If its address is in use, there is none. Raises nothing."""
    try:
        await _keep(config)
    except Exception as error:
        log.error("there is no page", why=str(error), exc_info=True)


async def _keep(config: Config) -> None:
    if not config.page.listen:
        return
    http = config.http.model_copy(update={"listen": config.page.listen})
    try:
        listener = listen(http, "page")
    except ConfigError as error:
        log.warning(
            "there is no page",
            why=str(error),
        )
        return
    scheme = "https" if http.tls_certificate else "http"
    host, port = http.listen.rpartition(":")[0], listener.getsockname()[1]
    order = msgspec.msgpack.encode(
        {"config": config.model_dump(mode="json", exclude_unset=True), "folder": str(config.folder)}
    )
    pause = PAUSE_SECONDS
    with listener:
        log.info("page", address=f"{scheme}://{host}:{port}")
        while True:
            started = time.monotonic()
            status = await _run(order, listener.fileno())
            pause = PAUSE_SECONDS if time.monotonic() - started > LASTING_SECONDS else pause
            log.error(
                "the page's process has ended; it is started again", how=describe_end(status), pause=pause
            )
            await anyio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


async def _run(order: bytes, listener: int) -> int | None:
    """One process, from its start to its end; returns its status."""
    try:
        child = await children.start(MODULE, Relayed("page", "process"), listener)
    except OSError as error:
        log.error("the page's process cannot be started", why=str(error))
        return None
    try:
        with child.connection as connection:
            connection.setblocking(True)
            with suppress(OSError):  # it has ended already
                await to_thread.run_sync(connection.sendall, order)
        return await child.process.wait()
    finally:
        await children.end(child.process)
