"""Makes a ledger from sidecars: each has all data of its result, so no model runs.

The daemon's scan of the inboxes finds pending images again.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from daemon.config.loading import Config
from daemon.config.state import LEDGER
from daemon.core.errors import InboxMoved
from daemon.core.files import DATABASE, rename_durably
from daemon.core.hints import command, quantity
from daemon.core.jobs import Version
from daemon.inbox.sources import taken_names
from daemon.ledger import identity
from daemon.ledger.record import Model, Record
from daemon.ledger.rows import add_model, content_row, keep_contents, look_rows, result_row
from daemon.ledger.schema import connect
from daemon.ledger.statements import SQL, run_rows
from daemon.maintenance.sidecars import (
    OtherInbox,
    Showing,
    SidecarState,
    folders_of,
    list_sidecars,
    read_sidecar,
    stat_regular,
)
from daemon.results.destinations import Destination

CHUNK = 512  # sidecars restored in one transaction
CLOCK_SECONDS = 0.001  # the precision of the times in a sidecar


def rebuild(config: Config, showing: Showing) -> Iterator[SidecarState]:
    """Replace the ledger by a new one, and keep the old one under another name. Raises InboxMoved; then nothing has changed."""
    path = config.state.path / LEDGER
    fresh = path.with_name(f"{LEDGER}.new")
    _remove(fresh)  # of an attempt that was interrupted
    showing.wait("counting the sidecars")
    destinations = [Destination.of(inbox, config) for inbox in config.inbox]
    showing.begin("sidecars", sum(1 for _ in list_sidecars(*folders_of(destinations))))
    with contextlib.closing(connect(fresh)) as connection:
        for number, destination in enumerate(destinations, 1):
            others, restored = Counter[str](), 0
            connection.execute(SQL["add_inbox"], (destination.inbox,))
            files = list_sidecars(*folders_of([destination]))
            while some := list(itertools.islice(files, CHUNK)):
                for finding in _restore(connection, some, number, destination, others):
                    restored += finding.kind == "restored"
                    yield finding
            for configured in config.inbox:
                del others[str(configured.path)]
            if others and not restored:
                _remove(fresh)
                raise _moved(destination, others)
        connection.execute(SQL["number_all_published"])
        present = identity.follow(path, connection)
    yield from _replace(path, fresh, present)


def _replace(path: Path, fresh: Path, present: identity.Identity) -> Iterator[SidecarState]:
    """Put the new ledger in the place of the old one, which gets another name."""
    kept = f"{path}.damaged-{time.strftime('%Y%m%dT%H%M%S')}"
    for suffix in DATABASE:
        # Without a ledger, even for a moment, a daemon would make a new one.
        keep = os.rename if suffix else os.link
        with contextlib.suppress(FileNotFoundError):
            keep(f"{path}{suffix}", f"{kept}{suffix}")
    # The identity before the ledger: after a kill in between, the ledger is refused and can be repaired again.
    identity.write(path.parent, present)
    rename_durably(fresh, path)
    if os.path.lexists(kept):
        yield SidecarState("kept", os.fsencode(kept))


def _remove(database: Path) -> None:
    for suffix in DATABASE:
        Path(f"{database}{suffix}").unlink(missing_ok=True)


def _moved(destination: Destination, others: Counter[str]) -> InboxMoved:
    """others: how many sidecars there are of each inbox that is not configured."""
    old, new, results = next(iter(others)), os.fsdecode(destination.inbox), os.fsdecode(destination.results)
    were = ", ".join(f"{quantity(count, 'sidecar')} of the inbox {inbox}" for inbox, count in others.items())
    return InboxMoved(
        f"No ledger was made: {results} has {were}, which is not in this configuration, and none of {new}. If that folder was "
        "moved or renamed, keep its old path in the configuration, and make that a link to the new one: "
        f"`{shlex.join(['ln', '-s', new, old])}`. Then run `{command('repair')}` again. "
        f"If you do not need these results, move the sidecars out of {results}."
    )


def _restore(
    connection: sqlite3.Connection,
    files: Sequence[bytes],
    inbox: int,
    destination: Destination,
    others: Counter[str],
) -> Iterator[SidecarState]:
    """others: counts the sidecars that are of another inbox, by its path."""
    records: dict[bytes, Record] = {}
    for file in files:
        try:
            records[file] = _locate(read_sidecar(file, inbox, destination), destination)
        except KeyError as error:
            yield SidecarState("left out", file, f"it has no {error}")
        except (ValueError, msgspec.DecodeError) as error:
            if isinstance(error, OtherInbox):
                others[error.inbox] += 1
            yield SidecarState("left out", file, str(error))
    restored = write(connection, list(records.values()))
    for file, record in records.items():
        if record.id in restored:
            restored.remove(record.id)  # the first sidecar with that id
            yield SidecarState("restored", file)
        else:
            yield SidecarState("left out", file, f"another sidecar has the id {record.id} too")


def _locate(record: Record, destination: Destination) -> Record:
    """The record with the version and place of its source, if that is certain: then the scan takes it for no new file."""
    source = os.path.join(destination.inbox, record.path)
    status = stat_regular(source)
    if (
        status
        and status.st_size == record.version.size
        and status.st_ctime_ns / 1e9 < record.seen_at + CLOCK_SECONDS
    ):
        return replace(record, version=Version.of(status))
    new_place = destination.new_place_of(record)
    for place in reversed(taken_names(new_place, record.id)) if new_place else ():
        status = stat_regular(place)
        if status and status.st_size == record.version.size:
            return replace(record, location=place, version=Version.of(status))
    return record


def write(connection: sqlite3.Connection, records: Sequence[Record]) -> set[int]:
    """Write records into the ledger, the opposite of `joining.assemble`; returns the ids that were added."""
    connection.execute("BEGIN")
    # Sidecars of one model may differ in what they say that it is: the newest is told last.
    ordered = sorted(records, key=lambda record: record.finished_at or 0.0)
    used = {(m, msgspec.json.encode(m.provenance)): m for record in ordered for m in record.all_models()}
    numbers = {model: add_model(connection, model) for model in used.values()}
    keep_results(connection, records, numbers)
    rows = [_job_row(record, numbers) for record in records]
    restored = {row[0] for row in run_rows(connection, "restore", rows)}
    looks = [row for r in records if r.id in restored for row in look_rows(r, numbers)]
    run_rows(connection, "restore_look", looks)
    connection.execute("COMMIT")
    return restored


def keep_results(
    connection: sqlite3.Connection, records: Sequence[Record], numbers: Mapping[Model, int]
) -> None:
    """Store what the bytes of these records are, and what models say about them, unless the ledger has that. numbers: of the
    models, in the ledger."""
    keep_contents(connection, [content_row(r) for r in records if r.width])
    results = [
        result_row(r.digest, numbers[model], model, output) for r in records for model, output in r.answers()
    ]
    run_rows(connection, "keep_result", results)


def _job_row(record: Record, numbers: Mapping[Model, int]) -> tuple[object, ...]:
    """numbers: of the models, in the new ledger."""
    models = msgspec.json.encode([numbers[model] for model in record.models]).decode()
    texts = (record.bin, record.criteria, record.reason, record.detail)
    bin_, criteria, reason, detail = (text or None for text in texts)
    return (
        *(record.id, record.inbox, record.path, *record.version, int(record.status), record.seen_at),
        *(record.attempts, record.location or None, record.digest or None, models, bin_, criteria),
        *(reason, detail, record.finished_at, record.checksum),
    )
