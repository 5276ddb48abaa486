"""What the templates show of an image."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, PackageLoader

from daemon.config.sections import PageSection
from daemon.server.views import view_of
from tests.makers import make_record


def test_a_card_names_the_folder_in_the_inbox_as_pages_of_documents_have_equal_names() -> None:
    templates = Environment(loader=PackageLoader("daemon.server"), autoescape=True)
    card = templates.get_template("card.html", globals={"url": PageSection().address})
    for path, told in ((b"a.pdf.unpacked/page-0001.png", True), (b"page-0001.png", False)):
        view = view_of(make_record(Path("/srv/inbox"), path))
        assert ("a.pdf.unpacked</bdi>" in card.render(view=view)) == told
