"""Which of the daemon's files other users can read, and that results are where the configuration says."""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
from pathlib import Path

import psutil
import pytest

from daemon.config.state import closed_to_others, lock_state
from tests.daemon_process import Daemon, Place, counts_of, picture, wait_for
from tests.makers import put_in_the_way

OTHERS = stat.S_IRWXO


def open_to_others(folder: Path) -> list[str]:
    """Files and folders below it that every user may use."""
    return [str(path) for path in folder.rglob("*") if not path.is_symlink() and path.stat().st_mode & OTHERS]


@pytest.fixture(autouse=True)
def usual_umask() -> None:
    os.umask(0o022)


def test_other_users_cannot_read_what_the_daemon_writes(tmp_path: Path) -> None:
    place = Place(
        tmp_path, {"output": {"bins": "copy", "sinks": ["jsonl"]}, "http": {"listen": "127.0.0.1:0"}}
    )
    place.drop("deep/a.ppm", picture(1)).chmod(0o640)
    place.drop("bad.jpg", b"no image").chmod(0o640)
    with Daemon(place) as daemon:
        daemon.wait_idle(2)
        made = [tmp_path / name for name in ("state", "results", "failed", "bins", "results.jsonl")]
        wait_for(lambda: all(path.exists() for path in made), "what it writes; the jsonl output comes last")
        assert [str(path) for path in made if path.stat().st_mode & OTHERS] == []
        assert [name for path in made for name in open_to_others(path)] == []
        assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700
        assert stat.S_IMODE((tmp_path / "results" / "deep" / "a.ppm.json").stat().st_mode) == 0o640
    for name in ("backup", "export.csv", "export.jsonl", "export.parquet"):
        assert place.command(name.partition(".")[0], tmp_path / name).returncode == 0
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640


def test_a_stricter_umask_stays_and_another_process_time_has_its_own(tmp_path: Path) -> None:
    for before, within in ((0o022, 0o027), (0o077, 0o077), (0o002, 0o027)):
        os.umask(before)
        with closed_to_others():
            (file := tmp_path / f"{before}").touch()
        assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~within
        assert os.umask(0o022) == before


def test_the_state_folder_of_an_older_visiond_is_closed_to_others_and_open_to_its_group_as_before(
    tmp_path: Path,
) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(0o2755)
    with lock_state(tmp_path / "state"):
        assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o2750


def test_a_group_that_the_results_folder_gives_on_may_read_results(tmp_path: Path) -> None:
    place = Place(tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results").chmod(0o2750)
    place.drop("deep/a.ppm", picture(1))
    assert place.run_once().returncode == 0
    folder = tmp_path / "results" / "deep"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o2750
    assert stat.S_IMODE((folder / "a.ppm.json").stat().st_mode) == 0o640


# Names of inboxes


def named(*names: str) -> dict[str, object]:
    tables = zip(("one", "two"), names, strict=True)
    return {"inbox": [{"path": path, "name": name, "settle_seconds": 0.1} for path, name in tables]}


def test_a_state_folder_with_other_files_stays_open_and_our_files_in_it_are_closed(tmp_path: Path) -> None:
    place = Place(tmp_path)
    (state := tmp_path / "state").mkdir(mode=0o755)
    (state / "someone-elses").touch()
    state.chmod(0o755)
    assert place.run_once().returncode == 0
    assert stat.S_IMODE(state.stat().st_mode) == 0o755
    assert not stat.S_IMODE(place.site.ledger.stat().st_mode) & stat.S_IRWXO


def test_an_inbox_that_was_moved_is_named_before_its_images_are_processed_a_second_time(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path)
    place.drop("a.ppm", picture(1))
    assert place.run_once().returncode == 0
    place.inbox().rename(tmp_path / "moved")
    place.configure({"inbox": [{"path": "moved", "settle_seconds": 0.1}]})
    told = f"results of the inbox {tmp_path / 'inbox'}, which is not in this configuration"
    assert told in place.command("check", "--quick").stdout
    for command in ("verify", "repair"):
        assert told in (named := place.command(command)).stderr
        assert "1 foreign" in named.stdout
    assert told in json.loads(place.command("repair", "--json").stdout)["notes"][0]
    assert told in place.run_once().stderr


def test_the_link_that_the_warning_of_a_moved_inbox_names_has_nothing_processed_again(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.drop_many(range(3))
    assert place.run_once().returncode == 0
    assert "notes" not in json.loads(place.command("verify", "--json").stdout)
    place.inbox().rename(tmp_path / "moved to")
    place.configure({"inbox": [{"path": "moved to", "settle_seconds": 0.1}]})
    warning = place.command("repair").stderr
    subprocess.run(shlex.split(warning.split("`")[1]), check=True)
    place.configure({"inbox": [{"path": "inbox", "settle_seconds": 0.1}]})
    assert place.run_once().stdout.startswith("0 done, 0 failed, 0 skipped")
    assert place.command("verify").stdout == "sidecars: 3 whole\n"
    with Daemon(place) as daemon:
        place.drop("new.ppm", picture(10))
        daemon.wait_idle(1)
    assert (tmp_path / "moved to" / "new.ppm").exists()
    assert counts_of(place) == {"DONE": 4}


def test_inboxes_that_exchange_their_names_are_refused_until_the_results_follow(tmp_path: Path) -> None:
    place = Place(tmp_path, named("left", "right"))
    for number, name in enumerate(("left", "right")):
        place.drop("a.ppm", picture(number), name)
    assert place.run_once().returncode == 0
    right = place.sidecar("a.ppm", "right")
    place.configure(named("right", "left"))
    for command in (("run", "--once"), ("check", "--quick")):
        refused = place.command(*command)
        assert refused.returncode == os.EX_CONFIG
        said = (refused.stdout + refused.stderr).replace('\\"', '"')  # `run` logs JSON by then
        assert f'inbox {tmp_path / "one"}: its name was "left" and is "right"' in said
        assert f'inbox {tmp_path / "two"}: its name was "right" and is "left"' in said
        assert "visiond repair" in said
    assert place.command("repair").returncode == 0
    place.dropped = {"right": place.dropped["left"], "left": place.dropped["right"]}
    assert place.sidecar("a.ppm", "left") == right
    assert place.run_once().returncode == 0
    place.assert_kept(DONE=2)


def test_an_inbox_without_results_may_have_any_name_and_one_that_has_its_old_name_again_is_welcome(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path, named("left", "right"))
    assert place.run_once().returncode == 0
    place.configure(named("right", "left"))
    assert place.run_once().returncode == 0
    place.dropped = {"right": {}, "left": {}}
    place.drop("a.ppm", picture(1), "left")
    assert place.run_once().returncode == 0
    place.configure(named("right", "third"))
    assert place.run_once().returncode == os.EX_CONFIG
    place.configure(named("right", "left"))
    assert place.run_once().returncode == 0


def test_torn_names_are_saved_again(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.drop("a.ppm", picture(1))
    assert place.run_once().returncode == 0
    (tmp_path / "state" / "inboxes.json").write_text('{"/one')
    assert place.run_once().returncode == 0
    assert str(place.inbox()) in (tmp_path / "state" / "inboxes.json").read_text()


# What is refused at the start


def test_more_memory_than_there_is_is_refused_in_a_sentence(tmp_path: Path) -> None:
    size = 2 * psutil.virtual_memory().total // (1 << 20) << 20
    place = Place(tmp_path, {"pipeline": {"slab_bytes": size}})
    for command in (("run", "--once"), ("check", "--quick")):
        refused = place.command(*command)
        assert refused.returncode == os.EX_CONFIG
        said = refused.stdout + refused.stderr
        assert (
            f"pipeline.slab_bytes: {size >> 20:,} MiB is too much; this machine has {size >> 21:,} MiB of memory"
            in said
        )


def test_an_inbox_that_is_a_file_is_called_one(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.inbox().rmdir()
    place.inbox().write_text("")
    for command in (("run", "--once"), ("check", "--quick")):
        refused = place.command(*command)
        assert refused.returncode == os.EX_CONFIG
        assert f"inbox {place.inbox()} is a file; it must be the folder" in refused.stdout + refused.stderr


FILES = (
    "ledger.sqlite",
    "ledger.sqlite-wal",
    "lock",
    "identity",
    "inboxes.json",
    "tuning.json",
    "page.token",
)


@pytest.mark.parametrize("kind", ["FIFO", "socket", "device", "folder"])
def test_what_has_the_name_of_a_file_of_the_state_folder_and_is_none_is_named_and_not_waited_for(
    tmp_path: Path, kind: str
) -> None:
    place = Place(tmp_path)
    assert place.run_once().returncode == 0
    for name in FILES if kind == "FIFO" else FILES[:1]:
        file = tmp_path / "state" / name
        kept = file.read_bytes() if file.exists() else None
        file.unlink(missing_ok=True)
        put_in_the_way(file, kind)
        commands = (["run", "--once"], ["check", "--quick"], ["list"], ["status"], ["verify"])
        for command in commands:
            refused = place.command(*command, timeout=20)
            assert refused.returncode == os.EX_CONFIG
            assert f"{file} is a {kind}; it must be a file" in refused.stdout + refused.stderr
        file.rmdir() if kind == "folder" else file.unlink()
        if kept is not None:
            file.write_bytes(kept)
    assert place.run_once().returncode == 0
