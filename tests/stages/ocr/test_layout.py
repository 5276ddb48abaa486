from __future__ import annotations

import random

import numpy as np
import pytest

from stages.ocr.dbpost import order_corners
from stages.ocr.direction import guess_turns, is_sure, score_reading, turn_corners
from stages.ocr.layout import order_lines
from tests.stages.ocr.documents import DOCUMENTS
from tests.stages.ocr.layouts import MAKERS, Page, draw_boxes, draw_scan

LEAST = {"answers": 15, "stories in other columns": 18}  # right of 20; of all others 19

SIZES = np.array([[90, 9], [35, 10], [30, 10]])
LINES = (
    np.array([[[0, 0]], [[5, 30]], [[50, 32]]]) + np.array([[0, 0], [1, 0], [1, 1], [0, 1]]) * SIZES[:, None]
)


def turn(quads: np.ndarray, way: int, degrees: float = 0.0) -> np.ndarray:
    """Boxes as a detector finds them on a page that was turned clockwise, and tilted a little."""
    angle = np.radians(90 * way + degrees)
    matrix = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    return order_corners((quads @ matrix).astype(np.float32) + 500)


@pytest.mark.parametrize("degrees", [0, -4, 4, 10])
@pytest.mark.parametrize("way", range(4))
def test_boxes_are_turned_to_the_direction_of_the_text(way: int, degrees: float) -> None:
    quads = turn(LINES, way, degrees)
    assert guess_turns(quads) == way % 2
    texts = turn_corners(quads, way)
    width, height = (np.linalg.norm(texts[:, 0] - texts[:, corner], axis=1) for corner in (1, 3))
    assert width.tolist() == pytest.approx([90, 35, 30], abs=0.01)
    assert height.tolist() == pytest.approx([9, 10, 10], abs=0.01)


@pytest.mark.parametrize("way", range(4))
def test_lines_are_ordered_as_they_are_read(way: int) -> None:
    quads = turn(LINES, way)[[2, 0, 1]]
    assert order_lines(quads, [""] * 3, way) == [1, 2, 0]


def test_vertical_lines_are_read_from_right_to_left() -> None:
    texts = ["吾輩は猫である", "名前はまだ", "無い"]
    assert order_lines(turn(LINES, 1)[[2, 0, 1]], [texts[i] for i in (2, 0, 1)]) == [1, 2, 0]


def test_letters_that_are_higher_than_wide_are_no_vertical_lines() -> None:
    quads = draw_boxes([(60, 60, 100, "A"), (160, 60, 100, "B"), (260, 60, 100, "7")], 0, random.Random(0))
    assert order_lines(quads, ["A", "B", "7"]) == [0, 1, 2]


def test_a_page_without_boxes_works() -> None:
    nothing = np.empty((0, 4, 2), np.float32)
    assert guess_turns(nothing) == 0
    assert turn_corners(nothing, 2).shape == (0, 4, 2)
    assert order_lines(nothing, [], 3) == []


def test_a_reading_with_more_characters_of_high_scores_scores_higher() -> None:
    assert is_sure([("some text", 0.99), ("x", 0.3)])
    assert not is_sure([("bec oh oth", 0.72)])
    assert not is_sure([])
    assert (
        score_reading([("before March 14th", 0.99)])
        > score_reading([("bec oh oth", 0.72)])
        > score_reading([("a lot of nothing at all", 0.4)])
        == 0
    )


@pytest.mark.parametrize("kind", MAKERS)
def test_the_lines_of_a_page_are_in_reading_order(kind: str) -> None:
    for degrees in (-2, -1, 0, 1, 2):
        pick = random.Random(f"{kind}{degrees}")
        page = MAKERS[kind](pick)
        mixed = pick.sample(range(len(page)), len(page))
        quads = draw_boxes(page, degrees, pick)[mixed]
        order = order_lines(quads, [page[i][3] for i in mixed])
        assert [page[mixed[i]][3] for i in order] == [cell[3] for cell in page], degrees


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_most_documents_are_in_reading_order_although_boxes_are_not_exact(kind: str) -> None:
    right = 0
    for seed in range(20):
        pick = random.Random(f"{kind}{seed}")
        page, quads = draw_scan(DOCUMENTS[kind](pick), pick, drop=0.2)
        mixed = pick.sample(range(len(page)), len(page))
        order = order_lines(quads[mixed], [page[i][3] for i in mixed])
        right += [mixed[i] for i in order] == list(range(len(page)))
    assert right >= LEAST.get(kind, 19)


def sentences(left: int, top: int, count: int, words: str) -> list[tuple[int, int, int, str]]:
    return [(left, top + 30 * i, 20, f"{words} {chr(97 + i)} and some more") for i in range(count)]


def rows(top: int, pitch: int, cells: list[list[tuple[int, str]]]) -> list[tuple[int, int, int, str]]:
    return [(left, top + pitch * i, 20, text) for i, row in enumerate(cells) for left, text in row]


SCANNED: dict[str, Page] = {  # what pages that were scanned have, and drawn ones did not
    "a line further in at the end of a column": [
        *sentences(60, 100, 4, "the left column says"),
        *[(60, 232, 20, "Options of all models"), (90, 262, 20, "see page 12"), (90, 292, 20, "and 13")],
        *sentences(500, 100, 5, "the right column says"),
    ],
    "a heading at the left, below two columns": [
        *sentences(60, 100, 6, "the left column says"),
        *sentences(500, 100, 6, "the right column says"),
        (60, 310, 20, "Other features"),
        *[(60, 340 + 30 * i, 20, "a line that is as wide as both columns of the page " * 2) for i in range(3)],
    ],
    "a number that runs up the margin": [
        *rows(100, 40, [[(60, f"{name}:"), (500, "none")] for name in ("Maker", "Brand", "Kind", "Sizes")]),
        (900, 120, -20, "91361993"),
    ],
    "blocks of fields, each with a heading": [
        *rows(70, 30, [[(150, "Your customer")], [(60, "Name"), (300, "Ada")], [(60, "Claim"), (300, "1008")]]),
        *rows(160, 30, [[(60, "Phone"), (300, "111-22")]]),
        *rows(70, 30, [[(790, "The vehicle")], [(700, "Year"), (900, "2022")], [(700, "Make"), (900, "Opel")]]),
        *rows(160, 30, [[(700, "Model"), (900, "Corsa")]]),
    ],
    "rows that begin further left than those above": [
        *rows(100, 28, [[(300, "SUB-TOTAL"), (640, "6.00")], [(300, "DISC"), (640, "0.00")], [(300, "TIP"), (640, "0.00")]]),
        *rows(184, 28, [[(60, "TOTAL"), (640, "6.00")], [(60, "Taxes of six percent are included in what you paid today")]]),
    ],
    "amounts beside lines with and without digits": [
        *rows(100, 30, [[(60, "TOTAL GST@6%"), (600, "RM 8.60")], [(60, "CASH PAID"), (600, "RM 20.00")]]),
        *rows(160, 30, [[(60, "CHANGE DUE"), (600, "RM 11.40")]]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", SCANNED)
def test_pages_as_they_are_scanned_are_in_reading_order(kind: str) -> None:
    page = SCANNED[kind]
    for degrees in (-2, -1, 0, 1, 2):
        pick = random.Random(degrees)
        quads = draw_boxes(page, degrees, pick)
        for i, (left, top, size, text) in enumerate(page):
            if size < 0:
                box = np.array([[left, top], [left - size, top], [left - size, top - size * len(text) // 2]])
                quads[i] = [*(box + 100), [left + 100, top - size * len(text) // 2 + 100]]
        mixed = pick.sample(range(len(page)), len(page))
        order = order_lines(quads[mixed], [page[i][3] for i in mixed])
        assert [page[mixed[i]][3] for i in order] == [cell[3] for cell in page], degrees


def test_hundreds_of_lines_are_ordered_without_repeats() -> None:
    pick = random.Random(0)
    page = [
        (pick.uniform(0, 900), pick.uniform(0, 900), pick.uniform(8, 90), "some words here")
        for _ in range(500)
    ]
    order = order_lines(draw_boxes(page, 1, pick), [cell[3] for cell in page])
    assert sorted(order) == list(range(500))
