"""Ledger and sidecars held against each other, and each made again from the other. No model runs, and no daemon meanwhile.

Sidecars are made from the ledger, so one that is missing or edited is written again. Each holds all that its result
consists of, so a ledger that is lost or damaged is made anew from them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from daemon.config.loading import Config
from daemon.control import open_reader
from daemon.errors import IdentityDamaged, LedgerDamaged, LedgerUnusable, NothingFound, NotWritable, OtherLedger, WrongArgument
from daemon.hints import command
from daemon.inbox.names import find_left_out, remember_names
from daemon.jobs import JobStatus
from daemon.ledger import identity
from daemon.ledger.files import STDOUT, written_whole
from daemon.ledger.records import Reader, Record
from daemon.ledger.schema import trouble_named
from daemon.ledger.soundness import MOST, is_blank
from daemon.recovery.evidence import Evidence
from daemon.recovery.rebuild import Finding, folders_of, list_sidecars, rebuild, stat_regular
from daemon.results.claims import claim_outputs
from daemon.results.destinations import Destination, open_destinations, sidecar_paths, sync_folders, write_sidecar
from daemon.state import IDENTITY, LEDGER, closed_to_others, lock_state


def verify(config: Config) -> Iterator[Finding]:
    """Hold every sidecar and reason of failure against the ledger.

    Raises NothingFound without a ledger, AlreadyRunning, LedgerDamaged.
    """
    with open_reader(config) as reader, lock_state(config.state.path):  # in this order: a lock makes the folder
        reader.check_file()
        yield from _compare(reader, config)


def repair(config: Config) -> Iterator[Finding]:
    """As `verify`, and write what is missing or edited again; the ledger itself, if that is lost or damaged.

    Raises AlreadyRunning, LedgerUnusable, NotWritable, NothingFound when there is neither.
    """
    _check_source(config)
    try:
        with lock_state(config.state.path), claim_outputs(config, make=False):
            with contextlib.suppress(NothingFound, LedgerDamaged):
                yield from _settle_identity(config)
                with open_reader(config) as reader:
                    reader.check_file()
                    yield from _compare(reader, config, mend=True)
                    remember_names(config)
                    return
            with trouble_named(config.state.path / LEDGER):
                yield from rebuild(config)
            remember_names(config)
    except LedgerUnusable:  # is an OSError too, and says more
        raise
    except OSError as error:
        mend = f"Make room or give this user the right to write there, then run `{command('repair')}` again."
        where = os.fsdecode(error.filename or config.state.path)
        raise NotWritable(f"{where} cannot be read or written: {error.strerror or error}. {mend}") from error


def _settle_identity(config: Config) -> Iterator[Finding]:
    """Where the file `identity` alone is damaged, write it again from the ledger.

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
            reader.check_file()
            if isinstance(error, OtherLedger) and not _has_made(reader, config):
                raise
    identity.adopt(path)
    detail = "it did not name the ledger that is beside it, which is sound; it is written again from the ledger"
    yield Finding("damaged", os.fsencode(config.state.path / IDENTITY), detail)


def _has_made(reader: Reader, config: Config) -> bool:
    """Whether most sidecars that are there are this ledger's, so that it overwrites none of another one."""
    counts = Counter(finding.kind for finding in _compare(reader, config))
    return counts["whole"] >= counts["edited"] + counts["foreign"]


def _compare(reader: Reader, config: Config, *, mend: bool = False) -> Iterator[Finding]:
    destinations = open_destinations(config)
    known: set[bytes] = set()
    changed: set[bytes] = set()  # folders
    evidence = Evidence(reader)
    for record in itertools.chain(reader.published(), _aside(reader, JobStatus.FAILED)):
        destination = destinations.get(record.inbox_path)
        if record.doubt:
            finding = evidence.weigh(destination, record, mend=mend)
            known.add(finding.file)
            yield finding
        elif destination:
            finding = _find(destination, record)
            if mend and finding.kind in ("missing", "edited"):
                written = write_sidecar(record, *destination.paths_of(record))
                known.add(written)
                changed.add(os.path.dirname(written))
            known.add(finding.file)
            yield finding
    # What was said of the last failure of what is to be tried again stands, and what is to be published may be already.
    for record in itertools.chain(reader.pending(), reader.owed(), _aside(reader, JobStatus.GONE)):
        if destination := destinations.get(record.inbox_path):
            known.update(destination.paths_of(record))
        if record.doubt:
            yield evidence.weigh(destination, record, mend=mend)
    yield from evidence.weigh_replaced(mend=mend)
    yield from evidence.weigh_rest(mend=mend)
    if mend:
        sync_folders(changed.union(folders_of(destinations.values())))
    for file in list_sidecars(*folders_of(destinations.values())):
        if file not in known and not _stands(reader, destinations, file):
            yield Finding("foreign", file)


class _Numbered(msgspec.Struct):
    id: Annotated[int, msgspec.Meta(ge=1, le=MOST)]


def _stands(reader: Reader, destinations: Mapping[bytes, Destination], file: bytes) -> bool:
    """Whether it is the last result of an image that was to be annotated anew and has no other result yet."""
    if stat_regular(file) is None:
        return False
    with open(file, "rb") as opened, contextlib.suppress(msgspec.DecodeError):
        record = reader.find_number(msgspec.json.decode(opened.read(), type=_Numbered).id)
        if record and record.status is not JobStatus.DONE and (destination := destinations.get(record.inbox_path)):
            return file in sidecar_paths(destination.results, record.path)
    return False


def _aside(reader: Reader, status: JobStatus) -> Iterator[Record]:
    """Images among the failed that have a newer version."""
    return (record for record in reader.set_aside() if record.status is status and os.path.lexists(record.location))


def _find(destination: Destination, record: Record) -> Finding:
    """The record's sidecar or reason, under any of its names."""
    data, paths = record.sidecar, destination.paths_of(record)
    numbered = destination.numbered_reason_paths(record) if record.status is JobStatus.FAILED else ()
    for path in (*paths, *numbered):
        if _holds(path, data):
            return Finding("whole", path)
    there = next(filter(os.path.isfile, paths), None)
    return Finding("edited", there) if there else Finding("missing", paths[0])


def _holds(path: bytes, data: bytes) -> bool:
    status = stat_regular(path)
    if status is None or status.st_size != len(data):
        return False
    with open(path, "rb") as file:
        return file.read() == data


def tell_left_out(config: Config) -> list[str]:
    """Why results of some inboxes were neither compared nor written again, a sentence for each inbox."""
    with contextlib.suppress(NothingFound, LedgerDamaged), open_reader(config) as reader:
        return find_left_out(config, reader)
    return []


def back_up(config: Config, file: Path, *, force: bool = False) -> None:
    """Copy the ledger as it is at one moment, by SQLite's own backup, whether or not a daemon writes to it.

    force: replace a file that is there. Raises NothingFound, LedgerDamaged, NotWritable, WrongArgument.
    """
    if file == STDOUT:
        raise WrongArgument("A backup is a database, which cannot be written to standard output; name a file.")
    with closed_to_others(), open_reader(config) as reader, written_whole(file, reader.path, force=force) as partial:
        reader.back_up(partial)


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
