"""PP-OCR's networks of any size and version, as transformers' own modules or as the graph of an ONNX file run them.

A recognizer's answer for a line depends on the width of its tensor. These networks do not mask what is to the right
of a line, as ppocr.Recognizer does, so only lines of one padded width may share a tensor: `shares_tensors`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


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


class GenericNetwork(nn.Module):
    """network: takes [N, 3, height, width] and returns probabilities. swaps: whether it takes BGR."""

    def __init__(self, network: nn.Module, levels: Levels = PLAIN, *, swaps: bool = True) -> None:
        super().__init__()
        self.network, self.levels, self.swaps = network, levels, swaps

    def normalize(self, levels: Tensor) -> Tensor:
        values = next(filter(torch.is_floating_point, [*self.network.parameters(), *self.network.buffers()]))
        return self.levels.normalize(levels, values.dtype)

    def run(self, pixels: Tensor) -> Tensor:
        answer = self.network(pixels.flip(1) if self.swaps else pixels)
        probabilities: Tensor = getattr(answer, "last_hidden_state", answer)
        return probabilities


class GenericDetector(GenericNetwork):
    """Text detection, as ppocr.Detector."""

    def infer(self, pages: Tensor) -> Tensor:
        return self.run(self.normalize(pages)).squeeze(1)


class GenericRecognizer(GenericNetwork):
    """Text recognition, as ppocr.Recognizer."""

    shares_tensors = False

    def infer(self, lines: Tensor, resized: Tensor, padded: Tensor | None) -> tuple[Tensor, Tensor]:
        """padded: not used, because it is the width of the tensor."""
        probabilities, classes = self.run(blank_right(self.normalize(lines), resized)).max(dim=-1)
        return classes, probabilities
