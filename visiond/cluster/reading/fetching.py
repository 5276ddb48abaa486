"""Reads the images of a unit, in an actor: a few at a time and ahead of what is being annotated."""

from __future__ import annotations

import base64
import os
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from daemon.core.jobs import Failure
from visiond.cluster.reading.inputs import URL_COLUMNS, ClusterInput
from visiond.cluster.reading.objects import open_object, read_object
from visiond.cluster.reading.samples import read_samples
from visiond.cluster.reading.unpacking import ClusterUnpacker, Unpacked

THREADS = 16  # that read from a store
AHEAD_BYTES = 128 << 20  # that may be read and not taken yet


class Fetched(NamedTuple):
    """An image. place: its number among the inputs of its unit. data: its bytes, or why there are none. row: its number in
    the list, or that of its sample in the tar; -1 without one. texts: of its sample, by their endings."""

    place: int
    name: bytes
    data: bytes | OSError | Failure
    row: int = -1
    texts: Mapping[str, str] = {}


def fetch(
    inputs: Iterable[ClusterInput],
    threads: ThreadPoolExecutor,
    unpacker: ClusterUnpacker | None = None,
    endings: Container[str] = (),
) -> Iterator[Fetched]:
    """The images of these inputs, in order. An input that cannot be read is one image with the error. endings: of the
    files in a sample of a tar that are read as texts."""
    waiting: deque[tuple[int, ClusterInput, Future[bytes] | None]] = deque()
    listed = enumerate(inputs)
    while True:
        # Several at once, as adding up the bytes that are held takes as long as reading an image.
        if len(waiting) <= THREADS and _held(waiting) < AHEAD_BYTES:
            for place, each in islice(listed, THREADS):
                single = each.kind in ("file", "line", "nothing")
                single = single and not (unpacker and unpacker.may_unpack(each))
                waiting.append((place, each, threads.submit(_read, each) if single else None))
        if not waiting:
            return
        yield from _take(*waiting.popleft(), unpacker, endings)


def _held(waiting: Iterable[tuple[int, ClusterInput, Future[bytes] | None]]) -> int:
    """Bytes that were read and are not taken yet."""
    done = [future for _, _, future in waiting if future and future.done()]
    return sum(len(future.result()) for future in done if not future.exception())


def _take(
    place: int,
    each: ClusterInput,
    future: Future[bytes] | None,
    unpacker: ClusterUnpacker | None,
    endings: Container[str],
) -> Iterator[Fetched]:
    try:
        if future:
            yield Fetched(place, each.name, future.result(), each.row)
        elif each.kind == "tar":
            for image in read_samples(os.fsdecode(each.at), endings):
                name = each.name + b"/" + image.name
                yield Fetched(place, name, image.data, image.row, image.texts)
        elif each.kind == "rows":
            for number, (name, data) in enumerate(_read_rows(each), each.row):
                yield Fetched(place, name, data, number)
        else:
            assert unpacker
            for name, data in unpacker.unpack(each):
                yield Fetched(place, name, data, each.row)
    except OSError as error:
        yield Fetched(place, each.name, error, each.row)


def _read(each: ClusterInput) -> bytes:
    """Raises OSError."""
    if each.kind == "nothing":
        raise OSError(f'the row has no "{each.column}"')
    data = read_object(os.fsdecode(each.at), each.offset, each.length)
    if each.kind == "file":
        return data
    try:
        row = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise OSError(f"the line is no object of JSON: {error}") from error
    if (value := row.get(each.column)) is None:
        raise OSError(f'the line has no "{each.column}"')
    try:
        return base64.b64decode(value, validate=True)
    except (ValueError, TypeError) as error:
        raise OSError(f"the bytes are not base64: {error}") from error


def _read_rows(each: ClusterInput) -> Iterator[Unpacked]:
    """The images of a row group of Parquet. Raises OSError."""
    import pyarrow
    import pyarrow.parquet

    try:
        with open_object(os.fsdecode(each.at)) as file:
            table = pyarrow.parquet.ParquetFile(file)
            named = next(
                (name for name in ("name", *URL_COLUMNS, "key") if name in table.schema_arrow.names), None
            )
            columns = [each.column, *([named] if named and named != each.column else [])]
            rows = table.read_row_group(each.offset, columns=columns).to_pylist()
    except pyarrow.ArrowException as error:
        raise OSError(f"the Parquet file cannot be read: {error}") from error
    for number, row in enumerate(rows):
        yield _describe_row(each, number, row, row.get(named) if named else None)


def _describe_row(
    each: ClusterInput, number: int, row: dict[str, Any], name: Any
) -> tuple[bytes, bytes | OSError]:
    value = row[each.column]
    if isinstance(value, dict):  # Hugging Face's datasets: bytes, and perhaps a path
        name, value = name or value.get("path"), value.get("bytes")
    own = os.fsencode(str(name)) if name else b"%s/%d-%d" % (each.name, each.offset, number)
    return own, value if value is not None else OSError("the row has no bytes")


def opened_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, "fetch")
