"""Removes what was published for an image under a name that its file had before: its sidecar or reason, and its place in
a bin. It may be done again, and never touches what another image has there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from daemon.core.jobs import JobStatus
from daemon.core.sidecar import sidecar_paths
from daemon.ledger.record import Record
from daemon.results.destinations import Destination, check_folders
from stages.contract.files import NotAFile, read_file


def clear_former(records: Sequence[Record], destinations: Mapping[int, Destination]) -> set[bytes]:
    """records: as they are published now. Returns the folders in which something was removed. Runs in a thread. Raises
    OSError if the disk fails."""
    check_folders(records, destinations)
    folders: set[bytes] = set()
    for record in records:
        if destination := destinations.get(record.inbox):
            for path in record.former:
                folders |= _clear(destination, replace(record, path=path, bin=""))
    return folders


def _clear(destination: Destination, record: Record) -> set[bytes]:
    """Remove what the image of a record, which has its old path, has there. Returns the folders of that."""
    results = sidecar_paths(destination.results, record.path)
    reasons = destination.reason_paths(record) + destination.numbered_reason_paths(record)
    owners = {file: _owner_of(file) for file in results + reasons}
    mine = [file for file, owner in owners.items() if owner == record.id]
    for file in mine:
        destination.attempt(record, partial(os.unlink, file))
    is_taken = any(owners[file] not in (None, record.id) for file in results)
    bins: list[bytes] = []
    if record.status is JobStatus.DONE and destination.bins_mode in ("link", "copy") and not is_taken:
        destination.attempt(record, partial(destination.leave_other_bins, record))
        bins = [os.path.join(destination.bins, name, record.path) for name in destination.known_bins]
    return {os.path.dirname(file) for file in [*mine, *bins]}


class _Numbered(msgspec.Struct):
    id: int


def _owner_of(file: bytes) -> int | None:
    """The image whose sidecar or reason a file is; None if there is no such file."""
    nothing = FileNotFoundError, NotADirectoryError, IsADirectoryError, NotAFile
    with contextlib.suppress(*nothing, msgspec.DecodeError):
        return msgspec.json.decode(read_file(file), type=_Numbered).id
    return None
