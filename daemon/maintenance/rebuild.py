"""Makes a ledger from sidecars: each has all data of its result, so no model runs.

The daemon's scan of the inboxes finds pending images again.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shlex
import sqlite3
import stat
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import msgspec

from daemon.config.loading import Config
from daemon.config.state import DATABASE, LEDGER
from daemon.core.errors import InboxMoved, LedgerDamaged
from daemon.core.hints import command, quantity
from daemon.core.jobs import JobStatus, Version
from daemon.core.messages import Output
from daemon.core.sidecar import SCHEMA, SecondLook, parse_sidecar, path_of
from daemon.inbox.sources import taken_names
from daemon.ledger import identity
from daemon.ledger.files import sync_folder
from daemon.ledger.record import UNKNOWN, Look, Model, Record
from daemon.ledger.rows import add_model, content_row, keep_contents, look_rows, result_row
from daemon.ledger.schema import connect
from daemon.ledger.soundness import MOST
from daemon.ledger.statements import SQL, run_rows
from daemon.maintenance.showing import Showing
from daemon.results.destinations import Destination

CHUNK = 512  # sidecars restored in one transaction
CLOCK_SECONDS = 0.001  # the precision of the times in a sidecar


@dataclass(frozen=True, slots=True)
class SidecarState:
    """One sidecar. kind, compared with a ledger: "whole", "missing", "edited", "foreign" (it has no row), "unreadable" or
    "damaged" (its row is); for a new ledger: "restored" or "left out". "kept" is not a sidecar but the place
    of the old ledger. image: its number; 0: it has none, or that does not matter."""

    kind: str
    file: bytes
    detail: str = ""
    image: int = 0


class OtherInbox(ValueError):
    """A sidecar is in the folder of another inbox than its own."""

    def __init__(self, inbox: str, destination: Destination) -> None:
        super().__init__(
            f"it belongs to the inbox {inbox}, but is in the folder of {os.fsdecode(destination.inbox)}"
        )
        self.inbox = inbox


def rebuild(config: Config, showing: Showing) -> Iterator[SidecarState]:
    """Replace the ledger by a new one, and keep the old one under another name. Raises InboxMoved;
    then nothing has changed."""
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
            for folder in folders_of([destination]):
                files = list_sidecars(folder)
                while some := list(itertools.islice(files, CHUNK)):
                    for finding in _restore(connection, some, folder, number, destination, others):
                        restored += finding.kind == "restored"
                        yield finding
            for configured in config.inbox:
                del others[str(configured.path)]
            if others and not restored:
                _remove(fresh)
                raise _moved(destination, others)
        connection.execute(SQL["number_all_published"])
        present = _follow(path, connection)
    kept = f"{path}.damaged-{time.strftime('%Y%m%dT%H%M%S')}"
    for suffix in DATABASE:
        # Without a ledger, even for a moment, a daemon would make a new one.
        keep = os.rename if suffix else os.link
        with contextlib.suppress(FileNotFoundError):
            keep(f"{path}{suffix}", f"{kept}{suffix}")
    # The identity before the ledger: after a kill in between, the ledger is refused and can be repaired again.
    identity.write(path.parent, present)
    fresh.rename(path)
    sync_folder(path.parent)
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


def _follow(path: Path, connection: sqlite3.Connection) -> identity.Identity:
    """The identity of the new ledger. No number is given twice, even if the sidecars
    of the last images were lost: the file `identity` may have an older number."""
    last = identity.identity_of(connection).last_number
    with contextlib.suppress(LedgerDamaged):
        known = identity.read(path.parent)
        last = max(last, known.last_number if known else 0)
    if 0 < last <= MOST - 2 * identity.MARGIN:
        identity.number_behind(connection, last + identity.MARGIN)
    return identity.identity_of(connection)


def _restore(
    connection: sqlite3.Connection,
    files: Sequence[bytes],
    folder: bytes,
    inbox: int,
    destination: Destination,
    others: Counter[str],
) -> Iterator[SidecarState]:
    """others: counts the sidecars that are of another inbox, by its path."""
    records: dict[bytes, Record] = {}
    for file in files:
        try:
            records[file] = _locate(read_sidecar(file, folder, inbox, destination), destination)
        except KeyError as error:
            yield SidecarState("left out", file, f"it has no {error}")
        except OtherInbox as error:
            others[error.inbox] += 1
            yield SidecarState("left out", file, str(error))
        except (ValueError, msgspec.DecodeError) as error:
            yield SidecarState("left out", file, str(error))
    restored = write(connection, list(records.values()))
    for file, record in records.items():
        if record.id in restored:
            restored.remove(record.id)  # the first sidecar with that id
            yield SidecarState("restored", file)
        else:
            yield SidecarState("left out", file, f"another sidecar has the id {record.id} too")


def read_sidecar(file: bytes, folder: bytes, inbox: int, destination: Destination) -> Record:
    """The record of a sidecar, the opposite of `Record.document`. Raises OSError, ValueError,
    KeyError or DecodeError when the file is not a sidecar."""
    if stat_regular(file) is None:  # reading a FIFO might never end
        raise ValueError("it is not a regular file")
    with open(file, "rb") as opened:
        data = opened.read()
    sidecar, results, criteria = parse_sidecar(data)
    source = sidecar.source
    record = Record(
        id=sidecar.id,
        inbox=inbox,
        inbox_path=destination.inbox,
        path=path_of(source),
        location=b"",
        version=Version(sidecar.id, source.bytes, 0, 0),  # of no existing file
        status=JobStatus[sidecar.status or "DONE"],
        attempts=sidecar.attempts or 1,
        seen_at=_seconds(source.seen_at),
        finished_at=_seconds(sidecar.finished_at) if sidecar.finished_at else None,
        digest=bytes.fromhex(source.digest.removeprefix("sha256:")),
        format=source.format,
        width=source.width,
        height=source.height,
        pages=source.pages,
        outputs={stage: Output(payload, sidecar.timings[stage]) for stage, payload in results.items()},
        # The sidecar does not name its stage; OCR's weights have no notice.
        models=[
            Model(
                stage,
                fingerprint,
                "" if stage == "ocr" else sidecar.notice,
                sidecar.provenance.get(stage, UNKNOWN.provenance),
            )
            for stage, fingerprint in sidecar.models.items()
        ],
        bin=sidecar.bin.name if sidecar.bin else "",
        criteria=criteria,
        reason=sidecar.reason,
        detail=sidecar.detail,
        looks={name: _look_of(look) for name, look in sidecar.second_looks.items()},
    )
    numbers = {"id": (1, sidecar.id), "bytes": (0, source.bytes), "attempts": (0, sidecar.attempts)}
    numbers |= {"width": (0, source.width), "height": (0, source.height), "pages": (1, source.pages)}
    for name, (least, number) in numbers.items():
        if not least <= number <= MOST:
            raise ValueError(f"its {name} is {number}; it must be from {least} to {MOST}")
    if source.inbox != destination.inbox.decode(errors="replace"):
        raise OtherInbox(source.inbox, destination)
    if sidecar.schema != SCHEMA or file not in _places_of(record, destination):
        raise ValueError(f"it is not a {SCHEMA} sidecar of a file with that name")
    return record


def _look_of(look: SecondLook) -> Look:
    output = None if look.reason else Output(bytes(look.result), look.seconds)
    return Look(Model(look.stage, look.model, look.notice, look.provenance), output, look.reason, look.detail)


def _places_of(record: Record, destination: Destination) -> set[bytes]:
    """All possible paths of its sidecar or its reason, wherever its image is now."""
    places = set(destination.paths_of(record))
    if record.status is JobStatus.FAILED:
        places.update(destination.numbered_reason_paths(record))
        for image in taken_names(os.path.join(destination.failed, record.path), record.id):
            places.update(destination.paths_of(record, image))
    return places


def _locate(record: Record, destination: Destination) -> Record:
    """The record with the version and place of its source, if
    that is certain: then the scan takes it for no new file."""
    source = os.path.join(destination.inbox, record.path)
    status = stat_regular(source)
    if (
        status
        and status.st_size == record.version.size
        and status.st_ctime_ns / 1e9 < record.seen_at + CLOCK_SECONDS
    ):
        return replace(record, version=Version.of(status))
    home = destination.home_of(record)
    for place in reversed(taken_names(home, record.id)) if home else ():
        status = stat_regular(place)
        if status and status.st_size == record.version.size:
            return replace(record, location=place, version=Version.of(status))
    return record


def write(connection: sqlite3.Connection, records: Sequence[Record]) -> set[int]:
    """Write records into the ledger, the opposite of `joining.assemble`; returns the ids that were added."""
    connection.execute("BEGIN")
    numbers: dict[Model, int] = {}
    # Sidecars of one model may differ in what they say that it is: the newest is told last.
    ordered = sorted(records, key=lambda record: record.finished_at or 0.0)
    used = {(m, msgspec.json.encode(m.provenance)): m for record in ordered for m in record.all_models()}
    for model in used.values():
        numbers[model] = add_model(connection, model)
    keep_contents(connection, [content_row(r) for r in records if r.width])
    results = [
        result_row(r.digest, numbers[model], model, output) for r in records for model, output in r.answers()
    ]
    run_rows(connection, "keep_result", results)
    rows = [_job_row(record, numbers) for record in records]
    restored = {row[0] for row in run_rows(connection, "restore", rows)}
    looks = [row for r in records if r.id in restored for row in look_rows(r, numbers)]
    run_rows(connection, "restore_look", looks)
    connection.execute("COMMIT")
    return restored


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


def stat_regular(path: bytes) -> os.stat_result | None:
    try:
        status = os.lstat(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
            raise  # it may well be there
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def _seconds(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp()


def folders_of(destinations: Iterable[Destination]) -> list[bytes]:
    """The folders with sidecars and reasons of failure."""
    return [folder for destination in destinations for folder in (destination.results, destination.failed)]


def list_sidecars(*folders: bytes) -> Iterator[bytes]:
    """Raises OSError if a folder cannot be listed: what is in it must not be taken for missing."""

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    for where, _, names in itertools.chain.from_iterable(os.walk(each, onerror=refuse) for each in folders):
        yield from (os.path.join(where, name) for name in names if name.endswith(b".json"))
