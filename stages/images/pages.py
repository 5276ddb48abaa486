"""The pictures in a file: the pages of a TIFF, the frames of an animation. They are counted, and only one of them is
read, so the count shows how many are left out: the first, or the first with content.

For counting only the start of each picture is looked at. It stops at MOST, or
where the bytes are invalid: that is no reason to refuse the first picture.
"""

from __future__ import annotations

import functools
import io
import struct
from collections.abc import Callable, Container, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from stages.contract.base import ImageError, Reason
from stages.images.headers import find_gif_pictures, find_sequence, png_chunks, png_properties, webp_chunks
from stages.images.tiff import MOST, walk

if TYPE_CHECKING:
    from PIL import Image

BLANK_FRAMES = 100  # most frames of an animation that are skipped because they have one color
BLANK_PIXELS = 200_000_000  # most pixels of these together
# What a bad later frame raises
BROKEN = (EOFError, OSError, SyntaxError, ValueError, MemoryError, ImageError)


def count_pages(name: str, data: memoryview) -> int:
    """The number of pictures; 1 for formats with one picture in each file. name: the format, from `identify`."""
    count = 0
    try:
        for _ in islice(WALKERS[name](data), MOST) if name in WALKERS else ():
            count += 1
    except (struct.error, IndexError, OverflowError, ImageError):
        pass
    return max(count, 1)


def _walk_webp(data: memoryview) -> Iterator[bytes]:
    if bytes(data[12:16]) != b"VP8X" or not data[20] & 0x02:
        return iter(())
    return (kind for kind, _ in webp_chunks(data) if kind == b"ANMF")


def _walk_png(data: memoryview) -> Iterator[object]:
    """An animated PNG has the number of its frames before the first. Its default image may be an additional picture."""
    control = png_properties(data).get(b"acTL")
    return iter(range(struct.unpack_from(">I", control)[0] if control else 1))


def _walk_avif(data: memoryview) -> Iterator[object]:
    sequence = find_sequence(data)
    return iter(range(sequence[2] if sequence else 1))


WALKERS: dict[str, Callable[[memoryview], Iterator[object]]] = {
    "TIFF": lambda data: (page for page in walk(data) if not page.is_copy),
    "GIF": find_gif_pictures,
    "WEBP": _walk_webp,
    "PNG": _walk_png,
    "AVIF": _walk_avif,
}


def skip_blank(image: Image.Image, frames: int) -> Image.Image:
    """The first frame of an animation, or if that has one color only, as when it fades in, the first one that has more."""
    if frames == 1:
        return image
    first = image.copy()
    for number in range(1, min(frames, BLANK_FRAMES, 1 + BLANK_PIXELS // (image.width * image.height))):
        if not is_blank(image):
            return image
        try:
            image.seek(number)
            image.load()
        except BROKEN:  # the first frame is sound
            return first
        if image.size != first.size:
            return first
    return first if is_blank(image) else image


def is_blank(image: Image.Image) -> bool:
    """Whether it has one color, or is transparent."""
    if image.mode.startswith("I"):  # gray of 16 bits, which a conversion would cut off at 255
        darkest, brightest = image.getextrema()
        return darkest == brightest
    if image.has_transparency_data:
        image = image.convert("RGBA")
        if image.getchannel("A").getextrema() == (0, 0):
            return True
    return len(image.convert("RGBA").getcolors(1) or ()) == 1


def keep_picture(data: memoryview, also: Container[bytes] = ()) -> io.BytesIO:
    """A PNG with only the chunks of its first picture. Texts, profiles and other frames are not
    pixels: the decoder does not get them, so it does not matter if they are damaged or too large. also: other chunks.

    Raises ImageError: TRUNCATED, and DECODER if the checksum of a chunk that is kept is wrong.
    """
    picture = io.BytesIO()
    picture.write(data[:8])
    for kind, start, end in png_chunks(data):
        if kind[:1].islower() and kind != b"tRNS" and kind not in also:
            continue
        if checksum(data[start - 4 : end]) != int.from_bytes(data[end : end + 4], "big"):
            raise ImageError(Reason.DECODER, f"the checksum of a PNG chunk is wrong ({ascii(kind)[2:-1]})")
        picture.write(data[start - 8 : end + 4])
    picture.seek(0)
    return picture


def checksum(*parts: bytes | memoryview) -> int:
    """The CRC-32 of a PNG's chunk, by libdeflate, which is several times as fast as Python's zlib."""
    from imagecodecs import deflate_crc32

    return functools.reduce(lambda found, part: deflate_crc32(part, found), parts, 0)  # type: ignore[arg-type]
