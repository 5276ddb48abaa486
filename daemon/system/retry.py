"""Repeats a call until it succeeds: a full or failing disk, or a lack of descriptors, pauses the daemon and loses nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import ParamSpec, TypeVar

import anyio
import structlog
from anyio import to_thread

from daemon.system.scarcity import SCARCE

log = structlog.get_logger()
T = TypeVar("T")
P = ParamSpec("P")

PAUSE_SECONDS = 1.0  # between attempts


class Hurried(Exception):
    """A write failed, and there is no time to repeat it."""


class Retry:
    """Calls a function that may raise OSError again and again, until it returns."""

    def __init__(self, beside: Retry | None = None) -> None:
        """beside: of the same process; what fails for both is logged once, and until it works for both."""
        # What is read or written → why that fails, as a sentence.
        self.failing: dict[str, str] = beside.failing if beside else {}
        # What is read or written → calls that have failed so far.
        self._waiting: Counter[str] = beside._waiting if beside else Counter()
        # Set by a drain, which does not wait for a disk: the next daemon writes the rest.
        self.hurried = False

    def blocked(self) -> list[str]:
        """Why the work is paused, each reason once; empty if it is not."""
        return list(dict.fromkeys(self.failing.values()))

    async def __call__(
        self, what: str, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call `function` until it succeeds; returns its result. what: what it reads or writes, for the message.

        Raises Hurried if it fails and there is no time to wait.
        """
        failed = False
        try:
            while True:
                try:
                    answer = await function(*args, **kwargs)
                    break
                except OSError as error:
                    why = SCARCE.get(error.errno or 0) or f"{what} cannot be written: {error}"
                    if what not in self.failing:
                        log.error("paused", trouble=why)
                    self.failing[what] = why
                    if self.hurried:
                        raise Hurried from error
                    self._waiting[what] += not failed
                    failed = True
                    await anyio.sleep(PAUSE_SECONDS)
        finally:
            self._waiting[what] -= failed
        # A call that succeeds proves little while others still fail: it may have had nothing to write.
        if not self._waiting[what] and (why := self.failing.pop(what, "")):
            log.info("resumed", after=why)
        return answer

    async def in_thread(self, what: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The same with a function that blocks, in a thread."""
        return await self(what, to_thread.run_sync, partial(function, *args, **kwargs))
