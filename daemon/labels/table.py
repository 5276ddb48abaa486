"""Reads labels from CSV."""

from __future__ import annotations

import ast
import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from daemon.core.cells import as_typed
from daemon.core.errors import WrongArgument
from daemon.core.labels import Kind, LeftOut, Said, Value, decode
from stages.registry.registry import kind_of

LONGEST_CELL = 1 << 26  # characters: Python's own limit is 131,072
# Columns that name the image, the surest first.
NAMES = (
    *("digest", "location", "path", "file_path", "image_path"),
    *("file_name", "filename", "file", "image", "name"),
)
LABELLED = (Kind.TAGS, Kind.CAPTION, Kind.TEXT)  # columns; and those of classifiers
LABELS = "labels"  # the column of an export
ANSWERS = "answers of models; if people have corrected them, keep only those columns and digest"
UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # as Excel writes "Unicode text"


def read_csv(file: Path, left_out: LeftOut) -> Iterator[Said]:
    """With a header, and commas, semicolons, tabs or bars. A column names the image: see NAMES. Columns of labels are tags (a
    list as JSON or Python writes it, or with commas or semicolons), caption, text, and the name of a classifier, also with
    _label behind it as in an export. An empty cell says nothing."""
    csv.field_size_limit(LONGEST_CELL)
    with file.open("rb") as opened:
        encoding = "utf-16" if opened.read(2) in UTF_16 else "utf-8-sig"
    with file.open(encoding=encoding, newline="") as lines:
        header = lines.readline()
        lines.seek(0)
        rows = csv.DictReader(lines, delimiter=max(",;\t|", key=header.count), restval="", strict=True)
        try:
            rows.fieldnames = columns = list(map(_plain, rows.fieldnames or ()))
            key, labelled, is_exported = _find_columns(file, columns)
            for row in rows:
                if None in row:
                    raise ValueError("it has more cells than the header; a cell with commas needs quotes")
                read = _read_exported if is_exported else _read_row
                yield from read(row, as_typed(row[key]), labelled, left_out)
        except UnicodeDecodeError:  # which is a ValueError too
            raise
        except (csv.Error, SyntaxError, ValueError, msgspec.MsgspecError) as error:
            raise WrongArgument(f"{file}, line {rows.line_num}: {error}.") from None


def _plain(column: str) -> str:
    return column.strip().lower().replace(" ", "_")


def _find_kind(column: str) -> Kind | None:
    """Of the labels in it."""
    if column in LABELLED:
        return Kind(column)
    return Kind.CLASSES if kind_of(_classifier_of(column)) == "classifier" else None


def _classifier_of(column: str) -> str:
    return column.removesuffix("_label")


def _find_columns(file: Path, columns: Sequence[str]) -> tuple[str, list[str], bool]:
    """The one that names the image, those with labels or answers, and whether it is an export with LABELS. Raises
    WrongArgument."""
    key = next(filter(columns.__contains__, NAMES), "")
    labelled = [column for column in columns if _find_kind(column)]
    is_exported = "clip_similarity" in columns
    if is_exported and LABELS not in columns:
        raise WrongArgument(
            f"{file} has answers of models, as `visiond export` wrote them. Keep the columns path and digest, and those that "
            "people have corrected."
        )
    if not key or not labelled:
        raise WrongArgument(
            f"{file} needs a column that names the image ({', '.join(NAMES)}) and one with labels (tags, caption, text, or the "
            f"name of a classifier). It has {', '.join(columns) or 'none'}. "
            f"{_fix_columns(columns)}"
        )
    _refuse_twins(file, [column for column in columns if column in (key, *labelled)])
    return key, labelled, is_exported


def _fix_columns(columns: Sequence[str]) -> str:
    if "annotation_id" in columns:
        return "Export JSON from Label Studio."
    return "Write these names into its first line."


def _refuse_twins(file: Path, columns: Sequence[str]) -> None:
    """Raises WrongArgument."""
    if twins := [column for column in columns if columns.count(column) > 1]:
        raise WrongArgument(
            f"{file} has several columns called {twins[0]}. Rename all but one; an image may have several rows, each with a "
            "caption."
        )


class _Told(msgspec.Struct):
    value: msgspec.Raw
    origin: str
    held_out: bool | None = None


def _read_exported(
    row: Mapping[str, str], name: str, answered: Sequence[str], left_out: LeftOut
) -> Iterator[Said]:
    """answered: columns with answers of models. Raises msgspec.MsgspecError."""
    told = msgspec.json.decode(as_typed(row[LABELS]) or "{}", type=dict[Kind, _Told])
    for kind, each in told.items():
        value = decode(kind, each.value)
        yield Said(name, kind, value, digest=name, origin=each.origin, held_out=each.held_out)
    for _ in {_find_kind(column) for column in answered if row.get(column)} - told.keys():
        left_out(ANSWERS)


def _read_row(
    row: Mapping[str, str], name: str, labelled: Sequence[str], left_out: LeftOut
) -> Iterator[Said]:
    """labelled: columns. Raises ValueError, SyntaxError."""
    cells = ((column, as_typed(row[column])) for column in labelled)
    yield from (Said(name, *_read_cell(column, cell)) for column, cell in cells if cell)


def _read_cell(column: str, cell: str) -> tuple[Kind, Value]:
    """Raises ValueError, SyntaxError."""
    kind = _find_kind(column)
    if kind is Kind.CLASSES:
        return kind, {_classifier_of(column): cell}
    if kind is Kind.TEXT:
        return kind, cell
    return (Kind.CAPTION, [cell]) if kind is Kind.CAPTION else (Kind.TAGS, _read_tags(cell))


def _read_tags(cell: str) -> list[str]:
    """Raises ValueError, SyntaxError."""
    if cell.startswith("["):
        try:
            return msgspec.json.decode(cell, type=list[str])
        except msgspec.MsgspecError:
            return [str(tag) for tag in ast.literal_eval(cell)]  # as pandas writes a list
    parts = cell.split(";" if ";" in cell else ",")
    return [tag for each in parts if (tag := each.strip())]
