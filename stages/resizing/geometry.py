"""The size to which a transformers image processor resizes, and the part that it keeps. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Size = tuple[int, int]  # height, width


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

    def resized(self, height: int, width: int) -> Size:
        """The whole image's size after resizing. The longer side is rounded down."""
        if self.fixed:
            return self.fixed
        if height <= width:
            return self.shortest, int(self.shortest * width / height)
        return int(self.shortest * height / width), self.shortest

    def corner(self, height: int, width: int) -> Size:
        """The first row and column that are kept of an image of this size."""
        resized = self.resized(height, width)
        return (resized[0] - self.kept[0]) // 2, (resized[1] - self.kept[1]) // 2
