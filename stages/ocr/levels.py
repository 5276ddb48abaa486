"""From a page's or a line's bytes to what a network takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Levels:
    """How a network takes pixels: mean and deviation of red, green and blue, of values in 0..1."""

    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    deviation: tuple[float, ...] = (0.5, 0.5, 0.5)

    def normalize(self, levels: Tensor, dtype: torch.dtype) -> Tensor:
        """uint8 [N, height, width, 3] to [N, 3, height, width], channels last in memory."""
        if self == PLAIN:
            return levels.float().mul_(2 / 255).sub_(1).to(dtype).permute(0, 3, 1, 2)
        mean, deviation = (
            torch.tensor(values, device=levels.device) * 255 for values in (self.mean, self.deviation)
        )
        return levels.float().sub_(mean).div_(deviation).to(dtype).permute(0, 3, 1, 2)


PLAIN = Levels()  # to -1..1


def blank_right(pixels: Tensor, resized: Tensor) -> Tensor:
    """Zeros to the right of each line. resized: int64 [N], columns of the lines."""
    columns = torch.arange(pixels.shape[3], device=pixels.device)
    return pixels.masked_fill_(columns >= resized[:, None, None, None], 0)
