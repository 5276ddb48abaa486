"""A reload: what changes while the daemon works, what waits, and what changes nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import ssl
from pathlib import Path
from typing import Any

import anyio
import pytest

from daemon.config.loading import Config, parse
from daemon.config.reloading import LIVE, Reloaded, Reloading, take_over
from daemon.core.errors import ConfigError
from tests.daemon_process import PATIENCE, Daemon, Place, free_port, make_certificate, picture, wait_for

FOLDER = Path("/srv")


def config(**tables: Any) -> Config:
    return parse(tables, FOLDER)


def test_every_live_key_exists() -> None:
    document = {name: table for name, table in config().model_dump().items() if isinstance(table, dict)}
    listed = {"inbox": Config.model_fields["inbox"].get_default()[0].model_dump()}
    listed["second_look"] = dict.fromkeys(["images_per_second"])
    for key in LIVE:
        table, _, name = key.partition(".")
        assert not name or name in (document | listed)[table], key


def test_live_settings_are_taken_over_and_the_others_are_named() -> None:
    old = config(inbox=[{"path": "a"}])
    new = config(
        inbox=[{"path": "a", "ignore": ["*.x"], "recursive": False}],
        upkeep={"prune_days": 3, "quiet_hours": ""},
        pipeline={"drain_seconds": 1, "max_attempts": 9},
        log={"level": "debug", "format": "json"},
        stages={"clip": {"model": "clip-l14"}},
    )
    taken, done = take_over(old, new)
    assert done.changed == [
        "inbox.ignore",
        "upkeep.quiet_hours",
        "upkeep.prune_days",
        "pipeline.drain_seconds",
        "log.level",
    ]
    assert done.waiting == ["inbox.recursive", "pipeline.max_attempts", "stages.clip.model", "log.format"]
    assert (taken.inbox[0].ignore, taken.inbox[0].recursive) == (["*.x"], True)
    assert (taken.log.level, taken.log.format, taken.pipeline.max_attempts) == ("debug", "auto", 3)
    assert take_over(taken, new)[1] == Reloaded([], done.waiting), "they wait until the restart"


def test_other_inboxes_than_before_wait_for_a_restart_with_all_their_settings() -> None:
    old = config(inbox=[{"path": "a"}])
    new = config(inbox=[{"path": "b", "ignore": ["*.x"]}])
    taken, done = take_over(old, new)
    assert (taken, done) == (old, Reloaded([], ["inbox"]))


def test_https_is_neither_turned_on_nor_off() -> None:
    plain, secure = config(), config(http={"tls_certificate": "c.pem", "token_file": "t"})
    for old, new in ((plain, secure), (secure, plain)):
        taken, done = take_over(old, new)
        assert taken == old
        assert done == Reloaded([], ["http.token_file", "http.tls_certificate"])


@pytest.mark.anyio
async def test_when_a_part_refuses_nothing_changes() -> None:
    got: list[Config] = []

    def refuse(_: Config) -> None:
        raise ConfigError(["http.token_file: it is empty"])

    old = config()
    reloading = Reloading(old, lambda: config(log={"level": "debug"}), [refuse, got.append])
    with anyio.fail_after(PATIENCE):
        done = await reloading.reload()
    assert (done, reloading.config, got) == (Reloaded(problems=["http.token_file: it is empty"]), old, [])


def hang_up(daemon: Daemon, event: str, count: int = 1) -> dict[str, Any]:
    """Send SIGHUP; returns the line of the log with this event, which is then there so many times."""
    daemon.signal(signal.SIGHUP)
    lines = wait_for(
        lambda: len(found := list(daemon.events(event))) >= count and found, f"{count} × {event}"
    )
    line: dict[str, Any] = lines[-1]
    return line


def test_a_sighup_changes_what_can_change_names_the_rest_and_refuses_errors(tmp_path: Path) -> None:
    place = Place(tmp_path, {"inbox": [{"settle_seconds": 0.1, "ignore": ["*.later"]}]})
    with Daemon(place) as daemon:
        place.drop("1.later", picture(1))
        place.drop("2.ppm", picture(2))
        daemon.wait_idle(1)
        broken = place.config.read_text() + '\n[log2]\nlevel = "loud"\n'
        whole, _ = place.config.read_text(), place.config.write_text(broken)
        line = hang_up(daemon, "the configuration was not reloaded; everything stays as it was")
        assert "log2: unknown key" in line["problems"][0]
        place.config.write_text(whole)
        place.configure(
            {
                "inbox": [{"path": "inbox", "settle_seconds": 0.1, "ignore": []}],
                "pipeline": {"max_attempts": 7},
                "log": {"level": "debug"},
            }
        )
        assert hang_up(daemon, "configuration reloaded")["changed"] == ["inbox.ignore", "log.level"]
        daemon.wait_event("some changed settings need a restart of the daemon")
        daemon.wait_idle(2)  # the file that was ignored
        assert daemon.stop() == 0
    place.assert_kept(DONE=2)


HANGING_DISK = """
import time
from pathlib import Path
from daemon.config import values
read = values.read_file
def read_or_hang(path):
    data = read(path)
    if data.startswith(b"# hangs"):
        Path(path).with_name("hangs").touch()
        time.sleep(600)
    return data
values.read_file = read_or_hang
"""


def test_a_configuration_that_cannot_be_read_to_its_end_delays_no_stop(tmp_path: Path) -> None:
    place = Place(tmp_path)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(HANGING_DISK)
    with Daemon(place, environment={"PYTHONPATH": str(tmp_path / "site")}) as daemon:
        place.config.write_text("# hangs")
        daemon.signal(signal.SIGHUP)
        wait_for((tmp_path / "hangs").exists, "the reload reads it")
        assert daemon.stop(20.0) == 0


def test_the_executors_log_at_the_new_level_too(tmp_path: Path) -> None:
    place = Place(
        tmp_path, {"pipeline": {"executors": 2, "workers_per_device": 2}, "log": {"level": "error"}}
    )
    with Daemon(place) as daemon:
        place.configure({"log": {"level": "info"}})
        done = place.command("reload")
        assert (done.returncode, done.stdout) == (0, "Changed: log.level.\n")
        os.kill(daemon.workers()[0], signal.SIGKILL)
        daemon.wait_event("worker ready")  # of an executor, and only an info
        assert daemon.stop() == 0


def test_a_new_token_and_certificate_are_used_after_a_reload(tmp_path: Path) -> None:
    port, token = free_port(), tmp_path / "token"
    tls = make_certificate(tmp_path)
    token.write_text("the first")
    token.chmod(0o600)
    place = Place(tmp_path, {"http": {"listen": f"127.0.0.1:{port}", "token_file": "token", **tls}})

    def shown() -> str:
        return ssl.get_server_certificate(("127.0.0.1", port))

    def answers(word: str) -> int:
        with contextlib.closing(daemon.dial(tmp_path / "certificate.pem")) as connection:
            connection.request("GET", "/healthz", headers={"authorization": f"Bearer {word}"})
            return connection.getresponse().status

    with Daemon(place) as daemon:
        before = shown()
        make_certificate(tmp_path)
        token.write_text("")
        refused = place.command("reload")
        assert refused.returncode == os.EX_CONFIG
        assert "is empty" in refused.stderr
        assert shown() == before, "nothing has changed"
        token.write_text("the second")
        assert json.loads(place.command("reload", "--json").stdout) == {
            "changed": [],
            "waiting": [],
            "problems": [],
        }
        assert shown() != before
        assert (answers("the first"), answers("the second")) == (401, 200)
        assert daemon.stop() == 0


def test_without_a_daemon_reload_says_so(tmp_path: Path) -> None:
    assert Place(tmp_path).command("reload").returncode == os.EX_UNAVAILABLE
