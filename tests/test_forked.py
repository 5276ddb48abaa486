"""A daemon that the tests' server forks is like one that `python -m daemon` starts."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.daemon_process import Daemon, Place, wait_for
from tests.forked import TOKEN, Forked


def describe(daemon: Daemon) -> dict[str, Any]:
    """What the kernel knows about a daemon, as far as its start decides it."""
    process = Path(f"/proc/{daemon.process.pid}")
    status = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines())
    return {
        **{name: status[name] for name in ("SigBlk", "SigIgn", "SigCgt", "Umask")},
        "session": os.getsid(daemon.process.pid) == os.getpgid(daemon.process.pid) == daemon.process.pid,
        "folder": os.readlink(process / "cwd"),
        "stdin": os.readlink(process / "fd" / "0"),
        "limits": (process / "limits").read_text(),
    }


def connections(pid: int) -> set[str]:
    """Its pipes and sockets, which have unique names."""
    found = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found.add(os.readlink(file))
    return {file for file in found if file.startswith(("pipe:", "socket:"))}


def test_a_forked_daemon_is_like_a_started_one(tmp_path: Path) -> None:
    found = []
    for name, environment in (("forked", {}), ("started", {"PYTHONPATH": ""})):
        (tmp_path / name).mkdir()
        with Daemon(Place(tmp_path / name), environment=environment) as daemon:
            found.append(describe(daemon))
            assert daemon.process.pid in daemon.place.processes()
            assert daemon.stop() == 0
    assert found[0] == found[1]


def test_it_has_no_connection_of_the_server(tmp_path: Path) -> None:
    with Daemon(Place(tmp_path)) as daemon:
        server = psutil.Process(daemon.process.pid).ppid()
        assert len(connections(server)) >= 2, "to the tests: one for requests, and one for this daemon's end"
        assert not connections(server) & connections(daemon.process.pid)
        daemon.kill()


def test_its_children_get_the_environment_of_the_test_and_not_the_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VISIOND_SET_BY_A_TEST", "yes")
    with Daemon(Place(tmp_path)) as daemon:
        [worker] = daemon.workers()
        environment = Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")
        assert b"VISIOND_SET_BY_A_TEST=yes" in environment
        assert f"{TOKEN}={daemon.place.token}".encode() in environment
        daemon.kill()


def test_the_end_of_a_forked_daemon_is_reported_as_popen_does(tmp_path: Path) -> None:
    with Daemon(Place(tmp_path)) as daemon:
        assert daemon.process.poll() is None
        daemon.kill()
        assert daemon.process.poll() == daemon.wait_end() == -9


def test_a_command_is_killed_at_the_end_of_its_context(tmp_path: Path) -> None:
    place = Place(tmp_path)
    with (tmp_path / "said").open("wb") as said, contextlib.suppress(ZeroDivisionError):
        with Forked(["run", "--config", str(place.config)], tmp_path, os.environ, said, said) as process:
            raise ZeroDivisionError
    assert process.returncode == -9


def test_nobody_waits_for_a_command_that_has_ended_and_its_errors_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        (tmp_path / "said").open("wb") as said,
        pytest.raises(AssertionError, match="ended with 64 before a page"),
    ):
        with Forked(["pages"], tmp_path, os.environ, said, said) as process:
            wait_for(lambda: False, "a page", process=process)
    assert "No such command 'pages'" in capsys.readouterr().out
