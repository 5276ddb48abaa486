"""Files with tokens, keys and other secrets, and who may change daemon.toml."""

from __future__ import annotations

import codecs
import os
import re
import shlex
import stat
from pathlib import Path

from daemon.config.values import descriptor_of
from daemon.core.errors import ConfigError
from daemon.system.scarcity import cause_of

LEAST_CHARACTERS = 8
MAKE = "umask 077; openssl rand -hex 32"


def read_secret(key: str, name: str) -> bytes:
    """Read a file that other users must not be able to read; its group may, as with credentials from systemd.
    Raises ConfigError."""
    try:
        with open(name, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):  # to read a FIFO could wait for ever
                raise ConfigError([f"{key}: {name} is not a file."])
            data = file.read()
    except OSError as error:
        raise ConfigError([f"{key}: {name} cannot be read: {cause_of(error)}."]) from error
    if mode & stat.S_IRWXO:
        fix = shlex.join(["chmod", "o=", name])
        raise ConfigError(
            [f"{key}: every user can read or change {name}, but it must be secret; fix it with: {fix}"]
        )
    return data


def read_secret_line(key: str, name: str) -> bytes:
    """The secret in a file of one line. Raises ConfigError."""
    try:
        return clean_secret(read_secret(key, name))
    except ValueError as error:
        raise ConfigError(
            [f"{key}: {name} {error}. To make a new one: ({MAKE} > {shlex.quote(name)})"]
        ) from None


def clean_secret(data: bytes) -> bytes:
    """A secret without the byte order mark and the line end that an editor adds. It is printable ASCII, so that both sides have
    the same bytes. Raises ValueError, whose text does not repeat the secret."""
    token = data.removeprefix(codecs.BOM_UTF8).strip(b" \t\r\n")
    if not token:
        raise ValueError("is empty")
    if unfit := re.search(rb"[^ -~]", token):
        raise ValueError(
            f"has the byte {unfit[0].hex()}, and a secret may only have printable ASCII characters"
        )
    if token[:1] == token[-1:] and token[:1] in b"\"'`":
        raise ValueError("has quotes around the secret; remove them")
    if len(token) < LEAST_CHARACTERS:
        raise ValueError(f"has a secret of fewer than {LEAST_CHARACTERS} characters, which can be guessed")
    return token


def list_open(file: Path) -> list[str]:
    """Why other users can change daemon.toml, which names code that the daemon runs and folders whose files it deletes."""
    problems = []
    own = file.resolve()
    folders = dict.fromkeys((own.parent, file.absolute().parent))  # file may be a link
    for path in (own, *folders) if descriptor_of(file) is None else ():
        mode = path.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:  # a sticky folder lets only owners rename
            fix = shlex.join(["chmod", "o-w", str(path)])
            problems.append(
                f"every user can change {path}, and so decide which code the daemon runs and which files it deletes; fix it "
                f"with: {fix}"
            )
    return problems
