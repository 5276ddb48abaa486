from __future__ import annotations

import errno
from collections.abc import Iterator

import anyio
import pytest
from structlog.testing import capture_logs

from daemon.system.retry import Hurried, Retry

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daemon.system.retry.PAUSE_SECONDS", 0.005)


class Disk:
    """Fails as often as it is told to."""

    def __init__(self, failures: int) -> None:
        self._errors: Iterator[OSError] = (OSError(errno.ENOSPC, "it is full") for _ in range(failures))
        self.failed, self.repaired = anyio.Event(), anyio.Event()

    async def write(self) -> str:
        if error := next(self._errors, None):
            raise error
        return "written"

    async def write_when_repaired(self) -> str:
        if self.repaired.is_set():
            return "written"
        self.failed.set()
        raise OSError(errno.ENOSPC, "it is full")


async def test_a_call_that_fails_is_repeated_and_reported_once() -> None:
    retry = Retry()
    with capture_logs() as logs:
        assert await retry("ledger", Disk(3).write) == "written"
    assert [line["event"] for line in logs] == ["paused", "resumed"]
    assert retry.blocked() == []


async def test_work_is_paused_until_every_call_that_failed_has_succeeded() -> None:
    """Otherwise a call that had nothing to write would say that a full disk works again, for a moment."""
    retry, disk = Retry(), Disk(1)
    with capture_logs() as logs:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(retry, "ledger", disk.write_when_repaired)
            await disk.failed.wait()
            assert await retry("ledger", disk.write) == "written"
            assert len(retry.blocked()) == 1
            disk.repaired.set()
    assert [line["event"] for line in logs] == ["paused", "resumed"]
    assert retry.blocked() == []


async def test_a_call_that_was_cancelled_blocks_nothing() -> None:
    retry, disk = Retry(), Disk(0)
    with anyio.move_on_after(0.05):
        await retry("ledger", disk.write_when_repaired)
    assert len(retry.blocked()) == 1
    assert await retry("ledger", disk.write) == "written"
    assert retry.blocked() == []


async def test_in_a_hurry_a_call_is_not_repeated() -> None:
    retry = Retry()
    retry.hurried = True
    with pytest.raises(Hurried):
        await retry("ledger", Disk(1).write)
