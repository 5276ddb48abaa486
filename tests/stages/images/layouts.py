"""Layouts of pixels: the same picture in every form that TIFF, PNG, BMP, GIF and netpbm can give it, made in code.

Each `Layout` has the file and the picture that a reader must show: 8-bit RGB, with some tolerance for depths below 8 bits
and for lossy compression. `python -m tests.stages.images.layouts` prints for each what visiond makes of it.
"""

from __future__ import annotations

import itertools
import lzma
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from stages.contract.base import ImageError, Limits, Reason
from stages.images.decoder import Decoder
from stages.images.images import inspect
from tests.inputs import chunk, encode

Pixels = np.ndarray[Any, np.dtype[Any]]

WIDTH, HEIGHT = 67, 41  # multiples of nothing: rows end inside a byte, tiles stick out
TYPES = {1: "u", 2: "i", 3: "f"}


class Layout(NamedTuple):
    """shown: [h, w, 3] uint8. tolerance: most difference of a value, in gray levels; mean: of the mean difference."""

    name: str
    data: bytes
    shown: Pixels
    tolerance: float = 1.0
    mean: float = 1.0


@cache
def color() -> Pixels:
    """Ramps in all directions, and dark text on them, over the whole range of each channel."""
    across = np.linspace(0, 255, WIDTH)[None, :] + np.zeros((HEIGHT, 1))
    down = np.linspace(255, 0, HEIGHT)[:, None] + np.zeros((1, WIDTH))
    image = Image.fromarray(np.stack([across, down, 255 - across], -1).round().astype(np.uint8))
    ImageDraw.Draw(image).text((4, 12), "TOTAL 12.5", fill=(20, 0, 60))
    pixels = np.asarray(image).copy()
    pixels[0, 0], pixels[-1, -1] = 0, 255
    return pixels


@cache
def gray() -> Pixels:
    ramp = np.linspace(0, 255, WIDTH)[None, :] + np.zeros((HEIGHT, 1))
    image = Image.fromarray(ramp.round().astype(np.uint8))
    ImageDraw.Draw(image).text((4, 12), "TOTAL 12.5", fill=10)
    pixels = np.asarray(image).copy()
    pixels[0, 0], pixels[-1, -1] = 0, 255
    return pixels


@cache
def opacity() -> Pixels:
    """Mostly opaque, from the right to the left."""
    ramp = np.linspace(512, 0, WIDTH)[None, :].clip(0, 255) + np.zeros((HEIGHT, 1))
    return ramp.round().astype(np.uint8)


def on_white(pixels: Pixels, alpha: Pixels) -> Pixels:
    share = alpha[..., None].astype(float) / 255
    return (pixels * share + 255 * (1 - share)).round().astype(np.uint8)


def to_rgb(pixels: Pixels) -> Pixels:
    return np.repeat(pixels[..., None], 3, -1) if pixels.ndim == 2 else pixels


# TIFF
# --------------------------------------------------------------------------------------------------------------------


def pack_samples(values: Pixels, bits: int, kind: int, order: str) -> bytes:
    """[rows, columns of samples] as 0..1 → the bytes of each row, which begins with a new byte."""
    if kind == 3:
        return values.astype(f"{order}f{bits // 8}").tobytes()
    top = (1 << bits) - 1
    if bits in (8, 16, 32):
        numbers = (values * top).round().astype(np.int64)
        return (numbers - (1 << bits - 1) * (kind == 2)).astype(f"{order}{TYPES[kind]}{bits // 8}").tobytes()
    whole = [[min(round(value * top), top) for value in row] for row in values.tolist()]
    if kind == 2:
        whole = [[value - (1 << bits - 1) for value in row] for row in whole]
    if bits == 64:
        return np.array(whole, f"{order}{TYPES[kind]}{bits // 8}").tobytes()
    if bits % 8 == 0:
        return b"".join(
            value.to_bytes(bits // 8, "little" if order == "<" else "big") for row in whole for value in row
        )
    packed = bytearray()
    for row in whole:
        line = "".join(f"{value & top:0{bits}b}" for value in row)
        line += "0" * (-len(line) % 8)
        packed += int(line, 2).to_bytes(len(line) // 8, "big")
    return bytes(packed)


def difference(data: bytes, rows: int, bits: int, samples: int, order: str) -> bytes:
    """TIFF's predictor 2."""
    values = np.frombuffer(data, f"{order}u{bits // 8}").reshape(rows, -1, samples)
    changed = values.copy()
    changed[:, 1:] -= values[:, :-1]
    return changed.tobytes()


def difference_floats(data: bytes, rows: int, bits: int, samples: int, order: str) -> bytes:
    """TIFF's predictor 3: bytes of the same weight together, the highest first, and then their differences."""
    values = np.frombuffer(data, f"{order}u{bits // 8}").reshape(rows, -1).astype(f">u{bits // 8}")
    planes = values.view(np.uint8).reshape(rows, -1, bits // 8).transpose(0, 2, 1).reshape(rows, -1)
    changed = planes.copy()
    changed[:, samples:] -= planes[:, :-samples]
    return changed.tobytes()


def lzw(data: bytes) -> bytes:
    """TIFF's LZW: the highest bit first, and codes that become wider one code early."""
    codes: dict[bytes, int] = {bytes((value,)): value for value in range(256)}
    number, held = 0, 0

    def write(code: int) -> None:
        nonlocal number, held
        wide = max(9, (len(codes) + 2).bit_length())
        number, held = number << wide | code, held + wide

    write(256)
    prefix = b""
    for value in data:
        longer = prefix + bytes((value,))
        if longer in codes:
            prefix = longer
            continue
        write(codes[prefix])
        codes[longer] = len(codes) + 2
        prefix = longer[-1:]
        if len(codes) >= 4092:
            write(256)
            codes = {bytes((single,)): single for single in range(256)}
    if prefix:
        write(codes[prefix])
        codes[b"the end"] = 0
    write(257)
    padding = -held % 8
    return (number << padding).to_bytes((held + padding) // 8, "big")


def pack_bits(data: bytes, row_bytes: int) -> bytes:
    """Runs of at least three equal bytes, and everything else as it is; each row alone."""
    packed = bytearray()
    for at in range(0, len(data), row_bytes):
        plain = bytearray()
        groups = [(key, len(list(run))) for key, run in itertools.groupby(data[at : at + row_bytes])]
        for key, length in [*groups, (0, 0)]:
            if length < 3:
                plain += bytes((key,)) * length
            if plain and (length >= 3 or not length or len(plain) > 120):
                packed += bytes((len(plain) - 1,)) + plain
                plain.clear()
            while length >= 3:
                run = min(length, 128)
                packed += bytes((257 - run & 0xFF, key)) if run > 1 else bytes((0, key))
                length -= run
                if length in (1, 2):
                    packed += bytes((length - 1,)) + bytes((key,)) * length
                    length = 0
    return bytes(packed)


COMPRESSIONS = {"none": 1, "lzw": 5, "deflate": 8, "packbits": 32773, "lzma": 34925}


def compress(data: bytes, how: str, row_bytes: int) -> bytes:
    match how:
        case "lzw":
            return lzw(data)
        case "deflate":
            return zlib.compress(data)
        case "packbits":
            return pack_bits(data, row_bytes)
        case "lzma":
            return lzma.compress(data)
    return data


def tiff_file(directories: list[dict[int, tuple[int, Any]]], order: str, *, big: bool = False) -> bytes:
    """A TIFF of some directories in a row: tag → (type, its values or bytes). The values of a strip's or tile's offsets are
    the bytes themselves."""
    number = "Q" if big else "I"
    head = struct.pack(order + "2sHHHQ", b"II" if order == "<" else b"MM", 43, 8, 0, 0)
    head = head if big else struct.pack(order + "2sHI", b"II" if order == "<" else b"MM", 42, 0)
    out = bytearray(head)
    link = len(head) - (8 if big else 4)
    for tags in directories:
        out[link : link + struct.calcsize(number)] = struct.pack(order + number, 0)
        entries = b""
        for tag in sorted(tags):
            kind, values = tags[tag]
            if tag in (273, 324):
                blobs, values = values, []
                for blob in blobs:
                    out += bytes(len(out) % 2)
                    values.append(len(out))
                    out += blob
            count, raw = _pack_values(order, kind, values)
            room = struct.calcsize(number)
            if len(raw) > room:
                out += bytes(len(out) % 2)
                place = len(out)
                out += raw
                raw = struct.pack(order + number, place)
            entries += struct.pack(order + "HH" + number, tag, kind, count) + raw.ljust(room, b"\0")
        out += bytes(len(out) % 2)
        out[link : link + struct.calcsize(number)] = struct.pack(order + number, len(out))
        out += struct.pack(order + ("Q" if big else "H"), len(tags)) + entries
        link = len(out)
        out += bytes(struct.calcsize(number))
    return bytes(out)


def _pack_values(order: str, kind: int, values: Any) -> tuple[int, bytes]:
    if isinstance(values, bytes):
        return len(values), values
    letters = {3: "H", 4: "I", 16: "Q", 13: "I"}
    return len(values), struct.pack(f"{order}{len(values)}{letters[kind]}", *values)


def directory(
    values: Pixels,
    *,
    order: str = "<",
    bits: int = 8,
    kind: int = 1,
    photometric: int = 1,
    planar: int = 1,
    how: str = "none",
    predictor: int = 1,
    tile: int = 0,
    rows: int = 16,
    extra: tuple[int, ...] = (),
    more: dict[int, tuple[int, Any]] | None = None,
) -> dict[int, tuple[int, Any]]:
    """A picture's directory. values: [h, w, samples], 0..1 (floats as they are)."""
    height, width, samples = values.shape
    planes = [values[..., index : index + 1] for index in range(samples)] if planar == 2 else [values]
    blobs = []
    for plane in planes:
        for part in _cut(plane, tile, rows):
            flat = part.reshape(part.shape[0], -1)
            data = pack_samples(flat, bits, kind, order)
            row_bytes = len(data) // part.shape[0]
            if predictor == 2:
                data = difference(data, part.shape[0], bits, part.shape[2], order)
            if predictor == 3:
                data = difference_floats(data, part.shape[0], bits, part.shape[2], order)
            blobs.append(compress(data, how, row_bytes))
    tags: dict[int, tuple[int, Any]] = {
        256: (4, [width]),
        257: (4, [height]),
        258: (3, [bits] * samples),
        259: (3, [COMPRESSIONS[how]]),
        262: (3, [photometric]),
        277: (3, [samples]),
        284: (3, [planar]),
        339: (3, [kind] * samples),
    }
    if predictor > 1:
        tags[317] = (3, [predictor])
    if extra:
        tags[338] = (3, list(extra))
    if tile:
        tags |= {322: (4, [tile]), 323: (4, [tile]), 324: (4, blobs), 325: (4, [len(b) for b in blobs])}
    else:
        tags |= {278: (4, [rows]), 273: (4, blobs), 279: (4, [len(b) for b in blobs])}
    return tags | (more or {})


def reverse_bits(tags: dict[int, tuple[int, Any]]) -> dict[int, tuple[int, Any]]:
    """The same directory with the lowest bit of each byte of its strips first, and the tag that says so."""
    kind, blobs = tags[273]
    turned = [np.unpackbits(np.frombuffer(blob, np.uint8), bitorder="little") for blob in blobs]
    return tags | {266: (3, [2]), 273: (kind, [np.packbits(bits).tobytes() for bits in turned])}


def _cut(plane: Pixels, tile: int, rows: int) -> Iterator[Pixels]:
    height, width, _ = plane.shape
    if not tile:
        yield from (plane[top : top + rows] for top in range(0, height, rows))
        return
    padded = np.pad(plane, ((0, -height % tile), (0, -width % tile), (0, 0)), mode="edge")
    for top in range(0, height, tile):
        for left in range(0, width, tile):
            yield padded[top : top + tile, left : left + tile]


def tiff_of(values: Pixels, *, big: bool = False, **options: Any) -> bytes:
    return tiff_file([directory(values, **options)], options.get("order", "<"), big=big)


def _stored(photometric: int, alpha: int | None) -> tuple[Pixels, Pixels]:
    """The values of a picture as 0..1, and what must be seen. alpha: 1 multiplied into the colors, 2 not, 0 no alpha."""
    seen = {0: gray, 1: gray, 2: color, 5: color}[photometric]()
    values = seen[..., None] / 255 if seen.ndim == 2 else seen / 255
    if photometric == 0:
        values = 1 - values
    if photometric == 5:
        values = np.concatenate([1 - values, np.zeros((HEIGHT, WIDTH, 1))], -1)
    shown = to_rgb(seen)
    if alpha is not None:
        share = opacity()[..., None] / 255
        stored = values * share if alpha == 1 else values
        values = np.concatenate([stored, share], -1)
        shown = on_white(shown, opacity()) if alpha else shown
    return values, shown


def tiffs(every: int = 1) -> Iterator[Layout]:
    """every: only one in so many, as making them takes longer than reading them."""
    number = itertools.count()
    orders = {"II": "<", "MM": ">"}
    depths = [(b, 1) for b in (1, 2, 4, 6, 8, 10, 12, 14, 16, 24, 32, 64)]
    depths += [(b, 2) for b in (8, 16, 32, 64)] + [(b, 3) for b in (16, 32, 64)]
    names = {0: "min-is-white", 1: "gray", 2: "rgb", 5: "cmyk"}
    for (bits, kind), photometric, (name, order) in itertools.product(depths, names, orders.items()):
        for planar, form, alpha in itertools.product((1, 2), ("strips", "tiles"), (None, 0, 1, 2)):
            if planar == 2 and photometric < 2 and alpha is None:
                continue
            if photometric == 5 and alpha:
                continue
            if alpha is not None and (bits < 8 or (form == "tiles" and bits != 16)):
                continue
            if next(number) % every:
                continue
            values, shown = _stored(photometric, alpha)
            extra = () if alpha is None else (alpha,)
            form_of_color = names[photometric] + ("" if alpha is None else f"+extra{alpha}")
            title = f"tiff {form_of_color} {TYPES[kind]}{bits} {name} planar{planar} {form}"
            steps = (1 << min(bits, 8)) - 1
            data = tiff_of(
                values, order=order, bits=bits, kind=kind, photometric=photometric, planar=planar,
                tile=16 * (form == "tiles"), extra=extra,
            )  # fmt: skip
            yield Layout(
                title, data, _seen_at_depth(shown, steps, alpha), 1 if bits >= 8 and not alpha else 3, 255
            )
    yield from _compressed_tiffs(every)
    yield from _written_by_pillow()


def _coarse(values: Pixels, bits: int) -> Pixels:
    """As many levels as the bits allow."""
    steps = (1 << min(bits, 8)) - 1
    return (values * steps).round() / steps


def _seen_at_depth(shown: Pixels, steps: int, alpha: int | None) -> Pixels:
    if steps == 255 or alpha:
        return shown
    return ((shown / 255 * steps).round() / steps * 255).round().astype(np.uint8)


def _compressed_tiffs(every: int) -> Iterator[Layout]:
    number = itertools.count()
    for how, order, planar, tile in itertools.product(
        ("lzw", "deflate", "packbits", "lzma"), "<>", (1, 2), (0, 16)
    ):
        for bits, kind, photometric, predictor in (
            (8, 1, 1, 1), (8, 1, 2, 1), (8, 1, 2, 2), (12, 1, 1, 1), (16, 1, 0, 1), (16, 1, 1, 1), (16, 1, 1, 2),
            (16, 1, 2, 1),
            (16, 1, 2, 2), (16, 1, 5, 2), (16, 2, 1, 2), (32, 1, 1, 1), (32, 1, 1, 2), (32, 3, 1, 1),
            (32, 3, 1, 3), (32, 3, 2, 3),
            (16, 3, 1, 3), (64, 3, 1, 3), (64, 1, 1, 2), (32, 3, 1, 2),
        ):  # fmt: skip
            if (photometric < 2 and planar == 2) or (how == "packbits" and predictor > 1):
                continue
            if next(number) % every:
                continue
            values, shown = _stored(photometric, None)
            data = tiff_of(
                values, order=order, bits=bits, kind=kind, photometric=photometric, planar=planar, how=how, tile=tile,
                predictor=predictor,
            )  # fmt: skip
            form = "tiles" if tile else "strips"
            name = {"<": "II", ">": "MM"}[order]
            yield Layout(
                f"tiff {photometric} {TYPES[kind]}{bits} {name} planar{planar} {form} {how} predictor{predictor}",
                data,
                shown,
            )


def _written_by_pillow() -> Iterator[Layout]:
    rgb, plain = Image.fromarray(color()), Image.fromarray(gray())
    bilevel = plain.convert("1")
    for how in (
        "group3",
        "group4",
        "tiff_ccitt",
        "packbits",
        "tiff_lzw",
        "tiff_adobe_deflate",
        "zstd",
        "lzma",
    ):
        shown = np.asarray(bilevel.convert("RGB"))
        yield Layout(f"tiff bilevel {how}", encode(bilevel, "TIFF", compression=how), shown)
    for how in ("tiff_lzw", "zstd", "lzma", "jpeg", "raw"):
        lossy = 70 if how == "jpeg" else 1
        yield Layout(f"tiff rgb {how}", encode(rgb, "TIFF", compression=how), color(), lossy, 4)
    yield Layout("tiff gray jpeg", encode(plain, "TIFF", compression="jpeg"), to_rgb(gray()), 60, 3)
    palette = rgb.quantize(16)
    for how in ("raw", "tiff_lzw"):
        yield Layout(
            f"tiff palette {how}",
            encode(palette, "TIFF", compression=how),
            np.asarray(palette.convert("RGB")),
        )
    colors = [0, 13107, 26214, 39321, 52428, 65535] + [0] * 10
    for bits, order, is_old in itertools.product((1, 2, 4, 8, 16), "<>", (False, True)):
        count = min(1 << bits, 6)
        index = (np.arange(WIDTH)[None, :] + np.arange(HEIGHT)[:, None]) % count
        table = (colors + [0] * (1 << bits))[: 1 << bits] * 2 + [65535] * (1 << bits)
        table = [value // 257 for value in table] if is_old else table
        seen = np.array([colors[i] // 257 for i in range(count)], np.uint8)[index]
        shown = np.stack([seen, seen, np.full_like(seen, 255)], -1)
        data = tiff_of(
            index[..., None] / ((1 << bits) - 1),
            bits=bits,
            order=order,
            photometric=3,
            more={320: (3, table)},
        )
        yield Layout(f"tiff palette u{bits} {order}{' of 8 bits' * is_old}", data, shown)


# PNG
# --------------------------------------------------------------------------------------------------------------------

ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))


def png_of(values: Pixels, bits: int, kind: int, extra: bytes = b"", *, interlaced: bool = False) -> bytes:
    """values: [h, w, samples] of whole numbers."""
    height, width, _ = values.shape
    passes = [values]
    if interlaced:
        passes = [values[y::step_y, x::step_x] for x, y, step_x, step_y in ADAM7]
    raw = b""
    for part in passes:
        for row in part if part.size else ():
            line = "".join(f"{value:0{bits}b}" for value in row.reshape(-1).tolist())
            line += "0" * (-len(line) % 8)
            raw += b"\0" + int(line, 2).to_bytes(len(line) // 8, "big")
    head = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, int(interlaced))
    idat = chunk(b"IDAT", zlib.compress(raw))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + extra + idat + chunk(b"IEND", b"")


def pngs() -> Iterator[Layout]:
    for interlaced, (kind, depths) in itertools.product(
        (False, True), {0: (1, 2, 4, 8, 16), 2: (8, 16), 4: (8, 16), 6: (8, 16)}.items()
    ):
        for bits in depths:
            steps = (1 << bits) - 1
            seen = gray()[..., None] if kind in (0, 4) else color()
            values = (seen / 255 * steps).round().astype(int)
            shown = _seen_at_depth(to_rgb(gray()) if kind in (0, 4) else color(), min(steps, 255), None)
            if kind in (4, 6):
                alpha = (opacity()[..., None] / 255 * steps).round().astype(int)
                values, shown = np.concatenate([values, alpha], -1), on_white(shown, opacity())
            name = f"png type {kind} {bits} bits{' interlaced' * interlaced}"
            yield Layout(name, png_of(values, bits, kind, interlaced=interlaced), shown, 2 if kind > 2 else 1)
            if kind in (0, 2):
                key = values[5, -7]
                clear = (values == key).all(-1)
                trns = chunk(b"tRNS", struct.pack(f">{len(key)}H", *key.tolist()))
                yield Layout(
                    f"{name} tRNS", png_of(values, bits, kind, trns, interlaced=interlaced),
                    np.where(clear[..., None], 255, shown).astype(np.uint8), 1,
                )  # fmt: skip
    for bits, interlaced in itertools.product((1, 2, 4, 8), (False, True)):
        count = min(1 << bits, 200)
        index = (np.arange(WIDTH)[None, :] + 3 * np.arange(HEIGHT)[:, None]) % count
        table = np.array([[(i * 53) % 256, (i * 101) % 256, i] for i in range(count)], np.uint8)
        plte = chunk(b"PLTE", table.tobytes())
        name = f"png palette {bits} bits{' interlaced' * interlaced}"
        yield Layout(name, png_of(index[..., None], bits, 3, plte, interlaced=interlaced), table[index])
        alphas = np.array([(i * 37) % 256 for i in range(count)], np.uint8)
        data = png_of(
            index[..., None], bits, 3, plte + chunk(b"tRNS", alphas.tobytes()), interlaced=interlaced
        )
        yield Layout(f"{name} tRNS", data, on_white(table[index], alphas[index]), 2)
    for significant, (kind, of) in itertools.product(
        (5, 8, 10, 12), {0: "gray", 2: "RGB", 4: "gray and alpha", 6: "RGBA"}.items()
    ):
        top = (1 << significant) - 1
        seen = gray()[..., None] if kind in (0, 4) else color()
        kept = (seen / 255 * top).round().astype(int)
        shown = to_rgb((kept / top * 255).round().astype(np.uint8).squeeze())
        if kind > 2:
            kept = np.concatenate([kept, np.full((HEIGHT, WIDTH, 1), top)], -1)
        sbit = chunk(b"sBIT", bytes((significant,)) * kept.shape[2])
        low = png_of(kept, 16, kind, sbit)
        yield Layout(f"png {of} 16 bits, the lower {significant} used, sBIT", low, shown, 1)
        full = png_of(kept * 65535 // top, 16, kind, sbit)
        yield Layout(f"png {of} 16 bits, sBIT {significant}", full, shown, 1)


# BMP, GIF and netpbm
# --------------------------------------------------------------------------------------------------------------------


def bmp_of(
    rows: list[bytes], bits: int, *, header: int = 40, how: int = 0, masks: tuple[int, ...] = (), table: bytes = b"",
    top_down: bool = False, body: bytes | None = None, width: int = WIDTH, height: int = HEIGHT,
) -> bytes:  # fmt: skip
    if body is None:
        body = b"".join(row + bytes(-len(row) % 4) for row in (rows if top_down else rows[::-1]))
    if header == 12:
        info = struct.pack("<IHHHH", 12, width, height, 1, bits)
    else:
        entries = len(table) // 4
        info = struct.pack(
            "<IiiHHIIiiII",
            header,
            width,
            -height if top_down else height,
            1,
            bits,
            how,
            len(body),
            2835,
            2835,
            entries,
            0,
        )
        listed = struct.pack(f"<{len(masks)}I", *masks)
        info = info + listed if header == 40 else (info + listed).ljust(header, b"\0")
    start = 14 + len(info) + len(table)
    return b"BM" + struct.pack("<IHHI", start + len(body), 0, 0, start) + info + table + body


def _rle8(index: Pixels) -> bytes:
    out = b""
    for row in index[::-1]:
        for value, run in itertools.groupby(row.tolist()):
            out += bytes((len(list(run)), value))
        out += b"\0\0"
    return out + b"\0\1"


def _rle4(index: Pixels) -> bytes:
    out = b""
    for row in index[::-1]:
        for value, run in itertools.groupby(row.tolist()):
            out += bytes((len(list(run)), value << 4 | value))
        out += b"\0\0"
    return out + b"\0\1"


def _packed(index: Pixels, bits: int) -> list[bytes]:
    rows = []
    for row in index.tolist():
        line = "".join(f"{value:0{bits}b}" for value in row)
        line += "0" * (-len(line) % 8)
        rows.append(int(line, 2).to_bytes(len(line) // 8, "big"))
    return rows


def _masked(pixels: Pixels, masks: tuple[int, ...], size: str) -> list[bytes]:
    """Each channel of [h, w, n] at its mask."""
    total = np.zeros(pixels.shape[:2], np.uint64)
    for channel, mask in enumerate(masks):
        shift, top = (mask & -mask).bit_length() - 1, mask // (mask & -mask)
        total |= (pixels[..., channel] / 255 * top).round().astype(np.uint64) << np.uint64(shift)
    return [row.astype(size).tobytes() for row in total]


def bmps() -> Iterator[Layout]:
    table = np.array([[(i * 53) % 256, (i * 101) % 256, i] for i in range(256)], np.uint8)
    for bits, header in itertools.product((1, 2, 4, 8), (12, 40, 108, 124)):
        count = 1 << bits
        index = (np.arange(WIDTH)[None, :] + 3 * np.arange(HEIGHT)[:, None]) // 5 % count
        bgr = table[:count, ::-1]
        listed = bgr.tobytes() if header == 12 else np.pad(bgr, ((0, 0), (0, 1))).tobytes()
        for top_down in (False, True) if header > 12 else (False,):
            data = bmp_of(_packed(index, bits), bits, header=header, table=listed, top_down=top_down)
            yield Layout(f"bmp {bits} bits header {header}{' top-down' * top_down}", data, table[index])
        if header == 40 and bits in (4, 8):
            body = _rle8(index) if bits == 8 else _rle4(index)
            data = bmp_of([], bits, how=1 if bits == 8 else 2, table=listed, body=body)
            yield Layout(f"bmp rle{bits}", data, table[index])
    masks = {
        "555": (0x7C00, 0x3E0, 0x1F), "565": (0xF800, 0x7E0, 0x1F), "4444": (0xF00, 0xF0, 0xF, 0xF000),
        "1555": (0x7C00, 0x3E0, 0x1F, 0x8000), "444": (0xF00, 0xF0, 0xF),
    }  # fmt: skip
    wide = {
        "bgr": (0xFF0000, 0xFF00, 0xFF), "rgb": (0xFF, 0xFF00, 0xFF0000), "bgra": (0xFF0000, 0xFF00, 0xFF, 0xFF000000),
        "rgba": (0xFF, 0xFF00, 0xFF0000, 0xFF000000), "abgr": (0xFF000000, 0xFF0000, 0xFF00, 0xFF),
        "10 bits": (0x3FF00000, 0xFFC00, 0x3FF),
    }  # fmt: skip
    for name, fields in [*masks.items(), *wide.items()]:
        bits, size = (16, "<u2") if name in masks else (32, "<u4")
        for header, top_down in itertools.product((40, 56, 108, 124), (False, True)):
            if header == 40 and len(fields) == 4:
                continue
            pixels, shown = color(), color()
            if len(fields) == 4:
                pixels = np.concatenate([pixels, opacity()[..., None]], -1)
                top = fields[3] // (fields[3] & -fields[3])
                alpha = ((opacity() / 255 * top).round() / top * 255).round()
                shown = on_white(shown, alpha)
            spread = 1 if bits == 32 else 9 if "4" not in name or name == "1555" else 17
            data = bmp_of(
                _masked(pixels, fields, size), bits, header=header, how=3, masks=fields, top_down=top_down
            )
            yield Layout(f"bmp {name} header {header}{' top-down' * top_down}", data, shown, spread + 1, 255)
    for header, bits in itertools.product((12, 40, 108, 124), (16, 24, 32)):
        if header == 12 and bits != 24:
            continue
        rows = {
            16: _masked(color(), masks["555"], "<u2"), 32: _masked(color(), wide["bgr"], "<u4"),
            24: [row[:, ::-1].tobytes() for row in color()],
        }[bits]  # fmt: skip
        yield Layout(
            f"bmp {bits} bits header {header}",
            bmp_of(rows, bits, header=header),
            color(),
            9 if bits == 16 else 1,
            255,
        )
    opaque = np.concatenate([color(), np.zeros((HEIGHT, WIDTH, 1), np.uint8)], -1)
    for header in (56, 108, 124):
        data = bmp_of(_masked(opaque, wide["bgra"], "<u4"), 32, header=header, how=3, masks=wide["bgra"])
        yield Layout(f"bmp alpha 0 everywhere header {header}", data, color())


def gifs() -> Iterator[Layout]:
    for colors in (2, 4, 16, 64, 256):
        image = Image.fromarray(color()).quantize(colors)
        for interlace in (0, 1):
            shown = np.asarray(image.convert("RGB"))
            yield Layout(
                f"gif {colors} colors interlace {interlace}", encode(image, "GIF", interlace=interlace), shown
            )
        clear = image.getpixel((20, 5))
        seen = np.where((np.asarray(image) == clear)[..., None], 255, shown).astype(np.uint8)
        yield Layout(f"gif {colors} colors transparent", encode(image, "GIF", transparency=clear), seen)


def pnms() -> Iterator[Layout]:
    for top in (1, 3, 15, 100, 255, 256, 1000, 1023, 4095, 16383, 32767, 65535):
        for kind in (2, 3, 5, 6):
            seen = gray()[..., None] if kind in (2, 5) else color()
            values = (seen / 255 * top).round().astype(int)
            shown = (
                to_rgb((values[..., 0] if kind in (2, 5) else values) / top * 255).round().astype(np.uint8)
            )
            flat = values.reshape(-1)
            body = " ".join(map(str, flat.tolist())).encode() + b"\n"
            if kind > 3:
                body = flat.astype(">u2" if top > 255 else "u1").tobytes()
            yield Layout(
                f"pnm P{kind} maxval {top}", b"P%d\n%d %d\n%d\n" % (kind, WIDTH, HEIGHT, top) + body, shown
            )
    dark = gray() < 128
    shown = to_rgb(np.where(dark, 0, 255).astype(np.uint8))
    yield Layout(
        "pnm P1",
        b"P1 %d %d\n" % (WIDTH, HEIGHT) + b" ".join(b"01"[int(d) : int(d) + 1] for d in dark.reshape(-1)),
        shown,
    )
    yield Layout("pnm P4", b"P4 %d %d\n" % (WIDTH, HEIGHT) + np.packbits(dark, axis=1).tobytes(), shown)


GROUPS: dict[str, Callable[[], Iterator[Layout]]] = {
    "tiff": tiffs, "png": pngs, "bmp": bmps, "gif": gifs, "pnm": pnms,
}  # fmt: skip


def shown(decoder: Decoder, data: bytes) -> Pixels:
    """What the decoder makes of a file."""
    return decoder.decode(memoryview(data), inspect(memoryview(data), Limits()))


def judge(layout: Layout) -> tuple[str, str]:
    """("right" | "refused" | "wrong", detail): refused is a failure as a format by name."""
    from stages.images import pixels

    data = memoryview(layout.data)
    try:
        header = inspect(data, Limits())
        out = bytearray(3 * header.width * header.height)
        is_gray = pixels.write_pixels(data, header, memoryview(out))
    except ImageError as error:
        return ("refused" if error.reason is Reason.FORMAT else "failed"), error.detail
    except Exception as error:  # noqa: BLE001 – what the child's answer() makes of anything
        return "failed", repr(error)
    size = 1 if is_gray else 3
    stored = np.frombuffer(out, np.uint8, size * header.width * header.height)
    found = np.broadcast_to(
        stored.reshape(header.height, header.width, size), (header.height, header.width, 3)
    )
    if found.shape != layout.shown.shape:
        return "wrong", f"{found.shape}"
    apart = np.abs(found.astype(int) - layout.shown)
    if apart.max() > layout.tolerance or apart.mean() > layout.mean:
        return "wrong", f"at most {apart.max()}, on average {apart.mean():.1f} gray levels from the picture"
    return "right", ""


def main() -> None:
    import hashlib
    import sys
    from collections import Counter

    from stages.images import pixels

    pixels.prepare()
    total: Counter[tuple[str, str]] = Counter()
    for group, make in GROUPS.items():
        for layout in make():
            verdict, detail = judge(layout)
            total[group, verdict] += 1
            if "-q" not in sys.argv or verdict in ("wrong", "failed"):
                print(verdict, layout.name, detail, hashlib.md5(layout.data).hexdigest()[:6], sep="\t")
    for key, count in sorted(total.items()):
        print(*key, count)


if __name__ == "__main__":
    main()
