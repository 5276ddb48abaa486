"""Removes the rows of files that were skipped and are gone: their owner has deleted them, or the inbox ignores them by now.

The rows are found over a separate connection, the files are looked for in the threads of their inboxes, and each group of
rows is checked again in the transaction that removes it. Whatever stops this, the next time goes on with what is left: a
row is removed whole, or stays.
"""

from __future__ import annotations

import itertools
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import anyio
import msgspec
from anyio import to_thread

from daemon.core.hints import quantity
from daemon.core.jobs import Change, JobStatus
from daemon.inbox.deleted import Missing, SkippedFile, find_deleted, find_ignored
from daemon.inbox.folder import Folder
from daemon.ledger.ledger import Ledger
from daemon.ledger.reading import Stop, Stopped
from daemon.ledger.statements import SQL
from daemon.maintenance.pruning import drop_references, find_rows
from daemon.monitoring.counts import Counts
from daemon.system.scarcity import cause_of

REST = 1.0  # after each group of rows, as a multiple of what it took

Folders = Mapping[int, Folder]


class Removed(NamedTuple):
    """Numbers of images: rows that were removed, and rows that are GONE since, in the place of earlier versions."""

    dropped: list[int]
    left: list[int]


@dataclass(slots=True)
class Forgotten:
    """What was done. away: inboxes whose files were not looked for, and why. hidden: missing files that may come back, and
    why this is so of the first."""

    deleted: int = 0
    ignored: int = 0
    hidden: int = 0
    why: str = ""
    away: dict[int, str] = field(default_factory=dict)

    def sentence(self) -> str:
        amounts = {"deleted": self.deleted, "ignored": self.ignored}
        gone = ", ".join(f"{number:,} {how}" for how, number in amounts.items() if number)
        parts = [f"forgot skipped files: {gone}" if gone else "no skipped file is gone"]
        parts += [f"{quantity(self.hidden, 'missing file')} may come back: {self.why}"] if self.hidden else []
        return "; ".join([*parts, *(f"{why}: its skipped files stay" for why in self.away.values())])


async def forget_skipped(ledger: Ledger, folders: Folders, counts: Counts, stop: Stop) -> Forgotten:
    """Forget the SKIPPED files of these inboxes that are gone, a few at a time, with a pause after each group. May be
    cancelled at any time. Raises Stopped, LedgerDamaged, LedgerUnusable."""
    done = Forgotten(away=_find_away(folders))
    last = await ledger.run(lambda connection: connection.execute(SQL["last_id"]).fetchone()[0])
    inboxes = msgspec.json.encode(list(folders)).decode()
    async for rows in find_rows(ledger.path, "skipped", 0, last=last, inboxes=inboxes):
        began = time.monotonic()
        if stop():
            raise Stopped
        for number, group in itertools.groupby(sorted(map(SkippedFile._make, rows), key=_inbox), key=_inbox):
            await _forget_some(ledger, folders[number], list(group), counts, done)
        await anyio.sleep(REST * (time.monotonic() - began))
    return done


_inbox = attrgetter("inbox")


def are_scanned(folders: Folders) -> bool:
    """Whether the first scan of each folder has ended, if it can be read."""
    return all(f.first_scanned_at or f.problem() or f.origin.is_remote for f in folders.values())


def _find_away(folders: Folders) -> dict[int, str]:
    """The inboxes that are not known to be there. A complete scan has found those that are."""
    return {
        number: folder.problem() or f"inbox {folder.settings.place} has not been scanned yet"
        for number, folder in folders.items()
        if not folder.origin.is_remote and (folder.problem() or not folder.first_scanned_at)
    }


async def _forget_some(
    ledger: Ledger, folder: Folder, files: list[SkippedFile], counts: Counts, done: Forgotten
) -> None:
    """Files of one inbox."""
    ignored = await to_thread.run_sync(find_ignored, folder, files)
    await _remove(ledger, ignored, "it is ignored now", counts)
    done.ignored += len(ignored)
    # Of a store, each file would be one request: their rows stay.
    if folder.origin.is_remote or folder.number in done.away:
        return
    passed_over = {file.id for file in ignored}
    try:
        missing = await _look(folder, [file for file in files if file.id not in passed_over])
    except OSError as error:  # also TimeoutError
        done.away[folder.number] = f"inbox {folder.settings.place} cannot be read: {cause_of(error)}"
        return
    await _remove(ledger, missing.deleted, "it was deleted", counts)
    done.deleted += len(missing.deleted)
    done.hidden, done.why = done.hidden + missing.hidden, done.why or missing.why


async def _look(folder: Folder, files: list[SkippedFile]) -> Missing:
    """Raises OSError if the inbox is away; TimeoutError if it does not answer."""
    with anyio.fail_after(folder.origin.answer_seconds[1]):
        return await folder.in_thread(find_deleted, folder, files)


async def _remove(ledger: Ledger, files: Sequence[SkippedFile], why: str, counts: Counts) -> None:
    if not files:
        return
    removed: Removed = await ledger.run(partial(remove, ids=[file.id for file in files], why=why))
    for _ in removed.dropped:
        counts.pruned(JobStatus.SKIPPED)
    counts.changed([Change(JobStatus.SKIPPED, JobStatus.GONE)] * len(removed.left))


def remove(connection: sqlite3.Connection, ids: Sequence[int], why: str) -> Removed:
    """Remove rows that are still SKIPPED. One that stands in the place of an earlier version with a result, or with a
    failure, becomes GONE: otherwise that version would be the newest again. Runs in the writing thread."""
    parameters = {"ids": msgspec.json.encode(ids).decode(), "detail": why, "now": time.time()}
    dropped, left = (
        [row[0] for row in connection.execute(SQL[name], parameters).fetchall()]
        for name in ("forget_skipped", "leave_skipped")
    )
    drop_references(connection, dropped)
    return Removed(dropped, left)
