from __future__ import annotations

import shutil
from pathlib import Path

import onnx
import pytest
import torch
from onnx import numpy_helper
from safetensors.torch import load_file, save_file
from torch import nn

from stages.contract.base import StageUnusable
from stages.ocr.onnxfile import weight_files
from stages.pretrained.soundness import check_shapes, refuse_nan
from stages.registry import registry
from stages.weights.packs import MINI, open_pack, resolve

FILES = {
    "yolo": "yolo.safetensors",
    "clip": "model.safetensors",
    "blip": "model.safetensors",
    "ocr": "rec/rec.onnx",
}


def spoil(stage: str, folder: Path) -> Path:
    """The model of a stage in the folder, with one value that is NaN; returns the file."""
    file = folder / FILES[stage]
    if stage == "ocr":
        file.parent.mkdir(parents=True)
        model = onnx.load(str(weight_files()["rec"]))
        for tensor in model.graph.initializer:
            array = numpy_helper.to_array(tensor).copy()
            if array.ndim == 4:
                array[0, 0, 0, 0] = float("nan")
                tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
                break
        onnx.save(model, str(file))
        return file
    source = MINI if stage == "yolo" else MINI / stage
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("manifest.json", "clip", "blip"))
    state = load_file(file)
    next(tensor for tensor in state.values() if tensor.ndim > 1).view(-1)[3] = float("nan")
    save_file(state, file, metadata={"format": "pt"})
    return file


@pytest.mark.parametrize("stage", FILES)
def test_a_model_with_a_weight_that_is_nan_is_refused_by_name(stage: str, tmp_path: Path) -> None:
    file = spoil(stage, tmp_path / "own")
    spec = resolve(open_pack("mini", tmp_path), stage, {"model": str(tmp_path / "own"), "batch_size": 1})
    with pytest.raises(
        StageUnusable, match=r"has weights that are not numbers \(NaN\), .* first.*use an earlier"
    ) as refused:
        registry.build(spec, "cpu").load()
    assert str(refused.value).startswith((str(file), str(file.parent)))


def test_infinite_weights_and_whole_numbers_are_left_to_the_model() -> None:
    network = nn.BatchNorm1d(2)
    network.weight.data[0] = float("-inf")
    refuse_nan(network, "here")


def test_weights_of_another_shape_are_counted_and_the_first_is_named() -> None:
    network = nn.Linear(3, 2)
    with pytest.raises(
        StageUnusable, match=r"2 of 2 are .*, weight first \(expected: 2×3, found: 2×4\)\. Copy"
    ):
        check_shapes(network, {"weight": torch.zeros(2, 4)}, "here", "Copy it.")
    state = network.state_dict()
    with pytest.raises(StageUnusable, match=r"1 of 2 .*, more first \(expected: none, found: 1\)"):
        check_shapes(network, {**state, "more": torch.zeros(1)}, "here", "Copy it.")
    check_shapes(network, state, "here", "")
