"""What CLIP's and BLIP's image processors do, on the device and only for the pixels that are kept.

On the CPU torch resizes bytes, as the stock processors have it do, so that no pixel differs. On a GPU, where torch knows no
such resize, each axis is a small matrix that holds the kept rows (or columns) of the resize alone: a resize is two matrix
products, whatever the aspect ratio. So it is on the CPU too for images so long that the stock processor, which resizes the
whole image and then crops it, would make 8 GB of a PNG of 1×20000 pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image
import torch
import torch.nn.functional as F

from stages.devices import group_places

Floats = npt.NDArray[np.float64]
Axis = tuple[torch.Tensor, int, int]  # weights [kept, last - first], first, last

# Elements of pixels that are converted to floats at once.
BLOCK_ELEMENTS = 1 << 25

MOST_CUT = 16  # as many times the pixels that are kept may be resized and cut off


def axis_weights(size: int, resized: int, start: int, kept: int, device: str = "cpu") -> Axis:
    """Bicubic antialiased resize of one axis from `size` to `resized` pixels, outputs `start` to `start + kept` alone.

    Output i is a weighted mean of the inputs around its centre, `(i + 0.5) * size / resized`, by Keys' cubic (a = -0.5,
    "Cubic convolution interpolation for digital image processing", 1981), stretched by the scale when shrinking, as
    Pillow and torch (interpolate with antialias=True) do. Only the few inputs within reach are computed with.
    """
    scale = size / resized
    reach = 2 * max(scale, 1.0)
    centres = (np.arange(start, start + kept) + 0.5) * scale
    inputs = np.floor(centres - reach).astype(np.int64)[:, None] + np.arange(int(2 * reach) + 2)
    weights = cubic((inputs + 0.5 - centres[:, None]) / (reach / 2))
    weights[(inputs < 0) | (inputs >= size)] = 0
    weights /= weights.sum(axis=1, keepdims=True)
    first, last = max(int(inputs[0, 0]), 0), min(int(inputs[-1, -1]) + 1, size)
    rows, taps = weights.nonzero()
    places = torch.from_numpy(rows * (last - first) + inputs[rows, taps] - first).to(device)
    dense = torch.zeros(kept, last - first, device=device)
    dense.view(-1)[places] = torch.from_numpy(weights[rows, taps].astype(np.float32)).to(device)
    return dense, first, last


def cubic(distance: Floats) -> Floats:
    """Keys' cubic with a = -0.5, zero from a distance of 2 on."""
    far = np.abs(distance)
    near = (1.5 * far - 2.5) * far**2 + 1
    tail = ((-0.5 * far + 2.5) * far - 4) * far + 2
    return np.where(far < 1, near, np.where(far < 2, tail, 0.0))


class ImageProcessor:
    """Images of any size to one batch [images, 3, height, width], as a stock CLIP or BLIP processor makes it.

    The same pixels on the CPU; within one or two of 255 levels on a GPU, where weights are not rounded to 16-bit integers.
    """

    def __init__(self, settings: Any, device: str, dtype: torch.dtype) -> None:
        """settings: a transformers CLIPImageProcessor or BlipImageProcessor. Raises ValueError when it does something else."""
        self.dtype = dtype
        # Levels up to 255 are exact in float16, and its matrix products are fast on a GPU; bfloat16 would round them.
        self.work_dtype = torch.float16 if device.startswith("cuda") and dtype != torch.float32 else torch.float32
        self.size, self.edge = settings.size, settings.size.shortest_edge
        kept = settings.crop_size if settings.do_center_crop else settings.size
        self.height, self.width = kept.height, kept.width
        known = self.height and self.width and settings.resample == PIL.Image.Resampling.BICUBIC
        if not known or min(self._scale(1, 1)) < max(self.height, self.width):
            raise ValueError(
                "preprocessor_config.json asks for what is not supported: only a bicubic resize, to a fixed size or to a "
                "shortest edge with a centre crop no larger than that."
            )
        mean = torch.tensor(settings.image_mean, device=device) * 255
        deviation = torch.tensor(settings.image_std, device=device) * 255
        self.mean, self.deviation = mean.view(3, 1, 1), deviation.view(3, 1, 1)
        self._axes = lru_cache(maxsize=32)(self._prepare_axes)
        self._device = device
        self.stock = device == "cpu"

    def __call__(self, pixels: Sequence[torch.Tensor]) -> torch.Tensor:
        """pixels: uint8 [3, height, width] each, on the device, of unlike sizes."""
        batch = torch.empty(len(pixels), 3, self.height, self.width, device=self._device)
        for (height, width), places in group_places(image.shape[1:] for image in pixels).items():
            resized, alike = self._scale(height, width), [pixels[place] for place in places]
            if self.stock and math.prod(resized) <= MOST_CUT * self.height * self.width:
                batch[places] = self._crop(F.interpolate(torch.stack(alike), resized, mode="bicubic", antialias=True)).float()
            else:
                batch[places] = self._resize(alike, *self._axes(height, width))
        return ((batch - self.mean) / self.deviation).to(self.dtype)

    def _crop(self, resized: torch.Tensor) -> torch.Tensor:
        top, left = self._corner(*resized.shape[2:])
        return resized[:, :, top : top + self.height, left : left + self.width]

    def _resize(self, pixels: list[torch.Tensor], rows: Axis, columns: Axis) -> torch.Tensor:
        """Images of one size to [images, 3, self.height, self.width] of whole levels 0..255."""
        down, top, bottom = rows
        across, left, right = columns
        kept = torch.stack([image[:, top:bottom, left:right] for image in pixels])
        block = max(1, BLOCK_ELEMENTS // (kept.shape[0] * 3 * kept.shape[3]))
        # Whole levels between the passes too: what overshoots there is cut off, as Pillow does.
        parts = [(part.to(self.work_dtype) @ across).round_().clamp_(0, 255) for part in torch.split(kept, block, dim=2)]
        return (down @ torch.cat(parts, dim=2)).float().round_().clamp_(0, 255)

    def _prepare_axes(self, height: int, width: int) -> tuple[Axis, Axis]:
        resized_height, resized_width = self._scale(height, width)
        top, left = self._corner(resized_height, resized_width)
        down, first_row, last_row = axis_weights(height, resized_height, top, self.height, self._device)
        across, first_column, last_column = axis_weights(width, resized_width, left, self.width, self._device)
        rows = (down.to(self.work_dtype), first_row, last_row)
        return rows, (across.T.contiguous().to(self.work_dtype), first_column, last_column)

    def _corner(self, height: int, width: int) -> tuple[int, int]:
        """Where in a resized image the kept pixels begin: top, left."""
        return (height - self.height) // 2, (width - self.width) // 2

    def _scale(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the whole resized image; the longer side is cut off to whole pixels."""
        if self.edge is None:
            return self.size.height, self.size.width
        if height <= width:
            return self.edge, int(self.edge * width / height)
        return int(self.edge * height / width), self.edge
