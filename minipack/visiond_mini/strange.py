"""Pictures that are no scenes, to learn what the models do not know.

They look like photographs from afar: textured shapes of many sizes that hide each other ("dead leaves"), with the
spectrum of natural images, light, blur and grain. References: Lee, Mumford & Huang, "Occlusion Models for Natural
Images", 2001; Baradad et al., "Learning to See by Looking at Noise", 2021.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from stages.scenes.drawing import Pixels
from stages.scenes.generator import map_processes

Floats = npt.NDArray[Any]  # of float32; the stubs of OpenCV do not say so
Rng = np.random.Generator

RATIOS = (1.0, 4 / 3, 3 / 2, 16 / 9, 3 / 4, 2 / 3)
LONGER_SIDES = (224, 320, 512, 640, 800)
TEXTURES, TEXTURE_SIZE = 4, 256


def write_strange(folder: Path, count: int, seed: int) -> list[Path]:
    """Write `count` pictures as JPEG files, in several processes."""
    folder.mkdir(parents=True, exist_ok=True)
    return list(map_processes(functools.partial(_write_picture, folder, seed), count))


def _write_picture(folder: Path, seed: int, index: int) -> Path:
    file = folder / f"{seed}-{index:06}.jpg"
    quality = [cv2.IMWRITE_JPEG_QUALITY, 60 + index % 36]
    cv2.imwrite(str(file), cv2.cvtColor(draw_strange(seed, index), cv2.COLOR_RGB2BGR), quality)
    return file


def draw_strange(seed: int, index: int) -> Pixels:
    """uint8 [height, width, 3], RGB. The same seed and index give the same picture."""
    rng = np.random.default_rng([seed, index])
    ratio, longer = rng.choice(RATIOS), int(rng.choice(LONGER_SIDES))
    height, width = int(longer / max(ratio, 1)), int(longer * min(ratio, 1))
    palette = Palette(rng)
    image = draw_backdrop(rng, height, width, palette)
    if rng.random() < 0.92:
        image = draw_leaves(rng, image, palette)
    return take_picture(rng, image)


class Palette:
    """Colors around a random one: mostly lighter and darker, and a little of other tints."""

    def __init__(self, rng: Rng) -> None:
        self.mean = rng.uniform(30, 225) + rng.normal(0, 25, 3)
        self.spread, self.tint = rng.uniform(10, 70), rng.uniform(0, 40)

    def pick(self, rng: Rng) -> Floats:
        color = self.mean + rng.normal(0, self.spread) + rng.normal(0, self.tint, 3)
        return color.astype(np.float32)


def draw_noise(rng: Rng, height: int, width: int, slope: float, stretched: float = 1.0) -> Floats:
    """Noise with amplitudes that fall as frequency to the power -slope; its mean is 0, its deviation 1."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None] * stretched, np.fft.rfftfreq(width)[None])
    frequency[0, 0] = 1.0
    phases = rng.standard_normal(frequency.shape) + 1j * rng.standard_normal(frequency.shape)
    noise = np.fft.irfft2(phases / frequency**slope, (height, width))
    normalized: Floats = ((noise - noise.mean()) / (noise.std() + 1e-9)).astype(np.float32)
    return normalized


def draw_backdrop(rng: Rng, height: int, width: int, palette: Palette) -> Floats:
    """A gradient between four colors, and clouds."""
    corners = np.stack([palette.pick(rng) for _ in range(4)]).reshape(2, 2, 3)
    tints = (rng.uniform(0, 45) * (1 + rng.normal(0, 0.15, 3))).astype(np.float32)
    clouds = draw_noise(rng, height, width, rng.uniform(0.8, 2.2))[..., None] * tints
    backdrop: Floats = stretch(corners, height, width) + clouds
    return backdrop


def draw_leaves(rng: Rng, image: Floats, palette: Palette) -> Floats:
    """Cover an image with shapes; there are as many times more small ones as in photographs."""
    height, width = image.shape[:2]
    textures = [
        draw_noise(rng, TEXTURE_SIZE, TEXTURE_SIZE, rng.uniform(0.4, 1.9), float(rng.choice([1, 1, 0.2, 5])))
        for _ in range(TEXTURES)
    ]
    count = round(400 ** rng.random())
    smallest, largest = rng.uniform(0.015, 0.1), rng.uniform(0.3, 1.2)
    for number in range(count):
        share = rng.random()
        size = min(height, width) / math.sqrt(share / smallest**2 + (1 - share) / largest**2)
        rows, columns = (max(4, int(size * rng.uniform(0.5, 1.5))) for _ in range(2))
        top, left = (
            rng.integers(-rows // 2, height - rows // 2),
            rng.integers(-columns // 2, width - columns // 2),
        )
        leaf = draw_leaf(rng, rows, columns, palette.pick(rng), textures[rng.integers(TEXTURES)])
        mask = cv2.GaussianBlur(draw_shape(rng, rows, columns), (0, 0), rng.uniform(0.3, 0.3 + 0.06 * size))
        paste(image, leaf, mask, int(top), int(left))
        if number in (count // 3, 2 * count // 3) and rng.random() < 0.6:  # what is behind is not in focus
            image = cv2.GaussianBlur(image, (0, 0), rng.uniform(0.5, 0.6 + 0.015 * min(height, width)))
    return image


def draw_leaf(rng: Rng, height: int, width: int, color: Floats, texture: Floats) -> Floats:
    """A rectangle of one color with texture, lit from one side, and sometimes round."""
    zoom, angle = rng.uniform(0.3, 2.0), rng.uniform(0, 2 * math.pi)
    rows, columns = (min(max(2, int(side * zoom)), TEXTURE_SIZE) for side in (height, width))
    top, left = rng.integers(TEXTURE_SIZE - rows + 1), rng.integers(TEXTURE_SIZE - columns + 1)
    grain = stretch(texture[top : top + rows, left : left + columns], height, width) * rng.uniform(0, 40)
    down, right = np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j].astype(np.float32)
    light = (math.cos(angle) * right + math.sin(angle) * down) * rng.uniform(0, 60)
    if rng.random() < 0.4:
        light -= (right**2 + down**2) * rng.uniform(0, 70)
    leaf: Floats = color + (grain + light)[..., None]
    return leaf


def draw_shape(rng: Rng, height: int, width: int) -> Floats:
    """A mask, 0 to 1: an ellipse, a polygon, a blob or a bent line."""
    mask, middle = np.zeros((height, width), np.uint8), np.array([width, height]) / 2
    kind = rng.integers(4)
    if kind == 3:
        start, bend, other, end = rng.uniform(0, 1, (4, 2)) * [width, height]
        way = np.linspace(0, 1, 24)[:, None]
        curve = (1 - way) ** 3 * start + 3 * way * (1 - way) ** 2 * bend + 3 * way**2 * (1 - way) * other
        thickness = max(1, int(min(height, width) * rng.uniform(0.03, 0.25)))
        cv2.polylines(mask, [(curve + way**3 * end).astype(np.int32)], False, 255, thickness, cv2.LINE_AA)
    else:
        count = rng.integers(3, 9) if kind == 1 else 48
        angles = (
            np.sort(rng.uniform(0, 2 * math.pi, count)) if kind == 1 else np.linspace(0, 2 * math.pi, count)
        )
        radii = rng.uniform(0.25, 0.5, count) if kind == 1 else np.full(count, 0.48 if kind == 0 else 0.38)
        if kind == 2:
            for wave in range(1, 7):
                radii += rng.normal(0, 0.09 / wave) * np.cos(wave * angles + rng.uniform(0, 2 * math.pi))
        outline = middle + np.stack([np.cos(angles) * width, np.sin(angles) * height], 1) * radii[:, None]
        cv2.fillPoly(mask, [outline.astype(np.int32)], 255, cv2.LINE_AA)
    return mask.astype(np.float32) / 255


def paste(image: Floats, leaf: Floats, mask: Floats, top: int, left: int) -> None:
    """Draw the part of a leaf that is inside the image."""
    rows = slice(max(0, top), min(image.shape[0], top + leaf.shape[0]))
    columns = slice(max(0, left), min(image.shape[1], left + leaf.shape[1]))
    inside = slice(rows.start - top, rows.stop - top), slice(columns.start - left, columns.stop - left)
    image[rows, columns] += (leaf[inside] - image[rows, columns]) * mask[inside][..., None]


def take_picture(rng: Rng, image: Floats) -> Pixels:
    """Blur, vignette, contrast and noise of a camera; a quarter is grey."""
    height, width = image.shape[:2]
    if rng.random() < 0.25:
        image = cv2.GaussianBlur(image, (0, 0), rng.uniform(0.4, 2.5))
    down, right = np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j].astype(np.float32)
    image = image * (1 - rng.uniform(0, 0.35) * (right**2 + down**2) / 2)[..., None]
    image = (image - image.mean()) * rng.uniform(0.6, 1.4) + image.mean()
    image = image + rng.normal(0, rng.uniform(0, 7), (height, width, 3))
    if rng.random() < 0.25:
        image = np.repeat(image.mean(axis=2, keepdims=True), 3, axis=2)
    return image.clip(0, 255).astype(np.uint8)


def stretch(part: Floats, height: int, width: int) -> Floats:
    stretched: Floats = cv2.resize(part.astype(np.float32), (width, height), interpolation=cv2.INTER_LINEAR)
    return stretched
