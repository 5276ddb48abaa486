from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from daemon.system import log as log_module
from daemon.system.log import LONGEST, RECENT, escape, recent_lines, set_up


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines_of(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_away_from_a_terminal_each_event_is_a_json_object_on_a_line() -> None:
    stream = io.StringIO()
    set_up(stream=stream)
    structlog.get_logger().warning("image failed", path="a.jpg", attempts=2)
    [line] = lines_of(stream)
    event = json.loads(line)
    assert event.pop("timestamp").endswith("Z")
    assert event == {"event": "image failed", "level": "warning", "path": "a.jpg", "attempts": 2}


@pytest.mark.parametrize(
    ("format", "stream", "console"),
    [
        ("auto", Terminal(), True),
        ("auto", io.StringIO(), False),
        ("console", io.StringIO(), True),
        ("json", Terminal(), False),
    ],
)
def test_on_a_terminal_the_log_is_text(format: str, stream: io.StringIO, console: bool) -> None:
    set_up(format=format, stream=stream)
    structlog.get_logger().info("ready", workers=4)
    [line] = lines_of(stream)
    assert line.startswith("{") is not console
    assert "ready" in line
    assert "workers" in line


def test_text_away_from_a_terminal_has_no_colors() -> None:
    stream = io.StringIO()
    set_up(format="console", stream=stream)
    structlog.get_logger().error("paused")
    assert "\x1b" not in stream.getvalue()


def test_events_below_the_level_are_not_written() -> None:
    stream = io.StringIO()
    set_up(level="warning", stream=stream)
    log = structlog.get_logger()
    log.debug("one")
    log.info("two")
    log.warning("three")
    log.error("four")
    assert [json.loads(line)["event"] for line in lines_of(stream)] == ["three", "four"]


HOSTILE = "a\nlevel=error \x1b[2J\r\x07\x9b31m\u202egpj.\udcff"


@pytest.mark.parametrize("format", ["console", "json"])
def test_a_files_name_neither_forges_a_line_nor_reaches_the_terminal(format: str) -> None:
    stream = Terminal()
    set_up(format=format, stream=stream)
    structlog.get_logger().info(f"cannot read {HOSTILE}", path=HOSTILE)
    [line] = lines_of(stream)
    line.encode()  # no surrogates
    for character in ("\x1b[2J", "\r", "\x07", "\x9b", "\u202e"):
        assert character not in line


def test_an_exceptions_trace_is_kept() -> None:
    stream = io.StringIO()
    set_up(stream=stream)
    try:
        raise ValueError("what happened")
    except ValueError:
        structlog.get_logger().exception("stopped")
    [line] = lines_of(stream)
    assert "ValueError: what happened" in json.loads(line)["exception"]


def test_a_trace_on_a_terminal_has_its_lines_and_nothing_else_that_commands_it() -> None:
    stream = Terminal()
    set_up(format="console", stream=stream)
    try:
        raise ValueError(f"what {HOSTILE}")
    except ValueError:
        structlog.get_logger().exception("stopped")
    said = stream.getvalue()
    assert said.count("\n") > 3
    assert "\x1b[2J" not in said
    assert "\u202e" not in said


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("", ""),
        ("plain, ümläut, 漢字, 🐈", "plain, ümläut, 漢字, 🐈"),
        ("two\nlines\t", "two\\nlines\\t"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\u202egpj.exe", "\\u202egpj.exe"),
        ("\udcff.jpg", "\\udcff.jpg"),
        ("a\u2028b\u200b", "a\\u2028b\\u200b"),
    ],
)
def test_unprintable_characters_become_visible_escapes(text: str, escaped: str) -> None:
    assert escape(text) == escaped
    assert escaped.isprintable()


@pytest.fixture
def log() -> Iterator[Any]:
    before = dict(log_module._recent)
    log_module._recent.clear()
    set_up(stream=io.StringIO())
    yield structlog.get_logger()
    log_module._recent.clear()
    log_module._recent.update(before)


def test_the_last_warnings_and_errors_are_kept_with_what_they_are_about(log: Any) -> None:
    log.info("ready")
    log.warning("a disk is slow", folder="/srv\n/in")
    try:
        raise OSError("no room")
    except OSError:
        log.exception("a sink failed", sink="webhook")
    kept = [(line.level, line.text) for line in recent_lines()]
    assert kept == [
        ("warning", "a disk is slow; folder: /srv\\n/in"),
        ("error", "a sink failed; sink: webhook; OSError: no room"),
    ]


def test_a_thousand_failures_leave_room_for_other_messages(log: Any) -> None:
    log.error("a disk is slow")
    for number in range(1000):
        log.warning("image failed", path=f"{number}.jpg")
    assert [(line.text, line.times) for line in recent_lines()] == [
        ("a disk is slow", 1),
        ("image failed; path: 999.jpg", 1000),
    ]
    for number in range(RECENT):
        log.warning(f"message {number}", text="x" * 9999)
    assert [line.text.partition(";")[0] for line in recent_lines()] == [f"message {n}" for n in range(RECENT)]
    assert {len(line.text) for line in recent_lines()} == {LONGEST}
