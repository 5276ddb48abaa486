"""Identifies a file by its first bytes: a supported format, or a reason that names what the file is instead. And the
layouts of BMP and netpbm that Pillow does not know."""

from __future__ import annotations

import functools
import importlib.util
import re
import struct
import zlib
from collections.abc import Iterable

from stages.contract.base import ImageError, Reason

HEAD = 4096  # bytes that are looked at

READ: tuple[tuple[bytes, str], ...] = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),  # BigTIFF
    (b"MM\0+", "TIFF"),
)
UNREAD_IMAGES: tuple[tuple[bytes, str], ...] = (
    (b"8BPS", "Photoshop (PSD)"),
    (b"%!PS", "PostScript (EPS)"),
    (b"\xc5\xd0\xd3\xc6", "EPS with a preview"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
    (b"\xff\x0a", "JPEG XL"),
    (b"\0\0\1\0", "ICO"),
    *((b"\0\0\2\0" + bytes((pictures, 0)), "CUR") for pictures in range(1, 17)),  # a TGA has zeros there
    (b"DDS \x7c\0\0\0", "DDS"),
    (b"v/1\1", "OpenEXR"),
    (b"#?RADIANCE", "Radiance HDR"),
    (b"#?RGBE", "Radiance HDR"),
    (b"gimp xcf", "GIMP (XCF)"),
    (b"qoif", "QOI"),
    (b"AT&TFORM", "DjVu"),
    (b"SIMPLE  =", "FITS"),
    (b"FUJIFILMCCD-RAW", "camera raw (RAF)"),
    (b"IIRO", "camera raw (ORF)"),
    (b"IIRS", "camera raw (ORF)"),
    (b"MMOR", "camera raw (ORF)"),
    (b"IIU\0", "camera raw (RW2)"),
    (b"\0MRM", "camera raw (MRW)"),
    (b"FOVb", "camera raw (X3F)"),
    (b"II\x1a\0\0\0HEAPCCDR", "camera raw (CRW)"),
    *((mark + end, "PFM") for mark in (b"Pf", b"PF") for end in (b"\n", b"\r", b" ")),
    (b"P7\n", "PAM"),
    (b"P7 332", "a thumbnail of XV"),
    (b"II\xbc", "JPEG XR"),
    (b"icns", "an icon of macOS (ICNS)"),
    *((b"\1\xda" + kind, "SGI") for kind in (b"\0\1", b"\0\2", b"\1\1", b"\1\2")),
    *((bytes((10, version, 1, bits)), "PCX") for version in (0, 2, 3, 4, 5) for bits in (1, 2, 4, 8)),
    (b"\xb1h\xde:", "DCX"),
    (b"FLIF", "FLIF"),
    (b"BPG\xfb", "BPG"),
    (b"\xd7\xcd\xc6\x9a", "WMF"),
    (b"\1\0\x09\0\0\3", "WMF"),
    (b"\2\0\x09\0\0\3", "WMF"),
    (b"\x8aMNG\r\n\x1a\n", "MNG"),
    (b"\x8bJNG\r\n\x1a\n", "JNG"),
    (b"Y\xa6j\x95", "Sun Raster"),
    (b"SDPX", "DPX"),
    (b"XPDS", "DPX"),
    (b"\x80*_\xd7", "Cineon"),
    (b"\xd7_*\x80", "Cineon"),
    (b"\xff\x10\xff\x50", "JPEG XS"),
    (b"\0\0\0\x0cJXS \r\n\x87\n", "JPEG XS"),
    (b"\x97JB2\r\n\x1a\n", "JBIG2"),
    (b"\xabKTX 11\xbb\r\n\x1a\n", "KTX"),
    (b"\xabKTX 20\xbb\r\n\x1a\n", "KTX2"),
    (b"\x13\xab\xa1\\", "ASTC"),
    (b"PVR\3", "PVR"),
    (b"VTF\0", "VTF"),
    (b"BLP1", "BLP"),
    (b"BLP2", "BLP"),
    (b"Paint Shop Pro Image File\n", "Paint Shop Pro"),
    (b"/* XPM */", "XPM"),
    (b"farbfeld", "farbfeld"),
    (b"S\x80\xf6\x34", "Softimage PIC"),
    (b"NITF02.", "NITF"),
    (b"NSIF01.", "NITF"),
    (b"msid", "MrSID"),
    (b"NRRD000", "NRRD"),
    (b"LBLSIZE=", "VICAR"),
    (b"srcdocid:", "CALS"),
    (b"BEGMF", "CGM"),
    (b"\0\xffKA", "Affinity"),
    (b"id=ImageMagick", "MIFF"),
)
# … and those whose mark is not at the beginning; a negative number counts from the end.
MARKED_LATER: tuple[tuple[int, bytes, str], ...] = (
    (128, b"DICM", "DICOM"),
    (40, b" EMF", "EMF"),
    (522, b"\0\x11\2\xff", "PICT"),
    (-18, b"TRUEVISION-XFILE", "TGA"),
    (8, b"ILBMBMHD", "IFF (ILBM)"),
    (8, b"PBM BMHD", "IFF (PBM)"),
    (8, b"ACONLIST", "ANI"),
    (8, b"ACONanih", "ANI"),
    (30, b"mimetypeimage/openraster", "OpenRaster"),
    (30, b"mimetypeapplication/x-krita", "Krita"),
    (2048, b"PCD_IPI", "PhotoCD"),
    (344, b"n+1\0", "NIfTI"),
    (20, b"GIMP", "a brush of GIMP"),
    (20, b"GPAT", "a pattern of GIMP"),
)
# … and those without a mark, by the form of their header.
UNMARKED: tuple[tuple[re.Pattern[bytes], str], ...] = (
    # A length, whether there are colors, the kind, which colors, a corner, width, height, bits of a pixel, the order.
    (
        re.compile(
            rb"(?s).(?:\x01[\x01\x09]..(?!\0\0)..[\x0f\x10\x18 ]|\0[\x02\x03\n\x0b]\0{5}).{4}"
            rb"(?!\0\0)..(?!\0\0)..[\x08\x0f\x10\x18 ][\0-?]"
        ),
        "TGA",
    ),
    (
        re.compile(rb"(?s)[(l|]\0{3}.{8}\x01\0[\x01\x04\x08\x10\x18 ]\0"),
        "a BMP without its file header (DIB)",
    ),
    (re.compile(rb"\x1bP[\d;]*q"), "Sixel"),
    (re.compile(rb"(?s)BM.{4}\0{4}.{4}[\x0d-@]\0\0\0"), "BMP of OS/2"),
    (re.compile(rb"\s*(?:/\*[^*]*\*/\s*)?#define \w+_width \d"), "XBM"),
)
GZIP = b"\x1f\x8b"
UNPACK = '. To unpack {}, set unpack = ["{}"] in its [[inbox]], restart visiond, and then touch the file'
OTHER_FILES: tuple[tuple[bytes, str], ...] = (
    (b"%PDF-", "a PDF document" + UNPACK.format("a .pdf", "pdf")),
    (b"PK\3\4", "a ZIP archive or an office document" + UNPACK.format("a .zip", "zip")),
    (GZIP, "a gzip archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"Rar!", "a RAR archive"),
    (b"\xfd7zXZ", "an xz archive"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (b"\x7fELF", "a program"),
    (b"SQLite format 3", "an SQLite database"),
    (b"\x1a\x45\xdf\xa3", "a Matroska or WebM video" + UNPACK.format("a video", "video")),
    (b"RIFF", "a RIFF file (AVI or WAV)"),
    (b"ID3", "an MP3 file"),
    (b"OggS", "an Ogg file"),
    (b"\xd0\xcf\x11\xe0", "an old office document"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself"),
)
BMP_HEADERS = frozenset((12, 40, 52, 56, 64, 108, 124))
AVIF_BRANDS = frozenset((b"avif", b"avis"))
HEIF_BRANDS = frozenset((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"))
# Gray, and its brightest value.
DEEP_PNM = re.compile(rb"P[25](?:(?:\s|#[^\r\n]*[\r\n])+\d{1,10}){2}(?:\s|#[^\r\n]*[\r\n])+(\d{3,5})\s")
PNM = re.compile(rb"P([1-6])(?:\s|#[^\r\n]*[\r\n])+(\d{1,10})(?:\s|#[^\r\n]*[\r\n])+(\d{1,10})\s")


def identify(data: memoryview) -> str:
    """The format's name in Pillow ("JPEG", "PNG", "WEBP", …).

    Raises ImageError: EMPTY; FORMAT for an image format that is not supported; NOT_AN_IMAGE for anything else.
    """
    if not data:
        raise ImageError(Reason.EMPTY, "the file is empty")
    head = bytes(data[:32])
    found = _find(READ, head) or _identify_container(data, head) or _identify_bitmap(data, head)
    if found is None:
        raise _refusal(data)
    if found == "HEIF" and not heif_is_readable():
        raise ImageError(
            Reason.FORMAT, "HEIC needs a plug-in: pip install 'visiond[heic]', then restart visiond"
        )
    return found


def _find(names: Iterable[tuple[bytes, str]], head: bytes) -> str:
    """The name of the first prefix that a file begins with; empty if it begins with none."""
    return next((name for prefix, name in names if head.startswith(prefix)), "")


@functools.cache
def heif_is_readable() -> bool:
    return importlib.util.find_spec("pillow_heif") is not None


def _identify_container(data: memoryview, head: bytes) -> str | None:
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return "WEBP"
    if head[4:8] != b"ftyp":
        return None
    box = bytes(data[: min(int.from_bytes(head[:4], "big"), HEAD)])
    brands = {box[8:12], *(box[at : at + 4] for at in range(16, len(box), 4))}
    if brands & AVIF_BRANDS:
        return "AVIF"
    if brands & HEIF_BRANDS:
        return "HEIF"
    if box[8:12] == b"crx ":
        raise ImageError(
            Reason.FORMAT, "camera raw (CR3) is not supported: save it as JPEG, PNG, WebP or TIFF"
        )
    raise ImageError(
        Reason.NOT_AN_IMAGE, "the bytes are a video (MP4 or QuickTime)" + UNPACK.format("a video", "video")
    )


def _identify_bitmap(data: memoryview, head: bytes) -> str | None:
    if head.startswith(b"BM") and int.from_bytes(head[14:18], "little") in BMP_HEADERS:
        return "BMP"
    if head.startswith(b"P") and PNM.match(data[:HEAD]):
        return "PPM"
    return None


def _refusal(data: memoryview) -> ImageError:
    head = bytes(data[:HEAD])
    unread = [_find(UNREAD_IMAGES, head)]
    unread += [name for at, mark, name in MARKED_LATER if bytes(data[at:][: len(mark)]) == mark]
    unread += [name for mark, name in UNMARKED if mark.match(head)]
    if name := next(filter(None, unread), ""):
        return ImageError(Reason.FORMAT, f"{name} is not supported: save it as JPEG, PNG, WebP or TIFF")
    if head.startswith(GZIP) and b"<svg" in _gunzip(head):
        return ImageError(Reason.FORMAT, "SVG is not supported: save it as PNG")
    if name := _find(OTHER_FILES, head):
        return ImageError(Reason.NOT_AN_IMAGE, f"the bytes are {name}")
    if not any(head):
        return ImageError(
            Reason.NOT_AN_IMAGE, "only zero bytes: the file was created, but its content was never written"
        )
    return _refusal_of_text(head)


def _gunzip(head: bytes) -> bytes:
    """The beginning of what is in a gzip file; empty if it is damaged."""
    try:
        return zlib.decompressobj(wbits=31).decompress(head, HEAD)
    except zlib.error:
        return b""


def _refusal_of_text(head: bytes) -> ImageError:
    text = head.decode("utf-8", errors="ignore").lstrip("\ufeff").lstrip()
    lowered = text.lower()
    if lowered.startswith("<") and "<svg" in lowered:
        return ImageError(Reason.FORMAT, "SVG is not supported: save it as PNG")
    if lowered.startswith(("<!doctype html", "<html")):
        return ImageError(Reason.NOT_AN_IMAGE, "the bytes are HTML: a web page saved with an image's name")
    if text and all(character.isprintable() or character.isspace() for character in text[:512]):
        return ImageError(Reason.NOT_AN_IMAGE, "the bytes are plain text")
    return ImageError(Reason.NOT_AN_IMAGE, f"no known format begins with the bytes {head[:8].hex(' ')}")


# Layouts of pixels that Pillow does not know
# --------------------------------------------------------------------------------------------------------------------

# The masks that Pillow reads, by bits of a pixel: red, green, blue, alpha.
BMP_MASKS = {
    16: ((0xF800, 0x7E0, 0x1F, 0), (0x7C00, 0x3E0, 0x1F, 0)),
    32: (
        (0xFF0000, 0xFF00, 0xFF, 0), (0xFF000000, 0xFF0000, 0xFF00, 0), (0xFF000000, 0xFF00, 0xFF, 0), (0, 0, 0, 0),
        (0xFF000000, 0xFF0000, 0xFF00, 0xFF), (0xFF, 0xFF00, 0xFF0000, 0xFF000000),
        (0xFF0000, 0xFF00, 0xFF, 0xFF000000), (0xFF000000, 0xFF00, 0xFF, 0xFF0000),
    ),
}  # fmt: skip


def bmp_masks(data: memoryview) -> tuple[int, ...]:
    """The masks of a BMP that Pillow does not know; () for all others."""
    (header,) = struct.unpack_from("<I", data, 14)
    bits, how = struct.unpack_from("<HI", data, 28) if header >= 40 else (0, 0)
    if how not in (3, 6) or bits not in BMP_MASKS:
        return ()
    has_alpha = header >= 56 or how == 6
    masks: tuple[int, ...] = struct.unpack_from("<4I" if has_alpha else "<3I", data, 54)
    masks = masks if has_alpha else (*masks, 0)
    return () if how == 3 and masks in BMP_MASKS[bits] else masks
