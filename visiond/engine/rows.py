"""Rows: the columns of `visiond export` in Parquet, and how the image ended. An image that failed is a row too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from daemon.ledger.record import Record
from daemon.results import export, parquet

OUTCOME = {"status": str, "reason": str, "detail": str}
PLACE = ("id", "inbox", "path", "path_base64", "location")
COLUMNS: dict[str, type] = {name: export.COLUMNS[name] for name in PLACE} | OUTCOME | export.COLUMNS


def row_of(record: Record) -> dict[str, Any]:
    """All columns of a record. `embedding` is an array of float32, and `finished_at` a datetime; a column is None
    where there is nothing to say. status: "DONE", "FAILED" or "SKIPPED"; reason and detail: None for DONE."""
    row, document = next(pair([record]))
    return parquet.cells_of(row, document) | {"embedding": parquet.vector_of(document)}


def pair(records: Iterable[Record]) -> Iterator[parquet.Row]:
    """Each record as the columns of COLUMNS, and its sidecar: what `write_table` takes."""
    for record in records:
        document = msgspec.json.decode(record.sidecar)
        outcome = (record.status.name, str(record.reason) or None, record.detail or None)
        known = export.row_of(record, document) | dict(zip(OUTCOME, outcome, strict=True))
        yield {name: known[name] for name in COLUMNS}, document
