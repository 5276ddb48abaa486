"""Passes what a station, or the page, logs on to the daemon's log. If several processes wrote to one pipe, long lines would be
torn, and they would write over a progress bar."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import structlog

from daemon.system.stray import Printed

log = structlog.get_logger()

LONGEST_LINE = 1 << 20  # bytes
LEVELS = logging.getLevelNamesMapping()
RESERVED = {"self", "method_name"}  # names of structlog's own parameters


class Relayed(Printed):
    """Reads what a station prints. Its events, which are JSON, become events here; anything else, for example
    the interpreter's own traceback, becomes an event as for a worker."""

    def __init__(self, name: str, kind: str = "station") -> None:
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
