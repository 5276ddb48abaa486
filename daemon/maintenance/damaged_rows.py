"""Finds damaged rows of the ledger, and restores them from sidecars that match the checksums in the ledger."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import replace

import msgspec

from daemon.core.jobs import JobStatus
from daemon.ledger import checksums, identity, looks
from daemon.ledger.record import Record
from daemon.ledger.records import Reader
from daemon.ledger.rows import content_row, find_damaged, look_rows
from daemon.ledger.statements import SQL, run_rows
from daemon.maintenance.rebuild import keep_results
from daemon.maintenance.sidecars import SidecarState, read_sidecar
from daemon.results.destinations import Destination


class DamagedRows:
    """The damaged rows of a ledger. Compares them with sidecars."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self._numbers = {(model.stage, model.fingerprint): number for number, model in reader.models.items()}
        self._checked: set[int] = set()  # images
        self._named: set[tuple[bytes, int | None]] = set()  # rows of these that may be damaged

    def check(self, destination: Destination | None, record: Record, *, fix: bool) -> SidecarState:
        """Check an image whose rows are damaged. fix: copy its sidecar into the ledger if the sidecar is correct; if not, let
        the next start process the image again. destination: None for an inbox that is not configured."""
        self._note(record.id, record.digest)
        found = self._find_true_sidecar(destination, record) if destination else None
        if found is None:
            if fix:
                with self._writing() as connection:
                    connection.execute(SQL["annotate_again"], {"id": record.id})
            then = "the next `run` processes it again" if fix else "after `repair` it is processed again"
            what = "no sidecar has an undamaged copy" if destination else "its inbox is not configured"
            detail = f"{record.damage}: damaged in the ledger, and {what}; {then}"
            if destination is None:
                return self._of_the_ledger(record, detail)
            return SidecarState("damaged", destination.paths_of(record)[0], detail)
        file, sidecar = found
        self._note(sidecar.id, sidecar.digest)
        if fix:
            self._write(sidecar, record)
        then = "the ledger now has it again" if fix else "`repair` copies it into the ledger"
        return SidecarState(
            "damaged", file, f"{record.damage}: damaged in the ledger, but this sidecar is correct; {then}"
        )

    def check_unshown(self, *, fix: bool) -> Iterator[SidecarState]:
        """Check damaged results that no sidecar has. fix: delete them, so that nothing uses them,
        and also those of images that are to be processed again."""
        reader = self.reader
        with reader.lend() as connection:
            left = list(find_damaged(connection, reader.models, lambda: True))
        for digest, model in (key for _, key in left if key not in self._named):
            what = reader.name_of(digest, model)
            then = "it was removed" if fix else "`repair` removes it"
            yield SidecarState(
                "damaged", os.fsencode(reader.path), f"{what}: damaged, and no sidecar shows it; {then}"
            )
        if fix and left:
            with self._writing() as connection:
                # Once more: this may have migrated the ledger, which gives the rows other ids.
                left = list(find_damaged(connection, reader.models, lambda: True))
                for number, key in left:
                    statement = "forget_content_row" if key.model is None else "drop_result_row"
                    connection.execute(SQL[statement], (number,))

    def check_replaced(self, *, fix: bool) -> Iterator[SidecarState]:
        """Check damaged versions whose sidecar is now that of a newer version: no file has their data.
        fix: remove their data from the ledger, and keep only the row."""
        left = [
            record for record in self.reader.replaced() if record.damage and record.id not in self._checked
        ]
        for record in left:
            self._note(record.id, record.digest)
            then = "it is GONE now" if fix else "`repair` makes it GONE"
            detail = f"{record.damage}: damaged in the ledger, and a newer version of the file has replaced it; {then}"
            yield self._of_the_ledger(record, detail)
        if fix and left:
            with self._writing() as connection:
                connection.executemany(
                    SQL["clear"], [{"id": record.id, "now": time.time()} for record in left]
                )

    def _of_the_ledger(self, record: Record, detail: str) -> SidecarState:
        return SidecarState("damaged", os.fsencode(self.reader.path), f"image {record.id}: {detail}")

    def _note(self, number: int, digest: bytes) -> None:
        self._checked.add(number)
        self._named |= {(digest, model) for model in (None, *self.reader.models)}

    def _find_true_sidecar(self, destination: Destination, record: Record) -> tuple[bytes, Record] | None:
        numbered = destination.numbered_reason_paths(record) if record.status is JobStatus.FAILED else ()
        for file in (*destination.paths_of(record), *numbered):
            with contextlib.suppress(ValueError, KeyError, OverflowError, msgspec.DecodeError):
                sidecar = read_sidecar(file, record.inbox, destination)
                if self._is_true(sidecar, record):
                    return file, sidecar
        return None

    def _is_true(self, sidecar: Record, record: Record) -> bool:
        """Whether every row of the image agrees with the sidecar: it has the sidecar's checksum,
        or the same data and a damaged checksum."""
        if (sidecar.id, sidecar.path, sidecar.status) != (record.id, record.path, record.status):
            return False
        with self.reader.lend() as connection:
            return all(self._compare(connection, sidecar, record))

    def _compare(self, connection: sqlite3.Connection, sidecar: Record, record: Record) -> Iterator[bool]:
        (row,) = connection.execute(SQL["find_by_id"], (record.id,)).fetchall()
        checksum = sidecar.checksum
        yield checksums.holds(row["checksum"], lambda: checksum) or checksum == record.checksum
        for content in run_rows(connection, "contents", [(sidecar.digest,)] if sidecar.width else []):
            *values, own = content_row(sidecar)
            yield content["checksum"] == own or list(content)[:-1] == values
        yield looks.read_ended(connection, [record.id]).get(record.id, {}).keys() == sidecar.looks.keys()
        stored = {row["model"]: row for row in run_rows(connection, "results", [(sidecar.digest,)])}
        for model, output in sidecar.answers():
            number = self._numbers.get((model.stage, model.fingerprint))
            yield number is not None  # this ledger knows the model
            if result := stored.get(number):
                own = checksums.of_result(sidecar.digest, model, output)
                yield result["checksum"] == own or result["payload"] == output.payload

    def _write(self, sidecar: Record, record: Record) -> None:
        """Replace the damaged rows in the ledger by the sidecar's data."""
        by_model = {model: self._numbers[model.stage, model.fingerprint] for model in sidecar.all_models()}
        attempts = sidecar.attempts if sidecar.status is JobStatus.FAILED else record.attempts
        with self._writing() as connection:
            if sidecar.width:
                connection.execute(SQL["forget_content"], (sidecar.digest,))
            for model, _ in sidecar.answers():
                connection.execute(SQL["drop_result"], (sidecar.digest, by_model[model]))
            for name in sidecar.looks:
                connection.execute(SQL["drop_look"], (sidecar.id, name))
            keep_results(connection, [sidecar], by_model)
            run_rows(connection, "restore_look", look_rows(sidecar, by_model))
            numbers = msgspec.json.encode([by_model[model] for model in sidecar.models]).decode()
            models = numbers if sidecar.status is JobStatus.DONE else None
            known = (sidecar.digest, sidecar.bin, sidecar.criteria, sidecar.reason, sidecar.detail)
            digest, *result = (value or None for value in known)
            checksum = replace(sidecar, attempts=attempts).checksum
            times = (sidecar.seen_at, sidecar.finished_at)
            row = (digest, models, *result, attempts, *times, checksum, sidecar.id)
            connection.execute(SQL["right"], row)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction for each image, as damage is rare."""
        connection, _ = identity.open_ledger(self.reader.path)
        with contextlib.closing(connection):
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")
