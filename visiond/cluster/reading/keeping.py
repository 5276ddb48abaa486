"""Chooses what `--keep` and `--keep-all` take over into the parts: other columns of a list, or texts of a tar's samples.

The driver chooses once, so all parts have the same columns. An actor reads the values when it runs a unit (joining.py).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from daemon.core.errors import WrongArgument
from visiond.cluster.reading.inputs import PARQUET, InputListing, choose_column, open_list, version_of
from visiond.cluster.reading.objects import open_object, open_stream
from visiond.cluster.reading.samples import LOOKED_AT, find_endings

PLACE = ("list", "row")  # columns that parts have besides those of `visiond export`
PREFIX = "list_"  # of a column whose name a part has already
LINES = 1000  # of JSON, in which columns are looked for


@dataclass(frozen=True)
class Kept:
    """names: columns of the list, or endings of files in a sample. fields: the name and type of Arrow of each in the parts.
    source: the list; empty for tars. version: its size and time; empty for a URL."""

    names: tuple[str, ...] = ()
    fields: tuple[tuple[str, Any], ...] = ()
    source: str = ""
    version: bytes = b""

    def describe(self) -> list[list[str]]:
        """What a later run must keep too."""
        return [[name, *map(str, field)] for name, field in zip(self.names, self.fields, strict=True)]


NOTHING = Kept()


def choose_kept(listing: InputListing, wanted: Sequence[str], columns: Iterable[str], *, every: bool) -> Kept:
    """wanted: NAME, NAME=OTHER, or several with commas. columns: that parts have anyway. every: all others too.
    Raises WrongArgument, NothingFound, StoreFailed."""
    asked = dict(map(_split, itertools.chain.from_iterable(words.split(",") for words in wanted)))
    if not asked and not every:
        return NOTHING
    offered = _columns_of(listing)
    _check_offered(listing, asked, offered)
    names = tuple(name for name, (_, is_whole) in offered.items() if name in asked or (every and is_whole))
    others = _name(names, asked, columns)
    fields = tuple((other, offered[name][0]) for name, other in zip(names, others, strict=True))
    if not listing.is_list:
        return Kept(names, fields)
    return Kept(names, fields, listing.source, version_of(listing.source))


def _check_offered(listing: InputListing, asked: Iterable[str], offered: Offered) -> None:
    """Raises WrongArgument."""
    if unknown := next((name for name in asked if name not in offered), ""):
        has = f"{_looked_at(listing)} {', '.join(offered) or 'nothing else'}"
        raise WrongArgument(f'--keep: {listing.source} has no "{unknown}". {has}.')


def _looked_at(listing: InputListing) -> str:
    if not listing.is_list:
        return f"The first {LOOKED_AT} samples of its first tar have"
    return "It has" if listing.source.endswith(PARQUET) else f"Its first {LINES:,} lines have"


def _split(word: str) -> tuple[str, str]:
    name, _, other = word.strip().partition("=")
    if not name:
        raise WrongArgument("--keep: the name of a column is missing. Type --keep NAME or --keep NAME=OTHER.")
    return name, other


def _name(names: Sequence[str], asked: dict[str, str], columns: Iterable[str]) -> list[str]:
    """The names in the parts. Capitals make no difference, as in SQL. Raises WrongArgument."""
    taken = {name.lower() for name in (*columns, *PLACE)}
    found = list[str]()
    for name in names:
        other = asked.get(name) or (f"{PREFIX}{name}" if name.lower() in taken else name)
        if other.lower() in taken:
            raise WrongArgument(
                f'--keep: there would be two columns "{other}" in the parts. Type --keep "{name}=OTHER" with another name.'
            )
        taken.add(other.lower())
        found.append(other)
    return found


Offered = dict[str, tuple[Any, bool]]  # each with its type, and whether --keep-all takes it


def _columns_of(listing: InputListing) -> Offered:
    """What can be kept."""
    import pyarrow as pa

    source = listing.source
    if not listing.is_list:
        first = next(listing.inputs())
        if first.kind != "tar":
            raise WrongArgument(
                f"{source} is no list and no tar, so it has no columns for --keep or --keep-all. A list is .parquet or "
                ".jsonl; tars are 'FOLDER/*.tar'."
            )
        endings = open_list(os.fsdecode(first.at), find_endings)
        return {name: (pa.string(), is_text) for name, is_text in endings.items()}
    if source.endswith(PARQUET):
        return _columns_of_parquet(source, listing.column)
    with open_list(source, open_stream) as lines:
        found = dict.fromkeys(itertools.chain.from_iterable(_rows_of(itertools.islice(lines, LINES))))
    chosen = choose_column(source, [*found], listing.column)
    return {name: (pa.string(), True) for name in found if name != chosen}


def _columns_of_parquet(source: str, column: str) -> Offered:
    import pyarrow.parquet

    with open_list(source, open_object) as file:
        schema = pyarrow.parquet.ParquetFile(file).schema_arrow
    chosen = choose_column(source, schema.names, column)
    return {field.name: (plain_type(field.type), True) for field in schema if field.name != chosen}


def plain_type(kind: Any) -> Any:
    """The type of a column in the parts. Arrow cannot pick rows of its views of texts and bytes."""
    import pyarrow as pa

    return {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}.get(kind, kind)


def _rows_of(lines: Iterable[bytes]) -> Iterable[dict[str, Any]]:
    """Those that are objects of JSON: what is wrong with others is said in their rows."""
    for line in lines:
        try:
            yield msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.MsgspecError:
            continue
