"""Compares ledger and sidecars, and restores each from the other. No model runs,
and no daemon may run at the same time.

Sidecars are made from the ledger, so one that is missing or edited is written again. Each
has all data of its result, so a ledger that is lost or damaged is made again from them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec

from daemon.config.loading import Config
from daemon.config.state import IDENTITY, LEDGER, closed_to_others, lock_state
from daemon.core.errors import (
    ConfigError,
    IdentityDamaged,
    LedgerDamaged,
    LedgerUnusable,
    NothingFound,
    NotWritable,
    OtherLedger,
    WrongArgument,
)
from daemon.core.hints import command
from daemon.core.jobs import JobStatus
from daemon.core.sidecar import sidecar_paths
from daemon.inbox.names import find_left_out, find_renamed, remember_names
from daemon.ledger import identity
from daemon.ledger.files import STDOUT, sync_folders, written_whole
from daemon.ledger.record import Record
from daemon.ledger.records import Reader, open_reader
from daemon.ledger.schema import trouble_named
from daemon.ledger.soundness import MOST, is_blank
from daemon.maintenance.damaged_rows import DamagedRows
from daemon.maintenance.rebuild import SidecarState, folders_of, list_sidecars, rebuild, stat_regular
from daemon.maintenance.showing import Nobody, Showing
from daemon.results.destinations import Destination, open_destinations, write_sidecar
from daemon.results.folder_locks import lock_outputs

NOBODY = Nobody()


def verify(config: Config, showing: Showing = NOBODY) -> Iterator[SidecarState]:
    """Compare every sidecar and reason of failure with the ledger.

    Raises NothingFound without a ledger, AlreadyRunning, LedgerDamaged; ConfigError if inboxes have other names than before.
    """
    # Open before locking: the lock makes the folder.
    with open_reader(config) as reader:
        if problems := find_renamed(config, reader):  # every sidecar would look edited or missing
            raise ConfigError(problems)
    with open_reader(config) as reader, lock_state(config.state.path):
        _check_file(reader, showing)
        yield from _compare(reader, config, showing)


def repair(config: Config, showing: Showing = NOBODY) -> Iterator[SidecarState]:
    """As `verify`, but write missing and edited sidecars again, and a new ledger if it is lost or damaged.

    Raises AlreadyRunning, LedgerUnusable, NotWritable, NothingFound when there is neither.
    """
    _check_source(config)
    try:
        with lock_state(config.state.path), lock_outputs(config, make=False):
            with contextlib.suppress(NothingFound, LedgerDamaged):
                yield from _settle_identity(config, showing)
                with open_reader(config) as reader:
                    _check_file(reader, showing)
                    yield from _compare(reader, config, showing, fix=True)
                    remember_names(config)
                    return
            with trouble_named(config.state.path / LEDGER):
                yield from rebuild(config, showing)
            remember_names(config)
    except LedgerUnusable:  # an OSError too, with a better message
        raise
    except OSError as error:
        fix = f"Make room or give this user the right to write there, then run `{command('repair')}` again."
        where = os.fsdecode(error.filename or config.state.path)
        raise NotWritable(f"{where} cannot be read or written: {error.strerror or error}. {fix}") from error


def _settle_identity(config: Config, showing: Showing) -> Iterator[SidecarState]:
    """If only the file `identity` is damaged, write it again from the ledger.

    Raises LedgerDamaged when the ledger is damaged too, or belongs elsewhere; NothingFound.
    """
    path = config.state.path / LEDGER
    try:
        with open_reader(config):
            return
    except IdentityDamaged as error:
        if is_blank(path):
            raise
        with trouble_named(path), contextlib.closing(Reader(path, of_any_id=True)) as reader:
            _check_file(reader, showing)
            if isinstance(error, OtherLedger) and not _has_made(reader, config, showing):
                raise
    identity.adopt(path)
    detail = (
        "it did not name the ledger in its folder, which is undamaged; it was written again from the ledger"
    )
    yield SidecarState("damaged", os.fsencode(config.state.path / IDENTITY), detail)


def _has_made(reader: Reader, config: Config, showing: Showing) -> bool:
    """Whether most sidecars belong to this ledger, so that it does not overwrite those of another one."""
    counts = Counter(finding.kind for finding in _compare(reader, config, showing))
    return counts["whole"] >= counts["edited"] + counts["foreign"]


def _check_file(reader: Reader, showing: Showing) -> None:
    """Raises LedgerDamaged."""
    sentence = f"reading the ledger, {reader.path.stat().st_size >> 20:,} MiB"
    reader.check_file(lambda: showing.wait(sentence))


def _compare(
    reader: Reader, config: Config, showing: Showing, *, fix: bool = False
) -> Iterator[SidecarState]:
    showing.wait("counting the sidecars")
    showing.begin("sidecars", reader.count_published())
    destinations = open_destinations(config)
    known: set[bytes] = set()
    damaged_rows = DamagedRows(reader)
    changed = yield from _compare_shown(reader, destinations, damaged_rows, known, fix=fix)
    # The reason of an image that waits for a retry stays; an
    # image that is to be published may already have its sidecar.
    for record in itertools.chain(reader.pending(), reader.owed(), _aside(reader, JobStatus.GONE)):
        if destination := destinations.get(record.inbox_path):
            for path in (record.path, *record.former):
                known.update(destination.paths_of(replace(record, path=path)))
        if record.damage:
            yield damaged_rows.check(destination, record, fix=fix)
    yield from damaged_rows.check_replaced(fix=fix)
    yield from damaged_rows.check_unshown(fix=fix)
    if fix:
        sync_folders(changed.union(folders_of(destinations.values())))
    for file in list_sidecars(*folders_of(destinations.values())):
        if file not in known and not _stands(reader, destinations, file):
            yield SidecarState("foreign", file)


def _compare_shown(
    reader: Reader,
    destinations: Mapping[bytes, Destination],
    damaged_rows: DamagedRows,
    known: set[bytes],
    *,
    fix: bool,
) -> Generator[SidecarState, None, set[bytes]]:
    """Compare the images that have a sidecar or a reason, and add these files to the known ones; returns the folders
    of those that were written."""
    changed: set[bytes] = set()
    # An image that waits for a new result has the sidecar of its last one, unless this is damaged.
    redone = (record for record in reader.redone() if not record.damage)
    for record in itertools.chain(reader.published(), _aside(reader, JobStatus.FAILED), redone):
        destination = destinations.get(record.inbox_path)
        if not (record.damage or destination):
            continue
        finding = _judge(destination, record, damaged_rows, fix=fix)
        if destination and finding.kind == "unreadable":
            known.update(destination.paths_of(record))
        if fix and destination and finding.kind in ("missing", "edited"):
            written = write_sidecar(record, *destination.paths_of(record))
            known.add(written)
            changed.add(os.path.dirname(written))
        known.add(finding.file)
        yield finding
    return changed


def _judge(
    destination: Destination | None, record: Record, damaged_rows: DamagedRows, *, fix: bool
) -> SidecarState:
    """What is so of a record's sidecar, or of its row if that is damaged. Raises LedgerUnusable."""
    try:
        if destination and not record.damage:
            return _find(destination, record)
        return damaged_rows.check(destination, record, fix=fix)
    except LedgerUnusable:
        raise
    except OSError as error:  # of the disk; the sidecar may be right, and stays
        file = os.fsencode(error.filename or damaged_rows.reader.path)
        return SidecarState("unreadable", file, f"{error.strerror}: check its disk; nothing was changed")


class _Numbered(msgspec.Struct):
    id: Annotated[int, msgspec.Meta(ge=1, le=MOST)]


def _stands(reader: Reader, destinations: Mapping[bytes, Destination], file: bytes) -> bool:
    """Whether it is the last result of an image that waits to be processed again."""
    if stat_regular(file) is None:
        return False
    with open(file, "rb") as opened, contextlib.suppress(msgspec.DecodeError):
        record = reader.find_number(msgspec.json.decode(opened.read(), type=_Numbered).id)
        if (
            record
            and record.status is not JobStatus.DONE
            and (destination := destinations.get(record.inbox_path))
        ):
            return file in sidecar_paths(destination.results, record.path)
    return False


def _aside(reader: Reader, status: JobStatus) -> Iterator[Record]:
    """Images in the failed folder that have a newer version."""
    return (
        record
        for record in reader.set_aside()
        if record.status is status and os.path.lexists(record.location)
    )


def _find(destination: Destination, record: Record) -> SidecarState:
    """Compare the record's sidecar or reason, under any of its names."""
    data, paths = record.sidecar, destination.paths_of(record)
    numbered = destination.numbered_reason_paths(record) if record.status is JobStatus.FAILED else ()
    for path in (*paths, *numbered):
        if _holds(path, data):
            return SidecarState("whole", path)
    there = next(filter(stat_regular, paths), None)
    return SidecarState("edited", there) if there else SidecarState("missing", paths[0])


def _holds(path: bytes, data: bytes) -> bool:
    status = stat_regular(path)
    if status is None or status.st_size != len(data):
        return False
    with open(path, "rb") as file:
        return file.read() == data


def describe_left_out(config: Config) -> list[str]:
    """Why the results of some inboxes were not compared or written again, a sentence for each inbox."""
    with contextlib.suppress(NothingFound, LedgerDamaged), open_reader(config) as reader:
        return find_left_out(config, reader)
    return []


def back_up(
    config: Config,
    file: Path,
    *,
    force: bool = False,
    step: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Copy the ledger as it is at one moment, by SQLite's own backup, whether or not a daemon writes to it.

    force: replace a file that is there. step: called with the MiB that are copied, and with all.
    Raises NothingFound, LedgerDamaged, NotWritable, WrongArgument.
    """
    if file == STDOUT:
        raise WrongArgument(
            "A backup is a database, which cannot be written to standard output; name a file."
        )
    with (
        closed_to_others(),
        open_reader(config) as reader,
        written_whole(file, reader.path, force=force) as partial,
    ):
        reader.back_up(partial, step)


def _check_source(config: Config) -> None:
    """Raises NothingFound when there is neither a ledger nor a sidecar."""
    path = config.state.path / LEDGER
    folders = folders_of(Destination.of(inbox, config) for inbox in config.inbox)
    if not path.exists() and not any(list_sidecars(*folders)):
        identity = config.state.path / IDENTITY
        begin = f"Remove {identity}, and `{command('run')}`" if identity.exists() else f"`{command('run')}`"
        raise NothingFound(
            f"There is neither a ledger at {path} nor a sidecar in {config.output.results}: is this the right configuration? "
            f"{begin} starts with an empty one."
        )
