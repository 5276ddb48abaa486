"""The objects of a scene: drawings of sixteen classes, each with its mask."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random

import cv2
import numpy as np
import numpy.typing as npt

from stages.scenes.drawing import Pixels, Points, Rgb, blend, fill_plain, luminance, mix

# A shape is a list of layers in its own coordinates: x right, y down, radius about 1.
# The first number of a layer is its tone: how far its color goes to white (1) or to black (-1).

Layer = tuple[float, tuple[Points, ...]]


def _ellipse(
    x: float, y: float, rx: float, ry: float | None = None, start: float = 0, stop: float = 360
) -> Points:
    angles = np.radians(np.linspace(start, stop, 73))
    return np.stack([x + rx * np.cos(angles), y + (ry or rx) * np.sin(angles)], axis=1)


def _polygon(*points: tuple[float, float]) -> Points:
    return np.array(points, np.float64)


def _box(x0: float, y0: float, x1: float, y1: float) -> Points:
    return _polygon((x0, y0), (x1, y0), (x1, y1), (x0, y1))


def _star() -> Points:
    angles = np.radians(np.arange(10) * 36 - 90)
    radii = np.where(np.arange(10) % 2, 0.42, 1.0)
    return np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=1)


def _heart() -> Points:
    t = np.linspace(0, 2 * math.pi, 60)
    y = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
    return np.stack([16 * np.sin(t) ** 3, -y - 2.5], axis=1) / 16.5


def _cross() -> Points:
    quarter = np.array([(0.33, -0.33), (0.33, -1.0), (-0.33, -1.0)])
    turn = np.array([(0.0, 1.0), (-1.0, 0.0)])
    return np.vstack([quarter @ np.linalg.matrix_power(turn, -k) for k in range(4)])


def _moon() -> Points:
    outer, inner = _ellipse(0, 0, 1, 1, 50, 310), _ellipse(0.28, 0, 0.78, 0.78, 281, 79)
    return np.vstack([outer, inner])


SHAPES: Mapping[str, tuple[Layer, ...]] = {
    "circle": ((0, (_ellipse(0, 0, 0.95),)),),
    "square": ((0, (_box(-0.8, -0.8, 0.8, 0.8),)),),
    "triangle": ((0, (_polygon((0, -0.95), (0.9, 0.65), (-0.9, 0.65)),)),),
    "star": ((0, (_star(),)),),
    "heart": ((0, (_heart(),)),),
    "arrow": (
        (
            0,
            (
                _polygon(
                    (1, 0), (0.25, -0.7), (0.25, -0.26), (-1, -0.26), (-1, 0.26), (0.25, 0.26), (0.25, 0.7)
                ),
            ),
        ),
    ),
    "cross": ((0, (_cross(),)),),
    "ring": ((0, (_ellipse(0, 0, 0.95), _ellipse(0, 0, 0.56))),),
    "moon": ((0, (_moon(),)),),
    "house": (
        (-0.35, (_box(0.35, -0.85, 0.55, -0.3),)),
        (0, (_box(-0.72, -0.15, 0.72, 0.85),)),
        (-0.35, (_polygon((0, -0.95), (0.95, -0.1), (-0.95, -0.1)),)),
        (-0.6, (_box(-0.5, 0.25, -0.12, 0.85),)),
        (0.65, (_box(0.15, 0.2, 0.5, 0.52),)),
    ),
    "tree": (
        (-0.55, (_box(-0.13, 0.5, 0.13, 1.0),)),
        (0, (_polygon((0, -0.35), (0.75, 0.62), (-0.75, 0.62)),)),
        (0, (_polygon((0, -0.7), (0.6, 0.18), (-0.6, 0.18)),)),
        (0, (_polygon((0, -1.0), (0.45, -0.25), (-0.45, -0.25)),)),
    ),
    "car": (
        (0, (_polygon((-0.55, -0.1), (-0.35, -0.52), (0.3, -0.52), (0.58, -0.1)),)),
        (0, (_polygon((-1, 0.38), (-1, -0.02), (-0.9, -0.12), (0.6, -0.12), (0.95, 0.0), (1, 0.38)),)),
        (0.65, (_polygon((-0.43, -0.14), (-0.29, -0.42), (-0.05, -0.42), (-0.05, -0.14)),)),
        (0.65, (_polygon((0.05, -0.14), (0.05, -0.42), (0.24, -0.42), (0.42, -0.14)),)),
        (-0.8, (_ellipse(-0.55, 0.38, 0.24),)),
        (-0.8, (_ellipse(0.55, 0.38, 0.24),)),
        (0.4, (_ellipse(-0.55, 0.38, 0.1),)),
        (0.4, (_ellipse(0.55, 0.38, 0.1),)),
    ),
    "cup": (
        (-0.15, (_ellipse(0.58, 0.05, 0.4), _ellipse(0.58, 0.05, 0.22))),
        (0, (_polygon((-0.8, -0.65), (0.6, -0.65), (0.42, 0.8), (-0.62, 0.8)),)),
        (-0.35, (_ellipse(-0.1, -0.65, 0.7, 0.17),)),
    ),
    "fish": (
        (-0.25, (_polygon((0.4, 0), (1.0, -0.55), (0.88, 0), (1.0, 0.55)),)),
        (-0.25, (_polygon((-0.3, -0.3), (0.15, -0.72), (0.3, -0.25)),)),
        (0, (_ellipse(-0.25, 0, 0.75, 0.48),)),
        (-0.85, (_ellipse(-0.65, -0.1, 0.09),)),
    ),
    "flower": (
        *(
            (0, (_ellipse(0.58 * math.cos(k * math.pi / 3), 0.58 * math.sin(k * math.pi / 3), 0.37),))
            for k in range(6)
        ),
        (-0.5, (_ellipse(0, 0, 0.33),)),
    ),
    "boat": (
        (-0.5, (_box(-0.06, -1.0, 0.03, 0.4),)),
        (0.15, (_polygon((0.08, -0.92), (0.08, 0.22), (0.78, 0.22)),)),
        (0, (_polygon((-0.12, -0.7), (-0.12, 0.22), (-0.65, 0.22)),)),
        (0, (_polygon((-1, 0.35), (1, 0.35), (0.68, 0.85), (-0.7, 0.85)),)),
    ),
}

LABELS: tuple[str, ...] = tuple(SHAPES)

# Most degrees that an object may lean; others may have any angle.
LEAN: Mapping[str, float] = {
    "heart": 25,
    "house": 10,
    "tree": 10,
    "car": 12,
    "cup": 14,
    "fish": 25,
    "boat": 12,
}


@dataclass(frozen=True)
class Sprite:
    """One object to draw. x, y and radius are pixels, angle is in degrees."""

    label: str
    color: str
    x: float
    y: float
    radius: float
    angle: float
    stretch: float  # width over height; negative when mirrored

    def scaled(self, scale: float) -> Sprite:
        return replace(self, x=self.x * scale, y=self.y * scale, radius=self.radius * scale)

    def layers(self, scale: float = 1.0) -> list[Layer]:
        """Its layers in the image's coordinates, times `scale`."""
        turn = math.radians(self.angle)
        matrix = (
            np.array([[math.cos(turn), math.sin(turn)], [-math.sin(turn), math.cos(turn)]])
            * self.radius
            * scale
        )
        matrix[0] *= self.stretch
        center = np.array((self.x, self.y)) * scale
        return [(tone, tuple(part @ matrix + center for part in parts)) for tone, parts in SHAPES[self.label]]

    def extent(self) -> tuple[float, float, float, float]:
        """x0, y0, x1, y1 of its outline in pixels."""
        points = np.vstack([part for _, parts in self.layers() for part in parts])
        (x0, y0), (x1, y1) = points.min(axis=0), points.max(axis=0)
        return float(x0), float(y0), float(x1), float(y1)


def fixed_point(
    parts: tuple[Points, ...], shift: tuple[float, float] = (0, 0)
) -> list[npt.NDArray[np.int32]]:
    """Contours for OpenCV's drawing with shift=4; pixel centers are at half pixels here."""
    return [((part - shift - 0.5) * 16).round().astype(np.int32) for part in parts]


def shade(color: Rgb, tone: float) -> Rgb:
    """The color, nearer to white (tone > 0) or black (tone < 0), or the other way if it is already near."""
    if (tone > 0 and luminance(color) > 185) or (tone < 0 and luminance(color) < 60):
        tone = -tone * 0.7
    return mix(color, (255, 255, 255) if tone > 0 else (0, 0, 0), abs(tone))


@dataclass(frozen=True)
class Finish:
    """How the objects of a scene look: outline and shadow as fractions of the radius, gloss 0..1."""

    outline: float
    shadow: float
    shadow_angle: float
    gloss: float
    round_gloss: bool


def choose_finish(rng: Random) -> Finish:
    return Finish(
        outline=rng.uniform(0.03, 0.07) if rng.random() < 0.5 else 0.0,
        shadow=rng.uniform(0.05, 0.16) if rng.random() < 0.65 else 0.0,
        shadow_angle=rng.uniform(0.3, 2.8),
        gloss=rng.uniform(0.06, 0.2) if rng.random() < 0.75 else 0.0,
        round_gloss=rng.random() < 0.5,
    )


def _light_patch(patch: Pixels, finish: Finish) -> None:
    y, x = np.mgrid[-1:1:9j, -1:1:9j]
    bright = -0.6 * x * 0.5 - 0.6 * y
    if finish.round_gloss:
        bright = np.exp(-((x + 0.35) ** 2 + (y + 0.4) ** 2) / 0.5) - 0.35
    small = (200 * (1 + finish.gloss * bright)).clip(0, 255).astype(np.uint8)
    light = cv2.resize(cv2.cvtColor(small, cv2.COLOR_GRAY2RGB), (patch.shape[1], patch.shape[0]))
    cv2.multiply(patch, light, dst=patch, scale=1 / 200)


def _paint_patch(
    sprite: Sprite, color: Rgb, shape: tuple[int, int], origin: tuple[int, int], finish: Finish
) -> tuple[Pixels, Pixels]:
    """The object alone: its colors [h, w, 3] and its mask [h, w], in a window that begins at `origin`."""
    mask = np.zeros(shape, np.uint8)
    patch = fill_plain(shape[1], shape[0], color)
    line = max(1, round(sprite.radius * finish.outline)) if finish.outline else 0
    for tone, parts in sprite.layers():
        contours = fixed_point(parts, origin)
        cv2.fillPoly(patch, contours, shade(color, tone), cv2.LINE_AA, 4)
        cv2.fillPoly(mask, contours, 255, cv2.LINE_AA, 4)
        if line:
            cv2.polylines(patch, contours, True, shade(color, -0.55), line, cv2.LINE_AA, 4)
            cv2.polylines(mask, contours, True, 255, line, cv2.LINE_AA, 4)
    if finish.gloss:
        _light_patch(patch, finish)
    return patch, mask


def draw_object(
    canvas: Pixels, owners: Pixels, number: int, sprite: Sprite, color: Rgb, finish: Finish
) -> None:
    """Draw the object with its shadow, and write `number` into `owners` [height, width] where it covers."""
    height, width = canvas.shape[:2]
    x0, y0, x1, y1 = sprite.extent()
    pad = sprite.radius * (2.5 * finish.shadow + finish.outline) + 2
    left, top = max(0, int(x0 - pad)), max(0, int(y0 - pad))
    right, bottom = min(width, int(x1 + pad) + 1), min(height, int(y1 + pad) + 1)
    patch, mask = _paint_patch(sprite, color, (bottom - top, right - left), (left, top), finish)
    window = canvas[top:bottom, left:right]
    if finish.shadow:
        _cast_shadow(window, mask, sprite.radius * finish.shadow, finish.shadow_angle)
    window[:] = blend(window, patch, mask)
    owners[top:bottom, left:right][mask > 127] = number


def _cast_shadow(window: Pixels, mask: Pixels, reach: float, angle: float) -> None:
    size = 2 * max(1, round(reach * 0.6)) + 1
    move = np.array([[1, 0, reach * math.cos(angle)], [0, 1, reach * math.sin(angle)]])
    soft = cv2.blur(cv2.warpAffine(mask, move, (mask.shape[1], mask.shape[0])), (size, size))
    dim = cv2.cvtColor(cv2.addWeighted(soft, -0.4, soft, 0, 255), cv2.COLOR_GRAY2RGB)
    cv2.multiply(window, dim, dst=window, scale=1 / 255)
