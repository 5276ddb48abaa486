"""`visiond health`, as a container or Kubernetes asks it."""

from __future__ import annotations

from pathlib import Path

import pytest

from daemon.config.loading import parse
from daemon.server import control
from tests.daemon_process import Daemon, Place, wait_for

PAGES = {
    "/healthz": {"status": "dead", "problems": ["ocr/0 on cuda:0 is closed"]},
    "/readyz": {"ready": False, "problems": ["no worker of ocr is ready"]},
}


def test_a_daemon_that_cannot_write_is_healthy_and_not_ready(tmp_path: Path) -> None:
    place = Place(tmp_path)
    (tmp_path / "token").write_text("secret")
    (tmp_path / "token").chmod(0o600)
    place.configure({"http": {"token_file": str(tmp_path / "token")}})
    assert place.command("health").returncode == 69
    with Daemon(place):
        answers = [place.command("health", *options) for options in ((), ("--ready",))]
        assert [(each.returncode, each.stdout) for each in answers] == [(0, "ok\n"), (0, "ready\n")]
        place.site.results.rename(tmp_path / "gone")
        place.site.results.touch()
        place.drop_many(range(1))
        wait_for(lambda: place.command("health", "--ready").returncode == 1, "word of the folder")
        assert place.command("health").returncode == 0
        assert str(place.site.results) in place.command("health", "--ready").stdout


@pytest.mark.parametrize(("ready", "state"), [(False, "dead"), (True, "not ready")])
def test_a_daemon_without_workers_is_dead(
    ready: bool, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "ask", lambda _control, _method, page, **_: PAGES[page])
    health = control.ask_health(parse({}, tmp_path), ready=ready)
    assert (health.state, bool(health.problems)) == (state, True)
