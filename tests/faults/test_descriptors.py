"""Descriptors: the daemon takes as many as it may have and, when they run out, says so, waits and loses nothing."""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
from pathlib import Path

from tests.daemon_process import Daemon, Place, wait_for

FILES = resource.RLIMIT_NOFILE


def leave_free(daemon: Daemon, count: int) -> None:
    """So many more files it may open from now on."""
    pid = daemon.process.pid
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    free = [number for number in range(max(used) + count + 2) if number not in used]
    resource.prlimit(pid, FILES, (free[count], resource.prlimit(pid, FILES)[1]))


def problems_of(daemon: Daemon) -> str:
    with contextlib.suppress(OSError, http.client.HTTPException):  # the one that is left is in use
        return str(daemon.get("/readyz")[1]["problems"])
    return ""


def test_it_raises_its_own_limit_as_far_as_it_may(tmp_path: Path) -> None:
    with Daemon(Place(tmp_path), prefix=["prlimit", "--nofile=200:3000"]) as daemon:
        assert resource.prlimit(daemon.process.pid, FILES) == (3000, 3000)


def test_without_descriptors_it_waits_tells_the_cause_and_the_mend_and_goes_on(tmp_path: Path) -> None:
    place = Place(tmp_path)
    with Daemon(place) as daemon:
        leave_free(daemon, 1)  # enough to answer a client, too few to read a file
        place.drop_many(range(5))
        told = wait_for(lambda: "EMFILE" in (problems := problems_of(daemon)) and problems, "the cause")
        assert "raise its limit (LimitNOFILE=" in told
        assert "cannot be written" not in told
        leave_free(daemon, 100)
        daemon.wait_idle(5)
        assert daemon.get("/readyz") == (200, {"ready": True, "problems": []})
    place.assert_kept(DONE=5)
