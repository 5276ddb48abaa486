"""Sends to the log what libraries, Python itself and child processes would print directly.

With this, every line of a JSON log is one JSON object, tracebacks included.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from typing import Any

import anyio
import msgspec
import structlog

log = structlog.get_logger()

GATHER_SECONDS = 0.2  # output within this time is one event, so that a traceback stays whole
LONGEST_TEXT = 8192  # bytes of an event
MOST_EVENTS, WINDOW_SECONDS = 20, 60.0  # of one process; more output is only counted
TRACEBACK = "Traceback (most recent call last)"
LONGEST_LINE = 1 << 20  # bytes of an event that a child has logged
LEVELS = logging.getLevelNamesMapping()
RESERVED = {"self", "method_name"}  # names of structlog's own parameters


class _Handler(logging.Handler):
    """Passes what a library logs to our log."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except Exception:  # noqa: BLE001 - a library's arguments that do not fit its message
            message = str(record.msg)
        level = min(max(record.levelno // 10 * 10, logging.DEBUG), logging.CRITICAL)
        log.log(level, message, logger=record.name, exc_info=record.exc_info or None)


def catch() -> None:
    """From now on, the log gets what libraries log, warnings, and errors that our code cannot catch."""
    logging.basicConfig(handlers=[_Handler()], level=logging.WARNING, force=True)
    logging.captureWarnings(True)

    def report(error: Any, message: str, **about: str) -> None:
        log.error(message, **about, exc_info=(error.exc_type, error.exc_value, error.exc_traceback))

    def report_thread(error: threading.ExceptHookArgs) -> None:
        report(error, "a thread raised an error", thread=error.thread.name if error.thread else "")

    def report_unraisable(error: sys.UnraisableHookArgs) -> None:
        report(error, error.err_msg or "an error could not be raised", object=repr(error.object))

    threading.excepthook = report_thread
    sys.unraisablehook = report_unraisable


class Printed(asyncio.Protocol):
    """Logs what one child process and its own children print. It is always read, so that printing never
    blocks; excess output is dropped and counted."""

    def __init__(self, name: str, kind: str = "worker") -> None:
        """name: of the child, in the log's key `kind`."""
        self.ended = asyncio.Event()
        self.name = name
        self.kind = kind
        self._text = bytearray()
        self._dropped = 0  # bytes
        self._events: list[float] = []  # when the last ones were logged
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.BaseTransport | None = None

    async def open(self) -> int:
        """Start reading. Returns the descriptor for the child's standard error, which the caller closes."""
        loop = asyncio.get_running_loop()
        reading, writing = os.pipe()
        try:
            # uvloop closes the descriptor itself, and then the file: by then the number may be that of another thread's file.
            file = os.fdopen(reading, "rb", 0, closefd=isinstance(loop, asyncio.BaseEventLoop))
            await loop.connect_read_pipe(lambda: self, file)
        except BaseException:
            os.close(writing)
            raise
        return writing

    async def finish(self, seconds: float) -> None:
        """The process has ended: read the rest, for a limited time if something else keeps the pipe open."""
        with anyio.move_on_after(seconds, shield=True):
            await self.ended.wait()
        self._flush()
        self.close()

    def close(self) -> None:
        if self._transport:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if not self._may_log():
            self._dropped += len(data)
            return
        self._text += data
        if len(self._text) >= LONGEST_TEXT:
            self._flush()
        elif not self._timer:
            self._timer = asyncio.get_running_loop().call_later(GATHER_SECONDS, self._flush)

    def connection_lost(self, exc: Exception | None) -> None:
        self._flush()
        self.ended.set()

    def _may_log(self) -> bool:
        self._events = [at for at in self._events if time.monotonic() - at < WINDOW_SECONDS]
        return len(self._events) < MOST_EVENTS

    def _flush(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        text = bytes(self._text[:LONGEST_TEXT]).decode(errors="backslashreplace").strip()
        excess = len(self._text) - LONGEST_TEXT
        self._text.clear()
        self._dropped += max(0, excess)
        if not text and not self._dropped:
            return
        self._events.append(time.monotonic())
        more = {"dropped_bytes": self._dropped} if self._dropped else {}
        self._dropped = 0
        plain, found, rest = text.partition(TRACEBACK)
        if plain.strip() or not found:
            log.info(f"{self.kind} printed", **{self.kind: self.name}, text=plain.strip(), **more)
        if found:
            log.error(
                f"{self.kind} printed a traceback", **{self.kind: self.name}, exception=found + rest, **more
            )


class ChildLog(Printed):
    """Of a child with a log of its own. Its events, which are JSON, become events here; anything else, for example the
    interpreter's own traceback, becomes an event as for a worker. If several processes wrote to one pipe, long lines would
    be torn, and they would write over a progress bar."""

    def __init__(self, name: str, kind: str = "executor") -> None:
        super().__init__(name, kind)
        self._begun = b""  # a line

    def data_received(self, data: bytes) -> None:
        *lines, self._begun = (self._begun + data).split(b"\n")
        if len(self._begun) > LONGEST_LINE:
            lines, self._begun = [*lines, self._begun], b""
        other = b""
        for line in lines:
            if event := decode_event(line):
                self._pass_on(event)
            else:
                other += line + b"\n"
        if other.strip():
            super().data_received(other)

    def connection_lost(self, exc: Exception | None) -> None:
        self.data_received(b"\n")
        super().connection_lost(exc)

    def _pass_on(self, details: dict[str, Any]) -> None:
        """It gets a new time stamp, because it is written in the order of arrival."""
        level, event = LEVELS[details.pop("level").upper()], details.pop("event")
        details.pop("timestamp", None)
        log.log(level, event, **{self.kind: self.name, **details})


def decode_event(line: bytes) -> dict[str, Any] | None:
    """An event that `set_up` has written as JSON; None for any other line."""
    if not line.startswith(b"{"):
        return None
    try:
        event = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    is_event = isinstance(event.get("event"), str) and str(event.get("level")).upper() in LEVELS
    return event if is_event and not event.keys() & RESERVED else None
