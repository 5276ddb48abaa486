from __future__ import annotations

import random

import numpy as np
import pytest

from stages.ocr.dbpost import order_corners
from stages.ocr.direction import guess_turns, is_sure, score_reading, turn_corners
from stages.ocr.layout import order_lines
from tests.stages.ocr.documents import DOCUMENTS
from tests.stages.ocr.layouts import MAKERS, draw_boxes, draw_scan

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


def test_hundreds_of_lines_are_ordered_without_repeats() -> None:
    pick = random.Random(0)
    page = [
        (pick.uniform(0, 900), pick.uniform(0, 900), pick.uniform(8, 90), "some words here")
        for _ in range(500)
    ]
    order = order_lines(draw_boxes(page, 1, pick), [cell[3] for cell in page])
    assert sorted(order) == list(range(500))
