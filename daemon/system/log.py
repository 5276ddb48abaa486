"""The log: one event a line on stderr, for people on a terminal and as JSON elsewhere.

Values are escaped by the renderers, so that a file's name can neither forge a line nor reach the terminal.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

_as_json = False  # whether a log is set up that is to have JSON objects only


def is_json() -> bool:
    """Whether every line on standard error is to be a JSON object by now: then whatever is printed goes through the log."""
    return _as_json


def say_line(text: str) -> None:
    """A line on standard error for people who wait; an event where only JSON goes there."""
    if not _as_json:
        print(text, file=sys.stderr)
        return
    import structlog

    structlog.get_logger().info(text)


def set_up(level: str = "info", format: str = "auto", stream: TextIO | None = None) -> None:
    """Configure structlog for the process. format: "console", "json", or "auto" by the stream, which is standard error."""
    import structlog  # slow, and most commands only want `escape`

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


def escape(text: str) -> str:
    """The text on one line, printable whatever it holds. Used wherever a name or OCR text meets a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
