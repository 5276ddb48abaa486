"""Pixels with more than 8 bits, and those in layouts that Pillow does not know, as 8-bit pictures. Needs numpy, so a
decoder's child imports it only for these (`Header.is_deep`), before it is sealed.

There is one rule for what is black and what is white (`_find_range`), and one conversion by it (`to_8_bits`).
"""

from __future__ import annotations

import io
import struct
import zlib
from bisect import bisect_left
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from PIL.TiffImagePlugin import TiffImageFile

from stages.contract.base import ImageError, Reason
from stages.images import tiff
from stages.images.tiff import CMYK, FLOAT, MIN_IS_WHITE, PALETTE, RGB, UNSIGNED, Directory

Array = np.ndarray[Any, np.dtype[Any]]

DEFLATE = (8, 32946)  # of Adobe, and the older number
STRIP_VALUES = 1 << 20  # converted at once, which limits the additional memory
SMALL_PART = 8  # unsigned numbers in less than one of so many parts of their range are stretched
LEAST_LEVELS = 255  # … if they have at least so many levels: fewer are the noise of an empty page
RARE = 10_000  # one in so many values may be an outlier, at each end
FAR = 16  # outliers make the range of all others smaller than one of so many parts
HUGE = 1e30  # programs mark values that are missing with the largest float, or nearly
MISSING = (-9999, -99999, -32768)  # … or with one of these, far below all others


# From numbers to gray levels
# --------------------------------------------------------------------------------------------------------------------


def to_8_bits(
    values: Array, *, bits: int = 0, colors: int = 1, no_data: float | None = None, inverted: bool = False
) -> Array:
    """[h, w, samples] → uint8 of the same shape, black as 0. Missing values (of signed numbers and floats) are white.

    bits: of unsigned numbers, from 0 to 2^bits - 1; 0 for signed ones and floats, which have no standard range.
    colors: how many of the samples are colors; the rest is alpha, which is never stretched. inverted: 0 is white.
    """
    seen = values[..., :colors]
    if not bits and no_data is None:
        no_data = _guess_no_data(seen)
    low, high = _find_range(seen, bits, no_data, is_plain_gray=values.shape[2] == 1)
    out = np.empty(values.shape, np.uint8)
    for rows in _strips(values):
        gray = _scale(seen[rows], low, high, bits)
        out[rows, :, :colors] = 255 - gray if inverted else gray
        out[rows, :, colors:] = _scale(values[rows][..., colors:], 0, _alpha_top(values, bits), bits)
        if not bits:
            out[rows, :, :colors][_is_missing(seen[rows], no_data).any(-1)] = 255
    return out


def _alpha_top(values: Array, bits: int) -> float:
    if bits:
        return (1 << bits) - 1
    return 1 if values.dtype.kind == "f" else float(np.iinfo(values.dtype).max)


def _strips(values: Array) -> Iterator[slice]:
    step = max(1, STRIP_VALUES // values[0].size)
    return (slice(top, top + step) for top in range(0, len(values), step))


def _scale(values: Array, low: float, high: float, bits: int) -> Array:
    """As Pillow does: rounded down after a half is added; floats by way of float32; colors of 16 bits by their high byte."""
    if values.shape[2] >= 3 and (low, high, bits) == (0, 65535, 16):
        return (values >> 8).astype(np.uint8)
    scale = 255 / (high - low) if high > low else 0.0
    if 0 < bits <= 16:  # a table is faster
        levels = np.arange(1 << bits) * scale + (0.5 - low * scale)
        table: Array = levels.clip(0, 255).astype(np.uint8)
        return table[values]
    with np.errstate(all="ignore"):  # of values that are missing
        levels = np.asarray(values, np.float64) * scale + (0.5 - low * scale)
        levels = levels.astype(np.float32) if values.dtype.kind == "f" else levels
        return np.nan_to_num(levels).clip(0, 255).astype(np.uint8)


def _is_missing(values: Array, no_data: float | None) -> Array:
    missing = np.zeros(values.shape, bool)
    with np.errstate(all="ignore"):
        if values.dtype.kind == "f":
            missing |= ~(np.abs(values) < values.dtype.type(HUGE))  # also what is not a number
        if no_data is not None:
            missing |= values == (values.dtype.type(no_data) if values.dtype.kind == "f" else no_data)
    return missing


def _guess_no_data(values: Array) -> float | None:
    known = values[~_is_missing(values, None)]
    low = float(known.min()) if known.size else 0.0
    others = known[known > low]
    if low not in MISSING or not others.size:
        return None
    least, most = float(others.min()), float(others.max())
    return low if 0 < most - least < least - low else None


def _find_range(
    values: Array, bits: int, no_data: float | None, *, is_plain_gray: bool
) -> tuple[float, float]:
    """What becomes black, and what white. Of signed numbers and floats: from the darkest to the brightest, without missing
    values and a few outliers; floats of colors, or with alpha, from 0 to 1 if all are in between."""
    if bits:
        is_gray = bits > 8 and is_plain_gray  # dark colors stay dark
        return _find_used_part(values, bits, no_data) if is_gray else (0, (1 << bits) - 1)
    low, high = _find_ends(values[~_is_missing(values, no_data)])
    is_usual = values.dtype.kind == "f" and not is_plain_gray and low >= 0 and 1 / SMALL_PART < high <= 1
    return (0, 1) if is_usual or low == high else (low, high)


def _find_used_part(values: Array, bits: int, no_data: float | None) -> tuple[float, float]:
    """What is used of the range of unsigned numbers, if that is a small part, as 12-bit sensors do in 16 bits; or all of it."""
    top = (1 << bits) - 1
    low, high = _find_ends(values if no_data is None else values[~_is_missing(values, no_data)])
    return (low, high) if LEAST_LEVELS <= high - low < top / SMALL_PART else (0, top)


def _find_ends(values: Array) -> tuple[float, float]:
    """The least and the greatest value, without outliers: values so rare and so far away that all others would
    be nearly equal."""
    if not values.size:
        return 0, 0
    low, high = values.min().item(), values.max().item()
    sample = values.reshape(-1)[:: 1 + (values.size >> 20)]
    rare = 1 + sample.size // RARE
    if sample.size > 2 * rare:
        parted = np.partition(sample, (rare, sample.size - 1 - rare))
        least, most = parted[rare].item(), parted[-1 - rare].item()
        if 0 < most - least < (high - low) / FAR:
            return least, most
    return low, high


def reduce_depth(image: Image.Image, significant_bits: int = 16) -> Image.Image:
    """A picture of Pillow's modes for more than 8 bits of gray, as L, or LA if it has a transparent value.

    significant_bits: see _find_used_bits.
    """
    values = np.asarray(image)
    values = values.astype(values.dtype.newbyteorder("="), copy=False)[..., None]
    clear = image.info.get("transparency")
    if image.mode == "I":  # of netpbm; Pillow has scaled it to 16 bits
        values = values.clip(0, 65535).astype(np.uint16)
    bits = _find_used_bits(values, significant_bits)
    gray = to_8_bits(values, bits=bits)
    if not isinstance(clear, int):
        return Image.fromarray(gray[..., 0])
    return Image.fromarray(np.concatenate([gray, np.where(values == clear, 0, 255).astype(np.uint8)], -1))


def reduce_colors(png: bytes, significant_bits: int) -> Image.Image:
    """A PNG of 16 bits with colors or alpha, in mode LA, RGB or RGBA. Pillow keeps the higher 8 bits, before it looks for the
    color that is transparent. significant_bits: see _find_used_bits."""
    from imagecodecs import png_decode

    values = png_decode(png)
    colors = 1 if values.shape[2] == 2 else 3
    bits = _find_used_bits(values[..., :colors], significant_bits)
    alpha = values[..., colors:]
    if bits == 16:
        return Image.fromarray((values >> 8).astype(np.uint8))
    if alpha.max(initial=0) >> bits:
        alpha >>= 16 - bits
    return Image.fromarray(to_8_bits(values, bits=bits, colors=colors))


def _find_used_bits(values: Array, significant_bits: int) -> int:
    """A PNG should fill 16 bits, and say how many of them are significant. If no value needs more, they are the lower ones."""
    return 16 if values.max() >> significant_bits else significant_bits


# TIFF
# --------------------------------------------------------------------------------------------------------------------


def read_tiff(picture: Directory) -> Image.Image:
    """A picture that `is_deep`, as stored (not turned), in mode L, LA, RGB, RGBA or CMYK.

    Raises ImageError: TRUNCATED, HEADER; OSError of the decompressor.
    """
    colors = tiff.COLORS[picture.photometric]
    alpha, is_multiplied = _find_alpha(picture, colors)
    kept = [*range(colors), *([alpha] if alpha else [])]
    values = _read_samples(picture, kept)
    if picture.photometric == PALETTE:
        return _paint(picture, values)
    missing = picture.text(tiff.NO_DATA)
    out = to_8_bits(
        values,
        bits=picture.bits if picture.kind == UNSIGNED else 0,
        colors=colors,
        no_data=_number_of(missing),
        inverted=picture.photometric == MIN_IS_WHITE,
    )
    del values
    mode = "CMYK" if picture.photometric == CMYK else {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}[len(kept)]
    stored = {"LA": "La", "RGBA": "RGBa"}[mode] if is_multiplied else mode
    image = Image.frombuffer(stored, (out.shape[1], out.shape[0]), out, "raw", stored, 0, 1)
    image = image.convert(mode) if is_multiplied else image
    if profile := picture.raw(tiff.PROFILE):
        image.info["icc_profile"] = profile
    return image


def _find_alpha(picture: Directory, colors: int) -> tuple[int, bool]:
    """The number of the sample that is alpha, 0 if none is; and whether it is multiplied into the colors."""
    extras = picture.integers(tiff.EXTRA_SAMPLES)
    if picture.photometric == RGB and not extras and picture.samples == 4:
        extras = (2,)  # as Pillow and others understand it
    if picture.photometric == CMYK:
        return 0, False
    numbered = zip(range(colors, picture.samples), extras, strict=False)
    return next(((number, extra == 1) for number, extra in numbered if extra in (1, 2)), (0, False))


def _number_of(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _paint(picture: Directory, values: Array) -> Image.Image:
    table = np.frombuffer(picture.palette, np.uint8)
    if table.size < 3 << picture.bits:
        raise ImageError(Reason.HEADER, "the TIFF's palette is too short")
    colors = table.reshape(3, -1).T[values[..., 0]]
    alpha = _scale(values[..., 1:], 0, (1 << picture.bits) - 1, picture.bits)
    return Image.fromarray(np.concatenate([colors, alpha], -1))


class StripOrTile(NamedTuple):
    """A strip or tile, with all samples or with one plane of them. rows: how many are in the file; those of a tile may be
    outside of the picture, as may its columns."""

    top: int
    left: int
    rows: int
    columns: int
    row_bytes: int  # without compression
    at: int
    bytes: int


def _read_samples(picture: Directory, kept: list[int]) -> Array:
    """[h, w, kept] in the machine's byte order. kept: which samples."""
    width, height = picture.integer(tiff.WIDTH), picture.integer(tiff.HEIGHT)
    values = np.zeros((height, width, len(kept)), _type_of(picture))
    per_pixel = 1 if picture.is_planar else picture.samples
    for place, plane in enumerate(kept) if picture.is_planar else [(0, 0)]:
        for part in _segments(picture, plane, width, height):
            found = _decode(picture, _unpack(picture, part), per_pixel)
            target = values[part.top : part.top + part.rows, part.left : part.left + part.columns]
            found = found[:, : part.columns * per_pixel].reshape(part.rows, part.columns, per_pixel)
            found = found[: target.shape[0], : target.shape[1]]
            if picture.is_planar:
                target[..., place] = found[..., 0]
            else:
                target[:] = found[..., kept]
    return values


def _type_of(picture: Directory) -> np.dtype[Any]:
    size = next(size for size in (1, 2, 4, 8) if picture.bits <= 8 * size)
    return np.dtype(f"{ {UNSIGNED: 'u', FLOAT: 'f'}.get(picture.kind, 'i') }{size}".replace(" ", ""))


def _segments(picture: Directory, plane: int, width: int, height: int) -> Iterator[StripOrTile]:
    """Those of one plane, or of all samples, without those that a program has left out because they are empty."""
    offsets, lengths = picture.parts
    if picture.is_tiled:
        columns, rows = picture.integer(tiff.TILE_WIDTH), picture.integer(tiff.TILE_HEIGHT)
    else:
        columns, rows = width, min(picture.integer(tiff.STRIP_ROWS, height), height)
    if 0 in (columns, rows):
        raise ImageError(Reason.HEADER, "the TIFF has strips or tiles without a size")
    across = -(-width // columns)
    count = across * -(-height // rows)
    listed = list(zip_longest(offsets, lengths[: len(offsets)], fillvalue=0))[plane * count :][:count]
    if len(listed) < count:
        raise ImageError(Reason.HEADER, "the TIFF lists fewer strips or tiles than it has")
    row_bytes = -(-columns * (1 if picture.is_planar else picture.samples) * picture.bits // 8)
    places = sorted(offsets)
    for number, (at, size) in enumerate(listed):
        top = number // across * rows
        whole = rows if picture.is_tiled else min(rows, height - top)
        size = _find_bytes(picture, places, at, size, whole * row_bytes)
        if not (at and size):
            continue
        if at + size > len(picture.data):
            raise ImageError(Reason.TRUNCATED, "the file ends before its pixels do")
        yield StripOrTile(top, number % across * columns, whole, columns, row_bytes, at, size)


def _find_bytes(picture: Directory, places: list[int], at: int, stated: int, plain: int) -> int:
    """The length of a strip or tile; 0 if it is left out, and so has no place of its own. places: of all, sorted.
    stated: may be 0. plain: its length without compression."""
    if picture.compression == 1 and len(places) == 1:
        return plain  # as libtiff does: the stated length may be wrong
    if stated:
        return stated
    here = bisect_left(places, at)
    if places[here : here + 2] == [at, at]:
        return 0
    if picture.compression == 1:
        return plain
    return max(1, min((*places[here + 1 : here + 2], len(picture.data))) - at)


def _unpack(picture: Directory, part: StripOrTile) -> Array:
    """The bytes of a segment, decompressed: [rows, row_bytes]."""
    raw = picture.data[part.at : part.at + part.bytes]
    fill_order = picture.integer(tiff.FILL_ORDER, 1)
    if picture.compression == 1:
        if len(raw) < part.rows * part.row_bytes:
            raise ImageError(Reason.TRUNCATED, "the TIFF has fewer pixels than it states")
        found = np.frombuffer(raw, np.uint8, part.rows * part.row_bytes)
        if fill_order == 2:
            found = np.packbits(np.unpackbits(found, bitorder="little"))
    elif picture.compression in DEFLATE and fill_order == 1:  # there may be thousands of strips of one row
        try:
            found = np.frombuffer(zlib.decompressobj().decompress(raw, part.rows * part.row_bytes), np.uint8)
        except zlib.error as error:
            raise OSError(f"deflate: {error}") from None
        if len(found) < part.rows * part.row_bytes:
            raise ImageError(Reason.TRUNCATED, "the TIFF has fewer pixels than it states")
    else:
        with TiffImageFile(
            io.BytesIO(tiff.wrap(raw, picture.compression, fill_order, part.row_bytes, part.rows))
        ) as image:
            found = np.frombuffer(image.tobytes(), np.uint8)
    return found.reshape(part.rows, part.row_bytes)


def _decode(picture: Directory, rows: Array, per_pixel: int) -> Array:
    """Bytes → [rows, numbers], without the predictor."""
    bits, count = picture.bits, len(rows)
    predictor = picture.integer(tiff.PREDICTOR, 1) if picture.compression not in (1, 32773) else 1
    size = bits // 8
    if predictor == 3:
        levels = rows.reshape(count, -1, per_pixel).cumsum(1, np.uint8).reshape(count, size, -1)
        raw = np.ascontiguousarray(levels.transpose(0, 2, 1)).reshape(count, -1)
        return raw.view(f">f{size}").astype(_type_of(picture))
    if bits == 24:
        parts = rows.reshape(count, -1, 3).astype(np.uint32)
        parts = parts if picture.order == ">" else parts[..., ::-1]
        return parts[..., 0] << 16 | parts[..., 1] << 8 | parts[..., 2]
    if bits not in (8, 16, 32, 64):
        return _split_bits(rows, bits).astype(_type_of(picture))
    kind = _type_of(picture)
    if predictor == 2:
        whole = np.ascontiguousarray(rows).view(f"{picture.order}u{size}").astype(f"u{size}")
        return whole.reshape(count, -1, per_pixel).cumsum(1, whole.dtype).reshape(count, -1).view(kind)
    return np.ascontiguousarray(rows).view(f"{picture.order}{kind.kind}{size}").astype(kind)


def _split_bits(rows: Array, bits: int) -> Array:
    """Numbers of up to 16 bits without gaps, the highest bit first; each row begins with a new byte."""
    first = np.arange(rows.shape[1] * 8 // bits) * bits
    padded = np.pad(rows, ((0, 0), (0, 2))).astype(np.uint32)
    at = first >> 3
    words = padded[:, at] << 16 | padded[:, at + 1] << 8 | padded[:, at + 2]
    return words >> (24 - bits - (first & 7)).astype(np.uint32) & ((1 << bits) - 1)


# BMP
# --------------------------------------------------------------------------------------------------------------------


def read_bmp(data: memoryview, masks: tuple[int, ...]) -> Image.Image:
    """A BMP of 16 or 32 bits a pixel with masks that Pillow does not know. masks: red, green, blue, and alpha or 0."""
    (start,) = struct.unpack_from("<I", data, 10)
    width, height, _, bits = struct.unpack_from("<iiHH", data, 18)
    row_bytes = -(-width * bits // 32) * 4
    if start + row_bytes * abs(height) > len(data):
        raise ImageError(Reason.TRUNCATED, "the file ends before its pixels do")
    raw = np.frombuffer(data[start:], np.uint8, row_bytes * abs(height)).reshape(abs(height), row_bytes)
    numbers = raw.view(f"<u{bits // 8}")[:: -1 if height > 0 else 1, :width]
    bands = []
    for mask in masks if masks[3] else masks[:3]:
        levels = (numbers & numbers.dtype.type(mask)).astype(np.float64) * (255 / mask if mask else 0)
        bands.append((levels + 0.5).astype(np.uint8))
    return Image.fromarray(np.stack(bands, -1))
