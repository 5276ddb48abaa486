"""Writes the files of commands completely or not at all. Errors become exceptions of visiond."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from daemon.config.loading import Config
from daemon.config.state import DATABASE, IDENTITY, LEDGER
from daemon.core.errors import NotWritable, WrongArgument
from daemon.core.hints import command
from daemon.ledger.soundness import is_blank

STDOUT = Path("-")


@contextlib.contextmanager
def written_whole(file: Path, ledger: Path, *, force: bool = False) -> Iterator[Path]:
    """A temporary file in the same folder, which gets the name `file` at the end of the context.
    force: replace an existing file, which may be the last good backup.

    Raises NotWritable, and WrongArgument for the ledger's own
    files: a daemon would continue to write to the replaced one.
    """
    file = file.resolve()
    if file in [Path(f"{ledger.resolve()}{suffix}") for suffix in DATABASE]:
        raise WrongArgument(f"{file} is the ledger itself; name another file.")
    if file.exists() and not file.is_file():
        raise NotWritable(f"{file} is not a regular file, so it cannot be replaced. Name a file.")
    if file.exists() and not force:
        raise NotWritable(f"{file} already exists; name another file, or replace it with --force.")
    partial = file.with_name(f".{file.name}.partial")
    try:
        partial.unlink(missing_ok=True)
        yield partial
        sync_file(partial)  # otherwise a power failure might leave an empty file with this name
        os.replace(partial, file)
        sync_folder(file.parent)
    except OSError as error:
        raise NotWritable(f"{file} cannot be written: {error.strerror or error}.") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def sync_file(file: Path) -> None:
    """Flush a file to the disk, whoever wrote it. Raises OSError."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(folder: Path | bytes) -> None:
    """Flush a folder, so that a rename in it outlives a power failure; otherwise the old file may be back.
    Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def written_into(folder: Path) -> Iterator[None]:
    """Raises NotWritable if something in the folder, or the folder itself, cannot be made."""
    try:
        yield
    except OSError as error:
        raise NotWritable(
            f"{error.filename or folder} cannot be written: {error.strerror or error}."
        ) from error


def describe_lost_ledger(config: Config) -> str:
    """A warning if there are results but no ledger, or an empty one, and no file `identity`
    that says that it was lost: then a daemon makes a new ledger. Otherwise empty."""
    path = config.state.path / LEDGER
    if not is_blank(path) or (config.state.path / IDENTITY).exists():
        return ""
    if not any(name.endswith(".json") for _, _, names in os.walk(config.output.results) for name in names):
        return ""
    fix = f"`{command('repair')}` makes it from them; `{command('run')}` starts a new one."
    return f"There is no ledger at {path}, but there are results: {fix}"
