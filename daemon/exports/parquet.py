"""Exports as Parquet, and tables of Arrow for it: the columns of every export, and what fits into no cell of a CSV:
embeddings, boxes and scores."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import datetime
from typing import Any, BinaryIO

import numpy as np

from daemon.core.errors import MissingLibrary
from daemon.core.sidecar import unpack_embedding
from stages.registry.registry import list_variants

CHUNK = 1024  # rows in a row group, and in memory: some megabytes with embeddings

# Columns that Parquet and Lance have, and CSV has not. Conditions have the lists.
LISTS = ("text_lines", "detections", "tag_scores", "captions")
FURTHER = (*LISTS, "embedding")

Row = tuple[dict[str, Any], dict[str, Any]]  # the columns of every export, and the sidecar


def write_table(
    out: BinaryIO,
    rows: Iterator[Row],
    columns: Mapping[str, type],
    sizes: Collection[int],
    *,
    half: bool = False,
    notes: Callable[[], Mapping[bytes, bytes]] = dict,
    further: Any = None,
) -> None:
    """columns, sizes, half: as of `make_schema`. notes: called after the last row, for the file's own metadata. further: a
    table of Arrow with more columns, which has as many rows as there are. Raises MissingLibrary."""
    pyarrow = load_pyarrow()
    schema, done = make_schema(columns, sizes, half=half), 0
    whole = pyarrow.schema([*schema, *(further.schema if further is not None else ())])
    with pyarrow.parquet.ParquetWriter(out, whole) as writer:
        for table in make_tables(rows, schema):
            for column in further.slice(done, len(table)).columns if further is not None else ():
                table = table.append_column(whole.field(table.num_columns), column)
            writer.write_table(table)
            done += len(table)
        writer.add_key_value_metadata(notes())


def load_pyarrow() -> Any:
    """Raises MissingLibrary."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingLibrary(
            "Parquet needs pyarrow: pip install 'visiond[parquet]', or use --format jsonl."
        ) from error
    return pyarrow


def make_schema(columns: Mapping[str, type], sizes: Collection[int], *, half: bool = False) -> Any:
    """A schema of Arrow. columns: those of every export, with their types. sizes: the lengths of the embeddings. With one
    length they are lists of a fixed size, otherwise plain lists. half: embeddings in half precision. Raises MissingLibrary."""
    arrow = load_pyarrow()
    size = next(iter(sizes)) if len(sizes) == 1 else 0
    return _schema(columns, size, arrow.float16() if half else arrow.float32())


def make_tables(rows: Iterator[Row], schema: Any) -> Iterator[Any]:
    """Tables of Arrow with at most CHUNK rows. schema: of `make_schema`, with embeddings in its last column."""
    import pyarrow

    embedding = schema.field("embedding")
    while chunk := list(itertools.islice(rows, CHUNK)):
        plain = pyarrow.Table.from_pylist([cells_of(*row) for row in chunk], schema.remove(len(schema) - 1))
        vectors = [vector_of(document) for _, document in chunk]
        yield plain.append_column(embedding, _embeddings(vectors, embedding.type))


def _schema(columns: Mapping[str, type], size: int, precision: Any) -> Any:
    import pyarrow as pa

    number = pa.float64()
    types = {int: pa.int64(), float: number, str: pa.string(), bool: pa.bool_(), list: pa.list_(pa.string())}
    types[datetime] = pa.timestamp("ms", "UTC")
    types[dict] = pa.map_(pa.string(), number)
    corners = pa.list_(pa.list_(number))
    line = pa.struct([("text", pa.string()), ("score", number), ("box", corners), ("guessed", pa.bool_())])
    detection = pa.struct([("label", pa.string()), ("score", number), ("box", pa.list_(number))])
    caption = pa.struct(
        [(name, pa.string()) for name in ("stage", "model", "prompt", "text")] + [("similarity", number)]
    )
    lists = (pa.list_(line), pa.list_(detection), pa.list_(number), pa.list_(caption))
    further = (*lists, pa.list_(precision, size or -1))
    return pa.schema(
        [*((name, types[kind]) for name, kind in columns.items()), *zip(FURTHER, further, strict=True)]
    )


def cells_of(row: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    """All columns except the embedding."""
    return row | lists_of(document) | {"finished_at": datetime.fromisoformat(row["finished_at"])}


def lists_of(document: dict[str, Any]) -> dict[str, Any]:
    """The columns of LISTS; None for a stage that did not run."""
    return {
        "text_lines": [{"guessed": False, **line} for line in document["ocr"]["lines"]]
        if "ocr" in document
        else None,
        "detections": document["objects"]["detections"] if "objects" in document else None,
        "tag_scores": [tag["score"] for tag in document["clip"]["tags"]] if "clip" in document else None,
        "captions": [*_captions_of(document)] or None,
    }


def _captions_of(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Of each captioner, that of the stage blip first."""
    for stage in list_variants("blip", document.get("models", {})):
        known = document.get("provenance", {}).get(stage, {})
        about = {"stage": stage, "model": known.get("name"), "prompt": known.get("options", {}).get("prompt")}
        yield about | document["caption" if stage == "blip" else stage]


def vector_of(document: dict[str, Any]) -> Any:
    """The embedding in single precision, which every reader of Parquet knows; None without stage clip."""
    if "clip" not in document:
        return None
    embedding = document["clip"]["embedding"]
    return unpack_embedding(embedding["base64"], embedding["dtype"]).astype(np.float32)


def _embeddings(vectors: list[Any], kind: Any) -> Any:
    """kind: of the column. A vector of another length than its lists have, from a model that was changed during the export,
    is null."""
    import pyarrow as pa

    precision = kind.value_type.to_pandas_dtype()
    if not pa.types.is_fixed_size_list(kind):
        return pa.array([None if v is None else v.astype(precision) for v in vectors], kind)
    size = kind.list_size
    fitting = [vector if vector is not None and len(vector) == size else None for vector in vectors]
    nothing = np.zeros(size, precision)
    values = np.concatenate([nothing if vector is None else vector for vector in fitting]).astype(precision)
    missing = pa.array([vector is None for vector in fitting])
    return pa.FixedSizeListArray.from_arrays(pa.array(values), size, mask=missing)
