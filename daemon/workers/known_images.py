"""The known images: drawn, not kept as files, so that each stage and each decoder has work.

They differ in size, format, color and content: a page of text, signs as on a street, and a few shapes.
"""

from __future__ import annotations

import io
import math
from functools import cache
from typing import TYPE_CHECKING

from stages.contract.base import Limits

if TYPE_CHECKING:
    from PIL.Image import Image as Picture
    from PIL.ImageDraw import ImageDraw as Pen
    from PIL.ImageFont import BaseImageFont

VERSION = 1  # of the pictures; another one makes all references begin again


@cache
def draw_page(limits: Limits) -> bytes:
    """A JPEG in a camera's format with lines of text. As all of these it has no more pixels than the limits allow, or it
    would be refused before any stage."""
    pen, picture = _begin(1280, 960, "white")
    pen.text((80, 80), "A page to rehearse on\nand a second line", "black", _font(48))
    return _encode(picture, "JPEG", limits)


@cache
def draw_known(limits: Limits) -> tuple[bytes, ...]:
    """All known images, as files. The PNG is decoded on the host, also where JPEGs are decoded by a GPU."""
    return draw_page(limits), _draw_signs(limits), _draw_shapes(limits)


def _draw_signs(limits: Limits) -> bytes:
    """Under a blue sky a red stop sign and a clock, which most detectors know."""
    pen, picture = _begin(960, 720, "#79b4e8")
    pen.rectangle((0, 520, 960, 720), "#4f8a3c")
    pen.rectangle((252, 300, 268, 640), "#8a8d91")
    pen.regular_polygon((260, 240, 170), 8, 22.5, "white")
    pen.regular_polygon((260, 240, 156), 8, 22.5, "#b5121b")
    pen.text((260, 240), "STOP", "white", _font(96), "mm")
    pen.ellipse((540, 140, 860, 460), "#f4f1e6", "#222222", 14)
    for hour in range(1, 13):
        angle = math.radians(30 * hour - 90)
        pen.text(
            (700 + 122 * math.cos(angle), 300 + 122 * math.sin(angle)), str(hour), "#222222", _font(32), "mm"
        )
    pen.line((700, 300, 640, 220), "#222222", 12)
    pen.line((700, 300, 700, 190), "#222222", 8)
    return _encode(picture, "JPEG", limits)


def _draw_shapes(limits: Limits) -> bytes:
    pen, picture = _begin(640, 832, "#2b2440")
    pen.ellipse((70, 90, 290, 310), "#e8452c")
    pen.rectangle((370, 110, 560, 300), "#2f7de0")
    radii = (130, 55) * 5
    turns = [math.radians(36 * number - 90) for number in range(10)]
    pen.polygon(
        [(180 + r * math.cos(a), 520 + r * math.sin(a)) for r, a in zip(radii, turns, strict=True)], "#f2c230"
    )
    pen.polygon([(460, 400), (580, 620), (340, 620)], "#3fae5a")
    pen.text((320, 740), "EXIT 24", "white", _font(80), "mm")
    return _encode(picture, "PNG", limits)


def _begin(width: int, height: int, color: str) -> tuple[Pen, Picture]:
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (width, height), color)
    return ImageDraw.Draw(picture), picture


def _font(size: int) -> BaseImageFont:
    from PIL import ImageFont

    font: BaseImageFont = ImageFont.load_default(size)
    return font


def _encode(picture: Picture, format_: str, limits: Limits) -> bytes:
    side, file = math.isqrt(limits.max_pixels), io.BytesIO()
    picture.thumbnail((side, side))  # never enlarges
    picture.save(file, format_)
    return file.getvalue()
