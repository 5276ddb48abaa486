"""Reads what the list says about the images of a unit, in an actor: where they stand in it, and its columns that are kept.

Only what a unit needs is read, and never the whole list: a row group of Parquet, or some lines of JSON.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from daemon.core.errors import VisiondError
from visiond.cluster.reading.fetching import Fetched
from visiond.cluster.reading.inputs import PARQUET, ClusterInput, version_of
from visiond.cluster.reading.keeping import PLACE, Kept, plain_type
from visiond.cluster.reading.objects import open_object, read_object

HELD_BYTES = 256 << 20  # of a row group that is kept in memory for the next units
BATCH_ROWS, BUFFER_BYTES = 1 << 14, 1 << 20
PIECE_BYTES, GAP_BYTES = (
    8 << 20,
    1 << 16,
)  # lines that are read together, and what may lie between two of them


class ListUnreadable(VisiondError):
    """The list has changed, or cannot be read any more: no image is the cause."""

    exit_status = os.EX_IOERR


class ListColumns(Protocol):
    """The columns of a list."""

    def read(self, inputs: Sequence[ClusterInput], rows: NDArray[np.int64]) -> Any:
        """A table of Arrow with these rows in this order. inputs: one for each row. Raises OSError."""


class Joiner:
    """Threads may share it."""

    def __init__(self, kept: Kept) -> None:
        self._kept, self._lock = kept, threading.Lock()
        self._columns: ListColumns | None = None  # of a list
        if kept.source and kept.names:
            self._columns = ParquetColumns(kept) if kept.source.endswith(PARQUET) else LineColumns(kept)

    @property
    def endings(self) -> tuple[str, ...]:
        """Of the files in a sample of a tar whose texts `join` needs."""
        return () if self._kept.source else self._kept.names

    def join(self, inputs: Sequence[ClusterInput], images: Sequence[Fetched]) -> Any:
        """A table of Arrow with a row for each image. inputs: of the unit. Raises ListUnreadable, StoreAway."""
        import pyarrow as pa

        lists = [inputs[image.place].list_name.decode(errors="replace") or None for image in images]
        rows = [image.row if image.row >= 0 else None for image in images]
        table = pa.table([pa.array(lists, pa.string()), pa.array(rows, pa.int64())], PLACE)
        if not images:
            return pa.schema([*table.schema, *self._kept.fields]).empty_table()
        for (name, kind), column in zip(self._kept.fields, self._read(inputs, images), strict=True):
            table = table.append_column(pa.field(name, kind), column)
        return table

    def _read(self, inputs: Sequence[ClusterInput], images: Sequence[Fetched]) -> list[Any]:
        """The columns that are kept."""
        import pyarrow as pa

        if not self._columns:
            return [pa.array([each.texts.get(name) for each in images], pa.string()) for name in self.endings]
        source = self._kept.source
        numbers = np.array([image.row for image in images], np.int64)
        try:
            with self._lock:
                found = self._columns.read([inputs[image.place] for image in images], numbers)
            # Looked at when all is read. A store does not say it in a way that costs nothing.
            if version_of(source) != self._kept.version:
                raise ListUnreadable(f"{source} was changed while the run read it. {_HOW}")
        except (OSError, pa.ArrowException) as error:
            raise ListUnreadable(f"{source} cannot be read any more: {error}. {_HOW}") from error
        return [found.column(name) for name in self._kept.names]


_HOW = "To go on with the list as it is now, run the same command with --resume."


class ParquetColumns:
    """Row groups are decoded one at a time. The last one is held if it is small, as the next unit has its next rows."""

    def __init__(self, kept: Kept) -> None:
        self._source, self._names = kept.source, list(kept.names)
        self._types = [kind for _, kind in kept.fields]
        self._meta: Any = None  # what the end of the file says
        self._ends: NDArray[np.int64] = np.zeros(0, np.int64)  # of the row groups, as numbers of rows
        self._held: tuple[int, list[Any]] = (-1, [])

    def read(self, inputs: Sequence[ClusterInput], rows: NDArray[np.int64]) -> Any:
        import pyarrow as pa

        if self._meta is None:
            self._read_meta()
        if rows.max() >= self._ends[-1]:
            raise OSError(f"it has {self._ends[-1]:,} rows now")
        order = np.argsort(rows, kind="stable")
        wanted = rows[order]
        pieces = [piece for first, batch in self._batches(wanted) for piece in _pick(batch, first, wanted)]
        return pa.Table.from_batches(pieces).take(pa.array(np.argsort(order, kind="stable")))

    def _read_meta(self) -> None:
        import pyarrow.parquet

        with open_object(self._source) as file:
            table = pyarrow.parquet.ParquetFile(file)
            types = {field.name: plain_type(field.type) for field in table.schema_arrow}
        if [types.get(name) for name in self._names] != self._types:
            raise OSError("its columns are others now")
        meta = self._meta = table.metadata
        self._ends = np.cumsum([meta.row_group(group).num_rows for group in range(meta.num_row_groups)])

    def _batches(self, rows: NDArray[np.int64]) -> Iterator[tuple[int, Any]]:
        """The batches in which these sorted rows may be, each with the number of its first row."""
        groups = np.searchsorted(self._ends, rows, side="right")
        for group in np.unique(groups).tolist():
            first = int(self._ends[group - 1]) if group else 0
            for batch in self._group(group, int(rows[groups == group][-1]) - first):
                yield first, batch
                first += batch.num_rows

    def _group(self, group: int, last: int) -> Iterator[Any]:
        """The batches of a row group, at least up to the row `last` of it."""
        import pyarrow.parquet

        if self._held[0] == group:
            yield from self._held[1]
            return
        self._held = (-1, [])
        held, size, rows = list[Any](), 0, 0
        with open_object(self._source) as file:
            # With a buffer, a column of a row group is read bit by bit.
            table = pyarrow.parquet.ParquetFile(file, metadata=self._meta, buffer_size=BUFFER_BYTES)
            for batch in table.iter_batches(BATCH_ROWS, row_groups=[group], columns=self._names):
                yield batch
                size, rows = size + batch.nbytes, rows + batch.num_rows
                if size <= HELD_BYTES:
                    held.append(batch)
                else:
                    held.clear()
                    if rows > last:
                        return
        if size <= HELD_BYTES:
            self._held = (group, held)


def _pick(batch: Any, first: int, rows: NDArray[np.int64]) -> list[Any]:
    """A copy of these sorted rows of a batch, which begins with the row `first`, if it has any."""
    import pyarrow as pa

    begin, end = np.searchsorted(rows, [first, first + batch.num_rows])
    if begin == end:
        return []
    plain = batch.cast(pa.schema([field.with_type(plain_type(field.type)) for field in batch.schema]))
    return [plain.take(pa.array(rows[begin:end] - first))]


class LineColumns:
    """Of JSON lines: a string as it is, other values as their JSON, null as nothing."""

    def __init__(self, kept: Kept) -> None:
        self._source, self._names = kept.source, kept.names
        self._decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode

    def read(self, inputs: Sequence[ClusterInput], rows: NDArray[np.int64]) -> Any:
        import pyarrow as pa

        known = dict[int, Mapping[str, str | None]]()
        spans = sorted({(each.start, each.size) for each in inputs})
        for stretch in _stretches(spans):
            begin, end = stretch[0][0], sum(stretch[-1])
            data = memoryview(read_object(self._source, begin, end - begin))
            for start, size in stretch:
                known[start] = self._cells(data[start - begin : start - begin + size])
        found = [known[each.start] for each in inputs]
        return pa.table(
            {name: pa.array([row.get(name) for row in found], pa.string()) for name in self._names}
        )

    def _cells(self, line: memoryview) -> dict[str, str | None]:
        """Empty if the line is no object of JSON; its row says so."""
        try:
            row = self._decode(line)
        except msgspec.MsgspecError:
            return {}
        return {name: _text_of(bytes(row[name])) for name in self._names if name in row}


def _text_of(value: bytes) -> str | None:
    if value == b"null":
        return None
    return msgspec.json.decode(value, type=str) if value.startswith(b'"') else value.decode()


def _stretches(spans: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Spans of bytes, each from a start with a size, in groups that are read at once."""
    stretch = list[tuple[int, int]]()
    for start, size in spans:
        if stretch and (start - sum(stretch[-1]) > GAP_BYTES or start + size - stretch[0][0] > PIECE_BYTES):
            yield stretch
            stretch = []
        stretch.append((start, size))
    if stretch:
        yield stretch
