"""The 64-bit pHash of the package imagehash: which of the 8 × 8 lowest frequencies of an image of 32 × 32 pixels are above
their median (N. Krawetz, "Looks Like It", hackerfactor.com, 2011; C. Zauner, "Implementation and Benchmarking of Perceptual
Image Hash Functions", 2010).

The tests compare hashes with those of imagehash, which has Pillow make the image small. So this does Pillow's integer
arithmetic: in float64, which has no rounding at such values, and for which torch has products of matrices on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from stages.contract.base import Image, ImageError, Result, Stage
from stages.hash.descriptor import Hash
from stages.images.devices import hold_device, pixels_of
from stages.images.resize import LANCZOS, compute_weights
from stages.images.sharpness import measure_sharpness

SMALL, KEPT = 32, 8  # pixels and frequencies of each axis
LUMA = (19595 / 65536, 38470 / 65536, 7471 / 65536)  # of red, green and blue in Pillow's mode L
BITS = 22  # after the point of Pillow's weights
AT_ONCE = 1 << 22  # pixels that are made gray at once, with 16 bytes for each
# Widths and heights whose weights stay on the device, in each worker: 256 bytes for each pixel, so 32 MB for 32 sizes of
# 4000 pixels. To make them again takes a CPU about a millisecond.
SIZES = 32
STEPS = np.pi / (2 * SMALL) * np.outer(np.arange(KEPT), 2 * np.arange(SMALL) + 1)
COSINES = 2 * np.cos(STEPS)  # DCT-II, as scipy's
# In images without a change along an axis, frequencies are 0 but for the rounding of a device.
ROUNDING = 1e-6


class HashStage(Stage):
    def load(self) -> None:
        self._weights = lru_cache(SIZES)(self._make_weights)
        self._half = torch.tensor([0.5], dtype=torch.float64, device=self.device)
        self.run([Image(memoryview(b""), 1, 1, torch.zeros(3, 1, 1, dtype=torch.uint8, device=self.device))])

    def run(self, images: Sequence[Image]) -> list[Result | ImageError]:
        with hold_device(self.lock):
            pixels = pixels_of(images)
            levels = torch.stack([self._shrink(each) for each in pixels]).cpu().numpy()
            sharpness = measure_sharpness(pixels)
        return [Hash(describe(each), figure) for each, figure in zip(levels, sharpness, strict=True)]

    def _shrink(self, pixels: Tensor) -> Tensor:
        """uint8 [3, height, width] to brightness, float64 [32, 32]. On a GPU the number of operations is what takes time."""
        _, height, width = pixels.shape
        parts = [
            self._multiply(self._brighten(part), self._weights(width))
            for part in torch.split(pixels, max(1, AT_ONCE // width), dim=1)
        ]
        return self._multiply(self._weights(height).mT, torch.cat(parts) if len(parts) > 1 else parts[0])

    def _brighten(self, pixels: Tensor) -> Tensor:
        """As Pillow's mode L: uint8 [3, rows, width] to whole levels, float64 [rows, width]."""
        levels = self._half.add(pixels[0], alpha=LUMA[0])
        return levels.add_(pixels[1], alpha=LUMA[1]).add_(pixels[2], alpha=LUMA[2]).floor_()

    def _multiply(self, left: Tensor, right: Tensor) -> Tensor:
        """The product in whole levels. One of the two is weights."""
        return torch.addmm(self._half, left, right).floor_().clamp_(0, 255)

    def _make_weights(self, size: int) -> Tensor:
        """The weights that make 32 pixels of `size`, [size, 32]."""
        weights, inputs = compute_weights(size, SMALL, np.arange(SMALL), LANCZOS)
        scaled = weights * (1 << BITS)
        dense = np.zeros((size, SMALL))
        outputs, taps = scaled.nonzero()
        rounded = np.trunc(scaled + np.copysign(0.5, scaled))
        dense[inputs[outputs, taps], outputs] = rounded[outputs, taps] / (1 << BITS)
        return torch.from_numpy(dense).to(self.device)


def describe(levels: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> str:
    """The hash in hexadecimal digits. levels: [32, 32]."""
    low = COSINES @ levels @ COSINES.T
    bits = low > np.median(low) + ROUNDING
    return np.packbits(bits).tobytes().hex()
