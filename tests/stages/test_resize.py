from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import PIL.Image
import pytest
import torch
from transformers import BlipImageProcessor, CLIPImageProcessor

from stages.base import Image
from stages.devices import pixels_of
from stages.resize import MOST_CUT, ImageProcessor, axis_weights

DEVIATION = torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(3, 1, 1)


def as_on_a_gpu(settings: CLIPImageProcessor, work_dtype: torch.dtype = torch.float32) -> ImageProcessor:
    processor = ImageProcessor(settings, "cpu", torch.float32)
    processor.stock, processor.work_dtype = False, work_dtype
    return processor


@pytest.mark.parametrize("settings", [CLIPImageProcessor(), BlipImageProcessor()], ids=["clip", "blip"])
def test_pixels_are_those_of_the_stock_processor(settings: CLIPImageProcessor, mixed_images: list[Image]) -> None:
    images = [image for image in mixed_images if image.width > 3]  # else it takes the columns for colours
    ours = ImageProcessor(settings, "cpu", torch.float32)(pixels_of(images))
    near = as_on_a_gpu(settings)(pixels_of(images))
    for image, mine, other in zip(images, ours, near, strict=True):
        theirs = settings(images=[image.pixels], return_tensors="pt")["pixel_values"][0]
        assert torch.equal(mine, theirs) or max(image.width, image.height) > MOST_CUT * min(image.width, image.height)
        levels = (other - theirs).abs() * DEVIATION * 255
        assert levels.max() < 2.5
        assert levels.mean() < 0.02


def test_a_gpus_half_precision_keeps_the_levels(mixed_images: list[Image]) -> None:
    exact, half = as_on_a_gpu(CLIPImageProcessor()), as_on_a_gpu(CLIPImageProcessor(), torch.float16)
    levels = (exact(pixels_of(mixed_images)) - half(pixels_of(mixed_images))).abs() * DEVIATION * 255
    assert levels.max() < 2.5
    assert levels.mean() < 0.1


@pytest.mark.parametrize("make", [as_on_a_gpu, lambda settings: ImageProcessor(settings, "cpu", torch.float32)])
def test_batch_mates_change_no_pixel(make: Callable[..., ImageProcessor], mixed_images: list[Image]) -> None:
    prepare = make(CLIPImageProcessor())
    together = prepare(pixels_of(mixed_images))
    alone = torch.cat([prepare([pixels]) for pixels in pixels_of(mixed_images)])
    assert torch.allclose(together, alone, atol=1 / 255 / 0.26)


@pytest.mark.parametrize("size", [(1, 20000), (20000, 1)])
def test_an_extreme_aspect_ratio_costs_nothing(size: tuple[int, int]) -> None:
    prepare = ImageProcessor(CLIPImageProcessor(), "cpu", torch.float32)
    started = time.process_time()
    assert prepare([torch.zeros(3, *size, dtype=torch.uint8)]).isfinite().all()
    assert time.process_time() - started < 1.0  # the stock processor: 8.5 s and 8 GB


def test_large_images_are_converted_in_parts(monkeypatch: pytest.MonkeyPatch, mixed_images: list[Image]) -> None:
    prepare = as_on_a_gpu(BlipImageProcessor())
    pixels = pixels_of(mixed_images[:1])
    whole = prepare(pixels)
    monkeypatch.setattr("stages.resize.BLOCK_ELEMENTS", 5000)
    assert torch.allclose(prepare(pixels), whole, atol=1 / 255 / 0.26)


def test_an_axis_keeps_its_length_as_it_is() -> None:
    weights, first, last = axis_weights(7, 7, 0, 7)
    assert (first, last) == (0, 7)
    assert torch.equal(weights, torch.eye(7))


def test_weights_of_a_pixel_sum_to_one() -> None:
    weights, _, _ = axis_weights(1000, 300, 38, 224)
    assert torch.allclose(weights.sum(1), torch.ones(224))


@pytest.mark.parametrize(
    "settings",
    [
        CLIPImageProcessor(size={"shortest_edge": 100}, crop_size={"height": 128, "width": 128}),
        CLIPImageProcessor(do_center_crop=False),
        BlipImageProcessor(resample=PIL.Image.Resampling.BILINEAR),
    ],
    ids=["a crop larger than the image", "no fixed size", "another filter"],
)
def test_a_processor_that_does_something_else_is_refused(settings: CLIPImageProcessor) -> None:
    with pytest.raises(ValueError, match="not supported"):
        ImageProcessor(settings, "cpu", torch.float32)


def test_the_settings_of_the_published_clip_are_understood(tmp_path: Path) -> None:
    published = {"size": 224, "crop_size": 224, "do_center_crop": True, "resample": 3, "feature_extractor_type": "x"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(published))
    prepare = ImageProcessor(CLIPImageProcessor.from_pretrained(tmp_path), "cpu", torch.float32)
    assert prepare([torch.zeros(3, 300, 500, dtype=torch.uint8)]).shape == (1, 3, 224, 224)
    assert prepare.edge == 224
