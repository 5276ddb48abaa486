"""The page's process beside a real daemon."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import urllib.request
from pathlib import Path

import anyio
import pytest

from daemon.config.loading import parse
from daemon.config.state import PAGE_TOKEN
from daemon.monitoring.samples import Sum
from daemon.server import keeper
from tests.daemon.server.client import page_process
from tests.daemon_process import PATIENCE, Daemon, Place, free_port, wait_for, with_pauses


def read(port: int, path: str = "/") -> str:
    """Waits while the process is being started: the daemon keeps its socket open."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        content: str = answer.read().decode()
    return content


def try_to_read(port: int, path: str) -> str:
    """Empty if the process ended while it had the request."""
    with contextlib.suppress(OSError):
        return read(port, path)
    return ""


def test_a_page_that_dies_comes_back_and_the_work_goes_on(tmp_path: Path) -> None:
    port = free_port()
    place = Place(tmp_path, {"page": {"listen": f"127.0.0.1:{port}"}})
    with Daemon(place) as daemon:
        place.drop_many(range(3))
        wait_for(lambda: "3 done" in read(port, "/live"), "the images")
        assert read(port).count('class="card"') == 3
        first = wait_for(lambda: page_process(daemon.process.pid), "the page")
        os.kill(first, signal.SIGKILL)
        place.drop_many(range(3, 4))
        assert read(port).count("class=") > 3, "a request that comes meanwhile waits for the next process"
        second = wait_for(lambda: page_process(daemon.process.pid), "the next process")
        assert second != first


def test_the_command_page_beside_a_daemon_says_where_that_serves_it(tmp_path: Path) -> None:
    port = free_port()
    place = Place(tmp_path, {"page": {"listen": f"127.0.0.1:{port}"}})
    with Daemon(place) as daemon:
        place.drop_many(range(1))
        daemon.wait_idle(1)
        told = place.command("page")
        assert (told.returncode, told.stderr) == (0, "")
        assert told.stdout == f"The daemon is running and serves the page: http://127.0.0.1:{port}\n"


def test_a_page_whose_address_is_in_use_holds_nothing_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = Place(tmp_path, {"page": {"listen": f"127.0.0.1:{taken.getsockname()[1]}"}})
        with Daemon(place) as daemon:
            place.drop_many(range(1))
            daemon.wait_idle(1)
            assert "page.listen: cannot listen" in daemon.wait_event("there is no page")["why"]
            assert "page.listen: cannot listen" in place.command("page").stderr


def test_why_there_is_no_page_stands_in_check_status_and_metrics_until_there_is_one(tmp_path: Path) -> None:
    place = Place(tmp_path, {"page": {"listen": f"127.0.0.1:{free_port()}"}})
    token = place.folder / "state" / PAGE_TOKEN
    token.parent.mkdir(exist_ok=True)
    token.touch(0o600)
    assert (
        f"page: {token}, the token for changes by the page, is empty"
        in place.command("check", "--quick").stdout
    )
    pauses = {f"daemon.server.keeper.{name}_SECONDS": 0.1 for name in ("PAUSE", "LONGEST_PAUSE")}
    with Daemon(place, environment=with_pauses(pauses)) as daemon:
        address = place.settings["page"]["listen"]
        daemon.wait_until(
            lambda status: "page: the page's process has ended" in str(status["obstacles"]), "the problem"
        )
        assert daemon.metric("visiond_page_up", address=address) == 0
        status, answer = daemon.get("/readyz")
        assert status == 200
        assert "page: the page's process has ended" in str(answer["warnings"])
        token.unlink()
        daemon.wait_until(lambda status: not status["obstacles"], "the page")
        assert daemon.metric("visiond_page_up", address=address) == 1


def test_check_looks_at_the_token_that_the_page_uses(tmp_path: Path) -> None:
    page = {"listen": f"127.0.0.1:{free_port()}"}
    place = Place(tmp_path, {"http": {"listen": "", "token_file": "token"}, "page": page})
    (tmp_path / "state").mkdir(exist_ok=True)
    (tmp_path / "state" / PAGE_TOKEN).touch(0o600)  # which is not used
    assert "http.token_file: " in (checked := place.command("check", "--quick").stdout)
    assert "token for changes" not in checked


@pytest.mark.anyio
async def test_a_page_whose_address_becomes_free_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "LONGEST_PAUSE_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as taken, anyio.fail_after(PATIENCE):
        address = taken.getsockname()
        asyncio.get_running_loop().call_later(0.05, taken.close)
        page = parse({"page": {"listen": f"127.0.0.1:{address[1]}"}}, tmp_path)
        with await keeper.Keeper(page, Sum())._listen(page.page_http) as listener:
            assert listener.getsockname() == address
