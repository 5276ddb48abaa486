"""The commands that messages tell people to run: pasted as they stand, they act on the very daemon that is spoken of."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

DEFAULT_CONFIG = Path("daemon.toml")  # in the current folder; read without being named
VARIABLE = "VISIOND_CONFIG"  # of the environment, which names another
_options: list[str] = []  # of this process's own command line


def keep_config(file: Path | None) -> None:
    """Have every command name this configuration from now on, if it would not find it by itself."""
    found = Path(os.environ.get(VARIABLE) or DEFAULT_CONFIG)
    _options[:] = ["--config", str(file.absolute())] if file and file.absolute() != found.absolute() else []


def command(*words: str | Path) -> str:
    """A command of ours, quoted for the shell."""
    elsewhere = Path(sys.argv[0]).name == "visiond" and not shutil.which("visiond")  # not on the PATH
    return shlex.join([os.path.abspath(sys.argv[0]) if elsewhere else "visiond", *map(str, words), *_options])


def quantity(number: int, noun: str) -> str:
    """ "1 image", "2,000 images"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
