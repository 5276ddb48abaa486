"""Sets the clock while an image waits for another attempt: only Python's time of day in the daemon changes."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

from tests.daemon_process import Daemon, Place, picture, wait_for

HOUR, YEAR = 3600.0, 365 * 86_400.0
CLOCK = """
import time
real, real_ns = time.time, time.time_ns
def ahead():
    try:
        return float(open(FILE).read())
    except (OSError, ValueError):
        return 0.0
time.time = lambda: real() + ahead()
time.time_ns = lambda: real_ns() + int(ahead() * 1e9)
"""


class Clock:
    """The clock of daemons that are run in this `environment`."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "ahead"
        (folder / "clock").mkdir()
        (folder / "clock" / "sitecustomize.py").write_text(CLOCK.replace("FILE", repr(str(self._file))))
        self.environment = {"PYTHONPATH": str(folder / "clock")}

    def set(self, ahead_seconds: float) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(str(ahead_seconds))
        new.rename(self._file)


def wait_attempts(place: Place, attempts: int) -> float:
    """Wait until the image has had this many attempts; returns when (monotonic seconds)."""
    wait_for(
        lambda: place.has_ledger() and place.rows("SELECT attempts FROM image") >= [(attempts,)],
        f"try {attempts}",
    )
    return time.monotonic()


def set_in_one_life(folder: Path, retry_seconds: float, ahead: list[float]) -> list[float]:
    """Set the clock after each attempt of an image that never succeeds; returns
    how many seconds each next one was too early (less than 0) or too late."""
    place, clock = open_place(folder, retry_seconds, len(ahead) + 1)
    with Daemon(place, environment=clock.environment) as daemon:
        place.drop("shaky.ppm", picture(1, b"SHAKY"))
        tried_at, off = wait_attempts(place, 1), []
        for tries, seconds in enumerate(ahead, 1):
            clock.set(seconds)
            at = wait_attempts(place, tries + 1)
            off.append(at - tried_at - retry_seconds * 2 ** (tries - 1))
            tried_at = at
        daemon.wait_idle(1)
        assert daemon.stop() == 0
    place.expect_failure()
    return off


def set_between_two_lives(folder: Path, retry_seconds: float, before: float, after: float) -> float:
    """Kill the daemon while an image waits, and set the clock before the next start. Returns
    how many seconds after its own pause, counted from that start, the next attempt came."""
    for number in itertools.count():
        place, clock = open_place(folder / str(number), retry_seconds, 2)
        clock.set(before)
        with Daemon(place, environment=clock.environment) as daemon:
            place.drop("shaky.ppm", picture(1, b"SHAKY"))
            wait_attempts(place, 1)
            daemon.kill()
        if place.rows("SELECT attempts FROM image") == [(1,)]:
            break
        # This process stood still during the wait, and the image does not wait any more.
        assert number < 5, "the image never waits"
    clock.set(after)
    with Daemon(place, environment=clock.environment) as daemon:
        started = time.monotonic()
        late = wait_attempts(place, 2) - started - retry_seconds
        daemon.wait_idle(1)
    place.expect_failure()
    return late


class ShakyPlace(Place):
    def expect_failure(self) -> None:
        verdict = self.judge()
        assert (verdict.problems, verdict.counts) == ([], {"FAILED": 1})


def open_place(folder: Path, retry_seconds: float, tries: int) -> tuple[ShakyPlace, Clock]:
    folder.mkdir(parents=True)
    pipeline = {"retry_seconds": retry_seconds, "max_attempts": tries}
    place = ShakyPlace(
        folder, {"pipeline": pipeline, "stages": {"ocr": {"options": {"fail": {"SHAKY": "transient"}}}}}
    )
    return place, Clock(folder)
