"""The pictures in a file: the pages of a TIFF, the frames of an animation. They are counted, and only one of them is
read, so the count shows how many are left out: the first, or the first with content.

For counting only the start of each picture is looked at. It stops at MOST, or
where the bytes are invalid: that is no reason to refuse the first picture.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from stages.contract.base import ImageError
from stages.images.headers import CHUNKS, find_sequence, png_chunks
from stages.images.tiff import MOST, PARTS, walk

if TYPE_CHECKING:
    from PIL import Image

BLANK_FRAMES = 100  # most frames of an animation that are skipped because they have one color
BLANK_PIXELS = 200_000_000  # most pixels of these together
BROKEN = (
    EOFError,
    OSError,
    SyntaxError,
    ValueError,
    MemoryError,
    ImageError,
)  # what a bad later frame raises


def count_pages(name: str, data: memoryview) -> int:
    """The number of pictures; 1 for formats with one picture in each file. name: the format, from `identify`."""
    count = 0
    try:
        for _ in islice(WALKERS[name](data), MOST) if name in WALKERS else ():
            count += 1
    except (struct.error, IndexError, OverflowError, ImageError):
        pass
    return max(count, 1)


def _walk_tiff(data: memoryview) -> Iterator[None]:
    for page in walk(data):
        if not page.is_copy:
            yield


def _walk_gif(data: memoryview) -> Iterator[None]:
    at = 13 + _palette_bytes(data[10])
    in_blocks = False  # inside the blocks of an extension or a picture, which an empty block ends
    for _ in range(PARTS):
        block = data[at]
        if in_blocks:
            in_blocks = block > 0
            at += block + 1
        elif block == 0x2C:
            yield
            at += 11 + _palette_bytes(data[at + 9])  # includes the byte with the code size
            in_blocks = True
        elif block == 0x21:
            at += 2
            in_blocks = True
        elif block == 0x3B:
            return
        else:
            at += 1


def _palette_bytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _walk_webp(data: memoryview) -> Iterator[None]:
    at = 12
    if bytes(data[at : at + 4]) != b"VP8X" or not data[20] & 0x02:
        return
    for _ in range(PARTS):
        kind, length = struct.unpack_from("<4sI", data, at)
        if kind == b"ANMF":
            yield
        at += 8 + length + (length & 1)


def _walk_png(data: memoryview) -> Iterator[None]:
    """An animated PNG has the number of its frames before the first.
    Its default image may be an additional picture."""
    for kind, start, _ in islice(png_chunks(data), CHUNKS):
        if kind == b"IDAT":
            return
        if kind == b"acTL":
            (frames,) = struct.unpack_from(">I", data, start)
            yield from (None for _ in range(frames))
            return


def _walk_avif(data: memoryview) -> Iterator[None]:
    sequence = find_sequence(data)
    yield from (None for _ in range(sequence[2] if sequence else 1))


WALKERS: dict[str, Callable[[memoryview], Iterator[None]]] = {
    "TIFF": _walk_tiff,
    "GIF": _walk_gif,
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
