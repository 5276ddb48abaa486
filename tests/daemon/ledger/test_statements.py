from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest

from daemon.ledger import statements
from daemon.ledger.statements import SQL, run_rows


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> Iterator[sqlite3.Connection]:
    monkeypatch.setitem(SQL, "test_insert", "INSERT INTO t (a, b) VALUES :rows RETURNING a;")
    monkeypatch.setitem(SQL, "test_select", "SELECT a FROM t WHERE b = ? AND a IN (:rows);")
    monkeypatch.setattr(statements, "_expanded", {})
    opened = sqlite3.connect(":memory:")
    opened.execute("CREATE TABLE t (a, b)")
    yield opened
    opened.close()


@pytest.mark.parametrize("count", [0, 1, 7, 8, 31, 127, 128, 129, 1000])
def test_every_row_is_used_once_and_what_it_returns_comes_back_in_order(
    connection: sqlite3.Connection, count: int
) -> None:
    returned = run_rows(connection, "test_insert", [(number, "x") for number in range(count)])
    assert returned == [(number,) for number in range(count)]
    assert connection.execute("SELECT a, b FROM t ORDER BY a").fetchall() == [
        (number, "x") for number in range(count)
    ]


def test_many_rows_take_few_statements(connection: sqlite3.Connection) -> None:
    calls: list[str] = []
    connection.set_trace_callback(calls.append)
    run_rows(connection, "test_insert", [(number, "x") for number in range(1000)])
    assert len([call for call in calls if call.startswith("INSERT")]) <= 20


def test_few_different_statements_serve_any_number_of_rows(connection: sqlite3.Connection) -> None:
    for count in range(300):
        run_rows(connection, "test_insert", [(number, "x") for number in range(count)])
    assert len(statements._expanded) <= 9


def test_rows_of_one_column_are_a_list_and_other_parameters_come_before_them(
    connection: sqlite3.Connection,
) -> None:
    run_rows(
        connection, "test_insert", [(number, "even" if number % 2 == 0 else "odd") for number in range(50)]
    )
    found = run_rows(connection, "test_select", [(number,) for number in range(10, 20)], "odd")
    assert sorted(found) == [(11,), (13,), (15,), (17,), (19,)]


def is_accepted(connection: sqlite3.Connection, statement: str) -> bool:
    named = re.findall(r":(\w+)", statement)
    try:
        connection.execute(
            f"EXPLAIN {statement}", dict.fromkeys(named, 0) if named else (0,) * statement.count("?")
        )
    except sqlite3.OperationalError:
        return False
    return True


@pytest.mark.parametrize("name", sorted(SQL.keys() - {"schema"}))
def test_every_statement_is_one_that_sqlite_accepts(name: str) -> None:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SQL["schema"])
        rows = ["?, ?", *(f"({', '.join('?' * columns)})" for columns in range(2, 20))]
        assert any(is_accepted(connection, SQL[name].replace(":rows", row)) for row in rows)
        assert not is_accepted(connection, "SELECT no_such_column FROM image")


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("fresh", "fresh"),
        ("again", "again"),
        ("next_again", "again"),
        ("owed", "owed"),
        ("oldest_pending", "fresh"),
    ],
)
def test_repeated_queries_do_not_read_finished_images(name: str, index: str) -> None:
    """Otherwise each batch would read all of a million images."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SQL["schema"])
        plan = connection.execute(f"EXPLAIN QUERY PLAN {SQL[name]}", (7,) * SQL[name].count("?")).fetchall()
    assert f"image USING INDEX {index} " in plan[0][3]
    assert not any("B-TREE" in step[3] for step in plan)


def test_images_without_a_sidecar_are_counted_without_reading_those_that_have_one() -> None:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SQL["schema"])
        wanted = {"before": 7, "image": 0}
        [step] = connection.execute(f"EXPLAIN QUERY PLAN {SQL['count_unwritten']}", wanted).fetchall()
    assert step[3] == "SCAN image USING INDEX owed"


def test_images_that_wait_are_counted_without_reading_the_finished_ones() -> None:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SQL["schema"])
        plan = connection.execute(f"EXPLAIN QUERY PLAN {SQL['waiting_by_inbox']}").fetchall()
    scans = {step[3] for step in plan if "image" in step[3]}
    assert len(scans) == 2
    assert all("USING INDEX fresh" in scan or "USING INDEX again" in scan for scan in scans)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("next_models", ("",)), ("count_made", {"models": "", "limit": 7, "inboxes": "[]"})],
)
def test_only_results_of_the_models_in_question_are_counted(name: str, parameters: Any) -> None:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SQL["schema"])
        plan = connection.execute(f"EXPLAIN QUERY PLAN {SQL[name]}", parameters).fetchall()
    steps = [step[3] for step in plan]
    assert any(step.startswith("SEARCH image USING") and "INDEX made (models" in step for step in steps)
    assert not any("B-TREE" in step or step.startswith("SCAN newer") for step in steps)


@pytest.mark.parametrize(
    ("name", "parameters", "first"),
    [("supersede", {"last": 7, "now": 7}, 2), ("failures_replaced", (7,), 0)],
)
def test_files_that_are_admitted_are_looked_up_and_older_ones_are_not_read(
    name: str, parameters: Any, first: int
) -> None:
    """Otherwise each group of new files would read all of a million images."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SQL["schema"])
        plan = connection.execute(f"EXPLAIN QUERY PLAN {SQL[name]}", parameters).fetchall()
    assert plan[first][3] == "SEARCH new USING INTEGER PRIMARY KEY (rowid>?)"
    assert not any("SCAN" in step[3] or "rowid<" in step[3] for step in plan)


@pytest.mark.parametrize("name", ["finished", "bin_counts"])
def test_an_export_reads_each_image_once_and_looks_its_newer_versions_up(name: str) -> None:
    """In the order of the table and with nothing sorted,
    so that a million images take a second and no memory."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SQL["schema"])
        plan = connection.execute(f"EXPLAIN QUERY PLAN {SQL[name]}", (7,) * SQL[name].count("?")).fetchall()
    steps = [step[3] for step in plan]
    assert steps[0] in ("SCAN image", "SEARCH image USING INTEGER PRIMARY KEY (rowid>?)")
    assert "SEARCH newer USING COVERING INDEX version (inbox=? AND path=?)" in steps
    assert not any("B-TREE FOR ORDER" in step for step in steps)
