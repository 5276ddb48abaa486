from __future__ import annotations

import random
import time

import pytest
from PIL import Image

from stages.contract.base import ImageError, Limits, Reason
from stages.images import scans
from stages.images.headers import read_jpeg_frame
from stages.images.images import inspect
from stages.images.scans import find_gap
from tests.inputs import EQUAL_BLOCKS, flat_jpeg, jpeg, scanned_jpeg, without_bytes

SETTINGS = [
    {},
    {"optimize": True},
    {"progressive": True},
    {"restart_marker_blocks": 7},
    {"restart_marker_rows": 1},
]


def gap_in(data: bytes) -> tuple[int, int] | None:
    return find_gap(memoryview(data), read_jpeg_frame(memoryview(data)).pixels_at)


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
def test_a_complete_jpeg_has_no_gap_even_if_it_is_flat(settings: dict[str, object]) -> None:
    chance, runs = random.Random(str(settings)), 0
    for _ in range(60):
        quality, subsampling = chance.choice((1, 10, 50, 90, 100)), chance.randrange(3)
        data = jpeg(draw(chance), **{"quality": quality, "subsampling": subsampling} | settings)
        runs += bytes(scans.SHORTEST_RUN) in data
        assert gap_in(data) is None, (settings, quality, subsampling)
    assert runs or not settings.keys() & {"optimize", "progressive"}


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(("start", "end"), [(0.0, 1.0), (0.2, 1.0), (0.3, 0.7)])
def test_zeros_instead_of_pixels_are_found(settings: dict[str, object], start: float, end: float) -> None:
    assert gap_in(without_bytes(start, end, **settings)) is not None


def test_a_picture_whose_lower_half_is_white_is_not_damaged() -> None:
    page = Image.new("RGB", (1200, 1600), "white")
    page.paste(Image.effect_noise((200, 200), 90).convert("RGB"))
    data = jpeg(page, optimize=True)
    assert bytes(scans.SHORTEST_RUN) in data
    assert gap_in(data) is None


def test_a_narrow_progressive_scan_may_have_the_same_value_in_all_blocks() -> None:
    """An encoder gives its shortest code, which may be zeros, to a gradient's only coefficient."""
    data = scanned_jpeg(*EQUAL_BLOCKS)
    assert bytes(400) in data  # a block in two bits
    assert gap_in(data) is None
    assert gap_in(data[:-2] + bytes(800) + data[-2:]) is not None  # more blocks than the picture has


def test_zeros_are_damage_if_a_progressive_jpeg_lacks_a_scan() -> None:
    assert gap_in(scanned_jpeg(EQUAL_BLOCKS[0])) is not None


def test_no_scan_has_equal_blocks_of_many_coefficients() -> None:
    wide = scanned_jpeg((0, 0, b"\0"), (1, 63, b"\1"))
    assert gap_in(wide) is not None
    past_the_end = scanned_jpeg((0, 0, b"\0"), (1, 3, b"\x11"), (4, 63, b"\0"))  # every second of three
    assert gap_in(past_the_end) is not None


def test_zeros_after_the_end_marker_are_ignored() -> None:
    assert gap_in(jpeg() + bytes(10_000)) is None
    assert gap_in(jpeg() + bytes(10_000) + jpeg()) is None  # as a camera's file of two pictures


def test_the_refusal_says_how_much_is_missing_and_where() -> None:
    data = without_bytes(0.5, 1)
    with pytest.raises(ImageError, match=r"of its [\d,]+ bytes are zeros, from byte [\d,]+ on") as refused:
        inspect(memoryview(data), Limits())
    assert refused.value.reason is Reason.TRUNCATED


def test_unreadable_huffman_tables_are_left_to_the_decoder() -> None:
    data = without_bytes(0.5, 1)
    assert gap_in(data.replace(b"\xff\xc4", b"\xff\xe9")) is None


def test_the_check_for_zeros_is_fast() -> None:
    """It takes microseconds for a photograph, and less than a minute for a hundred megabytes of zeros."""
    data = memoryview(jpeg(Image.effect_noise((900, 700), 60).convert("RGB")))
    start = read_jpeg_frame(data).pixels_at
    started = time.process_time()
    for _ in range(100):
        find_gap(data, start)
    # seconds a byte; 0.06e-9 where it was written
    assert (time.process_time() - started) / 100 / len(data) < 1e-9
    flat = flat_jpeg()
    long = memoryview(flat[:-2] + bytes(20_000_000) + flat[-2:])
    started = time.process_time()
    assert find_gap(long, read_jpeg_frame(long).pixels_at) is not None
    assert time.process_time() - started < 5
