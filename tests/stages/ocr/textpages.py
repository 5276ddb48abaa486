"""Pages of text to read."""

from __future__ import annotations

import random
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as Pillow
from PIL import ImageDraw, ImageFont

from stages.contract.base import Image
from tests.stages.pictures import wrap_pixels

FONT = Path(str(distribution("matplotlib").locate_file("matplotlib/mpl-data/fonts/ttf/DejaVuSans.ttf")))
READ = [
    "Total amount due 1,204.50 EUR",
    "please return this form before March",
    "Größe, façade, señor, piñata",
    "08:45 2026-11-22 +49 30 1234",
]
UNREAD = [
    "תודה רבה חשבונית סכום כולל",
    "Բարեւ աշխարհ շնորհակալություն",
    "ευχαριστώ παρακαλώ λογαριασμός",
    "дякую вулиця 2024 магазин площа",
]
SHORT = ["Total amount due", "please return", "Größe, façade"]
SIZES = [
    (640, 480),
    (420, 300),
    (800, 600),
    (480, 640),
    (1280, 960),
    (300, 700),
    (960, 100),
    (2200, 700),
    (700, 700),
    (90, 60),
]
PAGES = [seed + 10 * (seed % 2) for seed in range(10)]  # of all sizes, half of them turned by a few degrees
# A network takes time for each pixel. With half of all limits, pages of half the size take the same ways.
HALF: dict[str, Any] = {"map_side": 368, "max_side": 1000}
HALF_SIZES = [(90, 60) if size == (90, 60) else (size[0] // 2, size[1] // 2) for size in SIZES]
PHRASE = (
    "Invoice Total amount due 1,204.50 EUR shipping to Berlin please return this form before March 14th Chapter 7: methods "
    "& results fig. 3-b temperature 21.5 C ISO 9001 first class ticket platform 12 departs 08:45 no smoking open daily"
)
WORDS = PHRASE.split()


def draw_page(seed: int, sizes: Sequence[tuple[int, int]] = SIZES) -> Image:
    """Lines of words in several sizes on a page of one of these sizes, every other one turned by a few degrees."""
    pick = random.Random(seed)
    width, height = sizes[seed % len(sizes)]
    page = Pillow.new(
        "RGB", (width, height), (paper := pick.randint(200, 255), paper, pick.randint(200, 255))
    )
    pen, y = ImageDraw.Draw(page), pick.randint(4, 30)
    while y < height - 16:
        size = pick.choice([14, 18, 24, 36, 48])
        text = " ".join(pick.choices(WORDS, k=pick.randint(1, 9)))
        pen.text(
            (pick.randint(4, width // 5), y),
            text,
            fill=(pick.randint(0, 90),) * 3,
            font=ImageFont.load_default(size),
        )
        y += int(size * pick.uniform(1.5, 3))
    if seed // len(sizes) and width < 5 * height:
        page = page.rotate(
            pick.choice([2, -3, 5, -1.5]),
            resample=Pillow.Resampling.BICUBIC,
            expand=True,
            fillcolor=(230,) * 3,
        )
    return wrap_pixels(np.array(page))


def draw_half(seed: int) -> Image:
    return draw_page(seed, HALF_SIZES)


def draw_lines(lines: list[str], turns: int = 0, width: int = 900) -> Image:
    page = Pillow.new("RGB", (width, 90 * len(lines) + 20), "white")
    for row, text in enumerate(lines):
        ImageDraw.Draw(page).text((30, 20 + 90 * row), text, "black", ImageFont.truetype(str(FONT), 36))
    return wrap_pixels(np.ascontiguousarray(np.rot90(np.array(page), -turns)))


def draw_turned(turns: int) -> Image:
    return draw_lines(SHORT, turns, width=420)
