"""What the page shows of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from daemon.config.loading import parse
from daemon.config.showing import Setting, list_tables, say

FOLDER = Path("/srv")


def changed(**document: Any) -> list[tuple[str, str, str, str]]:
    """Section, key, value and default of what differs."""
    tables = list_tables(parse(document, FOLDER), parse({}, FOLDER))
    return [(table.name, row.key, row.value, row.default) for table in tables for row in table.changed]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://hooks.example/services/T0/secret", "https://hooks.example/…"),
        ("https://me:secret@hooks.example:8443/?key=secret", "https://hooks.example:8443/…"),
        ("https://hooks.example?key=secret", "https://hooks.example/…"),
        ("https://hooks.example/", "https://hooks.example"),
        ("s3://key:secret@bucket/secret", "s3://bucket/…"),
    ],
)
def test_of_an_address_only_scheme_and_host_are_shown(url: str, shown: str) -> None:
    assert say(url) == shown
    assert say([url]) == shown
    assert say({"base": url}) == f"base = {shown}"


def test_only_what_differs_from_the_defaults_is_listed_as_changed() -> None:
    assert changed() == []
    assert changed(pipeline={"max_attempts": 7}, state={"path": "elsewhere"}) == [
        ("state", "path", "/srv/elsewhere", "/srv/state"),
        ("pipeline", "max_attempts", "7", "3"),
    ]
    assert changed(pipeline={"max_attempts": 3}) == changed(), "a key may be set to its default"


def test_sizes_have_the_units_that_daemon_toml_takes() -> None:
    assert changed(pipeline={"slab_bytes": 64 << 20, "decode_bytes": 3 << 30}) == [
        ("pipeline", "slab_bytes", "64 MiB", "0"),
        ("pipeline", "decode_bytes", "3 GiB", "2 GiB"),
    ]


def test_each_table_of_a_list_is_compared_with_one_in_which_nothing_is_set() -> None:
    inboxes = [{"path": "/a", "name": "a"}, {"path": "/b", "name": "b", "on_success": "move"}]
    assert changed(inbox=inboxes) == [
        ("inbox", "path", "/a", "/srv/inbox"),
        ("inbox", "name", "a", "–"),
        ("inbox", "path", "/b", "/srv/inbox"),
        ("inbox", "name", "b", "–"),
        ("inbox", "on_success", "move", "keep"),
    ]


def test_a_key_that_must_be_set_has_no_default() -> None:
    look = {"name": "again", "stage": "ocr", "backend": "fake", "when": "A"}
    (table,) = [
        each
        for each in list_tables(parse({"second_look": [look]}, FOLDER), parse({}, FOLDER))
        if each.name == "second_look"
    ]
    assert [row.key for row in table.changed if not row.default] == ["name", "when", "stage"]


def test_every_key_is_in_one_of_both_lists_with_its_description() -> None:
    tables = [*list_tables(parse({}, FOLDER), parse({}, FOLDER))]
    rows: list[Setting] = [row for table in tables for row in table.rows]
    assert len(rows) == sum(len(table.changed) + len(table.usual) for table in tables) > 90
    assert all(row.about for row in rows)
