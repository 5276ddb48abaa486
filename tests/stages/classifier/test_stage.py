"""Small classifiers of each class that the backend takes, beside transformers' own processor and model."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoImageProcessor, AutoModelForImageClassification

from stages.classifier.descriptor import Classes
from stages.classifier.recognition import CLASSIFIERS
from stages.classifier.stage import ClassifierProcessor, ClassifierStage
from stages.contract.base import Image, ImageError, StageSpec, StageUnusable
from stages.images.devices import pixels_of
from stages.weights.packs import open_pack, resolve
from tests.stages import classifiers
from tests.stages.checkpoints import Make, made_once


@pytest.fixture
def images(mixed_images: list[Image]) -> list[Image]:
    """Each of a size of its own."""
    return [image for image in mixed_images[:8] if image.width > 3]


@pytest.fixture(scope="module")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Make:
    return made_once(tmp_path_factory.mktemp("classifiers"), classifiers.save)


def make_stage(
    folder: Path,
    models: Path,
    *,
    batch_size: int = 3,
    device: str = "cpu",
    dtype: str = "float32",
    **options: Any,
) -> ClassifierStage:
    settings = {"batch_size": batch_size, "dtype": dtype, "options": options}
    stage = ClassifierStage(resolve(open_pack(folder, models), "classifier", settings), device)
    stage.load()
    return stage


def run(stage: ClassifierStage, images: list[Image]) -> list[Classes]:
    answers = stage.run(images)
    assert all(isinstance(answer, Classes) for answer in answers), answers
    return answers  # type: ignore[return-value]


@functools.cache
def load_stock(folder: Path) -> tuple[Any, Any]:
    """The model and the processor of transformers."""
    return AutoModelForImageClassification.from_pretrained(folder), AutoImageProcessor.from_pretrained(folder)


def stock_scores(
    folder: Path, image: Image, activate: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, float]:
    model, processor = load_stock(folder)
    with torch.inference_mode():
        [numbers] = model(**processor(images=[image.pixels], return_tensors="pt")).logits
    return {model.config.id2label[place]: score for place, score in enumerate(activate(numbers).tolist())}


def softmax(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.softmax(dim=-1)


@pytest.mark.parametrize("kind", list(dict.fromkeys(model.type for model in CLASSIFIERS)))
def test_labels_and_scores_are_those_of_transformers(
    kind: str, make_folder: Make, tmp_path: Path, images: list[Image]
) -> None:
    folder, tolerance = make_folder(kind), 1e-3 if kind == "timm_wrapper" else 1e-4
    answers = run(make_stage(folder, tmp_path), images)
    for image, answer in zip(images, answers, strict=True):
        expected = stock_scores(folder, image, softmax)
        assert answer.scores == pytest.approx(expected, abs=tolerance)
        assert (answer.label, answer.score) == next(iter(answer.scores.items()))
        assert expected[answer.label] == pytest.approx(max(expected.values()), abs=tolerance)
    assert len({round(answer.scores["cat"], 3) for answer in answers}) > 1, "they must depend on the image"
    assert any(0.02 < answer.score < 0.98 for answer in answers), "they must not be all or nothing"


@pytest.mark.parametrize(
    "settings",
    [
        {"crop_pct": 0.9},
        {"crop_pct": 1.0, "interpolation": "lanczos"},
        {"crop_mode": "squash", "interpolation": "bilinear", "input_size": [3, 96, 160]},
    ],
)
def test_the_pixels_of_timm_are_those_of_transformers_but_for_how_pillow_rounds(
    settings: dict[str, Any], tmp_path: Path, images: list[Image]
) -> None:
    classifiers.save("timm_wrapper", folder := tmp_path / "vit", pretrained_cfg=settings)
    prepare = ClassifierStage.load_processor(StageSpec("classifier", "", {"model": str(folder)}), "cpu")
    processor = AutoImageProcessor.from_pretrained(folder)
    for image in images:
        theirs = processor(images=[image.pixels], return_tensors="pt")["pixel_values"]
        levels = (prepare([image.pixels]) - theirs).abs() * 255 * torch.tensor([0.5, 0.5, 0.6]).view(3, 1, 1)
        assert levels.max() <= 2.01
        assert levels.mean() < 0.4


def test_a_crop_of_timm_with_a_border_is_refused(tmp_path: Path) -> None:
    classifiers.save("timm_wrapper", folder := tmp_path / "vit", pretrained_cfg={"crop_mode": "border"})
    with pytest.raises(
        StageUnusable, match=r"timm's crop_mode must be \"squash\", or \"center\" of a square"
    ):
        make_stage(folder, tmp_path)


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def copy(make_folder: Make, kind: str, place: Path, **config: Any) -> Path:
    """The folder of a small model with another config.json."""
    folder = shutil.copytree(make_folder(kind), place / "changed")
    change(folder / "config.json", **config)
    return folder


@pytest.mark.parametrize("kind", ["deit", "levit"])
def test_a_model_with_the_head_of_a_teacher_is_loaded_with_it(
    kind: str, tmp_path: Path, images: list[Image]
) -> None:
    classifiers.save(kind, tmp_path / kind, end="WithTeacher")
    answers = run(make_stage(tmp_path / kind, tmp_path), images)
    model = getattr(transformers, f"{classifiers.KINDS[kind][0]}ForImageClassificationWithTeacher")
    stock, processor = (
        model.from_pretrained(tmp_path / kind),
        AutoImageProcessor.from_pretrained(tmp_path / kind),
    )
    for image, answer in zip(images, answers, strict=True):
        with torch.inference_mode():
            [numbers] = stock(**processor(images=[image.pixels], return_tensors="pt")).logits
        expected = dict(zip(classifiers.LABELS.values(), softmax(numbers).tolist(), strict=True))
        assert answer.scores == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("processor", "settings"),
    [
        ("ConvNextImageProcessor", {"size": {"shortest_edge": 24}, "crop_pct": 0.95, "resample": 1}),
        ("ConvNextImageProcessor", {"size": {"shortest_edge": 400}}),
        ("LevitImageProcessor", {"size": {"height": 40, "width": 36}, "crop_size": 32}),
        ("PoolFormerImageProcessor", {"size": {"height": 48, "width": 48}, "crop_pct": 0.9, "crop_size": 32}),
        ("PoolFormerImageProcessor", {"size": {"height": 48, "width": 40}, "crop_pct": 0.9, "crop_size": 32}),
        ("PoolFormerImageProcessor", {"size": {"shortest_edge": 48}, "crop_pct": None, "crop_size": 32}),
        (
            "EfficientNetImageProcessor",
            {"size": 48, "rescale_offset": True, "include_top": False, "resample": 2},
        ),
        (
            "EfficientNetImageProcessor",
            {"size": 48, "rescale_offset": True, "include_top": True, "resample": 0},
        ),
        (
            "EfficientNetImageProcessor",
            {"size": 48, "do_normalize": False, "do_center_crop": True, "crop_size": 32},
        ),
        (
            "MobileViTImageProcessor",
            {"size": {"shortest_edge": 48}, "crop_size": 32, "do_flip_channel_order": False},
        ),
        ("CLIPImageProcessor", {"size": {"shortest_edge": 36}, "crop_size": 32, "resample": 1}),
        ("ViTImageProcessor", {"size": 40, "do_rescale": False}),
    ],
)
def test_pixels_are_those_of_transformers(
    processor: str, settings: dict[str, Any], images: list[Image]
) -> None:
    stock = getattr(transformers, processor)(**settings)
    ours = ClassifierProcessor(stock, "cpu", torch.float32)(
        [image.pixels for image in images if image.pixels is not None]
    )
    for image, pixels in zip(images, ours, strict=True):
        [expected] = stock(images=[image.pixels], return_tensors="pt").pixel_values
        assert (pixels - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", list(dict.fromkeys(model.type for model in CLASSIFIERS)))
def test_a_gpu_is_as_near_to_a_cpu_as_with_transformers(
    kind: str, dtype: str, make_folder: Make, tmp_path: Path, images: list[Image]
) -> None:
    """Random weights are sensitive to rounding."""
    folder = make_folder(kind)
    stock, processor = load_stock(folder)
    rounded = AutoModelForImageClassification.from_pretrained(folder, dtype=getattr(torch, dtype)).cuda()
    stage = make_stage(folder, tmp_path, device="cuda:0", dtype=dtype)
    ours, theirs = [], []
    for image in images:
        pixels = processor(images=[image.pixels], return_tensors="pt").pixel_values
        with torch.inference_mode():
            exact = softmax(stock(pixels).logits[0])
            on_gpu = softmax(rounded(pixels.cuda().to(rounded.dtype)).logits[0].float()).cpu()
        [answer] = run(stage, [Image(image.data, image.width, image.height, pixels_of([image])[0].cuda())])
        scores = torch.tensor([answer.scores[name] for name in stock.config.id2label.values()])
        ours.append((scores - exact).abs().max().item())
        theirs.append((on_gpu - exact).abs().max().item())
    assert max(ours) <= 2 * max(theirs) + 0.002
    assert sum(ours) <= 1.3 * sum(theirs) + 0.002 * len(images)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_gpu_resizes_by_lanczos_as_a_cpu_does(images: list[Image]) -> None:
    settings = transformers.ConvNextImageProcessor(size={"shortest_edge": 24}, crop_pct=0.95, resample=1)
    pixels = [image.pixels for image in images if image.pixels is not None]
    expected, found = (
        ClassifierProcessor(settings, device, torch.float32)([one.to(device) for one in pixels])
        for device in ("cpu", "cuda")
    )
    for one, other in zip(expected, found, strict=True):
        assert (one - other.cpu()).abs().max() < 1e-5 * one.abs().max()


def test_batch_mates_change_no_answer(make_folder: Make, tmp_path: Path, images: list[Image]) -> None:
    stage = make_stage(make_folder("resnet"), tmp_path)
    for image, together in zip(images, run(stage, images), strict=True):
        [alone] = run(stage, [image])
        assert together.scores == pytest.approx(alone.scores, abs=1e-5)


@pytest.mark.parametrize(
    ("problem", "labels", "activate"),
    [
        ("single_label_classification", 5, softmax),
        ("multi_label_classification", 5, torch.sigmoid),
        ("regression", 5, torch.clone),
        (None, 5, softmax),
        (None, 1, torch.clone),
        ("regression", 1, torch.clone),
    ],
)
def test_scores_are_what_the_model_was_trained_for(
    problem: str | None,
    labels: int,
    activate: Callable[[torch.Tensor], torch.Tensor],
    tmp_path: Path,
    images: list[Image],
) -> None:
    names = {number: f"thing {number}" for number in range(labels)}
    classifiers.save("vit", tmp_path / "vit", id2label=names, problem_type=problem)
    for image, answer in zip(images, run(make_stage(tmp_path / "vit", tmp_path), images), strict=True):
        assert answer.scores == pytest.approx(stock_scores(tmp_path / "vit", image, activate), abs=1e-4)


def test_an_option_says_what_the_scores_are(make_folder: Make, tmp_path: Path, images: list[Image]) -> None:
    [answer] = run(make_stage(make_folder("vit"), tmp_path, activation="sigmoid"), images[:1])
    assert answer.scores == pytest.approx(
        stock_scores(make_folder("vit"), images[0], torch.sigmoid), abs=1e-4
    )


def test_only_the_labels_with_the_highest_scores_are_kept(
    make_folder: Make, tmp_path: Path, images: list[Image]
) -> None:
    [whole] = run(make_stage(make_folder("vit"), tmp_path), images[:1])
    [part] = run(make_stage(make_folder("vit"), tmp_path, top_k=2), images[:1])
    assert [*part.scores.items()] == [*whole.scores.items()][:2]


def test_scores_that_are_no_numbers_fail_the_image(
    make_folder: Make, tmp_path: Path, images: list[Image]
) -> None:
    stage = make_stage(make_folder("vit"), tmp_path)
    stage.model.classifier.bias.data.fill_(torch.inf)
    [answer] = stage.run(images[:1])
    assert isinstance(answer, ImageError)
    assert answer.detail == "the classifier's scores are no numbers"


# Files as they are on the hub.


def test_labels_without_names_are_those_of_transformers(tmp_path: Path, images: list[Image]) -> None:
    """transformers does not write id2label for two labels without names."""
    classifiers.save("vit", tmp_path / "vit", id2label=None)
    config = json.loads((tmp_path / "vit/config.json").read_text())
    config.pop("id2label", None)
    (tmp_path / "vit/config.json").write_text(json.dumps(config))
    [answer] = run(make_stage(tmp_path / "vit", tmp_path), images[:1])
    assert {*answer.scores} == {"LABEL_0", "LABEL_1"}
    assert answer.scores == pytest.approx(stock_scores(tmp_path / "vit", images[0], softmax), abs=1e-4)


def test_labels_may_be_numbers_or_missing_and_are_in_the_order_of_their_numbers(
    make_folder: Make, tmp_path: Path, images: list[Image]
) -> None:
    """As the number of a class, in another order, and with a key beyond the last one in place of another."""
    names = {"4": "last", "0": "0", "1": 1, "2": None, "7": "none has this number"}
    folder = copy(make_folder, "vit", tmp_path, id2label=names)
    [answer] = run(make_stage(folder, tmp_path), images[:1])
    whole = stock_scores(make_folder("vit"), images[0], softmax)
    names_by_place = ["0", "1", "LABEL_2", "LABEL_3", "last"]
    assert answer.scores == pytest.approx(dict(zip(names_by_place, whole.values(), strict=True)), abs=1e-4)


def test_of_labels_with_the_same_name_the_later_ones_have_their_number(
    make_folder: Make, tmp_path: Path, images: list[Image]
) -> None:
    """As "crane" of ImageNet, which is a bird and a machine."""
    folder = copy(
        make_folder, "vit", tmp_path, id2label={"0": "crane", "1": "dog", "2": "crane", "3": "", "4": "crane"}
    )
    [answer] = run(make_stage(folder, tmp_path), images[:1])
    whole = stock_scores(make_folder("vit"), images[0], softmax)
    names = ["crane", "dog", "crane (2)", "LABEL_3", "crane (4)"]
    assert answer.scores == pytest.approx(dict(zip(names, whole.values(), strict=True)), abs=1e-4)


OLD_FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "a number as size, and the class of a feature extractor": (
        "vit",
        {"size": 32, "feature_extractor_type": "ViTFeatureExtractor", "do_resize": True, "resample": 2},
    ),
    "no class at all": ("resnet", {"size": 64, "crop_pct": 0.875, "resample": 3}),
    "crop_pct is null": (
        "resnet",
        {"size": 64, "crop_pct": None, "feature_extractor_type": "ConvNextFeatureExtractor"},
    ),
    "the image processor of another model": (
        "vit",
        {"image_processor_type": "CLIPImageProcessor"} | classifiers.CROPPED,
    ),
    "the name of a class that is gone": (
        "swin",
        {"image_processor_type": "ViTImageProcessorFast"} | classifiers.SQUARE,
    ),
}


@pytest.mark.parametrize("form", OLD_FORMS)
def test_image_processors_of_other_forms_are_read_as_transformers_does(
    form: str, make_folder: Make, tmp_path: Path, images: list[Image]
) -> None:
    kind, settings = OLD_FORMS[form]
    folder = copy(make_folder, kind, tmp_path)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    answers = run(make_stage(folder, tmp_path), images)
    if settings.get("crop_pct", 1) is None:  # transformers 5 fails on it; before, it was the default
        change(folder / "preprocessor_config.json", crop_pct=224 / 256)
    for image, answer in zip(images, answers, strict=True):
        assert answer.scores == pytest.approx(stock_scores(folder, image, softmax), abs=1e-4)


def test_an_image_processor_that_does_more_than_its_settings_say_is_refused(
    make_folder: Make, tmp_path: Path
) -> None:
    folder = copy(make_folder, "vit", tmp_path)
    transformers.PerceiverImageProcessor(size=32).save_pretrained(folder)
    with pytest.raises(
        StageUnusable, match="PerceiverImageProcessor, which visiond does not have for classifiers"
    ):
        make_stage(folder, tmp_path)


def test_images_of_a_size_that_the_model_does_not_take_are_refused_at_the_start(
    make_folder: Make, tmp_path: Path
) -> None:
    folder = copy(make_folder, "vit", tmp_path)
    change(folder / "preprocessor_config.json", size={"height": 40, "width": 40})
    with pytest.raises(StageUnusable, match="refuses the images of 40 × 40 pixels"):
        make_stage(folder, tmp_path)


def test_a_head_with_another_number_of_labels_is_refused(make_folder: Make, tmp_path: Path) -> None:
    folder = copy(make_folder, "vit", tmp_path, id2label={"0": "yes", "1": "no"})
    with pytest.raises(StageUnusable, match="does not hold a ViTForImageClassification"):
        make_stage(folder, tmp_path)
