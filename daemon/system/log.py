"""The log: one event per line on stderr, readable text on a terminal and JSON elsewhere.

Values are escaped, so that a file name can neither forge a line nor send control codes to the terminal.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import MutableMapping
from typing import Any, TextIO

import msgspec

RECENT = 20  # messages
LONGEST = 500  # characters of one
SHOWN_APART = ("event", "level", "timestamp", "exception")


class LogLine(msgspec.Struct, frozen=True):
    """A warning or an error of this process, the last one of its kind. at: Unix seconds. times: how often there was one."""

    at: float
    level: str  # warning, error or critical
    text: str
    times: int = 1


# By message, without what it is about: a thousand failures leave room for the others.
_recent: dict[str, LogLine] = {}
_keeping = threading.Lock()
_as_json = False  # whether the log is set up and has only JSON objects


def is_json() -> bool:
    """Whether every line on standard error must be a JSON object now. Then everything that is printed goes through the log."""
    return _as_json


def print_line(text: str) -> None:
    """Print a line on standard error, or log it as an event if only JSON goes there."""
    if not _as_json:
        print(text, file=sys.stderr)
        return
    import structlog

    structlog.get_logger().info(text)


def set_up(level: str = "info", format: str = "auto", stream: TextIO | None = None) -> None:
    """Configure structlog for the process. format: "console", "json", or "auto" by the stream, which is standard error."""
    import structlog  # slow to import, and most commands only need `escape`

    global _as_json
    stream = stream or sys.stderr
    console = format == "console" or (format == "auto" and stream.isatty())
    _as_json = not console
    renderer: Any = structlog.processors.JSONRenderer()
    if console:
        renderer = structlog.dev.ConsoleRenderer(colors=stream.isatty())
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=not console),
            structlog.processors.format_exc_info,
            _escape,
            _keep,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(stream),
    )


def _escape(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> dict[str, Any]:
    """Control characters, surrogates and direction overrides become visible escapes; a traceback keeps its lines."""
    escaped = {key: escape(value) if isinstance(value, str) else value for key, value in event.items()}
    if "exception" in event:
        escaped["exception"] = "\n".join(map(escape, event["exception"].split("\n")))
    return escaped


def recent_lines() -> list[LogLine]:
    """The last warnings and errors, oldest first; what [log] level leaves out is not among them."""
    with _keeping:
        return list(_recent.values())


def _keep(_logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    if method in ("warning", "error", "critical"):
        message = str(event.get("event", ""))
        about = [f"{key}: {value}" for key, value in event.items() if key not in SHOWN_APART]
        cause = str(event.get("exception", "")).rpartition("\n")[2]  # the last line of a traceback
        text = "; ".join(filter(None, [message, *about, cause]))
        with _keeping:
            times = 1 + (_recent.pop(message).times if message in _recent else 0)
            shown = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
            _recent[message] = LogLine(time.time(), method, shown, times)
            if len(_recent) > RECENT:
                del _recent[next(iter(_recent))]
    return event


def escape(text: str) -> str:
    """The text on one line, with everything unprintable escaped. Used wherever a name or OCR text goes to a terminal."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )
