"""Compares the ledger with the sidecars and reasons, for people (verify.py) and every week (schedule.py)."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec

from daemon.config.loading import Config
from daemon.core.errors import LedgerUnusable
from daemon.core.files import sync_folders
from daemon.core.hints import command
from daemon.core.jobs import JobStatus
from daemon.core.sidecar import sidecar_paths
from daemon.ledger.reading import Stop, Stopped
from daemon.ledger.record import Record
from daemon.ledger.records import Reader, open_reader
from daemon.ledger.schema import trouble_named
from daemon.ledger.soundness import MOST
from daemon.maintenance.damaged_rows import DamagedRows
from daemon.maintenance.sidecars import Showing, SidecarState, folders_of, list_sidecars, stat_regular
from daemon.results.destinations import Destination, open_destinations, write_sidecar

MOST_PROVENANCE = 1 << 20  # bytes by which a sidecar may be longer than one that is written now
LOOKS = 3  # at an image that is published again meanwhile


def check_ledger(path: Path, stop: Stop) -> None:
    """Read the ledger from end to end. Raises Stopped, LedgerDamaged, LedgerUnusable."""
    with trouble_named(path), contextlib.closing(Reader(path)) as reader:
        reader.check(lambda: not stop())
    if stop():
        raise Stopped


def check_some(config: Config, part: int, parts: int, stop: Stop) -> str:
    """Compare one of so many equal parts of the sidecars with the ledger, while a daemon works. Returns a sentence that
    says how many are not as it says. Raises Stopped, LedgerDamaged, LedgerUnusable."""
    checked, amiss = 0, []
    with open_reader(config) as reader:
        destinations, damaged_rows, last = (
            open_destinations(config),
            DamagedRows(reader),
            reader.last_number(),
        )
        for record in reader.published(after=last * part // parts):
            if stop():
                raise Stopped
            if record.id > last * (part + 1) // parts:
                break
            if (destination := destinations.get(record.inbox_path)) and not record.damage:
                checked += 1
                finding = _judge(destination, record, damaged_rows, fix=False)
                if finding.kind != "whole" and _is_lasting(damaged_rows, destinations, finding):
                    amiss.append(finding)
    if not amiss:
        return f"{checked:,} sidecars were compared with it, and are whole"
    example = f"{os.fsdecode(amiss[0].file)} is {amiss[0].kind}"
    return (
        f"{len(amiss):,} of {checked:,} sidecars are not as it says, for example {example}; `{command('verify')}` "
        f"lists all, `{command('repair')}` writes them again"
    )


def compare(reader: Reader, config: Config, showing: Showing, *, fix: bool = False) -> Iterator[SidecarState]:
    showing.wait("counting the sidecars")
    showing.begin("sidecars", reader.count_published())
    destinations = open_destinations(config)
    known: set[bytes] = set()
    damaged_rows = DamagedRows(reader)
    changed = yield from _compare_shown(reader, destinations, damaged_rows, known, fix=fix)
    # The reason of an image that waits for a retry stays; an image that is to be published may already have its sidecar.
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


def lasting(reader: Reader, config: Config, findings: Iterator[SidecarState]) -> Iterator[SidecarState]:
    """Without those that were only amiss because a daemon was about to change them."""
    destinations, damaged_rows, doubtful = open_destinations(config), DamagedRows(reader), []
    for finding in findings:
        if finding.kind in ("missing", "edited", "foreign"):
            doubtful.append(finding)
        else:
            yield finding
    yield from (finding for finding in doubtful if _is_lasting(damaged_rows, destinations, finding))


def _is_lasting(
    damaged_rows: DamagedRows, destinations: Mapping[bytes, Destination], finding: SidecarState
) -> bool:
    """Whether it is amiss by what the ledger says both before and after a look at the file: an image that ends is
    committed before its sidecar is written, and only then published."""
    reader = damaged_rows.reader
    if finding.kind == "foreign":
        return not _is_known(reader, destinations, finding.file)
    before = _find_shown(reader, finding.image)
    for _ in range(LOOKS):
        destination = destinations.get(before.inbox_path) if before else None
        if before is None or destination is None:
            return False
        if _judge(destination, before, damaged_rows, fix=False).kind == "whole":
            return False
        after = _find_shown(reader, finding.image)
        if after == before:
            return True
        before = after
    return False  # it changes all the time


def _shown(reader: Reader, after: int = 0, chunk: int = 256) -> list[Iterator[Record]]:
    """The images that have a sidecar or a reason, as in `Reader.published`. One that waits for a new result has the
    sidecar of its last one, unless this is damaged."""
    redone = (record for record in reader.redone(after, chunk) if not record.damage)
    return [reader.published(after, chunk), _aside(reader, JobStatus.FAILED, after, chunk), redone]


def _find_shown(reader: Reader, image: int) -> Record | None:
    firsts = (next(records, None) for records in _shown(reader, image - 1, chunk=1))
    return next((record for record in firsts if record and record.id == image), None)


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
    for record in itertools.chain(*_shown(reader)):
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
        detail = f"{error.strerror}: check its disk; nothing was changed"
        return SidecarState("unreadable", file, detail, record.id)


class _Numbered(msgspec.Struct):
    id: Annotated[int, msgspec.Meta(ge=1, le=MOST)]


def _stands(reader: Reader, destinations: Mapping[bytes, Destination], file: bytes) -> bool:
    """Whether it is the last result of an image that waits to be processed again."""
    record = _read_number(reader, file)
    if record is None or record.status is JobStatus.DONE or record.inbox_path not in destinations:
        return False
    return file in sidecar_paths(destinations[record.inbox_path].results, record.path)


def _is_known(reader: Reader, destinations: Mapping[bytes, Destination], file: bytes) -> bool:
    """Whether it is gone, or that of an image that has ended since the ledger was read."""
    if stat_regular(file) is None:
        return True
    record = _read_number(reader, file)
    destination = destinations.get(record.inbox_path) if record else None
    return bool(record and destination and file in destination.paths_of(record))


def _read_number(reader: Reader, file: bytes) -> Record | None:
    """The image that a sidecar names."""
    if stat_regular(file) is None:
        return None
    with open(file, "rb") as opened, contextlib.suppress(msgspec.DecodeError):
        return reader.find_number(msgspec.json.decode(opened.read(), type=_Numbered).id)
    return None


def _aside(reader: Reader, status: JobStatus, after: int = 0, chunk: int = 256) -> Iterator[Record]:
    """Images in the failed folder that have a newer version."""
    return (
        record
        for record in reader.set_aside(after, chunk)
        if record.status is status and os.path.lexists(record.location)
    )


def _find(destination: Destination, record: Record) -> SidecarState:
    """Compare the record's sidecar or reason, under any of its names."""
    paths = destination.paths_of(record)
    numbered = destination.numbered_reason_paths(record) if record.status is JobStatus.FAILED else ()
    for path in (*paths, *numbered):
        if _holds(path, record):
            return SidecarState("whole", path, image=record.id)
    there = next(filter(stat_regular, paths), None)
    kind, path = ("edited", there) if there else ("missing", paths[0])
    return SidecarState(kind, path, image=record.id)


def _holds(path: bytes, record: Record) -> bool:
    if stat_regular(path) is None:
        return False
    with open(path, "rb") as file:
        found = file.read(len(record.sidecar) + MOST_PROVENANCE)
    return found == record.sidecar or found == record.sidecar_as_told(found)
