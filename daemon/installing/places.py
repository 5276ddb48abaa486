"""Where everything of an installation is. With a root other than /, all of it is in a throwaway tree."""

from __future__ import annotations

import re
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Places:
    """root: / or a throwaway tree. name: of one of several daemons on the machine; "" for the only one, or the first."""

    root: Path = Path("/")
    name: str = ""

    def __post_init__(self) -> None:
        if self.name and not NAME.fullmatch(self.name):
            raise WrongArgument(f'"{self.name}" is not a name; use up to 32 of a-z, 0-9, - and _')
        if self.name == "daemon":
            raise WrongArgument(
                '"daemon" is the name of the first daemon\'s configuration; choose another name'
            )

    @property
    def is_system(self) -> bool:
        """Whether this is the machine itself, and not a throwaway tree."""
        return self.root == Path("/")

    def at(self, path: str) -> Path:
        """A path of the installed machine, in the tree."""
        return self.root / path.lstrip("/")

    # The program, which all daemons share

    @property
    def program(self) -> Path:
        """A link to the environment in use."""
        return self.at("/opt/visiond")

    @property
    def environments(self) -> Path:
        return self.at("/opt/visiond-environments")

    @property
    def packages(self) -> Path:
        """uv's cache. Environments share its files by hard links, so another one takes little room."""
        return self.environments / "cache"

    @property
    def command(self) -> Path:
        return self.at("/usr/local/bin/visiond")

    @property
    def own_packages(self) -> Path:
        """Packages that the administrator wants in every environment, for example plug-ins."""
        return self.at("/etc/visiond/requirements.txt")

    @property
    def units(self) -> Path:
        return self.at("/etc/systemd/system")

    @property
    def accounts(self) -> Path:
        return self.at("/etc/sysusers.d/visiond.conf")

    # One daemon

    @property
    def unit(self) -> str:
        return f"visiond@{self.name}.service" if self.name else "visiond.service"

    @property
    def suffix(self) -> str:
        """What the names of its folders end with."""
        return f"-{self.name}" if self.name else ""

    @property
    def config(self) -> Path:
        return self.at(f"/etc/visiond/{self.name or 'daemon'}.toml")

    @property
    def images(self) -> Path:
        """The folder of inbox, results, failed, done and bins."""
        return self.at(f"/srv/visiond{self.suffix}")

    @property
    def state(self) -> Path:
        return self.at(f"/var/lib/visiond{self.suffix}")

    @property
    def cache(self) -> Path:
        return self.at(f"/var/cache/visiond{self.suffix}")


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
