from __future__ import annotations

import copy
from typing import Any

import pytest

from stages.yolo.library import read_structure
from stages.yolo.structure import SIZES, Size, describe, find_size, list_layers


@pytest.mark.parametrize("letter", SIZES)
def test_yolov8_is_recognized_in_every_size(letter: str) -> None:
    published = read_structure(f"yolov8{letter}.yaml")
    assert find_size(published) == find_size(f"yolov8{letter}.yaml") == SIZES[letter]
    assert published["backbone"] + published["head"] == [
        *describe(SIZES[letter], 80)["backbone"],
        *describe(SIZES[letter], 80)["head"],
    ]


@pytest.mark.parametrize(
    "name", ["yolo11n", "yolo26n", "yolov8n-p2", "yolov8n-p6", "yolov8n-pose", "yolov9t", "yolov5nu"]
)
def test_any_other_network_is_left_to_ultralytics(name: str) -> None:
    assert find_size(f"{name}.yaml") is None
    published = read_structure(f"{name}.yaml")
    assert find_size(published) is None


def test_a_changed_yolov8_is_left_to_ultralytics() -> None:
    plain = describe(Size(0.33, 0.125, 1024), 16)
    assert find_size(plain) == Size(0.33, 0.125, 1024)
    changes: list[dict[str, Any]] = [
        {"activation": "nn.ReLU()"},
        {"end2end": True},
        {"reg_max": 1},
        {"ch": 4},
        {"scale": "z"},
        {"head": plain["head"][:-1]},
        {"backbone": None},
    ]
    for change in changes:
        assert find_size({**plain, **change}) is None, change
    wider = copy.deepcopy(plain)
    wider["backbone"][0][3][0] = 80
    assert find_size(wider) is None


def test_the_layers_that_only_ultralytics_has_are_named() -> None:
    assert list_layers(read_structure("yolo11n.yaml")) == ["C2PSA", "C3k2"]
    assert list_layers("yolo11n.yaml") == list_layers(describe(SIZES["n"], 80)) == []
