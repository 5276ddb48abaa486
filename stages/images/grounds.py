"""Writes a picture as the models see it, without transparency, and chooses the ground of a transparent one."""

from __future__ import annotations

import functools
from array import array

from PIL import Image, ImageChops

SAMPLE = 512  # most pixels of a side that are looked at
CLEAR, OPAQUE, LIGHT, NEARLY_NONE = 16, 128, 192, 0.05  # alpha, alpha, gray level, share of the pixels
CLEAR_STEP = 64  # gray levels
FAR_MORE = 2.5  # times the contrast; black letters in a white outline have up to 2.3 times as much on black
GRAYS = ("#808080", "#404040", "#c0c0c0")
ONE_BYTE = ("1", "L")  # modes of Pillow that are written with one byte a pixel
STRIP_PIXELS = 4_000_000  # converted at once, which limits the additional memory
TILE = 16  # pixels of the sample, as much as a small letter
HIDDEN = 0.22  # of the contrast that another ground gives: OCR reads letters of level 225 on white, and of 35 on black
LOST = 0.1  # of all contrast


def write_strips(image: Image.Image, out: memoryview) -> bool:
    """Write the pixels, on their ground, as RGB or as one byte each if they are gray. Returns whether they are."""
    width, height = image.size
    ground = choose_ground(image) if image.has_transparency_data else "white"
    mode = "L" if image.mode in ONE_BYTE and not image.has_transparency_data else "RGB"
    rows, row_bytes = max(1, STRIP_PIXELS // width), len(mode) * width  # a byte for each letter
    for top in range(0, height, rows):
        bottom = min(top + rows, height)
        strip = image if (top, bottom) == (0, height) else image.crop((0, top, width, bottom))
        out[row_bytes * top : row_bytes * bottom] = _convert(strip, mode, ground).tobytes()
    return mode == "L"


def _convert(image: Image.Image, mode: str, ground: str) -> Image.Image:
    if not image.has_transparency_data:
        return image if image.mode == mode else image.convert(mode)
    picture = Image.new(mode, image.size, ground)
    transparent = image.convert("RGBA")
    picture.paste(transparent, mask=transparent)
    return picture


def choose_ground(image: Image.Image) -> str:
    """White; or black for light text or drawings on transparency, which white would hide: most of the picture is
    transparent, and nearly all of the rest is nearly white, or has far more contrast on black. Gray if each of these would hide
    a part, as where some letters are light and some are dark. A sample of the pixels is enough.
    """
    width, height = image.size
    sample = image.resize((min(width, SAMPLE), min(height, SAMPLE)), Image.Resampling.NEAREST).convert("RGBA")
    level, alpha = sample.convert("L"), sample.getchannel("A")
    clear = sum(alpha.histogram()[:CLEAR])
    if 2 * clear <= sample.width * sample.height:
        return "white"
    seen = level.histogram(alpha.point(lambda value: 255 if value >= OPAQUE else 0))
    if sum(seen[:LIGHT]) < NEARLY_NONE * sum(seen):
        return "black"
    if gray := _find_gray(sample.convert("RGB"), alpha):
        return gray
    on_white, on_black = (sum(_measure_contrast(level, alpha, ground)) for ground in ("white", "black"))
    return "black" if on_black > FAR_MORE * on_white else "white"


def _find_gray(picture: Image.Image, alpha: Image.Image) -> str:
    """A gray that shows what white and black hide; empty if one of these hides nothing."""
    contrasts = {ground: _measure_contrast(picture, alpha, ground) for ground in ("white", "black", *GRAYS)}
    most: list[float] = [max(tile) for tile in zip(*contrasts.values(), strict=True)]

    def loses(ground: str) -> bool:
        pairs = zip(contrasts[ground], most, strict=True)
        lost: float = sum(best for found, best in pairs if found < HIDDEN * best)
        return lost > LOST * sum(most)

    if not (loses("white") and loses("black")):
        return ""
    return next((gray for gray in GRAYS if not loses(gray)), "")


def _measure_contrast(picture: Image.Image, alpha: Image.Image, ground: str) -> array[float]:
    """The steps between pixels beside each other and above each other on a ground, in each tile of the picture. Steps that
    are clear count alike."""
    seen = Image.composite(picture, Image.new(picture.mode, picture.size, ground), alpha)
    steps = Image.new("L", seen.size)
    for shift in ((1, 0), (0, 1)):
        bands = ImageChops.difference(seen, ImageChops.offset(seen, *shift)).split()
        step = functools.reduce(ImageChops.lighter, bands)
        steps = ImageChops.add(steps, step.point(lambda levels: min(levels, CLEAR_STEP)))
    width, height = (-(-side // TILE) * TILE for side in seen.size)  # what is beyond the sample has no steps
    return array("f", steps.crop((0, 0, width, height)).convert("F").reduce(TILE).tobytes())
