"""`visiond install`, `visiond bundle` and `visiond uninstall`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from daemon.installing.places import HELP
from daemon.terminal.options import flag, option

RootOption = Annotated[Path, option("--root FOLDER", HELP["root"])]
NameOption = Annotated[str, option("--name NAME", HELP["name"])]
DryOption = Annotated[bool, flag("--dry-run", HELP["dry_run"])]


def install(
    root: RootOption = Path("/"),
    name: NameOption = "",
    upgrade: Annotated[bool, flag("--upgrade", HELP["upgrade"])] = False,
    python: Annotated[str, option("--python FILE", HELP["python"])] = "",
    wheel: Annotated[Path | None, option("--wheel FILE", HELP["wheel"])] = None,
    wheels: Annotated[Path | None, option("--wheels FOLDER", HELP["wheels"])] = None,
    no_start: Annotated[bool, flag("--no-start", HELP["no_start"])] = False,
    dry_run: DryOption = False,
) -> None:
    """Install this visiond as a system service.

    Makes what is missing: user and group, a virtual environment with the locked
    packages, configuration, folders for images, units; then starts the service.
    It can be repeated: what is there stays, only units are brought up to date.
    --upgrade makes the new environment beside the old one, tries it, switches,
    restarts, and goes back if it does not become ready. In a fresh checkout
    `make install` does the same.

    Examples:
      visiond install
      visiond install --upgrade
      visiond install --name scans
      visiond install --root /tmp/tree --dry-run
    """
    from daemon.installing import plan

    wish = plan.Wish(root, name, python, wheel, wheels, upgrade, start=not no_start, dry_run=dry_run)
    plan.install(wish)


def bundle(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help=HELP["bundle"])],
    python: Annotated[str, option("--python FILE", HELP["python"])] = "",
    wheel: Annotated[Path | None, option("--wheel FILE", HELP["wheel"])] = None,
) -> None:
    """Download all packages for machines without a package index.

    Makes a folder with this visiond, its locked packages and install.sh, which
    installs them there. The other machine needs the same kind of processor and
    the same version of Python with venv. Models: `visiond models bundle`.

    Examples:
      visiond bundle visiond-bundle
      visiond bundle visiond-bundle --python /usr/bin/python3.12
    """
    from daemon.installing.bundle import make_bundle

    make_bundle(folder, wheel, python)


def uninstall(root: RootOption = Path("/"), name: NameOption = "", dry_run: DryOption = False) -> None:
    """Remove the installed service, but no data.

    Configuration, results, images, ledger and the account stay; it prints where
    they are. With --name only that daemon stops, and the program stays.

    Examples:
      visiond uninstall
      visiond uninstall --name scans
    """
    from daemon.installing import plan

    plan.uninstall(plan.Wish(root, name, dry_run=dry_run))
