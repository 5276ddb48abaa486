"""An archive, a document or a video in an inbox: which files are one, and how one is unpacked into the folder beside it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import structlog

from daemon.config.ignored import ignored_by
from daemon.config.loading import Config
from daemon.config.sections import Inbox
from daemon.core.jobs import Failure, File, Job, Version
from daemon.inbox.sources import WRITTEN, is_still_written, numbered_name
from daemon.inbox.walk import Unread, Walk
from daemon.results.destinations import Destination
from daemon.system.beneath import READ, open_beneath
from daemon.system.scarcity import AWAY, PASSING, SCARCE, cause_of
from daemon.unpacking.apart import Children, Interrupted, UnpackingStopped, UnpackOutcome, take_apart
from daemon.unpacking.folder import Contents, Mark, Most, NoRoom, choose_target, mark_of
from daemon.unpacking.kinds import FOLDER, TIFF, has_further_pages, kind_of
from daemon.unpacking.members import Rules
from daemon.unpacking.paths import exists, made_inner
from stages.contract.base import Reason

log = structlog.get_logger()

CHUNK = 512  # files that get their rows together
VANISHED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.ENXIO, errno.ESTALE)


class Gone(Exception):
    """The file is not there, or has changed since it was found."""


class Unpacked(NamedTuple):
    """folder: its path in the inbox."""

    folder: bytes
    outcome: UnpackOutcome


class Containers:
    """The files of inboxes that are to be unpacked. All of its methods may wait for a disk, so they run in threads, except
    `kind_of`."""

    def __init__(
        self,
        config: Config,
        inboxes: Mapping[int, Inbox],
        destinations: Mapping[int, Destination],
        *,
        once: bool = False,
    ) -> None:
        """inboxes: by number. once: the daemon ends when all is done, and so nothing waits until a disk has room."""
        self._once = once
        self._inboxes = {number: inbox for number, inbox in inboxes.items() if inbox.unpack}
        self._destinations = destinations
        self._limits = config.pipeline.limits()
        self._settings = config.unpacking
        self.children = Children()
        self._waits: set[int] = set()  # files of which the log says that they wait

    def kind_of(self, inbox: int, path: bytes) -> str:
        return kind_of(path, self._inboxes[inbox].unpack) if inbox in self._inboxes else ""

    def sort(self, files: list[File]) -> list[File]:
        """The same files; those to be unpacked are marked as containers."""
        return [
            file._replace(container=file.regular and self._is_container(file.inbox, file.path))
            for file in files
        ]

    def _is_container(self, inbox: int, path: bytes) -> bool:
        kind = self.kind_of(inbox, path)
        if kind == TIFF:  # with a single page it is an image
            with contextlib.suppress(OSError), self._opened(inbox, path) as fd:
                return has_further_pages(fd)
            return False
        return bool(kind)

    def unpack(self, job: Job, kind: str) -> Unpacked | Failure | None:
        """What was in it, or why it was not unpacked, or None if it is gone. Raises UnpackingStopped."""
        try:
            return self._take_apart(job, kind)
        except Gone:
            return None
        except Interrupted as trouble:
            return Failure(Reason.CONTAINER, str(trouble), transient=True)
        except NoRoom as trouble:
            waits = not (trouble.is_new or self._once)
            if waits:
                self._log_wait(job, cause_of(trouble))
            return Failure(
                Reason.CONTAINER,
                "what is in it would nearly fill the disk of the inbox; make room, then use `visiond retry`",
                transient=True,
                away=waits,
            )
        except OSError as error:
            if error.errno in (*SCARCE, *AWAY):
                self._log_wait(job, cause_of(error))
                return Failure(Reason.CONTAINER, f"{error.strerror}", transient=True, away=True)
            if error.errno == errno.ETXTBSY:
                return Failure(Reason.CONTAINER, WRITTEN, written=True)
            problem = f"it cannot be read, or unpacked into its inbox: {error.strerror}"
            return Failure(Reason.CONTAINER, problem, transient=error.errno in (*PASSING, errno.EROFS))
        except UnpackingStopped:
            raise
        except Exception as error:
            log.error("unpacking failed", path=os.fsdecode(job.path), exc_info=True)
            return Failure(
                Reason.CONTAINER, f"unpacking failed: {type(error).__name__}: {error}", transient=True
            )

    def _take_apart(self, job: Job, kind: str) -> Unpacked:
        """Raises Gone, Stopped, Interrupted, NoRoom, OSError."""
        destination, moved = self._destinations[job.inbox], bool(job.location)
        folder, name = os.path.split(job.path)
        names = [each + FOLDER for each in (name, numbered_name(name, job.id))]
        is_kept = destination.on_success == "keep"
        with self._opened_folder(job, folder) as parent:
            target, mark = choose_target(parent, names, job.version, moved=moved, replaces=is_kept)
            path = os.path.join(folder, target)
            if mark and mark.is_whole:  # by a daemon that was killed
                return Unpacked(path, UnpackOutcome(mark.files, mark.links))
            if not mark and exists(parent, target) and not mark_of(parent, target):
                problem = f"{os.fsdecode(target)} is in the way; move or rename it"
                return Unpacked(path, UnpackOutcome(0, problem=problem))
            if is_still_written(job.location or os.path.join(destination.inbox, job.path), job.seen_at):
                raise OSError(errno.ETXTBSY, WRITTEN)
            with self._opened_job(job) as fd:
                return Unpacked(path, self._fill(job, kind, fd, parent, target, mark))

    def _fill(
        self, job: Job, kind: str, fd: int, parent: int, target: bytes, mark: Mark | None
    ) -> UnpackOutcome:
        """Raises Gone, Stopped, Interrupted, NoRoom, OSError."""
        settings, limits = self._settings, self._limits
        folder = os.path.join(os.path.dirname(job.path), target)
        longest = self._destinations[job.inbox].longest_path - len(folder) - 1
        most = Most(settings.most_files, settings.most_bytes, longest, settings.most_ratio)
        ignored = ignored_by(self._inboxes[job.inbox].ignore)

        def is_ignored(member: bytes) -> bool:
            return ignored.hides(os.path.join(folder, member))

        rules = Rules(settings.dpi, settings.video_seconds, limits.max_pixels)
        with contextlib.closing(Contents(parent, target, job.version, most, is_ignored, mark)) as contents:
            outcome = take_apart(fd, kind, contents, rules, limits, self.children)
            if not job.version.is_of(os.fstat(fd), moved=bool(job.location)):
                raise Gone
            if outcome.files:
                contents.place(is_whole=not outcome.problem)
        return outcome

    def list_files(self, job: Job, folder: bytes) -> list[list[File]]:
        """What is in the folder, in groups."""
        root = self._destinations[job.inbox].inbox
        ignored = ignored_by(self._inboxes[job.inbox].ignore)
        found = Walk(root, ignored, True, Unread(root, logs=False)).files(folder)
        files = [File(job.inbox, path, Version.of(status)) for path, status in filter(None, found)]
        return [files[start : start + CHUNK] for start in range(0, len(files), CHUNK)]

    @contextlib.contextmanager
    def _opened(self, inbox: int, path: bytes, location: bytes = b"") -> Iterator[int]:
        """A descriptor of a file, or of a folder, of an inbox."""
        fd = os.open(location, READ) if location else open_beneath(self._destinations[inbox].inbox, path)
        try:
            yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _opened_job(self, job: Job) -> Iterator[int]:
        """Its file. Raises Gone, OSError."""
        with contextlib.ExitStack() as stack:
            with vanishing():
                fd = stack.enter_context(self._opened(job.inbox, job.path, job.location))
            if not job.version.is_of(os.fstat(fd), moved=bool(job.location)):
                raise Gone
            yield fd

    @contextlib.contextmanager
    def _opened_folder(self, job: Job, folder: bytes) -> Iterator[int]:
        """The folder in the inbox where it is or, if the daemon has moved it, was. Raises Gone, OSError."""
        with contextlib.ExitStack() as stack:
            with vanishing():
                fd = stack.enter_context(self._opened(job.inbox, b"." if job.location else folder or b"."))
                if job.location:
                    fd = stack.enter_context(made_inner(fd, [part for part in folder.split(b"/") if part]))
            yield fd

    def _log_wait(self, job: Job, why: str) -> None:
        """Once for each file."""
        if job.id not in self._waits:
            self._waits.add(job.id)
            log.warning("unpacking waits", path=os.fsdecode(job.path), why=why)


@contextlib.contextmanager
def vanishing() -> Iterator[None]:
    """Raises Gone for what is not there."""
    try:
        yield
    except OSError as error:
        if error.errno in VANISHED:
            raise Gone from error
        raise
