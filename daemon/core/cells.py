"""Cells of CSV that no spreadsheet runs as a formula."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection, Iterable
from typing import Any, BinaryIO

import msgspec

# At the start of a cell. Some programs ignore spaces before it, or what nobody sees (control characters, the byte order mark,
# and the rest of Unicode's Default_Ignorable_Code_Point), or accept wide and small characters.
_UNSEEN = (
    r"\s\x00-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    r"\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
FORMULA = re.compile(rf"[{_UNSEEN}]*[=+\-@\uff1d\uff0b\uff0d\uff20\ufe66\ufe62\ufe63\ufe6b]|[\t\r\n]")


def write_rows(
    out: BinaryIO, header: Collection[str], rows: Iterable[dict[str, Any]], encoding: str = "utf-8"
) -> None:
    """A line with the names of the columns, and one for each row."""
    text = io.TextIOWrapper(out, encoding=encoding, newline="")
    writer = csv.DictWriter(text, header)
    writer.writeheader()
    for row in rows:
        writer.writerow({key: as_cell(value) for key, value in row.items()})
    text.detach()  # flushes, and keeps `out` open


def as_cell(value: Any) -> Any:
    """A list or table as JSON, since labels may contain any character. A text that starts like a formula gets a quote,
    as a spreadsheet would run it, and anyone can put text on an image."""
    if isinstance(value, list | dict):
        return msgspec.json.encode(value).decode()
    return f"'{value}" if isinstance(value, str) and FORMULA.match(value) else value


def as_typed(cell: str) -> str:
    """A text from a cell, without the quote that `as_cell` may have put before it."""
    return cell[1:] if cell.startswith("'") and FORMULA.match(cell[1:]) else cell
