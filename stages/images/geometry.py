"""The size to which a transformers image processor resizes, and the part that it keeps. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

Size = tuple[int, int]  # height, width

SMALLEST_SCALE_STEP, LARGEST_SCALE = 1e-5, 100.0

CROP_PCT = 224 / 256  # of ConvNeXt, where preprocessor_config.json has null
WHOLE_FROM = 384  # pixels; from this size on ConvNeXt's image processor does not crop
LEVIT_SCALE = 256 / 224  # of the resized image to the size that LeViT's image processor is given


class CropPlace(NamedTuple):
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
    rounds: whether the middle is rounded, as by torchvision; otherwise it is rounded down.
    """

    kept: Size
    fixed: Size | None
    shortest: int = 0
    rounds: bool = False

    @classmethod
    def of(cls, settings: Any) -> AnyGeometry:
        """settings: an image processor of transformers. Raises ValueError if it asks for anything else."""
        if own := OWN_GEOMETRIES.get(type(settings).__name__):
            return own(settings)
        return cls.usual(settings, settings.size)

    @classmethod
    def usual(cls, settings: Any, size: Any) -> Geometry | BoxGeometry:
        """size: in the place of the settings' own. Raises ValueError as `of`."""
        fixed = sides(size)
        crop = read_step(settings, "do_center_crop", "crop_size")
        box = read_step(settings, "do_pad", "pad_size")
        kept = sides(crop) if crop else fixed
        shortest = min(fixed) if fixed else size.shortest_edge
        if not settings.do_resize:
            raise unsupported("it must resize")
        if box and not crop and (box.height, box.width) != fixed:
            return BoxGeometry.of(size, (box.height, box.width))
        if not kept or not shortest:
            raise unsupported(
                "it must resize to a height and a width, or to a shortest edge with a center crop, or pad to a pad_size"
            )
        if max(kept) > shortest and kept != fixed:
            raise unsupported("its center crop must not be larger than the resized image")
        return cls(kept, fixed, size.shortest_edge or 0)

    def place(self, height: int, width: int) -> CropPlace:
        """The longer side is rounded down."""
        if self.fixed:
            resized = self.fixed
        elif height <= width:
            resized = self.shortest, int(self.shortest * width / height)
        else:
            resized = int(self.shortest * height / width), self.shortest
        margins = resized[0] - self.kept[0], resized[1] - self.kept[1]
        corner = margins[0] // 2, margins[1] // 2
        if self.rounds:
            corner = round(margins[0] / 2), round(margins[1] / 2)
        return CropPlace(resized, corner, self.kept)


@dataclass(frozen=True, slots=True)
class BoxGeometry:
    """From images of any size to the top left of a box, the rest of which is padding.

    kept: the size of the box.
    size: to which an image is resized, as transformers' image processors describe it: a height and a width; the shortest
        edge, if the longest one then has no more than so many pixels; or as large as fits into a height and a width.
    """

    kept: Size
    size: Any

    @classmethod
    def of(cls, size: Any, kept: Size) -> BoxGeometry:
        """Raises ValueError if an image may be larger than the box."""
        edge = size.longest_edge if size.shortest_edge else None
        largest = (edge, edge) if edge else (size.max_height or size.height, size.max_width or size.width)
        if not all(side and side <= most for side, most in zip(largest, kept, strict=True)):
            raise unsupported("its pad_size must not be smaller than the resized image")
        return cls(kept, size)

    def place(self, height: int, width: int) -> CropPlace:
        resized = self._resize(height, width)
        return CropPlace(resized, (0, 0), resized)

    def _resize(self, height: int, width: int) -> Size:
        """Rounded as in transformers' get_image_size_for_max_height_width."""
        if self.size.shortest_edge:
            rows, columns = (
                EdgeGeometry(self.size.shortest_edge, self.size.longest_edge).place(height, width).kept
            )
            return min(rows, self.kept[0]), min(columns, self.kept[1])
        if self.size.max_height:
            scale = min(self.size.max_height / height, self.size.max_width / width)
            return max(int(height * scale), 1), max(int(width * scale), 1)
        return self.size.height, self.size.width


@dataclass(frozen=True, slots=True)
class EdgeGeometry:
    """From images of any size to whole images of their shape: the shorter side gets the length `shortest`, or less where the
    longer one would get more than `longest`.

    step: both sides are rounded down to a multiple.
    """

    shortest: int
    longest: int
    step: int = 1
    kept: ClassVar[None] = None  # no size that all inputs have

    @classmethod
    def of(cls, settings: Any) -> AnyGeometry:
        """That of an image processor which asks for it, otherwise as Geometry.of."""
        size, pads = settings.size, read_step(settings, "do_pad", "pad_size")
        if not settings.do_resize or pads or not (size.shortest_edge and size.longest_edge):
            return Geometry.of(settings)
        return cls(size.shortest_edge, size.longest_edge, STEPS.get(type(settings).__name__, 1))

    def place(self, height: int, width: int) -> CropPlace:
        """Rounded as in transformers' get_size_with_aspect_ratio, and that of YOLOS; but no side is empty."""
        short, long = sorted((height, width))
        edge: float = self.shortest
        if long / short * edge > self.longest:
            edge = self.longest * short / long
        if short != round(edge) or (self.step > 1 and width < height):
            short, long = round(edge), int(edge * long / short)
        short, long = (max(side - side % self.step, self.step) for side in (short, long))
        resized = (short, long) if height <= width else (long, short)
        return CropPlace(resized, (0, 0), resized)


AnyGeometry = Geometry | BoxGeometry | EdgeGeometry
STEPS = {"YolosImageProcessor": 16}


class _Sizes(NamedTuple):
    """A size as transformers' image processors describe it."""

    height: int | None = None
    width: int | None = None
    shortest_edge: int | None = None


def of_convnext(settings: Any) -> Geometry | BoxGeometry:
    """ConvNeXt: small images are the middle of a larger one, of which crop_pct is kept; others have no margin."""
    side, share = settings.size.shortest_edge, settings.crop_pct or CROP_PCT
    if not side or not settings.do_resize or settings.do_center_crop:
        raise unsupported("ConvNextImageProcessor must have a shortest_edge as size, and no center crop")
    if side >= WHOLE_FROM:
        return Geometry((side, side), (side, side))
    return Geometry((side, side), None, int(side / share))


def of_levit(settings: Any) -> Geometry | BoxGeometry:
    side = settings.size.shortest_edge
    size = _Sizes(shortest_edge=int(LEVIT_SCALE * side)) if side else settings.size
    return Geometry.usual(settings, size)


def of_poolformer(settings: Any) -> Geometry | BoxGeometry:
    """PoolFormer: of the resized image, crop_pct is the given size."""
    size, share = settings.size, settings.crop_pct
    if not share:
        return Geometry.usual(settings, size)
    side = size.shortest_edge or (size.height if size.height == size.width else None)
    if side:
        return Geometry.usual(settings, _Sizes(shortest_edge=int(side / share)))
    return Geometry.usual(settings, _Sizes(int(size.height / share), int(size.width / share)))


def of_timm(settings: Any) -> Geometry | BoxGeometry:
    """As timm: the input is the share crop_pct of the resized image, of its shorter side or, with "squash", of both sides."""
    asked = settings.data_config
    (colors, height, width), mode = asked["input_size"], asked["crop_mode"]
    if colors != 3 or not (mode == "squash" or (mode == "center" and height == width)):
        raise unsupported(
            'timm\'s crop_mode must be "squash", or "center" of a square, and input_size must have three colors'
        )
    resized = math.floor(height / asked["crop_pct"]), math.floor(width / asked["crop_pct"])
    return Geometry((height, width), resized if mode == "squash" else None, resized[0], rounds=True)


# Image processors of transformers with a resize of their own.
OWN_GEOMETRIES = {
    "ConvNextImageProcessor": of_convnext,
    "LevitImageProcessor": of_levit,
    "PoolFormerImageProcessor": of_poolformer,
    "TimmWrapperImageProcessor": of_timm,
}


def sides(size: Any) -> Size | None:
    """None if a size has no height or no width."""
    return (size.height, size.width) if size.height and size.width else None


def read_step(settings: Any, switch: str, name: str) -> Any:
    """The size of a step of an image processor, if it has this step and it is on."""
    return getattr(settings, name, None) if getattr(settings, switch, False) else None


def unsupported(wrong: str) -> ValueError:
    return ValueError(f"preprocessor_config.json asks for preprocessing that is not supported: {wrong}.")


@dataclass(frozen=True, slots=True)
class PatchGeometry:
    """To the largest size of nearly the image's shape that has at most `most` square patches of `patch` pixels."""

    patch: int
    most: int

    def place(self, height: int, width: int) -> CropPlace:
        """By bisection of the scale, as transformers' Siglip2ImageProcessor does."""
        low, high = SMALLEST_SCALE_STEP / 10, LARGEST_SCALE
        while high - low >= SMALLEST_SCALE_STEP:
            scale = (low + high) / 2
            rows, columns = self._count(height * scale), self._count(width * scale)
            low, high = (scale, high) if rows * columns <= self.most else (low, scale)
        resized = self._count(height * low) * self.patch, self._count(width * low) * self.patch
        return CropPlace(resized, (0, 0), resized)

    def _count(self, length: float) -> int:
        return max(math.ceil(length / self.patch), 1)
