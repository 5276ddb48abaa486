from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from stages.contract.manifest import WeightsError
from stages.ocr.loading import open_detector, open_recognizer
from stages.ocr.onnxfile import read_characters, read_onnx, weight_files
from stages.ocr.ppocr import BLANK, Detector, Recognizer, fill_detector, group_depthwise
from tests.stages.ocr.runtime import open_small_detector, open_small_recognizer, run_onnx

FILES = weight_files()


@pytest.fixture(scope="module")
def detector() -> Detector:
    return open_small_detector()


@pytest.fixture(scope="module")
def recognizer() -> Recognizer:
    return open_small_recognizer()[0]


def draw_noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def run_role(role: str, rgb: torch.Tensor) -> np.ndarray[Any, Any]:
    return run_onnx(str(FILES[role]), rgb.flip(1).numpy())


@pytest.mark.parametrize("size", [(96, 320), (352, 256)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_detector_is_the_onnx_file(
    detector: Detector, size: tuple[int, int], layout: torch.memory_format
) -> None:
    pixels = draw_noise(2, 3, *size)
    with torch.inference_mode():
        ours = detector.to(memory_format=layout)(pixels.contiguous(memory_format=layout))
    theirs = run_role("det", pixels)[:, 0]
    assert ours.std() > 1e-4
    assert np.abs(ours.numpy() - theirs).max() < 1e-4


def test_depthwise_convolutions_in_groups_find_the_same() -> None:
    plain, grouped = open_small_detector(), open_small_detector()
    group_depthwise(grouped)
    assert grouped.get_submodule("neck.input_conv.0.depthwise_convolution").groups == 3
    with torch.inference_mode():
        assert torch.allclose(grouped(draw_noise(1, 3, 96, 160)), plain(draw_noise(1, 3, 96, 160)), atol=1e-5)


@pytest.mark.parametrize("width", [320, 333, 777])
def test_the_recognizer_is_the_onnx_file(recognizer: Recognizer, width: int) -> None:
    pixels = draw_noise(2, 3, 48, width)
    pixels[1, :, :, 100:] = 0
    with torch.inference_mode():
        every = recognizer.head(recognizer.encode(pixels)).softmax(-1).numpy()
        classes, probabilities = recognizer(pixels)
    theirs = run_role("rec", pixels)
    assert np.abs(every - theirs).max() < 1e-4
    assert np.array_equal(classes, theirs.argmax(-1))
    assert np.abs(probabilities.numpy() - theirs.max(-1)).max() < 1e-4


@pytest.mark.parametrize("width", [320, 322, 325, 331])
def test_a_wider_tensor_changes_no_step_of_a_line(recognizer: Recognizer, width: int) -> None:
    line = draw_noise(1, 3, 48, width)
    batch = torch.zeros(2, 3, 48, 384)
    batch[:1, :, :, :width] = line
    batch[1] = draw_noise(3, 48, 384, seed=1)
    with torch.inference_mode():
        alone = recognizer.encode(line)
        beside = recognizer.encode(batch, torch.tensor([width, 384]))[:1, : alone.shape[1]]
        classes, _ = recognizer(batch, torch.tensor([width, 384]))
        unmasked = recognizer.encode(batch)[:1, : alone.shape[1]]
    assert (alone - beside).abs().max() < 1e-3  # of values up to 27
    assert (alone - unmasked).abs().max() > 0.1
    assert (classes[0, alone.shape[1] :] == BLANK).all()


def test_every_class_has_its_character() -> None:
    _, characters = open_small_recognizer()
    assert len(characters) == 18710
    assert (characters[BLANK], characters[-1]) == ("", " ")
    assert len(set(characters)) == len(characters)


def test_swapped_files_are_refused() -> None:
    with pytest.raises(WeightsError, match="does not hold a text detector of PP-OCR"):
        open_detector(str(FILES["rec"]))
    with pytest.raises(WeightsError, match="does not hold a text recognizer of PP-OCR"):
        open_recognizer(str(FILES["det"]))


def test_a_recognizer_without_a_dictionary_is_refused() -> None:
    with pytest.raises(WeightsError, match="as rapidocr's text recognizers have"):
        read_characters(read_onnx(FILES["det"]), FILES["det"])


def test_layers_of_another_shape_are_refused(tmp_path: Path) -> None:
    model = onnx.load(str(FILES["det"]))
    weight = next(tensor for tensor in model.graph.initializer if tensor.name == "conv2d_112.w_0")
    weight.CopyFrom(onnx.numpy_helper.from_array(np.zeros((24, 3, 5, 5), np.float32), weight.name))
    onnx.save(model, str(tmp_path / "det.onnx"))
    with pytest.raises(WeightsError, match="its layers are different"):
        fill_detector(read_onnx(tmp_path / "det.onnx"), tmp_path / "det.onnx")


def test_a_file_that_is_not_onnx_is_named(tmp_path: Path) -> None:
    (tmp_path / "rec.onnx").write_bytes(b"<html>not found</html>")
    with pytest.raises(WeightsError, match=r"rec\.onnx is cut short or damaged: it is not an ONNX file"):
        read_onnx(tmp_path / "rec.onnx")


def test_finding_the_weights_imports_neither_torch_nor_rapidocr() -> None:
    code = (
        "import json, sys; from stages.ocr.onnxfile import weight_files;"
        "print(json.dumps([sorted(weight_files()), [m for m in ('torch', 'rapidocr', 'onnx') if m in sys.modules]]))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert json.loads(printed) == [["det", "rec"], []]
