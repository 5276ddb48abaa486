from __future__ import annotations

import random
import time
from contextlib import closing

import pytest
from PIL import Image

from stages.contract.base import ImageError, Limits, Reason
from stages.images import scans
from stages.images.decoder import Decoder
from stages.images.images import inspect
from stages.images.scans import check_zeros, find_zeros
from tests.inputs import EQUAL_BLOCKS, flat_jpeg, jpeg, scanned_jpeg, without_bytes

SETTINGS = [
    {},
    {"optimize": True},
    {"progressive": True},
    {"restart_marker_blocks": 7},
    {"restart_marker_rows": 1},
]


def is_whole(data: bytes) -> bool:
    try:
        check_zeros(memoryview(data))
    except ImageError:
        return False
    return True


def draw(chance: random.Random) -> Image.Image:
    size = chance.randint(8, 700), chance.randint(8, 700)
    match chance.randrange(4):
        case 0:
            return Image.new("RGB", size, tuple(chance.randrange(256) for _ in range(3)))
        case 1:
            return Image.effect_noise(size, chance.uniform(1, 120)).convert("RGB")
        case 2:
            return Image.linear_gradient("L").resize(size).convert(chance.choice(("L", "RGB", "CMYK")))
        case _:
            page = Image.new("RGB", size, "white")
            page.paste("black", (size[0] // 3, size[1] // 3, size[0] // 2, size[1] // 2))
            return page


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_complete_jpeg_is_whole_even_if_it_is_flat(settings: dict[str, object]) -> None:
    chance, rows = random.Random(str(settings)), 0
    for _ in range(60):
        quality, subsampling = chance.choice((1, 10, 50, 90, 100)), chance.randrange(3)
        data = jpeg(draw(chance), **{"quality": quality, "subsampling": subsampling} | settings)
        rows += find_zeros(memoryview(data)) is not None
        assert is_whole(data), (settings, quality, subsampling)
    assert rows or not settings.keys() & {"optimize", "progressive"}


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(("start", "end"), [(0.0, 1.0), (0.2, 1.0), (0.3, 0.7)])
def test_zeros_instead_of_pixels_are_found(settings: dict[str, object], start: float, end: float) -> None:
    assert not is_whole(without_bytes(start, end, **settings))


def test_a_progressive_jpeg_may_lack_scans() -> None:
    """As cjpeg writes it by a script of scans: T.81 does not ask for the last bits of all coefficients."""
    page = scanned_jpeg(EQUAL_BLOCKS[0])
    assert find_zeros(memoryview(page))
    assert is_whole(page)


def test_all_blocks_may_have_the_same_value_but_there_are_no_more_of_them_than_the_picture_has() -> None:
    page = scanned_jpeg(*EQUAL_BLOCKS)
    assert is_whole(page)
    assert not is_whole(page[:-2] + bytes(800) + page[-2:])


def test_zeros_outside_of_the_pixels_are_nothing() -> None:
    noise = jpeg(Image.effect_noise((64, 64), 60))
    for data in (
        noise + bytes(10_000),
        noise + bytes(10_000) + noise,  # as a camera's file of two pictures
        jpeg(Image.effect_noise((64, 64), 60), exif=b"Exif\0\0" + bytes(9000)),
    ):
        assert find_zeros(memoryview(data)) is None


def test_a_warning_of_other_things_than_pixels_does_not_count() -> None:
    """Some cameras state the wrong range of coefficients, which libjpeg-turbo ignores with a warning."""
    data = bytearray(flat_jpeg())
    scan = data.index(b"\xff\xda")
    data[scan + 12] = 0  # Se
    assert find_zeros(memoryview(data))
    assert is_whole(bytes(data))


def test_the_refusal_says_how_much_is_missing_and_where() -> None:
    data = memoryview(without_bytes(0.5, 1))
    with (
        closing(Decoder(Limits())) as decoder,
        pytest.raises(ImageError, match=r"of its [\d,]+ bytes are zeros, from byte [\d,]+ on") as refused,
    ):
        decoder.decode(data, inspect(data, Limits()))
    assert refused.value.reason is Reason.TRUNCATED


def test_a_flat_picture_is_decoded_after_the_check() -> None:
    data = memoryview(flat_jpeg())
    assert (header := inspect(data, Limits())).is_deep
    with closing(Decoder(Limits())) as decoder:
        assert decoder.decode(data, header).min() == 255


def test_what_libjpeg_turbo_cannot_read_is_left_to_the_decoder() -> None:
    assert is_whole(without_bytes(0.5, 1).replace(b"\xff\xdb", b"\xff\xe9"))  # no quantization tables


def test_the_search_for_zeros_is_fast() -> None:
    """It takes microseconds for a photograph."""
    data = memoryview(jpeg(Image.effect_noise((900, 700), 60).convert("RGB")))
    started = time.process_time()
    for _ in range(100):
        find_zeros(data)
    # seconds a byte; 0.06e-9 where it was written
    assert (time.process_time() - started) / 100 / len(data) < 1e-9
    assert bytes(scans.SHORTEST_ROW) not in bytes(data)
