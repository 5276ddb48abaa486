"""Descriptors: the daemon uses as many as are allowed. When they run out, it reports that,
waits and loses nothing."""

from __future__ import annotations

import http.client
import resource
from pathlib import Path

from tests.daemon_process import Daemon, Place, wait_for
from tests.faults import scarce

FILES = resource.RLIMIT_NOFILE


def problems_of(connection: http.client.HTTPConnection) -> str:
    connection.request("GET", "/readyz")
    return connection.getresponse().read().decode()


def test_the_daemon_raises_its_own_limit_as_far_as_allowed(tmp_path: Path) -> None:
    with Daemon(Place(tmp_path), prefix=["prlimit", "--nofile=200:3000"]) as daemon:
        assert resource.prlimit(daemon.process.pid, FILES) == (3000, 3000)


def test_without_descriptors_the_daemon_waits_reports_cause_and_fix_and_goes_on(tmp_path: Path) -> None:
    place = Place(tmp_path, {"http": {"listen": "127.0.0.1:0"}, "pipeline": {"rescan_seconds": 0.2}})
    watched = {"WATCHDOG_USEC": "150000"}  # which it feeds through a new socket each time
    with Daemon(place, environment=watched) as daemon:
        connection, (_, most) = daemon.dial(), resource.prlimit(daemon.process.pid, FILES)
        assert "[]" in problems_of(connection)
        # Open files stay open, and no more can be opened.
        resource.prlimit(daemon.process.pid, FILES, (3, most))
        place.drop_many(range(5))
        cause = "the daemon cannot open more files (EMFILE); raise its limit (LimitNOFILE="
        told = (f'"{cause}', f"inbox {place.inbox()} cannot be read: {cause}")
        wait_for(lambda: all(text in problems_of(connection) for text in told), "the cause of both")
        assert "cannot be written" not in problems_of(connection)
        connection.close()
        resource.prlimit(daemon.process.pid, FILES, (most, most))
        daemon.wait_idle(5)
        wait_for(
            lambda: daemon.get("/readyz") == (200, {"ready": True, "problems": []}),
            "the next scan of its inbox",
        )
    place.assert_kept(DONE=5)


def test_clients_that_reconnect_all_the_time_take_no_descriptor_from_the_work(tmp_path: Path) -> None:
    found = scarce.work_with_few_files(tmp_path / "place", 64, 800)
    assert found == scarce.Scarce(done=800, pauses=0, named=True, healthy=True)
