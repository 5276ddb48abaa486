"""The pictures of Grafana's boards in docs/: what the board's JSON asks for is what they show."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image

from tests.deploy.prometheus import needs_prometheus
from tests.deploy.queries import FOLDER, boards

DOCS = Path(__file__).parents[2] / "docs"
RECORDING = DOCS / "boards.prom.xz"


@pytest.fixture(scope="module")
def drawing() -> Iterator[ModuleType]:
    yield from imported("drawing")


@pytest.fixture(scope="module")
def pictures() -> Iterator[ModuleType]:
    yield from imported("boards")


def imported(name: str) -> Iterator[ModuleType]:
    """A script of docs/, as it is run there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS))
        yield __import__(name)


class Panels(HTMLParser):
    """By its place in the grid, the words of each panel; and the number of its lines."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: dict[str, list[str]] = {}
        self.lines: dict[str, int] = {}
        self._place = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag in ("section", "h2"):
            self._place = (dict(attributes)["style"] or "").removeprefix("grid-area: ")
            self.words[self._place], self.lines[self._place] = [], 0
        self.lines[self._place] = self.lines.get(self._place, 0) + (tag == "polyline")

    def handle_data(self, data: str) -> None:
        self.words.setdefault(self._place, []).append(data)


def place_of(panel: dict[str, Any]) -> str:
    place = panel["gridPos"]
    return f"{place['y'] + 1} / {place['x'] + 1} / span {place['h']} / span {place['w']}"


@needs_prometheus
def test_each_panel_is_in_its_place_and_shows_what_a_run_has_measured(pictures: ModuleType) -> None:
    with pictures.replaying(RECORDING) as prometheus:
        charts = 0  # of images by outcome
        for board in boards().values():
            drawn = Panels(pictures.draw_board(board, prometheus))
            assert {place_of(panel) for panel in board["panels"]} <= drawn.words.keys()
            titles = {panel["title"]: drawn.words[place_of(panel)] for panel in board["panels"]}
            assert [title for title, words in titles.items() if words[0] != title] == []
            assert [title for title, words in titles.items() if "No data" in words] == []
            for outcomes in [panel for panel in board["panels"] if panel["title"] == "Images by outcome"]:
                assert {"done", "failed", "gone", "skipped"} <= set(drawn.words[place_of(outcomes)])
                assert drawn.lines[place_of(outcomes)] >= 4
                charts += 1
        assert charts == 2


def test_a_board_that_has_nothing_to_choose_is_not_drawn(pictures: ModuleType) -> None:
    class Empty:
        span = pictures.Span(0.0, 60.0, 5.0)

        def ask(self, query: str) -> list[Any]:
            return []

    with pytest.raises(LookupError, match="no Machine"):
        pictures.draw_board(boards()["visiond-gpu"], Empty())


def test_pictures_are_of_the_boards_as_they_are(pictures: ModuleType) -> None:
    """Without Prometheus and Chromium too."""
    shown = (DOCS / "monitoring.md").read_text()
    named = re.findall(r"\((board-[a-z-]+\.webp)\)", shown)
    assert {
        "board-visiond-top.webp",
        "board-visiond.webp",
        "board-visiond-gpu.webp",
        "board-visiond-inbox.webp",
    } <= set(named)
    for name in named:
        board = FOLDER / f"{name.removeprefix('board-').removesuffix('-top.webp').removesuffix('.webp')}.json"
        with Image.open(DOCS / name) as picture:
            drawn = picture.getexif().get(pictures.DESCRIPTION)
        assert drawn == pictures.digest_of(board), "run: make picture"


@pytest.mark.parametrize(
    ("value", "unit", "written"),
    [
        (0, "s", "0 s"),
        (0.0125, "s", "12.5 ms"),
        (60, "s", "1 min"),
        (335, "s", "5.58 mins"),
        (3 << 30, "bytes", "3 GiB"),
        (1536, "bytes", "1.5 KiB"),
        (0.256, "percentunit", "25.6%"),
        (1234, "short", "1.23 K"),
        (319, "short", "319"),
        (720.4, "suffix: images/s", "720 images/s"),
    ],
)
def test_values_are_written_as_grafana_writes_them(
    value: float, unit: str, written: str, drawing: ModuleType
) -> None:
    assert drawing.write_value(value, unit) == written


def test_every_unit_of_a_board_can_be_written(drawing: ModuleType) -> None:
    for board in boards().values():
        for panel in board["panels"]:
            if panel["type"] != "row":
                assert drawing.write_value(7.0, panel["fieldConfig"]["defaults"]["unit"])


def test_stacked_series_lie_on_top_of_each_other_and_end_where_values_are_missing(
    drawing: ModuleType,
) -> None:
    first = drawing.Series("a", [(0.0, 1.0), (5.0, 2.0), (20.0, 3.0)])
    second = drawing.Series("b", [(0.0, 10.0), (5.0, 10.0), (20.0, 10.0)])
    assert drawing.stack([first, second])[1].points == [(0.0, 11.0), (5.0, 12.0), (20.0, 13.0)]
    assert [len(part) for part in drawing.split(first.points)] == [2, 1]
    assert drawing.limits([first, second], stacked=True) > 13 > drawing.limits([first, second], stacked=False)


def test_a_label_never_becomes_markup_and_what_has_no_room_is_counted(drawing: ModuleType) -> None:
    legends = [drawing.Series(f"<b>{number}</b>", [(0.0, 1.0)]) for number in range(40)]
    drawn = drawing.draw_legends(legends, 300)
    assert "<b>" not in drawn
    shown = drawn.count("<i ")
    assert 0 < shown < 40
    assert f"… {40 - shown} more" in drawn


def test_a_sample_is_recorded_with_its_time_and_the_labels_that_prometheus_adds() -> None:
    from benchmarks.recording import label

    assert label('visiond_x_total{bin="A"} 3.0', 12.5) == (
        'visiond_x_total{bin="A",instance="127.0.0.1:9464",job="visiond"} 3.0 12.500'
    )
    assert label("visiond_up 1", 2.0) == 'visiond_up{instance="127.0.0.1:9464",job="visiond"} 1 2.000'
