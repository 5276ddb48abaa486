from __future__ import annotations

import io
import os
import re
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO, cast

import pytest
import structlog

from daemon.system import lines
from daemon.system.lines import Lines, Stream
from daemon.system.log import set_up
from tests.daemon_process import PATIENCE, Daemon, Place, wait_for


class Outlet:
    """A stream that blocks while it is shut."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.written = b""
        self.broken = False

    def write(self, data: bytes) -> None:
        self.open.wait(PATIENCE)
        if self.broken:
            raise BrokenPipeError
        self.written += data


@pytest.fixture
def outlet() -> Outlet:
    return Outlet()


@pytest.fixture
def out(outlet: Outlet) -> Iterator[Lines]:
    out = Lines(outlet.write)
    set_up(stream=cast(TextIO, Stream(out, io.TextIOWrapper(io.BytesIO()))))
    yield out
    outlet.open.set()
    if not out._closed:
        out.close()


def numbered(count: int, length: int = 256) -> list[bytes]:
    return [b"%0*d\n" % (length - 1, number) for number in range(count)]


def test_lines_are_written_in_their_order(outlet: Outlet, out: Lines) -> None:
    outlet.open.set()
    for line in numbered(500):
        out.put(line)
    assert out.drain(PATIENCE)
    assert outlet.written == b"".join(numbered(500))


def test_lines_that_nobody_reads_are_dropped_counted_and_reported_at_the_gap(
    outlet: Outlet, out: Lines
) -> None:
    before, every = lines.dropped(), numbered(2 * lines.MOST_BYTES // 256)
    for line in every:
        out.put(line)  # it does not wait
    lost = lines.dropped() - before
    assert 0 < lost < len(every)
    outlet.open.set()
    assert out.drain(PATIENCE)
    out.put(b"after\n")
    assert out.drain(PATIENCE)
    *kept, notice, last = outlet.written.splitlines(keepends=True)
    assert kept == every[: len(every) - lost]
    assert b"lines were dropped" in notice
    assert b'"lines": %d' % lost in notice
    assert last == b"after\n"


def test_a_stream_that_is_broken_for_good_costs_its_lines_alone(outlet: Outlet, out: Lines) -> None:
    outlet.broken = True
    outlet.open.set()
    before = lines.dropped()
    for line in numbered(10):
        out.put(line)
    assert out.drain(PATIENCE)
    assert lines.dropped() - before == 10
    outlet.broken = False
    out.put(b"again\n")
    wait_for(lambda: outlet.written.count(b"\n") == 2, "the line and a word on the others")
    assert outlet.written.startswith(b"again\n")
    assert b'"lines": 10' in outlet.written


def test_the_end_waits_for_a_reader_only_as_long_as_promised(outlet: Outlet, out: Lines) -> None:
    out.put(b"one\n")
    assert not out.drain(0.01)


PROGRAM = """
import sys, threading, warnings
import structlog
from daemon.terminal.display import forgive_standard_error
from daemon.system.lines import written_aside
from daemon.system.log import set_up
forgive_standard_error()
with written_aside():
    set_up("info", "json")
    for number in range(%d):
        structlog.get_logger().info("an event", number=number)
    warnings.warn("a warning")
    print("a print", file=sys.stderr)
    %s
"""


@pytest.mark.parametrize("end", ["raise RuntimeError('the end')", "sys.exit(3)", "pass"])
def test_however_it_ends_no_line_before_that_is_lost(end: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM % (300, end)], capture_output=True, text=True, timeout=PATIENCE
    )
    assert re.findall(r'"number": (\d+)', run.stderr) == [str(number) for number in range(300)]
    events, warning, printed = (run.stderr.find(text) for text in ('"number": 299', "a warning", "a print"))
    assert -1 < events < warning < printed
    if "raise" in end:
        assert run.stderr.rstrip().endswith("RuntimeError: the end")
        assert run.stderr.find("Traceback") > printed


SLOW_DISK = """
import os, threading
write = os.write
def write_slowly(fd, data):
    threading.Event().wait(1.2)
    return write(fd, data)
os.write = write_slowly
"""


def test_a_slow_disk_costs_no_line(tmp_path: Path) -> None:
    program, log = SLOW_DISK + PROGRAM % (3, "raise RuntimeError('the end')"), tmp_path / "log"
    with log.open("wb") as stderr:
        subprocess.run([sys.executable, "-c", program], stderr=stderr, timeout=PATIENCE, check=False)
    text = log.read_text()
    assert (text.count('"number"'), text.count("a print"), text.rstrip()[-7:]) == (3, 1, "the end")


@pytest.mark.parametrize(("end", "status"), [("raise RuntimeError", 1), ("pass", 0)])
def test_a_pipe_that_nobody_reads_does_not_delay_the_exit(end: str, status: int) -> None:
    reader, writer = os.pipe()
    try:
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM % (5000, end)], stderr=writer, timeout=PATIENCE, check=False
        )
    finally:
        os.close(writer)
    assert run.returncode == status
    os.close(reader)


def test_a_descriptor_that_does_not_wait_is_waited_for() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    read = b""

    def drink() -> None:
        nonlocal read
        while data := os.read(reader, 4096):
            read += data
            select.select([], [], [], 0.001)

    thread = threading.Thread(target=drink)
    thread.start()
    lines._write_to(writer, b"x" * (1 << 18))
    os.close(writer)
    thread.join()
    os.close(reader)
    assert len(read) == 1 << 18


def test_a_progress_bars_terminal_is_written_to_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    bar = io.StringIO()
    bar.rich_proxied_file = bar  # type: ignore[attr-defined]
    monkeypatch.setattr(sys, "stderr", bar)
    with lines.written_aside():
        assert sys.stderr is bar


def test_a_stream_without_a_descriptor_is_written_to_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(sys, "stderr", stream)
    with lines.written_aside():
        print("half of", end=" ", file=sys.stderr)
        print("a line", file=sys.stderr)
    stream.seek(0)
    assert stream.read() == "half of a line\n"


def test_the_log_goes_on_after_its_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "log").open("w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        with lines.written_aside():
            set_up(format="json")
        structlog.get_logger().info("late")
    assert "late" in (tmp_path / "log").read_text()


def test_a_worker_that_prints_more_than_a_pipe_holds_is_not_blocked(tmp_path: Path) -> None:
    program = (
        "import sys\nif 'daemon.workers.child' in sys.orig_argv:\n    sys.stderr.write('chatter\\n' * 50_000)"
    )
    (tmp_path / "sitecustomize.py").write_text(program)
    reader, writer = os.pipe()
    with Daemon(Place(tmp_path), stderr=writer, environment={"PYTHONPATH": str(tmp_path)}) as daemon:
        assert daemon.stop() == 0
    os.close(writer)
    os.close(reader)
