"""Walks through an inbox: finds every file in it, and every sub-folder that has to be skipped,
with the reason.

It uses full paths, as every later step (reading, results, bins) does. A folder whose path is longer than the
system allows is skipped. A walk by descriptors could enter it, but the files found there could not be
published.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import structlog

from daemon.config.ignored import Ignored, ignored_by
from daemon.config.sections import Inbox
from daemon.core.jobs import Version
from daemon.system.scarcity import cause_of

log = structlog.get_logger()

MOST_NAMED = 1000  # folders of an inbox whose names are kept; others are only counted
SHOWN = 20  # of them, in `visiond status` and `check`
CHECK_ENTRIES, CHECK_SECONDS = 100_000, 5.0  # the most that `check` reads of an inbox
LONGEST_SHOWN = 200  # characters of a path
LONGEST_PATH = 4095  # bytes (PATH_MAX)
TOO_LONG = (
    f"its path, or one in it, is over Linux's limit of {LONGEST_PATH:,} bytes, here or in an output folder; "
    "use shorter names"
)
_VANISHED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # since its folder was listed: no trouble

Found = tuple[bytes, os.stat_result]  # a file's path in the inbox, and its status from the system
Listed = tuple[
    bytes, Version, bool
]  # a file's path in the inbox, its version, and whether it is a regular file


@dataclass(slots=True)
class Unread:
    """The folders in an inbox that cannot be read now, by their path in it. b"" is the inbox itself,
    if it can be listed but the status of its files cannot be read."""

    root: bytes
    logs: bool = True
    causes: dict[bytes, str] = field(default_factory=dict)
    unnamed: int = 0  # others, as the last complete scan counted them
    _seen: set[bytes] = field(default_factory=set)  # in the current scan
    _unnamed: int = 0  # likewise

    def __len__(self) -> int:
        return len(self.causes) + self.unnamed

    def summary(self) -> str:
        """The number of folders, without their names."""
        count = len(self)
        return f"{count:,} folder{'' if count == 1 else 's'} in inbox {os.fsdecode(self.root)} cannot be read"

    def lines(self, most: int = SHOWN) -> list[str]:
        """The folders with their causes, up to a limit."""
        chosen = sorted(self.causes.copy().items())[:most]  # a thread may be changing it
        return [f"{self._say(path)}: {cause}" for path, cause in chosen]

    def begin_scan(self) -> None:
        """Start a scan of the whole inbox."""
        self._seen, self._unnamed = set(), 0

    def end_scan(self) -> None:
        """Remove folders that the scan did not find: they are gone,
        or inside another folder that cannot be read."""
        for path in self.causes.keys() - self._seen:
            del self.causes[path]
        self.unnamed = self._unnamed

    def note(self, path: bytes, error: OSError) -> None:
        """This folder, or something in it, cannot be read. Logged once, until it has been read or is gone."""
        known, cause = path in self.causes, TOO_LONG if error.errno == errno.ENAMETOOLONG else cause_of(error)
        if known or len(self.causes) < MOST_NAMED:
            self.causes[path] = cause
            self._seen.add(path)
            if not known and self.logs:
                log.warning(
                    "folder cannot be read; it is tried again at every scan",
                    path=self._say(path),
                    error=cause,
                )
            return
        self._unnamed += 1
        if not self.unnamed and self.logs:
            log.warning(
                "more folders cannot be read; they are only counted", path=self._say(path), error=cause
            )
        self.unnamed = max(self.unnamed, self._unnamed)

    def forget(self, path: bytes) -> None:
        """This folder has been read."""
        if self.causes.pop(path, None):
            log.info("folder can be read again", path=self._say(path))

    def _say(self, path: bytes) -> str:
        """The path; of a very long one the start and the end."""
        whole = os.fsdecode(os.path.join(self.root, path).rstrip(b"/"))
        return (
            whole
            if len(whole) <= LONGEST_SHOWN
            else f"{whole[: LONGEST_SHOWN // 2]}…{whole[-LONGEST_SHOWN // 2 :]}"
        )


@dataclass(frozen=True, slots=True)
class Walk:
    """How to walk an inbox. longest: a file with a longer path could not be published,
    and that would stop the daemon.

    enter: called with each folder before it is listed. answer: called with the error
    if the inbox itself cannot be listed, or with None once it has been listed.
    after: if the inbox is listed in the order of the paths, begin behind this one.
    """

    root: bytes
    ignored: Ignored
    recursive: bool
    unread: Unread
    longest: int = LONGEST_PATH  # bytes of a file's path in the inbox
    enter: Callable[[bytes], None] = lambda _: None
    answer: Callable[[OSError | None], None] = lambda _: None
    after: bytes = b""

    def files(self, subtree: bytes = b"") -> Iterator[Found | None]:
        """Every file, and None for entries to ignore. Files that are deleted during the walk are no error."""
        pending = [subtree]
        while pending:
            relative = pending.pop()
            self.enter(relative)
            trouble: OSError | None = None  # with an entry
            try:
                with os.scandir(os.path.join(self.root, relative)) as entries:
                    for entry in entries:
                        path = os.path.join(relative, entry.name) if relative else entry.name
                        found = None
                        try:
                            found = self._look(entry, path, pending)
                        except OSError as error:
                            # The folder can be listed but not entered, or the path is too long.
                            trouble = trouble if error.errno in _VANISHED else error
                        yield found
                self._judge(relative, trouble)
            except OSError as error:
                self._fail(relative, error)
            yield None

    def _look(self, entry: os.DirEntry[bytes], path: bytes, pending: list[bytes]) -> Found | None:
        """The file; None for an entry to ignore, and for a folder, which is added to those that are pending. Raises OSError."""
        is_folder = entry.is_dir(follow_symlinks=False)
        if self.ignored.ignores(path, is_folder=is_folder):
            return None
        if is_folder:
            if self.recursive:
                pending.append(path)
            return None
        status = entry.stat(follow_symlinks=False)
        if len(path) > self.longest:
            raise OSError(errno.ENAMETOOLONG, "")
        return path, status

    def _judge(self, relative: bytes, trouble: OSError | None) -> None:
        """A folder has been listed."""
        if not relative:
            self.answer(None)
        if trouble:
            self.unread.note(relative, trouble)
        else:
            self.unread.forget(relative)

    def _fail(self, relative: bytes, error: OSError) -> None:
        if not relative:
            self.answer(error)
        elif error.errno not in _VANISHED:
            self.unread.note(relative, error)


def find_unread(inbox: Inbox, longest: int) -> tuple[Unread, bool]:
    """The folders that cannot be read, and whether the walk was complete. It ends
    after CHECK_ENTRIES files or CHECK_SECONDS, as a mount may die during that."""
    unread = Unread(os.fsencode(inbox.path), logs=False)
    walk = Walk(unread.root, ignored_by(inbox.ignore), inbox.recursive, unread, longest)
    deadline, whole = time.monotonic() + CHECK_SECONDS, []

    def walk_through() -> None:
        for count, _ in enumerate(walk.files()):
            if count >= CHECK_ENTRIES or time.monotonic() > deadline:
                return
        whole.append(True)

    thread = threading.Thread(target=walk_through, name="walk", daemon=True)
    thread.start()
    thread.join(CHECK_SECONDS)
    return unread, bool(whole)
