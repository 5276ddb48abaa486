"""The preprocessing of transformers' image processors, on the device and only for the pixels that are kept.

On the CPU torch resizes bytes, as the stock processors do. torch has no such resize on a GPU: there two
kernels do the same integer arithmetic, horizontally and then vertically, so that no pixel differs. Without
kernels torch does that arithmetic tap by tap. The CPU does so too for very long images: the stock processor
resizes the whole image before it crops it, and would need 8 GB for a PNG of 1×20000 pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL.Image import Resampling
from torch import Tensor

from stages.images.devices import group_places, has_kernels_for, split_batches
from stages.images.geometry import AnyGeometry, EdgeGeometry, Geometry, PatchGeometry, Size

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

WITHOUT_ANTIALIAS = ("RfDetrImageProcessor",)  # it resizes by interpolation between the nearest pixels
NEVER_NORMALIZED = ("MobileViTImageProcessor",)  # whatever its settings say
MAX_RESIZED_RATIO = 16  # pixels that are resized before the crop / pixels that are kept
PIXELS_AT_ONCE = 1 << 25  # of images of one size that torch resizes together, where there are no kernels
CACHED_AXES = 512  # their tables stay on the device, about 20 kB each

BLOCK_TAPS = 2  # taps that a kernel adds at once; tables are padded to a multiple
WIDTH_TILE = {"BLOCK_H": 16, "BLOCK_W": 128}  # outputs of one program; each thread computes a column
HEIGHT_TILE = {"BLOCK_H": 8, "BLOCK_W": 128}


@dataclass(frozen=True, slots=True)
class Axis:
    """How the kept outputs of one axis of an image are computed from its inputs `start` to `end`.

    table: int32 [1 + taps, outputs], on the device; the first input of each output, counted from `start`, and
    the weights of the `taps` inputs from there on. The weights sum to about 1 << shift. Where an image has
    fewer inputs than taps, `end` is beyond the image.
    """

    table: Tensor
    shift: int
    start: int
    end: int

    @property
    def taps(self) -> int:
        return len(self.table) - 1

    @property
    def entry(self) -> tuple[int, int, int]:
        """As in the table of the kernels: address, taps, shift."""
        return self.table.data_ptr(), self.taps, self.shift


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter of antialiased resizing, as in Pillow and in torch's interpolate.

    mode: torch's name of it. reach: the distance from which on its weights are zero.
    """

    mode: str
    reach: int
    weigh: Callable[[Floats], Floats]


def triangle(distance: Floats) -> Floats:
    """Bilinear interpolation; zero for distances from 1 on."""
    return (1 - np.abs(distance)).clip(0.0)


def cubic(distance: Floats) -> Floats:
    """Keys' cubic with a = -0.5 ("Cubic convolution interpolation for digital image processing", 1981); zero for
    distances from 2 on."""
    far = np.abs(distance)
    near = (1.5 * far - 2.5) * far * far + 1
    tail = ((-0.5 * far + 2.5) * far - 4) * far + 2
    return np.where(far < 1, near, np.where(far < 2, tail, 0.0))


def lanczos(distance: Floats) -> Floats:
    """A sinc in the window of a wider one (Duchon, "Lanczos filtering in one and two dimensions", 1979); zero for
    distances from 3 on."""
    return np.where(np.abs(distance) < 3, np.sinc(distance) * np.sinc(distance / 3), 0.0)


BICUBIC = Filter("bicubic", 2, cubic)
LANCZOS = Filter("lanczos", 3, lanczos)  # torch's interpolate does not have it
NEAREST = Filter("nearest-exact", 0, triangle)  # it weighs nothing
FILTERS = {
    Resampling.NEAREST: NEAREST,
    Resampling.LANCZOS: LANCZOS,
    Resampling.BILINEAR: Filter("bilinear", 1, triangle),
    Resampling.BICUBIC: BICUBIC,
}


def prepare_axis(
    size: int, resized: int, start: int, kept: int, device: str = "cpu", by: Filter = BICUBIC
) -> Axis:
    """A resize from `size` to `resized` pixels, only outputs `start` to `start + kept`, in torch's integer arithmetic.

    That is _compute_index_ranges_int16_weights in ATen's UpSampleKernel.cpp: the weights have as many bits as
    the largest weight of all outputs allows in 16 bits. Where an axis grows, the largest weight is the first
    output's, which has no neighbor on one side.
    """
    if resized <= size:
        all_weights, inputs = compute_weights(size, resized, np.arange(resized), by)
        weights, inputs = all_weights[start : start + kept], inputs[start : start + kept]
    else:
        all_weights, _ = compute_weights(size, resized, np.arange(1), by)
        weights, inputs = compute_weights(size, resized, np.arange(start, start + kept), by)
    shift = next(
        bits for bits in range(23) if bits == 22 or np.max(all_weights) * (2 << bits) + 0.5 >= 1 << 15
    )
    scaled = weights * (1 << shift)
    rounded = np.trunc(scaled + np.copysign(0.5, scaled)).astype(np.int32)
    outputs, taps = rounded.nonzero()
    count = -(-(int(np.max(taps)) + 1) // BLOCK_TAPS) * BLOCK_TAPS
    first = np.minimum(inputs[:, 0], max(size - count, 0))  # so that all taps are in the image
    table = np.zeros((1 + count, kept), dtype=np.int32)
    table[0] = first - first[0]
    table[1 + inputs[outputs, taps] - first[outputs], outputs] = rounded[outputs, taps]
    return Axis(torch.from_numpy(table).to(device), shift, int(first[0]), int(first[-1]) + count)


def compute_weights(size: int, resized: int, outputs: Integers, by: Filter) -> tuple[Floats, Integers]:
    """The inputs that each output depends on, and their weights, which sum to 1: [outputs, taps] each.

    Output i is a weighted mean of the inputs around its center, `(i + 0.5) * size / resized`, by a filter that is
    stretched by the scale when shrinking, as Pillow and torch (interpolate with antialias=True) do. Terms are
    added in their order, because rounding depends on it.
    """
    scale = size / resized
    reach = by.reach * max(scale, 1.0)
    centers = scale * (outputs + 0.5)
    first = np.maximum((centers - reach + 0.5).astype(np.int64), 0)
    end = np.minimum((centers + reach + 0.5).astype(np.int64), size)
    inputs = first[:, None] + np.arange(2 * math.ceil(reach) + 1)
    weights = by.weigh((inputs - centers[:, None] + 0.5) * (by.reach / reach))
    weights[inputs >= end[:, None]] = 0
    return weights / weights.cumsum(axis=1)[:, -1:], inputs


def crop(image: Tensor, rows: Axis, columns: Axis) -> Tensor:
    """The part of an image [..., height, width] that the outputs depend on, padded if it is too small;
    padding has weight 0."""
    below, beside = max(rows.end - image.shape[-2], 0), max(columns.end - image.shape[-1], 0)
    if below or beside:
        image = F.pad(image, (0, beside, 0, below))
    return image[..., rows.start : rows.end, columns.start : columns.end]


def resize_in_torch(image: Tensor, rows: Axis, columns: Axis) -> Tensor:
    """uint8 [..., height, width] to uint8 [..., rows' outputs, columns' outputs]."""
    resized = sum_taps(crop(image, rows, columns), columns)
    return sum_taps(resized.mT, rows).mT


def sum_taps(levels: Tensor, axis: Axis) -> Tensor:
    """uint8 [..., inputs of the axis] to uint8 [..., outputs]."""
    first, *weights = axis.table
    total = torch.full(
        (*levels.shape[:-1], len(first)), 1 << axis.shift - 1, dtype=torch.int32, device=levels.device
    )
    for tap, weight in enumerate(weights):
        total += levels[..., first + tap].int() * weight
    return (total >> axis.shift).clamp_(0, 255).byte()


def resize_with_kernels(
    pixels: Sequence[Tensor],
    axes: Sequence[tuple[Axis, Axis]],
    mean: Tensor,
    deviation: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """uint8 [3, height, width] each, with the axes of its rows and columns, to [images, 3, height, width], normalized."""
    from stages.kernels.resize import resize_height_kernel

    table, resized = resize_columns(pixels, axes)
    count, (height, width) = len(pixels), (axis.table.shape[1] for axis in axes[0])
    out = resized.new_empty(count, 3, height, width, dtype=dtype)
    resize_height_kernel[count_tiles(height, width, HEIGHT_TILE), 3 * count](
        table,
        resized,
        mean,
        deviation,
        out,
        count,
        HEIGHT=height,
        WIDTH=width,
        **HEIGHT_TILE,
        BLOCK_TAPS=BLOCK_TAPS,
    )
    return out


def resize_to_bytes_with_kernels(pixels: Sequence[Tensor], axes: Sequence[tuple[Axis, Axis]]) -> Tensor:
    """As resize_with_kernels, to uint8. For images of any size, not only that of a model's input: its kernel is compiled
    once, and a little slower."""
    from stages.kernels.resize import resize_height_to_bytes_kernel

    table, resized = resize_columns(pixels, axes)
    count, (height, width) = len(pixels), (axis.table.shape[1] for axis in axes[0])
    out = resized.new_empty(count, 3, height, width)
    resize_height_to_bytes_kernel[count_tiles(height, width, HEIGHT_TILE), 3 * count](
        table, resized, out, count, height, width, **HEIGHT_TILE, BLOCK_TAPS=BLOCK_TAPS
    )
    return out


def resize_columns(pixels: Sequence[Tensor], axes: Sequence[tuple[Axis, Axis]]) -> tuple[Tensor, Tensor]:
    """The first pass of a resize, and the table that the second one needs, both as their kernels describe them."""
    from stages.kernels.resize import resize_width_kernel

    used = [crop(image.contiguous(), *pair) for image, pair in zip(pixels, axes, strict=True)]
    count, width = len(used), axes[0][1].table.shape[1]
    lines = np.array([image.shape[1] for image in used])
    starts = 3 * (lines.cumsum() - lines)
    entries = [
        (image.data_ptr(), *image.stride()[:2], image.shape[1], start, *columns.entry, *rows.entry)
        for image, start, (rows, columns) in zip(used, starts.tolist(), axes, strict=True)
    ]
    table = torch.from_numpy(np.ascontiguousarray(np.array(entries, dtype=np.int64).T)).to(used[0].device)
    resized = used[0].new_empty(3 * int(lines.sum()), width)
    resize_width_kernel[count_tiles(int(lines.max()), width, WIDTH_TILE), 3 * count](
        table, resized, count, width, **WIDTH_TILE, BLOCK_TAPS=BLOCK_TAPS
    )
    return table, resized


def count_tiles(height: int, width: int, tile: dict[str, int]) -> int:
    return -(-height // tile["BLOCK_H"]) * -(-width // tile["BLOCK_W"])


def read_levels(settings: Any) -> tuple[Tensor, Tensor]:
    """What an image processor subtracts from levels of 0 to 255, and by what it divides then: [3, 1, 1] each.
    Raises ValueError if it does not say it."""
    is_normalized = settings.do_normalize and type(settings).__name__ not in NEVER_NORMALIZED
    values = (settings.image_mean, settings.image_std) if is_normalized else (0.0, 1.0)
    if None in values:
        raise ValueError(
            "preprocessor_config.json asks for do_normalize, but has no image_mean and image_std."
        )
    mean, deviation = map(torch.tensor, values)
    if getattr(settings, "rescale_offset", False) and settings.do_rescale:  # EfficientNet's, to -1 to 1
        mean = mean + 1.0
    if getattr(settings, "include_top", False):  # EfficientNet's divides twice
        deviation = deviation * torch.tensor(settings.image_std)
    levels = 1 / settings.rescale_factor if settings.do_rescale else 1.0
    levels = 255 if abs(levels - 255) < 1e-3 else levels  # 1/255 is often written with few digits
    mean, deviation = (
        (value * levels).expand(3).reshape(3, 1, 1).contiguous() for value in (mean, deviation)
    )
    return mean, deviation


class Resizer:
    """Resizes, crops and normalizes images: exactly as a stock processor."""

    def __init__(
        self, settings: Any, geometry: AnyGeometry | PatchGeometry, device: str, dtype: torch.dtype
    ) -> None:
        """settings: an image processor of transformers. Raises ValueError if it asks for a filter that is not supported."""
        self.dtype, self._geometry = dtype, geometry
        if settings.resample not in FILTERS:
            known = " or ".join(f"{kind.value} ({kind.name.lower()})" for kind in FILTERS)
            raise ValueError(
                f"preprocessor_config.json asks for resample = {settings.resample}, which is not supported: use {known}."
            )
        self.filter = FILTERS[settings.resample]
        self.antialias = type(settings).__name__ not in WITHOUT_ANTIALIAS and self.filter is not NEAREST
        self.flips = bool(getattr(settings, "do_flip_channel_order", False))  # to blue, green, red
        self.mean, self.deviation = (value.to(device) for value in read_levels(settings))
        self._prepare_axis = lru_cache(CACHED_AXES)(prepare_axis)
        self._device = device
        self.stock = device == "cpu"

    def resize(self, pixels: Sequence[Tensor]) -> Iterator[tuple[Sequence[int], Tensor]]:
        """Images of the same size, by their places, resized and cropped: [images, 3, height, width]."""
        for size, places in group_places((image.shape[1], image.shape[2]) for image in pixels).items():
            for part in split_batches(places, max(PIXELS_AT_ONCE // math.prod(size), 1)):
                yield part, self._resize(torch.stack([pixels[place] for place in part]))

    def normalize(self, pixels: Tensor) -> Tensor:
        """pixels: [images, 3, height, width] with values from 0 to 255."""
        return ((pixels - self.mean) / self.deviation).to(self.dtype)

    def _resize(self, images: Tensor) -> Tensor:
        """Images of one size."""
        resized, (top, left), kept = self._geometry.place(*images.shape[2:])
        is_small = math.prod(resized) <= MAX_RESIZED_RATIO * math.prod(kept)
        if not self.antialias:
            whole = F.interpolate(images.float(), resized, mode=self.filter.mode)
        elif self.stock and is_small and self.filter is not LANCZOS:
            whole = F.interpolate(images, resized, mode=self.filter.mode, antialias=True)
        else:
            return resize_in_torch(images, *self._axes(*images.shape[2:]))
        return whole[:, :, top : top + kept[0], left : left + kept[1]]

    def _axes(self, height: int, width: int) -> tuple[Axis, Axis]:
        """The axes of an image's rows and columns."""
        resized, (top, left), kept = self._geometry.place(height, width)
        rows = self._prepare_axis(height, resized[0], top, kept[0], self._device, self.filter)
        return rows, self._prepare_axis(width, resized[1], left, kept[1], self._device, self.filter)


class ImageProcessor(Resizer):
    """Images of any size to one batch [images, 3, height, width]: exactly the pixels of a stock processor."""

    geometries: ClassVar[type[Geometry | EdgeGeometry]] = Geometry

    def __init__(self, settings: Any, device: str, dtype: torch.dtype) -> None:
        """settings: an image processor of transformers that resizes, crops, scales and normalizes.
        Raises ValueError if it asks for anything else."""
        self.geometry = self.geometries.of(settings)
        super().__init__(settings, self.geometry, device, dtype)

    def size_for(self, image: Tensor) -> Size:
        """Height and width of the input for an image."""
        return self.geometry.kept or self.geometry.place(*image.shape[1:]).kept

    def __call__(self, pixels: Sequence[Tensor]) -> Tensor:
        """pixels: uint8 [3, height, width] each, on the device, of any sizes whose inputs have the same size."""
        by_kernels = self.antialias and has_kernels_for(pixels[0])
        prepared = self.prepare_with_kernels(pixels) if by_kernels else self.prepare_in_torch(pixels)
        return prepared.flip(1) if self.flips else prepared

    def prepare_in_torch(self, pixels: Sequence[Tensor]) -> Tensor:
        return self._collect(pixels, self.resize(pixels))

    def prepare_with_kernels(self, pixels: Sequence[Tensor]) -> Tensor:
        axes = [self._axes(*image.shape[1:]) for image in pixels]
        if isinstance(self.geometry, Geometry):
            return resize_with_kernels(pixels, axes, self.mean, self.deviation, self.dtype)
        resized = (
            resize_to_bytes_with_kernels([image], [pair]) for image, pair in zip(pixels, axes, strict=True)
        )
        return self._collect(pixels, (([place], image) for place, image in enumerate(resized)))

    def _collect(self, pixels: Sequence[Tensor], parts: Iterable[tuple[Sequence[int], Tensor]]) -> Tensor:
        """One batch of resized images, by their places. Padding is 0 after it is normalized."""
        batch = self.mean.repeat(len(pixels), 1, 1, 1).expand(-1, -1, *self.size_for(pixels[0])).contiguous()
        for places, resized in parts:
            batch[places, :, : resized.shape[2], : resized.shape[3]] = resized.float()
        return self.normalize(batch)
