"""The output folders belong to one daemon."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from daemon.config.loading import Config, parse
from daemon.core.errors import AlreadyRunning
from daemon.results.folder_locks import lock_outputs
from tests.daemon_process import Daemon, Place

HERE = {"state": {"path": "state"}}
THERE = {"state": {"path": "other-state"}, "inbox": [{"path": "other"}]}
APART = {
    "results": "other-results",
    "failed": "other-failed",
    "done": "other-done",
    "bins_folder": "other-bins",
}


def configure(folder: Path, *tables: Mapping[str, Any]) -> Config:
    document: dict[str, Any] = {}
    for table in tables:
        document |= table
    return parse(document, folder)


@pytest.mark.parametrize("shared", ["results", "failed", "bins_folder"])
def test_two_daemons_do_not_write_to_one_folder(tmp_path: Path, shared: str) -> None:
    for name in ("failed", "bins"):
        (tmp_path / name).mkdir()
    output = {key: value for key, value in APART.items() if key != shared} | {"bins": "link"}
    with lock_outputs(configure(tmp_path, HERE, {"output": {"bins": "link"}})):
        with pytest.raises(AlreadyRunning, match=f"writes its results to .*, as process {os.getpid()}"):
            with lock_outputs(configure(tmp_path, THERE, {"output": output})):
                pass
        with lock_outputs(configure(tmp_path, THERE, {"output": APART | {"bins": "link"}})):
            pass
    with lock_outputs(configure(tmp_path, THERE, {"output": output})):
        pass


@pytest.mark.parametrize("shared", ["done", "bins_folder"])
def test_folders_that_a_daemon_does_not_write_to_are_free_for_others(tmp_path: Path, shared: str) -> None:
    for name in ("done", "bins"):
        (tmp_path / name).mkdir()
    output = {key: value for key, value in APART.items() if key != shared}
    moving = {"bins": "link" if shared == "bins_folder" else "none"}
    mover = {"path": "inbox", "on_success": "move" if shared == "done" else "keep"}
    other = configure(tmp_path, THERE, {"output": output})
    writer = configure(tmp_path, THERE, {"output": output | moving, "inbox": [mover | {"path": "other"}]})
    with lock_outputs(configure(tmp_path, HERE, {"output": moving, "inbox": [mover]})):
        with lock_outputs(other):
            pass
        with pytest.raises(AlreadyRunning, match="writes its results to"), lock_outputs(writer):
            pass


def test_daemons_whose_inboxes_have_other_names_may_share_the_top_folders(tmp_path: Path) -> None:
    with lock_outputs(configure(tmp_path, {"inbox": [{"path": "a", "name": "a"}]})):
        with lock_outputs(configure(tmp_path, {"inbox": [{"path": "b", "name": "b"}]})):
            pass
        for clashing in ({"path": "c", "name": "a"}, {"path": "c"}):
            with pytest.raises(AlreadyRunning), lock_outputs(configure(tmp_path, {"inbox": [clashing]})):
                pass


def test_if_folders_cannot_be_locked_that_is_reported_and_work_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(fd: int, mode: int) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with lock_outputs(configure(tmp_path, HERE)):
        pass
    assert "folder cannot be locked; make sure that no other visiond writes to it" in capsys.readouterr().out


def test_a_second_daemon_and_a_repair_are_refused_by_name_and_no_file_is_left_among_the_results(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path)
    with Daemon(place) as daemon:
        place.configure({"state": {"path": "other-state"}})
        shutil.copytree(tmp_path / "state", tmp_path / "other-state", ignore=shutil.ignore_patterns("*.sock"))
        for command in (("run", "--once"), ("repair",)):
            refused = place.command(*command)
            assert refused.returncode == os.EX_TEMPFAIL
            expected = f"Another visiond writes its results to {place.site.results}, as process {daemon.process.pid}."
            assert expected in refused.stderr.replace("\n", " ")
        assert daemon.stop() == 0
    assert list(place.site.results.iterdir()) == []
    assert place.run_once().returncode == 0


@pytest.mark.parametrize("above_is_first", [True, False])
def test_results_inside_those_of_another_daemon_are_refused(tmp_path: Path, above_is_first: bool) -> None:
    inner = {**APART, "results": "results/inner"}
    configs = [configure(tmp_path, HERE), configure(tmp_path, THERE, {"output": inner})]
    first, second = configs if above_is_first else reversed(configs)
    with lock_outputs(first):
        with pytest.raises(AlreadyRunning, match="visiond writes its results"), lock_outputs(second):
            pass
    with lock_outputs(second):
        pass
