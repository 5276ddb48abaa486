from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from daemon.config.loading import load
from daemon.config.state import CONTROL
from daemon.core.errors import NotAnswering, NotRunning
from daemon.monitoring.limits import Limit
from daemon.monitoring.snapshot import GpuState, SegmentState, Snapshot, StageState, WorkerState
from daemon.server.control import ask_status
from daemon.terminal.watching import Observation, StatusPoller, line, picture
from tests.daemon_process import PATIENCE, Daemon, Place, wait_for

WORKER = WorkerState("ocr/0", "cuda:0", "ready", 3, "it [bold]died[/bold]")
NOW = Snapshot(
    running=True,
    pending=30,
    done=10,
    failed=0,
    skipped=0,
    gone=0,
    ended_in_this_run=10,
    left_in_this_run=30,
    images_per_second=2.5,
    eta_seconds=12.0,
    uptime_seconds=5.0,
    workers=[WORKER, msgspec.structs.replace(WORKER, name="ocr/1", state="loading")],
    segments=[SegmentState("ocr", 7)],
    stages=[StageState("ocr", 100, 2.0, 1)],
    gpus=[GpuState("cuda:0", "H200", 1 << 30, 8 << 30, 0.5)],
    limit=Limit(part="input", why="nothing is there"),
)
SAVED = msgspec.structs.replace(NOW, running=False, pending=29, uptime_seconds=0.0)


def later(seconds: float, images: int, busy_seconds: float) -> Snapshot:
    stage = StageState("ocr", 100 + images, 2.0 + busy_seconds, 1)
    return msgspec.structs.replace(NOW, uptime_seconds=5.0 + seconds, stages=[stage])


class Answers:
    """A daemon that answers with these one after another; an error is raised. Each answer takes two seconds."""

    def __init__(self, *answers: Snapshot | Exception) -> None:
        self._answers = iter(answers)
        self.seconds = 0.0
        self.reads = 0

    def ask(self) -> Snapshot:
        self.seconds += 2.0
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def read(self) -> Snapshot:
        self.reads += 1
        return SAVED

    def watcher(self) -> StatusPoller:
        return StatusPoller(self.ask, self.read, lambda: self.seconds, lambda: 1000.0 + self.seconds)


def drawn(view: Observation) -> str:
    screen = Console(file=io.StringIO(), width=120)
    screen.print(picture(view))
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_the_rates_of_stages_are_those_of_the_last_seconds_and_begin_again_with_another_daemon() -> None:
    answers = Answers(NOW, later(2, 50, 1.0), later(1, 7, 0.5))
    watcher = answers.watcher()
    assert watcher.look().rates == {}
    rate = watcher.look().rates["ocr"]
    assert (rate.images_per_second, rate.seconds_per_image) == (25.0, 0.02)
    assert watcher.look().rates == {}


def test_while_the_daemon_is_gone_the_ledger_is_read_once_and_then_it_goes_on() -> None:
    answers = Answers(NOW, NotRunning(""), NotRunning(""), later(1, 1, 0.0), NotRunning(""))
    watcher = answers.watcher()
    watcher.look()
    for _ in range(2):
        view = watcher.look()
        assert (view.snapshot, answers.reads) == (SAVED, 1)
        assert re.match(r"No daemon is running since \d\d:\d\d:\d\d", line(view))
        assert "no daemon is running" not in line(view)
    assert watcher.look().absence == ""
    watcher.look()
    assert answers.reads == 2


def test_a_daemon_that_is_busy_is_not_called_gone() -> None:
    answers = Answers(NOW, NotAnswering(""), later(3, 1, 0.0))
    watcher = answers.watcher()
    watcher.look()
    view = watcher.look()
    assert (view.snapshot, answers.reads) == (NOW, 0)
    assert line(view).startswith("The daemon does not answer now")
    assert watcher.look().rates


def test_a_line_of_json_shows_how_old_it_is() -> None:
    watcher = Answers(NOW, NotAnswering(""), NotRunning(""), NotRunning(""), later(3, 1, 0.0)).watcher()
    lines = [watcher.look().json() for _ in range(5)]
    assert [each["seen_at"] for each in lines] == [1002.0, 1002.0, 1006.0, 1006.0, 1010.0]
    assert [bool(each["absence"]) for each in lines] == [False, True, True, True, False]
    assert lines[0]["pending"] == 30


def test_a_daemon_that_does_not_answer_is_told_from_one_that_is_gone(tmp_path: Path) -> None:
    config = load(Place(tmp_path).config)
    config.state.path.mkdir()
    with pytest.raises(NotRunning) as gone:
        ask_status(config)
    assert not isinstance(gone.value, NotAnswering)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(config.state.path / CONTROL))
        listener.listen()
        with pytest.raises(NotAnswering):
            ask_status(config, 0.05)


def test_the_picture_has_rate_queue_stage_gpu_workers_and_the_time_to_go() -> None:
    answers = Answers(NOW, later(2, 50, 1.0))
    watcher = answers.watcher()
    watcher.look()
    shown = drawn(watcher.look())
    rows = [" ".join(row.split()) for row in shown.splitlines()]
    assert rows[0].startswith("2.5 images/s, 30 pending, 1 of 2 workers ready, 0:00:12 to go")
    assert rows[2].endswith("10 of 40 since the start")
    assert rows[3].startswith("limited by input: nothing is there.")
    assert "ocr 7 1 of 2 0 of 0 MiB" in rows
    assert "ocr 25.0 20.00 150 1" in rows
    assert "cuda:0 H200 50% 1,024 8,192 1 of 2" in rows
    assert "ocr/0 cuda:0 ready 3 0 0 it [bold]died[/bold]" in rows


@contextlib.contextmanager
def watching(place: Place, output: int) -> Iterator[subprocess.Popen[bytes]]:
    """`visiond status --watch` as a process that prints to `output`."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "daemon", "status", "--watch", "--every", "0.1"],
        env={**os.environ, "VISIOND_CONFIG": str(place.config), "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def read_terminal(fd: int, so_far: list[bytes]) -> str:
    """All that was printed by now."""
    while select.select([fd], [], [], 0)[0]:
        try:
            so_far.append(os.read(fd, 65536))
        except OSError:  # nobody has the other end any more
            break
    return b"".join(so_far).decode()


def test_it_goes_on_through_a_restart_and_ends_well_with_ctrl_c(tmp_path: Path) -> None:
    place, said = Place(tmp_path), tmp_path / "said"
    place.drop_many(range(3))
    ours, its = pty.openpty()
    seen: list[bytes] = []
    with said.open("wb") as file, contextlib.ExitStack() as stack:
        stack.callback(os.close, ours)
        with Daemon(place) as daemon:
            daemon.wait_idle(3)
            piped, shown = (stack.enter_context(watching(place, fd)) for fd in (file.fileno(), its))
            os.close(its)
            wait_for(lambda: "3 done" in said.read_text(), "a line")
            wait_for(lambda: "ms for each" in read_terminal(ours, seen), "a table")
        wait_for(lambda: "No daemon is running since" in said.read_text(), "that it is gone")
        wait_for(lambda: "No daemon is running since" in read_terminal(ours, seen), "that it is gone")
        gone_at = len(said.read_text())
        with Daemon(place):
            # A terminal that nobody reads is full after a while, and who draws on it waits.
            wait_for(
                lambda: read_terminal(ours, seen) and "images/s" in said.read_text()[gone_at:],
                "that it is back",
            )
            piped.send_signal(signal.SIGINT)
            shown.send_signal(signal.SIGTERM)
            wait_for(lambda: read_terminal(ours, seen) and shown.poll() is not None, "that it ends")
            assert (piped.wait(PATIENCE), shown.returncode) == (0, 0)
        drawing = read_terminal(ours, seen)
    assert "\x1b" not in said.read_text()
    assert all(re.match(r"\d\d:\d\d:\d\d ", each) for each in said.read_text().splitlines())
    assert "\x1b[1A" in drawing  # in place: the cursor goes up
    assert drawing.rindex("\x1b[?25h") > drawing.rindex("\x1b[?25l")  # at the end it is shown again


@pytest.mark.parametrize("options", [["--every", "1"], ["--watch", "--every", "0"]])
def test_a_time_between_looks_needs_watch_and_is_not_zero(tmp_path: Path, options: list[str]) -> None:
    assert Place(tmp_path).command("status", *options).returncode == os.EX_USAGE
