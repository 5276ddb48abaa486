"""Sinks: additional outputs of records. To add one, write a class with `append`, and name it in SINKS.

`outbox.py` calls each sink with the records that it does not have yet, and tries again when it fails.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import aiofiles
from anyio import to_thread

from daemon.config.sections import OutputSection
from daemon.jobs import JobStatus
from daemon.ledger.files import sync_folder
from daemon.ledger.records import Record


class Sink(Protocol):
    """An output for finished records."""

    async def append(self, records: Sequence[Record]) -> None:
        """Write the records, in this order, so that they outlive a power failure when it returns.

        They are DONE or FAILED, and their sidecars are written. One call at a time. If it raises, or the daemon is killed,
        the same records come again, perhaps with others: write each at least once, and let the reader use its `id`. A call
        may be cancelled when the daemon stops.
        """


class JsonlSink:
    """All records that are DONE, of all inboxes, in one file of JSON lines, for programs that follow it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    async def append(self, records: Sequence[Record]) -> None:
        """A line that a crash has torn is ended first. Raises OSError."""
        lines = b"".join(record.sidecar for record in records if record.status is JobStatus.DONE)
        if not lines:
            return
        async with aiofiles.open(self.path, "ab+") as file:
            end = await file.seek(0, os.SEEK_END)
            if end:
                await file.seek(end - 1)
                lines = lines if await file.read(1) == b"\n" else b"\n" + lines
            await file.write(lines)
            await file.flush()
            await to_thread.run_sync(os.fsync, file.fileno(), abandon_on_cancel=True)
        if not end:  # the file is new, and so is its name
            await to_thread.run_sync(sync_folder, self.path.parent, abandon_on_cancel=True)


SINKS: Mapping[str, Callable[[OutputSection], Sink]] = {  # by their names in output.sinks
    "jsonl": lambda output: JsonlSink(output.jsonl_file),
}


def open_sinks(output: OutputSection) -> dict[str, Sink]:
    """Those that are configured, by name."""
    return {name: SINKS[name](output) for name in output.sinks}
