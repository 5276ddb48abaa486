"""`visiond install`, `uninstall` and `bundle` for a machine that does not have visiond's packages yet."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from daemon.core.errors import VisiondError
from daemon.installing.bundle import make_bundle
from daemon.installing.places import HELP
from daemon.installing.plan import Wish, install, uninstall


def parser() -> argparse.ArgumentParser:
    """The same options as those of the `visiond` commands."""
    top = argparse.ArgumentParser(prog="python3 -m daemon.installing", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    for name in ("install", "uninstall"):
        command = commands.add_parser(name, help=f"as `visiond {name}`")
        command.add_argument("--root", type=Path, default=Path("/"), metavar="FOLDER", help=HELP["root"])
        command.add_argument("--name", default="", metavar="NAME", help=HELP["name"])
        command.add_argument("--dry-run", action="store_true", help=HELP["dry_run"])
        if name == "install":
            command.add_argument("--upgrade", action="store_true", help=HELP["upgrade"])
            command.add_argument("--python", default="", metavar="FILE", help=HELP["python"])
            command.add_argument("--wheel", type=Path, default=None, metavar="FILE", help=HELP["wheel"])
            command.add_argument("--wheels", type=Path, default=None, metavar="FOLDER", help=HELP["wheels"])
            command.add_argument("--no-start", dest="start", action="store_false", help=HELP["no_start"])
    bundle = commands.add_parser("bundle", help="as `visiond bundle`")
    bundle.add_argument("folder", type=Path, metavar="FOLDER", help=HELP["bundle"])
    bundle.add_argument("--python", default="", metavar="FILE", help=HELP["python"])
    bundle.add_argument("--wheel", type=Path, default=None, metavar="FILE", help=HELP["wheel"])
    return top


def main() -> None:
    words = vars(parser().parse_args())
    work = words.pop("command")
    try:
        if work == "bundle":
            make_bundle(words["folder"], words["wheel"], words["python"])
        else:
            {"install": install, "uninstall": uninstall}[work](Wish(**words))
    except VisiondError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)


if __name__ == "__main__":
    main()
