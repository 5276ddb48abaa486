"""Hashes beside those of the package imagehash, and of copies of a picture."""

from __future__ import annotations

import io
import weakref
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import PIL.Image
import pytest
import scipy.fft
import torch

from stages.contract.base import Image, StageSpec
from stages.hash import stage
from stages.hash.descriptor import Hash
from stages.hash.stage import HashStage

PHOTOGRAPH = Path(mpl.get_data_path()) / "sample_data" / "grace_hopper.jpg"
SIZES = ((512, 512), (511, 300), (1400, 900), (64, 9), (33, 31), (32, 32), (7, 5), (3, 2), (1, 1))


def hashed(*pictures: PIL.Image.Image) -> list[str]:
    hasher = HashStage(StageSpec("hash", "phash"), "cpu")
    hasher.load()
    images = [Image(memoryview(b""), *picture.size, pixels_of(picture)) for picture in pictures]
    answers = hasher.run(images)
    assert all(isinstance(answer, Hash) for answer in answers)
    return [answer.phash for answer in answers if isinstance(answer, Hash)]


def pixels_of(picture: PIL.Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(picture.convert("RGB")).transpose(2, 0, 1))


def imagehash(picture: PIL.Image.Image) -> str:
    """imagehash.phash of version 4.3.2."""
    pixels = np.asarray(picture.convert("L").resize((32, 32), PIL.Image.Resampling.LANCZOS)).astype(float)
    low = scipy.fft.dct(scipy.fft.dct(pixels, axis=0), axis=1)[:8, :8]
    return f"{int(''.join('01'[bit] for bit in (low > np.median(low)).flatten().astype(int)), 2):016x}"


def differing(one: str, other: str) -> int:
    return (int(one, 16) ^ int(other, 16)).bit_count()


@pytest.fixture(scope="module")
def photograph() -> PIL.Image.Image:
    return PIL.Image.open(PHOTOGRAPH).convert("RGB")


@pytest.mark.parametrize("size", SIZES)
def test_hashes_are_those_of_imagehash(photograph: PIL.Image.Image, size: tuple[int, int]) -> None:
    """Of images that are not narrow: Pillow 13 resizes others vertically first, which differs by a level here and there."""
    small = photograph.resize(size)
    pictures = [
        photograph,
        small,
        small.convert("L"),
        small.transpose(PIL.Image.Transpose.FLIP_LEFT_RIGHT),
        small.rotate(180),
    ]
    assert hashed(*pictures) == [*map(imagehash, pictures)]


def test_copies_differ_in_few_bits_and_other_pictures_in_many(photograph: PIL.Image.Image) -> None:
    compressed = io.BytesIO()
    photograph.resize((200, 234)).save(compressed, "JPEG", quality=40)
    turned = photograph.transpose(PIL.Image.Transpose.ROTATE_90)
    hashes = hashed(
        photograph, PIL.Image.open(compressed), photograph.point(lambda level: level // 2), turned
    )
    assert max(differing(hashes[0], each) for each in hashes[1:3]) <= 6
    assert differing(hashes[0], hashes[3]) > 16


def test_an_image_without_any_change_has_the_same_hash_in_every_color() -> None:
    assert {*hashed(*(PIL.Image.new("RGB", (99, 60), color) for color in ("#123456", "#fffffe")))} == {
        "8" + 15 * "0"
    }


def test_large_images_are_made_small_in_parts(
    photograph: PIL.Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = hashed(photograph)
    monkeypatch.setattr(stage, "AT_ONCE", 10_000)
    assert hashed(photograph) == whole


def test_the_memory_for_weights_does_not_grow_with_the_number_of_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU it is memory that other stages need, in each worker."""
    hasher = HashStage(StageSpec("hash", "phash"), "cpu")
    made: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    make = torch.from_numpy

    def keep(values: np.ndarray[Any, Any]) -> torch.Tensor:
        made.add(tensor := make(values))
        return tensor

    monkeypatch.setattr(torch, "from_numpy", keep)
    hasher.load()
    for size in range(2000, 2100):
        hasher.run([Image(memoryview(b""), size, 1, torch.zeros(3, 1, size, dtype=torch.uint8))])
    assert 256 * 2000 < sum(weights.nbytes for weights in made) < 20_000_000
