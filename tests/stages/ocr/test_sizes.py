"""PP-OCR of other sizes, versions and languages, as checkpoints of transformers."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from transformers import AutoImageProcessor
from transformers.modeling_outputs import BaseModelOutputWithNoAttention

from stages.contract.base import StageSpec, StageUnusable
from stages.images.devices import pixels_of
from stages.ocr.dbpost import find_boxes, mask_text
from stages.ocr.direction import put_in_order
from stages.ocr.fused import is_known
from stages.ocr.generic import GenericDetector, GenericRecognizer
from stages.ocr.loading import open_detector, open_recognizer
from stages.ocr.onnxfile import weight_files
from stages.ocr.ppocr import Detector, Recognizer
from stages.ocr.stage import OcrStage, decode
from tests.stages.ocr.runtime import open_small_detector, open_small_recognizer
from tests.stages.ocr.test_stage import read
from tests.stages.ocr.textnets import CHARACTERS, DETECTORS, RECOGNIZERS, TEXTNETS, TINY_DETECTOR, draw_noise
from tests.stages.ocr.textpages import HALF, draw_half

TASKS = {"det": "ForObjectDetection", "rec": "ForTextRecognition"}
Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Make:
    @functools.cache
    def make(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        (TINY_DETECTOR if kind == "tiny_det" else TEXTNETS[kind])(folder)
        return folder

    return make


def run_transformers(folder: Path, pictures: torch.Tensor) -> Any:
    """The answer of transformers' own model to pictures that its own processor has prepared; and the processor."""
    name = transformers.AutoConfig.from_pretrained(folder).architectures[0]
    model = getattr(transformers, name).from_pretrained(folder).eval()
    processor = AutoImageProcessor.from_pretrained(folder)
    images = [picture.permute(2, 0, 1) for picture in pictures]
    inputs = processor(images=images, return_tensors="pt", input_data_format="channels_first")
    with torch.inference_mode():
        return model(inputs["pixel_values"]), processor


@pytest.mark.parametrize("kind", [*DETECTORS, "tiny_det", *RECOGNIZERS])
def test_answers_are_those_of_transformers(kind: str, make_folder: Make) -> None:
    if kind in RECOGNIZERS:
        compare_texts(make_folder(kind))
    else:
        compare_maps(make_folder(kind))


def compare_maps(folder: Path) -> None:
    pages = draw_noise(2, 160, 192)  # of a size that the processor leaves as it is
    with torch.inference_mode():
        ours = open_detector(str(folder)).infer(pages)
    theirs = run_transformers(folder, pages)[0].last_hidden_state[:, 0]
    assert theirs.std() > 0.05
    assert (ours - theirs).abs().max() < 1e-4


def compare_texts(folder: Path) -> None:
    lines = draw_noise(6, 48, 384)
    network, characters = open_recognizer(str(folder))
    with torch.inference_mode():
        classes, scores = network.infer(lines, torch.full((6,), 384), None)
    ours = list(decode(classes.numpy(), scores.numpy(), characters))
    output, processor = run_transformers(folder, lines)
    theirs = processor.post_process_text_recognition(output)
    assert [reading.text for reading in ours] == [line["text"] for line in theirs]
    assert len({reading.text for reading in ours} - {""}) > 2
    for reading, line in zip(ours, theirs, strict=True):
        assert reading.score == pytest.approx(line["score"], abs=1e-4)


def build(**parts: Path) -> OcrStage:
    files = {role: str(path) for role, path in (weight_files() | parts).items()}
    stage = OcrStage(StageSpec("ocr", "ppocr", files=files, options=HALF), "cpu")
    stage.load()
    return stage


@pytest.fixture(scope="module")
def bundled() -> OcrStage:
    return build()


@pytest.mark.parametrize(
    "kind", sorted(RECOGNIZERS.keys() - {"pp_ocrv6_small_rec"})
)  # which test_stage.py tries
def test_batch_mates_change_no_answer(kind: str, make_folder: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, and in the batches of a GPU: a network that masks nothing never shares a tensor with lines of another
    padded width."""
    stage = build(rec=make_folder(kind))
    # Small maps are enough: the detector is the same for each kind.
    stage.options = msgspec.structs.replace(stage.options, text_score=0.0, map_side=128)
    pages = [draw_half(seed) for seed in (1, 3, 6)]
    alone = [read(stage, page)[0] for page in pages]
    assert sum(answer.count for answer in alone) > 5
    assert_alike(read(stage, *pages), alone)
    monkeypatch.setattr(stage, "on_cpu", False)
    assert_alike(read(stage, *pages), alone)


def assert_alike(answers: list[Any], others: list[Any]) -> None:
    for answer, other in zip(answers, others, strict=True):
        assert [(line.text, line.box) for line in answer.lines] == [
            (line.text, line.box) for line in other.lines
        ]
        assert [line.score for line in answer.lines] == pytest.approx(
            [line.score for line in other.lines], abs=2e-4
        )


@pytest.mark.parametrize("kind", DETECTORS)
def test_pages_of_a_batch_do_not_change_each_others_maps(kind: str, make_folder: Make) -> None:
    network, pages = open_detector(str(make_folder(kind))), draw_noise(3, 96, 160)
    with torch.inference_mode():
        together = network.infer(pages)
        alone = torch.cat([network.infer(page[None]) for page in pages])
    assert (together - alone).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("kind", "plain"),
    [
        ("pp_ocrv6_small_det", Detector),
        ("pp_ocrv6_medium_det", GenericDetector),
        ("tiny_det", GenericDetector),
        ("pp_ocrv6_small_rec", Recognizer),
        ("pp_ocrv6_tiny_rec", GenericRecognizer),
    ],
)
def test_the_structure_decides_which_code_runs_a_network(kind: str, plain: type, make_folder: Make) -> None:
    folder = str(make_folder(kind))
    network = open_detector(folder) if kind.endswith("det") else open_recognizer(folder)[0]
    assert type(network) is plain
    assert not is_known(network)  # the kernels know the sizes of PP-OCRv6 small alone


def test_the_kernels_know_the_networks_of_the_standard_job() -> None:
    detector, (recognizer, _) = open_small_detector(), open_small_recognizer()
    assert is_known(detector)
    assert is_known(recognizer)


def save_small(folder: Path) -> None:
    """PP-OCRv6 small's real weights, as a checkpoint of transformers with their dictionary."""
    recognizer, characters = open_small_recognizer()
    config = transformers.PPOCRV6SmallRecConfig(
        backbone_config=transformers.PPLCNetV4Config(out_features=["stage4"]),
        head_out_channels=len(characters),
        layer_norm_eps=1e-5,  # of the norms in the blocks
    )
    model = transformers.PPOCRV6SmallRecForTextRecognition(config).eval()
    copy_weights(recognizer.get_submodule("encoder"), model.model.backbone.encoder)
    copy_weights(recognizer.get_submodule("svtr"), model.head.encoder)
    copy_weights(recognizer.get_submodule("head"), model.head.head)
    stem = model.model.backbone.encoder.convolution.stem1.convolution
    stem.weight.data = stem.weight.data.flip(1)  # ours takes RGB
    model.save_pretrained(folder)
    transformers.PPOCRV6SmallRecImageProcessor(character_list=["blank", *characters[1:]]).save_pretrained(
        folder
    )


def copy_weights(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    """Where ours has a convolution with a bias, theirs has a batch norm that adds the bias."""
    modules = dict(ours.named_modules())
    for name, module in theirs.named_modules():
        source: Any = modules.get(name)
        if isinstance(module, torch.nn.BatchNorm2d):
            parent: Any = modules[name.rpartition(".")[0]]
            module.weight.data.fill_((1 + module.eps) ** 0.5)
            module.bias.data = parent.convolution.bias.data.clone()
        elif list(module.parameters(recurse=False)):
            module.weight.data = source.weight.data.clone()
            if module.bias is not None:
                module.bias.data = source.bias.data.clone()


def test_a_checkpoint_with_real_weights_reads_what_the_onnx_file_reads(
    bundled: OcrStage, tmp_path: Path
) -> None:
    save_small(tmp_path)
    page = draw_half(5)
    ours, theirs = read(build(rec=tmp_path), page)[0], read(bundled, page)[0]
    assert len(theirs.lines) > 5
    assert_alike([ours], [theirs])


def test_transformers_finds_the_same_boxes() -> None:
    """transformers does not dilate the mask, as rapidocr does, and enlarges boxes by another rule: their edges differ by
    up to three pixels."""
    [pixels] = pixels_of([draw_half(4)])
    with torch.inference_mode():
        maps = open_small_detector().infer(pixels.permute(1, 2, 0)[None])
    height, width = maps.shape[1:]
    ours = find_boxes(maps.numpy(), mask_text(maps.numpy()), [(width, height)])[0]
    theirs = transformers.PPOCRV5ServerDetImageProcessor().post_process_object_detection(
        BaseModelOutputWithNoAttention(last_hidden_state=maps[:, None]),
        threshold=0.3,
        target_sizes=torch.tensor([[height, width]]),
        box_threshold=0.5,
        unclip_ratio=1.6,
    )[0]["boxes"]
    assert len(ours) == len(theirs) > 5
    edges, others = (
        np.hstack([boxes.min(axis=1), boxes.max(axis=1)]) for boxes in (ours, theirs.numpy().astype(float))
    )
    nearest = np.abs(edges[:, None] - others[None]).max(axis=2).min(axis=1)
    assert nearest.max() <= 3


def test_a_right_to_left_script_is_read_in_logical_order(
    bundled: OcrStage, make_folder: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stage puts each line in order, if the dictionary has such a script."""
    folder = shutil.copytree(make_folder("pp_ocrv5_mobile_rec"), tmp_path / "rec")
    config = folder / "preprocessor_config.json"
    saved = json.loads(config.read_text())
    letters = ["blank", *(chr(ord("א") + place) for place in range(26)), *CHARACTERS[27:]]
    config.write_text(json.dumps(saved | {"character_list": letters}))
    page = draw_half(1)
    stage = build(rec=folder)
    stage.options = msgspec.structs.replace(stage.options, text_score=0.0)
    ordered = [line.text for line in read(stage, page)[0].lines]
    monkeypatch.setattr("stages.ocr.stage.put_in_order", lambda text: text)
    seen = [line.text for line in read(stage, page)[0].lines]
    assert ordered == [put_in_order(text) for text in seen] != seen
    assert not bundled.networks.latest().leftwards


def test_a_dictionary_of_another_model_is_refused(make_folder: Make, tmp_path: Path) -> None:
    folder = shutil.copytree(make_folder("pp_ocrv6_tiny_rec"), tmp_path / "rec")
    config = folder / "preprocessor_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"character_list": CHARACTERS[:-1]}))
    with pytest.raises(StageUnusable, match="has 40 characters, but the model has 41 classes"):
        open_recognizer(str(folder))
