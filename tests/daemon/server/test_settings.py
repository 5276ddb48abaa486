"""The configuration as the page shows it."""

from __future__ import annotations

import pytest

from daemon.server.settings import SettingsTable, list_tables, say


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


def test_each_section_with_keys_of_its_own_has_a_table() -> None:
    config = {
        "inbox": [{"path": "/a"}, {"path": "/b"}],
        "stages": {"ocr": {"options": {}, "mps": True}},
        "second_look": [],
    }
    assert [*list_tables(config)] == [
        SettingsTable("inbox", [("path", "/a")]),
        SettingsTable("inbox", [("path", "/b")]),
        SettingsTable("stages.ocr", [("mps", "true")]),
    ]
