"""SigLIP 2 NaFlex: embeddings of images in nearly their own shape, of at most a number of patches.

Reference: Tschannen et al., "SigLIP 2: Multilingual Vision-Language Encoders with Improved Semantic Understanding,
Localization, and Dense Features", 2025. The tests compare this stage with transformers' own model and processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stages.clip.descriptor import FLEXIBLE
from stages.clip.stage import ClipStage
from stages.images.geometry import PatchGeometry
from stages.images.resize import Resizer

CACHED_SHAPES = 128  # their position embeddings stay on the device, about 400 kB each

Shape = tuple[int, int]  # rows and columns of patches


class PatchProcessor(Resizer):
    """Exactly the patches of transformers' Siglip2ImageProcessor."""

    def __init__(self, settings: Any, device: str, dtype: torch.dtype) -> None:
        """settings: a Siglip2ImageProcessor. Raises ValueError if it asks for something that is not supported."""
        self.edge, self.most = settings.patch_size, settings.max_num_patches
        super().__init__(settings, PatchGeometry(self.edge, self.most), device, dtype)

    def __call__(self, pixels: Sequence[Tensor]) -> tuple[Tensor, Tensor, list[Shape]]:
        """Patches, zero after the last one of an image [images, most, patch · patch · 3]; which of them there are,
        int32 [images, most]; and the shape of each image.

        pixels: uint8 [3, height, width] each, on the device, of any sizes.
        """
        edge = self.edge
        out = torch.zeros(len(pixels), self.most, edge * edge * 3, dtype=self.dtype, device=self.mean.device)
        mask = torch.zeros(len(pixels), self.most, dtype=torch.int32, device=self.mean.device)
        shapes: list[Shape] = [(0, 0)] * len(pixels)
        for places, resized in self.resize(pixels):
            rows, columns = resized.shape[2] // edge, resized.shape[3] // edge
            tiles = self.normalize(resized.float()).reshape(len(places), 3, rows, edge, columns, edge)
            out[places, : rows * columns] = tiles.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
            mask[places, : rows * columns] = 1
            for place in places:
                shapes[place] = rows, columns
        return out, mask, shapes


class FlexibleEmbeddings(nn.Module):
    """Siglip2VisionEmbeddings with the same weights. The position embeddings of a shape are computed once."""

    def __init__(self, embeddings: Any) -> None:
        super().__init__()
        self.projection = embeddings.patch_embedding
        edge = embeddings.position_embedding_size
        positions = embeddings.position_embedding.weight.detach()
        self.positions = positions.float().view(edge, edge, -1).permute(2, 0, 1)[None]
        self._resized = lru_cache(CACHED_SHAPES)(self._resize)

    def forward(self, pixel_values: Tensor, spatial_shapes: Sequence[Shape]) -> Tensor:
        """pixel_values: [images, most, values of a patch]. Returns [images, most, dim]."""
        hidden: Tensor = self.projection(pixel_values)
        return hidden + torch.stack(
            [self._resized(shape, hidden.shape[1], hidden.dtype) for shape in spatial_shapes]
        )

    def _resize(self, shape: Shape, most: int, dtype: torch.dtype) -> Tensor:
        """[most, dim]; padding has the position of the first patch."""
        resized = F.interpolate(self.positions, size=shape, mode="bilinear", antialias=True)[0].flatten(1).T
        return torch.cat((resized, resized[:1].expand(most - len(resized), -1))).to(dtype)


class NaflexStage(ClipStage):
    models = FLEXIBLE
    processor = PatchProcessor

    def embed(self, pixels: Sequence[Tensor]) -> Tensor:
        patches, mask, shapes = self.prepare(pixels)
        features: Tensor = self.vision(
            pixel_values=patches, pixel_attention_mask=mask, spatial_shapes=shapes
        ).pooler_output
        return features

    def speed_up(self, vision: Any) -> Any:
        vision.embeddings = FlexibleEmbeddings(vision.embeddings)
        return vision
