from __future__ import annotations

import warnings
from typing import Any

import cv2
import numpy as np
import pytest

from stages.ocr import dbpost
from stages.ocr.dbpost import area, grow, mask_text, order_corners, order_rows

Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def rapid() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # third-party deprecations on import
        from rapidocr.ch_ppocr_det.utils import DBPostProcess
    return DBPostProcess(thresh=0.3, box_thresh=0.5, unclip_ratio=1.6, use_dilation=True)


def sort_boxes(boxes: Any) -> Any:
    from rapidocr.ch_ppocr_det.main import TextDetector

    return TextDetector.sorted_boxes(boxes)


def draw_map(seed: int, *shape: int) -> Array:
    """Bars of text at all angles and brightnesses, some cut by the edge,
    some too small or too faint to count."""
    random = np.random.default_rng(seed)
    height, width = shape or 32 * random.integers(4, 24, 2)
    bars = np.zeros((height, width), np.float32)
    for _ in range(random.integers(1, 25)):
        center, size = random.uniform(0, (width, height)), random.uniform((3, 1), (width / 2, 30))
        angle = random.choice([0, random.uniform(-5, 5), random.uniform(0, 180), 45])
        corners = cv2.boxPoints((center.tolist(), size.tolist(), float(angle)))
        cv2.fillPoly(bars, [corners.astype(np.int32)], random.uniform(0.3, 1))
    return np.asarray(cv2.GaussianBlur(bars, (0, 0), 1.2))


def find_boxes(maps: Array, sizes: Any, box_threshold: float = 0.5) -> Any:
    return dbpost.find_boxes(maps, mask_text(maps), sizes, box_threshold)


@pytest.mark.parametrize("seed", range(40))
def test_boxes_are_rapidocrs(rapid: Any, seed: int) -> None:
    bars = draw_map(seed)
    width, height = np.random.default_rng(seed).integers(60, 2000, 2).tolist()
    theirs = sort_boxes(rapid(bars[None, None], (height, width))[0])
    [ours] = find_boxes(bars[None], [(width, height)])
    assert np.array_equal(ours, theirs.reshape(-1, 4, 2))


@pytest.mark.parametrize("seed", range(12))
def test_noise_leaves_few_outlines_and_the_boxes_of_rapidocr(rapid: Any, seed: int) -> None:
    random = np.random.default_rng(seed)
    noisy = draw_map(seed, 256, 320)
    noisy[random.random(noisy.shape) < random.choice([0.003, 0.01])] = 1  # in the sky
    noisy[random.random(noisy.shape) < random.choice([0.003, 0.3])] = 0  # in the bars
    mask = cv2.dilate((noisy > 0.3).view(np.uint8), np.ones((2, 2), np.uint8))
    contours = cv2.findContours(mask, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)[0]
    assert 40 < len(contours) < dbpost.MOST_CONTOURS
    assert len(cv2.findContoursLinkRuns(next(mask_text(noisy[None])))[0]) < len(contours) / 8
    theirs = sort_boxes(rapid(noisy[None, None], (256, 320))[0])
    assert np.array_equal(find_boxes(noisy[None], [(320, 256)])[0], theirs.reshape(-1, 4, 2))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_holes_of_up_to_three_pixels_are_filled_and_larger_ones_are_not(size: int) -> None:
    whole = np.ones((12, 12), np.uint8)
    holed = whole.copy()
    holed[4 : 4 + size, 5 : 5 + size] = 0
    assert np.array_equal(dbpost.drop_specks(holed), whole) == (size < 4)


def test_a_hole_is_filled_where_only_the_smaller_window_has_a_fence() -> None:
    mask = np.ones((12, 12), np.uint8)
    mask[4:6, 4:6] = mask[4:6, 7] = 0  # one column apart: around no window of 3×3 all pixels are set
    assert dbpost.drop_specks(mask)[4:6, 4:6].all()


@pytest.mark.parametrize(("width", "found"), [(3, 0), (4, 1)])
def test_an_outline_of_fewer_than_four_columns_is_too_narrow(width: int, found: int) -> None:
    mask = np.zeros((30, 30), np.uint8)
    mask[5:25, 10 : 10 + width] = 1
    assert len(dbpost.find_outlines(mask)) == found


def test_thousands_of_narrow_bars_take_no_place_of_text() -> None:
    page = np.zeros((800, 800), np.float32)
    for column in (0, 1):
        page[:500, column::5] = 1
    page[5:500:10] = page[6:500:10] = page[7:500:10] = page[8:500:10] = page[9:500:10] = 0
    page[520:780:10, 50:700] = page[521:780:10, 50:700] = page[522:780:10, 50:700] = 1
    page[523:780:10, 50:700] = 1
    assert len(find_boxes(page[None], [(800, 800)])[0]) == 26


def test_the_mean_of_bytes_is_that_of_opencv_also_where_a_box_is_outside_the_map() -> None:
    maps = np.random.default_rng(0).integers(0, 256, (1, 50, 60), np.uint8)
    quads = np.array(
        [[(5, 20), (30, 4), (50, 25), (20, 45)], [(60, 60), (70, 65), (65, 75), (55, 70)]], np.float32
    )
    means = dbpost.mean_inside(maps, np.zeros(2, np.int64), quads)
    inside = cv2.fillPoly(np.zeros((50, 60), np.uint8), [quads[0].astype(np.int32)], 1)
    assert means.tolist() == [cv2.mean(maps[0], inside)[0] / 255, 0]


@pytest.mark.parametrize("width", [1, 4])
def test_more_noise_than_outlines_are_looked_at_hides_no_text(rapid: Any, width: int) -> None:
    """rapidocr looks at the lowest 1,000 outlines, of whatever size."""
    page = np.zeros((640, 640), np.float32)
    for column in range(width):
        page[::6, column::8] = 1
    page[280:350] = 0
    page[300:330, 50:400] = 1
    assert len(rapid(page[None, None], (640, 640))[0]) == 0
    assert len(find_boxes(page[None], [(640, 640)])[0]) == 1


def test_maps_find_together_what_each_finds_alone() -> None:
    maps = np.stack([draw_map(seed, 320, 480) for seed in range(12)])
    maps[[0, 5, 11]] = 0
    sizes = np.random.default_rng(0).integers(60, 2000, (12, 2)).tolist()
    together = find_boxes(maps, sizes)
    assert sum(len(found) > 1 for found in together) > 6
    for probabilities, size, found in zip(maps, sizes, together, strict=True):
        assert np.array_equal(found, find_boxes(probabilities[None], [size])[0])


@pytest.mark.parametrize("slant", [0.0, 4.0, 180.0])
def test_a_box_grows_to_clippers_outline(rapid: Any, slant: float) -> None:
    random = np.random.default_rng(int(slant))
    for _ in range(300):
        center, size = random.uniform(20, 900, 2), random.uniform(3, (600, 60))
        corners = cv2.boxPoints((center.tolist(), size.tolist(), random.uniform(-slant, slant)))
        ours = cv2.convexHull(grow(order_corners(corners[None]), 1.6)[0])
        theirs = cv2.convexHull(rapid.unclip(corners).astype(np.int32))
        assert {tuple(point) for point in ours[:, 0].tolist()} == {
            tuple(point) for point in theirs[:, 0].tolist()
        }


def test_probabilities_as_bytes_find_the_same_boxes() -> None:
    bars = draw_map(4)[None]
    as_bytes = np.round(bars * 255).astype(np.uint8)
    [exact] = find_boxes(bars, [(900, 700)])
    assert len(exact) > 3
    assert np.array_equal(find_boxes(as_bytes, [(900, 700)])[0], exact)


def test_a_map_without_text_has_no_boxes() -> None:
    nothing = np.zeros((1, 64, 96), np.float32)
    assert find_boxes(nothing, [(96, 64)])[0].shape == (0, 4, 2)


def test_a_faint_box_counts_only_below_its_score() -> None:
    bars = np.zeros((1, 96, 96), np.float32)
    bars[0, 30:50, 20:80] = 0.45
    assert len(find_boxes(bars, [(96, 96)])[0]) == 0
    assert len(find_boxes(bars, [(96, 96)], box_threshold=0.4)[0]) == 1


def test_boxes_are_read_row_by_row() -> None:
    origins = np.array([[200, 12], [10, 95], [5, 10], [100, 19], [50, 100]], dtype=np.float32)
    quads = origins[:, None] + np.array([[0, 0], [40, 0], [40, 8], [0, 8]], dtype=np.float32)
    quads, owner = np.concatenate([quads, quads]), np.repeat([1, 0], 5)
    order = order_rows(quads[:, 0], owner)
    assert quads[order, 0].tolist() == 2 * [[5, 10], [100, 19], [200, 12], [10, 95], [50, 100]]
    assert owner[order].tolist() == 5 * [0] + 5 * [1]


def test_an_area_is_the_same_in_either_direction() -> None:
    quad = np.array([[[0, 0], [4, 0], [4, 3], [0, 3]]], dtype=np.float32)
    assert area(quad) == area(quad[:, ::-1]) == 12
