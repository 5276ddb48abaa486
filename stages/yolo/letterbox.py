"""Letterboxing: images of any size onto the gray canvases that YOLO networks take.

As ultralytics' LetterBox with auto=True: the longer side becomes the network's size, and the shorter side is
padded on both sides to the next multiple of the stride. On the CPU cv2 resizes, as in ultralytics. A GPU does
cv2's arithmetic in integers, so that no pixel differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stages.images.devices import has_kernels_for
from stages.ocr.warp import WEIGHT_UNIT, interleave, resize

PADDING = 114  # ultralytics' gray
TILE = {"BLOCK_H": 4, "BLOCK_W": 128}  # pixels of a canvas that one program of the kernel computes


@dataclass(frozen=True, slots=True)
class Letterbox:
    """The place of an image on its canvas of height × width pixels."""

    height: int
    width: int
    top: int
    left: int
    image_height: int
    image_width: int

    @classmethod
    def fit(cls, height: int, width: int, size: int, stride: int) -> Letterbox:
        """For an image of height × width pixels and a network of `size`, a multiple of `stride`."""
        ratio = min(size / height, size / width)
        image_height, image_width = max(round(height * ratio), 1), max(round(width * ratio), 1)
        spare_height, spare_width = (size - image_height) % stride / 2, (size - image_width) % stride / 2
        top, bottom = round(spare_height - 0.1), round(spare_height + 0.1)
        left, right = round(spare_width - 0.1), round(spare_width + 0.1)
        return cls(
            image_height + top + bottom, image_width + left + right, top, left, image_height, image_width
        )

    @property
    def canvas(self) -> tuple[int, int]:
        return self.height, self.width

    def place(self, canvas: Tensor, image: Tensor) -> None:
        """Copy an image of image_height × image_width to its place. Both are [..., height, width]."""
        canvas[..., self.top : self.top + self.image_height, self.left : self.left + self.image_width] = image

    def unplace(self, corners: NDArray[np.float64], height: int, width: int) -> NDArray[np.float64]:
        """Corners x0, y0, x1, y1 on the canvas, [boxes, 4], to pixels of the image of height × width, cut off at its
        edges."""
        # As ultralytics' scale_boxes: it takes the scale from the canvas. Where the shorter side was rounded to a
        # multiple of the stride, this moves boxes by up to 6 pixels of a large image, but answers are to be equal.
        scale = min(self.height / height, self.width / width)
        image_height, image_width = max(round(height * scale), 1), max(round(width * scale), 1)
        left, top = round((self.width - image_width) / 2 - 0.1), round((self.height - image_height) / 2 - 0.1)
        scales = np.tile((image_width / width, image_height / height), 2)
        moved: NDArray[np.float64] = (corners - np.tile((left, top), 2)) / scales
        return moved.clip(0, np.tile((width, height), 2))


def fill_canvases(
    pixels: Sequence[Tensor], boxes: Sequence[Letterbox], dtype: torch.dtype = torch.float32
) -> Tensor:
    """uint8 [3, height, width] each, of any sizes but one canvas size, to 0..1 [images, 3, height, width], channels last."""
    if has_kernels_for(pixels[0]):
        return fill_with_kernel(pixels, boxes, dtype)
    batch = torch.full((len(pixels), 3, *boxes[0].canvas), float(PADDING), device=pixels[0].device)
    for canvas, image, box in zip(batch, pixels, boxes, strict=True):
        [page] = resize([interleave(image)], box.image_width, box.image_height)
        box.place(canvas, page.permute(2, 0, 1))
    return batch.div_(255).to(dtype, memory_format=torch.channels_last)


def fill_with_kernel(pixels: Sequence[Tensor], boxes: Sequence[Letterbox], dtype: torch.dtype) -> Tensor:
    from stages.kernels.resize import letterbox_kernel

    planar, (height, width) = [image.contiguous() for image in pixels], boxes[0].canvas
    size = len(planar), 3, height, width
    out = torch.empty(size, dtype=dtype, device=planar[0].device, memory_format=torch.channels_last)
    rows = [
        (image.data_ptr(), *image.shape[1:], box.top, box.left, box.image_height, box.image_width)
        for image, box in zip(planar, boxes, strict=True)
    ]
    table = np.ascontiguousarray(np.array(rows, dtype=np.int64).T)
    scales = 1 / (table[[6, 5]] / table[[2, 1]])
    letterbox_kernel[-(-height // TILE["BLOCK_H"]) * -(-width // TILE["BLOCK_W"]), len(planar)](
        torch.from_numpy(table).to(out.device),
        torch.from_numpy(scales).to(out.device),
        out,
        len(planar),
        height,
        width,
        WEIGHT_UNIT=WEIGHT_UNIT,
        PADDING=PADDING,
        **TILE,
    )
    return out
