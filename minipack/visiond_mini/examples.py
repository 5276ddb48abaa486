"""Training data: pixels in one memory-mapped file, and the truth about each image.

A folder of examples contains pixels.npy, uint8 [images, edge, edge, 3], RGB, each image resized to a square
as by the models' processors, and examples.jsonl, one `Example` on each line, in the same order. cache.py
writes such folders of synthetic scenes; `write_examples` makes one from any images. This module imports no
torch, because the processes that draw scenes import it; dataset.py reads the folders.
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
    """One object: the numbers of its label and color, the size of its group, and its center as fractions."""

    label: int
    color: int
    count: int
    x: float
    y: float


class Example(msgspec.Struct, frozen=True, array_like=True):
    """The truth about one image.

    key: the same for images with the same true captions. captions: BLIP learns the first one.
    tags: label → its share of the image's tags; shares add up to 1.
    mirror: whether all of this is true of its mirror image.
    """

    key: str
    captions: list[str]
    tags: dict[str, float] = {}
    spots: list[Spot] = []
    mirror: bool = False


def open_pixels(folder: Path, count: int, edge: int) -> npt.NDArray[np.uint8]:
    """A new pixels.npy for `count` images, in a folder that is not finished. Only written parts use disk space."""
    folder.mkdir(parents=True, exist_ok=True)
    # First: otherwise the old file would describe black images until the new one is written.
    (folder / EXAMPLES).unlink(missing_ok=True)
    pixels: npt.NDArray[np.uint8] = np.lib.format.open_memmap(
        folder / PIXELS, mode="w+", dtype=np.uint8, shape=(count, edge, edge, 3)
    )
    return pixels


def squeeze(pixels: npt.NDArray[Any], edge: int) -> npt.NDArray[np.uint8]:
    """uint8 [height, width, 3] to [edge, edge, 3], as CLIP's and BLIP's processors resize to a square."""
    return np.asarray(Image.fromarray(pixels).resize((edge, edge), Image.Resampling.BICUBIC))


def write_lines(folder: Path, lines: Iterable[bytes]) -> None:
    """Write examples.jsonl atomically from encoded examples."""
    part = folder / f"{EXAMPLES}.part"
    part.write_bytes(b"".join(line + b"\n" for line in lines))
    part.replace(folder / EXAMPLES)


def write_examples(
    folder: Path, images: Sequence[npt.NDArray[Any]], examples: Sequence[Example], edge: int
) -> None:
    """Write a folder of examples from images of any size, uint8 [height, width, 3]."""
    pixels = open_pixels(folder, len(images), edge)
    for place, image in enumerate(images):
        pixels[place] = squeeze(image, edge)
    write_lines(folder, (msgspec.json.encode(example) for example in examples))
