"""Color profiles: pixels of other color spaces become sRGB, as browsers show them.

In the decoder's child process LittleCMS converts. On a GPU, profiles of three curves and a matrix (all phones
and cameras write these) are read here in plain Python, where bad bytes can only raise an exception, and applied on
the device; a JPEG with any other profile goes to the child process. A profile that is broken, or does not fit
the pixels, is ignored. One that changes no color by more than NEAR levels is sRGB, whatever its name: nothing is done.

Sources: ICC.1:2022 (the format), ITU-T H.273 (code points of primaries and transfer), W3C's PNG, third edition.
"""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Iterable
from itertools import chain, product
from typing import TYPE_CHECKING, NamedTuple

from stages.contract.base import ImageError
from stages.images.headers import jpeg_segments, png_properties, primary_properties

if TYPE_CHECKING:
    import torch
    from numpy import float64
    from numpy.typing import NDArray
    from PIL import Image, ImageCms

MOST_BYTES = 4 << 20  # of a profile; those of printing presses have two million
NEAR = 2  # levels of 255
STRIP_PIXELS = 4_000_000  # converted at once on a device
APP1, APP2, COMMENT = 0xE1, 0xE2, 0xFE
ICC = b"ICC_PROFILE\0"
GRAY = ("1", "L", "LA")  # modes of Pillow

D50 = (0.9642, 1.0, 0.8249)
BRADFORD = ((0.8951, 0.2664, -0.1614), (-0.7502, 1.7135, 0.0367), (0.0389, -0.0685, 1.0296))
D65_POINT, CINEMA_POINT = (0.3127, 0.329), (0.314, 0.351)
# H.273: x and y of red, green, blue and white; the exponent of the transfer. Those of television are shown as sRGB is.
PRIMARIES = {
    1: (0.64, 0.33, 0.30, 0.60, 0.15, 0.06, *D65_POINT),
    5: (0.64, 0.33, 0.29, 0.60, 0.15, 0.06, *D65_POINT),
    6: (0.63, 0.34, 0.31, 0.595, 0.155, 0.07, *D65_POINT),
    9: (0.708, 0.292, 0.17, 0.797, 0.131, 0.046, *D65_POINT),
    11: (0.68, 0.32, 0.265, 0.69, 0.15, 0.06, *CINEMA_POINT),
    12: (0.68, 0.32, 0.265, 0.69, 0.15, 0.06, *D65_POINT),
}
SRGB_CURVE = 0.0
EXPONENTS = {**dict.fromkeys((1, 6, 13, 14, 15), SRGB_CURVE), 4: 2.2, 5: 2.8, 8: 1.0}


# Where formats keep their profiles
# ------------------------------------------------------------------------------------------------


def jpeg_profile(data: memoryview) -> bytes:
    """The profile of a JPEG, of which each segment has a numbered part; empty if there is none, or not all of it."""
    parts, total = {}, 0
    for marker, start, end in jpeg_segments(data):
        if marker == APP2 and bytes(data[start : start + 12]) == ICC and end - start > 14:
            number, total = data[start + 12], data[start + 13]
            parts[number] = data[start + 14 : end]
    if sorted(parts) != list(range(1, total + 1)):
        return b""
    return b"".join(parts[number] for number in range(1, total + 1))


def hide_exif(data: memoryview) -> bytearray:
    """A copy of a JPEG in which EXIF is a comment."""
    copy = bytearray(data)
    for marker, start, _ in jpeg_segments(data):
        if marker == APP1:
            copy[start - 3] = COMMENT
    return copy


def _png_profile(data: memoryview, is_gray: bool) -> bytes:
    """In the order of the standard: cICP, iCCP, sRGB, gAMA with cHRM. Beside gAMA alone are sRGB's primaries; cHRM alone says
    too little."""
    chunks = png_properties(data)
    if b"cICP" in chunks:
        primaries, transfer = chunks[b"cICP"][:2]
        return _of_code_points(primaries, transfer, is_gray)
    if b"iCCP" in chunks:
        _, _, packed = bytes(chunks[b"iCCP"]).partition(b"\0")
        return zlib.decompressobj().decompress(packed[1:], MOST_BYTES + 1)
    if b"sRGB" in chunks or b"gAMA" not in chunks:
        return b""
    (gamma,) = struct.unpack(">I", chunks[b"gAMA"])
    # 1/2.2 is what writers state for sRGB's own curve.
    exponent = SRGB_CURVE if abs(gamma - 45455) < 100 else 100_000 / gamma
    if b"cHRM" not in chunks:
        return make_profile(PRIMARIES[1], exponent, is_gray=is_gray) if exponent else b""
    white, *colors = struct.iter_unpack(">II", chunks[b"cHRM"])
    points = tuple(value / 100_000 for point in (*colors, white) for value in point)
    return make_profile(points, exponent, is_gray=is_gray)


def _coded_profile(data: memoryview, is_gray: bool) -> bytes:
    """Of AVIF and HEIF, if the code points are in the place of a profile."""
    for kind, value in primary_properties(data):
        if kind == b"colr" and bytes(value[:4]) == b"nclx":
            primaries, transfer = struct.unpack_from(">HH", value, 4)
            return _of_code_points(primaries, transfer, is_gray)
    return b""


def _of_code_points(primaries: int, transfer: int, is_gray: bool) -> bytes:
    # not stated; or of more than sRGB's brightness
    if primaries not in PRIMARIES or transfer not in EXPONENTS:
        return b""
    return make_profile(PRIMARIES[primaries], EXPONENTS[transfer], is_gray=is_gray)


# Conversion by LittleCMS, in the decoder's child process
# ------------------------------------------------------------------------------------------------


def find_profile(data: memoryview, name: str, stated: bytes | None = None, *, mode: str = "RGB") -> bytes:
    """The profile of a file of the format `name`; empty if there is none that can be read. stated: what Pillow found in it.
    mode: of its pixels."""
    is_gray = mode in GRAY
    try:
        if name == "PNG":
            return _png_profile(data, is_gray)
        if name in ("AVIF", "HEIF") and not stated:
            return _coded_profile(data, is_gray)
        if name == "JPEG" and not stated:  # Pillow looks for it no further than up to the frame's header
            return jpeg_profile(data)
    except (ImageError, ArithmeticError, IndexError, ValueError, TypeError, struct.error, zlib.error):
        return b""
    return stated or b""


def convert_to_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    """The pixels in sRGB, or unchanged if there is nothing to convert. Gray with a profile becomes RGB."""
    if not profile or len(profile) > MOST_BYTES or image.mode == "LAB":
        return image
    has_alpha, is_gray = image.has_transparency_data, image.mode in GRAY
    base = image.convert("L" if is_gray else "RGB") if image.mode not in ("L", "RGB", "CMYK") else image
    transform = _find_transform(profile, base.mode)
    if transform is None:
        return image
    from PIL import ImageCms

    alpha = image.convert("RGBA").getchannel("A") if has_alpha else None
    in_place = ImageCms.applyTransform(base, transform, inPlace=base.mode == "RGB")
    converted = in_place or base
    if alpha is not None:
        converted.info.pop("transparency", None)
        converted.putalpha(alpha)
    return converted


@functools.lru_cache(16)
def _find_transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """None if the profile is broken, or of another kind of pixels, or sRGB."""
    import io

    from PIL import Image, ImageCms

    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        transform = ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, "RGB")
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return None
    if mode == "CMYK":
        return transform
    levels = bytes(range(256)) if mode == "L" else bytes(chain(*PROBE))
    probe = Image.frombytes(mode, (len(levels) // len(mode), 1), levels)
    after = ImageCms.applyTransform(probe, transform)
    assert after is not None
    is_near = _are_near(probe.convert("RGB").tobytes(), after.tobytes())
    return None if is_near else transform


PROBE = tuple(product((0, 16, 32, 64, 96, 128, 160, 192, 224, 255), repeat=3))


def _are_near(before: bytes, after: bytes) -> bool:
    return max(abs(one - other) for one, other in zip(before, after, strict=True)) <= NEAR


# Profiles of curves and a matrix, in plain Python and on a device
# ------------------------------------------------------------------------------------------------


class Conversion(NamedTuple):
    """curves: 256 values of light, 0..1, for each channel, [3, 256]. matrix: from these to sRGB's light, [3, 3]."""

    curves: NDArray[float64]
    matrix: NDArray[float64]


@functools.lru_cache(64)
def read_conversion(profile: bytes) -> Conversion | None:
    """None if the profile is sRGB, or there is none. Raises ValueError, IndexError or struct.error if it is another than one
    of three curves and a matrix, or broken."""
    if not profile:
        return None
    if profile[16:24] != b"RGB XYZ " or len(profile) > MOST_BYTES:
        raise ValueError("no curves and matrix of RGB")
    tags = _read_tags(profile)
    if not tags.keys() >= COLOR_TAGS or b"A2B0" in tags:
        raise ValueError("a profile of tables")
    import numpy as np

    columns = [struct.unpack_from(">3i", tags[name], 8) for name in (b"rXYZ", b"gXYZ", b"bXYZ")]
    found = Conversion(
        np.array([_read_curve(tags[name]) for name in (b"rTRC", b"gTRC", b"bTRC")]),
        np.linalg.inv(_to_d50(PRIMARIES[1])) @ np.transpose(columns) / 65536,
    )
    return None if _are_near(bytes(chain(*PROBE)), _convert_probe(found)) else found


def _read_tags(profile: bytes) -> dict[bytes, bytes]:
    (count,) = struct.unpack_from(">I", profile, 128)
    listed = (struct.unpack_from(">4sII", profile, 132 + 12 * number) for number in range(min(count, 100)))
    return {name: profile[start : start + size] for name, start, size in listed}


COLOR_TAGS = {b"rXYZ", b"gXYZ", b"bXYZ", b"rTRC", b"gTRC", b"bTRC"}
PARAMETERS = (1, 3, 4, 5, 7)  # of each type of parametric curve


def _read_curve(tag: bytes) -> tuple[float, ...]:
    """A curve at 256 levels."""
    if tag[:4] == b"para":
        g, a, b, c, d, e, f = _all_parameters(tag)
        curve = [(a * x + b) ** g + e if x >= d and a * x + b >= 0 else c * x + f for x in LEVELS]
    elif tag[:4] == b"curv":
        (count,) = struct.unpack_from(">I", tag, 8)
        if count > 1:
            curve = _interpolate(struct.unpack_from(f">{count}H", tag, 12))
        else:
            exponent = struct.unpack_from(">H", tag, 12)[0] / 256 if count else 1.0
            curve = [x**exponent for x in LEVELS]
    else:
        raise ValueError("an unknown kind of curve")
    return tuple(min(max(value, 0.0), 1.0) for value in curve)


LEVELS = tuple(level / 255 for level in range(256))


def _all_parameters(tag: bytes) -> list[float]:
    """g, a, b, c, d, e, f: (ax + b)^g + e from d on, and cx + f below."""
    (kind,) = struct.unpack_from(">H", tag, 8)
    numbers = [number / 65536 for number in struct.unpack_from(f">{PARAMETERS[kind]}i", tag, 12)]
    if kind == 0:
        return [numbers[0], 1, 0, 0, 0, 0, 0]
    g, a, b, *rest = numbers
    if kind in (1, 2):
        offset = rest[0] if rest else 0
        return [g, a, b, 0, -b / a if a else 0, offset, offset]
    return [g, a, b, *rest, *([0, 0] if kind == 3 else [])]


def _interpolate(table: tuple[int, ...]) -> list[float]:
    import numpy as np

    curve: list[float] = np.interp(LEVELS, np.linspace(0, 1, len(table)), table).tolist()
    return [value / 65535 for value in curve]


def _convert_probe(conversion: Conversion) -> bytes:
    import numpy as np

    light = [curve[levels] for curve, levels in zip(conversion.curves, np.transpose(PROBE), strict=True)]
    mixed = (conversion.matrix @ light).clip(0.0, 1.0)
    bright = np.where(mixed <= 0.0031308, 12.92 * mixed, 1.055 * mixed ** (1 / 2.4) - 0.055)
    levels = (255 * bright).round().astype(np.uint8)
    return bytes(levels.T.tobytes())


def apply(conversion: Conversion, pixels: torch.Tensor) -> None:
    """Convert uint8 [3, h, w] in place, on its device."""
    import torch

    curves = torch.tensor(conversion.curves, dtype=torch.float32, device=pixels.device)
    rows = max(1, STRIP_PIXELS // pixels.shape[2])
    for top in range(0, pixels.shape[1], rows):
        strip = pixels[:, top : top + rows]
        light = [curve[plane.int()] for curve, plane in zip(curves, strip, strict=True)]
        for row, plane in zip(conversion.matrix.tolist(), strip, strict=True):
            mixed = (light[0] * row[0] + light[1] * row[1] + light[2] * row[2]).clamp_(0, 1)
            bright = 1.055 * mixed.pow(1 / 2.4) - 0.055
            plane.copy_(torch.where(mixed <= 0.0031308, 12.92 * mixed, bright).mul_(255).round_())


# Arithmetic of color spaces
# ------------------------------------------------------------------------------------------------


@functools.lru_cache(64)
def make_profile(points: tuple[float, ...], exponent: float, *, is_gray: bool = False) -> bytes:
    """A profile of curves and a matrix, or of gray. points: x and y of red, green, blue and white. exponent: SRGB_CURVE or a
    number."""
    numbers = [exponent] if exponent else [2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045]
    kind = 0 if exponent else 3
    curve = b"para" + struct.pack(">4xHxx", kind) + _pack_fixed(numbers)
    white = _pack_fixed(D50)
    tags = {b"wtpt": b"XYZ " + bytes(4) + white, b"kTRC" if is_gray else b"rTRC": curve}
    if not is_gray:
        tags |= {b"gTRC": curve, b"bTRC": curve}
        for name, row in zip((b"rXYZ", b"gXYZ", b"bXYZ"), _to_d50(points).T, strict=True):
            tags[name] = b"XYZ " + bytes(4) + _pack_fixed(row)
    table, body = b"", b""
    for name, tag in tags.items():
        table += struct.pack(">4sII", name, 132 + 12 * len(tags) + len(body), len(tag))
        body += tag
    header = struct.pack(">I4xI", 132 + len(table) + len(body), 0x04300000) + b"mntr"
    header += (
        (b"GRAY" if is_gray else b"RGB ") + b"XYZ " + bytes(12) + b"acsp" + bytes(28) + white + bytes(48)
    )
    return header + struct.pack(">I", len(tags)) + table + body


def _pack_fixed(numbers: Iterable[float]) -> bytes:
    """As s15Fixed16."""
    return b"".join(struct.pack(">i", round(65536 * number)) for number in numbers)


def _to_d50(points: tuple[float, ...]) -> NDArray[float64]:
    """From a color space's light to XYZ, [3, 3], adapted from its white to D50 as ICC asks (Bradford).
    Raises ArithmeticError or ValueError for points that no color space has."""
    import numpy as np

    corners = [(x / y, 1.0, (1 - x - y) / y) for x, y in zip(points[::2], points[1::2], strict=True)]
    primaries, white, adapt = np.transpose(corners[:3]), np.array(corners[3]), np.array(BRADFORD)
    matrix = primaries * (np.linalg.inv(primaries) @ white)
    adapted: NDArray[float64] = np.linalg.inv(adapt) * ((adapt @ D50) / (adapt @ white)) @ adapt @ matrix
    return adapted
