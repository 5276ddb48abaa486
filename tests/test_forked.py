"""A daemon that the tests' server forks is like one that `python -m daemon` starts."""

from __future__ import annotations

import collections
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.daemon_process import TOKEN, Daemon, Place


def describe(daemon: Daemon) -> dict[str, Any]:
    """What the kernel knows about a daemon that is idle, without what differs from one to the next, as the number of
    its connections does."""
    process = Path(f"/proc/{daemon.process.pid}")
    status = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines())
    files = [os.readlink(fd).replace(str(daemon.place.folder), "") for fd in (process / "fd").iterdir()]
    return {
        "signals": {
            name: value for name, value in status.items() if name.startswith("Sig") and name != "SigQ"
        },
        "umask, threads": (status["Umask"], status["Threads"]),
        "session": os.getsid(daemon.process.pid) == os.getpgid(daemon.process.pid) == daemon.process.pid,
        "folder": os.readlink(process / "cwd"),
        "stdin": os.readlink(process / "fd" / "0"),
        "files": collections.Counter(
            re.sub(r"\[\d+\]|log-\w+", "", file) for file in files if "socket" not in file
        ),
        "limits": (process / "limits").read_text(),
    }


def test_a_forked_daemon_is_like_a_started_one(tmp_path: Path) -> None:
    found = []
    for name, environment in (("forked", {}), ("started", {"PYTHONPATH": ""})):
        (tmp_path / name).mkdir()
        with Daemon(Place(tmp_path / name), **environment) as daemon:
            daemon.place.drop_many(range(3))
            daemon.wait_idle(3)
            found.append(describe(daemon))
            assert daemon.process.pid in daemon.place.processes()
            assert daemon.stop() == 0
    assert found[0] == found[1]


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
