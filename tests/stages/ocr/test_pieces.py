from __future__ import annotations

import numpy as np

from stages.ocr.pieces import replace_parts


def box(left: float, top: float, right: float, bottom: float) -> list[list[float]]:
    return [[left, top], [right, top], [right, bottom], [left, bottom]]


def replace(first: list[list[list[float]]], second: list[list[list[float]]]) -> tuple[list[int], list[int]]:
    return replace_parts(
        np.array(first, np.float32), [True] * len(first), np.array(second, np.float32).reshape(-1, 4, 2)
    )


def test_a_large_line_replaces_its_parts_and_no_small_line() -> None:
    halves, note = [box(0, 0, 900, 600), box(800, 20, 1700, 600)], box(0, 650, 200, 700)
    assert replace([*halves, note], [box(0, 0, 1700, 600)]) == ([2], [0])
    assert replace([note], [box(0, 0, 1700, 750)]) == ([0], [])


def test_a_part_that_is_higher_than_the_whole_line_goes_too() -> None:
    assert replace([box(0, 0, 400, 110), box(450, 0, 800, 110)], [box(0, 20, 800, 90)]) == ([], [0])


def test_a_line_that_was_read_whole_stays_and_its_part_goes() -> None:
    assert replace([box(0, 0, 1700, 600), box(0, 0, 500, 500)], [box(20, 20, 1650, 580)]) == ([0], [])


def test_nothing_at_the_second_scale_changes_nothing() -> None:
    assert replace([box(0, 0, 1700, 600)], []) == ([0], [])
