"""How sharp images are, which tells the best one of near-duplicates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

# Windows and pixels of each axis; without their borders, 32 pixels are measured.
GRID, WINDOW = 8, 34
LUMA = (19595, 38470, 7471)  # of red, green and blue in Pillow's mode L, of 65536


@torch.inference_mode()
def measure_sharpness(images: Sequence[torch.Tensor]) -> list[float]:
    """How sharp images are: the variance of the Laplacian of the brightness (J. L. Pech-Pacheco et al., "Diatom autofocusing in
    brightfield microscopy", ICPR 2000), which is higher for a sharper one of the same size. Measured on windows that are evenly
    spread, so that a large image costs no more than a small one, and in whole numbers, so that it is the same on every device
    and in every batch. images: uint8 [3, height, width], of any sizes. 0 for one with less than 3 pixels of an axis."""
    found = [0.0] * len(images)
    alike = defaultdict[torch.Size, list[tuple[int, torch.Tensor]]](list)  # by the shape of their windows
    for place, pixels in enumerate(images):
        if min(pixels.shape[1:]) > 2:
            alike[(windows := _cut_windows(pixels)).shape].append((place, windows))
    for group in alike.values():
        figures = _measure_windows([windows for _, windows in group])
        for (place, _), figure in zip(group, figures, strict=True):
            found[place] = figure
    return found


def _cut_windows(pixels: torch.Tensor) -> torch.Tensor:
    """A view of the windows: [3, rows, columns, height, width]."""
    sides = [min(WINDOW, length) for length in pixels.shape[1:]]
    counts = [min(GRID, length // side) for length, side in zip(pixels.shape[1:], sides, strict=True)]
    steps = [
        (length - side) // max(1, count - 1) * stride
        for length, side, count, stride in zip(
            pixels.shape[1:], sides, counts, pixels.stride()[1:], strict=True
        )
    ]
    strides = (pixels.stride(0), *steps, *pixels.stride()[1:])
    return pixels.as_strided((3, *counts, *sides), strides, pixels.storage_offset())


def _measure_windows(windows: Sequence[torch.Tensor]) -> list[float]:
    colors = torch.stack([*windows]).unbind(1)
    red, green, blue = (color.int() * weight for color, weight in zip(colors, LUMA, strict=True))
    levels = red.add_(green).add_(blue).add_(1 << 15) >> 16
    edges = 4 * levels[..., 1:-1, 1:-1] - levels[..., :-2, 1:-1] - levels[..., 2:, 1:-1]
    edges = (edges - levels[..., 1:-1, :-2] - levels[..., 1:-1, 2:]).flatten(1)
    count = edges.shape[1]
    sums = torch.stack([edges.sum(1), (edges * edges).sum(1)]).tolist()  # of int64
    return [round(square / count - (whole / count) ** 2, 2) for whole, square in zip(*sums, strict=True)]
