"""Sinks: additional outputs of records. To add one, write a class like `Sink`, and name it in SINKS and in
`OutputSection.sinks` (daemon/config/output.py).

`outbox.py` calls each sink with the records that it does not have yet, and tries again when it fails.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from anyio import to_thread

from daemon.config.loading import Config
from daemon.config.output import FILE_SINKS
from daemon.core.errors import NotWritable
from daemon.core.files import SIDECAR
from daemon.core.jobs import JobStatus
from daemon.exports.lance import LanceSink
from daemon.ledger.record import Record
from daemon.results.files import FileSink
from daemon.results.labeling import LabelStudioSink
from daemon.results.uploads import StoreSink
from daemon.results.webhook import WebhookSink
from daemon.results.yolo import YoloSink
from daemon.system.mounts import KnownFolder
from stages.contract.folders import sync


class Sink(Protocol):
    """An output for finished records."""

    async def append(self, records: Sequence[Record]) -> None:
        """Write the records, in this order, so that they outlive a power failure when it returns.

        They are DONE or FAILED, and their sidecars are written. One call at a time. If it raises, or the
        daemon is killed, the same records come again, perhaps with others: write each at least once, and let
        the reader use its `id`. A call may be cancelled when the daemon stops.
        """

    def problem(self) -> str:
        """Why the sink cannot take records, as far as this machine knows without asking another one; empty if it
        probably can. For `visiond check`, and for `visiond status` while no daemon is running."""


class JsonlSink:
    """All records that are DONE, of all inboxes, in one file of JSON lines, for programs that follow it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder = KnownFolder(os.fsencode(path.parent))

    def problem(self) -> str:
        if not self.path.exists():
            return ""
        if not (self.path.is_file() and os.access(self.path, os.R_OK | os.W_OK)):
            return f"{self.path} is not a file that can be read and written"
        with self.path.open("rb") as file:
            return self._describe_foreign(file.read(len(SIDECAR)))

    @property
    def found(self) -> bool:
        """Whether there are lines already, as a former run or an export leaves them."""
        return self.path.is_file() and self.path.stat().st_size > 0

    def _describe_foreign(self, start: bytes) -> str:
        """What to do with a file that begins like this; empty if it may have lines of this sink, or a torn one."""
        if SIDECAR.startswith(start.split(b"\n")[0]):
            return ""
        return f"{self.path} has something else than results of visiond, so nothing is written to it: move it away"

    async def append(self, records: Sequence[Record]) -> None:
        """A line that a crash has torn is ended first. Raises OSError, NotWritable;
        then nothing of the records is in the file."""
        if lines := b"".join(record.sidecar for record in records if record.status is JobStatus.DONE):
            await to_thread.run_sync(self._append, lines, abandon_on_cancel=True)

    def _append(self, lines: bytes) -> None:
        self._folder.check()
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            if why := self._describe_foreign(os.pread(fd, len(SIDECAR), 0)):
                raise NotWritable(why)
            end = os.lseek(fd, 0, os.SEEK_END)
            lines = lines if not end or os.pread(fd, 1, end - 1) == b"\n" else b"\n" + lines
            try:
                left = memoryview(lines)
                while left:
                    left = left[os.write(fd, left) :]
                os.fsync(fd)
                if not end:  # the file is new, and so is its name
                    sync(self.path.parent)
                self._folder.check()
            except OSError:
                # Otherwise each try would leave a partial write that takes room from the results.
                os.ftruncate(fd, end)
                raise
        finally:
            os.close(fd)


SINKS: Mapping[str, Callable[[Config], Sink]] = {  # by their names in output.sinks
    "jsonl": lambda config: JsonlSink(config.output.jsonl_file),
    "webhook": lambda config: WebhookSink(config.output.webhook),
    "store": lambda config: StoreSink(
        config.output.store, {inbox.root: inbox.name for inbox in config.inbox}
    ),
    "lance": LanceSink,
    "yolo": YoloSink,
    **{name: partial(FileSink, name) for name in FILE_SINKS},
    "label-studio": LabelStudioSink,
}


def describe_found(sinks: Mapping[str, Sink], new: Collection[str]) -> Iterator[str]:
    """What those that are new go on with, and how to prevent that."""
    for name in new:
        sink = sinks[name]
        if isinstance(sink, JsonlSink) and sink.found and not sink.problem():
            yield f"sink {name} appends to {sink.path}, which has lines already; to keep an export as it is, move it away."


def check_settings(sinks: Iterable[Sink]) -> None:
    """Raises ConfigError if one has settings with which it would never send a record."""
    for sink in sinks:
        if isinstance(sink, WebhookSink):
            sink.check_secret()


def open_sinks(config: Config) -> dict[str, Sink]:
    """Those that are configured, by name."""
    return {name: SINKS[name](config) for name in config.output.sinks}
