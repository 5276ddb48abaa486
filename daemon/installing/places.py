"""Where everything of an installation is. With a root other than /, all of it is in a throwaway tree."""

from __future__ import annotations

import re
from pathlib import Path

from daemon.core.errors import WrongArgument

ACCOUNT = "visiond"  # user and group
PORTS = {"http": 9464, "page": 9465}  # of the sections of the configuration, by default
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
# What each option of the commands means.
HELP = {
    "root": "A folder to use in place of /, as a trial; nothing outside it changes.",
    "name": "One of several daemons on this machine; its unit is visiond@NAME.",
    "dry_run": "Print the steps, and change nothing.",
    "upgrade": "Replace the visiond that is installed.",
    "python": "Python for visiond. Default: this one, if the service can run it.",
    "wheel": "Wheel of visiond. Default: the visiond that runs this.",
    "wheels": "Folder with all packages, from `visiond bundle`; no package index is asked.",
    "bundle": "Folder to make; after an interruption, the same one again.",
    "no_start": "Do not enable and start the service.",
}


class Places:
    """root: / or a throwaway tree. name: of one of several daemons on the machine; "" for the only one, or the first."""

    def __init__(self, root: Path = Path("/"), name: str = "") -> None:
        """Raises WrongArgument."""
        if name and not NAME.fullmatch(name):
            raise WrongArgument(f'"{name}" is not a name; use up to 32 of a-z, 0-9, - and _')
        if name == "daemon":
            raise WrongArgument(
                '"daemon" is the name of the first daemon\'s configuration; choose another name'
            )
        self.root, self.name = root, name
        self.is_system = root == Path("/")  # the machine itself, and not a throwaway tree

        # The program, which all daemons share
        self.program = self.at("/opt/visiond")  # a link to the environment in use
        self.environments = self.at("/opt/visiond-environments")
        # uv's cache. Environments share its files by hard links, so another one takes little room.
        self.packages = self.environments / "cache"
        self.command = self.at("/usr/local/bin/visiond")
        # Packages that the administrator wants in every environment, for example plug-ins.
        self.own_packages = self.at("/etc/visiond/requirements.txt")
        self.units = self.at("/etc/systemd/system")
        self.accounts = self.at("/etc/sysusers.d/visiond.conf")

        # One daemon
        self.unit = f"visiond@{name}.service" if name else "visiond.service"
        self.suffix = f"-{name}" if name else ""  # of the names of its folders
        self.config = self.at(f"/etc/visiond/{name or 'daemon'}.toml")
        self.images = self.at(f"/srv/visiond{self.suffix}")  # with inbox, results, failed, done and bins
        self.state = self.at(f"/var/lib/visiond{self.suffix}")
        self.cache = self.at(f"/var/cache/visiond{self.suffix}")

    def at(self, path: str) -> Path:
        """A path of the installed machine, in the tree."""
        return self.root / path.lstrip("/")


def name_of(unit: str) -> str:
    """The daemon's name, from its unit's: "scans" for visiond@scans.service."""
    return unit.removesuffix(".service").partition("@")[2]


def find_names(root: Path) -> list[str]:
    """The names of the daemons that have a file or a folder in this tree, whether or not they were ever started."""
    sample = Places(root, "name")
    kinds = (sample.config, sample.images, sample.state, sample.cache, sample.units / f"{sample.unit}.d")
    found = set()
    for kind in kinds:
        before, after = kind.name.split("name")
        for path in kind.parent.glob(f"{before}*{after}"):
            found.add(path.name.removeprefix(before).removesuffix(after))
    return sorted(name for name in found - {"daemon"} if NAME.fullmatch(name))
