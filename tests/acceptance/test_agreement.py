"""Agreement with the libraries: which of predict's boxes count as found."""

from __future__ import annotations

import torch

from benchmarks.answers import Reference, compare
from stages.registry import fake
from stages.yolo.descriptor import Detection, Objects


def test_a_box_is_found_where_one_of_ours_has_its_label_and_nearly_its_place() -> None:
    boxes = [(0.0, 0.0, 100.0, 100.0)] * 3
    reference = Reference("", torch.ones(16), torch.tensor(boxes), ["cat", "dog", "cup"])
    near, off = (0.0, 0.0, 100.0, 91.0), (0.0, 0.0, 100.0, 89.0)
    ours = [Detection("cat", 0.9, near), Detection("dog", 0.9, off), Detection("cap", 0.9, near)]
    answers = {
        "yolo": Objects(ours, 3, 3, 0.0),
        "clip": fake.answer("clip", 1, 640, 480, frozenset()),
        "blip": fake.answer("blip", 1, 640, 480, frozenset({"clip"})),
    }
    seen = compare([answers], [reference])
    assert (seen.predicted, seen.boxes, seen.found) == (3, 3, 1)


def test_without_own_boxes_none_is_found() -> None:
    reference = Reference("", torch.ones(16), torch.ones(2, 4), ["cat", "dog"])
    answers = {
        "yolo": Objects([], 0, 0, 0.0),
        "clip": fake.answer("clip", 1, 640, 480, frozenset()),
        "blip": fake.answer("blip", 1, 640, 480, frozenset({"clip"})),
    }
    seen = compare([answers], [reference])
    assert (seen.predicted, seen.found, seen.overlap) == (2, 0, 0.0)
