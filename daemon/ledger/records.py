"""Reads what the ledger knows about an image: for sidecars, `show`, `export` and scans. Never writes."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from daemon.config.loading import Config
from daemon.config.state import LEDGER, check_files
from daemon.core.errors import LedgerDamaged, NothingFound, NotPermitted
from daemon.core.hints import command, like_service
from daemon.core.jobs import JobStatus, Outdated, Waiting
from daemon.ledger import identity, looks, publications, schema
from daemon.ledger.identity import describe_lost_ledger
from daemon.ledger.joining import assemble, read_former
from daemon.ledger.reading import Connections, check_whole_file
from daemon.ledger.record import UNKNOWN, Model, Record
from daemon.ledger.rows import GoOn, find_damaged, read_model
from daemon.ledger.soundness import find_altered_tables
from daemon.ledger.statements import SQL, run_rows

BACKUP_PAGES = 4096  # copied between two reports: 16 MiB
MOST_OUTDATED = 100_000  # most versions to look at; 100,000 take 0.4 s on a slow core


class Expected(NamedTuple):
    """A file that should be in an inbox. waits: whether its version is PENDING."""

    path: bytes
    size: int
    mtime_ns: int
    waits: bool


class Reader:
    """Reads a ledger, with or without a running daemon. Any thread may use it."""

    def __init__(self, path: Path, *, of_any_id: bool = False) -> None:
        """of_any_id: ignore the file `identity`. Raises FileNotFoundError when there is no ledger yet,
        LedgerDamaged, LedgerUnusable, LedgerTooNew."""
        known = None if of_any_id else identity.expect(path)
        if not path.exists():
            raise FileNotFoundError(path)
        self.path = path
        self._connections = Connections(path)
        self.lend = self._connections.lend
        self.models: dict[int, Model] = {}
        try:
            with self.lend() as connection:
                if known and schema.read_version(path, connection) >= schema.WITH_CHECKSUMS:
                    identity.compare(path, known, identity.identity_of(connection))
            self._read_models()
        except sqlite3.DatabaseError as error:
            self.close()
            raise schema.explain(path, error) from error

    def close(self) -> None:
        """Threads that are reading may finish; a read that begins later raises ReaderClosed."""
        self._connections.close()

    def counts(self) -> dict[JobStatus, int]:
        """Versions by state. FAILED counts only the newest version of each file, as older ones need no attention."""
        found = {JobStatus(status): count for status, count in self._rows("counts")}
        return {status: found.get(status, 0) for status in JobStatus} | {
            JobStatus.FAILED: len(self.failed_ids())
        }

    def count_waiting(self) -> dict[int, Waiting]:
        """By inbox, how many images are PENDING, and when the first of them was seen. Reads all of these: half a
        second for a million."""
        return {row["inbox"]: Waiting(row["images"], row["oldest"]) for row in self._rows("waiting_by_inbox")}

    def bin_counts(self) -> dict[str, int]:
        """By bin, how many images `finished` returns."""
        return {row["bin"]: row["count"] for row in self._rows("bin_counts")}

    def count_published(self) -> int:
        """About how many images `published` returns."""
        return sum(self.bin_counts().values()) + len(self.failed_ids())

    def bins(self) -> list[str]:
        """All bins that some version is in or was in."""
        return [row["bin"] for row in self._rows("bins")]

    def inboxes(self) -> dict[int, bytes]:
        return {row["id"]: row["path"] for row in self._rows("inboxes")}

    def has_results(self, inbox: int) -> bool:
        """Whether some file of it has a sidecar, or a reason in the failed folder."""
        return bool(self._rows("has_results", inbox))

    def marker(self, inbox: int) -> bytes:
        """The last path of a listing that did not reach its end; empty if it did."""
        [row] = self._rows("marker", inbox)
        return bytes(row[0])

    def files_of(self, inbox: int) -> list[Expected]:
        """Some files that should be in the inbox: a thousand that wait, and the newest ones."""
        return [Expected(*row) for row in self._rows("files_of", inbox, inbox)]

    def find(self, name: str) -> list[Record]:
        """The newest version of each file that a name can mean, by the most exact way that finds any. The same letters may be
        written in two ways: macOS writes an accent as a character of its own."""
        spellings = dict.fromkeys(
            [name, unicodedata.normalize("NFC", name), unicodedata.normalize("NFD", name)]
        )
        return self.assemble(
            next(filter(None, (rows for each in spellings for rows in self._called(each))), [])
        )

    def _called(self, name: str) -> Iterator[list[sqlite3.Row]]:
        """Rows by number, path, a link to it, path in an inbox, path that the daemon moved it to, and the end of the path."""
        if name.isdecimal() and len(name) < 19:
            yield self._rows("find_by_id", int(name))
        given, inboxes = os.fsencode(name), self.inboxes()
        absolute = (os.path.abspath(given), os.path.realpath(given))
        for path in absolute:
            yield self._in_inboxes({inbox: os.path.relpath(path, root) for inbox, root in inboxes.items()})
        yield self._in_inboxes(dict.fromkeys(inboxes, given))
        roots = {inbox: os.path.join(root, b"") for inbox, root in inboxes.items()}
        # The whole URL of an object.
        yield self._in_inboxes({n: given.removeprefix(r) for n, r in roots.items() if given.startswith(r)})
        for path in absolute:
            yield self._rows("find_by_location", path)
        yield self._rows("find_by_end", b"/" + given, b"/" + given)

    def _in_inboxes(self, paths: Mapping[int, bytes]) -> list[sqlite3.Row]:
        """paths: by inbox."""
        return [row for inbox, path in paths.items() for row in self._rows("find_by_path", inbox, path)]

    def newest(self, status: JobStatus | None, limit: int) -> list[Record]:
        """Files whose newest version is in this state, or in any state with None; the newest first."""
        return self.assemble(self._rows("newest", status, status, limit))

    def failed_ids(self) -> list[int]:
        """Images that FAILED and have not been replaced since."""
        return [row["id"] for row in self._rows("failed")]

    def newest_done(self, *, with_results: bool) -> Iterator[Record]:
        """Files whose newest version is DONE and published, oldest first. Without their results, thousands are read at once."""
        return self._walk("newest_done", 256 if with_results else 4096, with_results=with_results)

    def count_outdated(
        self, inboxes: Collection[bytes], *, every_stage: bool, most: int = MOST_OUTDATED
    ) -> Outdated:
        """How many files of these inboxes are DONE by another model than the current one in at least one stage, as of the
        last start, without those that a redo could not read. every_stage: or lack the result of a stage. Looks at no more
        than `most` versions with such results: with the index, that takes a fraction of a second."""
        numbers = str([number for number, path in self.inboxes().items() if path in inboxes])  # as JSON
        with self.lend() as connection:
            if schema.read_version(self.path, connection) < schema.WITH_LOST:
                return Outdated(0)
            current = {row[0] for row in connection.execute(SQL["current_models"])}
            files, left, made = 0, most, ""
            while left and current and (row := connection.execute(SQL["next_models"], (made,)).fetchone()):
                made = row[0]
                try:
                    used = set(msgspec.json.decode(made, type=list[int]))
                except msgspec.MsgspecError:  # a damaged row: the next may be the same one for ever
                    return Outdated(files, at_least=True)
                if used != current and (every_stage or not used <= current):
                    wanted = {"models": made, "limit": left, "inboxes": numbers}
                    looked, newest = connection.execute(SQL["count_made"], wanted).fetchone()
                    files, left = files + newest, left - looked
            return Outdated(files, at_least=not left)

    def find_number(self, number: int) -> Record | None:
        return next(iter(self.assemble(self._rows("find_by_id", number))), None)

    def find_numbers(self, numbers: Sequence[int]) -> list[Record]:
        """The images with these numbers, in this order, as they were last published; without those that are gone."""
        with self.lend() as connection:
            rows = {
                row["id"]: row for row in run_rows(connection, "as_published", [(each,) for each in numbers])
            }
        return self.assemble([rows[each] for each in numbers if each in rows], tolerant=True)

    def finished(self, bins: Collection[str] = (), chunk: int = 256) -> Iterator[Record]:
        """Every file whose newest version is DONE, and every image that was moved; oldest first,
        a few in memory at a time. bins: only images of these."""
        wanted = msgspec.json.encode(bins).decode()
        return self._walk("finished", wanted, wanted, chunk)

    def answers_of_each_model(self, stage: str, bins: Collection[str] = ()) -> list[bytes]:
        """One result of each model of a stage that made some result that `finished` returns."""
        wanted = msgspec.json.encode(bins).decode()
        used = {
            number
            for row in self._rows("finished_models", wanted, wanted)
            for number in msgspec.json.decode(row["models"])
        }
        found = [
            self._rows("first_answer", number)
            for number in sorted(used)
            if self.models[number].stage == stage
        ]
        return [row["payload"] for rows in found for row in rows]

    def current_models(self) -> set[int]:
        """As of the last start; none if the ledger is too old to say."""
        with self.lend() as connection:
            is_known = schema.read_version(self.path, connection) >= schema.WITH_LOST
        return {row["id"] for row in self._rows("current_models")} if is_known else set()

    def count_results(self, model: int) -> int:
        return int(self._rows("count_results", model)[0][0])

    def published(self, after: int = 0, chunk: int = 256) -> Iterator[Record]:
        """Every image that should have a sidecar, or a reason in the failed folder, now. after: a number; only images with
        higher ones. chunk: images in memory at a time."""
        return self._walk("published", chunk, after=after)

    def last_number(self) -> int:
        """The highest of an image."""
        return int(self._rows("last_id")[0][0])

    def replaced(self) -> Iterator[Record]:
        """Every image that had a sidecar or a reason, and has a newer version with one."""
        return self._walk("replaced", 256)

    def pending(self) -> Iterator[Record]:
        """Every image that has not ended yet."""
        return self._walk("pending", 256)

    def redone(self, after: int = 0, chunk: int = 256) -> Iterator[Record]:
        """Every image that waits for a new result, as it was when its last result was published: DONE."""
        return self._walk("redone", chunk, tolerant=True, after=after)

    def set_aside(self, after: int = 0, chunk: int = 256) -> Iterator[Record]:
        """Every image that FAILED, was moved, and has a newer version. It is GONE if that version came before a retry."""
        return self._walk("set_aside", chunk, after=after)

    def owed(self) -> Iterator[Record]:
        """Every image that has ended and may not be published yet."""
        for record in self._walk("owed", 256):
            with self.lend() as connection:
                yield from read_former(connection, [record])

    def published_after(
        self, number: int, limit: int, *, for_sinks: bool = False
    ) -> tuple[dict[int, Record], int]:
        """By number, the records that were published after this number, in their order, and the highest number that was
        read, or the given one if there is none. An image that was replaced since and has no result has no
        record. One that cannot be read has a record with only its name and `damage`. for_sinks: an image has no new number
        because its file was renamed."""
        asked = {"after": number, "limit": limit}
        with self.lend() as connection:
            rows = connection.execute(
                SQL["publications_for_sinks" if for_sinks else "publications"], asked
            ).fetchall()
        ended = [row for row in rows if row["status"] in (JobStatus.DONE, JobStatus.FAILED)]
        records = self.assemble(ended, tolerant=True)
        found = {row["number"]: record for row, record in zip(ended, records, strict=True)}
        return found, rows[-1]["number"] if rows else number

    def sinks(self) -> dict[str, tuple[int, float | None]]:
        """By sink, how many records it does not have yet, and when it last took some, in Unix seconds."""
        with self.lend() as connection:
            if schema.read_version(self.path, connection) < schema.WITH_OUTBOX:
                return {}
            last, places = publications.read_last(connection), publications.read_places(connection)
        return {name: (last - place.number, place.succeeded_at) for name, place in places.items()}

    def count_looks(self, name: str) -> looks.Tally:
        """How many images wait for the second look of this name, or have had it."""
        with self.lend() as connection:
            return looks.count(connection, name)

    def look_names(self) -> list[str]:
        """Of all second looks that the ledger knows."""
        with self.lend() as connection:
            return looks.names(connection)

    def waits_for_look(self, image: int, name: str) -> bool:
        return bool(self._rows("waits_for_look", image, name))

    def check(self, go_on: GoOn = lambda: True) -> None:
        """Read the ledger from end to end, and compare every row with its checksum.
        go_on: called every few milliseconds; false stops early. Raises LedgerDamaged."""
        self.check_file(go_on)
        if found := next(self.damaged_rows(go_on), None) or next(self._damaged_endings(go_on), None):
            raise LedgerDamaged(
                f"{self.path} is damaged: {found}. Stop the daemon and run `{command('repair')}`: it restores what "
                "the sidecars have."
            )

    def check_file(self, go_on: GoOn = lambda: True) -> None:
        """Read the file from end to end, without checksums. Raises LedgerDamaged."""
        with self.lend() as connection:
            is_current = schema.read_version(self.path, connection) == schema.newest()
            if is_current and (found := find_altered_tables(connection)):
                raise schema.damaged(self.path, found)
            check_whole_file(connection, go_on)

    def damaged_rows(self, go_on: GoOn = lambda: True) -> Iterator[str]:
        """Every stored result, and every format and size, whose checksum does not match."""
        with self.lend() as connection:
            for _, (digest, model) in find_damaged(connection, self.models, go_on):
                if model is not None and model not in self.models:
                    self._read_models()  # a comparison may have brought it since the check began
                    if model in self.models:
                        continue
                yield self.name_of(digest, model)

    def name_of(self, digest: bytes, model: int | None) -> str:
        """The name of a row of stored results, for messages."""
        what = (
            "format and size" if model is None else f"the result of {self.models.get(model, UNKNOWN).stage}"
        )
        return (
            f"{what} of the bytes sha256:{digest.hex()}"
            if digest
            else f"{what} of bytes that are not known any more"
        )

    def _damaged_endings(self, go_on: GoOn) -> Iterator[str]:
        last = 0
        while go_on() and (rows := self._rows("all_endings", last, 1024)):
            records = self.assemble(rows)
            yield from (f"{record.damage} of image {record.id}" for record in records if record.damage)
            last = rows[-1]["id"]

    def back_up(self, file: Path, step: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Copy the ledger as of now into a new file, durably. The daemon may continue to write.
        step: called with the MiB that are copied, and with all. Raises OSError."""
        try:
            with contextlib.closing(sqlite3.connect(file)) as copy, self.lend() as connection:
                page_bytes = connection.execute("PRAGMA page_size").fetchone()[0]

                def report(_status: int, left: int, pages: int) -> None:
                    step(*(-((-count * page_bytes) >> 20) for count in (pages - left, pages)))

                connection.execute("BEGIN")  # all pages are of one moment, also between the portions
                try:
                    connection.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()
                    connection.backup(copy, pages=BACKUP_PAGES, progress=report)
                finally:
                    connection.rollback()
        except sqlite3.OperationalError as error:
            raise OSError(str(error)) from error

    def _walk(
        self,
        statement: str,
        *parameters: object,
        with_results: bool = True,
        tolerant: bool = False,
        after: int = 0,
    ) -> Iterator[Record]:
        last = after
        while rows := self._rows(statement, last, *parameters):
            yield from self.assemble(rows, with_results=with_results, tolerant=tolerant)
            last = rows[-1]["id"]

    def assemble(
        self, rows: Iterable[sqlite3.Row], *, with_results: bool = True, tolerant: bool = False
    ) -> list[Record]:
        with self.lend() as connection:
            if connection.execute(SQL["last_model"]).fetchone()[0] > max(self.models, default=0):
                self._read_models()  # a daemon has started with others since
            options = {"with_results": with_results, "tolerant": tolerant}
            return list(assemble(connection, list(rows), self.models, **options))

    def _read_models(self) -> None:
        # In place, because a check that is under way reads from it.
        self.models |= {row["id"]: read_model(row) for row in self._rows("models")}

    def _rows(self, statement: str, *parameters: Any) -> list[sqlite3.Row]:
        with self.lend() as connection:
            return connection.execute(SQL[statement], parameters).fetchall()


@contextlib.contextmanager
def open_reader(config: Config) -> Iterator[Reader]:
    """The ledger. Raises NothingFound if there is none yet, ConfigError if it is no file, LedgerDamaged if damage is found."""
    check_files(config.state.path)
    path = config.state.path / LEDGER
    try:
        with schema.trouble_named(path):
            try:
                reader = Reader(path)
            except PermissionError as error:
                raise NotPermitted(path) from error
    except FileNotFoundError:
        fix = (
            f"`{command('run')}` creates it. If you mean another one, name its configuration{like_service()}."
        )
        raise NothingFound(
            describe_lost_ledger(config) or f"There is no ledger at {path} yet; {fix}"
        ) from None
    with contextlib.closing(reader), schema.trouble_named(path):
        yield reader
