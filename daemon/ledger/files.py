"""The files that commands write: whole or not at all, and what goes wrong as an error of ours."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from daemon.config.loading import Config
from daemon.errors import NotWritable, WrongArgument
from daemon.hints import command
from daemon.ledger.soundness import is_blank
from daemon.state import DATABASE, IDENTITY, LEDGER

STDOUT = Path("-")


@contextlib.contextmanager
def written_whole(file: Path, ledger: Path, *, force: bool = False) -> Iterator[Path]:
    """Another name beside `file` to write under; at the end of the context it is renamed. force: in place of a file that is
    there, which may be the last good backup.

    Raises NotWritable, and WrongArgument for the ledger's own files: a daemon would go on writing to what was replaced.
    """
    file = file.resolve()
    if file in [Path(f"{ledger.resolve()}{suffix}") for suffix in DATABASE]:
        raise WrongArgument(f"{file} is the ledger itself; name another file.")
    if file.exists() and not file.is_file():
        raise NotWritable(f"{file} is no regular file; it is written beside and renamed. Name a file.")
    if file.exists() and not force:
        raise NotWritable(f"{file} already exists; name another file, or replace it with --force.")
    partial = file.with_name(f".{file.name}.partial")
    try:
        partial.unlink(missing_ok=True)
        yield partial
        sync_file(partial)  # or a power failure might leave the new name with nothing under it
        os.replace(partial, file)
        sync_folder(file.parent)
    except OSError as error:
        raise NotWritable(f"{file} cannot be written: {error.strerror or error}.") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def sync_file(file: Path) -> None:
    """Have what was written to it outlive a power failure, whoever wrote it. Raises OSError."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(folder: Path | bytes) -> None:
    """Have a renaming in it outlive a power failure; without, the old file may be back. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def written_into(folder: Path) -> Iterator[None]:
    """What cannot be made in the folder, or the folder itself, as NotWritable."""
    try:
        yield
    except OSError as error:
        raise NotWritable(f"{error.filename or folder} cannot be written: {error.strerror or error}.") from error


def tell_lost_ledger(config: Config) -> str:
    """What to say where results are there and the ledger is not, or is empty, and nothing beside it says that it was lost: a
    daemon begins a new one. Empty where that is not so."""
    path = config.state.path / LEDGER
    if not is_blank(path) or (config.state.path / IDENTITY).exists():
        return ""
    if not any(name.endswith(".json") for _, _, names in os.walk(config.output.results) for name in names):
        return ""
    mend = f"`{command('repair')}` makes it from them; `{command('run')}` begins a new one."
    return f"There is no ledger at {path}, but there are results: {mend}"
