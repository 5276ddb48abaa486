"""`visiond install` and `visiond uninstall`."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from daemon.core.hints import command
from daemon.installing import service
from daemon.installing.environment import Environment, in_use, remove_others
from daemon.installing.parts import COMMAND, UNITS, Parts
from daemon.installing.places import ACCOUNT, Places, find_names, name_of
from daemon.installing.source import find_source
from daemon.installing.steps import Step, StepFailed, carry_out, say
from daemon.installing.upgrade import upgrade
from stages.contract.processes import locked_folder


@dataclass(frozen=True)
class Wish:
    """What an administrator asks for. wheel: install this one, not the visiond that runs. wheels: a folder with all packages.
    python: the interpreter for the environment."""

    root: Path = Path("/")
    name: str = ""
    python: str = ""
    wheel: Path | None = None
    wheels: Path | None = None
    upgrade: bool = False
    start: bool = True
    dry_run: bool = False

    @property
    def places(self) -> Places:
        return Places(self.root.resolve(), self.name)

    def command(self, *words: str) -> str:
        """A command for the same tree and daemon."""
        root = [] if self.places.is_system else ["--root", str(self.root)]
        name = ["--name", self.name] if self.name else []
        wheel = ["--wheel", str(self.wheel)] if self.wheel and words[0] == "install" else []
        wheels = ["--wheels", str(self.wheels)] if self.wheels and words[0] == "install" else []
        return command(*words, *root, *name, *wheel, *wheels)


def install(wish: Wish) -> None:
    """Raises StepFailed, WrongArgument."""
    places = wish.places
    _want_root(wish)
    with _alone(wish), tempfile.TemporaryDirectory(prefix="visiond-install-") as scratch:
        source = find_source(wish.wheel, Path(scratch))
        environment = Environment(places, source, wish.python, wish.wheels)
        parts = Parts(places, source, environment)
        other = None if environment.is_in_use() else in_use(places)
        say(f"visiond {source.version} into {places.root}, as {places.unit}")
        if other and not wish.upgrade:
            again = wish.command("install", "--upgrade")
            raise StepFailed(f"another visiond is installed, {other}. To replace it: {again}")
        again = wish.command("install", *(["--upgrade"] if wish.upgrade else []))
        units_before = {file: file.read_bytes() for name in UNITS if (file := places.units / name).is_file()}
        carry_out([*parts.first()], dry_run=wish.dry_run, again=again)
        if wish.dry_run:
            if other:
                say(
                    "then      the daemons that run restart with it; if one does not become ready, the old one comes back"
                )
            carry_out([*parts.last(start=wish.start)], dry_run=True)
            say("Nothing was changed (--dry-run).")
            return
        if other:
            upgrade(places, environment.folder, other, units_before)
            remove_others(places, environment.folder, other)
        carry_out([*parts.last(start=wish.start)], again=again)
    _say_what_now(wish)


def uninstall(wish: Wish) -> None:
    """Remove the program and its units; with a name, only that daemon's part. What is not made again by an
    installation stays: configuration, state, images, account. Raises StepFailed."""
    places = wish.places
    _want_root(wish)
    units = [places.unit] if places.name else sorted(_known_units(places))
    booted = service.is_booted(places)
    steps = [_stop(unit) for unit in units] if booted else []
    steps += [_remove(_wanted(places, unit), f"{unit} does not start at boot") for unit in units]
    if not places.name:
        files = [places.units / name for name in UNITS]
        files += [places.accounts, places.program, places.environments]
        steps += [_remove(path, f"{path} is removed") for path in [*_list_own_command(places), *files]]
    steps += [service.RELOAD] if booted else []
    with _alone(wish):
        carry_out(steps, dry_run=wish.dry_run, again=wish.command("uninstall"))
    say(
        "These stay:",
        *map(str, _list_kept(places, units)),
        f"the user and the group {ACCOUNT}, to whom they belong",
    )
    if wish.dry_run:
        say("Nothing was changed (--dry-run).")


def _want_root(wish: Wish) -> None:
    if wish.places.is_system and os.geteuid() and not wish.dry_run:
        raise StepFailed(
            "only root can do this: use sudo, or --root FOLDER to try it in a folder of your own"
        )


@contextlib.contextmanager
def _alone(wish: Wish) -> Iterator[None]:
    """Nobody else installs into this tree meanwhile. Raises StepFailed."""
    environments = wish.places.environments
    if wish.dry_run:
        yield
        return
    environments.mkdir(parents=True, exist_ok=True)
    try:
        with locked_folder(environments):
            yield
    except BlockingIOError as error:
        raise StepFailed(f"another installation is at work in {environments}; wait until it ends") from error


def _known_units(places: Places) -> Iterator[str]:
    """The units of this tree: the first daemon's, and those that start at boot or run."""
    yield Places(places.root).unit
    yield from (path.name for path in _wanted(places, "visiond").parent.glob("visiond@*.service"))
    if service.is_booted(places):
        yield from (unit for unit in service.active_units() if "@" in unit)


def _wanted(places: Places, unit: str) -> Path:
    """The link by which systemd starts a unit at boot."""
    return places.units / "multi-user.target.wants" / unit


def _stop(unit: str) -> Step:
    return Step(
        f"{unit} is stopped",
        lambda: not service.is_active(unit),
        lambda: service.stop(unit),
        [f"systemctl stop {unit}"],
    )


def _list_own_command(places: Places) -> list[Path]:
    """The link to the command, unless it is somebody else's."""
    is_ours = places.command.is_symlink() and os.readlink(places.command) == COMMAND
    return [places.command] if is_ours else []


def _remove(path: Path, what: str) -> Step:
    def is_tree() -> bool:
        return path.is_dir() and not path.is_symlink()

    return Step(
        what,
        lambda: not os.path.lexists(path),
        lambda: shutil.rmtree(path) if is_tree() else path.unlink(),
        [f"rm -rf {path}"],
        is_slow=is_tree(),
    )


def _list_kept(places: Places, units: Sequence[str]) -> Iterable[Path]:
    """Without a name, also of daemons that were never enabled, and the drop-ins of all named ones."""
    if places.name:
        return _list_data(places)
    names = [*map(name_of, units), *find_names(places.root)]
    shared = places.units / f"{UNITS[1]}.d"
    kept = [path for name in names for path in _list_data(Places(places.root, name))]
    return dict.fromkeys([*kept, *([shared] if shared.exists() else [])])


def _list_data(places: Places) -> list[Path]:
    """What an uninstallation keeps."""
    units = places.units / f"{places.unit}.d"
    data = [places.config.parent, places.images, places.state, places.cache, units]
    return [path for path in data if path.exists()]


def _say_what_now(wish: Wish) -> None:
    places = wish.places
    joins = f" (users join the group {ACCOUNT}: usermod -aG {ACCOUNT} alice)"
    removal = wish.command("uninstall")
    setup = f"visiond setup --config {places.config}"
    if not places.is_system:  # its groups are not this machine's, and its program is not on the PATH
        joins, program = "", f"{places.program}/bin/visiond"
        setup, removal = (shlex.join([program, *shlex.split(words)[1:]]) for words in (setup, removal))
    if service.is_booted(places) and wish.start:
        then = f"systemctl status {places.unit}"
    elif places.is_system:
        then = f"/opt/visiond/bin/visiond run --config {places.config}   # as the user {ACCOUNT}"
    else:
        then = f"{places.program}/bin/visiond --version"
    say(
        "Installed.",
        f"models:         {setup}   # gets some that know real images",
        f"drop images into {places.images / 'inbox'}{joins}",
        f"settings:       {places.config}",
        f"see it work:    {then}",
        f"to remove it:   {removal}",
    )
