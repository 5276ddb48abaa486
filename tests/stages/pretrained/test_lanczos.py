from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional
from transformers import AutoProcessor, image_processing_backends
from transformers.models.auto import image_processing_auto

from stages.contract.base import Image
from stages.images.devices import pixels_of
from stages.pretrained import lanczos
from stages.pretrained.language import load_processor
from tests.stages import captioners


@pytest.mark.parametrize(
    ("size", "resized"), [((90, 120), (64, 48)), ((33, 57), (512, 884)), ((37, 2000), (64, 512))]
)
def test_pixels_are_torchvisions(size: tuple[int, int], resized: tuple[int, int]) -> None:
    images = torch.randint(0, 256, (3, 3, *size), dtype=torch.uint8)
    theirs = functional.resize(images, list(resized), InterpolationMode.LANCZOS, antialias=True)
    assert torch.equal(lanczos.resize_by_lanczos(images, *resized), theirs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_gpu_has_the_same_pixels() -> None:
    images = torch.randint(0, 256, (3, 3, 300, 500), dtype=torch.uint8)
    for resized in ((64, 48), (512, 884)):
        there = lanczos.resize_by_lanczos(images.cuda(), *resized).cpu()
        assert torch.equal(there, lanczos.resize_by_lanczos(images, *resized))


def test_large_images_are_resized_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.randint(0, 256, (3, 3, 40, 50), dtype=torch.uint8)
    together = lanczos.resize_by_lanczos(images, 60, 70)
    monkeypatch.setattr(lanczos, "PIXELS_AT_ONCE", 100)
    assert torch.equal(lanczos.resize_by_lanczos(images, 60, 70), together)


@pytest.mark.parametrize("kind", ["smolvlm", "idefics3"])
def test_a_processor_has_the_same_pixels_where_torchvision_has_no_such_filter(
    kind: str, mixed_images: list[Image], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for the CPU before 0.27, and for GPUs."""
    captioners.CAPTIONERS[kind](tmp_path)
    images = [[image] for image in pixels_of(mixed_images)]
    stock = AutoProcessor.from_pretrained(tmp_path).image_processor
    expected = stock(images, return_tensors="pt")["pixel_values"]
    monkeypatch.setattr(lanczos, "ON_CPU", False)
    monkeypatch.setattr(image_processing_backends, "is_torchvision_greater_or_equal", lambda _: False)
    monkeypatch.setattr(
        image_processing_auto, "DEFAULT_TO_PIL_BACKEND_IMAGE_PROCESSORS", [type(stock).__name__]
    )
    ours = load_processor(str(tmp_path)).image_processor
    assert torch.equal(ours(images, return_tensors="pt")["pixel_values"], expected)
    bicubic = AutoProcessor.from_pretrained(tmp_path, backend="torchvision").image_processor
    assert not torch.equal(bicubic(images, return_tensors="pt")["pixel_values"], expected)
