"""A catalogue of bad and odd inputs, made on demand: what users put into inboxes, and how each must end.

`CATALOGUE` is for every test that feeds files to something. `make()` gives the bytes, `reason` is what the
image fails with (None: it decodes), and `shows_in_header` says whether `inspect` alone finds the fault or
pixels must be decoded for it.
"""

from __future__ import annotations

import io
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from PIL import Image, ImageChops

from stages.contract.base import Reason
from stages.images.formats import heif_is_readable


class Input(NamedTuple):
    name: str
    make: Callable[[], bytes]
    reason: Reason | None
    shows_in_header: bool = True


COLORS = {
    "top left": (200, 40, 40),
    "top right": (40, 180, 60),
    "bottom left": (50, 60, 190),
    "bottom right": (230, 230, 230),
}


def picture(width: int = 96, height: int = 64) -> Image.Image:
    """Four quarters in the four COLORS, so every turn or flip changes it."""
    image = Image.new("RGB", (width, height))
    for index, color in enumerate(COLORS.values()):
        corner = (index % 2 * width // 2, index // 2 * height // 2)
        image.paste(color, (*corner, corner[0] + width // 2, corner[1] + height // 2))
    return image


def encode(image: Image.Image, image_format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, image_format, **options)
    return file.getvalue()


# JPEG
# -----------------------------------------------------------------------------------------------------------------


def jpeg(image: Image.Image | None = None, **options: Any) -> bytes:
    return encode(image or picture(), "JPEG", **{"quality": 92, "subsampling": 0} | options)


UNDO = {  # EXIF orientation → what stores an upright picture so
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def oriented(orientation: int, image_format: str = "JPEG") -> bytes:
    """The picture stored so that EXIF's `orientation` turns it upright."""
    stored = picture() if orientation == 1 else picture().transpose(UNDO[orientation])
    exif = Image.Exif()
    exif[0x112] = orientation
    lossy = {"quality": 92} if image_format in ("JPEG", "AVIF") else {}
    return encode(stored, image_format, exif=exif, **lossy)


def scan_start(data: bytes) -> int:
    """Where the first scan's compressed data begins."""
    at = data.rindex(b"\xff\xda")
    return at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")


def patch_sof(data: bytes, marker: int, precision: int = 8) -> bytes:
    at = data.rindex(b"\xff\xc0")
    return data[: at + 1] + bytes((marker, *data[at + 2 : at + 4], precision)) + data[at + 5 :]


def set_jpeg_size(width: int, height: int) -> bytes:
    data = jpeg()
    at = data.rindex(b"\xff\xc0") + 5
    return data[:at] + struct.pack(">HH", height, width) + data[at + 4 :]


def arithmetic_jpeg(mode: str = "L", *, progressive: bool = False, scans_at: int = 0) -> bytes:
    """With random bytes as its scans: an arithmetic decoder makes a picture of any bits. scans_at: by a comment."""
    head, *scans = jpeg(picture().convert(mode), progressive=progressive).split(b"\xff\xda")
    head = head.replace(*((b"\xff\xc2", b"\xff\xca") if progressive else (b"\xff\xc0", b"\xff\xc9")))
    missing = max(scans_at - len(head) - 4, 0)
    comment = struct.pack(">HH", 0xFFFE, 2 + missing) + bytes(missing)
    dice = random.Random(1)
    parts = [
        b"\xff\xda" + scan[: scan[1]] + bytes(dice.randrange(255) for _ in range(2000)) for scan in scans
    ]
    return head[:2] + comment + head[2:] + b"".join(parts) + b"\xff\xd9"


def without_bytes(start: float, end: float, **options: Any) -> bytes:
    """A photograph's JPEG with zeros in the place of a part of its compressed pixels, and its end marker."""
    data = jpeg(Image.effect_noise((320, 240), 60).convert("RGB"), **{"quality": 80} | options)
    first = data.index(b"\xff\xda") + 14
    size = len(data) - 2 - first
    start, end = first + int(start * size), first + int(end * size)
    return data[:start] + bytes(end - start) + data[end:]


def flat_jpeg(**options: Any) -> bytes:
    """All white: its data are thousands of equal codes of zeros in a row."""
    return jpeg(Image.new("RGB", (900, 700), "white"), optimize=True, **options)


def scanned_jpeg(*scans: tuple[int, int, bytes]) -> bytes:
    """Gray, 320 × 320, progressive, by hand. Each scan has a first and a last coefficient, and for each of the 1,600 blocks the
    one-bit code 0, which means the given symbol, and the bits of its value, which are zeros too."""

    def segment(marker: int, content: bytes) -> bytes:
        return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content

    parts = [
        segment(0xDB, b"\0" + b"\x10" * 64),
        segment(0xC2, struct.pack(">BHHB3B", 8, 320, 320, 1, 1, 0x11, 0)),
    ]
    for first, last, symbol in scans:
        bits = 1600 * (1 + (symbol[0] & 15)) // 8
        parts.append(segment(0xC4, bytes((0x10 if first else 0, 1)) + bytes(15) + symbol))
        parts.append(segment(0xDA, bytes((1, 1, 0, first, last, 0))) + bytes(bits))
    return b"\xff\xd8" + b"".join(parts) + b"\xff\xd9"


# As an optimizer of progressive JPEGs divides a gradient: one coefficient has the same value, -1, in all blocks.
EQUAL_BLOCKS = ((0, 0, b"\0"), (1, 1, b"\1"), (2, 63, b"\0"))


def ycck_jpeg() -> bytes:
    """Adobe's inverted CMYK under the YCbCr transform, read
    but not written by Pillow: its flag is set by hand."""
    planes = ImageChops.invert(picture()).convert("YCbCr").split()
    stored = Image.merge("CMYK", (*map(ImageChops.invert, planes), Image.new("L", planes[0].size, 0)))
    data = jpeg(stored, quality=98)
    at = data.index(b"Adobe") + 11
    return data[:at] + b"\x02" + data[at + 1 :]


# PNG
# ------------------------------------------------------------------------------------------------------------------


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def raw_png(
    width: int, height: int, idat: bytes, extra: bytes = b"", kind: tuple[int, int] = (8, 0)
) -> bytes:
    """kind: bits a channel, color type (0 gray, 2 RGB)."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, *kind, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + extra + chunk(b"IDAT", idat) + chunk(b"IEND", b"")


def png(image: Image.Image | None = None, **options: Any) -> bytes:
    return encode(image or picture(), "PNG", **options)


def png_with_text(text: bytes, checksum: int | None = None) -> bytes:
    """A compressed text chunk before the pixels."""
    data, content = png(), b"Comment\0\0" + zlib.compress(text, 9)
    added = chunk(b"zTXt", content)
    if checksum is not None:
        added = added[:-4] + struct.pack(">I", checksum)
    return data[:33] + added + data[33:]


def damage(data: bytes, at: int) -> bytes:
    return data[:at] + bytes((data[at] ^ 0x55,)) + data[at + 1 :]


def huge_png(side: int = 30_000) -> bytes:
    """side × side black 8-bit pixels in under a megabyte: one deflated block over and over,
    and the known checksum."""
    rows = side // 100
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(bytes(rows * (side + 1))) + packer.flush(zlib.Z_FULL_FLUSH)
    total = side * (side + 1)
    adler = (total % 65521) << 16 | 1  # of this many zeros
    return raw_png(side, side, b"\x78\xda" + block * 100 + b"\x03\x00" + struct.pack(">I", adler))


def gray_16() -> Image.Image:
    """A ramp over the whole 16-bit range, 256 × 8."""
    return Image.frombytes("I;16", (256, 8), struct.pack("<256H", *(257 * level for level in range(256))) * 8)


def with_alpha() -> Image.Image:
    image = picture().convert("RGBA")
    image.paste((0, 0, 0, 0), (0, 0, 48, 32))  # the top left quarter is see-through black
    return image


def see_through_palette() -> bytes:
    image = picture().quantize(16)
    index = image.getpixel((1, 1))
    return png(image, transparency=index)


# Others
# ---------------------------------------------------------------------------------------------------------------


def tiff(image: Image.Image | None = None, **options: Any) -> bytes:
    return encode(image or picture(), "TIFF", **options)


def cut_strip_tiff() -> bytes:
    """The directory before the pixels, as Pillow writes raw TIFF; the pixels cut."""
    return tiff()[:-500]


def animation(image_format: str) -> bytes:
    frames = [picture(), Image.new("RGB", (96, 64), "black"), picture()]
    return encode(frames[0], image_format, save_all=True, append_images=frames[1:], duration=50)


def looped_tiff() -> bytes:
    """Two pages, and the second one's next page is the first."""
    data = bytearray(encode(picture(), "TIFF", save_all=True, append_images=[picture()]))
    first = at = int.from_bytes(data[4:8], "little")
    for page in range(2):
        entries = int.from_bytes(data[at : at + 2], "little")
        following = at + 2 + 12 * entries
        if page:
            data[following : following + 4] = first.to_bytes(4, "little")
        at = int.from_bytes(data[following : following + 4], "little")
    return bytes(data)


def gif_without_picture() -> bytes:
    return b"GIF89a" + struct.pack("<HHBBB", 96, 64, 0, 0, 0) + b";"


def heic(**options: Any) -> bytes:
    """As pillow-heif writes it, which has to be installed."""
    import pillow_heif

    file = io.BytesIO()
    pillow_heif.from_pillow(picture()).save(file, quality=95, chroma=444, **options)
    return file.getvalue()


def avif_named_heic() -> bytes:
    return encode(picture(), "AVIF").replace(b"avif", b"heic").replace(b"mif1", b"mif2")


def zip_archive() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.jpg", jpeg())
    return file.getvalue()


def pnm(kind: int, width: int, height: int, top: int, body: bytes) -> bytes:
    return b"P%d\n# made here\n%d %d\n%d\n" % (kind, width, height, top) + body


def literal(data: bytes) -> Callable[[], bytes]:
    return lambda: data


def half(make: Callable[[], bytes]) -> Callable[[], bytes]:
    def cut() -> bytes:
        data = make()
        return data[: len(data) // 2]

    return cut


BAD: list[Input] = [
    Input("empty", literal(b""), Reason.EMPTY),
    Input("text.jpg", literal(b"not a picture at all\n" * 20), Reason.NOT_AN_IMAGE),
    Input("page.html.jpg", literal(b"\n<!DOCTYPE html><html><body>404</body></html>"), Reason.NOT_AN_IMAGE),
    Input("zip.jpg", zip_archive, Reason.NOT_AN_IMAGE),
    Input(
        "lfs pointer",
        literal(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n"),
        Reason.NOT_AN_IMAGE,
    ),
    Input("video", literal(b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom" + bytes(64)), Reason.NOT_AN_IMAGE),
    Input("zeros", literal(bytes(5000)), Reason.NOT_AN_IMAGE),
    Input("noise", literal(bytes(range(255, 0, -1)) * 9), Reason.NOT_AN_IMAGE),
    Input("eps.jpg", literal(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), Reason.FORMAT),
    Input("pdf.jpg", literal(b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n"), Reason.NOT_AN_IMAGE),
    Input(
        "svg.jpg", literal(b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>'), Reason.FORMAT
    ),
    Input("psd.jpg", literal(b"8BPS\0\1" + bytes(20)), Reason.FORMAT),
    *([] if heif_is_readable() else [Input("heic without its plug-in", avif_named_heic, Reason.FORMAT)]),
    Input("jpeg of 12 bits", lambda: patch_sof(jpeg(), 0xC1, precision=12), Reason.FORMAT),
    Input("jpeg cut in half", half(partial(jpeg, picture(640, 480))), Reason.TRUNCATED),
    Input("jpeg without end marker", lambda: jpeg()[:-2], Reason.TRUNCATED),
    Input(
        "jpeg, tables of an impossible length",
        lambda: jpeg().replace(b"\xff\xdb\0\x43", b"\xff\xdb\0\1", 1),
        Reason.HEADER,
    ),
    Input("jpeg header only", lambda: jpeg()[: scan_start(jpeg())], Reason.TRUNCATED),
    Input("jpeg, second half zeros", partial(without_bytes, 0.5, 1), Reason.TRUNCATED, False),
    Input(
        "jpeg, second half zeros, progressive",
        partial(without_bytes, 0.3, 1, progressive=True),
        Reason.TRUNCATED,
        False,
    ),
    Input(
        "jpeg, second half zeros, tables of its own",
        partial(without_bytes, 0.5, 1, optimize=True),
        Reason.TRUNCATED,
        False,
    ),
    Input("jpeg, a hole of zeros", partial(without_bytes, 0.4, 0.6), Reason.TRUNCATED, False),
    Input("jpeg of 30 bytes", lambda: jpeg()[:30], Reason.TRUNCATED),
    Input("jpeg of 0 × 0", partial(set_jpeg_size, 0, 0), Reason.HEADER),
    Input("jpeg of 65500 × 1", lambda: jpeg(Image.new("RGB", (65500, 1))), Reason.ASPECT),
    Input("png cut in half", half(png), Reason.TRUNCATED),
    Input("png without its last chunk", lambda: png()[:-12], Reason.TRUNCATED),
    Input("png with a bad header checksum", lambda: damage(png(), 30), Reason.HEADER),
    Input("png with a bad pixel checksum", lambda: damage(png(), len(png()) - 14), Reason.DECODER, False),
    Input("png with bad pixels", lambda: raw_png(9, 9, b"\x78\x9c" + b"?" * 50), Reason.DECODER, False),
    Input("png of 0 × 0", partial(raw_png, 0, 0, b""), Reason.HEADER),
    Input("png of 2³¹ × 2³¹", partial(raw_png, 2**31, 2**31, b""), Reason.HEADER),
    Input("png of 30000 × 30000", huge_png, Reason.PIXELS),
    Input("png of 1 × 20000", lambda: png(Image.new("L", (1, 20000))), Reason.ASPECT),
    Input(
        "gif cut in half",
        half(lambda: encode(Image.effect_noise((96, 64), 90), "GIF")),
        Reason.TRUNCATED,
        False,
    ),
    Input("gif without a picture", gif_without_picture, Reason.HEADER),
    Input("webp cut in half", half(lambda: encode(picture(), "WEBP")), Reason.TRUNCATED),
    Input("tiff cut before its directory", half(lambda: tiff(compression="tiff_lzw")), Reason.TRUNCATED),
    Input("tiff cut in its pixels", cut_strip_tiff, Reason.TRUNCATED, False),
    Input("bmp cut in half", half(lambda: encode(picture(), "BMP")), Reason.TRUNCATED, False),
    Input("ppm cut in half", half(lambda: encode(picture(), "PPM")), Reason.TRUNCATED, False),
    Input("avif cut in half", half(lambda: encode(picture(), "AVIF")), Reason.TRUNCATED),
]

EXIF_MESS = {
    "absurd offset": b"Exif\0\0II*\0\xff\xff\xff\xff",
    "cut": b"Exif\0\0MM\0*\0\0\0\x08\0\x63",
    "no tiff": b"Exif\0\0" + b"?" * 40,
    "orientation 9": b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\x09\0\0\0\0\0\0\0",
}
BROKEN_PROFILE = chunk(b"iCCP", b"broken\0\0" + b"not deflate at all")

XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'

ODD: list[Input] = [
    Input("jpeg", jpeg, None),
    Input("jpeg, subsampled", partial(jpeg, subsampling=2), None),
    Input("jpeg, progressive", partial(jpeg, progressive=True), None),
    Input("jpeg, arithmetic-coded", arithmetic_jpeg, None),
    Input("jpeg, comment of an impossible length", lambda: jpeg()[:2] + b"\xff\xfe\0\0" + jpeg()[2:], None),
    Input("jpeg, gray", lambda: jpeg(picture().convert("L")), None),
    Input("jpeg, rgb", partial(jpeg, keep_rgb=True), None),
    Input("jpeg, cmyk", lambda: jpeg(picture().convert("CMYK")), None),
    Input("jpeg, ycck", ycck_jpeg, None),
    Input("jpeg, two pictures (MPO)", lambda: animation("MPO"), None),
    Input("jpeg with junk after its end", lambda: jpeg() + bytes(1000), None),
    Input("jpeg, broken color profile", partial(jpeg, icc_profile=b"no profile" * 20), None),
    *(
        Input(f"jpeg, malformed EXIF: {what}", partial(jpeg, exif=exif), None)
        for what, exif in EXIF_MESS.items()
    ),
    *(Input(f"jpeg, EXIF orientation {turn}", partial(oriented, turn), None) for turn in range(1, 9)),
    Input("jpeg, white, profile of zeros", flat_jpeg, None),
    Input("jpeg, white, progressive, profile of zeros", partial(flat_jpeg, progressive=True), None),
    Input("jpeg, gray, equal coefficients in a narrow scan", partial(scanned_jpeg, *EQUAL_BLOCKS), None),
    Input("jpeg, gray, progressive, without its last scans", partial(scanned_jpeg, EQUAL_BLOCKS[0]), None),
    Input("png", png, None),
    Input("png, text of 3 MB", lambda: png_with_text(bytes(3 << 20)), None),
    Input("png, text with a bad checksum", lambda: png_with_text(b"text", 0), None),
    Input("png, animated", lambda: animation("PNG"), None),
    Input("png of 1 × 1", lambda: png(Image.new("RGB", (1, 1), "red")), None),
    Input("png, broken color profile", lambda: raw_png(9, 9, zlib.compress(bytes(90)), BROKEN_PROFILE), None),
    Input("png, 1-bit", lambda: png(picture().convert("1")), None),
    Input("png, 16-bit gray", lambda: png(gray_16()), None),
    Input(
        "png, 16-bit color", lambda: raw_png(4, 1, zlib.compress(b"\0" + b"\x80\0" * 12), kind=(16, 2)), None
    ),
    Input("png, palette", lambda: png(picture().quantize(16)), None),
    Input("png, palette with transparency", see_through_palette, None),
    Input("png, gray and alpha", lambda: png(with_alpha().convert("LA")), None),
    Input("png, rgba", lambda: png(with_alpha()), None),
    Input("png, EXIF orientation 6", partial(oriented, 6, "PNG"), None),
    Input("gif", lambda: encode(picture(), "GIF"), None),
    Input("gif, animated", lambda: animation("GIF"), None),
    Input("webp", lambda: encode(picture(), "WEBP", quality=95), None),
    Input("webp, lossless", lambda: encode(picture(), "WEBP", lossless=True), None),
    Input("webp, rgba", lambda: encode(with_alpha(), "WEBP", lossless=True), None),
    Input("webp, animated", lambda: animation("WEBP"), None),
    Input("webp, EXIF orientation 8", partial(oriented, 8, "WEBP"), None),
    Input("tiff", tiff, None),
    Input("tiff, compressed", lambda: tiff(compression="tiff_lzw"), None),
    Input("tiff, big", partial(tiff, big_tiff=True), None),
    Input("tiff, several pages", lambda: animation("TIFF"), None),
    Input("tiff, pages in a ring", looped_tiff, None),
    Input("tiff, cmyk", lambda: tiff(picture().convert("CMYK")), None),
    Input("tiff, 16-bit gray", lambda: tiff(gray_16()), None),
    Input("tiff, float", lambda: tiff(picture().convert("L").convert("F")), None),
    *(Input(f"tiff, orientation {turn}", partial(oriented, turn, "TIFF"), None) for turn in (3, 6)),
    Input("tiff, orientation in XMP alone", partial(tiff, tiffinfo={700: XMP}), None),
    Input("bmp", lambda: encode(picture(), "BMP"), None),
    Input("ppm", lambda: encode(picture(), "PPM"), None),
    Input("pgm, 16-bit", lambda: pnm(5, 2, 1, 65535, b"\x80\0\xff\xff"), None),
    Input("pbm", lambda: encode(picture().convert("1"), "PPM"), None),
    Input("avif", lambda: encode(picture(), "AVIF", quality=95), None),
    *([Input("heic", heic, None)] if heif_is_readable() else []),
    *(Input(f"avif, turned as EXIF {turn}", partial(oriented, turn, "AVIF"), None) for turn in range(2, 9)),
]

CATALOGUE: list[Input] = [*BAD, *ODD]


def mutate(data: bytes, chance: random.Random) -> bytes:
    """A few random bit flips, overwritten numbers, cuts, insertions and repetitions,
    most of them near the start."""
    mutant = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        at = chance.randrange(min(len(mutant), chance.choice((64, 400, len(mutant)))))
        match chance.randrange(5):
            case 0:
                mutant[at] ^= 1 << chance.randrange(8)
            case 1:
                mutant[at : at + 4] = chance.choice(
                    (b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff", b"\0\0\0\1", b"\0")
                )
            case 2 if len(mutant) > 100:
                del mutant[at : at + chance.randrange(1, 40)]
            case 3:
                mutant[at:at] = chance.randbytes(chance.randrange(1, 20))
            case _:
                start = chance.randrange(len(mutant))
                mutant[at:at] = mutant[start : start + chance.randrange(1, 60)]
    return bytes(mutant)
