"""Rows: the columns of `visiond export` in Parquet, and how the image ended. An image that failed is a row too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import msgspec

from daemon.exports import parquet
from daemon.exports.columns import ExportColumns
from daemon.exports.export import note_models
from daemon.ledger.record import Record

OUTCOME = {"status": str, "reason": str, "detail": str}
PLACE = ("id", "inbox", "path", "path_base64", "location")


class ResultRows:
    """kinds: the type of each column, by its name."""

    def __init__(self, stages: Iterable[str]) -> None:
        """stages: those that are configured."""
        self._columns = ExportColumns(stages, models=True)
        kinds = self._columns.kinds
        self.kinds: dict[str, type] = {name: kinds[name] for name in PLACE} | OUTCOME | kinds

    def row_of(self, record: Record) -> dict[str, Any]:
        """All columns of a record. `embedding` is an array of float32, and `finished_at` a datetime; a column is None
        where there is nothing to say. status: "DONE", "FAILED" or "SKIPPED"; reason and detail: None for DONE."""
        row, document = next(self.pair([record]))
        return parquet.cells_of(row, document) | {"embedding": parquet.vector_of(document)}

    def write(
        self,
        out: BinaryIO,
        records: Sequence[Record],
        numbers: Sequence[int],
        further: Any,
        notes: Mapping[bytes, bytes],
        *,
        half: bool = False,
    ) -> None:
        """Write them as Parquet. numbers: of each, in the column `id`. further: a table of Arrow with more columns. notes: for
        the file's own metadata, which also says what the models are. half: embeddings in half precision."""
        models = {model for record in records for model in record.all_models()}
        known = {**note_models(models), **notes}
        rows = ((row | {"id": n}, d) for n, (row, d) in zip(numbers, self.pair(records), strict=True))
        parquet.write_table(out, rows, self.kinds, (), half=half, notes=lambda: known, further=further)

    def pair(self, records: Iterable[Record]) -> Iterator[parquet.Row]:
        """Each record as the columns of `kinds`, and its sidecar: what `write_table` takes."""
        for record in records:
            document = msgspec.json.decode(record.sidecar)
            outcome = (record.status.name, str(record.reason) or None, record.detail or None)
            known = self._columns.row_of(record, document) | dict(zip(OUTCOME, outcome, strict=True))
            yield {name: known[name] for name in self.kinds}, document
