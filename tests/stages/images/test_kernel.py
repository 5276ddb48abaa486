"""Compares the kernels that make a network's input with cv2 and torch on the CPU: compiled on a GPU,
otherwise interpreted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import BlipImageProcessor, CLIPImageProcessor, DetrImageProcessor, RTDetrImageProcessor

from stages.images import devices, images, resize
from stages.images.devices import pixels_of
from stages.images.resize import ImageProcessor
from stages.pretrained import lanczos
from stages.yolo import letterbox
from stages.yolo.detr import DetectorProcessor
from stages.yolo.letterbox import Letterbox, fill_canvases
from tests.stages.pictures import draw_noise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []

# The last is 67 taps wide, the first smaller than there are taps. The interpreter needs time for each tap of each row.
SIZES = [(1, 1), (3, 20), (30, 15), (24, 20), (12, 10), (2, 200)]
KEPT = {"height": 10, "width": 12}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes as long for a small program as for a large one."""
    if DEVICE == "cpu":
        monkeypatch.setattr(images, "TURN_TILE", {"BLOCK_H": 16, "BLOCK_W": 32})
        monkeypatch.setattr(letterbox, "TILE", {"BLOCK_H": 32, "BLOCK_W": 32})
        monkeypatch.setattr(resize, "WIDTH_TILE", {"BLOCK_H": 4, "BLOCK_W": 32})
        monkeypatch.setattr(resize, "HEIGHT_TILE", {"BLOCK_H": 16, "BLOCK_W": 32})


def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (letterbox, lanczos, resize):
        monkeypatch.setattr(module, "has_kernels_for", lambda _: True)


def draw_pictures() -> list[Tensor]:
    return pixels_of([draw_noise(*size, seed) for seed, size in enumerate(SIZES)])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_as_torch_turns_them(monkeypatch: pytest.MonkeyPatch, orientation: int) -> None:
    pictures = draw_pictures()
    theirs = [images._turn(picture, orientation) for picture in pictures]
    monkeypatch.setattr(devices, "has_kernels_for", lambda _: True)
    for picture, their in zip(pictures, theirs, strict=True):
        assert torch.equal(images._turn(picture.to(DEVICE), orientation).cpu(), their)


@pytest.mark.parametrize(
    "settings",
    [
        CLIPImageProcessor(size={"shortest_edge": 12}, crop_size=KEPT),
        BlipImageProcessor(size={"height": 12, "width": 12}),
        RTDetrImageProcessor(
            size={"max_height": 12, "max_width": 10}, do_pad=True, pad_size={"height": 13, "width": 12}
        ),
    ],
    ids=["clip", "blip", "boxed"],
)
def test_pixels_are_those_of_torchs_own_resize_of_bytes(
    monkeypatch: pytest.MonkeyPatch, settings: CLIPImageProcessor
) -> None:
    pictures = draw_pictures()
    theirs = ImageProcessor(settings, "cpu", torch.float16)(pictures)
    with_kernels(monkeypatch)
    ours = ImageProcessor(settings, DEVICE, torch.float16)([picture.to(DEVICE) for picture in pictures])
    assert ours.is_contiguous()
    assert torch.equal(ours.cpu(), theirs)


def test_pixels_of_whole_images_are_those_of_torchs_own_resize_of_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pictures = pixels_of([draw_noise(20, 30), draw_noise(8, 12, 1)])
    settings = DetrImageProcessor(size={"shortest_edge": 10, "longest_edge": 40})
    theirs = DetectorProcessor(settings, "cpu", torch.float16)(pictures)
    assert theirs.shape == (2, 3, 10, 15)
    with_kernels(monkeypatch)
    ours = DetectorProcessor(settings, DEVICE, torch.float16)([picture.to(DEVICE) for picture in pictures])
    assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("size", [(48, 64), (96, 128), (31, 40), (1, 7)])
def test_canvases_are_those_of_cv2(monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]) -> None:
    """A picture that fits, one of twice its size, where cv2 averages four pixels,
    and pictures that shrink or grow by any ratio."""
    pictures = pixels_of([draw_noise(*size), draw_noise(size[0] * 2, size[1] * 2, 1)])
    boxes = [Letterbox.fit(picture.shape[1], picture.shape[2], 64, 32) for picture in pictures]
    theirs = fill_canvases(pictures, boxes, torch.float16)
    with_kernels(monkeypatch)
    ours = fill_canvases([picture.to(DEVICE) for picture in pictures], boxes, torch.float16)
    assert ours.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("resized", [(3, 5), (5, 33)])
def test_lanczos_pixels_are_those_of_its_sums_in_torch(
    monkeypatch: pytest.MonkeyPatch, resized: tuple[int, int]
) -> None:
    """Of two images at once, as an image processor gives them."""
    images = torch.stack(pixels_of([draw_noise(6, 10, seed) for seed in range(2)]))
    theirs = lanczos.resize_by_lanczos(images, *resized)
    with_kernels(monkeypatch)
    assert torch.equal(lanczos.resize_by_lanczos(images.to(DEVICE), *resized).cpu(), theirs)
