"""Reads labels from CSV."""

from __future__ import annotations

import ast
import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from daemon.core.cells import as_typed
from daemon.core.errors import WrongArgument
from daemon.core.labels import Kind, LeftOut, Said, decode

LONGEST_CELL = 1 << 26  # characters: Python's own limit is 131,072
# Columns that name the image, the surest first.
NAMES = ("digest", "location", "path", "file_name", "filename", "file", "image", "name")
LABELLED = (Kind.TAGS, Kind.CAPTION, Kind.TEXT)  # columns
LABELS = "labels"  # the column of an export
ANSWERS = "answers of models; if people have corrected them, keep only those columns and digest"
UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # as Excel writes "Unicode text"


def read_csv(file: Path, left_out: LeftOut) -> Iterator[Said]:
    """With a header, and commas, semicolons or tabs. A column names the image: see NAMES. Columns of labels are tags (a list as
    JSON or Python writes it, or with commas or semicolons), caption and text. An empty cell says nothing."""
    csv.field_size_limit(LONGEST_CELL)
    with file.open("rb") as opened:
        encoding = "utf-16" if opened.read(2) in UTF_16 else "utf-8-sig"
    with file.open(encoding=encoding, newline="") as lines:
        header = lines.readline()
        lines.seek(0)
        rows = csv.DictReader(lines, delimiter=max(",;\t", key=header.count), restval="", strict=True)
        try:
            rows.fieldnames = columns = [name.strip().lower() for name in rows.fieldnames or ()]
            key, kinds = _find_columns(file, columns)
            for row in rows:
                if None in row:
                    raise ValueError("it has more cells than the header; a cell with commas needs quotes")
                yield from _read_row(row, as_typed(row[key]), kinds, left_out)
        except (csv.Error, SyntaxError, ValueError, msgspec.MsgspecError) as error:
            raise WrongArgument(f"{file}, line {rows.line_num}: {error}.") from None


def _read_row(row: Mapping[str, str], name: str, kinds: Sequence[Kind], left_out: LeftOut) -> Iterator[Said]:
    """kinds: none for an export. Raises ValueError, SyntaxError, msgspec.MsgspecError."""
    if not kinds:
        said = [*_read_exported(name, as_typed(row[LABELS]))]
        yield from said
        for _ in {kind for kind in LABELLED if row.get(kind)} - {each.kind for each in said}:
            left_out(ANSWERS)
    cells = ((kind, as_typed(row[kind])) for kind in kinds)
    yield from (Said(name, kind, _value_of(kind, cell)) for kind, cell in cells if cell)


def _find_columns(file: Path, columns: Sequence[str]) -> tuple[str, list[Kind]]:
    """The one that names the image, and those with labels: none for an export with LABELS. Raises WrongArgument."""
    key = next(filter(columns.__contains__, NAMES), "")
    kinds = [kind for kind in LABELLED if kind in columns]
    is_exported = "clip_similarity" in columns
    if is_exported and LABELS not in columns:
        raise WrongArgument(
            f"{file} has answers of models, as `visiond export` wrote them. Keep the columns path and digest, and those that "
            "people have corrected."
        )
    if not key or not kinds:
        raise WrongArgument(
            f"{file} needs a column that names the image ({', '.join(NAMES)}) and one with labels (tags, caption, text). "
            f"It has {', '.join(columns) or 'none'}."
        )
    return key, [] if is_exported else kinds


class _Told(msgspec.Struct):
    value: msgspec.Raw
    origin: str


def _read_exported(name: str, cell: str) -> Iterator[Said]:
    """Raises msgspec.MsgspecError."""
    for kind, told in msgspec.json.decode(cell or "{}", type=dict[Kind, _Told]).items():
        yield Said(name, kind, decode(kind, told.value), digest=name, origin=told.origin)


def _value_of(kind: Kind, cell: str) -> list[str] | str:
    """Raises ValueError, SyntaxError."""
    if kind is Kind.TEXT:
        return cell
    if kind is Kind.CAPTION:
        return [cell]
    if cell.startswith("["):
        try:
            return msgspec.json.decode(cell, type=list[str])
        except msgspec.MsgspecError:
            return [str(tag) for tag in ast.literal_eval(cell)]  # as pandas writes a list
    parts = cell.split(";" if ";" in cell else ",")
    return [tag for each in parts if (tag := each.strip())]
