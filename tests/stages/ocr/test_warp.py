from __future__ import annotations

from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch

from stages.ocr import warp
from stages.ocr.dbpost import mask_text, unpack_masks
from stages.ocr.stage import plan_lines
from stages.ocr.warp import (
    TextLines,
    concatenate,
    crop_in_torch,
    crop_quad,
    crop_with_cv2,
    crop_with_kernel,
    frame,
    interleave,
    mask_with_kernel,
    resize_in_torch,
    resize_with_cv2,
    resize_with_kernel,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def draw_page(width: int, height: int, seed: int) -> torch.Tensor:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return torch.from_numpy(cv2.GaussianBlur(noise, (0, 0), 1.0))


def place_line(x: float, y: float, width: float, height: float, degrees: float) -> np.ndarray:
    along = np.array([np.cos(np.radians(degrees)), np.sin(np.radians(degrees))])
    down = np.array([-along[1], along[0]])
    corners = [0 * along, width * along, width * along + height * down, height * down]
    return np.asarray((np.array(corners) + np.array([x, y])).round().clip(0, (499, 299)), np.float32)


def plan_slanted_lines(scale: float = 1.0) -> TextLines:
    """Lines on two pages: upright, slanted, one that runs down, one shrunk,
    one that is partly outside the page."""
    first = [(30, 20, 200, 40, 0), (40, 90, 180, 25, 4), (300, 20, 30, 200, 0)]
    second = [(20, 30, 300, 90, -3), (430 / scale, 250 / scale, 120, 60, 20), (100, 150, 160, 12, 30)]
    quads = [
        [place_line(scale * x, scale * y, scale * w, scale * h, degrees) for x, y, w, h, degrees in page]
        for page in (first, second)
    ]
    lines = concatenate([plan_lines(page, np.array(corners)) for page, corners in enumerate(quads)])
    return replace(lines, resized=np.minimum(lines.resized, 380))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((640, 480), (736, 992)),
        ((90, 70), (45, 35)),
        ((96, 128), (64, 48)),
        ((1, 1), (32, 32)),
        ((301, 7), (96, 48)),
        ((33, 257), (33, 31)),
    ],
)
def test_resizing_in_torch_equals_cv2_bit_for_bit(source: tuple[int, int], target: tuple[int, int]) -> None:
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (*source, 3), dtype=np.uint8))
    assert np.array_equal(resize_in_torch(pixels, *target), cv2.resize(pixels.numpy(), target))


def test_the_kernel_resizes_images_of_any_sizes_and_layouts_as_cv2_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(warp, "BLOCK_M", 512)
    pages = [draw_page(90, 70, 0), draw_page(20, 60, 1), draw_page(41, 33, 2), draw_page(64, 48, 3)]
    planar = draw_page(50, 90, 4).permute(2, 0, 1).contiguous()
    pages += [
        planar.permute(1, 2, 0),
        planar[:, 10:80, 5:40].permute(1, 2, 0),
    ]  # a piece of an image, as decoded
    theirs = torch.stack([resize_with_cv2(page, 41, 33) for page in pages])
    assert torch.equal(resize_with_kernel([page.to(DEVICE) for page in pages], 41, 33).cpu(), theirs)


def test_lines_cropped_in_torch_are_cv2s_except_for_a_rare_level() -> None:
    pages, lines = [draw_page(500, 300, 0), draw_page(500, 300, 1)], plan_slanted_lines()
    assert lines.height[2] > lines.width[2]
    theirs, ours = crop_with_cv2(pages, lines, 48, 400).int(), crop_in_torch(pages, lines, 48, 400).int()
    inside = torch.arange(400) < torch.from_numpy(lines.resized)[:, None]
    off = (ours - theirs).abs()[inside[:, None].expand(-1, 48, -1)]
    assert theirs.float().std() > 5
    assert off.max() <= 1
    assert (off > 0).float().mean() < 1e-3


@pytest.mark.parametrize("size", [(32, 64), (33, 70), (7, 5), (64, 160)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_the_kernel_masks_text_as_cv2_bit_for_bit(size: tuple[int, int], dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(sum(size))
    maps = torch.rand(3, *size, generator=random) ** torch.tensor([1, 4, 0.1])[:, None, None]
    if dtype == torch.uint8:
        maps = (maps * 255).byte()
    theirs = np.stack(list(mask_text(maps.numpy(), 0.6)))
    assert 0 < theirs.mean() < 1
    ours = unpack_masks(mask_with_kernel(maps.to(DEVICE), 0.6).cpu().numpy(), size[1])
    assert np.array_equal(np.stack(list(ours)), theirs)


def test_the_kernel_crops_lines_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that are not too slow in the interpreter, which takes as long for a small program as for a large one."""
    if DEVICE == "cpu":
        monkeypatch.setattr(warp, "BLOCK_M", 512)
    pages, lines = [draw_page(500, 300, seed).to(DEVICE) for seed in (0, 1)], plan_slanted_lines(0.25)
    lines = replace(lines, resized=np.minimum(lines.resized, 50))
    theirs, ours = crop_in_torch(pages, lines, 8, 64).int(), crop_with_kernel(pages, lines, 8, 64).int()
    inside = torch.arange(64) < torch.from_numpy(lines.resized)[:, None]
    off = (ours - theirs).abs().cpu()[inside[:, None].expand(-1, 8, -1)]
    assert off.max() <= 1
    assert (off > 0).float().mean() < 2e-3


def test_a_picture_is_interleaved_from_any_memory_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warp, "has_kernels_for", lambda _: True)
    page = draw_page(50, 30, 0).to(DEVICE)
    planes = page.permute(2, 0, 1)
    assert torch.equal(interleave(planes), page)
    assert torch.equal(interleave(planes.contiguous()), page)


def test_an_upright_box_is_cropped_as_by_the_warp() -> None:
    page = draw_page(500, 300, 0).numpy()
    corners = place_line(30, 20, 200, 40, 0)
    warp = cv2.getPerspectiveTransform(corners, frame(200, 40))
    warped = cv2.warpPerspective(
        page, warp, (200, 40), flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REPLICATE
    )
    assert np.array_equal(crop_quad(page, corners, 200, 40), warped)
