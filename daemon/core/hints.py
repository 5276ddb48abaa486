"""Commands in messages, complete enough to be pasted: they name the configuration of the daemon that the message is about."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from daemon.core.errors import WrongArgument

DEFAULT_CONFIG = Path("daemon.toml")  # in the current folder; the default
SERVICE_CONFIG = Path("/etc/visiond/daemon.toml")  # that `visiond install` makes
VARIABLE = "VISIOND_CONFIG"  # environment variable that names another
_options: list[str] = []  # that printed commands need


def keep_config(file: Path | None) -> None:
    """Make `command` name this configuration from now on, if the command would not find it by itself. Raises WrongArgument if
    the current folder, which relative paths begin with, is gone."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise WrongArgument("The current folder was removed. Change to another one with `cd`.") from None
    found = Path(os.environ.get(VARIABLE) or DEFAULT_CONFIG)
    _options[:] = ["--config", str(file.absolute())] if file and file.absolute() != found.absolute() else []


def kept_config() -> Path | None:
    """The file that `command` names, for a child process."""
    return Path(_options[1]) if _options else None


def like_service() -> str:
    """How to name a configuration: that of the service, if there is one and it is not the one in use."""
    in_use = [os.environ.get(VARIABLE), *_options]
    if str(SERVICE_CONFIG) in in_use or not SERVICE_CONFIG.exists():
        return " with --config"
    return f": --config {SERVICE_CONFIG} for the service"


def command(*words: str | Path) -> str:
    """A `visiond` command, quoted for the shell."""
    elsewhere = Path(sys.argv[0]).name == "visiond" and not shutil.which("visiond")  # not on the PATH
    return shlex.join([os.path.abspath(sys.argv[0]) if elsewhere else "visiond", *map(str, words), *_options])


def quantity(number: int, noun: str) -> str:
    """ "1 image", "2,000 images"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
