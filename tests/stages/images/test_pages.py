from __future__ import annotations

import struct
import time

import pytest

from stages.images.pages import count_pages
from stages.images.tiff import MOST
from tests.inputs import animation, encode, jpeg, looped_tiff, picture, png


def tiff_of(pages: int, *, kind: int = 0, big: bool = False) -> bytes:
    """Consecutive directories, each with one entry, a NewSubfileType."""
    size, head = (36, 16) if big else (18, 8)
    places = [head + size * page for page in range(pages)]
    chain = zip(places, [*places[1:], 0], strict=True)
    if big:
        parts = [struct.pack("<QHHQQQ", 1, 254, 4, 1, kind, after) for _, after in chain]
        return struct.pack("<2sHHHQ", b"II", 43, 8, 0, head) + b"".join(parts)
    return struct.pack("<2sHI", b"II", 42, head) + b"".join(
        struct.pack("<HHHIII", 1, 254, 4, 1, kind, after) for _, after in chain
    )


@pytest.mark.parametrize(
    ("name", "data"), [(name, animation(name)) for name in ("TIFF", "GIF", "WEBP", "PNG")]
)
def test_pages_and_frames_are_counted(name: str, data: bytes) -> None:
    assert count_pages(name, memoryview(data)) == 3


@pytest.mark.parametrize("name", ["TIFF", "GIF", "WEBP", "PNG", "BMP", "AVIF"])
def test_a_single_picture_counts_as_one(name: str) -> None:
    assert count_pages(name, memoryview(encode(picture(), name))) == 1


def test_the_pages_of_a_bigtiff_are_counted() -> None:
    assert count_pages("TIFF", memoryview(tiff_of(7, big=True))) == 7


@pytest.mark.parametrize("kind", [1, 4, 5])
def test_a_smaller_copy_or_a_mask_is_not_a_page(kind: int) -> None:
    whole, copies = tiff_of(1)[:-4] + struct.pack("<I", 26), tiff_of(3, kind=kind)[8:]
    chain = [struct.unpack_from("<I", copies, 18 * place + 14)[0] for place in range(3)]
    moved = b"".join(
        copies[18 * place : 18 * place + 14] + struct.pack("<I", after and after + 18)
        for place, after in enumerate(chain)
    )
    assert count_pages("TIFF", memoryview(whole + moved)) == 1


def test_pages_in_a_ring_are_counted_once() -> None:
    assert count_pages("TIFF", memoryview(looped_tiff())) == 2


@pytest.mark.parametrize("big", [False, True])
def test_counting_pages_stops_at_a_limit(big: bool) -> None:
    data = memoryview(tiff_of(100_000, big=big))
    started = time.process_time()
    assert count_pages("TIFF", data) == MOST
    assert time.process_time() - started < 1


def test_a_false_number_of_frames_in_a_png_takes_no_time() -> None:
    stated = animation("PNG").replace(b"acTL\0\0\0\x03", b"acTL\xff\xff\xff\xff")
    assert count_pages("PNG", memoryview(stated)) == MOST


@pytest.mark.parametrize("name", ["TIFF", "GIF", "WEBP", "PNG"])
def test_a_file_that_is_cut_anywhere_has_at_least_one_page(name: str) -> None:
    data = animation(name)
    counts = [count_pages(name, memoryview(data[:end])) for end in range(12, len(data), 7)]
    assert set(counts) <= {1, 2, 3}


def test_other_formats_cost_nothing() -> None:
    assert count_pages("JPEG", memoryview(jpeg())) == count_pages("PNG", memoryview(png())) == 1
