from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest

from stages.yolo.structure import (
    SIZES,
    Size,
    describe,
    find_size,
    has_library,
    list_backbone,
    list_head,
    list_layers,
)
from tests.stages.yolo.detectors import read_structure


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
    plain = describe(Size(0.33, 0.125), 16)
    assert find_size(plain) == Size(0.33, 0.125)
    changes: list[dict[str, Any]] = [
        {"activation": "nn.ReLU()"},
        {"end2end": True},
        {"reg_max": 1},
        {"ch": 4},
        {"scale": "z"},
        {"scales": [1]},
        {"scale": ["n"]},
        {"task": "pose"},
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


@pytest.mark.parametrize("letter", SIZES)
def test_the_structures_of_version_8_0_are_recognized(letter: str) -> None:
    """They have factors instead of scales, and the limit of the channels in their rows."""
    size = SIZES[letter]
    limit = size.max_channels
    old = {"nc": 80, "ch": 3, "depth_multiple": size.depth, "width_multiple": size.width}
    assert find_size(old | {"backbone": list_backbone(limit), "head": list_head(limit)}) == size
    assert find_size(old | {"backbone": list_backbone(640), "head": list_head(640)}) is None
    assert find_size(old | {"backbone": [1], "head": [[1]]}) is None


def test_a_folder_that_pip_left_behind_is_not_ultralytics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert has_library()
    (tmp_path / "ultralytics" / "__pycache__").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "ultralytics")
    assert not has_library()
