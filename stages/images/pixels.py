"""Decodes images to 8 bits of RGB or gray. Runs only inside a decoder's child process.

The reader of each format is called by name, so that no file can
reach another plug-in of Pillow (EPS would start Ghostscript).
"""

from __future__ import annotations

import contextlib
import importlib
import io
import struct
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from PIL import Image, ImageFile, ImagePalette, UnidentifiedImageError
from PIL.AvifImagePlugin import AvifImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.PpmImagePlugin import PpmImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from stages.contract.base import Header, ImageError, Reason
from stages.images.formats import bmp_masks
from stages.images.grounds import write_strips
from stages.images.headers import (
    find_crop,
    png_chunks,
    png_significant_bits,
    primary_properties,
    read_jpeg_frame,
)
from stages.images.pages import BROKEN, checksum, is_blank, keep_picture, skip_blank
from stages.images.profiles import convert_to_srgb, find_profile
from stages.images.scans import check_zeros
from stages.images.tiff import FILL_ORDER, JPEG, OLD_JPEG, Directory, find_picture

if TYPE_CHECKING:
    import numpy as np

OPENERS: dict[str, Callable[[io.BytesIO], Image.Image]] = {
    "JPEG": JpegImageFile,  # not jpeg_factory: the first of several pictures (MPO)
    "PNG": PngImageFile,
    "WEBP": WebPImageFile,
    "GIF": GifImageFile,
    "TIFF": TiffImageFile,
    "BMP": BmpImageFile,
    "PPM": PpmImageFile,
    "AVIF": AvifImageFile,
}
TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# An orientation → the axes of the picture that are mirrored; above 4 it is transposed before.
MIRRORED: dict[int, tuple[int, ...]] = {2: (1,), 3: (0, 1), 4: (0,), 6: (1,), 7: (0, 1), 8: (0,)}
FRAMES = (b"acTL", b"fcTL", b"fdAT")  # of an animated PNG
PLAIN = ((8, 0, 0), (8, 2, 0), (8, 6, 0))  # of a PNG: bits, color type (gray, RGB, RGBA) and interlacing
BANDS = {0: 1, 2: 3, 6: 4}  # of these color types
STORED = 0xFFFF  # most bytes of a block that deflate only stores
LITTLE = 20  # times the file's size; storing more bytes than that takes as long as it saves
HEADED = 33  # bytes of a PNG until its header's end
END = b"\0\0\0\0IEND\xaeB`\x82"  # the last chunk
# of a WebP: a kind of header, and the bit in it that says that a profile follows
EXTENDED, PROFILED = b"VP8X", 0x20
# Parts of Pillow that it imports when it needs them.
LATE = ("Cms", "Color", "Filter", "Math", "Palette", "Sequence")
TIFF_OFFSETS, TIFF_LENGTHS = (273, 324), (279, 325)  # of strips and of tiles


def prepare() -> None:
    """Set up Pillow for untrusted files: no warnings, no threads, no check for bombs (`inspect` has checked the size)."""
    import PIL.AvifImagePlugin

    for name in LATE:  # now, as no file can be opened any more when they are needed
        importlib.import_module(f"PIL.Image{name}")
    warnings.simplefilter("ignore")
    Image.MAX_IMAGE_PIXELS = None
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    PIL.AvifImagePlugin.DEFAULT_MAX_THREADS = 1
    try:
        import pillow_heif
    except ImportError:
        return
    pillow_heif.register_heif_opener(decode_threads=1, thumbnails=False, depth_images=False, aux_images=False)
    OPENERS["HEIF"] = _open_heif


def _open_heif(file: io.BytesIO) -> Image.Image:
    try:
        return Image.open(file, formats=("HEIF",))
    except UnidentifiedImageError as error:  # its message only names an object in memory
        raise ImageError(Reason.DECODER, "HEIF: pillow-heif finds no picture in the file") from error


def write_pixels(data: memoryview, header: Header, out: memoryview) -> bool:
    """Decode the first picture of `data` into `out`, rows from the top, upright: RGB, or one byte a pixel if it is gray, as
    most scans are, without transparency or a profile that makes colors of it. That is three times less to convert and to
    copy. Returns whether it is gray.

    Raises ImageError: HEADER if the picture has another size than the header, TRUNCATED, DECODER; MemoryError.
    """
    is_turned = header.format == "TIFF" and not header.is_deep  # by Pillow
    orientation = 1 if is_turned else header.orientation
    size = (header.height, header.width) if orientation > 4 else (header.width, header.height)
    plain = read_plain(data, header, size)
    if plain is not None and _is_as_shown(plain, data, header):
        return _write_upright(plain, orientation, out)
    with _open(data, header) if plain is None else _picture_of(plain) as image:
        plain = None  # Pillow has copied it, or holds it
        if header.format != "AVIF":  # which may be cropped
            _check_size(size, image.size)
        image.info.pop("xmp", None)  # Pillow would read an orientation from it that no other program applies
        _load(image, len(data))
        correct = CORRECTIONS.get(header.format)
        picture = correct(image, data, header) if correct else image
        profile = find_profile(data, header.format, image.info.get("icc_profile"), mode=picture.mode)
        upright = convert_to_srgb(picture, profile)
        if orientation in TRANSPOSITIONS:
            upright = upright.transpose(TRANSPOSITIONS[orientation])
        _check_size((header.width, header.height), upright.size)  # some plug-ins know it only now
        return write_strips(upright, out)


def _check_size(stated: tuple[int, int], found: tuple[int, int]) -> None:
    """Raises ImageError."""
    if stated != found:
        says, are = (f"{width}×{height}" for width, height in (stated, found))
        raise ImageError(
            Reason.HEADER, f"the header says {says} pixels, but there are {are}: copy the file again"
        )


def read_plain(data: memoryview, header: Header, size: tuple[int, int]) -> np.ndarray | None:
    """The pixels of most JPEGs, of a PNG as nearly all screenshots are, or of a WebP without a profile, uint8 [height, width,
    1, 3 or 4]: libjpeg-turbo, libspng and libwebp write them where numpy wants them, in half of the time that Pillow takes.
    None for all others, for animations, and for those that they refuse: Pillow says what is wrong. size: as stored, width
    and height. Raises ImageError(TRUNCATED)."""
    read = PLAIN_READERS.get(header.format)
    pixels = read(data, header) if read else None
    # Pillow's way refuses what has another size than its header.
    return None if pixels is None or pixels.shape[1::-1] != size else pixels


def _read_jpeg(data: memoryview, header: Header) -> np.ndarray | None:
    from simplejpeg import decode_jpeg

    frame = read_jpeg_frame(data)
    if frame.is_plain and (len(frame.components) == 3 or not find_profile(data, "JPEG")):
        with contextlib.suppress(ValueError):  # with a warning too: Pillow reads what such a file still has
            pixels: np.ndarray = decode_jpeg(data, "RGB" if len(frame.components) == 3 else "GRAY")
            return pixels
    if header.is_deep:
        check_zeros(data)
    return None


def _read_png(data: memoryview, header: Header) -> np.ndarray | None:
    from imagecodecs import SpngError, spng_decode

    if header.pages > 1 or (data[24], data[25], data[28]) not in PLAIN:
        return None
    picture = keep_picture(data).getvalue()
    if any(kind == b"tRNS" for kind, _, _ in png_chunks(memoryview(picture))):
        return None
    picture = _inflate(picture)
    with contextlib.suppress(SpngError):
        pixels = spng_decode(picture)
        return pixels if pixels.ndim == 3 else pixels[..., None]
    return None


def _inflate(picture: bytes) -> bytes:
    """The same PNG with rows that are stored, not compressed: libdeflate inflates them in a third of the time that zlib takes.
    Unchanged if they are compressed to little or not at all, which saves nothing; if libdeflate cannot read them; if memory is
    too short for both forms; or if there are chunks besides, with which libspng decides whether it is sound."""
    from imagecodecs import DeflateError, deflate_decode

    width, height = struct.unpack(">II", picture[16:24])
    size = height * (1 + width * BANDS[picture[25]])  # each row begins with its filter
    if not size // LITTLE <= len(picture) < size:
        return picture
    view = memoryview(picture)
    (first, *packed, last) = png_chunks(view)
    if (first[0], {kind for kind, *_ in packed}, last[0]) != (b"IHDR", {b"IDAT"}, b"IEND"):
        return picture
    try:
        rows = bytes(deflate_decode(b"".join(view[start:end] for _, start, end in packed), out=size))
        return picture if len(rows) < size else _store(picture[:HEADED], rows)
    except (DeflateError, MemoryError):
        return picture


def _store(header: bytes, rows: bytes) -> bytes:
    """A PNG with these rows."""
    from imagecodecs import deflate_adler32

    parts: list[bytes | memoryview] = [b"IDAT", b"\x78\x01"]
    for start in range(0, len(rows), STORED):
        block = memoryview(rows)[start : start + STORED]
        parts += struct.pack("<BHH", start + STORED >= len(rows), len(block), len(block) ^ 0xFFFF), block
    parts.append(deflate_adler32(rows).to_bytes(4, "big"))
    length = sum(map(len, parts)) - len(b"IDAT")
    parts = [header, length.to_bytes(4, "big"), *parts, checksum(*parts).to_bytes(4, "big"), END]
    return b"".join(parts)


def _read_webp(data: memoryview, header: Header) -> np.ndarray | None:
    from imagecodecs import WebpError, webp_decode

    if header.pages > 1 or (data[12:16] == EXTENDED and data[20] & PROFILED):
        return None
    with contextlib.suppress(WebpError):
        return webp_decode(bytes(data))
    return None


PLAIN_READERS = {"JPEG": _read_jpeg, "PNG": _read_png, "WEBP": _read_webp}


def _is_as_shown(pixels: np.ndarray, data: memoryview, header: Header) -> bool:
    """Whether nothing is transparent, and there is no profile."""
    is_opaque = pixels.shape[2] < 4 or pixels[..., 3].min() == 255
    mode = "L" if pixels.shape[2] == 1 else "RGB"
    return bool(is_opaque and not find_profile(data, header.format, mode=mode))


def _write_upright(pixels: np.ndarray, orientation: int, out: memoryview) -> bool:
    """Pixels as shown. Returns whether they are gray."""
    import numpy as np

    is_gray = bool(pixels.shape[2] == 1)
    size, whole = (1, "V1") if is_gray else (3, "V3")  # numpy turns whole pixels twice as fast as their bytes
    stored = pixels[..., :size].view(whole)[..., 0]
    if orientation > 4:
        stored = stored.swapaxes(0, 1)
    upright = np.flip(stored, MIRRORED.get(orientation, ()))
    np.copyto(np.frombuffer(out, whole, upright.size).reshape(upright.shape), upright)
    return is_gray


def _picture_of(pixels: np.ndarray) -> Image.Image:
    height, width, bands = pixels.shape
    mode = {1: "L", 3: "RGB", 4: "RGBA"}[bands]
    return Image.frombuffer(mode, (width, height), pixels, "raw", mode, 0, 1)


def _open(data: memoryview, header: Header) -> Image.Image:
    if header.format == "PNG":
        return OPENERS["PNG"](keep_picture(data))
    if header.format == "BMP" and header.is_deep:
        from stages.images import samples

        return samples.read_bmp(data, bmp_masks(data))
    if header.format != "TIFF":
        try:
            return OPENERS[header.format](io.BytesIO(data))
        except OSError as error:
            if header.format == "BMP" and str(error).startswith("Unsupported BMP"):
                raise ImageError(
                    Reason.FORMAT, f"a BMP of this layout is not supported ({error}): save it as PNG"
                ) from error
            raise
    return open_tiff(find_picture(data))


def open_tiff(picture: Directory) -> Image.Image:
    """The picture of any directory. Raises ImageError."""
    if picture.is_deep:
        from stages.images import samples

        return samples.read_tiff(picture)
    file = io.BytesIO(picture.data)
    # Pillow reads the first directory, and the picture may be in another one.
    file.seek(8 if picture.is_big else 4)
    file.write(struct.pack(picture.order + ("Q" if picture.is_big else "I"), picture.at))
    if picture.compression in (JPEG, OLD_JPEG) and picture.integers(FILL_ORDER):
        file.seek(picture.place_of(FILL_ORDER))  # it says nothing about JPEG, but Pillow would look it up
        file.write(struct.pack(picture.order + "H", 1))
    file.seek(0)
    image = TiffImageFile(file)
    if image.palette and (palette := picture.palette):
        image.palette = ImagePalette.raw("RGB;L", palette)
    return image


def _skip_blank_frames(image: Image.Image, data: memoryview, frames: int) -> Image.Image:
    if frames > 1 and is_blank(image):
        with contextlib.suppress(*BROKEN):
            return skip_blank(PngImageFile(keep_picture(data, FRAMES)), frames)
    return image


def _correct_png(image: Image.Image, data: memoryview, header: Header) -> Image.Image:
    shown = _skip_blank_frames(image, data, header.pages)
    # Of the colors of a later frame Pillow has the upper bytes.
    if header.is_deep and (shown is image or data[25] == 0):
        from stages.images import samples

        significant = png_significant_bits(data)
        if data[25] == 0:
            return samples.reduce_depth(shown, significant)
        return samples.reduce_colors(keep_picture(data).getvalue(), significant)
    image = shown
    bits, clear = data[24], image.info.get("transparency")
    if (bits, data[25]) == (16, 4):  # gray and alpha, which Pillow reads as colors
        return image.convert("LA")
    if image.mode == "L" and bits < 8 and isinstance(clear, int):
        image.info["transparency"] = clear * 255 // ((1 << bits) - 1)
    return image


def _correct_ppm(image: Image.Image, data: memoryview, header: Header) -> Image.Image:
    if not header.is_deep:
        return image
    from stages.images import samples

    return samples.reduce_depth(image)


def _correct_avif(image: Image.Image, data: memoryview, header: Header) -> Image.Image:
    image = skip_blank(image, header.pages)
    crop = find_crop(dict(primary_properties(data)))
    return image if crop == (0, 0, *image.size) else image.crop(crop)


def _correct_bmp(image: Image.Image, data: memoryview, header: Header) -> Image.Image:
    if image.mode == "RGBA" and image.getchannel("A").getextrema() == (0, 0):
        return image.convert("RGB")  # as Windows and browsers show it: nobody draws what cannot be seen
    return image


def _correct_heif(image: Image.Image, data: memoryview, header: Header) -> Image.Image:
    if image.mode != "I;16":
        return image
    return image.convert("I").point([level >> 8 for level in range(1 << 16)], "L")


# What Pillow leaves out, after it has read the pixels.
CORRECTIONS: dict[str, Callable[[Image.Image, memoryview, Header], Image.Image]] = {
    "PNG": _correct_png,
    "PPM": _correct_ppm,
    "AVIF": _correct_avif,
    "HEIF": _correct_heif,
    **dict.fromkeys(("GIF", "WEBP"), lambda image, _, header: skip_blank(image, header.pages)),
    "BMP": _correct_bmp,
    "TIFF": lambda image, *_: image.convert("LA") if image.mode == "La" else image,
}


def _load(image: Image.Image, file_bytes: int) -> None:
    if isinstance(image, JpegImageFile):
        image.decodermaxblock = file_bytes  # all at once: the reader of arithmetic codes cannot wait for more
    try:
        image.load()
    except (OSError, EOFError, SyntaxError, ValueError) as error:
        is_cut = isinstance(error, EOFError) or "truncated" in str(error).lower()
        if is_cut or _is_cut_tiff(image, file_bytes):
            raise ImageError(Reason.TRUNCATED, "the file ends before its pixels do") from error
        raise


def _is_cut_tiff(image: Image.Image, file_bytes: int) -> bool:
    if not isinstance(image, TiffImageFile):
        return False
    return any(
        offset + length > file_bytes
        for offsets, lengths in zip(TIFF_OFFSETS, TIFF_LENGTHS, strict=True)
        for offset, length in zip(image.tag_v2.get(offsets, ()), image.tag_v2.get(lengths, ()), strict=False)
    )
