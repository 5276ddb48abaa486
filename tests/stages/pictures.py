"""Pictures to run stages on."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from stages.contract.base import Image

NEEDS_CUDA = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))
DEVICES = ["cpu", pytest.param("cuda:0", marks=NEEDS_CUDA)]


def wrap_pixels(pixels: np.ndarray) -> Image:
    """pixels: [height, width, 3], RGB."""
    height, width, _ = pixels.shape
    return Image(memoryview(b""), width, height, torch.from_numpy(pixels).permute(2, 0, 1))


def put(images: list[Image], device: str) -> list[Image]:
    """The same images with their pixels on a device."""
    return [
        Image(each.data, each.width, each.height, torch.as_tensor(each.pixels).to(device)) for each in images
    ]


def draw_image(height: int, width: int, seed: int = 0) -> Image:
    """Random blotches of one color on another: resizing keeps some of them, and no two are alike."""
    random = np.random.default_rng(seed)
    cells = random.integers(0, 256, (-(-height // 16), -(-width // 16), 3)) * random.uniform(0.2, 1, 3)
    shade = cells + random.uniform(-120, 120, 3)
    pixels = shade.clip(0, 255).astype(np.uint8).repeat(16, axis=0).repeat(16, axis=1)[:height, :width]
    return wrap_pixels(np.ascontiguousarray(pixels))


def draw_noise(height: int, width: int, seed: int = 0) -> Image:
    """Random pixels, half of them black or white: values that round up, round down and overshoot."""
    random = np.random.default_rng(seed)
    pixels = random.integers(-128, 384, (height, width, 3)).clip(0, 255).astype(np.uint8)
    return wrap_pixels(pixels)


def read_photo(path: Path) -> Image:
    return wrap_pixels(cv2.cvtColor(cv2.imread(str(path)), cv2.COLOR_BGR2RGB))
