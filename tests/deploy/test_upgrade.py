"""Which ledgers `visiond install --upgrade` copies, with the real program and a systemd that only names processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from daemon.installing import service, upgrade
from daemon.installing.commands import run
from daemon.installing.places import Places
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
