"""TIFFs whose tags contradict each other, as libtiff reads them."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from stages.images.decoder import Decoder
from tests.inputs import encode
from tests.stages.images.layouts import color, directory, gray, shown, tiff_file, tiff_of


@pytest.mark.parametrize("how", ["none", "lzw"])
@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_tiles_count_if_strips_are_listed_too_and_may_be_listed_as_strips(
    decoder: Decoder, bits: int, how: str
) -> None:
    values = gray()[..., None] / 255
    expected = shown(decoder, tiff_of(values, bits=bits, how=how))
    tiles = directory(values, bits=bits, how=how, tile=16)
    others = directory(1 - values, bits=bits, how=how)
    only = {tag: value for tag, value in tiles.items() if tag not in (324, 325)}
    for tags in (
        tiles | {tag: others[tag] for tag in (273, 278, 279)},
        only | {273: tiles[324], 279: tiles[325]},
        only | {273: tiles[324], 325: tiles[325]},
    ):
        assert np.array_equal(shown(decoder, tiff_file([tags], "<")), expected)


@pytest.mark.parametrize("order", [1, 2])
def test_the_order_of_bits_says_nothing_about_jpeg(decoder: Decoder, order: int) -> None:
    """Of lossy YCbCr; libtiff does not look at the tag."""
    ycbcr = Image.fromarray(np.kron(color(), np.ones((8, 8, 1), np.uint8))).convert("YCbCr")
    plain = encode(ycbcr, "TIFF", compression="jpeg", quality=95)
    marked = encode(ycbcr, "TIFF", compression="jpeg", quality=95, tiffinfo={266: order})
    assert np.array_equal(shown(decoder, marked), shown(decoder, plain))


def test_the_largest_counts_if_all_pictures_are_marked_as_smaller_copies(decoder: Decoder) -> None:
    small, whole = np.zeros((8, 8, 1)), color() / 255
    copy = {254: (4, [1])}
    parts = [
        directory(small, more=copy),
        directory(whole, photometric=2, more=copy),
        directory(small, more=copy),
    ]
    found = shown(decoder, tiff_file(parts, "<"))
    assert np.abs(found.astype(int) - color()).max() <= 1
