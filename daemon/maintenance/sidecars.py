"""Finds sidecars and reads them, for `verify`, `repair` and a new ledger."""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from daemon.core.jobs import JobStatus, Version
from daemon.core.messages import Output
from daemon.core.sidecar import SCHEMA, ParsedSidecar, SecondLook, parse_sidecar, path_of
from daemon.inbox.sources import taken_names
from daemon.ledger.record import UNKNOWN, Look, Model, Record
from daemon.ledger.soundness import MOST
from daemon.results.destinations import Destination


class Showing(Protocol):
    """`daemon.terminal.progress.Progress`, for example."""

    def begin(self, unit: str, total: int | None = None) -> None:
        """From now on, each finding is one of `total` things; None: their number is not known."""

    def wait(self, sentence: str) -> bool:
        """Something goes on whose end cannot be foreseen; called often. Returns true."""


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


def stat_regular(path: bytes) -> os.stat_result | None:
    try:
        status = os.lstat(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
            raise  # it may well be there
        return None
    return status if stat.S_ISREG(status.st_mode) else None


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


def read_sidecar(file: bytes, inbox: int, destination: Destination) -> Record:
    """The record of a sidecar. Raises OSError, ValueError, KeyError or DecodeError when the file is not a sidecar."""
    if stat_regular(file) is None:  # reading a FIFO might never end
        raise ValueError("it is not a regular file")
    with open(file, "rb") as opened:
        parsed = parse_sidecar(opened.read())
    sidecar, source = parsed.sidecar, parsed.sidecar.source
    record = _record_of(parsed, inbox, destination.inbox)
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


def _record_of(parsed: ParsedSidecar, inbox: int, inbox_path: bytes) -> Record:
    """The opposite of `Record.document`. Raises ValueError or KeyError when it is not a sidecar."""
    sidecar, results, criteria = parsed
    source = sidecar.source
    return Record(
        id=sidecar.id,
        inbox=inbox,
        inbox_path=inbox_path,
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


def _seconds(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp()
