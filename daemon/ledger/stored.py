"""Reads what the ledger stores about an image's bytes, and compares each row with its checksum.
Damaged rows are left out."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from daemon.ledger import checksums
from daemon.ledger.checksums import Named
from daemon.ledger.reading import Stopped, stopping
from daemon.ledger.statements import SQL, run_rows
from daemon.messages import Output

CHUNK = 1024  # rows in memory at a time

GoOn = Callable[[], bool]


class Key(NamedTuple):
    """A row of `result` or, with no model, of `content`."""

    digest: bytes
    model: int | None


class Stored(NamedTuple):
    """What is known about some digests. damaged: rows whose checksum does not match."""

    contents: Mapping[bytes, tuple[str, int, int, int]]  # format, width, height, pages
    results: Mapping[bytes, Mapping[int, Output]]
    damaged: set[Key]


def read_stored(
    connection: sqlite3.Connection, digests: Iterable[bytes], models: Mapping[int, Named]
) -> Stored:
    """Contents and results of these digests, without damaged ones. Bytes without content have no results."""
    wanted = [(digest,) for digest in digests]
    contents: dict[bytes, tuple[str, int, int, int]] = {}
    results: dict[bytes, dict[int, Output]] = {}
    damaged: set[Key] = set()
    for row in run_rows(connection, "contents", wanted):
        if _is_whole_content(row):
            contents[row["digest"]] = (row["format"], row["width"], row["height"], row["pages"])
        else:
            damaged.add(Key(row["digest"], None))
    for row in run_rows(connection, "results", wanted) if contents or damaged else ():
        if _is_whole_result(row, models):
            results.setdefault(row["digest"], {})[row["model"]] = Output(row["payload"], row["seconds"])
        else:
            damaged.add(Key(row["digest"], row["model"]))
    return Stored(contents, results, damaged)


def _is_whole_content(row: sqlite3.Row) -> bool:
    fields = (row["digest"], row["format"], row["width"], row["height"], row["pages"])
    return checksums.holds(row["checksum"], checksums.of_content, *fields)


def _is_whole_result(row: sqlite3.Row, models: Mapping[int, Named]) -> bool:
    if (model := models.get(row["model"])) is None:
        return False
    fields = (row["digest"], model.stage, model.fingerprint, row["payload"], row["seconds"])
    return checksums.holds(row["checksum"], checksums.of_result, *fields)


def find_damaged(connection: sqlite3.Connection, models: Mapping[int, Named], go_on: GoOn) -> Iterator[Key]:
    """Every row of `content` and `result` whose checksum does not match. go_on: called now and then;
    false stops early."""
    last: bytes | int = b""
    while go_on() and (rows := connection.execute(SQL["all_contents"], (last, CHUNK)).fetchall()):
        yield from (Key(row["digest"], None) for row in rows if not _is_whole_content(row))
        last = rows[-1]["digest"]
    last = 0
    while go_on() and (rows := connection.execute(SQL["all_results"], (last, CHUNK)).fetchall()):
        yield from (Key(row["digest"], row["model"]) for row in rows if not _is_whole_result(row, models))
        last = rows[-1]["id"]


def find_fault_in_file(connection: sqlite3.Connection, go_on: GoOn) -> str:
    """What SQLite finds wrong when it reads the whole file; empty if nothing is wrong,
    or if `go_on` stopped it."""
    try:
        with stopping(connection, lambda: not go_on()):
            found: str = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    except Stopped:
        return ""
    return "" if found == "ok" else found.replace("\n", " ")
