from __future__ import annotations

import io
import struct
import time
import tracemalloc
from collections.abc import Callable

import pytest
from PIL import Image, ImageOps

from stages.contract.base import Header, ImageError, Limits, Reason
from stages.images.headers import (
    READERS,
    read_avif,
    read_heif,
    read_jpeg_frame,
)
from stages.images.images import inspect
from stages.images.tiff import HEIGHT, PARTS, WIDTH, read_orientation, read_tiff
from tests.inputs import EXIF_MESS, ODD, Input, arithmetic_jpeg, huge_png, jpeg, oriented, raw_png, ycck_jpeg

LIMITS = Limits()


@pytest.mark.filterwarnings("ignore:(Corrupt|Possibly corrupt) EXIF data")  # according to Pillow
@pytest.mark.parametrize(
    "odd", [odd for odd in ODD if not odd.name.startswith("png, text")], ids=lambda odd: odd.name
)
def test_a_header_has_the_size_and_orientation_that_pillow_finds(odd: Input) -> None:
    data = odd.make()
    if odd.name == "heic":
        import pillow_heif

        pillow_heif.register_heif_opener()
    image = Image.open(io.BytesIO(data))
    # An orientation in XMP alone counts for Pillow, for browsers and here it does not.
    image.info.pop("xmp", None)
    upright = ImageOps.exif_transpose(image)
    header = inspect(memoryview(data), LIMITS)
    assert (header.width, header.height, header.pages) == (*upright.size, pages_of(image))


def pages_of(image: Image.Image) -> int:
    """The number that Pillow counts; it reads one picture of an MPO or HEIC here, and follows no ring."""
    return 1 if image.format in ("MPO", "JPEG", "HEIF") else getattr(image, "n_frames", 1)


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_of_every_format_is_read(image_format: str, orientation: int) -> None:
    data = memoryview(oriented(orientation, image_format))
    assert inspect(data, LIMITS) == Header(image_format, 96, 64, orientation, pages=1)


@pytest.mark.parametrize("exif", EXIF_MESS.values(), ids=EXIF_MESS.keys())
def test_malformed_exif_counts_as_upright(exif: bytes) -> None:
    assert read_orientation(memoryview(exif)) == 1


def test_the_first_of_several_exif_blocks_counts() -> None:
    first, second = oriented(6), Image.Exif()
    second[0x112] = 3
    block = second.tobytes()
    segment = b"\xff\xe1" + struct.pack(">H", len(block) + 2) + block
    assert READERS["JPEG"](memoryview(first.replace(b"\xff\xdb", segment + b"\xff\xdb", 1))) == (64, 96, 6)


def test_plain_jpegs_are_recognized_by_their_frame() -> None:
    plain = [jpeg(), jpeg(progressive=True), jpeg(Image.new("L", (9, 9)))]
    peculiar = [jpeg(keep_rgb=True), jpeg(Image.new("CMYK", (9, 9))), ycck_jpeg(), arithmetic_jpeg()]
    assert [read_jpeg_frame(memoryview(data)).is_plain for data in plain] == [True] * 3
    assert [read_jpeg_frame(memoryview(data)).is_plain for data in peculiar] == [False] * 4


def test_padding_and_junk_between_jpeg_segments_are_skipped() -> None:
    data = jpeg()
    assert READERS["JPEG"](memoryview(data[:2] + b"junk\xff\xff\xff" + data[2:])) == (96, 64, 1)


@pytest.mark.parametrize("filling", [b"\xff", b"\0", b"\xff\x00", b"\xff\xe0\0\2", b"\xff\xd0"])
def test_a_long_jpeg_without_a_picture_is_refused_without_getting_slow(filling: bytes) -> None:
    started = time.process_time()
    with pytest.raises((ImageError, IndexError)):
        READERS["JPEG"](memoryview(b"\xff\xd8\xff" + filling * (1_000_000 // len(filling))))
    assert time.process_time() - started < 5


def test_a_directory_of_a_tiff_past_its_end_is_an_error_whatever_the_offset() -> None:
    big = struct.pack("<2sHHHQ", b"II", 43, 8, 0, 2**64 - 1)
    small = struct.pack("<2sHI", b"II", 42, 2**32 - 1)
    for data in (big, small):
        with pytest.raises((struct.error, IndexError, OverflowError)):
            read_tiff(memoryview(data))
        with pytest.raises(ImageError) as refused:
            inspect(memoryview(data + bytes(100)), LIMITS)
        assert refused.value.reason is Reason.TRUNCATED


def test_boxes_nested_without_end_are_refused_without_recursion() -> None:
    size = 80_000
    nested = b"".join(struct.pack(">I4s4x", size - 12 * depth, b"meta") for depth in range(size // 12))
    with pytest.raises(ImageError) as refused:
        read_avif(memoryview(nested + bytes(size - len(nested))))
    assert refused.value.reason is Reason.HEADER


def box(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I4s", 8 + len(data), kind) + data


def avif_of(associations: bytes, properties: bytes = box(b"ispe", struct.pack(">III", 0, 96, 64))) -> bytes:
    table = struct.pack(">II", 0, len(associations) // 3) + associations
    meta = (
        bytes(4)
        + box(b"pitm", struct.pack(">IH", 0, 1))
        + box(b"iprp", box(b"ipco", properties) + box(b"ipma", table))
    )
    return box(b"ftyp", b"avif" * 3) + box(b"meta", meta)


def clap(*numbers: int) -> bytes:
    return box(b"clap", struct.pack(">IIIIiIiI", *numbers))


PADDED = box(b"ispe", struct.pack(">III", 0, 642, 482))
CUT = clap(641, 1, 481, 1, -1, 2, -1, 2)
TURNED = box(b"irot", b"\1")
HEIF_SIZES = {  # properties of the primary picture, in order → its upright size
    "whole": ([PADDED], (642, 482)),
    "turned": ([PADDED, TURNED], (482, 642)),
    "cut": ([PADDED, CUT], (641, 481)),
    "cut, then turned": ([PADDED, CUT, TURNED], (481, 641)),
    "turned, then cut": ([TURNED, CUT, PADDED], (641, 481)),
    "turned, mirrored and turned again": ([PADDED, TURNED, box(b"imir", b"\0"), TURNED], (642, 482)),
    "cut in the middle of pixels": ([PADDED, clap(1281, 2, 1924, 4, 0, 1, 0, 1)], (641, 481)),
}


@pytest.mark.parametrize(("properties", "size"), HEIF_SIZES.values(), ids=HEIF_SIZES.keys())
def test_the_size_of_a_heic_follows_from_its_properties(
    properties: list[bytes], size: tuple[int, int]
) -> None:
    mine = bytes((0, 1, len(properties), *range(1, len(properties) + 1)))
    # The last is another picture's.
    data = memoryview(avif_of(mine, b"".join(properties) + clap(1, 1, 1, 1, 0, 1, 0, 1)))
    assert read_heif(data) == (*size, 1)


def test_the_size_of_an_avif_ignores_clap_as_pillow_does() -> None:
    assert read_avif(memoryview(avif_of(b"\0\1\2\1\2", PADDED + CUT))) == (642, 482, 1)


def test_a_heic_with_an_impossible_crop_is_refused() -> None:
    with pytest.raises(ImageError, match="cropped to an impossible size"):
        read_heif(memoryview(avif_of(b"\0\1\2\1\2", PADDED + clap(641, 0, 481, 1, 0, 1, 0, 1))))


def big_tiff_of(entries: bytes) -> bytes:
    return struct.pack("<2sHHHQQ", b"II", 43, 8, 0, 16, len(entries) // 20) + entries


GIF_SCREEN = b"GIF89a" + struct.pack("<HHBBB", 96, 64, 0, 0, 0)
GIF_FRAME = b"\x2c" + struct.pack("<HHHH", 0, 0, 96, 64)
TIFF_SIZE = struct.pack("<HHQQHHQQ", WIDTH, 4, 1, 96, HEIGHT, 4, 1, 64)
ENDLESS: dict[str, Callable[[int], bytes]] = {  # very many small parts, and the size after them
    "JPEG, bare markers": lambda parts: b"\xff\xd8" + b"\xff\x01" * parts + jpeg()[2:],
    "JPEG, empty segments": lambda parts: b"\xff\xd8" + b"\xff\xe5\0\2" * parts + jpeg()[2:],
    "GIF, comments": lambda parts: GIF_SCREEN + b"\x21\xfe\0" * parts + GIF_FRAME,
    "GIF, sub-blocks": lambda parts: GIF_SCREEN + b"\x21\xfe" + b"\1\1" * parts + b"\0" + GIF_FRAME,
    "BigTIFF": lambda parts: big_tiff_of(bytes(20) * parts + TIFF_SIZE),
    "AVIF": lambda parts: avif_of(b"\0\7\0" * parts + b"\0\1\1\1"),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_the_search_for_a_size_stops_after_very_many_small_parts(kind: str) -> None:
    few = inspect(memoryview(ENDLESS[kind](10)), LIMITS)
    assert (few.width, few.height) == (96, 64)
    with pytest.raises(ImageError) as refused:
        inspect(memoryview(ENDLESS[kind](PARTS + 1)), LIMITS)
    assert refused.value.reason is Reason.HEADER


def test_a_header_that_claims_far_more_pixels_than_its_bytes_can_hold_is_damaged_and_no_limit_is_to_be_raised() -> (
    None
):
    tiny = memoryview(raw_png(30_000, 30_000, b""))
    with pytest.raises(
        ImageError, match=f"states 30000×30000 pixels, but the file has {len(tiny)} bytes"
    ) as refused:
        inspect(tiny, LIMITS)
    assert refused.value.reason is Reason.HEADER
    assert "max_pixels" not in refused.value.detail
    assert inspect(tiny, Limits(max_pixels=900_000_000)).width == 30_000, (
        "whoever allows it finds out by decoding"
    )


def test_a_large_scan_of_a_blank_sheet_is_not_taken_for_a_damaged_one() -> None:
    out = io.BytesIO()
    Image.new("1", (19_866, 28_087), 1).save(out, "TIFF", compression="group4")  # A0, 600 dots per inch
    with pytest.raises(ImageError, match="To allow it, set max_pixels = 557976342") as refused:
        inspect(memoryview(out.getvalue()), LIMITS)
    assert refused.value.reason is Reason.PIXELS


def test_a_picture_of_900_million_pixels_is_refused_without_touching_them() -> None:
    data = memoryview(huge_png())
    assert len(data) < 1_000_000
    tracemalloc.start()
    with pytest.raises(ImageError) as refused:
        inspect(data, LIMITS)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused.value.reason is Reason.PIXELS
    assert peak < 100_000
