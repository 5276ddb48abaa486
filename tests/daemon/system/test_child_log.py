"""The log of an executor: whole lines of the daemon's own log, whatever its process prints."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import structlog

from daemon.system.printed import ChildLog
from tests.daemon_process import Daemon, Place
from tests.forking import CHILDREN_PATH

# Of both executors together less than the daemon keeps for a late reader (lines.MOST_BYTES), or it would drop some.
IN_EXECUTORS = """
import sys
if "daemon.pipeline.child" in sys.orig_argv:
    import os, structlog
    from daemon.system import lines
    from daemon.pipeline.executor import Executor
    run = Executor.run
    async def talk(self, coordinator):
        for number in range(5):
            structlog.get_logger().warning("a long event", text="x" * 20_000, number=number)
        lines.drain()
        os.write(2, b"Traceback (most recent call last):\\n  line\\nValueError: raw\\n")
        await run(self, coordinator)
    Executor.run = talk
"""


def test_lines_of_several_executors_are_whole_and_name_their_executor(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(IN_EXECUTORS)
    place = Place(tmp_path, {"pipeline": {"executors": 2, "workers_per_device": 2}})
    executors = ("executor 0", "executor 1")
    with Daemon(place, environment={CHILDREN_PATH: str(place.folder)}) as daemon:
        for executor in executors:
            daemon.wait_event("executor printed a traceback", executor=executor)
        assert daemon.stop() == 0
        entries = [json.loads(line) for line in daemon.log_text().splitlines()]
    long = [entry for entry in entries if entry["event"] == "a long event"]
    assert [entry["number"] for entry in long if entry["executor"] == executors[0]] == list(range(5))
    assert [entry["number"] for entry in long if entry["executor"] == executors[1]] == list(range(5))
    assert all(len(entry["text"]) == 20_000 and entry["level"] == "warning" for entry in long)
    raw = [entry for entry in entries if entry["event"] == "executor printed a traceback"]
    assert [entry["exception"][-15:] for entry in raw] == ["ValueError: raw"] * 2


@pytest.mark.anyio
@pytest.mark.parametrize(
    "line",
    [
        b'{"event": "x", "level": "info", "path": "\xff"}',
        b'{"event": ' + b"[" * 100_000,
        b'{"event": "x", "level": "info", "self": 1}',
        b'{"event": "x", "level": "loud"}',
        b'{"event": 1, "level": "info"}',
    ],
    ids=["not UTF-8", "deep", "reserved", "level", "type"],
)
async def test_no_line_that_a_rule_prints_ends_the_log(line: bytes) -> None:
    child_log = ChildLog("executor 7")
    output = await child_log.open()
    with structlog.testing.capture_logs() as heard:
        os.write(output, line[:60_000] + b"\n" + b'{"event": "worker slot closed", "level": "error"}\n')
        os.close(output)
        await child_log.finish(60.0)
    assert [entry["event"] for entry in heard if entry["event"] != "executor printed"] == [
        "worker slot closed"
    ]


@pytest.mark.anyio
async def test_events_come_in_pieces_and_anything_else_is_an_event_too() -> None:
    child_log = ChildLog("executor 7")
    output = await child_log.open()
    with structlog.testing.capture_logs() as heard:
        event = b'{"path": "a.jpg", "event": "image failed", "level": "warning", "timestamp": "2026"}\n'
        for piece in (event[:20], event[20:], b'{"no": "event"}\n', b"the last"):
            os.write(output, piece)
        os.close(output)
        await child_log.finish(60.0)
    assert heard == [
        {"event": "image failed", "log_level": "warning", "path": "a.jpg", "executor": "executor 7"},
        {
            "event": "executor printed",
            "log_level": "info",
            "text": '{"no": "event"}\nthe last',
            "executor": "executor 7",
        },
    ]
