"""Checks that the ledger's files stay in place while the daemon uses them.

A program can continue to write to a file that was deleted or replaced, and all of that is lost when it ends.
So the daemon checks now and then, and stops if necessary.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import anyio
from anyio import to_thread

from daemon.core.errors import LedgerDamaged
from daemon.core.files import DATABASE
from daemon.core.hints import command
from daemon.ledger import identity
from daemon.ledger.ledger import Ledger

Place = tuple[int, int]  # device and inode


class OpenFiles:
    """The files of an open ledger, as they were when it was opened."""

    def __init__(self, ledger: Path) -> None:
        self._ledger = ledger
        # The ledger itself comes first: whoever opens an emptied one, SQLite deletes its -wal.
        names = [f"{ledger}{suffix}" for suffix in sorted(DATABASE)]
        self._places = {file: place for file in map(Path, names) if (place := _place_of(file))}

    def check(self) -> None:
        """Raises LedgerDamaged when one was moved, deleted, replaced or emptied; OSError."""
        for file, place in self._places.items():
            now = _place_of(file)
            if now != place:
                gone = "is no longer there: it, or its folder, was moved or deleted"
                self._refuse(file, "was replaced by another file" if now else gone)
            if file == self._ledger and not os.stat(file).st_size:
                self._refuse(file, "was emptied")

    def _refuse(self, file: Path, happened: str) -> None:
        raise LedgerDamaged(
            f"{file} {happened} while the daemon used it. The daemon has stopped, because anything it writes now would be "
            f"lost. Put the ledger or its folder back, restore a backup, or run `{command('repair')}`: it makes a new ledger "
            "from the sidecars, and no model has to run again."
        )


async def guard(files: OpenFiles, ledger: Ledger, interval_seconds: Callable[[], float]) -> None:
    """Check at this interval, which may change, and note how many images the ledger has numbered. Raises LedgerDamaged."""
    noted: identity.Identity | None = None
    while True:
        await anyio.sleep(interval_seconds())
        with contextlib.suppress(OSError):
            # A disk that fails now may work at the next check; the pipeline reports it.
            await to_thread.run_sync(files.check, abandon_on_cancel=True)
            if (present := await ledger.identity()) != noted:
                await to_thread.run_sync(identity.note, ledger.path, present, abandon_on_cancel=True)
                noted = present


def _place_of(file: Path) -> Place | None:
    try:
        status = os.stat(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino
