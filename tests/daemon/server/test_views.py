"""What the templates show of an image."""

from __future__ import annotations

from pathlib import Path

import pytest
from jinja2 import Environment, PackageLoader

from daemon.config.sections import PageSection
from daemon.server.views import SettingsTable, list_tables, say, view_of
from tests.makers import make_record


def test_a_card_names_the_folder_in_the_inbox_as_pages_of_documents_have_equal_names() -> None:
    templates = Environment(loader=PackageLoader("daemon.server"), autoescape=True)
    card = templates.get_template("card.html", globals={"url": PageSection().address})
    for path, told in ((b"a.pdf.unpacked/page-0001.png", True), (b"page-0001.png", False)):
        view = view_of(make_record(Path("/srv/inbox"), path))
        assert ("a.pdf.unpacked</bdi>" in card.render(view=view)) == told


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
