"""The size to which a transformers image processor resizes, and the part that it keeps. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

Size = tuple[int, int]  # height, width

SMALLEST_SCALE_STEP, LARGEST_SCALE = 1e-5, 100.0


class Place(NamedTuple):
    """Where a model's input is in an image: the size of the whole image after resizing, the first row and column
    that are kept, and the size that is kept."""

    resized: Size
    corner: Size
    kept: Size


@dataclass(frozen=True, slots=True)
class Geometry:
    """From images of any size to inputs of one size.

    kept: the size of every input, the middle of the resized image.
    fixed: the size to which every image is resized; None: its shorter side gets the length `shortest`.
    """

    kept: Size
    fixed: Size | None
    shortest: int = 0

    @classmethod
    def of(cls, settings: Any) -> Geometry:
        """settings: an image processor of transformers. Raises ValueError if it asks for anything else."""
        size, crop = settings.size, settings.crop_size if getattr(settings, "do_center_crop", False) else None
        fixed = (size.height, size.width) if size.height and size.width else None
        kept = (crop.height, crop.width) if crop else fixed
        if not settings.do_resize or not settings.do_rescale or abs(settings.rescale_factor * 255 - 1) > 1e-6:
            wrong = "it must resize, and scale by 1/255"
        elif kept is None or not all(kept) or not (fixed or size.shortest_edge):
            wrong = "it must resize to a height and a width, or to a shortest edge with a center crop"
        elif max(kept) > min(fixed or (size.shortest_edge,)) and kept != fixed:
            wrong = "its center crop must not be larger than the resized image"
        else:
            return cls(kept, fixed, size.shortest_edge or 0)
        raise ValueError(f"preprocessor_config.json asks for preprocessing that is not supported: {wrong}.")

    def place(self, height: int, width: int) -> Place:
        """The longer side is rounded down."""
        if self.fixed:
            resized = self.fixed
        elif height <= width:
            resized = self.shortest, int(self.shortest * width / height)
        else:
            resized = int(self.shortest * height / width), self.shortest
        corner = (resized[0] - self.kept[0]) // 2, (resized[1] - self.kept[1]) // 2
        return Place(resized, corner, self.kept)


@dataclass(frozen=True, slots=True)
class PatchGeometry:
    """To the largest size of nearly the image's shape that has at most `most` square patches of `patch` pixels."""

    patch: int
    most: int

    def place(self, height: int, width: int) -> Place:
        """By bisection of the scale, as transformers' Siglip2ImageProcessor does."""
        low, high = SMALLEST_SCALE_STEP / 10, LARGEST_SCALE
        while high - low >= SMALLEST_SCALE_STEP:
            scale = (low + high) / 2
            rows, columns = self._count(height * scale), self._count(width * scale)
            low, high = (scale, high) if rows * columns <= self.most else (low, scale)
        resized = self._count(height * low) * self.patch, self._count(width * low) * self.patch
        return Place(resized, (0, 0), resized)

    def _count(self, length: float) -> int:
        return max(math.ceil(length / self.patch), 1)
