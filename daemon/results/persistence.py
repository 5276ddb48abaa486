"""Trying until it works: a full or failing disk, or a lack of descriptors, pauses the daemon and loses nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
import structlog

from daemon.errors import SCARCE, Hurried

log = structlog.get_logger()
T = TypeVar("T")

PAUSE_SECONDS = 1.0  # between tries


class Persistence:
    """Calls what may raise OSError again and again until it does not."""

    def __init__(self) -> None:
        self.troubles: dict[str, str] = {}  # by what is to be done: why it cannot be, in a sentence
        self.hurried = False  # a drain does not wait for a disk: what cannot be written stays for the next daemon

    def obstacles(self) -> list[str]:
        """What holds the work up, each once."""
        return list(dict.fromkeys(self.troubles.values()))

    async def __call__(self, what: str, write: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """The answer of `write`. Raises Hurried when it fails and there is no time to wait."""
        failed = False
        while True:
            try:
                answer = await write(*arguments)
            except OSError as error:
                trouble = SCARCE.get(error.errno or 0) or f"{what} cannot be written: {error}"
                if what not in self.troubles:
                    log.error("paused", trouble=trouble)
                self.troubles[what] = trouble
                if self.hurried:
                    raise Hurried from error
                failed = True
                await anyio.sleep(PAUSE_SECONDS)
            else:
                if failed and (trouble := self.troubles.pop(what, "")):  # that something else can be done proves nothing
                    log.info("going on", after=trouble)
                return answer
