"""The directories of a TIFF, which is also the format of EXIF: which one has the picture, and how its pixels are stored.

Plain Python without native code, like headers.py: bad bytes can only raise an exception.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from itertools import chain

from stages.contract.base import ImageError, Reason

MOST = 10_000  # most directories in a row
# Most entries of a directory, and most parts of any other file, that are searched. Each takes about a
# microsecond and can be a few bytes long. No camera or program writes this many.
PARTS = 1 << 18
EXIF = b"Exif\0\0"  # comes before the TIFF structure in JPEG, and sometimes elsewhere
SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 6: 1, 7: 1, 8: 2, 9: 4, 11: 4, 12: 8, 13: 4, 16: 8, 18: 8}
INTEGERS = {1: "B", 3: "H", 4: "I", 13: "I", 16: "Q", 18: "Q"}
TEXT = 2

NEW_SUBFILE_TYPE, SUBFILE_TYPE, WIDTH, HEIGHT, BITS, COMPRESSION, PHOTOMETRIC = *range(254, 260), 262
FILL_ORDER, MAKE, STRIPS, ORIENTATION, SAMPLES, STRIP_ROWS, STRIP_BYTES = 266, 271, 273, 274, 277, 278, 279
PLANAR, PREDICTOR, COLOR_MAP, TILE_WIDTH, TILE_HEIGHT, TILES, TILE_BYTES = 284, 317, 320, 322, 323, 324, 325
SUB_DIRECTORIES, EXTRA_SAMPLES, SAMPLE_FORMAT, SUBSAMPLING, PROFILE = 330, 338, 339, 530, 34675
NO_DATA, DNG_VERSION = 42113, 50706
COPY_OR_MASK = 1 | 4  # in NewSubfileType
SMALLER_COPY = 2  # in SubfileType, its predecessor

UNSIGNED, SIGNED, FLOAT = 1, 2, 3  # sample formats; 4 is "undefined", and read as unsigned
UNNAMED, MIN_IS_WHITE, MIN_IS_BLACK, RGB, PALETTE, CMYK, YCBCR, LAB = -1, 0, 1, 2, 3, 5, 6, 8
COLORS = {MIN_IS_WHITE: 1, MIN_IS_BLACK: 1, RGB: 3, PALETTE: 1, CMYK: 4, YCBCR: 3, LAB: 3}
SENSORS = (32803, 34892)  # what a camera's sensor saw, which has to be developed
OLD_JPEG, JPEG = 6, 7
FAX = (2, 3, 4)
# None, LZW, deflate, PackBits, LZMA, Zstandard: libtiff in Pillow
BYTEWISE = (1, 5, 8, 32773, 32946, 34925, 50000)
READ_BY_PILLOW = (*FAX, OLD_JPEG, JPEG, 32809)
UNREAD_COMPRESSIONS = {
    34887: "LERC", 34661: "JBIG", 34712: "JPEG 2000", 33003: "JPEG 2000", 33004: "JPEG 2000", 33005: "JPEG 2000",
    34933: "PNG", 34934: "JPEG XR", 50001: "WebP", 50002: "JPEG XL", 52546: "JPEG XL", 34676: "SGI LogLuv", 34677: "SGI LogLuv",
}  # fmt: skip
RAW_COMPRESSIONS = {
    34713: "NEF", 32767: "ARW", 65535: "PEF", 32769: "NEF", 32770: "SRW", 65000: "DCR", 262: "KDC",
}  # fmt: skip
UNREAD_COLORS = {
    UNNAMED: "colors that it does not name", 4: "a mask", 9: "ICC L*a*b*", 10: "ITU L*a*b*", 32844: "LogL", 32845: "LogLuv",
}  # fmt: skip
NUMBERS = {  # what samples are, and the bits that can be read
    UNSIGNED: ("numbers", (*range(1, 17), 24, 32, 64)),
    SIGNED: ("signed numbers", (8, 16, 32, 64)),
    FLOAT: ("floats", (16, 32, 64)),
}
# What Pillow reads right, by photometric interpretation and bits: the kinds of the samples after the colors.
# 0: unspecified, 1: alpha that is multiplied into the colors, 2: alpha. None: not even said.
_NO_EXTRAS: tuple[tuple[int, ...], ...] = ((),)
_ALPHAS = ((), (0,), (0, 0), (0, 0, 0), (1,), (1, 0), (1, 0, 0), (2,), (2, 0), (2, 0, 0), (999,))
PILLOW = {
    **{(photometric, bits): _NO_EXTRAS for photometric in (0, 1, 3) for bits in (1, 2, 4)},
    (MIN_IS_WHITE, 8): _NO_EXTRAS, (MIN_IS_BLACK, 8): ((), (0,), (2,)), (PALETTE, 8): ((), (0,), (2,)),
    (RGB, 8): _ALPHAS, (RGB, 16): ((), (0,), (1,), (2,)), (CMYK, 8): ((), (0,), (0, 0)), (CMYK, 16): _NO_EXTRAS,
    (YCBCR, 8): _NO_EXTRAS, (LAB, 8): _NO_EXTRAS,
}  # fmt: skip


class Directory:
    """One directory of a TIFF or BigTIFF. at: its offset. Raises IndexError or struct.error if it is past the end."""

    def __init__(self, data: memoryview, at: int) -> None:
        self.data, self.at = data, at
        self.order = "<" if bytes(data[:2]) == b"II" else ">"
        self.is_big = struct.unpack_from(self.order + "H", data, 2) == (43,)
        number, self._room = ("Q", 8) if self.is_big else ("I", 4)
        self._entry = struct.Struct(f"{self.order}HH{number}{self._room}s")
        self._number = struct.Struct(self.order + number)
        counter = struct.Struct(self.order + ("Q" if self.is_big else "H"))
        (self._count,) = counter.unpack_from(data, at)
        self._start = at + counter.size

    @property
    def following(self) -> int:
        """Where the next one is; 0 after the last."""
        return int(self._number.unpack_from(self.data, self._start + self._count * self._entry.size)[0])

    @functools.cached_property
    def _entries(self) -> dict[int, tuple[int, int, bytes]]:
        """tag → (type, count, its value or where it is)."""
        end = self._start + min(self._count, PARTS) * self._entry.size
        if end > len(self.data):
            raise IndexError("the directory is past the end")
        listed = self._entry.iter_unpack(self.data[self._start : end])
        return {tag: (kind, count, value) for tag, kind, count, value in listed}

    def place_of(self, tag: int) -> int:
        """Where the value of a tag is, or where it says that it is."""
        return self._start + (list(self._entries).index(tag) + 1) * self._entry.size - self._room

    def raw(self, tag: int) -> bytes:
        """A tag's bytes, as they are; empty if there is none."""
        kind, count, value = self._entries.get(tag, (0, 0, b""))
        size = SIZES.get(kind, 0) * count
        if size <= self._room:
            return value[:size]
        (at,) = self._number.unpack(value)
        if at + size > len(self.data):
            raise IndexError("a value is past the end")
        return bytes(self.data[at : at + size])

    def integers(self, tag: int, *default: int) -> tuple[int, ...]:
        letter = INTEGERS.get(self._entries.get(tag, (0, 0, b""))[0])
        raw = self.raw(tag) if letter else b""
        found: tuple[int, ...] = ()
        if letter and raw:
            found = struct.unpack(f"{self.order}{len(raw) // struct.calcsize('=' + letter)}{letter}", raw)
        return found or default

    def integer(self, tag: int, default: int = 0) -> int:
        return self.integers(tag, default)[0]

    def text(self, tag: int) -> str:
        raw = self.raw(tag) if self._entries.get(tag, (0, 0, b""))[0] == TEXT else b""
        return raw.split(b"\0")[0].decode("ascii", "replace").strip()

    @functools.cached_property
    def is_copy(self) -> bool:
        """Whether it is a smaller copy or a mask. Tags are sorted, so that those that say so come first."""
        for entry in range(min(self._count, 2)):
            tag, kind, _, value = self._entry.unpack_from(self.data, self._start + entry * self._entry.size)
            letter = INTEGERS.get(kind, "I")
            (number,) = struct.unpack_from(self.order + letter, value)
            if (tag == NEW_SUBFILE_TYPE and number & COPY_OR_MASK) or (
                tag == SUBFILE_TYPE and number == SMALLER_COPY
            ):
                return True
        return False

    @functools.cached_property
    def orientation(self) -> int:
        orientation = self.integer(ORIENTATION, 1)
        return orientation if 1 <= orientation <= 8 else 1

    # How its pixels are stored

    @functools.cached_property
    def compression(self) -> int:
        return self.integer(COMPRESSION, 1)

    @functools.cached_property
    def photometric(self) -> int:
        """UNNAMED if it is not stated, and does not follow from the number of channels as for libtiff."""
        if self.compression == OLD_JPEG:
            return YCBCR
        usual = UNNAMED
        if self.compression in FAX:
            usual = MIN_IS_WHITE
        elif self.compression in BYTEWISE:
            colors = self.samples - len(self.integers(EXTRA_SAMPLES))
            usual = {1: MIN_IS_BLACK, 3: RGB}.get(colors, UNNAMED)
        return self.integer(PHOTOMETRIC, usual)

    @functools.cached_property
    def samples(self) -> int:
        usual = 3 if self.compression == OLD_JPEG else 1
        return self.integer(SAMPLES, usual)

    @functools.cached_property
    def bits(self) -> int:
        """Bits of each sample; 0 if they differ."""
        bits = self.integers(BITS, 1)[: max(self.samples, 1)]
        return bits[0] if len(set(bits)) == 1 else 0

    @functools.cached_property
    def kind(self) -> int:
        """UNSIGNED, SIGNED, FLOAT or another number; 0 if the samples differ."""
        kinds = set(self.integers(SAMPLE_FORMAT, UNSIGNED))
        kind = kinds.pop() if len(kinds) == 1 else 0
        return UNSIGNED if kind == 4 else kind

    @functools.cached_property
    def is_planar(self) -> bool:
        return self.samples > 1 and self.integer(PLANAR, 1) == 2

    @property
    def is_tiled(self) -> bool:
        return bool(self.integers(TILE_WIDTH) or self.integers(TILES))

    @property
    def parts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Where the strips or tiles are, and their lengths. Tiles may be listed as strips; if both are listed, tiles count."""
        lengths = self.integers(TILE_BYTES) or self.integers(STRIP_BYTES)
        return self.integers(TILES) or self.integers(STRIPS), lengths

    @property
    def palette(self) -> bytes:
        """The red of all its colors, then green and blue, one byte each. As for libtiff, a table without a number above 255
        has 8 bits."""
        table = self.integers(COLOR_MAP)[: 3 << self.bits]
        shift = 8 if max(table, default=0) > 255 else 0
        return bytes(number >> shift & 255 for number in table)

    @functools.cached_property
    def is_deep(self) -> bool:
        """Whether samples.py reads it. Pillow does not know these layouts, or is wrong about them, but reads all that is
        compressed as a picture."""
        if self.compression not in BYTEWISE:
            return False
        extras = self.integers(EXTRA_SAMPLES)
        if extras not in PILLOW.get((self.photometric, self.bits), ()) or self.kind != UNSIGNED:
            return True
        if not self.integers(PHOTOMETRIC) or self._has_odd_planes or self._has_odd_bytes:
            return True
        # Extra samples that no tag names.
        unnamed = self.samples - COLORS[self.photometric] - len(extras)
        return unnamed != 0 and not (self.photometric == RGB and unnamed == 1 and not extras)

    @property
    def _has_odd_planes(self) -> bool:
        if not self.is_planar:
            return False
        is_other = self.photometric in (YCBCR, LAB) or COLORS[self.photometric] == 1
        return self.bits != 8 or is_other or self.integers(EXTRA_SAMPLES) not in ((), (2,))

    @property
    def _has_odd_bytes(self) -> bool:
        is_reversed = self.bits > 1 and self.integer(FILL_ORDER, 1) == 2
        is_mixed = self.is_tiled and bool(self.integers(STRIPS))  # Pillow would look for strips
        has_gaps = self._has_gaps and self.photometric not in (YCBCR, LAB)
        return self._is_big_endian or is_reversed or is_mixed or has_gaps

    @property
    def _is_big_endian(self) -> bool:
        """Whether it is a BigTIFF with the highest byte first, in which Pillow finds no size."""
        return self.is_big and self.order == ">"

    @property
    def _has_gaps(self) -> bool:
        """Whether it does not say of all strips or tiles where they are and how long: it may have left out empty ones."""
        offsets, sizes = self.parts
        return 0 in offsets or 0 in sizes or len(sizes) < len(offsets)

    def refuse(self) -> None:
        """Raises ImageError (FORMAT) for pixels that cannot be read, and names them."""
        rules = chain(self._unread_compressions(), self._unread_colors(), self._unread_samples())
        if unread := next((what for is_so, what in rules if is_so), ""):
            raise ImageError(
                Reason.FORMAT, f"a TIFF with {unread} is not supported: save it as TIFF or PNG, 8-bit RGB"
            )

    def _unread_compressions(self) -> Iterator[tuple[bool, str]]:
        extra = self.integers(EXTRA_SAMPLES)
        yield (
            self.compression in FAX and (self.bits, self.samples) != (1, 1),
            f"fax compression of {self.bits}-bit pixels",
        )
        is_jpeg, bits = self.compression in (OLD_JPEG, JPEG), self.bits or "unequal"
        yield is_jpeg and self.bits != 8, f"JPEG compression of {bits} bits a channel"
        is_odd = extra not in PILLOW.get((self.photometric, 8), (extra,))
        yield self.compression == JPEG and is_odd, f"JPEG compression of {self.samples} channels"
        is_whole = self.compression not in BYTEWISE
        yield self._is_big_endian and is_whole, "fax or JPEG compression in a big-endian BigTIFF"
        name = UNREAD_COMPRESSIONS.get(self.compression, f"unknown ({self.compression})")
        yield is_whole and self.compression not in READ_BY_PILLOW, f"{name} compression"

    def _unread_colors(self) -> Iterator[tuple[bool, str]]:
        colors, least = self.photometric, COLORS.get(self.photometric, 0)
        yield not least, UNREAD_COLORS.get(colors, f"an unknown color space ({colors})")
        is_short = self.samples < least and (colors, self.samples) != (YCBCR, 1)
        yield is_short, f"only {self.samples} of {least} color channels"
        name = "L*a*b*" if colors == LAB else "YCbCr"
        yield self.is_deep and colors in (YCBCR, LAB), f"{name} colors of {self.bits} bits in this layout"
        is_plain = colors == YCBCR and self.compression == 1
        is_lower = is_plain and self.integers(SUBSAMPLING, 2, 2) != (1, 1)
        yield is_lower, "uncompressed YCbCr colors of a lower resolution"

    def _unread_samples(self) -> Iterator[tuple[bool, str]]:
        yield not self.bits, "channels of different bits"
        if not self.is_deep:
            return
        yield self.kind in (5, 6), "complex numbers"
        yield self.kind not in NUMBERS, "channels of different types"
        name, known = NUMBERS[self.kind]
        yield self.bits not in known, f"{self.bits}-bit {name}"
        alphas = {1, 2}.intersection(self.integers(EXTRA_SAMPLES))
        is_multiplied = self.photometric == MIN_IS_WHITE and 1 in alphas
        yield is_multiplied, "inverted gray and alpha that is multiplied into it"
        yield self.kind == SIGNED and bool(alphas), "signed numbers and alpha"
        predictor = self.integer(PREDICTOR, 1)
        is_odd = predictor not in (1, 2, 3) or (predictor == 2 and self.bits not in (8, 16, 32, 64))
        yield is_odd, f"predictor {predictor} for {self.bits}-bit numbers"
        yield predictor == 3 and self.kind != FLOAT, "a predictor for floats, but whole numbers"


def walk(data: memoryview) -> Iterator[Directory]:
    """The directories in a row, without sub-directories, at most MOST."""
    number, at = ("Q", 8) if _is_big(data) else ("I", 4)
    (at,) = struct.unpack_from(("<" if bytes(data[:2]) == b"II" else ">") + number, data, at)
    seen: set[int] = set()
    while at and at not in seen and len(seen) < MOST:
        seen.add(at)
        yield (found := Directory(data, at))
        at = found.following


def _is_big(data: memoryview) -> bool:
    return bytes(data[2:4]) in (b"+\0", b"\0+")


SEARCHED = 64  # directories that are searched for the picture


def find_picture(data: memoryview) -> Directory:
    """The directory of the first picture that is no smaller copy or mask: in the row, or below another one.
    If all are marked as copies, the largest.

    Raises ImageError: FORMAT for camera raw, HEADER if there is no directory.
    """
    row = walk(data)
    first = next(row, None)
    if first is None:
        raise ImageError(Reason.HEADER, "the TIFF has no picture")
    parts = _tree(first)
    try:
        while len(parts) < SEARCHED and (other := next(row, None)):
            parts += _tree(other)
    except (struct.error, IndexError):  # a document may be cut off after the page that is read
        if all(part.is_copy for part in parts):
            raise
    _refuse_raw(data, parts)
    largest = max(parts, key=lambda part: part.integer(WIDTH) * part.integer(HEIGHT))
    return next((part for part in parts if not part.is_copy), largest)


def _tree(top: Directory) -> list[Directory]:
    """A directory and those below it, at any depth."""
    found: dict[int, Directory] = {}
    waiting = [top]
    while waiting and len(found) < SEARCHED:
        part = waiting.pop()
        if part.at not in found:
            found[part.at] = part
            below = part.integers(SUB_DIRECTORIES)[:SEARCHED]
            waiting += [Directory(part.data, at) for at in reversed(below)]
    return list(found.values())


def _refuse_raw(data: memoryview, parts: list[Directory]) -> None:
    """Camera raw is a TIFF with a small picture for lists, and what the sensor saw."""
    first = parts[0]
    signs = {
        "DNG": first.raw(DNG_VERSION),
        "CR2": bytes(data[8:10]) == b"CR",
        "IIQ": bytes(data[8:12]) == b"IIII",
    }
    names = [name for name, is_there in signs.items() if is_there]
    names += [RAW_COMPRESSIONS[part.compression] for part in parts if part.compression in RAW_COMPRESSIONS]
    names += [first.text(MAKE) or "TIFF" for part in parts if part.photometric in SENSORS]
    if names:
        raise ImageError(
            Reason.FORMAT,
            f"camera raw ({ascii(names[0])[1:-1]}) is not supported: develop it, and save it as JPEG or TIFF",
        )


def read_tiff(data: memoryview) -> tuple[int, int, int]:
    """Width and height as stored, and orientation, of the first picture."""
    picture = find_picture(data)
    width, height = picture.integer(WIDTH), picture.integer(HEIGHT)
    if not width or not height:
        raise ImageError(Reason.HEADER, "the first page of the TIFF states no size")
    picture.refuse()
    return width, height, picture.orientation


def read_orientation(exif: memoryview) -> int:
    """The orientation in an EXIF block; 1 if it is missing, malformed or out of range."""
    if bytes(exif[:6]) == EXIF:
        exif = exif[6:]
    if bytes(exif[:2]) not in (b"II", b"MM"):
        return 1
    try:
        first = next(walk(exif), None)
        return first.orientation if first else 1
    except (struct.error, IndexError):
        return 1


def wrap(raw: memoryview, compression: int, fill_order: int, width: int, height: int) -> bytes:
    """A TIFF of one strip of 8-bit gray. libtiff, by way of Pillow, is then a decompressor for bytes of any meaning."""
    tags = {
        WIDTH: width, HEIGHT: height, BITS: 8, COMPRESSION: compression, PHOTOMETRIC: 1,
        FILL_ORDER: fill_order, STRIPS: 0, SAMPLES: 1, STRIP_ROWS: height, STRIP_BYTES: len(raw),
    }  # fmt: skip
    tags[STRIPS] = 8 + 2 + 12 * len(tags) + 4
    # All as 32-bit numbers, but those that are 16-bit by the standard.
    short = (BITS, COMPRESSION, PHOTOMETRIC, FILL_ORDER, SAMPLES)
    entries = b"".join(struct.pack("<HHII", tag, 3 if tag in short else 4, 1, tags[tag]) for tag in tags)
    return struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + entries + bytes(4) + raw
