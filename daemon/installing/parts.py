"""The parts of an installed visiond: account, environment, configuration, folders, units. Each is a step."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from daemon.installing import service
from daemon.installing.environment import Environment, switch
from daemon.installing.places import ACCOUNT, PORTS, Places, name_of
from daemon.installing.source import CodeSource
from daemon.installing.steps import Step, StepFailed, as_account, run

COMMAND = "/opt/visiond/bin/visiond"  # on the installed machine
UNITS = ("visiond.service", "visiond@.service")
USERADD = (*("--system", "--user-group", "--home-dir", "/var/lib/visiond"), *("--shell", "/usr/sbin/nologin"))
# The folders of images: with the setgid bit, new files and folders inherit the group.
MODES = {"": 0o2750, "inbox": 0o2770, "results": 0o2750, "failed": 0o2750, "done": 0o2750, "bins": 0o2750}


class Parts:
    """The steps that make what is missing."""

    def __init__(self, places: Places, source: CodeSource, environment: Environment) -> None:
        self._places = places
        self._source = source
        self._environment = environment

    def first(self) -> Iterator[Step]:
        """Everything that changes nothing for a daemon that runs."""
        places = self._places
        yield Step(
            f"the account {ACCOUNT}",
            lambda: self._is_written(places.accounts, "sysusers.conf") and bool(self._ids()),
            self._make_account,
            [f"useradd {' '.join(USERADD)} {ACCOUNT}"],
        )
        yield Step(
            f"the environment {self._environment.folder}, with all packages (several GB)",
            self._environment.is_complete,
            self._environment.make,
            [f"df -h {places.environments}"],
            is_slow=True,
        )
        yield Step(f"the configuration {places.config}", places.config.exists, self._write_config)
        yield Step(
            f"the folders below {places.images}, and {places.state}",
            lambda: all(folder.is_dir() for folder, _, _ in self._folders()),
            self._make_folders,
        )
        yield Step(
            f"the units in {places.units}",
            lambda: all(self._is_written(places.units / name, name) for name in UNITS),
            self._write_units,
        )
        has_command = partial(os.path.lexists, places.command)  # a file of somebody else stays, too
        yield Step(f"the command {places.command}", has_command, self._link_command)
        trial = "a trial of the new environment"
        yield Step(trial, self._environment.is_in_use, self._try, is_slow=True)

    def last(self, *, start: bool) -> Iterator[Step]:
        """Put it to use."""
        unit, booted = self._places.unit, service.is_booted(self._places)
        folder = self._environment.folder
        yield Step(
            f"the link {self._places.program}",
            self._environment.is_in_use,
            lambda: switch(self._places, folder),
            [f"ln -sfn {folder} {self._places.program}"],
        )
        if booted:
            yield service.RELOAD
        if booted and start:
            yield Step(
                f"{unit} starts at boot",
                lambda: subprocess.run(["systemctl", "is-enabled", "-q", unit], check=False).returncode == 0,
                lambda: run("systemctl", "enable", unit),
                [f"systemctl enable {unit}"],
            )
            yield Step(
                f"{unit} is ready",
                lambda: service.is_active(unit),
                lambda: service.start(unit),
                [f"systemctl start {unit}", f"journalctl -u {unit} -n 50 -o cat"],
                is_slow=True,
            )

    # Files

    def _is_written(self, file: Path, name: str) -> bool:
        return file.is_file() and file.read_bytes() == (self._source.systemd / name).read_bytes()

    def _write(self, file: Path, name: str) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes((self._source.systemd / name).read_bytes())
        file.chmod(0o644)

    def _write_units(self) -> None:
        for name in UNITS:
            self._write(self._places.units / name, name)

    def _write_config(self) -> None:
        """Never over an existing one. Several daemons get different folders and ports."""
        places, text = self._places, (self._source.systemd / "daemon.toml").read_text()
        if places.name:
            for folder in ("/srv/visiond", "/var/lib/visiond"):
                text = text.replace(folder, f"{folder}{places.suffix}")
            text = text.replace("/etc/visiond/daemon.toml", f"/etc/visiond/{places.name}.toml")
        ports = free_ports(places.config.parent.glob("*.toml"))
        text = re.sub(f':({"|".join(map(str, PORTS.values()))})"', lambda _: f':{next(ports)}"', text)
        places.config.parent.mkdir(parents=True, exist_ok=True)
        with places.config.open("x") as file:
            file.write(text)
        places.config.chmod(0o644)

    def _link_command(self) -> None:
        self._places.command.parent.mkdir(parents=True, exist_ok=True)
        self._places.command.symlink_to(COMMAND)

    # Account and folders

    def _ids(self) -> tuple[int, int] | None:
        """The numbers of user and group in this tree."""
        with suppress(OSError):
            for line in self._places.at("/etc/passwd").read_text().splitlines():
                name, _, user, group, *_ = line.split(":")
                if name == ACCOUNT:
                    return int(user), int(group)
        return None

    def _make_account(self) -> None:
        self._write(self._places.accounts, "sysusers.conf")
        root = self._places.root
        if self._ids():
            return
        if shutil.which("systemd-sysusers"):
            run("systemd-sysusers", f"--root={root}", self._places.accounts.name)
        else:
            prefix: list[str | Path] = [] if self._places.is_system else ["--prefix", root]
            run("useradd", *prefix, *USERADD, ACCOUNT)

    def _folders(self) -> Iterator[tuple[Path, int, bool]]:
        """Each folder, its mode, and whether the daemon owns it."""
        for name, mode in MODES.items():
            yield self._places.images / name, mode, bool(name)
        yield self._places.state, 0o700, True

    def _make_folders(self) -> None:
        """The rights of folders that exist are left as they are."""
        ids = self._ids()
        for folder, mode, is_its_own in self._folders():
            if folder.is_dir():
                continue
            folder.mkdir(parents=True)
            if ids and os.geteuid() == 0:
                os.chown(folder, ids[0] if is_its_own else 0, ids[1])
            folder.chmod(mode)  # after chown, which takes the setgid bit away

    # The trial

    def _try(self) -> None:
        """`visiond check` with every configuration that the new environment will work with. Raises StepFailed."""
        visiond = self._environment.visiond
        if not self._places.is_system or os.geteuid():
            # the configuration's folders are those of the machine, not of this tree
            run(visiond, "--version")
            return
        booted = service.is_booted(self._places)
        for unit in dict.fromkeys([self._places.unit, *(service.active_units() if booted else [])]):
            own = Places(self._places.root, name_of(unit))
            variables = service.variables_of(unit) if booted else {}
            try:
                as_account(ACCOUNT, own.state, visiond, "check", "--config", own.config, variables=variables)
            except subprocess.CalledProcessError as error:
                said = (error.stdout + error.stderr).splitlines()
                problems = [line for line in said if line.startswith("error")] or said[-12:]
                raise StepFailed("\n".join([f"it does not work with {own.config}:", *problems])) from error


def free_ports(configurations: Iterable[Path]) -> Iterator[int]:
    """The ports from 9464 on that no configuration uses."""
    taken = set()
    for file in configurations:
        with suppress(OSError, tomllib.TOMLDecodeError):
            sections = tomllib.loads(file.read_text("utf-8-sig"))
            for name, port in PORTS.items():
                listen = sections.get(name, {}).get("listen", f":{port}")
                taken.add(listen.rpartition(":")[2])
    first = min(PORTS.values())
    return (port for port in range(first, first + 1000) if str(port) not in taken)
