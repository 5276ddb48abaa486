"""The room on the disks, asked so that a dead mount delays nothing."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from daemon.config.loading import parse
from daemon.monitoring import disks
from daemon.monitoring.disks import Disks, DiskSpace, list_written_folders
from daemon.monitoring.metrics import Metrics
from tests.daemon_process import PATIENCE, Daemon, Place, until, wait_for

pytestmark = pytest.mark.anyio


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "FRESH_SECONDS", 0.0)
    monkeypatch.setattr(disks, "WAIT_SECONDS", 0.2)


def test_the_folders_that_are_written_to_have_the_names_of_their_keys(tmp_path: Path) -> None:
    assert list_written_folders(parse({}, tmp_path)).keys() == {
        "output.results",
        "output.failed",
        "state.path",
    }
    moved = parse({"inbox": [{"on_success": "move"}], "output": {"bins": "copy"}}, tmp_path)
    assert list_written_folders(moved).keys() >= {"output.bins_folder", "output.done"}


def test_a_folder_that_does_not_exist_yet_has_the_room_of_the_disk_it_will_be_on(tmp_path: Path) -> None:
    found = os.statvfs(tmp_path)
    room = DiskSpace.of(tmp_path / "a" / "b")
    assert room.size_bytes == found.f_blocks * found.f_frsize
    assert 0 < room.free_bytes <= room.size_bytes


def test_a_scrape_has_the_room_of_each_folder(tmp_path: Path) -> None:
    with Daemon(Place(tmp_path)) as daemon:
        for folder in ("output.results", "output.failed", "state.path"):
            # A scrape does not wait for long.
            free = wait_for(
                lambda folder=folder: daemon.metric("visiond_disk_free_bytes", folder=folder), "the room"
            )
            assert 0 < free <= daemon.metric("visiond_disk_size_bytes", folder=folder)


async def test_a_dead_mount_delays_no_other_folder_and_is_not_asked_again_before_it_answers(
    often: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, asked = threading.Event(), []

    def ask(path: Any) -> os.statvfs_result:
        asked.append(path)
        assert path != tmp_path / "dead" or answers.wait(PATIENCE)
        return os.fstatvfs(0)

    monkeypatch.setattr(os, "statvfs", ask)
    (tmp_path / "dead").mkdir()
    found = Disks({"dead": tmp_path / "dead", "live": tmp_path})
    for looks in range(1, 4):
        await found.look()
        await until(lambda looks=looks: asked.count(tmp_path) == looks)
    assert found.rooms.keys() == {"live"}
    assert asked.count(tmp_path / "dead") == 1
    answers.set()
    await until(lambda: found.rooms.keys() == {"dead", "live"})


async def test_a_folder_that_cannot_be_asked_any_more_has_no_series(
    often: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Any) -> os.statvfs_result:
        raise OSError

    monkeypatch.setattr(disks, "WAIT_SECONDS", PATIENCE)
    metrics, found = Metrics(), Disks({"state.path": tmp_path})
    await found.look()
    metrics.measured(found.rooms)
    assert metrics.value("visiond_disk_free_bytes", folder="state.path") > 0
    monkeypatch.setattr(os, "statvfs", fail)
    await found.look()
    metrics.measured(found.rooms)
    assert metrics.value("visiond_disk_free_bytes", folder="state.path") == 0
