"""Everything printed to standard error past the log becomes log events: every line stays one JSON object."""

from __future__ import annotations

import gc
import io
import json
import os
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog

from daemon.system import children
from daemon.system.printed import MOST_EVENTS, Printed
from tests.daemon_process import Daemon, Place, picture

pytestmark = pytest.mark.anyio

IN_WORKERS = """
import os, sys, threading
def flood():
    while True:
        os.write(2, b"a native library prints " * 1000 + b"\\n")
if "daemon.workers.child" in sys.orig_argv:
    print("hello from a library", flush=True)
    if os.environ.get("FLOOD"):
        threading.Thread(target=flood, daemon=True).start()
else:
    import logging, threading, warnings
    from daemon.pipeline.coordinator import Pipeline
    run = Pipeline.run
    async def stumble(self, **options):
        logging.getLogger("some.library").warning("it logs %s", "this")
        warnings.warn("take care")
        thread = threading.Thread(target=lambda: 1 / 0, name="unlucky")
        thread.start()
        thread.join()
        if os.environ.get("DEFECT"):
            raise RuntimeError("a defect made to order")
        await run(self, **options)
    Pipeline.run = stumble
"""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "sitecustomize.py").write_text(IN_WORKERS)
    return Place(
        tmp_path,
        {"stages": {"ocr": {"options": {"fail": {"RAISE": "raise"}}}}, "pipeline": {"max_attempts": 1}},
    )


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_every_line_of_a_json_log_is_one_object_whoever_printed_it(place: Place) -> None:
    place.drop("bad.ppm", picture(1, b"RAISE"))
    run = place.run_once(prefix=["env", f"PYTHONPATH={place.folder}"])
    assert run.returncode == 1
    events = {entry["event"]: entry for entry in lines(run.stderr)}
    assert events["worker printed"]["text"] == "hello from a library"
    assert "ValueError: a requested fault" in events["worker printed a traceback"]["exception"]
    assert events["it logs this"]["logger"] == "some.library"
    assert any("UserWarning: take care" in event for event in events)
    assert (thread := events["a thread raised an error"])["thread"] == "unlucky"
    assert "ZeroDivisionError" in thread["exception"]


def test_a_bug_in_the_daemon_is_one_line_with_its_traceback_and_its_own_exit_status(place: Place) -> None:
    run = place.run_once(prefix=["env", f"PYTHONPATH={place.folder}", "DEFECT=1"])
    assert run.returncode == os.EX_SOFTWARE
    last = lines(run.stderr)[-1]
    assert (last["event"], last["level"]) == ("visiond has a bug; please report it", "critical")
    assert "RuntimeError: a defect made to order" in last["exception"]


def test_an_error_that_ends_a_run_is_logged_as_an_event(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.inbox().rmdir()
    run = place.run_once()
    assert run.returncode == os.EX_CONFIG
    assert f"inbox {place.inbox()} does not exist" in lines(run.stderr)[-1]["event"]


def test_a_worker_that_prints_without_end_is_not_blocked_and_fills_no_log(place: Place) -> None:
    with Daemon(place, environment={"PYTHONPATH": str(place.folder), "FLOOD": "1"}) as daemon:
        place.drop_many(range(20))
        daemon.wait_idle(20)
        assert daemon.stop() == 0
        printed = list(daemon.events("worker printed"))
        assert len(daemon.log_text()) < 1_000_000
    assert len(printed) <= MOST_EVENTS + 1
    assert sum(entry.get("dropped_bytes", 0) for entry in printed) > 100_000
    place.assert_kept(DONE=20)


async def test_what_a_process_prints_at_its_end_is_logged_and_its_pipe_is_closed() -> None:
    printed = Printed("w/0")
    output = await printed.open()
    os.write(output, b"Traceback (most recent call last):\n  line\nValueError: \xff\n")
    os.close(output)
    with structlog.testing.capture_logs() as heard:
        await printed.finish(60.0)
    assert [entry["exception"][-16:] for entry in heard] == ["ValueError: \\xff"]
    assert printed.ended.is_set()


async def test_a_start_that_is_cancelled_closes_its_pipe_once() -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(children.start, "daemon.workers.child", Printed("w/0"))
        await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    others = [os.dup(0) for _ in range(20)]  # they get the numbers of descriptors that were closed
    gc.collect()
    for other in others:
        os.close(other)  # raises OSError if it was closed with the pipe


async def test_a_pipe_is_closed_once_as_its_number_may_be_that_of_another_file_by_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[tuple[int, bool]] = []

    class File(io.FileIO):
        def close(self) -> None:
            other = os.open(os.devnull, os.O_RDONLY)  # gets the lowest free number
            super().close()
            closed.append((other, os.path.exists(f"/proc/self/fd/{other}")))

    monkeypatch.setattr(os, "fdopen", lambda fd, mode, _, closefd: File(fd, mode, closefd))
    printed = Printed("w")
    os.close(await printed.open())
    await printed.finish(1)
    await anyio.wait_all_tasks_blocked()
    [(_, is_open)] = closed
    assert is_open
