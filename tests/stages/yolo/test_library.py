from __future__ import annotations

import weakref
from pathlib import Path

import cv2
import PIL.Image
import pytest
import torch

from stages.weights.packs import Pack, resolve
from stages.yolo import library
from stages.yolo.library import decode_in_float32
from stages.yolo.weights import read_weights
from tests.stages.yolo.detectors import read_structure


def test_importing_ultralytics_leaves_the_process_as_it_was() -> None:
    assert PIL.Image.open.__module__ == "PIL.Image"
    assert torch.save.__module__ == "torch.serialization"
    assert cv2.getNumThreads() > 0


def test_half_precision_finds_boxes_to_the_pixel(blank_pack: Pack) -> None:
    _, config = read_weights(resolve(blank_pack, "yolo").files)
    model = library.build(config)
    torch.manual_seed(0)
    features = [torch.zeros(1, 8, size, size) for size in (80, 40, 20)]
    anchors = sum(feature.shape[2] ** 2 for feature in features)
    boxes, scores = (
        torch.randn(1, 64, anchors).bfloat16(),
        torch.randn(1, config["nc"], anchors).bfloat16(),
    )
    exact = model.model[-1]._inference({"boxes": boxes.float(), "scores": scores.float(), "feats": features})
    head = model.to(torch.bfloat16).model[-1]
    raw = {"boxes": boxes, "scores": scores, "feats": [feature.bfloat16() for feature in features]}
    assert (head._inference(raw).float() - exact).abs().max() > 1
    decode_in_float32(head)
    assert torch.allclose(head._inference(raw), exact, atol=1e-3)


def test_what_a_recording_of_a_single_image_reads_stays() -> None:
    """The head replaces its anchors for each other shape, in trial runs that a recording begins with."""
    network = library.LibraryNetwork(library.build({"model": read_structure("yolo11n.yaml"), "nc": 2}))
    with torch.inference_mode():
        network(torch.zeros(1, 3, 64, 64))
        anchors = weakref.ref(network.network.model[-1].anchors)
        for shape in ((1, 3, 64, 96), (2, 3, 64, 64)):
            network(torch.zeros(shape))
    assert anchors() is not None


def test_code_in_a_config_does_not_run(tmp_path: Path) -> None:
    structure = read_structure("yolo11n.yaml") | {
        "activation": f"__import__('pathlib').Path({str(tmp_path / 'bomb')!r}).touch()"
    }
    with pytest.raises(TypeError, match="restricted"):
        library.build({"model": structure, "nc": 2})
    assert not (tmp_path / "bomb").exists()
