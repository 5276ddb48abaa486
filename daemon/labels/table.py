"""Reads labels from CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from daemon.core.errors import WrongArgument
from daemon.core.labels import Kind, LeftOut, Said
from daemon.formats.cells import as_typed

LONGEST_CELL = 1 << 26  # characters: Python's own limit is 131,072
NAMES = (
    "digest",
    "location",
    "path",
    "file_name",
    "filename",
    "file",
    "image",
    "name",
)  # of columns, the surest first


def read_csv(file: Path, left_out: LeftOut) -> Iterator[Said]:
    """With a header. A column names the image: see NAMES. Columns of labels are tags (a list as JSON, or with ; between them),
    caption and text. An empty cell says nothing."""
    csv.field_size_limit(LONGEST_CELL)
    with file.open(encoding="utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines)
        rows.fieldnames = columns = [name.strip().lower() for name in rows.fieldnames or ()]
        key, kinds = _find_columns(file, columns)
        try:
            for row in rows:
                cells = ((kind, as_typed(row[kind] or "")) for kind in kinds)
                name = as_typed(row[key] or "")
                yield from (Said(name, kind, _value_of(kind, cell)) for kind, cell in cells if cell)
        except csv.Error as error:
            raise WrongArgument(f"{file}, line {rows.line_num}: {error}.") from None


def _find_columns(file: Path, columns: Sequence[str]) -> tuple[str, list[Kind]]:
    """The one that names the image, and those with labels. Raises WrongArgument."""
    key = next((name for name in NAMES if name in columns), "")
    kinds = [kind for kind in (Kind.TAGS, Kind.CAPTION, Kind.TEXT) if kind in columns]
    if not key or not kinds:
        raise WrongArgument(
            f"{file} needs a column that names the image ({', '.join(NAMES)}) and one with labels (tags, caption, text). "
            f"It has {', '.join(columns) or 'none'}."
        )
    return key, kinds


def _value_of(kind: Kind, cell: str) -> list[str] | str:
    if kind is Kind.TEXT:
        return cell
    if kind is Kind.CAPTION:
        return [cell]
    if cell.startswith("["):
        try:
            return msgspec.json.decode(cell, type=list[str])
        except msgspec.MsgspecError:
            pass
    return [tag for each in cell.split(";") if (tag := each.strip())]
