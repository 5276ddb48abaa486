"""What a model learns from: pixels in one memory-mapped file, and for each image what is true of it.

A folder of examples holds pixels.npy, uint8 [images, edge, edge, 3], RGB, each image squeezed to a square as the
models' processors do, and examples.jsonl, one `Example` a line, in the same order. cache.py writes such folders of
synthetic scenes; `write_examples` makes one of anybody's images. This module imports no torch, for the processes that draw
scenes; dataset.py reads what they write.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from PIL import Image

PIXELS, EXAMPLES = "pixels.npy", "examples.jsonl"


class Spot(msgspec.Struct, frozen=True, array_like=True):
    """One object: its label's and its colour's number, how many there are of its group, its centre as fractions."""

    label: int
    color: int
    count: int
    x: float
    y: float


class Example(msgspec.Struct, frozen=True, array_like=True):
    """What is true of one image.

    key: the same for images of which the same captions are true. captions: the first is the one to learn to say.
    tags: label → its share of the image's tags, which sum up to 1. mirror: whether all that holds of its mirror image.
    """

    key: str
    captions: list[str]
    tags: dict[str, float] = {}
    spots: list[Spot] = []
    mirror: bool = False


def open_pixels(folder: Path, count: int, edge: int) -> npt.NDArray[np.uint8]:
    """A new pixels.npy for `count` images, of a folder that is not finished. Disk is taken only by what is written."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / EXAMPLES).unlink(missing_ok=True)  # first, or it would tell of black images until the new one is written
    pixels: npt.NDArray[np.uint8] = np.lib.format.open_memmap(
        folder / PIXELS, mode="w+", dtype=np.uint8, shape=(count, edge, edge, 3)
    )
    return pixels


def squeeze(pixels: npt.NDArray[Any], edge: int) -> npt.NDArray[np.uint8]:
    """uint8 [height, width, 3] to [edge, edge, 3], as CLIP's and BLIP's processors resize to a square."""
    return np.asarray(Image.fromarray(pixels).resize((edge, edge), Image.Resampling.BICUBIC))


def write_lines(folder: Path, lines: Iterable[bytes]) -> None:
    """examples.jsonl, whole or not at all, from encoded examples."""
    part = folder / f"{EXAMPLES}.part"
    part.write_bytes(b"".join(line + b"\n" for line in lines))
    part.replace(folder / EXAMPLES)


def write_examples(folder: Path, images: Sequence[npt.NDArray[Any]], examples: Sequence[Example], edge: int) -> None:
    """A folder of examples from images of any size, uint8 [height, width, 3]."""
    pixels = open_pixels(folder, len(images), edge)
    for place, image in enumerate(images):
        pixels[place] = squeeze(image, edge)
    write_lines(folder, (msgspec.json.encode(example) for example in examples))
