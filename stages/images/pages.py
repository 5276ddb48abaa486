"""Counts the pictures in a file: the pages of a TIFF, the frames of an animation. Only the first one is read,
so the count shows how many are left out.

Only the start of each picture is looked at. Counting stops at MOST, or
where the bytes are invalid: that is no reason to refuse the first picture.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from itertools import islice

from stages.contract.base import ImageError
from stages.images.headers import CHUNKS, png_chunks
from stages.images.tiff import MOST, PARTS, walk


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


WALKERS: dict[str, Callable[[memoryview], Iterator[None]]] = {
    "TIFF": _walk_tiff,
    "GIF": _walk_gif,
    "WEBP": _walk_webp,
    "PNG": _walk_png,
}
