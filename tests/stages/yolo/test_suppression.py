from __future__ import annotations

from math import inf

import numpy as np
import pytest
import torch
from ultralytics.utils.nms import non_max_suppression
from ultralytics.utils.ops import scale_boxes

from stages.yolo.letterbox import Letterbox
from stages.yolo.suppression import keep_confident, select, suppress


def draw_predictions(images: int, classes: int, anchors: int) -> torch.Tensor:
    """Random boxes, many of which overlap."""
    torch.manual_seed(classes)
    boxes = torch.cat((torch.rand(images, 2, anchors) * 300, torch.rand(images, 2, anchors) * 200), dim=1)
    return torch.cat((boxes, torch.rand(images, classes, anchors) ** 2), dim=1)


@pytest.mark.parametrize(("classes", "anchors"), [(1, 900), (2, 500), (2, 6), (80, 300)])
@pytest.mark.parametrize(("confidence", "most"), [(0.25, 300), (0.0, 7), (0.9999, 300)])
def test_the_boxes_that_stay_are_those_of_ultralytics(
    classes: int, anchors: int, confidence: float, most: int
) -> None:
    predictions = draw_predictions(3, classes, anchors)
    if predictions.shape[-1] == 6:  # which ultralytics takes for end to end
        predictions = torch.cat((predictions, predictions[..., :1]), dim=2)
    theirs = non_max_suppression(predictions.clone(), confidence, 0.7, max_det=most, max_time_img=inf)
    ours = suppress(keep_confident(predictions, confidence), confidence, 0.7, most)
    for found, expected in zip(ours, theirs, strict=True):
        assert torch.allclose(found, expected)


def test_nothing_above_the_threshold_gives_no_boxes() -> None:
    predictions = draw_predictions(2, 3, 10) * 0.1
    assert [len(found) for found in suppress(keep_confident(predictions, 0.5), 0.5, 0.7, 9)] == [0, 0]


def test_end_to_end_predictions_are_only_cut() -> None:
    rows = torch.tensor([[0, 0, 9, 9, score, 1] for score in (0.9, 0.6, 0.3)])
    assert [found.tolist() for found in select(rows[None], 0.5, 300)] == [rows[:2].tolist()]
    assert [found.tolist() for found in select(rows[None], 0.1, 1)] == [rows[:1].tolist()]


def test_boxes_come_back_to_the_image_as_those_of_ultralytics() -> None:
    rng = np.random.default_rng(0)
    sizes = [
        (1080, 810),
        (1400, 701),
        (3047, 1221),
        (7, 5),
        (1, 3000),
        *rng.integers(1, 4000, (300, 2)).tolist(),
    ]
    for height, width in sizes:
        box = Letterbox.fit(height, width, 640, 32)
        corners = rng.uniform(0, 1, (20, 4)) * np.tile((box.width, box.height), 2)
        expected = scale_boxes(box.canvas, corners.copy(), (height, width))
        assert np.allclose(box.unplace(corners, height, width), expected), (height, width)
