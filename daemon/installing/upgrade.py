"""Replaces the environment that daemons run from, and goes back if the new one does not become ready."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from daemon.installing import service
from daemon.installing.environment import go_back, switch
from daemon.installing.places import ACCOUNT, Places, name_of
from daemon.installing.steps import StepFailed, as_account, run, say

# Programs for an environment's Python: the schema of its ledgers, and the state folder of a configuration.
SCHEMA = "from daemon.ledger.schema import newest; print(newest())"
STATE = "import sys, pathlib; from daemon.config.loading import load; print(load(pathlib.Path(sys.argv[1])).state.path)"


def upgrade(places: Places, new: Path, before: Path, units_before: Mapping[Path, bytes]) -> None:
    """Switch, and restart the daemons that run. units_before: the files of the units as the old version had them.
    Raises StepFailed after going back."""
    units = service.active_units() if service.is_booted(places) else []
    if units:
        run("systemctl", "daemon-reload")
    saved = _save_ledgers(places, units, new, before)
    say(f"{places.program} → {new.name}")
    switch(places, new)
    try:
        for unit in units:
            say(f"{unit} restarts …")
            service.start(unit)
            say(f"{unit} is ready")
    except (subprocess.SubprocessError, OSError, KeyboardInterrupt) as error:
        say(f"{unit} did not become ready; going back to {before.name} …")
        why = _last_words(unit)
        service.stop(*units)
        go_back(places, before)
        for file, content in units_before.items():
            file.write_bytes(content)
        run("systemctl", "daemon-reload")
        for ledger, copy in saved:
            _restore(ledger, copy)
        again = [other for other in units if not _starts(other)]
        state = (
            f"{', '.join(again)} cannot be started with the old one either"
            if again
            else "the old one works again"
        )
        raise StepFailed(
            "\n".join([f"{unit} did not become ready with {new.name}; {state}. The end of its log:", *why])
        ) from error


def _save_ledgers(places: Places, units: Sequence[str], new: Path, before: Path) -> list[tuple[Path, Path]]:
    """If the new version migrates ledgers, which an old one refuses, stop the daemons and copy their ledgers.
    Returns each ledger with its copy."""
    saved: list[tuple[Path, Path]] = []
    if not units or _schema_of(new) == _schema_of(before):
        return saved
    say("the new version changes the ledgers, so the daemons stop, and the ledgers are copied first …")
    all_variables = [service.variables_of(unit) for unit in units]
    service.stop(*units)
    for unit, variables in zip(units, all_variables, strict=True):
        own = Places(places.root, name_of(unit))
        find = (new / "bin" / "python", "-I", "-c", STATE, own.config)
        ledger = Path(as_account(ACCOUNT, own.state, *find, variables=variables), "ledger.sqlite")
        copy = ledger.with_name(f"before-{new.name}.sqlite")
        if ledger.exists():
            backup = (before / "bin" / "visiond", "backup", "--force", "--config", own.config, copy)
            as_account(ACCOUNT, own.state, *backup, variables=variables)
            say(f"{copy}")
            saved.append((ledger, copy))
    return saved


def _schema_of(environment: Path) -> str:
    return run(environment / "bin" / "python", "-I", "-c", SCHEMA)


def _restore(ledger: Path, copy: Path) -> None:
    """As docs/upkeep.md says under Backup."""
    owner = copy.stat()
    for suffix in ("-wal", "-shm"):
        ledger.with_name(ledger.name + suffix).unlink(missing_ok=True)
    fresh = ledger.with_name("ledger.sqlite.restored")
    shutil.copyfile(copy, fresh)
    os.chown(fresh, owner.st_uid, owner.st_gid)
    fresh.chmod(0o640)
    fresh.replace(ledger)


def _starts(unit: str) -> bool:
    try:
        service.start(unit)
    except subprocess.SubprocessError:
        return False
    return True


def _last_words(unit: str) -> Iterator[str]:
    with contextlib.suppress(subprocess.SubprocessError, OSError):
        return iter(run("journalctl", "-u", unit, "-n", "12", "-o", "cat", "--no-pager").splitlines())
    return iter(())
