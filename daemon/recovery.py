"""Ledger and sidecars held against each other, and each made again from the other. No model runs, and no daemon meanwhile.

Sidecars are made from the ledger, so one that is missing or edited is written again. Each holds all that its result
consists of, so a ledger that is lost or damaged is made anew from them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sqlite3
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec

from daemon.claims import claim_outputs
from daemon.config import Config
from daemon.control import open_reader
from daemon.errors import LedgerDamaged, LedgerUnusable, NothingFound, NotWritable, WrongArgument
from daemon.files import STDOUT, sync_folder, written_whole
from daemon.hints import command
from daemon.jobs import JobStatus, Version
from daemon.messages import Output
from daemon.names import remember_names
from daemon.records import Model, Reader, Record
from daemon.schema import connect, trouble_named
from daemon.sidecar import SCHEMA, Sidecar, path_of
from daemon.sinks import Sink, open_sinks, sidecar_paths, sync_folders, write_sidecar
from daemon.sources import taken_names
from daemon.state import DATABASE, LEDGER, closed_to_others, lock_state
from daemon.statements import SQL, run_rows
from stages.registry import STAGES

CHUNK = 512  # sidecars restored in one transaction
CLOCK_SECONDS = 0.001  # to which the times in a sidecar are cut
MOST = (1 << 63) - 1  # that fits into a column of SQLite


@dataclass(frozen=True, slots=True)
class Finding:
    """One sidecar. kind: "whole", "missing", "edited" or "foreign" (of no row) beside a ledger; "restored" or "left out"
    where the ledger is made from it."""

    kind: str
    file: bytes
    detail: str = ""


def verify(config: Config) -> Iterator[Finding]:
    """Hold every sidecar and reason of failure against the ledger.

    Raises NothingFound without a ledger, AlreadyRunning, LedgerDamaged.
    """
    with open_reader(config) as reader, lock_state(config.state.path):  # in this order: a lock makes the folder
        reader.check()
        yield from _compare(reader, config)


def repair(config: Config) -> Iterator[Finding]:
    """As `verify`, and write what is missing or edited again; the ledger itself, if that is lost or damaged.

    Raises AlreadyRunning, LedgerUnusable, NotWritable, NothingFound when there is neither.
    """
    _check_source(config)
    try:
        with lock_state(config.state.path), claim_outputs(config, make=False):
            with contextlib.suppress(NothingFound, LedgerDamaged), open_reader(config) as reader:
                reader.check()
                yield from _compare(reader, config, mend=True)
                remember_names(config)
                return
            with trouble_named(config.state.path / LEDGER):
                yield from _rebuild(config)
            remember_names(config)
    except LedgerUnusable:  # is an OSError too, and says more
        raise
    except OSError as error:
        mend = f"Make room or give this user the right to write there, then run `{command('repair')}` again."
        where = os.fsdecode(error.filename or config.state.path)
        raise NotWritable(f"{where} cannot be read or written: {error.strerror or error}. {mend}") from error


def _compare(reader: Reader, config: Config, *, mend: bool = False) -> Iterator[Finding]:
    sinks = open_sinks(config)
    known: set[bytes] = set()
    changed: set[bytes] = set()  # folders
    for record in itertools.chain(reader.published(), _aside(reader, JobStatus.FAILED)):
        if sink := sinks.get(record.inbox_path):
            finding = _find(sink, record)
            if mend and finding.kind != "whole":
                written = write_sidecar(record, *sink.paths_of(record))
                known.add(written)
                changed.add(os.path.dirname(written))
            known.add(finding.file)
            yield finding
    # What was said of the last failure of what is to be tried again stands, and what is to be published may be already.
    for record in itertools.chain(reader.pending(), reader.owed(), _aside(reader, JobStatus.GONE)):
        if sink := sinks.get(record.inbox_path):
            known.update(sink.paths_of(record))
    if mend:
        sync_folders(changed.union(_folders(sinks.values())))
    for file in _list_sidecars(*_folders(sinks.values())):
        if file not in known and not _stands(reader, sinks, file):
            yield Finding("foreign", file)


class _Numbered(msgspec.Struct):
    id: Annotated[int, msgspec.Meta(ge=1, le=MOST)]


def _stands(reader: Reader, sinks: Mapping[bytes, Sink], file: bytes) -> bool:
    """Whether it is the last result of an image that was to be annotated anew and has no other result yet."""
    if _stat_regular(file) is None:
        return False
    with open(file, "rb") as opened, contextlib.suppress(msgspec.DecodeError):
        record = reader.find_number(msgspec.json.decode(opened.read(), type=_Numbered).id)
        if record and record.status is not JobStatus.DONE and (sink := sinks.get(record.inbox_path)):
            return file in sidecar_paths(sink.results, record.path)
    return False


def _aside(reader: Reader, status: JobStatus) -> Iterator[Record]:
    """Images among the failed that have a newer version."""
    return (record for record in reader.set_aside() if record.status is status and os.path.lexists(record.location))


def _find(sink: Sink, record: Record) -> Finding:
    """The record's sidecar or reason, under any of its names."""
    data, paths = record.sidecar, sink.paths_of(record)
    numbered = sink.numbered_reason_paths(record) if record.status is JobStatus.FAILED else ()
    for path in (*paths, *numbered):
        if _holds(path, data):
            return Finding("whole", path)
    there = next(filter(os.path.isfile, paths), None)
    return Finding("edited", there) if there else Finding("missing", paths[0])


def _holds(path: bytes, data: bytes) -> bool:
    status = _stat_regular(path)
    if status is None or status.st_size != len(data):
        return False
    with open(path, "rb") as file:
        return file.read() == data


def _folders(sinks: Iterable[Sink]) -> list[bytes]:
    """Where sidecars and reasons of failure are."""
    return [folder for sink in sinks for folder in (sink.results, sink.failed)]


def _list_sidecars(*folders: bytes) -> Iterator[bytes]:
    for where, _, names in itertools.chain.from_iterable(map(os.walk, folders)):
        yield from (os.path.join(where, name) for name in names if name.endswith(b".json"))


def back_up(config: Config, file: Path, *, force: bool = False) -> None:
    """Copy the ledger as it is at one moment, by SQLite's own backup, whether or not a daemon writes to it.

    force: replace a file that is there. Raises NothingFound, LedgerDamaged, NotWritable, WrongArgument.
    """
    if file == STDOUT:
        raise WrongArgument("A backup is a database, which cannot be written to standard output; name a file.")
    with closed_to_others(), open_reader(config) as reader, written_whole(file, reader.path, force=force) as partial:
        reader.back_up(partial)


# The ledger from its sidecars. What was pending is found again by the daemon's scan of the inboxes.


def _check_source(config: Config) -> None:
    """Raises NothingFound when there is neither a ledger nor a sidecar."""
    path = config.state.path / LEDGER
    folders = _folders(Sink.of(inbox, config) for inbox in config.inbox)
    if not path.exists() and not any(_list_sidecars(*folders)):
        raise NothingFound(
            f"There is neither a ledger at {path} nor a sidecar in {config.output.results}: is this the right configuration? "
            f"`{command('run')}` begins anew."
        )


def _rebuild(config: Config) -> Iterator[Finding]:
    path = config.state.path / LEDGER
    fresh = path.with_name(f"{LEDGER}.new")
    for suffix in DATABASE:
        Path(f"{fresh}{suffix}").unlink(missing_ok=True)  # of a try that was interrupted
    with contextlib.closing(connect(fresh)) as connection:
        for number, inbox in enumerate(config.inbox, 1):
            sink = Sink.of(inbox, config)
            connection.execute(SQL["add_inbox"], (sink.inbox,))
            for folder in _folders([sink]):
                files = _list_sidecars(folder)
                while some := list(itertools.islice(files, CHUNK)):
                    yield from _restore(connection, some, folder, number, sink)
    kept = f"{path}.damaged-{time.strftime('%Y%m%dT%H%M%S')}"
    for suffix in DATABASE:
        keep = os.rename if suffix else os.link  # without a ledger, if only for a moment, a daemon would begin anew
        with contextlib.suppress(FileNotFoundError):
            keep(f"{path}{suffix}", f"{kept}{suffix}")
    fresh.rename(path)
    sync_folder(path.parent)


def _restore(
    connection: sqlite3.Connection, files: Sequence[bytes], folder: bytes, inbox: int, sink: Sink
) -> Iterator[Finding]:
    records: dict[bytes, Record] = {}
    for file in files:
        try:
            records[file] = _locate(_read(file, folder, inbox, sink), sink)
        except KeyError as error:
            yield Finding("left out", file, f"it has no {error}")
        except (OSError, ValueError, msgspec.DecodeError) as error:
            yield Finding("left out", file, str(error))
    restored = _write(connection, list(records.values()))
    for file, record in records.items():
        if record.id in restored:
            restored.remove(record.id)  # it is the first of those with that id
            yield Finding("restored", file)
        else:
            yield Finding("left out", file, f"another sidecar has the id {record.id} too")


def _read(file: bytes, folder: bytes, inbox: int, sink: Sink) -> Record:
    """The opposite of `Record.document`. Raises OSError, ValueError, KeyError or DecodeError when the file is no sidecar."""
    if _stat_regular(file) is None:  # nobody waits for a FIFO
        raise ValueError("it is no regular file")
    with open(file, "rb") as opened:
        data = opened.read()
    sidecar = msgspec.json.decode(data, type=Sidecar)
    parts = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    source = sidecar.source
    record = Record(
        id=sidecar.id,
        inbox=inbox,
        inbox_path=sink.inbox,
        path=path_of(source),
        location=b"",
        version=Version(sidecar.id, source.bytes, 0, 0),  # of no file that there is
        status=JobStatus[sidecar.status or "DONE"],
        attempts=sidecar.attempts or 1,
        seen_at=_seconds(source.seen_at),
        finished_at=_seconds(sidecar.finished_at) if sidecar.finished_at else None,
        digest=bytes.fromhex(source.digest.removeprefix("sha256:")),
        format=source.format,
        width=source.width,
        height=source.height,
        pages=source.pages,
        outputs={stage: Output(bytes(parts[STAGES[stage].key]), sidecar.timings[stage]) for stage in sidecar.models},
        models=[
            Model(stage, fingerprint, "" if stage == "ocr" else sidecar.notice)  # it names no stage; OCR's weights have none
            for stage, fingerprint in sidecar.models.items()
        ],
        bin=sidecar.bin.name if sidecar.bin else "",
        criteria=b"" if sidecar.status else bytes(msgspec.json.decode(parts["bin"], type=dict[str, msgspec.Raw])["criteria"]),
        reason=sidecar.reason,
        detail=sidecar.detail,
    )
    figures = (record.id, record.version.size, record.attempts, record.width, record.height, record.pages)
    if record.id < 1 or max(figures) > MOST:
        raise ValueError("it has a number that no image has")
    if source.inbox != sink.inbox.decode(errors="replace"):
        raise ValueError(f"it is of the inbox {source.inbox}, and this is the folder of {os.fsdecode(sink.inbox)}")
    if sidecar.schema != SCHEMA or file not in _places_of(record, sink):
        raise ValueError(f"it is no {SCHEMA} sidecar of a file of that name")
    return record


def _places_of(record: Record, sink: Sink) -> set[bytes]:
    """Where its sidecar may lie, or its reason, whatever became of its image."""
    places = set(sink.paths_of(record))
    if record.status is JobStatus.FAILED:
        places.update(sink.numbered_reason_paths(record))
        for image in taken_names(os.path.join(sink.failed, record.path), record.id):
            places.update(sink.paths_of(record, image))
    return places


def _locate(record: Record, sink: Sink) -> Record:
    """The record with its source, where that can still be told to be the one: so the scan does not take it for a new file."""
    source = os.path.join(sink.inbox, record.path)
    status = _stat_regular(source)
    if status and status.st_size == record.version.size and status.st_ctime_ns / 1e9 < record.seen_at + CLOCK_SECONDS:
        return replace(record, version=Version.of(status))
    home = sink.home_of(record)
    for place in reversed(taken_names(home, record.id)) if home else ():
        status = _stat_regular(place)
        if status and status.st_size == record.version.size:
            return replace(record, location=place, version=Version.of(status))
    return record


def _write(connection: sqlite3.Connection, records: Sequence[Record]) -> set[int]:
    """The opposite of `records.assemble`; returns the ids that are in the ledger now."""
    connection.execute("BEGIN")
    numbers: dict[Model, int] = {}
    for model in {model for record in records for model in record.models}:
        connection.execute(SQL["add_model"], (model.stage, model.fingerprint, model.notice))
        numbers[model] = connection.execute(SQL["model_id"], (model.stage, model.fingerprint)).fetchone()[0]
    run_rows(connection, "keep_content", [(r.digest, r.format, r.width, r.height, r.pages) for r in records if r.width])
    results = [
        (r.digest, numbers[model], r.outputs[model.stage].payload, r.outputs[model.stage].seconds)
        for r in records
        for model in r.models
    ]
    run_rows(connection, "keep_result", results)
    rows = [
        (
            *(r.id, r.inbox, r.path, *r.version, int(r.status), r.seen_at, r.attempts, r.location or None, r.digest or None),
            *(msgspec.json.encode([numbers[model] for model in r.models]).decode(), r.bin or None, r.criteria or None),
            *(r.reason or None, r.detail or None, r.finished_at),
        )
        for r in records
    ]
    restored = {row[0] for row in run_rows(connection, "restore", rows)}
    connection.execute("COMMIT")
    return restored


def _stat_regular(path: bytes) -> os.stat_result | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def _seconds(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp()
