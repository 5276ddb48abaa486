from __future__ import annotations

import contextlib
import os
import pty
import sys
import time

import pytest
from typer.testing import CliRunner

from daemon.cli.commands import app
from daemon.terminal import progress as module
from daemon.terminal.progress import LINE_SECONDS, Progress
from tests.daemon_process import Place


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_rate_and_remaining_time_begin_again_with_another_work(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress("rows") as progress:
        clock.seconds += LINE_SECONDS
        progress.wait("reading the ledger")
        progress.begin("sidecars", 300)
        clock.seconds += LINE_SECONDS
        progress.step(100)
    assert capsys.readouterr().err.splitlines() == [
        "reading the ledger, 10 s",
        "100 of 300 sidecars, 10.0/s, 20 s to go",
    ]


def test_what_was_not_foreseen_makes_the_total_grow(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("sidecars", 1) as progress:
        for _ in progress.track("abc"):
            clock.seconds += LINE_SECONDS
    assert [line.split(",")[0] for line in capsys.readouterr().err.splitlines()] == [
        "1 of 1 sidecars",
        "2 of 2 sidecars",
        "3 of 3 sidecars",
    ]


def test_a_bar_can_begin_late_so_that_quick_work_shows_none(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, its = pty.openpty()
    with os.fdopen(its, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with Progress("rows", 2, after=5.0) as progress:
            progress.step(1)
            terminal.write("nothing yet;")
            terminal.flush()
            clock.seconds += 5.0
            progress.step(2)
    said = b""
    with contextlib.suppress(OSError):  # at the end, when nobody has the other side any more
        while read := os.read(ours, 65536):
            said += read
    os.close(ours)
    assert said.startswith(b"nothing yet;")
    assert b"2/2" in said


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = Place(tmp_path_factory.mktemp("progress"))
    place.drop_many(range(3))
    assert place.run_once().returncode == 0
    return place


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("export out.csv", "3 of 3 rows, "),
        ("verify", "3 of 3 sidecars, "),
        ("repair", "3 of 3 sidecars, "),
        ("backup copy.sqlite", "MiB, "),
        ("redo --stale", "3 of 3 images, "),
        ("redo --all", "3 of 3 images, "),
    ],
)
def test_a_command_that_may_take_long_shows_rate_and_total(
    place: Place, monkeypatch: pytest.MonkeyPatch, command: str, said: str
) -> None:
    monkeypatch.setattr(module, "LINE_SECONDS", 0.0)
    monkeypatch.chdir(place.folder)
    done = CliRunner().invoke(app, [*command.split(), "--config", str(place.config)])
    assert done.exit_code == 0, done.output
    lines = [line for line in done.stderr.splitlines() if said in line]
    assert lines, done.stderr
    assert "/s" in lines[-1]
