"""A small pack of random weights, and pictures to run on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from stages.base import Image
from stages.packs import Pack, open_pack
from stages.training.mini import make_blank_pack


@pytest.fixture(scope="session")
def blank_pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    models = tmp_path_factory.mktemp("models")
    make_blank_pack(models / "blank", seed=1)
    return open_pack("blank", models)


def wrap_pixels(pixels: np.ndarray) -> Image:
    """pixels: [height, width, 3], RGB."""
    height, width, _ = pixels.shape
    return Image(memoryview(b""), "PNG", width, height, torch.from_numpy(pixels).permute(2, 0, 1))


def draw_image(height: int, width: int, seed: int = 0) -> Image:
    """Random blotches of one colour on another, so that resizing keeps something of them and no two look alike."""
    random = np.random.default_rng(seed)
    cells = random.integers(0, 256, (-(-height // 16), -(-width // 16), 3)) * random.uniform(0.2, 1, 3)
    shade = cells + random.uniform(-120, 120, 3)
    pixels = shade.clip(0, 255).astype(np.uint8).repeat(16, axis=0).repeat(16, axis=1)[:height, :width]
    return wrap_pixels(np.ascontiguousarray(pixels))


def read_photo(path: Path) -> Image:
    return wrap_pixels(cv2.cvtColor(cv2.imread(str(path)), cv2.COLOR_BGR2RGB))


SIZES = [(480, 640), (640, 480), (96, 128), (37, 41), (1, 1), (700, 20), (8, 300), (128, 128), (480, 640), (333, 222)]


@pytest.fixture
def mixed_images() -> list[Image]:
    """Ten images of nine sizes, upright and flat, tiny and thin."""
    return [draw_image(height, width, seed) for seed, (height, width) in enumerate(SIZES)]


@pytest.fixture
def draw() -> Callable[..., Image]:
    return draw_image


@pytest.fixture
def photo() -> Callable[[Path], Image]:
    return read_photo
