"""Writes the log in a thread, so that nothing else waits for its reader.

A pipe that nobody reads is full after 64 KiB, and then each write to it blocks forever. Here
only the thread blocks. Lines are kept up to a limit; later ones are dropped and counted.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import select
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TextIO

import structlog

MOST_BYTES = 1 << 18  # of waiting lines
GROUP_BYTES = 1 << 16  # written at once
DRAIN_SECONDS = 1.0  # for the last lines at the end, as nobody may read them
FILE_SECONDS = 10.0  # the same for a file, which only a slow disk holds up

Write = Callable[[bytes], None]

_open: Lines | None = None
_dropped = 0  # lines, in this process


class Lines:
    """Lines on their way to a stream, in order. Any thread may put some."""

    def __init__(self, write: Write, drain_seconds: float = DRAIN_SECONDS) -> None:
        self._write = write
        self._drain_seconds = drain_seconds
        # Never held during a blocking call; reentrant, as a finalizer may write a warning while we hold it.
        self._lock = threading.RLock()
        self._bytes = 0  # of waiting lines
        self._unreported = 0  # dropped lines that the log has not reported yet
        self._is_full = False  # until half of the waiting lines are written, so that a gap is reported once
        self._closed = False
        self._queue: queue.SimpleQueue[bytes | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="log", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Add a line. Never blocks."""
        if self._closed:
            self._try_to_write(line, 1)
            return
        with self._lock:
            is_notice = threading.current_thread() is self._thread
            self._is_full |= self._bytes + len(line) > MOST_BYTES
            if self._is_full and not is_notice:
                self._drop(1)
                return
            self._bytes += len(line)
            self._queue.put(line)

    def drain(self, seconds: float | None = None) -> bool:
        """Wait until all lines are written, at most this long (None: `drain_seconds`). Returns whether they are."""
        written = threading.Event()
        self._queue.put(written)
        return written.wait(self._drain_seconds if seconds is None else seconds)

    def close(self) -> bool:
        """Drain, and return whether all lines are written. Later lines are written at once."""
        is_written = self.drain()
        self._closed = True
        self._queue.put(None)
        return is_written

    def _drop(self, lines: int) -> None:
        global _dropped
        _dropped += lines
        self._unreported += lines

    def _write_all(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            else:
                self._write_group(item)

    def _write_group(self, first: bytes) -> None:
        """Write a line and those queued behind it, then report dropped lines."""
        group, size, after = [first], len(first), None
        while size < GROUP_BYTES and not self._queue.empty():
            after = self._queue.get()
            if not isinstance(after, bytes):
                break
            group.append(after)
            size += len(after)
            after = None
        is_written = self._try_to_write(b"".join(group), len(group))
        with self._lock:
            self._bytes -= size
            has_room = self._bytes <= MOST_BYTES // 2
            lost = self._unreported if is_written and has_room else 0
        if lost:  # without our lock: a thread that holds the logger's lock may wait for ours
            structlog.get_logger().error("the log was not read in time; lines were dropped", lines=lost)
        with self._lock:
            self._unreported -= lost
            self._is_full &= not has_room
        if isinstance(after, threading.Event):
            after.set()
        elif self._closed:
            self._queue.put(None)

    def _try_to_write(self, data: bytes, lines: int) -> bool:
        try:
            self._write(data)
        except (OSError, ValueError):  # a closed terminal, a full disk
            with self._lock:
                self._drop(lines)
            return False
        return True


class Stream(io.TextIOBase):
    """Replaces standard error: what is written to it becomes lines."""

    def __init__(self, lines: Lines, original: TextIO) -> None:
        self._lines = lines
        self._original = original
        self._begun = threading.local()  # each thread's unfinished line

    def write(self, text: str) -> int:
        whole, newline, rest = (getattr(self._begun, "line", "") + text).rpartition("\n")
        self._begun.line = rest
        if newline:
            self._put(whole + newline)
        return len(text)

    def flush(self) -> None:
        if rest := getattr(self._begun, "line", ""):
            self._begun.line = ""
            self._put(rest)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._original.isatty()

    def fileno(self) -> int:
        return self._original.fileno()

    def _put(self, text: str) -> None:
        self._lines.put(text.encode(self._original.encoding or "utf-8", "backslashreplace"))


@contextlib.contextmanager
def written_aside() -> Iterator[None]:
    """Within the context, a separate thread writes everything that this process sends to standard error.
    Not if a progress bar is shown: then somebody is watching the terminal."""
    global _open
    original = sys.stderr
    if hasattr(original, "rich_proxied_file"):
        yield
        return
    lines = _open = Lines(_writer_to(original), FILE_SECONDS if _is_file(original) else DRAIN_SECONDS)
    sys.stderr = Stream(lines, original)
    try:
        yield
    finally:
        sys.stderr, _open = original, None
        if not lines.close():
            _give_up()


def drain() -> None:
    """Write the waiting lines. For an exit that runs no `finally`."""
    if _open:
        _open.drain()


def dropped() -> int:
    """How many lines this process has dropped."""
    return _dropped


def _is_file(stream: TextIO) -> bool:
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):
        return False


def _writer_to(stream: TextIO) -> Write:
    """Write to the stream's descriptor if it has one. Its buffer has a lock, and the end of the process would wait for that."""
    try:
        stream.flush()
        return partial(_write_to, stream.fileno())
    except (OSError, ValueError):

        def write(data: bytes) -> None:
            stream.write(data.decode(errors="backslashreplace"))
            stream.flush()

        return write


def _write_to(fd: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:  # another process has set the shared pipe to non-blocking
            ready = select.poll()
            ready.register(fd, select.POLLOUT)
            ready.poll()


def _give_up() -> None:
    """Nobody reads standard error: redirect it, so that a last traceback does not block the end of the process."""
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stderr.fileno())
        os.close(null)
