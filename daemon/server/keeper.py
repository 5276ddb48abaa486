"""Keeps the process of the page running. Whatever becomes of it, the daemon's work goes on."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import msgspec
import structlog

from daemon.config.loading import Config, parse
from daemon.config.sections import Http
from daemon.core.errors import ConfigError, may_pass
from daemon.core.hints import keep_config, kept_config
from daemon.monitoring.samples import Sample, Sum
from daemon.server.app import listen, risks
from daemon.system import children
from daemon.system.printed import ChildLog
from stages.contract.processes import describe_end

log = structlog.get_logger()

MODULE = "daemon.server.page.process"
# It adds near-duplicates to their groups, beside workers that need the cores.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0  # before it is started again
LASTING_SECONDS = 60.0  # a process that ran so long was not broken from the start
SOUND_SECONDS = 5.0  # … and one that ran so long serves the page


class ParsedConfig(msgspec.Struct, frozen=True):
    """The daemon's configuration, as it was parsed, for the page's process. file: that printed commands name, or empty."""

    config: dict[str, Any]
    folder: str
    file: str = ""

    @classmethod
    def of(cls, config: Config) -> ParsedConfig:
        return cls(
            config.model_dump(mode="json", exclude_unset=True), str(config.folder), str(kept_config() or "")
        )

    def read(self) -> Config:
        keep_config(Path(self.file) if self.file else None)
        return parse(self.config, Path(self.folder))


class Keeper:
    """The page of one daemon. url: its address; empty until it is served. problem: why there is none, or empty."""

    def __init__(self, config: Config, sums: Sum) -> None:
        """sums: take what the page has counted."""
        self.url = self.problem = ""
        self._config = config
        self._sums = sums
        self._order = msgspec.msgpack.encode(ParsedConfig.of(config))

    async def run(self) -> None:
        """Serve the page until cancelled. While its address cannot be used, there is none. Raises nothing."""
        try:
            await self._keep()
        except ConfigError as error:
            self._note(str(error))
        except Exception as error:
            log.error("there is no page", why=str(error), exc_info=True)
            self.problem = str(error)

    def _note(self, why: str) -> None:
        """Log a problem once."""
        if why != self.problem:
            log.warning("there is no page", why=why)
        self.problem = why

    async def _keep(self) -> None:
        if not self._config.page.listen:
            return
        http, pause = self._config.page_http, PAUSE_SECONDS
        listener = await self._listen(http)
        with listener:
            self.url = http.url_at(listener.getsockname()[1])
            log.info("page", address=self.url)
            for risk in risks(http, "page"):
                log.warning("the page is open to the network", risk=risk)
            while True:
                started = time.monotonic()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._forget)
                    status = await self._run(listener.fileno())
                    tasks.cancel_scope.cancel()
                pause = PAUSE_SECONDS if time.monotonic() - started > LASTING_SECONDS else pause
                how = describe_end(status)
                self.problem = f"the page's process has ended: {how}; the log says why"
                log.error("the page's process has ended; it is started again", how=how, pause=pause)
                await anyio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def _forget(self) -> None:
        """The problem is over when a process has not ended at once."""
        await anyio.sleep(SOUND_SECONDS)
        self.problem = ""

    async def _listen(self, http: Http) -> socket.socket:
        """Waits while the error may pass, for example while another program has the address. Raises ConfigError."""
        while True:
            try:
                return listen(http, "page")
            except ConfigError as error:
                if not may_pass(error):
                    raise
                self._note(str(error))
            await anyio.sleep(LONGEST_PAUSE_SECONDS)

    async def _run(self, listener: int) -> int | None:
        """One process, from its start to its end; returns its status."""
        try:
            child = await children.start(
                MODULE, ChildLog("page", "process"), listener, environment=ONE_THREAD
            )
        except OSError as error:
            log.error("the page's process cannot be started", why=str(error))
            return None
        reader, writer = await asyncio.open_unix_connection(sock=child.connection)
        try:
            writer.write(self._order)
            with suppress(OSError):  # it has ended already
                writer.write_eof()
            await self._take_counts(reader)
            await child.process.wait()
            return child.process.returncode
        finally:
            self._sums.keep(self)
            writer.close()
            await children.end(child.process)

    async def _take_counts(self, reader: asyncio.StreamReader) -> None:
        """What it sends until it ends (`Counting.report`)."""
        with suppress(OSError, ValueError, msgspec.MsgspecError):  # it is ending, or sends nonsense
            async for line in reader:
                self._sums.take(self, msgspec.json.decode(line, type=list[Sample]))
