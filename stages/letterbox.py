"""Images of any size onto the grey canvases that YOLO networks look at.

As ultralytics' LetterBox with auto=True: the longer side becomes the network's size, the shorter one is padded on
both sides to the next multiple of the stride. On the CPU cv2 resizes, as there, so that no pixel differs; on a GPU
torch's bilinear interpolation does, which agrees with cv2's to one of 255 levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stages.devices import group_places

PADDING = 114  # ultralytics' grey


@dataclass(frozen=True, slots=True)
class Letterbox:
    """Where an image comes to lie on its canvas of height × width pixels."""

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
        return cls(image_height + top + bottom, image_width + left + right, top, left, image_height, image_width)

    @property
    def canvas(self) -> tuple[int, int]:
        return self.height, self.width

    def place(self, canvas: Tensor, image: Tensor) -> None:
        """Both [..., height, width]; the image of image_height × image_width."""
        canvas[..., self.top : self.top + self.image_height, self.left : self.left + self.image_width] = image


def fill_canvases(pixels: Sequence[Tensor], boxes: Sequence[Letterbox]) -> Tensor:
    """uint8 [3, height, width] each, of unlike sizes but one canvas, to floats 0..1 [images, 3, height, width]."""
    device = pixels[0].device
    batch = torch.full((len(pixels), 3, *boxes[0].canvas), float(PADDING), device=device)
    if device.type == "cpu":
        for canvas, image, box in zip(batch, pixels, boxes, strict=True):
            box.place(canvas, resize_by_cv2(image, box))
    else:
        for places in group_places(image.shape for image in pixels).values():
            canvases = batch[places]
            boxes[places[0]].place(canvases, resize_by_torch([pixels[place] for place in places], boxes[places[0]]))
            batch[places] = canvases
    return batch.div_(255)


def resize_by_torch(images: Sequence[Tensor], box: Letterbox) -> Tensor:
    """Images of one size, together."""
    size = box.image_height, box.image_width
    resized = F.interpolate(torch.stack(list(images)).float(), size, mode="bilinear", align_corners=False, antialias=False)
    return resized.round_()


def resize_by_cv2(image: Tensor, box: Letterbox) -> Tensor:
    if image.shape[1:] == (box.image_height, box.image_width):
        return image
    rows = np.ascontiguousarray(image.permute(1, 2, 0).numpy())
    resized = cv2.resize(rows, (box.image_width, box.image_height), interpolation=cv2.INTER_LINEAR)
    return torch.from_numpy(resized).permute(2, 0, 1)
