"""Further outputs of finished records, beside sidecars and bins."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import aiofiles
import anyio
from anyio import to_thread

from daemon.jobs import JobStatus
from daemon.ledger.records import Record


class JsonlSink:
    """All records of all inboxes in one file of JSON lines, for programs that follow it. A crash may repeat a record."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = anyio.Lock()  # what is owed of an inbox that answers late is appended beside the rest

    async def append(self, records: Sequence[Record]) -> None:
        """Durable when it returns; a line that a crash has torn is ended first. Raises OSError."""
        lines = b"".join(record.sidecar for record in records if record.status is JobStatus.DONE)
        if not lines:
            return
        async with self._lock, aiofiles.open(self.path, "ab+") as file:
            end = await file.seek(0, os.SEEK_END)
            if end:
                await file.seek(end - 1)
                lines = lines if await file.read(1) == b"\n" else b"\n" + lines
            await file.write(lines)
            await file.flush()
            await to_thread.run_sync(os.fsync, file.fileno())
