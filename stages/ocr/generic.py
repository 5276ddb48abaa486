"""PP-OCR's networks of any size and version, as transformers' own modules or as the graph of an ONNX file run them.

A recognizer's answer for a line depends on the width of its tensor. These networks do not mask what is to the right
of a line, as ppocr.Recognizer does, so only lines of one padded width may share a tensor: `shares_tensors`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stages.ocr.levels import PLAIN, Levels, blank_right


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
