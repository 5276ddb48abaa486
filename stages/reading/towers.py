"""Vision towers that read a batch in parts, with the answers of transformers' own.

A page has thousands of patches. In LightOnOCR, transformers makes one sequence of all pages of a batch, with a mask of
all patches times all patches: 170 GB for 32 pages. In DeepSeek-OCR 2, each tile has a bias of that form. One page, or a
few tiles, keep a GPU busy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling

TILES = 8  # that DeepSeek-OCR 2's tower sees at once


class PageByPage(nn.Module):
    """LightOnOCR's vision encoder, a PixtralVisionModel."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, pixel_values: Tensor, image_sizes: Any, **options: Any) -> BaseModelOutputWithPooling:
        """pixel_values: [pages, 3, height, width], padded. image_sizes: height and width of each page."""
        sizes = image_sizes.tolist() if isinstance(image_sizes, Tensor) else image_sizes
        hidden = [
            self.tower(page[None, :, :height, :width], image_sizes=[(height, width)], **options)
            for page, (height, width) in zip(pixel_values, sizes, strict=True)
        ]
        return BaseModelOutputWithPooling(
            last_hidden_state=torch.cat([each.last_hidden_state for each in hidden], dim=1)
        )


class TilesInParts(nn.Module):
    """DeepSeek-OCR 2's vision tower."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, pixel_values: Tensor, **options: Any) -> BaseModelOutput:
        """pixel_values: [tiles, 3, side, side]."""
        parts = [self.tower(part, **options).last_hidden_state for part in torch.split(pixel_values, TILES)]
        return BaseModelOutput(last_hidden_state=torch.cat(parts))


def read_in_parts(model: Any) -> None:
    """Replace the vision tower of a reader whose memory would grow with the square of a batch, or faster than it."""
    match type(model).__name__:
        case "LightOnOcrForConditionalGeneration":
            model.model.vision_encoder = PageByPage(model.model.vision_encoder)
        case "DeepseekOcr2ForConditionalGeneration":
            model.model.vision_tower = TilesInParts(model.model.vision_tower)
