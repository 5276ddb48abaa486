"""What a model learns from: pixels in one memory-mapped file, and for each image what is true of it.

A folder of examples holds pixels.npy, uint8 [images, edge, edge, 3], RGB, each image squeezed to a square as the
models' processors do, and examples.jsonl, one `Example` a line, in the same order. cache.py writes such folders of
synthetic scenes; `write_examples` makes one of anybody's images.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

PIXELS, EXAMPLES = "pixels.npy", "examples.jsonl"
MOST_SPOTS = 9  # objects of an image that are told to a model
NO_SPOT = -1


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


class Examples:
    """A folder of examples, its pixels on the device when there is room for them."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        """Raises FileNotFoundError when the folder was never finished."""
        if not (folder / EXAMPLES).is_file():
            raise FileNotFoundError(f"{folder} holds no finished examples; make them again with stages.training.cache.")
        lines = (folder / EXAMPLES).read_bytes().splitlines()
        self.truths = [msgspec.json.decode(line, type=Example) for line in lines]
        self.device = device
        # Copy on write: torch has no read-only tensors.
        self.pixels = torch.from_numpy(np.load(folder / PIXELS, mmap_mode="c")[: len(self.truths)])
        if device.type == "cuda" and 3 * self.pixels.nbytes < torch.cuda.mem_get_info(device)[0]:
            self.pixels = self.pixels.to(device)
        self.mirrors = np.array([truth.mirror for truth in self.truths])
        self.spots = torch.from_numpy(pack_spots(self.truths)).to(device)

    def __len__(self) -> int:
        return len(self.truths)

    @property
    def edge(self) -> int:
        return int(self.pixels.shape[1])

    def cut(self, places: npt.NDArray[np.int64], rng: np.random.Generator) -> dict[str, Tensor]:
        """A batch on the device, lightly changed in ways that no caption tells of.

        pixels: floats 0..1 [images, 3, edge, edge]. spots: [images, MOST_SPOTS, 5], as `pack_spots` has them.
        """
        chosen = self.pixels[torch.from_numpy(places).to(self.pixels.device)]
        pixels = chosen.to(self.device, non_blocking=True).permute(0, 3, 1, 2).float() / 255
        spots = self.spots[torch.from_numpy(places).to(self.device)]
        return change(pixels, spots, self.mirrors[places], rng)


def pack_spots(truths: Sequence[Example]) -> npt.NDArray[np.float32]:
    """[images, MOST_SPOTS, 5] of label, colour, count - 1, x and y; NO_SPOT in the first three where there is none."""
    packed = np.zeros((len(truths), MOST_SPOTS, 5), np.float32)
    packed[..., :3] = NO_SPOT
    for place, truth in enumerate(truths):
        for number, spot in enumerate(truth.spots[:MOST_SPOTS]):
            packed[place, number] = (spot.label, spot.color, min(spot.count, MOST_SPOTS) - 1, spot.x, spot.y)
    return packed


def change(pixels: Tensor, spots: Tensor, mirrors: npt.NDArray[np.bool_], rng: np.random.Generator) -> dict[str, Tensor]:
    """Mirrored where that is allowed, half of them shrunk by up to an eighth, a little lighter or darker.

    Nothing is cut off, or a caption might tell of what is not there, and no tint changes, or a colour's name might.
    """
    count = len(pixels)
    flips = np.where(mirrors & (rng.random(count) < 0.5), -1.0, 1.0)
    zooms = np.where(rng.random((count, 1)) < 0.5, rng.uniform(1, 1.125, (count, 2)), 1.0)
    shifts = rng.uniform(-1, 1, (count, 2)) * (zooms - 1)
    # An output at (x, y) in -1..1 shows what lay at matrix @ (x, y, 1).
    matrix = np.zeros((count, 2, 3), np.float32)
    matrix[:, 0, 0], matrix[:, 1, 1] = flips * zooms[:, 0], zooms[:, 1]
    matrix[:, :, 2] = shifts
    light = torch.from_numpy(rng.uniform(0.94, 1.06, (count, 1, 1, 1)).astype(np.float32)).to(pixels.device)
    turns = torch.from_numpy(matrix).to(pixels.device)
    field = F.affine_grid(turns, list(pixels.shape), align_corners=False)
    moved = F.grid_sample(pixels, field, mode="bilinear", padding_mode="border", align_corners=False)
    centres = (spots[..., 3:] * 2 - 1 - turns[:, None, :, 2]) / torch.stack([turns[:, 0, 0], turns[:, 1, 1]], 1)[:, None]
    spots = torch.cat([spots[..., :3], (centres + 1) / 2], dim=-1)
    return {"pixels": (moved * light).clamp_(0, 1), "spots": spots}
