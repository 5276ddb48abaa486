"""The ledger: one SQLite file that knows every image and stores every result.

It is the source of truth. A result is durable when its transaction is committed. One thread (writer.py)
writes, over one connection, and commits in groups: all requests that came during the last commit go into the
next one, so many images share an fsync. A row is PENDING until the image ends. Which images are being worked
on is only in the daemon's memory, so a crash leaves no leases behind.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import structlog

from daemon.core.jobs import (
    Admitted,
    Change,
    Content,
    Ending,
    File,
    Job,
    JobStatus,
    Placed,
    Version,
)
from daemon.ledger import identity, looks, publications
from daemon.ledger.joining import (
    admit,
    assemble,
    find_renamed,
    find_unsettled,
    join_renamed,
    join_repeats,
    read_former,
)
from daemon.ledger.record import Committed, Model, Record
from daemon.ledger.rows import (
    JudgeAgain,
    Results,
    Root,
    Stored,
    add_models,
    end_row,
    job_of,
    postponed_row,
    put_off,
    repeat_of,
)
from daemon.ledger.statements import SQL, run_rows
from daemon.ledger.waiting import (
    CONTAINERS,
    PRIORITIES,
    WaitingImages,
    Wanted,
    has_containers,
    take_as_image,
)
from daemon.ledger.writer import Alone, T, Work, Writer
from daemon.system.clock import steady_seconds
from daemon.system.retry import Retry

log = structlog.get_logger()

NONE_CHANGED: Mapping[int, Version] = MappingProxyType({})


class Ledger:
    """The only writer. Every method is a request to the writing thread, and returns when it is durable.

    Raises LedgerUnusable if the disk is full or fails; then the request had no effect and may be repeated. What the
    pipeline asks for is repeated here, if there is a `Retry`.
    """

    def __init__(
        self,
        path: Path,
        observe_commit: Callable[[float], None] = lambda seconds: None,
        retry: Retry | None = None,
    ) -> None:
        """Open or create the file. observe_commit: called with the seconds of each commit.

        Raises LedgerDamaged, LedgerUnusable, LedgerTooNew, ConfigError.
        """
        self.path = path
        self._connection, self.remark = identity.open_ledger(path)  # a remark for the log, or none
        self._inbox_paths: dict[int, bytes] = {}
        self._priorities: dict[int, int] = {}  # inbox → priority
        # Inboxes, as JSON. Rows of other inboxes wait until these are configured again.
        self._configured = "[]"
        self._waiting = WaitingImages()
        self._unpacking: list[int] | None = None  # inboxes with files to unpack; None: not registered yet
        self.look_names: list[str] = []  # of the configured second looks
        self._kept = self._staying = "[]"  # inboxes whose files are not deleted, or not even moved, as JSON
        self.awaited = 0  # the number of waiting requests that stop the shrinking of the file
        self._writer = Writer(self._connection, path, observe_commit)
        self._ask, self._retry = self._writer.ask, retry
        self.results = Results()
        self.models = self.results.models  # all that the file knows, by number

    def close(self) -> None:
        """Finish all requests and close the file."""
        self._writer.close()
        with contextlib.suppress(sqlite3.Error):
            identity.note(self.path, identity.identity_of(self._connection))
        self._connection.close()

    async def identity(self) -> identity.Identity:
        """Which ledger it is, and the last number that an image got."""
        return await self._ask(identity.identity_of)

    # Setting up

    async def register(
        self,
        inboxes: Sequence[tuple[Root, int]],
        models: Iterable[Model],
        others: Sequence[Model] = (),
        unpacking: Collection[Root] = (),
        kept: Collection[Root] = (),
        moved: Collection[Root] = (),
    ) -> list[int]:
        """Add inboxes, with their priorities, and models; returns the inboxes' numbers.
        models: the current one of each stage. others: of second looks. unpacking: the inboxes with files to unpack. kept: those
        whose files are not deleted. moved: those whose files do not stay in them."""
        present = list(models)

        def work(connection: sqlite3.Connection) -> list[int]:
            numbers = []
            for path, priority in inboxes:
                connection.execute(SQL["add_inbox"], (os.fsencode(path),))
                number = connection.execute(SQL["inbox_id"], (os.fsencode(path),)).fetchone()[0]
                values = {"inbox": number, "priority": priority, "unpacks": path in unpacking, **PRIORITIES}
                connection.execute(SQL["set_priority"], values)
                self._priorities[number] = priority
                self._waiting.add([priority, priority + CONTAINERS])
                self._inbox_paths[number] = os.fsencode(path)
                numbers.append(number)
            add_models(connection, others)
            self.results.start(connection, present)
            connection.execute(SQL["note_start"])
            self._configured = msgspec.json.encode(numbers).decode()
            roots = list(zip(numbers, inboxes, strict=True))
            self._unpacking = [number for number, (path, _) in roots if path in unpacking]
            lasting = [(number, path) for number, (path, _) in roots if path in kept]
            self._kept = msgspec.json.encode([number for number, _ in lasting]).decode()
            self._staying = msgspec.json.encode([n for n, path in lasting if path not in moved]).decode()
            known = [row[0] for row in connection.execute(SQL["priorities"])]
            self._waiting.add(known)
            return numbers

        return await self._ask(work)

    async def begin_looks(self, names: Sequence[str]) -> int:
        """names: of the configured second looks. Returns how many images waited for others, and do not any more."""
        self.look_names = list(names)
        return await self._ask(partial(looks.begin, names=names, inboxes=self._inbox_paths))

    async def bound_waits(self, retry_seconds: float, longest_seconds: float) -> None:
        """Limit each wait for another attempt to its own pause from now,
        even if the last daemon's clock was wrong."""
        bounds = {"now": steady_seconds(), "retry": retry_seconds, "longest": longest_seconds}
        await self._ask(lambda connection: connection.execute(SQL["bound_waits"], bounds))

    # Before a job

    async def admit(self, files: Sequence[File]) -> Admitted:
        """Add a row for each new version: PENDING, or SKIPPED if it is not a regular file. Older
        pending versions of the same file become GONE or, if they have a result, DONE again."""
        priorities = [self._priorities[f.inbox] + CONTAINERS * f.container for f in files]
        # Each file with each name that it has left. What was unpacked has the name of its container.
        left = [(file, before) for file in files if not file.container for before in file.before]
        return await self._soon(self.insist(partial(admit, files=files, priorities=priorities, left=left)))

    async def keep_marker(self, inbox: int, marker: bytes) -> None:
        """Store how far a listing of the inbox came; see `Reader.marker`."""
        await self.insist(lambda connection: connection.execute(SQL["keep_marker"], (marker, inbox)))

    async def next_jobs(
        self,
        limit: int,
        busy: Collection[int],
        inboxes: Collection[int] | None = None,
        only: Collection[int] | None = None,
        *,
        containers: bool = False,
    ) -> list[Job]:
        """Jobs to work on, as in `Wanted`. inboxes: None: all that are configured."""
        asked_of = self._inbox_paths.keys() if inboxes is None else inboxes
        wanted = Wanted(limit, busy, asked_of, only, containers)
        expected = self._waiting.expect(asked_of)
        rows, places = await self.insist(partial(self._waiting.find, wanted=wanted))
        self._waiting.move(places, expected)
        return [job_of(row) for row in rows]

    def read_again(self) -> None:
        """Let `next_jobs` begin with the first row: jobs that it has returned were lost."""
        self._waiting.read_again()

    async def seconds_to_next_try(self, since: float, without: Collection[int] = ()) -> float | None:
        """Seconds until the next postponed job is due; None if there is none. since: how many seconds ago `next_jobs` was
        asked; those that have become due since then count. without: inboxes to leave out."""
        asked_at = steady_seconds() - since
        wanted = self._configured
        if without:
            wanted = msgspec.json.encode(sorted(self._inbox_paths.keys() - set(without))).decode()
        row = await self.insist(
            lambda connection: connection.execute(SQL["next_again"], (asked_at, wanted)).fetchone()
        )
        return None if row[0] is None else max(0.0, float(row[0]) - steady_seconds())

    async def recall(self, digests: Mapping[int, bytes]) -> dict[int, Content]:
        """What the ledger knows about the bytes of these images' files: format and size, and the results of the daemon's
        models. By image."""
        wanted = set(digests.values())
        stored: Stored = await self.insist(lambda connection: self.results.read(connection, wanted))
        known = {}
        for image, digest in digests.items():
            if digest in stored.contents:
                outputs = stored.results.get(digest, {})
                numbers = self.results.numbers.items()
                had = {stage: outputs[number] for stage, number in numbers if number in outputs}
                known[image] = Content(digest, *stored.contents[digest], had)
        return known

    # After it

    async def keep(self, contents: Sequence[Content]) -> None:
        """Store the outputs of jobs that are not finished yet,
        so that work resumes at the next segment after a crash."""
        known = [(content, None) for content in contents]
        await self.insist(lambda connection: self.results.write(connection, known))

    async def blame(self, image: int, deaths: int) -> None:
        """Store how many workers died on the image alone, so that a restart does not reset the count."""
        await self.insist(lambda connection: connection.execute(SQL["blame"], (deaths, image)))

    async def end(self, said: Sequence[Ending], judge: JudgeAgain = lambda attempts: []) -> Committed:
        """Write how jobs ended, with all their results. A job whose file was replaced in the meantime is not among the
        newest and must not be published. If other results of the same bytes were stored first, the jobs get those and are
        judged again: what is published is what the ledger has. A job that already had a result and whose file is GONE
        keeps that result, and is DONE as before. So is the version before, if only the file's times or inode have
        changed: it gets these, the row of the job goes, and its ending says that it is a repeat. The same if only the
        file's name has changed: then the row that is left is not marked as published, and what that row's image needs
        before is waited for."""
        return await self.insist(partial(self._end, said=list(said), judge=judge))

    def _end(self, connection: sqlite3.Connection, said: list[Ending], judge: JudgeAgain) -> Committed:
        all_new = self.results.write(connection, [(e.content, e.checksums) for e in said])
        endings = said if all_new else self.results.settle(connection, said, judge)
        claimed = find_renamed(connection, [e.job for e in endings])
        if claimed:
            unsettled = find_unsettled(connection, claimed, self._kept)
            endings = put_off(endings, unsettled)
        records = {e.job.id: self.record_of(e) for e in endings if e.has_record and not e.checksums}
        ended = self._write_endings(connection, endings, records)
        repeats = () if all_new else join_repeats(connection, endings, ended, self._staying)
        mine = claimed & ended
        renamed = join_renamed(connection, endings, mine, self.models, self._kept) if mine else {}
        joined = dict.fromkeys(repeats) | renamed
        if self.look_names:
            looks.want(connection, endings, ended - joined.keys(), self.look_names)
        now = [repeat_of(e, joined[e.job.id]) if e.job.id in joined else e for e in endings]
        return Committed(now, ended, records)

    def _write_endings(
        self, connection: sqlite3.Connection, endings: Sequence[Ending], records: Mapping[int, Record]
    ) -> set[int]:
        """Returns the jobs that have ended, and whose files were not replaced in the meantime. records: by image, those whose
        checksums are not known."""
        postponed = [postponed_row(e) for e in endings if e.status is JobStatus.PENDING]
        connection.executemany(SQL["postpone"], postponed)
        standing = [(e.job.id,) for e in endings if e.keeps_result]
        rows = [
            end_row(e, records.get(e.job.id), self.results.numbers)
            for e in endings
            if e.status is not JobStatus.PENDING and not e.keeps_result
        ]
        ended = run_rows(connection, "stand", standing) + run_rows(connection, "end", rows)
        return {row[0] for row in ended}

    def record_of(self, ending: Ending) -> Record:
        """The record that an ending makes, without reading it from the file."""
        models = [self.models[self.results.numbers[stage]] for stage in ending.content.outputs]
        return Record.of(ending, self._inbox_paths[ending.job.inbox], models)

    async def mark_emitted(self, placed: Sequence[Placed], *, superseding: bool = False) -> dict[int, int]:
        """Mark images as published, except those that are held. superseding: mark earlier versions of the same files too,
        whose sources could not leave the inbox. Returns the images by the number of their publication, except those
        whose present result has a number already."""
        return await self.insist(partial(publications.mark, placed=placed, superseding=superseding))

    async def owed(self, after: int, limit: int) -> list[Record]:
        """Images that have ended and are not marked as published,
        by id: a crash may have interrupted their publication."""

        def work(connection: sqlite3.Connection) -> list[Record]:
            rows = connection.execute(SQL["owed"], (after, limit)).fetchall()
            return read_former(connection, list(assemble(connection, rows, self.models)))

        return await self.insist(work)

    async def annotate_again(self, ids: Sequence[int]) -> list[Change]:
        """Make images PENDING again whose stored results are damaged and cannot be published. Versions
        that a newer one has replaced are GONE instead. Returns each image's status before and after."""

        def work(connection: sqlite3.Connection) -> list[Change]:
            changes = []
            for number in ids:
                before = JobStatus(connection.execute(SQL["status_of"], (number,)).fetchone()[0])
                after = JobStatus.PENDING
                if not connection.execute(SQL["annotate_again"], {"id": number}).fetchall():
                    connection.execute(SQL["clear"], {"id": number, "now": time.time()})
                    after = JobStatus(connection.execute(SQL["status_of"], (number,)).fetchone()[0])
                changes.append(Change(before, after))
            return changes

        return await self.insist(work)

    async def moved_failures(self, limit: int) -> list[tuple[int, bytes, Version]]:
        """The last images that FAILED and were moved: their ids, and where their files are, in this version."""
        rows = await self.insist(
            lambda connection: connection.execute(SQL["moved_failures"], (limit,)).fetchall()
        )
        return [(id, location, Version(*version)) for id, location, *version in rows]

    async def put_back(
        self,
        status: JobStatus,
        ids: Collection[int],
        changed: Mapping[int, Version] = NONE_CHANGED,
        *,
        distrust: bool = False,
    ) -> int:
        """Make images that are FAILED, or DONE, PENDING again with a fresh set of attempts; returns how many.
        One that was DONE keeps its result until it has a new one. changed: files that have this version now.
        distrust: their results may be wrong, and are not used again."""
        unpacking = None if self._unpacking is None else msgspec.json.encode(self._unpacking).decode()
        rows = [{"id": number, "status": status, "unpacking": unpacking, **PRIORITIES} for number in ids]

        def work(connection: sqlite3.Connection) -> int:
            connection.executemany(SQL["forget_lost"], [(number,) for number in ids])
            renewed = [(version.size, version.mtime_ns, number) for number, version in changed.items()]
            connection.executemany(SQL["renew"], renewed)
            back = [row for row in rows if connection.execute(SQL["put_back"], row).rowcount]
            if distrust:
                connection.executemany(SQL["distrust"], [{"id": row["id"]} for row in back])
            return len(back)

        return await self._soon(self._ask(work))

    async def note_lost(self, ids: Sequence[int]) -> int:
        """A redo could not read the files of these images; returns of how many that was not known."""

        def work(connection: sqlite3.Connection) -> int:
            return sum(connection.execute(SQL["note_lost"], (number,)).rowcount for number in ids)

        return await self._soon(self._ask(work))

    async def oldest_pending(self) -> float | None:
        """When the image that waits longest was seen, in Unix seconds."""
        return await self._ask(self._waiting.oldest)

    async def has_containers(self, inboxes: Collection[int]) -> bool:
        """Whether files of these inboxes could be unpacked now."""
        return await self.insist(partial(has_containers, inboxes=inboxes))

    async def take_as_image(self, image: int) -> None:
        """A file that waited to be unpacked waits as an image from now on."""
        await self.insist(partial(take_as_image, number=image))
        self.read_again()

    async def run(self, work: Work | Alone) -> Any:
        """Run anything else in the writing thread. It shares a transaction with others,
        so it should take only milliseconds."""
        return await self._ask(work)

    async def insist(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """As `run`, until the disk takes it."""
        return await (self._retry("ledger", self._ask, work) if self._retry else self._ask(work))

    async def _soon(self, request: Awaitable[T]) -> T:
        """Make a request that must not wait until the file is shrunk, as an image or a person waits for it."""
        self.awaited += 1
        try:
            return await request
        finally:
            self.awaited -= 1
