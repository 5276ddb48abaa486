"""Every layout of pixels is shown right, or refused by its name: never anything else. `layouts.py` makes the files."""

from __future__ import annotations

import io
import itertools
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from PIL import Image

from stages.contract.base import ImageError, Limits, Reason
from stages.images import pages
from stages.images.decoder import Decoder
from stages.images.images import inspect
from tests.inputs import chunk, encode
from tests.stages.images.layouts import (
    GROUPS,
    HEIGHT,
    WIDTH,
    Pixels,
    _stored,
    color,
    directory,
    gray,
    judge,
    png_of,
    reverse_bits,
    shown,
    tiff_file,
    tiff_of,
    tiffs,
    to_rgb,
)

LIMITS = Limits()
EVERY = 7  # of TIFF; all with `python -m tests.stages.images.layouts`


def is_picture(found: Pixels, wanted: Pixels, tolerance: int = 1) -> bool:
    return found.shape == wanted.shape and int(np.abs(found.astype(int) - wanted).max()) <= tolerance


@pytest.mark.parametrize("group", GROUPS)
def test_every_layout_is_right_or_refused_by_name(group: str) -> None:
    layouts = tiffs(EVERY) if group == "tiff" else GROUPS[group]()
    verdicts = [(layout.name, *judge(layout)) for layout in layouts]
    assert [verdict for verdict in verdicts if verdict[1] not in ("right", "refused")] == []
    assert sum(verdict[1] == "right" for verdict in verdicts) > 0.85 * len(verdicts)
    assert all("save it as" in detail for _, verdict, detail in verdicts if verdict == "refused")


def test_a_sealed_decoder_reads_deep_pictures_and_others_in_turn(decoder: Decoder) -> None:
    deep = tiff_of(gray()[..., None] / 255, bits=32, kind=3, how="lzw")
    plain = encode(Image.fromarray(color()), "PNG")
    pids = []
    for _ in range(2):
        assert is_picture(shown(decoder, plain), color())
        assert is_picture(shown(decoder, deep), to_rgb(gray()))
        pids.append(decoder.pid)
    assert pids[0] == pids[1]  # the child with numpy stays


@pytest.mark.parametrize("missing", [np.nan, np.inf, -3.4028235e38, -9999.0, 1e9])
def test_one_value_that_is_no_data_does_not_set_the_range_of_a_float_picture(
    decoder: Decoder, missing: float
) -> None:
    values = gray()[..., None] / 255
    values[20, 30] = missing
    found = shown(decoder, tiff_of(values, bits=32, kind=3))
    found[20, 30] = to_rgb(gray())[20, 30]
    assert is_picture(found, to_rgb(gray()), 2)


def test_the_value_that_gdal_marks_as_no_data_is_white(decoder: Decoder) -> None:
    values = gray()[..., None] / 255
    values[:, 30:] = -1
    data = tiff_of(values, bits=32, kind=3, more={42113: (2, b"-1\0")})
    found = shown(decoder, data)
    assert (found[:, 30:] == 255).all()
    assert found[:, :30].max() == 255
    assert found.min() == 0


def test_a_small_part_of_the_range_of_16_bits_is_stretched_and_an_empty_page_is_not(decoder: Decoder) -> None:
    thermal = (29_000 + gray().astype(int) * 2000 // 255)[..., None]
    assert is_picture(shown(decoder, png_of(thermal, 16, 0)), to_rgb(gray()), 2)
    page = 65_000 + (np.arange(gray().size) % 100).reshape(gray().shape)[..., None]
    found = shown(decoder, png_of(page, 16, 0))
    assert found.min() > 250


@pytest.mark.parametrize("planar", [1, 2])
@pytest.mark.parametrize(("bits", "extra"), [(16, ()), (16, (0, 2)), (32, ())])
def test_dark_colors_stay_dark_in_every_layout(
    decoder: Decoder, planar: int, bits: int, extra: tuple[int, ...]
) -> None:
    others = np.ones((*gray().shape, len(extra)))
    values = np.concatenate([color() / 255 / 16, others], -1)
    data = tiff_of(values, bits=bits, photometric=2, planar=planar, extra=extra)
    assert is_picture(shown(decoder, data), color() // 16)


def test_dark_gray_with_alpha_stays_dark(decoder: Decoder) -> None:
    values = np.stack([gray() / 255 / 16, np.ones(gray().shape)], -1)
    assert is_picture(shown(decoder, tiff_of(values, bits=16, extra=(2,))), to_rgb(gray() // 16))


@pytest.mark.parametrize("lengths", [None, (4, [0, 0, 0])], ids=["none", "zero"])
@pytest.mark.parametrize(("bits", "how"), [(16, "none"), (16, "lzw"), (8, "lzw")])
def test_strips_without_a_length_are_read(
    decoder: Decoder, lengths: tuple[int, list[int]] | None, bits: int, how: str
) -> None:
    tags = directory(gray()[..., None] / 255, bits=bits, how=how)
    del tags[279]
    data = tiff_file([tags | ({279: lengths} if lengths else {})], "<")
    assert is_picture(shown(decoder, data), to_rgb(gray()))
    with pytest.raises(ImageError) as refused:
        shown(
            decoder, data.replace(struct.pack("<3I", *strips_of(data)), struct.pack("<3I", 8, 9, len(data)))
        )
    assert refused.value.reason in (Reason.TRUNCATED, Reason.DECODER)


def strips_of(data: bytes) -> tuple[int, ...]:
    (listed,) = struct.unpack_from("<I", data, data.index(struct.pack("<HHI", 273, 4, 3)) + 8)
    return struct.unpack_from("<3I", data, listed)


@pytest.mark.parametrize("bits", [8, 16])
def test_a_strip_that_is_left_out_is_empty(decoder: Decoder, bits: int) -> None:
    data = tiff_of(gray()[..., None] / 255, bits=bits)
    first, *others = strips_of(data)
    found = shown(
        decoder,
        data.replace(
            struct.pack("<I", first) + struct.pack("<I", others[0]), struct.pack("<II", 0, others[0])
        ),
    )
    assert not found[:16].any()
    assert is_picture(found[16:], to_rgb(gray())[16:])


@pytest.mark.parametrize(("bits", "how"), [(8, "none"), (8, "lzw"), (16, "none")])
@pytest.mark.parametrize("extra", [(), (0,)])
@pytest.mark.parametrize("photometric", [1, 2, 5])
def test_colors_that_are_not_named_are_gray_or_rgb_by_the_number_of_channels(
    decoder: Decoder, photometric: int, extra: tuple[int, ...], bits: int, how: str
) -> None:
    values, seen = _stored(photometric, 0 if extra else None)
    tags = directory(values, bits=bits, photometric=photometric, how=how, extra=extra)
    del tags[262]
    data = tiff_file([tags], "<")
    if photometric == 5:
        with pytest.raises(ImageError, match="colors that it does not name"):
            inspect(memoryview(data), LIMITS)
    else:
        assert is_picture(shown(decoder, data), seen)


@pytest.mark.parametrize("interlaced", [False, True])
def test_all_bits_of_the_transparent_color_of_a_16_bit_png_are_compared(
    decoder: Decoder, interlaced: bool
) -> None:
    key, near = (5140, 10, 300), (5141, 10, 300)
    values = np.full((HEIGHT, WIDTH, 3), near)
    values[:, 30:] = key
    data = png_of(values, 16, 2, chunk(b"tRNS", struct.pack(">3H", *key)), interlaced=interlaced)
    found = shown(decoder, data)
    assert (found[:, :30] == (20, 0, 1)).all()
    assert (found[:, 30:] == 255).all()


def test_the_lower_bits_of_colors_beside_opaque_alpha_of_16_bits(decoder: Decoder) -> None:
    values = np.concatenate([color().astype(int) * 4, np.full((HEIGHT, WIDTH, 1), 65535)], -1)
    data = png_of(values, 16, 6, chunk(b"sBIT", bytes((10, 10, 10, 16))))
    assert is_picture(shown(decoder, data), color())


def copy(maker: bytes = b"Aptus\0", mark: int = 1) -> dict[int, tuple[int, Any]]:
    return directory(np.zeros((8, 8, 1)), more={254: (4, [mark]), 271: (2, maker)})


def pair(preview: int, *, old: bool = False, below: bool = False) -> bytes:
    """A TIFF of a preview, then the picture: after it, or in a sub-directory."""
    small = np.zeros((8, 8, 1))
    marks = {255: (3, [2])} if old else {254: (4, [preview])}
    first = directory(small, more=marks)
    whole = directory(color() / 255, photometric=2)
    return nest([first, whole]) if below else tiff_file([first, whole], "<")


def nest(parts: list[dict[int, tuple[int, Any]]]) -> bytes:
    """A TIFF of directories that each have the next one as their sub-directory."""
    data = bytearray(tiff_file([part | {330: (4, [0])} for part in parts[:-1]] + parts[-1:], "<"))
    at = int.from_bytes(data[4:8], "little")
    for _ in parts[1:]:
        entries = int.from_bytes(data[at : at + 2], "little")
        link = at + 2 + 12 * entries
        tags = [struct.unpack_from("<H", data, at + 2 + 12 * entry)[0] for entry in range(entries)]
        place = at + 2 + 12 * tags.index(330) + 8
        at = int.from_bytes(data[link : link + 4], "little")
        data[place : place + 4], data[link : link + 4] = data[link : link + 4], bytes(4)
    return bytes(data)


@pytest.mark.parametrize(
    "data",
    [
        pair(1),
        pair(0, old=True),
        pair(1, below=True),
        nest([copy(), copy(), directory(color() / 255, photometric=2)]),
    ],
    ids=["row", "old", "below", "deep below"],
)
def test_a_smaller_copy_before_the_picture_is_passed_over(decoder: Decoder, data: bytes) -> None:
    assert is_picture(shown(decoder, data), color())


def test_camera_raw_is_refused_by_name() -> None:
    sensor = directory(gray()[..., None] / 255, bits=16, photometric=32803)
    named = directory(np.zeros((8, 8, 1)), more={50706: (1, b"\1\4\0\0"), 254: (4, [1])})
    files = {
        "DNG": tiff_file([named, sensor], "<"),
        "Aptus": tiff_file([copy(), sensor], "<"),
        "Mamiya": tiff_file([copy(b"Mamiya\0", 0), sensor], "<"),
        "Kodak": nest([copy(b"Kodak\0", 0), copy(), sensor]),
    }
    for name, data in files.items():
        with pytest.raises(ImageError, match=rf"camera raw \({name}\)") as refused:
            inspect(memoryview(data), LIMITS)
        assert refused.value.reason is Reason.FORMAT
    for head in (b"IIRO", b"IIU\0", b"\0\0\0\x18ftypcrx \0\0\0\1"):
        with pytest.raises(ImageError, match="camera raw") as refused:
            inspect(memoryview(head + bytes(40)), LIMITS)
        assert refused.value.reason is Reason.FORMAT


def test_a_document_that_is_cut_off_after_its_first_page_shows_that_page_and_a_lone_copy_does_not(
    decoder: Decoder,
) -> None:
    page = directory(color() / 255, photometric=2)
    data = tiff_file([page, page], "<")
    assert is_picture(shown(decoder, data[: len(data) // 2 + 40]), color())
    data = pair(1)
    with pytest.raises(ImageError):
        inspect(memoryview(data[:-20]), LIMITS)


def test_directories_in_a_loop_are_read_once() -> None:
    data = bytearray(nest([copy(), copy()]))
    at = data.index(struct.pack("<HHI", 254, 4, 1), data.rindex(b"Aptus")) - 2
    first = data[4:8]
    found = data.index(struct.pack("<I", at))
    assert found
    data[found : found + 4] = first
    assert inspect(memoryview(bytes(data)), LIMITS).width == 8


@pytest.mark.parametrize("bits", [1, 8, 16])
@pytest.mark.parametrize("how", ["none", "lzw"])
def test_a_big_endian_bigtiff_is_read(decoder: Decoder, bits: int, how: str) -> None:
    values = (gray()[..., None] > 127) * 1.0
    data = tiff_of(values, bits=bits, how=how, order=">", big=True)
    assert is_picture(shown(decoder, data), to_rgb((values[..., 0] * 255).astype(np.uint8)))


@pytest.mark.parametrize("how", ["none", "lzw"])
@pytest.mark.parametrize("planar", [1, 2])
@pytest.mark.parametrize(("photometric", "bits"), [(1, 8), (1, 4), (2, 8), (5, 8)])
def test_bytes_with_their_lowest_bit_first_are_read(
    decoder: Decoder, photometric: int, bits: int, planar: int, how: str
) -> None:
    values, seen = _stored(photometric, None)
    tags = reverse_bits(directory(values, photometric=photometric, bits=bits, planar=planar, how=how))
    found = shown(decoder, tiff_file([tags], "<"))
    assert np.abs(found.astype(int) - seen).max() <= (8 if bits == 4 else 1)


@pytest.mark.parametrize("more", [{284: (3, [2])}, {266: (3, [2])}])
def test_lab_in_a_layout_that_is_not_read_is_refused_by_name(more: dict[int, Any]) -> None:
    data = tiff_of(color() / 255, photometric=8, more=more)
    with pytest.raises(ImageError, match=r"L\*a\*b\* colors of 8 bits in this layout is not supported"):
        inspect(memoryview(data), LIMITS)


@pytest.mark.parametrize(("number", "name"), [(34933, "PNG"), (34934, "JPEG XR"), (34712, "JPEG 2000")])
def test_a_compression_that_is_not_read_is_refused_by_its_name(number: int, name: str) -> None:
    data = tiff_of(color() / 255, photometric=2, more={259: (3, [number])})
    with pytest.raises(ImageError, match=f"a TIFF with {name} compression is not supported") as refused:
        inspect(memoryview(data), LIMITS)
    assert refused.value.reason is Reason.FORMAT


@pytest.mark.parametrize("image_format", ["GIF", "WEBP", "PNG", "AVIF"])
def test_an_animation_that_begins_blank_shows_its_first_frame_with_content(
    decoder: Decoder, image_format: str
) -> None:
    data = fading_in(image_format)
    assert shown(decoder, data)[30, 30].max() < 20
    assert inspect(memoryview(data), LIMITS).pages == 2


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(("color", "channels"), [(0, 1), (2, 3), (4, 2), (6, 4)])
def test_an_animated_png_of_any_colors_and_depth_may_begin_blank(
    decoder: Decoder, color: int, channels: int, bits: int
) -> None:
    levels = np.linspace(8, 255, 32 * 48).reshape(32, 48, 1).astype(int)
    frame = np.repeat(levels * (257 if bits == 16 else 1), channels, axis=2)
    if channels in (2, 4):
        frame[..., -1] = (1 << bits) - 1
    blank = frame * (np.arange(channels) == (channels - 1 if channels in (2, 4) else -1))
    for frames in ([blank, frame], [frame, blank]):
        assert np.abs(shown(decoder, animated_png(frames, color, bits)) - levels).max() <= 1


def animated_png(frames: Sequence[np.ndarray], color: int, bits: int) -> bytes:
    """Made by hand, as Pillow writes no gray one of 16 bits."""
    height, width, _ = frames[0].shape
    parts = [chunk(b"IHDR", struct.pack(">2I5B", width, height, bits, color, 0, 0, 0))]
    parts.append(chunk(b"acTL", struct.pack(">2I", len(frames), 0)))
    numbers = itertools.count()
    for place, frame in enumerate(frames):
        rows = (b"\0" + row.astype(f">u{bits // 8}").tobytes() for row in frame)
        packed = zlib.compress(b"".join(rows))
        parts.append(chunk(b"fcTL", struct.pack(">5I2H2B", next(numbers), width, height, 0, 0, 1, 10, 0, 0)))
        parts.append(
            chunk(b"fdAT", struct.pack(">I", next(numbers)) + packed) if place else chunk(b"IDAT", packed)
        )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts) + chunk(b"IEND", b"")


def test_only_so_many_blank_pixels_are_skipped_as_decoders_have_time_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Image.open(io.BytesIO(fading_in("GIF"))) as image:
        monkeypatch.setattr(pages, "BLANK_PIXELS", 96 * 64 - 1)
        assert pages.is_blank(pages.skip_blank(image, 2))


def fading_in(image_format: str) -> bytes:
    frames = [Image.new("RGB", (96, 64), "white"), Image.new("RGB", (96, 64), "white")]
    frames[1].paste((10, 10, 10), (20, 20, 60, 40))
    options = {"lossless": True} if image_format == "WEBP" else {}
    return encode(frames[0], image_format, save_all=True, append_images=frames[1:], duration=50, **options)


def test_a_blank_first_frame_is_shown_if_a_later_one_does_not_fit(decoder: Decoder) -> None:
    wide = bytearray(fading_in("GIF"))
    at = wide.rindex(b"\x2c" + struct.pack("<HH", 20, 20))  # the second frame has what differs
    wide[at + 1 : at + 5] = struct.pack("<HH", 90, 60)
    for data in (bytes(wide), fading_in("PNG").replace(b"fdAT", b"fdAX")):
        assert (shown(decoder, data) == 255).all()


def test_alpha_beside_a_palette_of_four_bits_is_applied(decoder: Decoder) -> None:
    values = np.zeros((4, 8, 2))
    values[:, 4:, 1] = 1  # all of it is black, and the left half transparent
    more = {320: (3, [*(0, 0xFFFF), *[0] * 14] * 3)}
    seen = shown(decoder, tiff_of(values, bits=4, photometric=3, extra=(2,), more=more))
    assert (seen[:, :4] == 255).all()
    assert (seen[:, 4:] == 0).all()


def test_a_float_picture_of_one_value_has_its_level(decoder: Decoder) -> None:
    for level in (0.0, 1.0):
        seen = shown(decoder, encode(Image.new("F", (8, 8), level), "TIFF"))
        assert (seen == 255 * level).all()


def test_a_bmp_that_says_that_it_has_alpha_is_read(decoder: Decoder) -> None:
    head = struct.pack("<IiiHHIIiiII", 40, 2, 2, 1, 32, 6, 16, 0, 0, 0, 0)
    masks = struct.pack("<4I", 0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    data = b"BM" + struct.pack("<IHHI", 86, 0, 0, 70) + head + masks + bytes((30, 20, 10, 255)) * 4
    assert (shown(decoder, data) == (10, 20, 30)).all()


def test_the_properties_of_a_heic_may_be_listed_in_several_tables() -> None:
    data = encode(Image.new("RGB", (96, 64)), "AVIF")
    at = data.index(b"ipma") - 4
    other = struct.pack(">I4sIIHBB", 20, b"ipma", 0, 1, 9, 1, 1)  # of another picture
    grown = bytearray(data)
    grown[at:at] = other
    for name in (b"meta", b"iprp"):
        box = grown.index(name) - 4
        grown[box : box + 4] = struct.pack(">I", int.from_bytes(grown[box : box + 4], "big") + len(other))
    header = inspect(memoryview(grown), LIMITS)
    assert (header.width, header.height) == (96, 64)


def test_an_animated_avif_may_have_no_primary_picture(decoder: Decoder) -> None:
    data = fading_in("AVIF").replace(b"pitm", b"free", 1)
    header = inspect(memoryview(data), LIMITS)
    assert (header.width, header.height, header.pages) == (96, 64, 2)
    assert shown(decoder, data)[30, 30].max() < 20


@pytest.mark.parametrize("box", [b"tkhd", b"minf", b"stbl", b"stsz"])
def test_an_animated_avif_whose_track_lacks_a_box_is_one_picture_or_refused(box: bytes) -> None:
    data = fading_in("AVIF").replace(box, b"free", 1)
    assert inspect(memoryview(data), LIMITS).pages == 1
    with pytest.raises(ImageError) as refusal:
        inspect(memoryview(data.replace(b"pitm", b"free", 1)), LIMITS)
    assert refusal.value.reason is Reason.TRUNCATED


def test_gray_heic_of_10_bits_has_the_gray_of_8_bits(decoder: Decoder) -> None:
    pillow_heif = pytest.importorskip("pillow_heif")
    gray = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    file = io.BytesIO()
    pillow_heif.encode("I;16", (64, 64), gray.tobytes(), file, quality=-1)
    assert np.abs(shown(decoder, file.getvalue())[..., 0].astype(int) - (gray >> 8)).max() <= 2


def cropped_avif(left: int, top: int, width: int, height: int) -> bytes:
    """An AVIF of the colors, with a clap property in the place of a free one."""
    image = Image.fromarray(np.tile(color(), (2, 2, 1)))
    file = io.BytesIO()
    image.save(file, "AVIF", quality=100, subsampling="4:4:4")
    data = file.getvalue()
    at = data.index(b"ispe") - 4
    center = ((2 * left + width) - image.width, (2 * top + height) - image.height)
    clap = struct.pack(">I4sIIIIiIiI", 40, b"clap", width, 1, height, 1, center[0], 2, center[1], 2)
    place = at + int.from_bytes(data[at : at + 4], "big")
    grown = bytearray(data[:place] + clap + data[place:])
    for name in (b"meta", b"iprp", b"ipco"):
        box = grown.index(name) - 4
        grown[box : box + 4] = struct.pack(">I", int.from_bytes(grown[box : box + 4], "big") + 40)
    table = grown.index(b"ipma")
    count = grown[table + 14]
    numbers = [
        number & 0x80 | (number & 0x7F) + ((number & 0x7F) > 1)
        for number in grown[table + 15 : table + 15 + count]
    ]
    grown[table + 14 : table + 15 + count] = bytes((count + 1, *numbers, 0x82))
    for name in (b"meta", b"iprp", b"ipma"):
        box = grown.index(name) - 4
        grown[box : box + 4] = struct.pack(">I", int.from_bytes(grown[box : box + 4], "big") + 1)
    extent = grown.index(b"iloc")
    mdat = data.index(b"mdat") + 4
    found = grown.index(struct.pack(">I", mdat), extent)
    grown[found : found + 4] = struct.pack(">I", mdat + 41)
    return bytes(grown)


def test_the_crop_of_an_avif_is_applied(decoder: Decoder) -> None:
    data = cropped_avif(20, 10, 60, 50)
    found = shown(decoder, data)
    assert found.shape == (50, 60, 3)
    wanted = np.tile(color(), (2, 2, 1))[10:60, 20:80]
    assert np.abs(found.astype(int) - wanted).mean() < 6


def test_the_significant_bits_of_a_png_that_fills_its_range_change_nothing(decoder: Decoder) -> None:
    values = (gray().astype(int) * 257)[..., None]
    assert is_picture(shown(decoder, png_of(values, 16, 0, chunk(b"sBIT", b"\x0a"))), to_rgb(gray()))


def test_a_deep_tiff_that_is_cut_is_truncated(decoder: Decoder) -> None:
    values, _ = _stored(2, None)
    data = tiff_of(values, bits=16, planar=2, how="lzw")
    at = data.index(struct.pack("<HHI", 273, 4, 9))
    (listed,) = struct.unpack_from("<I", data, at + 8)
    spoiled = data[:listed] + struct.pack("<I", len(data) - 10) + data[listed + 4 :]
    with pytest.raises(ImageError) as refused:
        shown(decoder, spoiled)
    assert refused.value.reason is Reason.TRUNCATED
