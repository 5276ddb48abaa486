"""The statements of ledger.sql by name, and how to run one for a batch of rows in one call of SQLite."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from importlib import resources
from typing import Any

_CHUNKS = (256, 128, 64, 32, 16, 8, 4, 2, 1)  # few sizes: the connection keeps the prepared statements


def read_statements(folder: str, file: str, conditions: Sequence[str] = ()) -> dict[str, str]:
    """The statements of a file by name. folder: of a package. conditions: statements that stand in others."""
    text = resources.files(folder).joinpath(file).read_text()
    parts = re.split(r"^-- name: (\w+)\n", text, flags=re.MULTILINE)
    statements = {name: body.strip() for name, body in zip(parts[1::2], parts[2::2], strict=True)}
    for condition in conditions:
        text = statements.pop(condition)
        statements = {name: body.replace(f":{condition}", text) for name, body in statements.items()}
    return statements


SQL = read_statements(
    "daemon.ledger", "ledger.sql", ("is_newest", "is_known", "is_spare", "is_skipped", "is_awaited")
)


def run_rows(
    connection: sqlite3.Connection, name: str, rows: Sequence[Sequence[Any]], *before: Any
) -> list[Any]:
    """Run a statement with `:rows` for many rows, in few calls; returns the rows that it returns.

    before: parameters that come before the rows. Rows of one column become a plain list, as for IN.
    """
    returned: list[Any] = []
    start = 0
    for chunk in _CHUNKS:
        while len(rows) - start >= chunk:
            part = rows[start : start + chunk]
            start += chunk
            values = [value for row in part for value in row]
            if (key := (name, chunk, len(part[0]))) not in _expanded:
                row = "?" if key[2] == 1 else f"({', '.join('?' * key[2])})"
                _expanded[key] = SQL[name].replace(":rows", ", ".join([row] * chunk))
            returned += connection.execute(_expanded[key], (*before, *values)).fetchall()
    return returned


_expanded: dict[tuple[str, int, int], str] = {}  # by name, rows and columns
