"""A small OWLv2 beside transformers' own processor, model and boxes."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoImageProcessor, AutoTokenizer, Owlv2ForObjectDetection

from stages.contract.base import Image
from stages.weights.packs import open_pack, resolve
from stages.yolo.descriptor import OPEN_VOCABULARY, Objects
from stages.yolo.owlv2 import Owlv2Stage, SquareProcessor
from tests.stages.checkpoints import save_owlv2
from tests.stages.pictures import draw_image
from tests.stages.yolo.test_detr import agree

LABELS = ["red circle", "tree", "very unusual thing"]
CONF = 0.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_owlv2(place := tmp_path_factory.mktemp("owlv2") / "model")
    return place


def make_stage(folder: Path, models: Path, *, batch_size: int = 4, **options: Any) -> Owlv2Stage:
    options = {"labels": LABELS, "conf": CONF, **options}
    spec = resolve(open_pack(folder, models), "yolo", {"batch_size": batch_size, "options": options})
    assert spec.backend == "owlv2"
    stage = Owlv2Stage(spec, "cpu")
    stage.load()
    return stage


@pytest.fixture(scope="module")
def stage(folder: Path) -> Owlv2Stage:
    """In batches of three."""
    return make_stage(folder, folder.parent / "none", batch_size=3)


def run(stage: Owlv2Stage, images: list[Image]) -> list[Objects]:
    answers = stage.run(images)
    assert all(isinstance(answer, Objects) for answer in answers)
    return answers  # type: ignore[return-value]


@functools.cache
def load_stock(folder: Path) -> tuple[Any, Any, Any]:
    """The model, the image processor and the tokens of the labels of transformers."""
    texts = [f"a photo of a {label}" for label in LABELS]
    tokens = AutoTokenizer.from_pretrained(folder)(
        texts, padding="max_length", max_length=16, return_tensors="pt"
    )
    return Owlv2ForObjectDetection.from_pretrained(folder), AutoImageProcessor.from_pretrained(folder), tokens


def stock_answer(folder: Path, image: Image) -> tuple[list[str], list[float], torch.Tensor]:
    """In order of score, cut at the edges of the image."""
    model, processor, tokens = load_stock(folder)
    pixels = processor(images=[image.pixels], return_tensors="pt")
    with torch.inference_mode():
        output = model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"], **pixels)
    sizes = [(image.height, image.width)]
    [found] = processor.post_process_object_detection(output, threshold=CONF, target_sizes=sizes)
    order = found["scores"].argsort(descending=True)
    limit = torch.tensor([image.width, image.height] * 2)
    boxes = found["boxes"][order].clamp(torch.zeros(4), limit)
    return (
        [LABELS[number] for number in found["labels"][order].tolist()],
        found["scores"][order].tolist(),
        boxes,
    )


@pytest.mark.parametrize("kind", [model.type for model in OPEN_VOCABULARY])
def test_answers_are_those_of_transformers(
    kind: str, folder: Path, stage: Owlv2Stage, mixed_images: list[Image]
) -> None:
    # Of a narrower image transformers takes the columns for colors.
    images = [image for image in mixed_images[:8] if image.width > 3]
    answers = run(stage, images)
    assert len({str(answer) for answer in answers}) == len(images), "they must depend on the image"
    assert len({detection.label for answer in answers for detection in answer.detections}) > 1
    for image, answer in zip(images, answers, strict=True):
        agree(answer, *stock_answer(folder, image), tolerance=1e-3 * max(image.width, image.height))


def test_batch_mates_change_no_answer(stage: Owlv2Stage, mixed_images: list[Image]) -> None:
    for image, together in zip(mixed_images, run(stage, mixed_images), strict=True):
        [alone] = run(stage, [image])
        labels, scores = [d.label for d in alone.detections], [d.score for d in alone.detections]
        boxes = torch.tensor([d.box for d in alone.detections]).view(-1, 4)
        agree(together, labels, scores, boxes, tolerance=1e-3 * max(image.width, image.height))


def test_inputs_are_those_of_transformers(folder: Path, mixed_images: list[Image]) -> None:
    settings = AutoImageProcessor.from_pretrained(folder)
    prepare = SquareProcessor(settings, "cpu", torch.float32)
    for image in [
        *mixed_images[:4],
        *mixed_images[5:8],
        draw_image(300, 20),
        draw_image(30, 400),
        draw_image(20, 30),
    ]:
        assert image.pixels is not None
        theirs = settings(images=[image.pixels], return_tensors="pt")["pixel_values"][0]
        torch.testing.assert_close(prepare([image.pixels])[0], theirs, atol=2e-5, rtol=0)


def test_the_square_of_a_long_image_is_not_filled(folder: Path) -> None:
    prepare = SquareProcessor(AutoImageProcessor.from_pretrained(folder), "cpu", torch.float32)
    started = time.process_time()
    assert prepare([torch.zeros(3, 20, 20000, dtype=torch.uint8)]).isfinite().all()
    assert time.process_time() - started < 10.0


def test_words_must_be_given(folder: Path, tmp_path: Path) -> None:
    spec = resolve(open_pack(folder, tmp_path), "yolo", {})
    with pytest.raises(ValueError, match=r"stages\.yolo\.options\.labels: this key is missing"):
        Owlv2Stage(spec, "cpu").load()


def test_the_best_objects_are_kept(folder: Path, stage: Owlv2Stage, tmp_path: Path) -> None:
    image = draw_image(200, 300)
    [everything], [two] = (run(each, [image]) for each in (stage, make_stage(folder, tmp_path, max_det=2)))
    assert two.detections == everything.detections[:2]
