"""Width, height and orientation of an image, read from its bytes in plain Python.

There are no pixels and no native code here: bad bytes can only raise an exception, so this can run in the
daemon and in a GPU worker. Every reader returns the size as stored and the EXIF orientation (1..8). A reader
that reads past the end of the bytes raises IndexError or struct.error.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

from stages.contract.base import ImageError, Reason
from stages.images.formats import HEAD, PNM
from stages.images.tiff import EXIF, PARTS, read_orientation, read_tiff

Size = tuple[int, int, int]  # width, height as stored, orientation

CHUNKS = 4096  # most chunks of a PNG or WebP that are searched
NOTHING = memoryview(b"")


# JPEG (ITU-T T.81, annex B)
# ------------------------------------------------------------------------------------------

JPEG_LS = 0xF7
SOF_MARKERS = frozenset((*range(0xC0, 0xD0), JPEG_LS)) - {0xC4, 0xC8, 0xCC}
# All except the hierarchical ones and lossless arithmetic.
SOF_READ = frozenset((0xC0, 0xC1, 0xC2, 0xC3, 0xC9, 0xCA))
SOF_HUFFMAN = frozenset((0xC0, 0xC1, 0xC2))  # baseline, extended, progressive
BARE_MARKERS = frozenset((0x01, *range(0xD0, 0xD9)))  # markers without a segment
SOS, APP0, APP1, APP14, EOI = 0xDA, 0xE0, 0xE1, 0xEE, b"\xff\xd9"
NEXT_MARKER = re.compile(rb"\xff[^\xff\x00]")


class Jpeg(NamedTuple):
    """The content of the segments before the first scan."""

    width: int
    height: int
    orientation: int
    process: int  # the SOF marker's low byte: 0xC0 baseline, 0xC2 progressive, 0xC9 arithmetic, …
    components: bytes  # their identifiers
    transform: int | None  # of Adobe's APP14 segment: 0 RGB or CMYK, 1 YCbCr, 2 YCCK
    pixels_at: int = 0  # the position of the first scan's compressed data

    @property
    def is_plain(self) -> bool:
        """Gray or YCbCr with Huffman coding, which all decoders read in the same way."""
        colors = len(self.components)
        is_rgb = self.transform == 0 or self.components == b"RGB"
        return self.process in SOF_HUFFMAN and (colors == 1 or (colors == 3 and not is_rgb))


def read_jpeg_frame(data: memoryview) -> Jpeg:
    """Parse the segments up to the first scan, and check that an end marker follows it.

    Raises ImageError: HEADER, FORMAT, TRUNCATED.
    """
    frame, orientation, transform = None, 0, None
    for marker, start, end in jpeg_segments(data):
        if marker in SOF_MARKERS:
            frame = _read_sof(marker, data[start:end])
        elif marker == APP1 and not orientation and bytes(data[start : start + 6]) == EXIF:
            orientation = read_orientation(data[start:end])
        elif marker == APP14 and end - start >= 12 and bytes(data[start : start + 5]) == b"Adobe":
            transform = data[start + 11]
        elif marker == SOS:
            if frame is None:
                raise ImageError(Reason.HEADER, "the JPEG has pixels before its size")
            if bytes(data[-2:]) != EOI and EOI not in bytes(data[end:]):
                problem = "the JPEG has no end marker, so it is incomplete. Copy it again from its source"
                raise ImageError(Reason.TRUNCATED, problem)
            return frame._replace(orientation=orientation or 1, transform=transform, pixels_at=end)
    raise ImageError(Reason.HEADER, "the JPEG ends before its picture begins")


def jpeg_segments(data: memoryview) -> Iterator[tuple[int, int, int]]:
    """(marker, start, end) of each segment's payload, up to and including the first scan's header."""
    at = 2
    for _ in range(PARTS):
        at = _find_marker(data, at) + 2
        marker = data[at - 1]
        if marker in BARE_MARKERS:
            continue
        if marker == EOI[1]:
            return
        (length,) = struct.unpack_from(">H", data, at)
        if length < 2 and marker < APP0:  # others say nothing about pixels, and libjpeg reads on
            raise ImageError(Reason.HEADER, f"the JPEG's segment {marker:02x} has an impossible length")
        start, at = at + 2, at + max(length, 2)
        if at > len(data):
            raise IndexError("segment cut")
        yield marker, start, at
        if marker == SOS:
            return
    raise ImageError(Reason.HEADER, "the JPEG has too many segments before its picture")


def _find_marker(data: memoryview, at: int) -> int:
    """Skips padding and junk, as all decoders do. Raises IndexError."""
    if data[at] == 0xFF and 0 < data[at + 1] < 0xFF:
        return at
    if found := NEXT_MARKER.search(data, at):
        return found.start()
    raise IndexError("no marker")


def _read_sof(marker: int, segment: memoryview) -> Jpeg:
    precision, height, width, count = struct.unpack_from(">BHHB", segment)
    if marker not in SOF_READ:
        kind = "JPEG-LS is" if marker == JPEG_LS else "hierarchical and lossless arithmetic JPEG are"
        raise ImageError(Reason.FORMAT, f"{kind} not supported: save it as plain JPEG")
    if precision != 8:
        problem = f"{precision}-bit JPEG is not supported: save it with 8 bits a channel"
        raise ImageError(Reason.FORMAT, problem)
    components = bytes(segment[6 : 6 + 3 * count : 3])
    if count not in (1, 3, 4) or len(components) != count:
        raise ImageError(Reason.HEADER, f"the JPEG states {count} color components")
    return Jpeg(width, height, 1, marker, components, None)


# PNG (ISO/IEC 15948)
# -------------------------------------------------------------------------------------------------


def png_chunks(data: memoryview) -> Iterator[tuple[bytes, int, int]]:
    """(type, start, end) of each chunk's payload, up to and including IEND. Raises TRUNCATED if the bytes end before."""
    at, kind = 8, b""
    while kind != b"IEND":
        if at + 12 > len(data):
            raise ImageError(Reason.TRUNCATED, "the PNG ends before its last chunk")
        length, kind = struct.unpack_from(">I4s", data, at)
        end = at + 8 + length
        if end + 4 > len(data):
            raise ImageError(Reason.TRUNCATED, f"the PNG ends inside a chunk ({ascii(kind)[2:-1]})")
        yield kind, at + 8, end
        at = end + 4


def png_properties(data: memoryview) -> dict[bytes, memoryview]:
    """The chunks before the pixels: their type → the content of the first of this type."""
    found: dict[bytes, memoryview] = {}
    for kind, start, end in islice(png_chunks(data), CHUNKS):
        if kind == b"IDAT":
            break
        found.setdefault(kind, data[start:end])
    return found


def png_significant_bits(data: memoryview) -> int:
    """The most significant bits of a color of a PNG of 16 bits; 16 if it does not state fewer."""
    stated = png_properties(data).get(b"sBIT", NOTHING)[: 3 if data[25] & 2 else 1]
    return min(max(stated, default=0) or 16, 16)


def read_png(data: memoryview) -> Size:
    length, kind, width, height = struct.unpack_from(">I4sII", data, 8)
    if kind != b"IHDR" or length != 13:
        raise ImageError(Reason.HEADER, "the PNG does not begin with its header chunk")
    if zlib.crc32(data[12:29]) != struct.unpack_from(">I", data, 29)[0]:
        raise ImageError(Reason.HEADER, "the checksum of the PNG's header is wrong")
    orientation = 1
    for kind, start, end in islice(png_chunks(data), CHUNKS):
        if kind == b"eXIf":
            orientation = read_orientation(data[start:end])
    return width, height, orientation


# GIF, BMP and netpbm
# -------------------------------------------------------------------------------------------------


def find_gif_pictures(data: memoryview) -> Iterator[int]:
    """The position of each picture's descriptor."""
    at = 13 + _palette_bytes(data[10])
    in_blocks = False  # inside the blocks of an extension or a picture, which an empty block ends
    for _ in range(PARTS):
        block = data[at]
        if in_blocks:
            in_blocks = block > 0
            at += block + 1
        elif block == 0x2C:
            yield at
            at += 11 + _palette_bytes(data[at + 9])  # includes the byte with the code size
            in_blocks = True
        elif block == 0x3B:
            return
        else:
            in_blocks = block == 0x21
            at += 2 if in_blocks else 1  # an extension has a label
    raise ImageError(Reason.HEADER, "the GIF has too many blocks before its picture")


def _palette_bytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def read_gif(data: memoryview) -> Size:
    """The screen's size, enlarged if the first frame is larger, as Pillow does."""
    width, height = struct.unpack_from("<HH", data, 6)
    if not (at := next(find_gif_pictures(data), 0)):
        raise ImageError(Reason.HEADER, "the GIF has no picture")
    left, top, frame_width, frame_height = struct.unpack_from("<HHHH", data, at + 1)
    return max(width, left + frame_width), max(height, top + frame_height), 1


def read_bmp(data: memoryview) -> Size:
    is_old = struct.unpack_from("<I", data, 14) == (12,)
    width, height = struct.unpack_from("<HH" if is_old else "<ii", data, 18)
    return width, abs(height), 1  # a negative height means rows from the top


def read_pnm(data: memoryview) -> Size:
    found = PNM.match(data[:HEAD])
    if found is None:
        raise ImageError(Reason.HEADER, "the netpbm header states no size")
    return int(found[2]), int(found[3]), 1


# WebP (RFC 9649)
# -----------------------------------------------------------------------------------------------------


def read_webp(data: memoryview) -> Size:
    (size,) = struct.unpack_from("<I", data, 4)
    if size + 8 > len(data):
        raise ImageError(Reason.TRUNCATED, f"the WebP should have {size + 8} bytes, but has {len(data)}")
    kind = bytes(data[12:16])
    if kind == b"VP8X":
        width = int.from_bytes(data[24:27], "little") + 1
        height = int.from_bytes(data[27:30], "little") + 1
        chunks = islice(webp_chunks(data), CHUNKS if data[20] & 0x08 else 0)
        return width, height, next((read_orientation(exif) for kind, exif in chunks if kind == b"EXIF"), 1)
    if kind == b"VP8L" and data[20] == 0x2F:
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, 1
    if kind == b"VP8 " and bytes(data[23:26]) == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF, 1
    raise ImageError(Reason.HEADER, "the WebP does not begin with a picture")


def webp_chunks(data: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """(type, content) of each chunk, until the bytes end."""
    at = 12
    for _ in range(PARTS):
        if at + 8 > len(data):
            return
        kind, length = struct.unpack_from("<4sI", data, at)
        yield kind, data[at + 8 : at + 8 + length]
        at += 8 + length + (length & 1)


# AVIF and HEIF (ISO/IEC 14496-12 boxes, 23008-12 items)
# --------------------------------------------------------------

BOXES = 4096  # most boxes that are read on one level
# (quarter turns counterclockwise, then mirror: 0 top to bottom, 1 left to right) → EXIF orientation
TURNS = {
    (0, None): 1, (1, None): 8, (2, None): 3, (3, None): 6,
    (0, 0): 4, (1, 0): 5, (2, 0): 2, (3, 0): 7,
    (0, 1): 2, (1, 1): 7, (2, 1): 4, (3, 1): 5,
}  # fmt: skip


def read_avif(data: memoryview) -> Size:
    """Size and orientation of the primary item: its ispe, clap, irot and imir properties. EXIF is ignored,
    as the standard says."""
    properties = dict(primary_properties(data))
    left, top, right, bottom = find_crop(properties)
    turns = properties[b"irot"][0] & 3 if b"irot" in properties else 0
    mirror = properties[b"imir"][0] & 1 if b"imir" in properties else None
    return right - left, bottom - top, TURNS[turns, mirror]


def find_crop(properties: dict[bytes, memoryview]) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of what is to be seen of the stored picture, before it is turned: Pillow does not crop."""
    whole_width, whole_height = struct.unpack_from(">II", properties[b"ispe"], 4)
    if b"clap" not in properties:
        return 0, 0, whole_width, whole_height
    clap = properties[b"clap"]
    width, height = _read_aperture(clap)
    across, across_parts, down, down_parts = struct.unpack_from(">iIiI", clap, 16)
    if not (across_parts and down_parts):
        raise ImageError(Reason.HEADER, "the primary picture is cropped to an impossible size")
    # The offsets are between the centers.
    left = (whole_width - width) // 2 + across // across_parts
    top = (whole_height - height) // 2 + down // down_parts
    if left < 0 or top < 0 or left + width > whole_width or top + height > whole_height:
        return 0, 0, whole_width, whole_height  # as browsers do
    return left, top, left + width, top + height


def read_heif(data: memoryview) -> Size:
    """As AVIF, but after rotation and cropping: pillow-heif rotates (irot) and crops (clap) the pixels while it decodes, in
    the order of the properties. Encoders that pad a picture to whole blocks use clap to restore its size."""
    properties = primary_properties(data)
    width, height = struct.unpack_from(">II", dict(properties)[b"ispe"], 4)
    for kind, value in properties:
        if kind == b"clap":
            width, height = _read_aperture(value)
        elif kind == b"irot" and value[0] & 1:
            width, height = height, width
    return width, height, 1


def primary_properties(data: memoryview) -> list[tuple[bytes, memoryview]]:
    """(type, payload) of each property of the primary item, in the order in which they apply, with at least an ispe."""
    boxes = dict(_boxes(data))
    meta = dict(_boxes(boxes.get(b"meta", NOTHING)[4:]))
    table = dict(_boxes(meta.get(b"iprp", NOTHING)))
    if b"pitm" not in meta or not {b"ipco", b"ipma"} <= table.keys():
        if sequence := find_sequence(data):
            return [(b"ispe", memoryview(struct.pack(">4xII", *sequence[:2])))]
        raise ImageError(Reason.HEADER, "the file names no primary picture")
    item = struct.unpack_from(">H" if meta[b"pitm"][0] == 0 else ">I", meta[b"pitm"], 4)[0]
    properties = list(_boxes(table[b"ipco"]))
    listed = (_property_numbers(part, item) for kind, part in _boxes(meta[b"iprp"]) if kind == b"ipma")
    numbers = next(filter(None, listed), [])
    mine = [properties[number - 1] for number in numbers if 0 < number <= len(properties)]
    if b"ispe" not in dict(mine):
        raise ImageError(Reason.HEADER, "the primary picture states no size")
    return mine


def find_sequence(data: memoryview) -> Size | None:
    """Width, height and number of the frames of an animated AVIF; None for all others."""
    if bytes(data[8:12]) != b"avis":
        return None
    for kind, track in _boxes(dict(_boxes(data)).get(b"moov", NOTHING)):
        media = dict(_boxes(dict(_boxes(track)).get(b"mdia", NOTHING))) if kind == b"trak" else {}
        if bytes(media.get(b"hdlr", NOTHING)[8:12]) == b"pict":
            width, height = struct.unpack(">H2xH2x", dict(_boxes(track)).get(b"tkhd", NOTHING)[-8:])
            media = dict(_boxes(media.get(b"minf", NOTHING)))
            samples = dict(_boxes(media.get(b"stbl", NOTHING)))
            return width, height, struct.unpack_from(">I", samples.get(b"stsz", NOTHING), 8)[0]
    return None


def _read_aperture(clap: memoryview) -> tuple[int, int]:
    """Width and height of a clean aperture, two fractions, rounded as libheif does."""
    width, width_parts, height, height_parts = struct.unpack_from(">IIII", clap)
    if not (width_parts and height_parts):
        raise ImageError(Reason.HEADER, "the primary picture is cropped to an impossible size")
    return (width + width_parts // 2) // width_parts, (height + height_parts // 2) // height_parts


def _boxes(data: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """(type, payload) of each box."""
    at = 0
    for _ in range(BOXES):
        if at + 8 > len(data):
            return
        size, kind = struct.unpack_from(">I4s", data, at)
        start = at + 8
        if size == 1:
            (size,) = struct.unpack_from(">Q", data, start)
            start += 8
        end = at + size if size else len(data)
        if end > len(data):
            raise ImageError(Reason.TRUNCATED, f"the file ends inside its {ascii(kind)[2:-1]} box")
        if end < start:
            raise ImageError(Reason.HEADER, f"the {ascii(kind)[2:-1]} box has an impossible length")
        yield kind, data[start:end]
        at = end


def _property_numbers(table: memoryview, wanted: int) -> list[int]:
    """The item property association box: the 1-based numbers of one item's properties."""
    item_format = ">H" if table[0] == 0 else ">I"
    wide = table[3] & 1
    (entries,) = struct.unpack_from(">I", table, 4)
    at = 8
    for _ in range(min(entries, PARTS)):
        (item,) = struct.unpack_from(item_format, table, at)
        at += struct.calcsize(item_format)
        count = table[at]
        numbers = struct.unpack_from(f">{count}{'H' if wide else 'B'}", table, at + 1)
        if item == wanted:
            return [number & (0x7FFF if wide else 0x7F) for number in numbers]
        at += 1 + (count << wide)
    return []


READERS: dict[str, Callable[[memoryview], Size]] = {
    "JPEG": lambda data: read_jpeg_frame(data)[:3],
    "PNG": read_png,
    "WEBP": read_webp,
    "GIF": read_gif,
    "TIFF": read_tiff,
    "BMP": read_bmp,
    "PPM": read_pnm,
    "AVIF": read_avif,
    "HEIF": read_heif,
}
