"""Files with tokens, keys and other secrets, and who may change daemon.toml."""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

from daemon.core.errors import ConfigError
from daemon.system.scarcity import cause_of


def read_secret(key: str, name: str) -> bytes:
    """Read a file that other users must not be able to read; its group may, as with credentials from systemd.
    Raises ConfigError."""
    try:
        with open(name, "rb") as file:
            data, mode = file.read(), os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise ConfigError([f"{key}: {name} cannot be read: {cause_of(error)}."]) from error
    if mode & stat.S_IRWXO:
        fix = shlex.join(["chmod", "o=", name])
        raise ConfigError(
            [f"{key}: every user can read or change {name}, but it must be secret; fix it with: {fix}"]
        )
    return data


def list_open(file: Path) -> list[str]:
    """Why other users can change daemon.toml, which names code that the daemon runs and folders whose files it deletes."""
    problems = []
    for path in (file.resolve(), file.resolve().parent):
        mode = path.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:  # a sticky folder lets only owners rename
            fix = shlex.join(["chmod", "o-w", str(path)])
            problems.append(
                f"every user can change {path}, and so decide which code the daemon runs and which files it deletes; fix it "
                f"with: {fix}"
            )
    return problems
