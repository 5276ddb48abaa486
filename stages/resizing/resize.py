"""What CLIP's and BLIP's image processors do, on the device and only for the pixels that are kept.

On the CPU torch resizes bytes, as the stock processors have it do. On a GPU, where torch knows no such resize, two kernels do
torch's sums in integers, across and then down, so that no pixel differs there either; without kernels torch does the same
sums tap by tap. So it does on the CPU for images so long that the stock processor, which resizes the whole image and then
crops it, would make 8 GB of a PNG of 1×20000 pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image
import torch
import torch.nn.functional as F
from torch import Tensor

from stages.devices import group_places, has_kernels_for, split_batches

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

MOST_CUT = 16  # as many times the pixels that are kept may be resized and cut off
ALIKE_PIXELS = 1 << 25  # of pictures of one size that torch resizes together, where there are no kernels
KEPT_AXES = 512  # whose tables stay on the device, mostly some 20 kB each

TAPS = 2  # that a kernel sums at once; tables are padded to a multiple
ACROSS_TILE = {"ROWS": 16, "COLUMNS": 128}  # bytes that one program makes, in each a column of them one thread
DOWN_TILE = {"ROWS": 8, "COLUMNS": 128}


@dataclass(frozen=True, slots=True)
class Axis:
    """How the kept outputs of one axis of a picture are made of its inputs `start` to `end`.

    table: int32 [1 + taps, outputs], on the device; the first input of each output, counted from `start`, and the weights
    of the `taps` inputs from there on, which sum to about 1 << shift. Where a picture has fewer inputs than there are taps,
    `end` lies beyond it.
    """

    table: Tensor
    shift: int
    start: int
    end: int

    @property
    def taps(self) -> int:
        return len(self.table) - 1

    @property
    def place(self) -> tuple[int, int, int]:
        """As the kernels take it."""
        return self.table.data_ptr(), self.taps, self.shift


def prepare_axis(size: int, resized: int, start: int, kept: int, device: str = "cpu") -> Axis:
    """A resize from `size` to `resized` pixels, outputs `start` to `start + kept` alone, by torch's integers for bytes.

    Those are _compute_index_ranges_int16_weights in ATen's UpSampleKernel.cpp: as many bits for the weights as let the
    greatest of all outputs fit 16. Where an axis grows that is the first output's, which lacks its neighbour on one side.
    """
    if resized <= size:
        everywhere, inputs = weigh(size, resized, np.arange(resized))
        weights, inputs = everywhere[start : start + kept], inputs[start : start + kept]
    else:
        everywhere, _ = weigh(size, resized, np.arange(1))
        weights, inputs = weigh(size, resized, np.arange(start, start + kept))
    shift = next(bits for bits in range(23) if bits == 22 or everywhere.max() * (2 << bits) + 0.5 >= 1 << 15)
    scaled = weights * (1 << shift)
    rounded = np.trunc(scaled + np.copysign(0.5, scaled)).astype(np.int32)
    outputs, taps = rounded.nonzero()
    count = -(-(int(taps.max()) + 1) // TAPS) * TAPS
    first = np.minimum(inputs[:, 0], max(size - count, 0))  # so that all taps lie in the picture
    table = np.zeros((1 + count, kept), dtype=np.int32)
    table[0] = first - first[0]
    table[1 + inputs[outputs, taps] - first[outputs], outputs] = rounded[outputs, taps]
    return Axis(torch.from_numpy(table).to(device), shift, int(first[0]), int(first[-1]) + count)


def weigh(size: int, resized: int, outputs: Integers) -> tuple[Floats, Integers]:
    """The weights of the inputs within reach of some outputs, which sum to 1, and those inputs: [outputs, taps] each.

    Output i is a weighted mean of the inputs around its centre, `(i + 0.5) * size / resized`, by Keys' cubic (a = -0.5,
    "Cubic convolution interpolation for digital image processing", 1981), stretched by the scale when shrinking, as
    Pillow and torch (interpolate with antialias=True) do. The sums are in their order, as roundings depend on it.
    """
    scale = size / resized
    reach = 2 * max(scale, 1.0)
    centres = scale * (outputs + 0.5)
    first = np.maximum((centres - reach + 0.5).astype(np.int64), 0)
    end = np.minimum((centres + reach + 0.5).astype(np.int64), size)
    inputs = first[:, None] + np.arange(2 * math.ceil(reach) + 1)
    weights = cubic((inputs - centres[:, None] + 0.5) * (2 / reach))
    weights[inputs >= end[:, None]] = 0
    return weights / weights.cumsum(axis=1)[:, -1:], inputs


def cubic(distance: Floats) -> Floats:
    """Keys' cubic with a = -0.5, zero from a distance of 2 on."""
    far = np.abs(distance)
    near = (1.5 * far - 2.5) * far * far + 1
    tail = ((-0.5 * far + 2.5) * far - 4) * far + 2
    return np.where(far < 1, near, np.where(far < 2, tail, 0.0))


def crop(image: Tensor, rows: Axis, columns: Axis) -> Tensor:
    """What is in use of a picture [..., height, width]; what it lacks weighs nothing."""
    below, beside = max(rows.end - image.shape[-2], 0), max(columns.end - image.shape[-1], 0)
    if below or beside:
        image = F.pad(image, (0, beside, 0, below))
    return image[..., rows.start : rows.end, columns.start : columns.end]


def resize_in_torch(image: Tensor, rows: Axis, columns: Axis) -> Tensor:
    """uint8 [..., height, width] to [..., rows' outputs, columns' outputs]."""
    wide = sum_taps(crop(image, rows, columns), columns)
    return sum_taps(wide.mT, rows).mT


def sum_taps(levels: Tensor, axis: Axis) -> Tensor:
    """uint8 [..., inputs in use] to [..., outputs]."""
    first, *weights = axis.table
    total = torch.full((*levels.shape[:-1], len(first)), 1 << axis.shift - 1, dtype=torch.int32, device=levels.device)
    for tap, weight in enumerate(weights):
        total += levels[..., first + tap].int() * weight
    return (total >> axis.shift).clamp_(0, 255).byte()


def resize_with_kernels(
    pixels: Sequence[Tensor], axes: Sequence[tuple[Axis, Axis]], mean: Tensor, deviation: Tensor, dtype: torch.dtype
) -> Tensor:
    """uint8 [3, height, width] each, by its rows and columns, to [images, 3, rows' outputs, columns' outputs], normalised."""
    from stages.resizing.kernel import across_kernel, down_kernel

    used = [crop(image.contiguous(), *pair) for image, pair in zip(pixels, axes, strict=True)]
    count, (height, width) = len(used), (axis.table.shape[1] for axis in axes[0])
    lines = np.array([image.shape[1] for image in used])
    starts = 3 * (lines.cumsum() - lines)
    table = [
        (image.data_ptr(), *image.stride()[:2], image.shape[1], start, *columns.place, *rows.place)
        for image, start, (rows, columns) in zip(used, starts.tolist(), axes, strict=True)
    ]
    places = torch.from_numpy(np.ascontiguousarray(np.array(table, dtype=np.int64).T)).to(mean.device)
    wide = used[0].new_empty(3 * int(lines.sum()), width)
    across_kernel[count_tiles(int(lines.max()), width, ACROSS_TILE), 3 * count](
        places, wide, count, width, **ACROSS_TILE, TAPS=TAPS
    )
    out = wide.new_empty(count, 3, height, width, dtype=dtype)
    down_kernel[count_tiles(height, width, DOWN_TILE), 3 * count](
        places, wide, mean, deviation, out, count, HEIGHT=height, WIDTH=width, **DOWN_TILE, TAPS=TAPS
    )
    return out


def count_tiles(height: int, width: int, tile: dict[str, int]) -> int:
    return -(-height // tile["ROWS"]) * -(-width // tile["COLUMNS"])


class ImageProcessor:
    """Images of any size to one batch [images, 3, height, width], the very pixels of a stock CLIP or BLIP processor."""

    def __init__(self, settings: Any, device: str, dtype: torch.dtype) -> None:
        """settings: a transformers CLIPImageProcessor or BlipImageProcessor. Raises ValueError when it does something else."""
        self.dtype = dtype
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
        self._prepare_axis = lru_cache(KEPT_AXES)(prepare_axis)
        self._device = device
        self.stock = device == "cpu"

    def __call__(self, pixels: Sequence[Tensor]) -> Tensor:
        """pixels: uint8 [3, height, width] each, on the device, of unlike sizes."""
        if has_kernels_for(pixels[0]):
            axes = [self._axes(*image.shape[1:]) for image in pixels]
            return resize_with_kernels(pixels, axes, self.mean, self.deviation, self.dtype)
        batch = torch.empty(len(pixels), 3, self.height, self.width, device=self._device)
        for (height, width), places in group_places(image.shape[1:] for image in pixels).items():
            resized = self._scale(height, width)
            if self.stock and math.prod(resized) <= MOST_CUT * self.height * self.width:
                alike = torch.stack([pixels[place] for place in places])
                batch[places] = self._crop(F.interpolate(alike, resized, mode="bicubic", antialias=True)).float()
            else:
                rows, columns = self._axes(height, width)
                for part in split_batches(places, max(ALIKE_PIXELS // (height * width), 1)):
                    batch[part] = resize_in_torch(torch.stack([pixels[place] for place in part]), rows, columns).float()
        return ((batch - self.mean) / self.deviation).to(self.dtype)

    def _crop(self, resized: Tensor) -> Tensor:
        top, left = self._corner(*resized.shape[2:])
        return resized[:, :, top : top + self.height, left : left + self.width]

    def _axes(self, height: int, width: int) -> tuple[Axis, Axis]:
        """A picture's rows and columns."""
        resized_height, resized_width = self._scale(height, width)
        top, left = self._corner(resized_height, resized_width)
        rows = self._prepare_axis(height, resized_height, top, self.height, self._device)
        return rows, self._prepare_axis(width, resized_width, left, self.width, self._device)

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
