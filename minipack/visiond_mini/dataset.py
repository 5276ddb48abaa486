"""Training batches from a folder of examples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from visiond_mini.examples import EXAMPLES, PIXELS, Example

MOST_SPOTS = 9  # most objects of an image that a model learns
NO_SPOT = -1


class Examples:
    """A folder of examples. Its pixels are on the device if they fit."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        """Raises FileNotFoundError if the folder is not finished."""
        if not (folder / EXAMPLES).is_file():
            raise FileNotFoundError(
                f"{folder} has no finished examples; make them again with visiond_mini.cache."
            )
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
        """A batch on the device, slightly changed in ways that keep all captions true.

        pixels: floats 0..1 [images, 3, edge, edge]. spots: [images, MOST_SPOTS, 5], as from `pack_spots`.
        """
        chosen = self.pixels[torch.from_numpy(places).to(self.pixels.device)]
        pixels = chosen.to(self.device, non_blocking=True).permute(0, 3, 1, 2).float() / 255
        spots = self.spots[torch.from_numpy(places).to(self.device)]
        return change(pixels, spots, self.mirrors[places], rng)


def pack_spots(truths: Sequence[Example]) -> npt.NDArray[np.float32]:
    """Label, color, count - 1, x and y: [images, MOST_SPOTS, 5]. The first three are NO_SPOT where there is no object."""
    packed = np.zeros((len(truths), MOST_SPOTS, 5), np.float32)
    packed[..., :3] = NO_SPOT
    for place, truth in enumerate(truths):
        for number, spot in enumerate(truth.spots[:MOST_SPOTS]):
            packed[place, number] = (spot.label, spot.color, min(spot.count, MOST_SPOTS) - 1, spot.x, spot.y)
    return packed


def change(
    pixels: Tensor, spots: Tensor, mirrors: npt.NDArray[np.bool_], rng: np.random.Generator
) -> dict[str, Tensor]:
    """Mirror images where that is allowed, shrink half of them by up to an eighth, and change the brightness a little.

    Nothing is cut off, because captions could name it, and no tint changes, because captions name colors.
    """
    count = len(pixels)
    flips = np.where(mirrors & (rng.random(count) < 0.5), -1.0, 1.0)
    zooms = np.where(rng.random((count, 1)) < 0.5, rng.uniform(1, 1.125, (count, 2)), 1.0)
    shifts = rng.uniform(-1, 1, (count, 2)) * (zooms - 1)
    # The output at (x, y) in -1..1 is the input at matrix @ (x, y, 1).
    matrix = np.zeros((count, 2, 3), np.float32)
    matrix[:, 0, 0], matrix[:, 1, 1] = flips * zooms[:, 0], zooms[:, 1]
    matrix[:, :, 2] = shifts
    light = torch.from_numpy(rng.uniform(0.94, 1.06, (count, 1, 1, 1)).astype(np.float32)).to(pixels.device)
    turns = torch.from_numpy(matrix).to(pixels.device)
    field = F.affine_grid(turns, list(pixels.shape), align_corners=False)
    moved = F.grid_sample(pixels, field, mode="bilinear", padding_mode="border", align_corners=False)
    centers = (spots[..., 3:] * 2 - 1 - turns[:, None, :, 2]) / torch.stack(
        [turns[:, 0, 0], turns[:, 1, 1]], 1
    )[:, None]
    spots = torch.cat([spots[..., :3], (centers + 1) / 2], dim=-1)
    return {"pixels": (moved * light).clamp_(0, 1), "spots": spots}
