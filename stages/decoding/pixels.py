"""Decodes images to 8-bit RGB with Pillow. Runs only inside a decoder's child process.

The reader of each format is called by name, so that no file can
reach another plug-in of Pillow (EPS would start Ghostscript).
"""

from __future__ import annotations

import io
import math
import warnings
import zlib
from collections.abc import Callable
from typing import cast

from PIL import Image, ImageFile, UnidentifiedImageError
from PIL.AvifImagePlugin import AvifImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.PpmImagePlugin import PpmImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from stages.base import Header, ImageError, Reason
from stages.decoding.headers import png_chunks
from stages.decoding.profiles import convert_to_srgb

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
TURNED_BY_PILLOW = frozenset(("TIFF",))
STRIP_PIXELS = 4_000_000  # converted at once, which limits the additional memory
TIFF_OFFSETS, TIFF_LENGTHS = (273, 324), (279, 325)  # of strips and of tiles


def prepare() -> None:
    """Set up Pillow for untrusted files: no warnings, no threads,
    no check for bombs (`inspect` has checked the size)."""
    import PIL.AvifImagePlugin
    import PIL.ImageCms  # used when no file can be opened any more

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


def write_rgb(data: memoryview, header: Header, out: memoryview) -> None:
    """Decode the first picture of `data` into `out`, rows of RGB from the top, upright.

    Raises ImageError: HEADER if the picture has another size than the header, TRUNCATED, DECODER;
    MemoryError.
    """
    file = keep_picture(data) if header.format == "PNG" else io.BytesIO(data)
    with OPENERS[header.format](file) as image:
        orientation = 1 if header.format in TURNED_BY_PILLOW else header.orientation
        size = (header.height, header.width) if orientation > 4 else (header.width, header.height)
        if image.size != size:
            raise ImageError(Reason.HEADER, f"the header says {size[0]}×{size[1]}, the picture {image.size}")
        image.info.pop("xmp", None)  # Pillow would read an orientation from it that no other program applies
        _load(image, len(data))
        profile = image.info.get("icc_profile")
        upright = convert_to_srgb(reduce_depth(image), data, header.format, profile)
        if orientation in TRANSPOSITIONS:
            upright = upright.transpose(TRANSPOSITIONS[orientation])
        if upright.size != (header.width, header.height):  # some plug-ins know the size only now
            stated = f"{header.width}×{header.height}"
            raise ImageError(Reason.HEADER, f"the header says {stated}, the pixels are {upright.size}")
        _write_strips(upright, out)


def keep_picture(data: memoryview) -> io.BytesIO:
    """A PNG with only the chunks of its first picture. Texts, profiles and other frames are not
    pixels: the decoder does not get them, so it does not matter if they are damaged or too large.

    Raises ImageError: TRUNCATED, and DECODER if the checksum of a chunk that is kept is wrong.
    """
    picture = io.BytesIO()
    picture.write(data[:8])
    for kind, start, end in png_chunks(data):
        if kind[:1].islower() and kind != b"tRNS":
            continue
        if zlib.crc32(data[start - 4 : end]) != int.from_bytes(data[end : end + 4], "big"):
            raise ImageError(Reason.DECODER, f"the checksum of a PNG chunk is wrong ({ascii(kind)[2:-1]})")
        picture.write(data[start - 8 : end + 4])
    picture.seek(0)
    return picture


def _load(image: Image.Image, file_bytes: int) -> None:
    try:
        image.load()
    except (OSError, EOFError, SyntaxError, ValueError) as error:
        if (
            "truncated" in str(error).lower()
            or isinstance(error, EOFError)
            or _is_cut_tiff(image, file_bytes)
        ):
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


def reduce_depth(image: Image.Image) -> Image.Image:
    """Reduce more than 8 bits a channel to 8. Pillow's own conversion would clip values to 255.

    16-bit gray is scaled from its full range. Wider integers and floats have no standard
    range: they are scaled from the darkest to the brightest value of the picture.
    """
    low: float
    high: float
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        low, high = 0, 65535
    elif image.mode in ("I", "F"):
        low, high = cast("tuple[float, float]", image.getextrema())
    else:
        return image
    span = high - low
    scale = 255 / span if span > 0 and math.isfinite(span) else 0.0
    gray = image.convert("I") if image.mode.startswith("I;16") else image
    gray = gray.point(lambda value: value * scale + (0.5 - low * scale)).convert("L")
    gray.info.pop("transparency", None)  # it is in the old scale
    return gray


def _write_strips(image: Image.Image, out: memoryview) -> None:
    width, height = image.size
    rows = max(1, STRIP_PIXELS // width)
    for top in range(0, height, rows):
        bottom = min(top + rows, height)
        strip = image if (top, bottom) == (0, height) else image.crop((0, top, width, bottom))
        out[3 * width * top : 3 * width * bottom] = _convert_to_rgb(strip).tobytes()


def _convert_to_rgb(image: Image.Image) -> Image.Image:
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    white = Image.new("RGB", image.size, "white")
    transparent = image.convert("RGBA")
    white.paste(transparent, mask=transparent)
    return white
