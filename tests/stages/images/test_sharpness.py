"""Sharpness, held against its formula on whole images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from torch import Tensor

from stages.images.sharpness import GRID, WINDOW, measure_sharpness


def draw(width: int, height: int, seed: int = 0) -> Image.Image:
    levels = np.random.default_rng(seed).integers(
        0, 256, (height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8
    )
    return Image.fromarray(levels).resize((width, height), Image.Resampling.BICUBIC)


def to_tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def compute(levels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> float:
    whole = levels.astype(float)
    edges = 4 * whole[1:-1, 1:-1] - whole[:-2, 1:-1] - whole[2:, 1:-1] - whole[1:-1, :-2] - whole[1:-1, 2:]
    return float(edges.var())


@pytest.mark.parametrize("size", [(3, 3), (34, 20), (17, 33)])
def test_of_a_small_image_it_is_the_variance_of_the_laplacian_of_pillows_gray(size: tuple[int, int]) -> None:
    image = draw(*size)
    assert measure_sharpness([to_tensor(image)]) == [round(compute(np.array(image.convert("L"))), 2)]


def test_of_a_large_image_it_is_that_of_windows_from_edge_to_edge() -> None:
    image = draw(1003, 777)
    gray, inner = np.array(image.convert("L")), []
    for row in range(GRID):
        for column in range(GRID):
            y, x = row * ((777 - WINDOW) // (GRID - 1)), column * ((1003 - WINDOW) // (GRID - 1))
            part = gray[y : y + WINDOW, x : x + WINDOW].astype(float)
            edges = 4 * part[1:-1, 1:-1] - part[:-2, 1:-1] - part[2:, 1:-1] - part[1:-1, :-2] - part[1:-1, 2:]
            inner.append(edges)
    assert measure_sharpness([to_tensor(image)]) == [round(float(np.array(inner).var()), 2)]


def test_a_more_blurred_image_is_less_sharp_and_others_in_the_batch_change_nothing() -> None:
    images = [to_tensor(draw(640, 480).filter(ImageFilter.GaussianBlur(sigma))) for sigma in (0, 1, 2, 4)]
    alone = [measure_sharpness([image])[0] for image in images]
    assert alone == sorted(alone, reverse=True)
    assert alone[0] > 10 * alone[-1] > 0
    others = [to_tensor(draw(*size, seed=1)) for size in ((2, 500), (90, 700), (640, 480))]
    assert measure_sharpness([others[0], *images, *others[1:]])[1:5] == alone
    assert measure_sharpness([others[0]]) == [0.0]


def test_pixels_may_lie_in_memory_in_any_order_and_may_be_a_part_of_others() -> None:
    pixels = to_tensor(draw(400, 300))
    part = torch.cat([torch.zeros(3, 50, 400, dtype=torch.uint8), pixels], dim=1)[:, 50:]
    assert len({*measure_sharpness([pixels, pixels.contiguous(), part])}) == 1
