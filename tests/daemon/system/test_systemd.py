from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon.system.systemd import Notifier


@pytest.fixture(autouse=True)
def _no_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=["path", "abstract"])
def systemd(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[socket.socket]:
    """A socket as systemd has it, by a path or in the abstract namespace."""
    name = f"visiond-test-{secrets.token_hex(8)}"
    monkeypatch.chdir(tmp_path)  # a socket's path may have 107 bytes only
    address = name if request.param == "path" else f"\0{name}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(address)
        server.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", address.replace("\0", "@"))
        yield server


def test_systemd_gets_each_state_in_a_separate_datagram(systemd: socket.socket) -> None:
    notifier = Notifier()
    notifier.ready()
    notifier.status("1 done, ü")
    notifier.alive()
    notifier.stopping()
    said = [systemd.recv(4096).decode() for _ in range(4)]
    assert said == ["READY=1", "STATUS=1 done, ü", "WATCHDOG=1", "STOPPING=1"]


def test_a_status_is_one_line_and_contains_nothing_else(systemd: socket.socket) -> None:
    Notifier().status("paused: disk full\nSTOPPING=1")
    assert systemd.recv(4096) == b"STATUS=paused: disk full STOPPING=1"


def test_without_systemd_nothing_is_sent() -> None:
    notifier = Notifier()
    notifier.ready()
    assert notifier.watchdog_seconds is None


def test_a_systemd_that_does_not_listen_does_not_end_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    Notifier().alive()


def test_no_descriptor_is_left_open(systemd: socket.socket) -> None:
    notifier = Notifier()
    before = os.listdir("/proc/self/fd")
    for _ in range(5):
        notifier.alive()
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize(
    ("microseconds", "beside", "seconds"),
    [
        ("30000000", None, 30.0),
        ("1500000", 0, 1.5),
        ("30000000", 1, None),
        ("soon", None, None),
        ("", None, None),
    ],
)
def test_the_watchdogs_time_is_taken_when_it_is_meant_for_this_process(
    monkeypatch: pytest.MonkeyPatch, microseconds: str, beside: int | None, seconds: float | None
) -> None:
    """beside: the process that WATCHDOG_PID names, as a difference from this one."""
    monkeypatch.setenv("WATCHDOG_USEC", microseconds)
    if beside is not None:
        monkeypatch.setenv("WATCHDOG_PID", str(os.getpid() + beside))
    assert Notifier().watchdog_seconds == seconds
