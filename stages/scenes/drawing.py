"""Draws scenes: colors, backdrops, and the effects of a camera.

Pixels are uint8 arrays [height, width, 3], RGB. Every function draws from the `random.Random` it
is given, so that the same seed gives the same pixels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[Any]  # of uint8; the stubs of OpenCV do not say so
Points = npt.NDArray[np.float64]
Rgb = tuple[int, int, int]

COLORS: Mapping[str, Rgb] = {
    "red": (212, 36, 40),
    "orange": (246, 132, 30),
    "yellow": (250, 216, 48),
    "green": (44, 152, 70),
    "blue": (38, 92, 212),
    "purple": (128, 58, 172),
    "pink": (250, 152, 192),
    "brown": (118, 72, 38),
    "black": (30, 30, 34),
    "white": (246, 246, 243),
    "grey": (134, 137, 141),
}

# Colors that are hard to see on a background of that color.
NEAR: Mapping[str, tuple[str, ...]] = {
    "red": ("orange", "brown", "pink"),
    "orange": ("red", "yellow", "brown"),
    "yellow": ("orange", "white"),
    "green": (),
    "blue": ("purple",),
    "purple": ("blue",),
    "pink": ("red", "purple"),
    "brown": ("orange", "black", "red"),
    "black": ("brown",),
    "white": ("yellow", "grey"),
    "grey": ("white",),
}


def luminance(color: Rgb) -> float:
    """0 (black) to 255 (white), by the weights of Rec. 601."""
    return 0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2]


def mix(color: Rgb, other: Rgb, share: float) -> Rgb:
    """A mixture with `share` (0..1) of the other color."""
    r, g, b = (round(one + share * (two - one)) for one, two in zip(color, other, strict=True))
    return r, g, b


def vary(color: Rgb, rng: Random, spread: int = 9) -> Rgb:
    """Slightly lighter or darker, with a slightly different tint; less near gray, which has no tint."""
    light, tint = rng.randint(-spread, spread), spread if max(color) - min(color) > 20 else spread // 4
    r, g, b = (min(255, max(0, channel + light + rng.randint(-tint, tint))) for channel in color)
    return r, g, b


def fill_plain(width: int, height: int, color: Rgb) -> Pixels:
    canvas = np.empty((height, width, 3), np.uint8)
    cv2.rectangle(canvas, (0, 0), (width, height), color, -1)  # ten times as fast as numpy's assignment
    return canvas


def blend(under: Pixels, over: Pixels, mask: Pixels) -> Pixels:
    """`over` where the mask [height, width] is 255, `under` where it is 0, a mixture between."""
    share = mask.astype(np.float32) / 255
    mixed: Pixels = cv2.blendLinear(over, under, share, 1 - share)
    return mixed


# Noise. Random numbers for every pixel would take longer than everything else,
# so scenes use random windows of two banks that are made once in a process.


@functools.cache
def film_grain() -> Pixels:
    """[1280, 1280, 3], normal around 128 with a standard deviation of 40."""
    noise: Pixels = np.random.default_rng(1).normal(128, 40, (1280, 1280, 3)).clip(0, 255).astype(np.uint8)
    return noise


@functools.cache
def clouds() -> Pixels:
    """[768, 768], fractal noise around 128: octaves of ever finer random grids."""
    rng = np.random.default_rng(2)
    total: Pixels = np.zeros((768, 768), np.float32)
    for cells in (6, 12, 24, 48, 96, 192):
        grid = rng.normal(0, 1 / cells**0.8, (cells, cells)).astype(np.float32)
        total += cv2.resize(grid, (768, 768), interpolation=cv2.INTER_CUBIC)
    clipped: Pixels = (128 + 40 * total / total.std()).clip(0, 255).astype(np.uint8)
    return clipped


def cut_clouds(width: int, height: int, rng: Random, cells_x: int, cells_y: int) -> Pixels:
    """A random window of cells_x × cells_y of the cloud bank, stretched to [height, width]."""
    x, y = rng.randrange(768 - cells_x), rng.randrange(768 - cells_y)
    window = clouds()[y : y + cells_y, x : x + cells_x]
    stretched: Pixels = cv2.resize(window, (width, height), interpolation=cv2.INTER_LINEAR)
    return stretched


def add_texture(canvas: Pixels, rng: Random, strength: float, cells_x: int, cells_y: int) -> None:
    height, width = canvas.shape[:2]
    texture = cv2.cvtColor(cut_clouds(width, height, rng, cells_x, cells_y), cv2.COLOR_GRAY2RGB)
    cv2.addWeighted(canvas, 1, texture, strength, -128 * strength, dst=canvas)


def add_grain(canvas: Pixels, rng: Random, strength: float) -> None:
    """Sensor noise with a standard deviation of 40 × strength."""
    bank, step = film_grain(), 1024
    for y in range(0, canvas.shape[0], step):
        for x in range(0, canvas.shape[1], step):
            block = canvas[y : y + step, x : x + step]
            down, right = rng.randrange(256), rng.randrange(256)
            noise = bank[down : down + block.shape[0], right : right + block.shape[1]]
            block[:] = cv2.addWeighted(block, 1, noise, strength, -128 * strength)


def add_light(canvas: Pixels, rng: Random) -> None:
    """Light from one side, and slightly darker corners."""
    height, width = canvas.shape[:2]
    y, x = np.mgrid[-1:1:12j, -1:1:16j]
    angle, slope, fall = rng.uniform(0, 2 * math.pi), rng.uniform(0, 0.09), rng.uniform(0, 0.08)
    light = 1.0 + slope * (x * math.cos(angle) + y * math.sin(angle)) - fall * (x * x + y * y)
    chart = cv2.cvtColor((light * 200).clip(0, 255).astype(np.uint8), cv2.COLOR_GRAY2RGB)
    cv2.multiply(canvas, cv2.resize(chart, (width, height)), dst=canvas, scale=1 / 200)


def add_camera(canvas: Pixels, rng: Random, scale: float, *, keep_text: bool) -> Pixels:
    """Blur, noise and the artifacts of an earlier JPEG, each in some images; weaker where text must stay legible."""
    sigma = scale * rng.uniform(0.4, 0.6 if keep_text else 1.5)
    if rng.random() < 0.3 and sigma > 0.3:
        canvas = cv2.GaussianBlur(canvas, (0, 0), sigma)
    if rng.random() < 0.7:
        add_grain(canvas, rng, rng.uniform(0.02, 0.08 if keep_text else 0.28))
    if rng.random() < 0.25:
        quality = rng.randint(70, 85) if keep_text else rng.randint(35, 80)
        _, data = cv2.imencode(".jpg", canvas, [cv2.IMWRITE_JPEG_QUALITY, quality])
        canvas = np.asarray(cv2.imdecode(data, cv2.IMREAD_COLOR))
    return canvas


# Backdrops.


def fill_gradient(width: int, height: int, top: Rgb, bottom: Rgb) -> Pixels:
    column: Pixels = np.linspace(top, bottom, 16).round().astype(np.uint8)[:, None, :].repeat(2, axis=1)
    filled: Pixels = cv2.resize(column, (width, height), interpolation=cv2.INTER_LINEAR)
    return filled


def draw_plain(width: int, height: int, rng: Random, color: str) -> Pixels:
    """One color with a gradient, soft blobs and, in some, the texture of a wall or of paper."""
    base = np.array(vary(mix(COLORS[color], (128, 128, 128), rng.uniform(0, 0.12)), rng), np.float64)
    y, x = np.mgrid[-1:1:24j, -1:1:32j]
    angle = rng.uniform(0, 2 * math.pi)
    light = 1 + rng.uniform(0, 0.12) * (x * math.cos(angle) + y * math.sin(angle))
    for _ in range(rng.randint(0, 6)):
        distance = (x - rng.uniform(-1, 1)) ** 2 + (y - rng.uniform(-1, 1)) ** 2
        light += rng.uniform(-0.08, 0.1) * np.exp(-distance / rng.uniform(0.03, 0.3))
    small = (base * light[..., None] + 10 * (light[..., None] - 1)).clip(0, 255).round().astype(np.uint8)
    canvas: Pixels = cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC)
    if rng.random() < 0.6:
        cells = rng.choice((40, 120, 400))
        add_texture(canvas, rng, rng.uniform(0.06, 0.2), cells, cells)
    return canvas


def _draw_sky(width: int, height: int, rng: Random) -> Pixels:
    sky = fill_gradient(width, height, vary((96, 160, 226), rng), vary((202, 226, 244), rng))
    veil = cut_clouds(width, height, rng, rng.randint(120, 260), rng.randint(80, 140))
    white = cv2.cvtColor(cv2.addWeighted(veil, 1, veil, 0, -120), cv2.COLOR_GRAY2RGB)
    veiled: Pixels = cv2.addWeighted(sky, 1, white, rng.uniform(0.4, 1.0), 0)
    return veiled


def _draw_ridge(canvas: Pixels, rng: Random, level: float, swing: float, color: Rgb) -> None:
    """Fill everything below a wavy line at `level` (a fraction of the height)."""
    height, width = canvas.shape[:2]
    x = np.linspace(0, 1, 40)
    wave = np.sin(x * rng.uniform(2, 7) + rng.uniform(0, 6)) + 0.5 * np.sin(
        x * rng.uniform(7, 14) + rng.uniform(0, 6)
    )
    ridge = np.stack([x * width, (level - swing * wave) * height], axis=1)
    corners = [[width, height + 1], [0, height + 1]]
    cv2.fillPoly(canvas, [np.vstack([ridge, corners]).round().astype(np.int32)], color, cv2.LINE_AA)


def _draw_ground(
    width: int, height: int, rng: Random, far: Rgb, near: Rgb, hills: int, cells: tuple[int, int]
) -> Pixels:
    """A sky above ground, with hills at the horizon."""
    canvas = _draw_sky(width, height, rng)
    level = rng.uniform(0.22, 0.42)
    for hill in range(hills):
        _draw_ridge(
            canvas, rng, level + 0.05 * hill, 0.03, vary(mix(far, (190, 210, 225), 0.45 - 0.2 * hill), rng)
        )
    top = int((level + 0.05 * hills) * height)
    ground = fill_gradient(width, height - top, vary(far, rng), vary(near, rng))
    add_texture(ground, rng, rng.uniform(0.15, 0.3), *cells)
    canvas[top:] = ground
    return canvas


def _draw_meadow(width: int, height: int, rng: Random) -> Pixels:
    return _draw_ground(width, height, rng, (128, 176, 84), (58, 122, 48), 2, (500, 160))


def _draw_desert(width: int, height: int, rng: Random) -> Pixels:
    return _draw_ground(width, height, rng, (236, 206, 150), (206, 160, 96), 2, (300, 90))


def _draw_lake(width: int, height: int, rng: Random) -> Pixels:
    return _draw_ground(width, height, rng, (120, 182, 206), (30, 96, 140), 1, (60, 300))


def _draw_snow(width: int, height: int, rng: Random) -> Pixels:
    return _draw_ground(width, height, rng, (226, 234, 242), (246, 249, 252), 2, (150, 60))


def _draw_night(width: int, height: int, rng: Random) -> Pixels:
    canvas = fill_gradient(width, height, vary((10, 14, 40), rng, 4), vary((38, 44, 92), rng, 6))
    add_texture(canvas, rng, 0.12, 200, 200)
    short = min(width, height)
    for _ in range(rng.randint(60, 140)):
        spot = (rng.randrange(width), rng.randrange(height))
        glow = rng.randint(120, 255)
        cv2.circle(
            canvas, spot, max(0, round(short * rng.uniform(0, 0.003))), (glow, glow, glow), -1, cv2.LINE_AA
        )
    return canvas


def _draw_bricks(width: int, height: int, rng: Random) -> Pixels:
    rows = rng.randint(9, 14)
    row_px = height / rows
    columns = max(3, round(width / (row_px * 2.4)))
    shades = np.array([[rng.uniform(0.82, 1.08) for _ in range(columns + 1)] for _ in range(rows)])
    bricks = (shades[..., None] * np.array(vary((164, 84, 66), rng))).clip(0, 255).astype(np.uint8)
    mortar, joint = vary((196, 184, 170), rng), max(1, round(row_px * 0.09))
    canvas = np.empty((height, width, 3), np.uint8)
    for row in range(rows):
        top, bottom = round(row * row_px), round((row + 1) * row_px)
        shift = (row % 2) * 0.5
        edges = [round((column - shift) * width / columns) for column in range(columns + 2)]
        for column in range(columns + 1):
            canvas[top:bottom, max(0, edges[column]) : edges[column + 1]] = bricks[row, column]
            canvas[top:bottom, max(0, edges[column]) : max(0, edges[column] + joint)] = mortar
        canvas[top : top + joint] = mortar
    add_texture(canvas, rng, 0.22, 500, 500)
    return canvas


def _draw_planks(width: int, height: int, rng: Random) -> Pixels:
    canvas = np.empty((height, width, 3), np.uint8)
    planks, base = rng.randint(3, 6), vary((172, 122, 76), rng)
    for plank in range(planks):
        top, bottom = round(plank * height / planks), round((plank + 1) * height / planks)
        canvas[top:bottom] = vary(mix(base, (90, 60, 34), rng.uniform(0, 0.25)), rng, 4)
        part = canvas[top:bottom]
        add_texture(part, rng, 0.25, rng.randint(8, 20), 140)
        part[: max(1, height // 250)] = mix(base, (40, 24, 12), 0.6)
    return canvas


@dataclass(frozen=True)
class Backdrop:
    """noun: its name in a caption. preposition: how objects stand to it.
    hides: colors that are not visible on it."""

    noun: str
    preposition: str
    hides: frozenset[str]
    draw: Callable[[int, int, Random], Pixels]


def _plain_backdrop(color: str) -> Backdrop:
    hides = frozenset((color, *NEAR[color]))
    return Backdrop(f"{color} background", "on", hides, functools.partial(draw_plain, color=color))


BACKDROPS: tuple[Backdrop, ...] = (
    *(_plain_backdrop(color) for color in COLORS),
    Backdrop("meadow", "in", frozenset({"green", "blue", "white"}), _draw_meadow),
    Backdrop("desert", "in", frozenset({"yellow", "orange", "brown", "blue", "white"}), _draw_desert),
    Backdrop("lake", "on", frozenset({"blue", "white", "grey", "green"}), _draw_lake),
    Backdrop("snowfield", "in", frozenset({"white", "grey", "blue"}), _draw_snow),
    Backdrop("night sky", "in", frozenset({"black", "blue", "purple", "brown"}), _draw_night),
    Backdrop("brick wall", "on", frozenset({"red", "orange", "brown", "pink", "grey"}), _draw_bricks),
    Backdrop("wooden table", "on", frozenset({"brown", "orange", "yellow", "red"}), _draw_planks),
)


def list_backdrops(colors: Iterable[str]) -> list[Backdrop]:
    """The backdrops on which all these colors are visible."""
    shown = frozenset(colors)
    return [backdrop for backdrop in BACKDROPS if not backdrop.hides & shown]
