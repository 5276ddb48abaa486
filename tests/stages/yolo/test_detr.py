"""Small detectors of each class that the backend takes, beside transformers' own processor, model and boxes."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForObjectDetection

from stages.contract import timm
from stages.contract.base import Image, StageUnusable
from stages.contract.manifest import PackError
from stages.weights.packs import open_pack, resolve
from stages.yolo.descriptor import DETECTORS, Objects
from stages.yolo.detr import WITH_MASKS, DetrStage
from tests.stages import checkpoints
from tests.stages.checkpoints import Make, made_once
from tests.stages.pictures import DEVICES, draw_image, put


@pytest.fixture
def images(mixed_images: list[Image]) -> list[Image]:
    """Each of a size of its own; without an image of one color, where all proposals of a detector are equally good."""
    return [image for image in mixed_images[:8] if image.width > 3]


@pytest.fixture(scope="module")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Make:
    return made_once(
        tmp_path_factory.mktemp("detectors"), lambda kind, folder: checkpoints.DETECTORS[kind](folder)
    )


def make_stage(
    folder: Path, models: Path, *, batch_size: int = 4, device: str = "cpu", **options: Any
) -> DetrStage:
    pack = open_pack(folder, models)
    spec = resolve(pack, "yolo", {"batch_size": batch_size, "options": {"conf": 0.3, **options}})
    assert spec.backend == "transformers"
    stage = DetrStage(spec, device)
    stage.load()
    return stage


@pytest.fixture(scope="module")
def share_stage(make_folder: Make) -> Callable[..., DetrStage]:
    """The stage with a small model by its type; loaded once. Images are run in batches of three, and the last one alone."""

    @functools.cache
    def share(kind: str, device: str = "cpu") -> DetrStage:
        return make_stage(folder := make_folder(kind), folder.parent / "none", batch_size=3, device=device)

    return share


def run(stage: DetrStage, images: list[Image]) -> list[Objects]:
    answers = stage.run(images)
    assert all(isinstance(answer, Objects) for answer in answers)
    return answers  # type: ignore[return-value]


@functools.cache
def load_stock(folder: Path) -> tuple[Any, Any]:
    """The model and the processor of transformers."""
    return AutoModelForObjectDetection.from_pretrained(folder), AutoImageProcessor.from_pretrained(folder)


def stock_answer(
    folder: Path, image: Image, conf: float = 0.3
) -> tuple[list[str], list[float], torch.Tensor]:
    """Labels, scores and boxes of transformers, cut at the edges of the image."""
    model, processor = load_stock(folder)
    with torch.inference_mode():
        output = model(**processor(images=[image.pixels], return_tensors="pt"))
    is_limited = "top_k" in signature(processor.post_process_object_detection).parameters
    queries = {"top_k": output.logits.shape[1]} if is_limited else {}
    size = image.height, image.width
    if processor.do_pad and processor.pad_size:  # boxes are shares of what the model sees, padding too
        seen, scale = processor.pad_size, min(processor.size.max_height / side for side in size)
        size = tuple(
            side * length / int(side * scale)
            for side, length in zip(size, (seen.height, seen.width), strict=True)
        )
    [found] = processor.post_process_object_detection(output, threshold=conf, target_sizes=[size], **queries)
    limit = torch.tensor([image.width, image.height] * 2)
    scores, order = found["scores"].sort(descending=True)  # DETR's are in the order of its queries
    labels = [model.config.id2label[number] for number in found["labels"][order].tolist()]
    return labels, scores.tolist(), found["boxes"][order].clamp(min=torch.zeros(4), max=limit)


def agree(
    ours: Objects, labels: list[str], scores: list[float], boxes: torch.Tensor, tolerance: float
) -> None:
    """The same objects; those with nearly the same score may be in another order."""
    assert [detection.score for detection in ours.detections] == pytest.approx(scores, abs=1e-4)
    found = [(d.label, *d.box) for d in ours.detections]
    for label, score, box in zip(labels, scores, boxes.tolist(), strict=True):
        near = [
            one
            for one, detection in zip(found, ours.detections, strict=True)
            if one[0] == label and abs(detection.score - score) < 1e-4
        ]
        assert any(max(abs(a - b) for a, b in zip(one[1:], box, strict=True)) <= tolerance for one in near)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [model.type for model in DETECTORS])
def test_answers_are_those_of_transformers(
    kind: str,
    device: str,
    make_folder: Make,
    share_stage: Callable[..., DetrStage],
    images: list[Image],
) -> None:
    folder = make_folder(kind)
    answers = run(share_stage(kind, device), put(images, device))
    assert len({str(answer) for answer in answers}) == len(images), "they must depend on the image"
    for image, answer in zip(images, answers, strict=True):
        labels, scores, boxes = stock_answer(folder, image)
        assert len(labels) > 2
        agree(answer, labels, scores, boxes, tolerance=1e-3 * max(image.width, image.height))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["detr", "dab-detr"])
def test_answers_with_a_backbone_of_timm_are_those_of_transformers(
    kind: str, device: str, tmp_path: Path, images: list[Image]
) -> None:
    """As config.json names it where the authors published the model."""
    pytest.importorskip("timm", reason="timm is not installed: make tools")
    folder = tmp_path / kind
    checkpoints.save_with_timm(kind, folder)
    answers = run(make_stage(folder, tmp_path / "none", device=device), put(images, device))
    for image, answer in zip(images, answers, strict=True):
        labels, scores, boxes = stock_answer(folder, image)
        assert len(labels) > 2
        agree(answer, labels, scores, boxes, tolerance=1e-3 * max(image.width, image.height))


def test_without_timm_a_model_with_its_backbone_is_refused_with_what_to_type(
    make_folder: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timm, "has_timm", lambda: False)
    folder = shutil.copytree(make_folder("detr"), tmp_path / "detr")
    for backbone in ({"backbone_config": {"model_type": "timm_backbone"}}, {"backbone_config": None}):
        change(folder / "config.json", **backbone)
        with pytest.raises(PackError, match=r"/detr has parts of the library timm, .* 'visiond\[timm\]'"):
            resolve(open_pack(folder, tmp_path / "models"), "yolo")
        shutil.rmtree(tmp_path / "models", ignore_errors=True)
    change(folder / "config.json", use_timm_backbone=False)  # then it is one of transformers
    assert resolve(open_pack(folder, tmp_path / "models"), "yolo").backend == "transformers"


def test_a_model_for_images_of_one_size_is_refused_with_an_image_processor_for_any(
    make_folder: Make, tmp_path: Path
) -> None:
    folder = shutil.copytree(make_folder("lw_detr"), tmp_path / "lw_detr")
    change(folder / "preprocessor_config.json", size={"shortest_edge": 64, "longest_edge": 96})
    with pytest.raises(
        StageUnusable, match=r"/lw_detr takes images of one size, .* Write a height and a width"
    ):
        make_stage(folder, tmp_path / "models")


def pad(folder: Path) -> Path:
    """The image processor as transformers' example of training saves it."""
    box = json.loads((folder / "preprocessor_config.json").read_text())["size"]
    box = box if "height" in box else {"height": 96, "width": 96}
    size = {f"max_{side}": 3 * length // 4 for side, length in box.items()}
    change(folder / "preprocessor_config.json", size=size, do_pad=True, pad_size=box)
    return folder


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("kind", [model.type for model in DETECTORS])
def test_boxes_of_a_model_whose_images_are_padded_are_those_of_the_image(
    kind: str, make_folder: Make, tmp_path: Path, images: list[Image]
) -> None:
    folder = pad(shutil.copytree(make_folder(kind), tmp_path / kind))
    images = images[:3]  # wider than high, higher than wide, and small
    for image, answer in zip(images, run(make_stage(folder, tmp_path / "none"), images), strict=True):
        labels, scores, boxes = stock_answer(folder, image)
        assert len(labels) > 2
        agree(answer, labels, scores, boxes, tolerance=1e-3 * max(image.width, image.height))


@pytest.mark.parametrize("kind", WITH_MASKS)
def test_the_boxes_that_transformers_trains_with_are_shares_of_the_padded_image(
    kind: str, make_folder: Make, tmp_path: Path
) -> None:
    """So these are right, though the model leaves the padding out."""
    folder = pad(shutil.copytree(make_folder(kind), tmp_path / kind))
    image, box = torch.zeros(3, 60, 100, dtype=torch.uint8), [20.0, 15.0, 40.0, 30.0]
    thing = {"image_id": 0, "category_id": 0, "bbox": box, "area": 1200.0, "iscrowd": 0}
    prepared = AutoImageProcessor.from_pretrained(folder)(
        images=[image], annotations=[{"image_id": 0, "annotations": [thing]}], return_tensors="pt"
    )
    stage = make_stage(folder, tmp_path / "none")
    [[x, y, width, height]] = prepared["labels"][0]["boxes"].tolist()
    corners = torch.tensor([[x - width / 2, y - height / 2, x + width / 2, y + height / 2]])
    [found] = stage.choose(
        torch.ones(1), torch.zeros(1, dtype=torch.int64), corners, wrap_tensor(image)
    ).detections
    assert found.box == pytest.approx((20, 15, 60, 45), abs=1.5)
    assert torch.equal(stage.mask([image]), prepared["pixel_mask"])


def wrap_tensor(pixels: torch.Tensor) -> Image:
    return Image(memoryview(b""), pixels.shape[2], pixels.shape[1], pixels)


def test_classes_without_a_name_are_left_out(make_folder: Make, tmp_path: Path, images: list[Image]) -> None:
    """They take no place of max_det either."""
    folder = shutil.copytree(make_folder("rf_detr"), tmp_path / "91")
    change(folder / "config.json", id2label={0: "N/A", 1: "cup", 2: " n/a", 3: "dog", 4: ""})
    everything = run(make_stage(make_folder("rf_detr"), tmp_path / "none"), images)
    named = run(make_stage(folder, tmp_path / "none", max_det=2), images)
    names = {"thing 1": "cup", "thing 3": "dog"}
    for whole, part in zip(everything, named, strict=True):
        expected = [(names[d.label], d.score) for d in whole.detections if d.label in names]
        assert [(d.label, d.score) for d in part.detections] == expected[:2]
    assert any(whole.count > part.count == 2 for whole, part in zip(everything, named, strict=True))


def test_labels_are_words_even_if_the_file_has_numbers_or_holes(
    make_folder: Make, tmp_path: Path, images: list[Image]
) -> None:
    folder = shutil.copytree(make_folder("d_fine"), tmp_path / "numbers")
    change(
        folder / "config.json", id2label={"1": 1, "2": None, "3": "dog", "4": 4, "7": "none has this number"}
    )
    found = {
        d.label for answer in run(make_stage(folder, tmp_path / "none"), images) for d in answer.detections
    }
    assert found <= {"1", "dog", "4"}
    assert found & {"1", "4"}


def test_a_limit_keeps_the_objects_with_the_highest_scores(
    make_folder: Make, share_stage: Callable[[str], DetrStage], tmp_path: Path
) -> None:
    image = draw_image(200, 300)
    [everything], [three] = (
        run(stage, [image])
        for stage in (share_stage("d_fine"), make_stage(make_folder("d_fine"), tmp_path, max_det=3))
    )
    assert three.detections == everything.detections[:3]
    assert (three.count, three.unique) == (3, len({detection.label for detection in three.detections}))


def test_a_higher_threshold_leaves_objects_out(make_folder: Make, tmp_path: Path) -> None:
    [answer] = run(make_stage(make_folder("rt_detr"), tmp_path, conf=1.0), [draw_image(200, 300)])
    assert (answer.detections, answer.dispersion) == ([], 0.0)


def test_an_image_processor_with_another_filter_is_refused(make_folder: Make, tmp_path: Path) -> None:
    shutil.copytree(make_folder("rt_detr"), folder := tmp_path / "other")
    settings = json.loads((folder / "preprocessor_config.json").read_text()) | {"resample": 4}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(StageUnusable, match=r"yolo: the model in .*/other cannot be used: .* resample = 4"):
        make_stage(folder, tmp_path / "models")


def test_another_class_of_the_family_is_refused_by_name(tmp_path: Path, make_folder: Make) -> None:
    config = json.loads((make_folder("rf_detr") / "config.json").read_text())
    config["architectures"] = ["RfDetrForInstanceSegmentation"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        PackError, match=r"holds a RfDetrForInstanceSegmentation .*takes RfDetrForObjectDetection"
    ):
        open_pack(tmp_path, tmp_path / "models")
