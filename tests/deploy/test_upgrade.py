"""What `visiond install --upgrade` copies and brings back, with a systemd that only names processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from daemon.installing import service, upgrade
from daemon.installing.environment import switch
from daemon.installing.places import Places
from daemon.installing.steps import StepFailed, run
from tests.daemon_process import Place, picture


@pytest.fixture
def as_ourselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of the account run as the user of the tests."""

    def run_it(_account: str, _home: Path, *command: str | Path, variables: Mapping[str, str]) -> str:
        return run(*command, env={**os.environ, **variables})

    monkeypatch.setattr(upgrade, "as_account", run_it)


@pytest.fixture
def daemon_of_a_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose variables move the state folder."""
    settings = {"FOLDER": str(tmp_path / "elsewhere"), "VISIOND_STATE__PATH": "$FOLDER/state"}
    with subprocess.Popen(["sleep", "600"], env={**os.environ, **settings}) as process:
        monkeypatch.setattr(service, "run", lambda *_: str(process.pid))
        yield process
        process.kill()


@pytest.mark.usefixtures("as_ourselves")
def test_an_upgrade_copies_the_ledger_that_the_variables_of_the_unit_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, daemon_of_a_unit: subprocess.Popen[bytes]
) -> None:
    place, places = Place(tmp_path / "elsewhere"), Places(tmp_path)
    place.drop("a.ppm", picture(1))
    place.run_once()
    places.config.parent.mkdir(parents=True)
    places.config.write_text('[state]\npath = "/var/lib/visiond"\n')
    before = tmp_path / "before"
    before.symlink_to(sys.prefix)
    monkeypatch.setattr(upgrade, "_schema_of", lambda environment: environment.name)
    monkeypatch.setattr(service, "stop", lambda *_: daemon_of_a_unit.kill())

    new = Path(sys.prefix)
    [(ledger, copy)] = upgrade._save_ledgers(places, ["visiond.service"], new, before)
    assert ledger == tmp_path / "elsewhere/state/ledger.sqlite"
    assert copy == ledger.with_name(f"before-{new.name}.sqlite")
    assert copy.stat().st_size


def test_a_unit_without_a_process_has_no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "run", lambda *_: "0")
    assert service.variables_of("visiond.service") == {}


def test_a_version_that_does_not_become_ready_leaves_the_old_one_with_its_own_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = Places(tmp_path)
    old, new = places.environments / "old", places.environments / "new"
    for folder in (old, new, places.units):
        folder.mkdir(parents=True)
    switch(places, old)
    (unit := places.units / "visiond.service").write_text("of the new version")
    started: list[str] = []

    def start(_unit: str) -> None:
        started.append(f"{places.program.resolve().name}: {unit.read_text()}")
        if places.program.resolve() == new:
            raise subprocess.CalledProcessError(1, "systemctl")

    monkeypatch.setattr(upgrade, "run", lambda *_: "")
    monkeypatch.setattr(service, "is_booted", lambda _: True)
    monkeypatch.setattr(service, "active_units", lambda: ["visiond.service"])
    monkeypatch.setattr(service, "stop", lambda *_: None)
    monkeypatch.setattr(service, "start", start)
    with pytest.raises(StepFailed, match="the old one works again"):
        upgrade.upgrade(places, new, old, {unit: b"of the old version"})
    assert started == ["new: of the new version", "old: of the old version"]
