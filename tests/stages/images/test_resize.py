from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
import torch.nn.functional as F
from transformers import (
    BlipImageProcessor,
    CLIPImageProcessor,
    RfDetrImageProcessor,
    RTDetrImageProcessor,
    SiglipImageProcessor,
    ViTImageProcessor,
)

from stages.contract.base import Image
from stages.images.devices import pixels_of
from stages.images.resize import ImageProcessor, prepare_axis, resize_in_torch, sum_taps
from tests.stages.pictures import draw_noise

BOXED: dict[str, Any] = {"do_pad": True, "pad_size": {"height": 96, "width": 96}}


def tap_by_tap(settings: CLIPImageProcessor) -> ImageProcessor:
    """The resize as on a GPU without kernels."""
    processor = ImageProcessor(settings, "cpu", torch.float32)
    processor.stock = False
    return processor


@pytest.mark.parametrize(
    "settings",
    [
        CLIPImageProcessor(),
        BlipImageProcessor(),
        RTDetrImageProcessor(),
        SiglipImageProcessor(),
        RfDetrImageProcessor(size={"height": 56, "width": 70}, do_pad=False),
        RTDetrImageProcessor(size={"max_height": 64, "max_width": 90}, **BOXED),
        RTDetrImageProcessor(size={"shortest_edge": 40, "longest_edge": 90}, do_normalize=True, **BOXED),
        RTDetrImageProcessor(size={"height": 64, "width": 90}, **BOXED),
        CLIPImageProcessor(do_rescale=False, image_mean=[100.0, 90.0, 80.0], image_std=[60.0] * 3),
        BlipImageProcessor(do_rescale=False, do_normalize=False),
        SiglipImageProcessor(rescale_factor=1 / 127.5, image_mean=[1.0] * 3, image_std=[1.0] * 3),
        CLIPImageProcessor(image_mean=0.5, image_std=0.25),
        ViTImageProcessor(),
    ],
    ids=[
        *(
            "clip",
            "blip",
            "rt-detr",
            "siglip",
            "rf-detr",
            "boxed",
            "boxed by edges",
            "boxed with a fixed size",
        ),
        *("not scaled", "bytes", "scaled otherwise", "one mean", "vit"),
    ],
)
def test_pixels_are_those_of_the_stock_processor(
    settings: CLIPImageProcessor, mixed_images: list[Image]
) -> None:
    images = [image for image in mixed_images if image.width > 3]  # otherwise it takes the columns for colors
    ours = ImageProcessor(settings, "cpu", torch.float32)(pixels_of(images))
    others = tap_by_tap(settings)(pixels_of(images))
    for image, mine, other in zip(images, ours, others, strict=True):
        theirs = settings(images=[image.pixels], return_tensors="pt")["pixel_values"][0]
        # Some processors multiply by 1/255 before they resize or normalize.
        tolerance = (
            0
            if isinstance(settings, CLIPImageProcessor | BlipImageProcessor | SiglipImageProcessor)
            else 3e-6
        )
        assert (mine - theirs).abs().max() <= tolerance
        assert (other - theirs).abs().max() <= tolerance


SOME_SIZES = [(1, 1), (2, 9), (5, 384), (224, 223), (385, 768), (1200, 31), (40, 3000), (961, 1283)]


@pytest.mark.parametrize(("height", "width"), SOME_SIZES)
def test_integer_weights_are_torchs(height: int, width: int) -> None:
    [pixels] = pixels_of([draw_noise(height, width)])
    axes = prepare_axis(height, 300, 0, 300), prepare_axis(width, 400, 50, 224)
    theirs = F.interpolate(pixels[None], (300, 400), mode="bicubic", antialias=True)[0, :, :, 50:274]
    assert torch.equal(resize_in_torch(pixels, *axes), theirs)


@pytest.mark.parametrize(
    "make", [tap_by_tap, lambda settings: ImageProcessor(settings, "cpu", torch.float32)]
)
def test_batch_mates_change_no_pixel(make: Callable[..., ImageProcessor], mixed_images: list[Image]) -> None:
    prepare = make(CLIPImageProcessor())
    together = prepare(pixels_of(mixed_images))
    assert torch.equal(together, torch.cat([prepare([pixels]) for pixels in pixels_of(mixed_images)]))


@pytest.mark.parametrize("size", [(1, 20000), (20000, 1)])
def test_an_extreme_aspect_ratio_costs_nothing(size: tuple[int, int]) -> None:
    prepare = ImageProcessor(CLIPImageProcessor(), "cpu", torch.float32)
    started = time.process_time()
    assert prepare([torch.zeros(3, *size, dtype=torch.uint8)]).isfinite().all()
    assert time.process_time() - started < 1.0  # the stock processor: 8.5 s and 8 GB


def test_an_axis_that_keeps_its_length_is_unchanged() -> None:
    levels = torch.arange(7, dtype=torch.uint8) * 40
    assert torch.equal(sum_taps(levels, prepare_axis(7, 7, 0, 7)), levels)


def test_weights_of_a_pixel_sum_to_one() -> None:
    axis = prepare_axis(1000, 300, 38, 224)
    assert (axis.table[1:].sum(0) / (1 << axis.shift) - 1).abs().max() < 1e-3


@pytest.mark.parametrize(
    "settings",
    [
        CLIPImageProcessor(size={"shortest_edge": 100}, crop_size={"height": 128, "width": 128}),
        CLIPImageProcessor(do_resize=False),
        BlipImageProcessor(resample=PIL.Image.Resampling.BOX),
        RTDetrImageProcessor(do_normalize=True, image_mean=None),
    ],
    ids=["a crop larger than the image", "no resize", "another filter", "no mean"],
)
def test_an_unsupported_image_processor_is_refused(settings: CLIPImageProcessor) -> None:
    with pytest.raises(ValueError, match=r"not supported|has no image_mean"):
        ImageProcessor(settings, "cpu", torch.float32)


def test_the_image_processor_settings_of_the_published_clip_are_supported(tmp_path: Path) -> None:
    published = {
        "size": 224,
        "crop_size": 224,
        "do_center_crop": True,
        "resample": 3,
        "feature_extractor_type": "x",
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(published))
    prepare = ImageProcessor(CLIPImageProcessor.from_pretrained(tmp_path), "cpu", torch.float32)
    assert prepare([torch.zeros(3, 300, 500, dtype=torch.uint8)]).shape == (1, 3, 224, 224)
    assert prepare.geometry.place(300, 500).resized == (224, 373)
