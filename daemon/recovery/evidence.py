"""When the ledger's data for an image is damaged: whether its sidecar is correct, judged by the checksums in the ledger."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import replace

import msgspec

from daemon.jobs import JobStatus
from daemon.ledger import checksums, identity
from daemon.ledger.records import Reader, Record
from daemon.ledger.rows import content_row, result_row
from daemon.ledger.statements import SQL, run_rows
from daemon.ledger.stored import find_damaged
from daemon.recovery.rebuild import Finding, read_sidecar
from daemon.results.destinations import Destination


class Evidence:
    """Compares sidecars with what the ledger stores, row by row."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._numbers = {(model.stage, model.fingerprint): number for number, model in reader.models.items()}
        self._weighed: set[int] = set()  # images
        self._named: set[tuple[bytes, int | None]] = set()  # rows of these that may be damaged

    def weigh(self, destination: Destination | None, record: Record, *, mend: bool) -> Finding:
        """An image whose rows are damaged. mend: copy its sidecar into the ledger if the sidecar is correct; if not, have the
        image annotated again. destination: none for an inbox that is not configured."""
        self._note(record.id, record.digest)
        told = self._find_true_sidecar(destination, record) if destination else None
        if told is None:
            if mend:
                self._annotate_again(record)
            then = "the next `run` annotates it again" if mend else "`repair` has it annotated again"
            what = "no sidecar has an undamaged copy" if destination else "its inbox is not configured"
            detail = f"{record.doubt}: damaged in the ledger, and {what}; {then}"
            if destination is None:
                return self._of_the_ledger(record, detail)
            return Finding("damaged", destination.paths_of(record)[0], detail)
        file, said = told
        self._note(said.id, said.digest)
        if mend:
            self._write(said, record)
        then = "the ledger now has it again" if mend else "`repair` copies it into the ledger"
        return Finding("damaged", file, f"{record.doubt}: damaged in the ledger, but this sidecar is correct; {then}")

    def weigh_rest(self, *, mend: bool) -> Iterator[Finding]:
        """Damaged results that no sidecar shows. mend: drop them, so that nothing uses them, as well as those of images that
        are to be annotated again."""
        reader = self._reader
        with reader.lend() as connection:
            left = list(find_damaged(connection, reader.models, lambda: True))
        for digest, model in (key for key in left if key not in self._named):
            what = reader.name_of(digest, model)
            then = "it was removed" if mend else "`repair` removes it"
            yield Finding("damaged", os.fsencode(reader.path), f"{what}: damaged, and no sidecar shows it; {then}")
        if mend and left:
            with self._writing() as connection:
                connection.executemany(SQL["drop_content"], [(key.digest,) for key in left if key.model is None])
                connection.executemany(SQL["drop_result"], [key for key in left if key.model is not None])

    def weigh_replaced(self, *, mend: bool) -> Iterator[Finding]:
        """Damaged versions whose sidecar is that of a newer one by now: none shows what was there. mend: have the ledger say no
        more of them than that they were there."""
        left = [record for record in self._reader.replaced() if record.doubt and record.id not in self._weighed]
        for record in left:
            self._note(record.id, record.digest)
            then = "it is GONE now" if mend else "`repair` makes it GONE"
            detail = f"{record.doubt}: damaged in the ledger, and a newer version of the file has its place; {then}"
            yield self._of_the_ledger(record, detail)
        if mend and left:
            with self._writing() as connection:
                connection.executemany(SQL["clear"], [{"id": record.id, "now": time.time()} for record in left])

    def _of_the_ledger(self, record: Record, detail: str) -> Finding:
        return Finding("damaged", os.fsencode(self._reader.path), f"image {record.id}: {detail}")

    def _note(self, number: int, digest: bytes) -> None:
        self._weighed.add(number)
        self._named |= {(digest, model) for model in (None, *self._reader.models)}

    def _find_true_sidecar(self, destination: Destination, record: Record) -> tuple[bytes, Record] | None:
        folder = destination.results if record.status is JobStatus.DONE else destination.failed
        numbered = destination.numbered_reason_paths(record) if record.status is JobStatus.FAILED else ()
        for file in (*destination.paths_of(record), *numbered):
            with contextlib.suppress(OSError, ValueError, KeyError, OverflowError, msgspec.DecodeError):
                said = read_sidecar(file, folder, record.inbox, destination)
                if self._is_true(said, record):
                    return file, said
        return None

    def _is_true(self, said: Record, record: Record) -> bool:
        """Whether every row of the image agrees with the sidecar: has its checksum, or says the same and has
        lost its own."""
        if (said.id, said.path, said.status) != (record.id, record.path, record.status):
            return False
        with self._reader.lend() as connection:
            return self._agrees(connection, said, record)

    def _agrees(self, connection: sqlite3.Connection, said: Record, record: Record) -> bool:
        (row,) = connection.execute(SQL["find_by_id"], (record.id,)).fetchall()
        whole = checksums.holds(row["checksum"], lambda: said.checksum) or said.checksum == record.checksum
        for content in run_rows(connection, "contents", [(said.digest,)] if said.width else []):
            whole &= content["checksum"] == content_row(said)[-1] or tuple(content)[:-1] == content_row(said)[:-1]
        stored = {
            result["model"]: result for result in run_rows(connection, "results", [(said.digest,)] if said.models else [])
        }
        for model in said.models:
            number = self._numbers.get((model.stage, model.fingerprint))
            if number is None:
                return False
            if result := stored.get(number):
                output = said.outputs[model.stage]
                true = result_row(said.digest, number, model, output)
                whole &= result["checksum"] == true[-1] or result["payload"] == output.payload
        return whole

    def _write(self, said: Record, record: Record) -> None:
        """Replace the damaged rows in the ledger by what the sidecar says."""
        numbers = [self._numbers[model.stage, model.fingerprint] for model in said.models]
        attempts = said.attempts if said.status is JobStatus.FAILED else record.attempts
        with self._writing() as connection:
            if said.width:
                connection.execute(SQL["drop_content"], (said.digest,))
                run_rows(connection, "keep_content", [content_row(said)])
            for number, model in zip(numbers, said.models, strict=True):
                connection.execute(SQL["drop_result"], (said.digest, number))
                run_rows(connection, "keep_result", [result_row(said.digest, number, model, said.outputs[model.stage])])
            models = msgspec.json.encode(numbers).decode() if said.status is JobStatus.DONE else None
            told = (said.bin or None, said.criteria or None, said.reason or None, said.detail or None)
            checksum = replace(said, attempts=attempts).checksum
            row = (said.digest or None, models, *told, attempts, said.seen_at, said.finished_at, checksum, said.id)
            connection.execute(SQL["right"], row)

    def _annotate_again(self, record: Record) -> None:
        with self._writing() as connection:
            connection.execute(SQL["doubt"], {"id": record.id})

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction for each: damage is rare."""
        connection, _ = identity.open_ledger(self._reader.path)
        with contextlib.closing(connection):
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")
