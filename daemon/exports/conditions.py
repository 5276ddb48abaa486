"""Conditions of SQL on the columns of an export."""

from __future__ import annotations

import contextlib
import difflib
import re
import secrets
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from daemon.core.errors import WrongArgument
from daemon.exports.columns import NEAR, SCORES, ExportColumns, scores_of
from daemon.exports.parquet import LISTS, lists_of
from daemon.ledger.record import Record

STEPS = 1_000_000  # of SQLite's virtual machine, between two looks for Ctrl-C
LARGEST = 2**63 - 1  # whole number of SQLite
MOST_NAMED = 20  # labels in a message
GROUPS = {"cluster", "duplicate", "duplicates", "duplicate_of", "group", "near_duplicate", "near_duplicates"}
# A text, comment or quoted name; or a function, with its label if that is a text.
_PART = re.compile(
    r"""('(?:[^']|'')*'|--[^\n]*|/\*.*?\*/|"[^"]*")|\b(object_score|tag_score)\s*\(\s*('(?:[^']|'')*'(?=\s*\)))?""",
    re.IGNORECASE | re.DOTALL,
)


@contextlib.contextmanager
def open_condition(where: str, columns: ExportColumns) -> Iterator[Condition]:
    """Raises WrongArgument, at once or in the context."""
    database = sqlite3.connect(":memory:", isolation_level=None)
    database.set_progress_handler(lambda: 0, STEPS)  # so that Ctrl-C ends a condition that never does
    try:
        yield Condition(where, columns, database)
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_INTERRUPT:
            raise KeyboardInterrupt from None
        why = str(error).partition("\n")[0]  # what follows may be what is around the condition
        raise WrongArgument(
            f"--where {where!r} is no condition of SQL on the columns of an export: {why}. Write for example "
            f"\"bin = 'A' AND object_count > 2\"; {_name_near(str(error), [*columns.kinds, *LISTS, *SCORES])}"
        ) from None
    finally:
        database.close()


class Condition:
    """A condition, in a database whose table has some of the images and those of their columns that the condition reads.

    read: the names of these columns.
    """

    def __init__(self, where: str, columns: ExportColumns, database: sqlite3.Connection) -> None:
        """Raises sqlite3.Error, sqlite3.Warning, ValueError."""
        names = {name.lower(): name for name in reversed([*columns.kinds, *LISTS, *SCORES])}.values()
        _check_quoted(where, names)
        self._columns, self._database = columns, database
        # A question to the table itself would see only some of the images, so nobody knows its name.
        self._table = table = f"images_{secrets.token_hex(8)}"
        # Functions of SCORES get the scores of the image first.
        asked = _PART.sub(lambda part: part[1] or f"{part[2]}({table}.{part[2]}, {part[3] or ''}", where)
        self._question = f"SELECT id FROM {table} WHERE (\n{asked}\n)"
        listed = ", ".join(map('"{}"'.format, names))
        for name in SCORES:
            database.create_function(name, 2, _look_up)
        database.execute(f"CREATE TABLE {table} ({listed})")
        found = {"id"}

        def note(action: int, table: str | None, name: str | None, *place: str | None) -> int:
            found.add(name or "")
            return sqlite3.SQLITE_OK

        database.set_authorizer(note)  # SQLite asks whether it may read a column
        database.execute(f"EXPLAIN {self._question}")
        database.set_authorizer(None)
        self.read = [name for name in names if name in found]
        self._has_lists = not found.isdisjoint([*LISTS, *SCORES])
        self._labels: dict[str, set[str]] = {name: set() for name in SCORES if name in found}  # so far
        self._asked = _find_labels(where)

    def find(self, records: Iterable[Record]) -> set[int]:
        """The numbers of those for which it is true. Raises sqlite3.Error."""
        self._database.execute(f"DELETE FROM {self._table}")
        names, places = ", ".join(map('"{}"'.format, self.read)), ", ".join("?" * len(self.read))
        insert = f"INSERT INTO {self._table} ({names}) VALUES ({places})"
        self._database.executemany(insert, map(self._row_of, records))
        return {number for (number,) in self._database.execute(self._question)}

    def _row_of(self, record: Record) -> list[Any]:
        document = msgspec.json.decode(record.sidecar)
        row = self._columns.row_of(record, document)
        if self._has_lists:
            row |= lists_of(document) | scores_of(document)
        for name, labels in self._labels.items():
            labels.update(row[name] or ())
        return [_plain(row[name]) for name in self.read]

    def check_labels(self) -> None:
        """Raises WrongArgument if it asks for a label that none of the images had, though they had others."""
        for name, label in self._asked:
            if (known := self._labels.get(name)) and label not in known:
                near = difflib.get_close_matches(label, known, n=1, cutoff=0.5)
                some = ", ".join(sorted(known)[:MOST_NAMED])
                raise WrongArgument(
                    f"--where asks for {name}({label!r}), and none of these images has that label; "
                    + (f"did you mean {near[0]!r}?" if near else f"they have for example {some}.")
                )


def reads_near(where: str, columns: ExportColumns) -> bool:
    """Raises WrongArgument if it is no condition."""
    with open_condition(where, columns) as condition:
        return not NEAR.keys().isdisjoint(condition.read)


def _find_labels(where: str) -> list[tuple[str, str]]:
    """Functions of SCORES and the labels that they are asked for by name."""
    return [(part[2].lower(), part[3][1:-1].replace("''", "'")) for part in _PART.finditer(where) if part[3]]


def _look_up(scores: str | None, label: Any) -> float | None:
    return msgspec.json.decode(scores, type=dict[str, float]).get(label) if scores else None


def _name_near(problem: str, names: Sequence[str]) -> str:
    """What to write in place of a column or function that there is not. problem: as SQLite says it."""
    kind, _, name = problem.rpartition(": ")
    if name.lower() in NEAR:
        return f"{name} needs --near, for example --near 0.95."
    if kind == "no such column" and name.lower() in GROUPS:
        return "with --near 0.95 the column near_duplicate_of has the image that represents a group."
    near = difflib.get_close_matches(name.lower(), names if kind.startswith("no such") else (), n=1)
    return f"did you mean {near[0]}?" if near else "docs/results.md lists the columns."


def _check_quoted(where: str, names: Iterable[str]) -> None:
    """SQLite takes a name between double quotes that is no column for a text. Raises ValueError instead."""
    parts = (part[1] or "" for part in _PART.finditer(where))
    quoted = {part[1:-1].lower() for part in parts if part.startswith('"')}
    if unknown := quoted - {name.lower() for name in names}:
        raise ValueError(f"no such column: {min(unknown)}")


def _plain(value: Any) -> Any:
    """As SQLite takes it."""
    if isinstance(value, int) and abs(value) > LARGEST:
        return float(value)
    return msgspec.json.encode(value).decode() if isinstance(value, list | dict) else value
