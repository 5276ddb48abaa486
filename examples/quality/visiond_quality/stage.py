"""The stage: a few sums over each image's brightness, on the worker's device.

Sharpness: J. L. Pech-Pacheco et al., "Diatom autofocusing in brightfield microscopy", ICPR 2000. Noise: J.
Immerkær, "Fast noise variance estimation", CVIU 64 (1996). The hash is dHash: for each of 8 × 8 fields,
whether it is darker than its neighbor on the right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.contract.base import Image, ImageError, Result, Stage
from stages.contract.options import read_options
from stages.images.devices import hold_device
from visiond_quality import Quality, QualityOptions

LAPLACIAN = ((0.0, 1.0, 0.0), (1.0, -4.0, 1.0), (0.0, 1.0, 0.0))
NOISE = ((1.0, -2.0, 1.0), (-2.0, 4.0, -2.0), (1.0, -2.0, 1.0))
WEIGHTS = (0.299, 0.587, 0.114)  # of red, green and blue in brightness (ITU-R BT.601)


class QualityStage(Stage):
    def load(self) -> None:
        self.options = read_options(self.spec, QualityOptions)
        self.weights = torch.tensor(WEIGHTS, device=self.device)
        self.filters = torch.tensor([LAPLACIAN, NOISE], device=self.device)[:, None]

    @torch.inference_mode()
    def run(self, images: Sequence[Image]) -> list[Result | ImageError]:
        with hold_device(self.lock):  # CUDA's errors become OutOfMemory and DeviceLost
            return [self.measure(image) for image in images]

    def measure(self, image: Image) -> Quality:
        assert image.pixels is not None
        levels = torch.einsum("chw,c->hw", image.pixels.float(), self.weights)  # brightness, 0..255
        edges, noise = self.filter(levels)
        clipped = self.options.clipped
        figures = torch.stack(
            [
                edges.var(correction=0),
                levels.mean() / 255,
                (levels <= clipped).float().mean(),
                (levels >= 255 - clipped).float().mean(),
                noise.abs().mean() * math.sqrt(math.pi / 2) / 6,
            ]
        )
        sharpness, mean, dark, bright, deviation = (round(figure, 4) for figure in figures.tolist())
        return Quality(sharpness, mean, dark, bright, deviation, hash_levels(levels))

    def filter(self, levels: Tensor) -> Tensor:
        """Both filters on an image [height, width]. An image
        that is too small for them has no edges and no noise."""
        if min(levels.shape) < 3:
            return levels.new_zeros(2, 1)
        return F.conv2d(levels[None, None], self.filters)[0].flatten(1)


def hash_levels(levels: Tensor) -> str:
    fields = F.adaptive_avg_pool2d(levels[None, None], (8, 9))[0, 0]
    bits = (fields[:, :-1] < fields[:, 1:]).flatten().tolist()
    return f"{int(''.join('01'[bit] for bit in bits), 2):016x}"
