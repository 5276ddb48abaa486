"""The files that people drop: pictures of the web, photographs of phones, screenshots, scans, and pages as others measure OCR
with, for `visiond bench --inputs`.

They are for measurements of speed, so formats, sizes and bytes are as usual, and there is no truth of what they show. The same
seed and index give the same file on the same library versions with the same packages, some of which carry photographs.
"""

from __future__ import annotations

import functools
import io
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import cv2
import numpy as np
from PIL import ExifTags, Image

from stages.scenes.drawing import Pixels, add_grain, add_light, fill_gradient
from stages.scenes.generator import TURNS, make_scene, map_processes
from stages.scenes.pages import draw_page, draw_receipt, draw_slide
from stages.scenes.photographs import find_photographs
from stages.scenes.sheets import Sheet, blank_sheet

DISTINCT = 32  # different files of a kind
DISTINCT_PHONES = 128  # of which those of 48 megapixels, too, have all orientations
WORTH_A_PROCESS = 4  # of them
MEGAPIXELS = 1_000_000
PHONE, LARGE_PHONE = (4032, 3024), (8064, 6048)
A4_300_DPI = (2480, 3508)
LETTER, RECEIPT = (762, 1000), (864, 1296)  # as large as in the data sets FUNSD and CORD
PDF_PAGES = 4
CROP = 1024  # pixels; enough to know how well an image compresses
# Kinds whose files have one format and size: of so many files of the kind before the hyphen, which ones.
UNIFORM: dict[str, tuple[int, Sequence[int]]] = {
    "phone-12": (16, range(15)),
    "phone-48": (16, [15]),
    "screen-photo": (2, [0]),
    "screen-window": (4, [1]),
    "scan-jpeg": (10, range(5)),
    "scan-tiff": (10, range(5, 9)),
}


def is_of(kind: str, index: int) -> bool:
    """Whether the file with this index, of the kind before the hyphen, is one of this kind."""
    every, turns = UNIFORM[kind]
    return index % every in turns


def draw_web(rng: Random, index: int) -> tuple[str, bytes]:
    """0.3 to 1.9 megapixels, 166 kB on average."""
    ratio = rng.choice((1.0, 4 / 3, 3 / 2, 16 / 9))
    height = round((rng.uniform(0.3, 1.9) * MEGAPIXELS / ratio) ** 0.5)
    pixels = take_photograph(rng, index, round(height * ratio), height, grain=0.06)
    return ".jpg", encode_jpeg(pixels, bytes_per_pixel=0.163)


def draw_phone(rng: Random, index: int) -> tuple[str, bytes]:
    """12 megapixels, 2.9 MB; some 48. One after another has each EXIF orientation."""
    size = LARGE_PHONE if is_of("phone-48", index) else PHONE
    image = take_photograph(rng, index, *size, grain=0.08)
    orientation = (index + index // 16) % 8 + 1
    exif = Image.Exif()
    exif[ExifTags.Base.Make], exif[ExifTags.Base.Orientation] = "visiond", orientation
    turned = Image.fromarray(image)
    if orientation != 1:
        turned = turned.transpose(TURNS[orientation])
    return ".jpg", encode_jpeg(np.asarray(turned), bytes_per_pixel=0.268, exif=exif.tobytes())


def draw_screen(rng: Random, index: int) -> tuple[str, bytes]:
    """1920×1080. Every second one is a photograph, as a PNG of about 2.6 MB; the others have windows with text, as PNG, or also
    with a photograph, as WebP."""
    if is_of("screen-photo", index):
        return ".png", encode(take_photograph(rng, index, 1920, 1080, grain=0.04), "PNG", compress_level=3)
    ground = [(rng.randint(20, 90), rng.randint(40, 120), rng.randint(60, 160)) for _ in range(2)]
    screen = fill_gradient(1920, 1080, *ground)
    for left, top in ((60, 70), (1000, 130)):
        window = blank_sheet(860, 800, rng.uniform(17, 21), rng, (250, 250, 250))
        rng.choice((draw_page, draw_slide))(window)
        screen[top : top + 800, left : left + 860] = window.pixels
        cv2.rectangle(screen, (left, top - 32), (left + 859, top), (214, 216, 220), -1)
    if is_of("screen-window", index):
        return ".png", encode(screen, "PNG", compress_level=3)
    screen[560:1040, 1100:1740] = take_photograph(rng, index, 640, 480, grain=0.05)
    return ".webp", encode(screen, "WEBP", quality=82)


def draw_scan(rng: Random, index: int) -> tuple[str, bytes]:
    """A4 at 300 dpi: five JPEGs in color, four TIFFs of one bit (CCITT G4), and a PDF of four pages, one after another."""
    if is_of("scan-jpeg", index):
        page = draw_sheet(rng).pixels
        add_light(page, rng)
        add_grain(page, rng, 0.05)
        return ".jpg", encode(page, "JPEG", quality=82, dpi=(300, 300))
    if is_of("scan-tiff", index):
        return ".tif", encode_bits([draw_sheet(rng)], "TIFF", compression="group4", dpi=(300, 300))
    pages = [draw_sheet(rng) for _ in range(PDF_PAGES)]
    return ".pdf", encode_bits(pages, "PDF", save_all=True, resolution=300)


def draw_letter(rng: Random, index: int) -> tuple[str, bytes]:
    """A page of about 40 lines, in gray."""
    sheet = blank_sheet(*LETTER, rng.uniform(12, 14), rng)
    draw_page(sheet)
    add_grain(sheet.pixels, rng, 0.05)
    return ".png", encode(cv2.cvtColor(sheet.pixels, cv2.COLOR_RGB2GRAY), "PNG", compress_level=6)


def draw_receipt_photograph(rng: Random, index: int) -> tuple[str, bytes]:
    """A photograph of a receipt with about 30 texts, as a name and its price are two."""
    sheet = blank_sheet(*RECEIPT, rng.uniform(38, 44), rng)
    draw_receipt(sheet)
    add_light(sheet.pixels, rng)
    add_grain(sheet.pixels, rng, 0.05)
    return ".jpg", encode(sheet.pixels, "JPEG", quality=90)


DRAW: dict[str, Callable[[Random, int], tuple[str, bytes]]] = {
    "web": draw_web,
    "phone": draw_phone,
    "screen": draw_screen,
    "scan": draw_scan,
    "letter": draw_letter,
    "receipt": draw_receipt_photograph,
}


def write_inputs(folder: Path, kind: str, seed: int) -> None:
    """Write different files of this kind, in several processes."""
    folder.mkdir(parents=True, exist_ok=True)
    work = functools.partial(_write_input, folder, kind, seed)
    for _ in map_processes(work, DISTINCT_PHONES if kind == "phone" else DISTINCT, WORTH_A_PROCESS):
        pass


def _write_input(folder: Path, kind: str, seed: int, index: int) -> None:
    suffix, data = DRAW[kind](Random(f"{kind} {seed} {index}"), index)
    (folder / f"{kind}-{seed}-{index:06}{suffix}").write_bytes(data)


def copy_inputs(originals: Path, folder: Path, kind: str, count: int) -> None:
    """Write `count` files of this kind, each with bytes of its own: an original with its number in what readers skip."""
    folder.mkdir(parents=True)
    files = sorted(originals.iterdir())
    if kind in UNIFORM:
        files = [file for file in files if is_of(kind, int(file.stem.rpartition("-")[2]))]
    for number in range(count):
        original = files[number % len(files)]
        (folder / f"{number:06}-{original.name}").write_bytes(stamp(original.read_bytes(), number))


def stamp(data: bytes, number: int) -> bytes:
    """The same image with this number in a comment."""
    text = b"%012d" % number
    if data.startswith(b"\xff\xd8"):
        end = 4 + int.from_bytes(data[4:6], "big")  # of the first segment: JFIF or Exif
        return data[:end] + b"\xff\xfe" + struct.pack(">H", 2 + len(text)) + text + data[end:]
    if data.startswith(b"\x89PNG"):
        end = 33  # of IHDR
        body = b"tEXtComment\x00" + text
        chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
        return data[:end] + chunk + data[end:]
    if data.startswith(b"RIFF"):
        longer = data[8:] + b"note" + struct.pack("<I", len(text)) + text
        return b"RIFF" + struct.pack("<I", len(longer)) + longer
    return data + b"\n%" + text + b"\n"  # a comment of PDF; what nothing in a TIFF points to


# Drawing.


@functools.cache
def _photographs() -> list[Pixels]:
    found = [cv2.imread(str(path)) for path in find_photographs()]
    return [
        cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
        for image in found
        if image is not None and min(image.shape[:2]) >= 400
    ]


def take_photograph(rng: Random, index: int, width: int, height: int, *, grain: float) -> Pixels:
    """A part of a photograph that an installed package carries or, every second time, of a drawn scene; enlarged, with the
    noise of a sensor."""
    known = _photographs()
    picture = known[index // 2 % len(known)] if known and index % 2 else make_scene(7, index, 1600).pixels
    share = rng.uniform(0.7, 1.0)
    high, wide = picture.shape[:2]
    scale = share * min(wide / width, high / height)
    part_wide, part_high = int(width * scale), int(height * scale)
    left, top = rng.randint(0, wide - part_wide), rng.randint(0, high - part_high)
    part = picture[top : top + part_high, left : left + part_wide]
    enlarged: Pixels = cv2.resize(part, (width, height), interpolation=cv2.INTER_CUBIC)
    add_grain(enlarged, rng, grain)
    return enlarged


def draw_sheet(rng: Random) -> Sheet:
    sheet = blank_sheet(*A4_300_DPI, rng.uniform(42, 50), rng)
    draw_page(sheet)
    return sheet


def encode(pixels: Pixels, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format, **options)
    return buffer.getvalue()


def encode_jpeg(pixels: Pixels, *, bytes_per_pixel: float, exif: bytes = b"") -> bytes:
    """At the quality at which the middle of the image has about this number of bytes for a pixel."""
    top, left = (max(0, side - CROP) // 2 for side in pixels.shape[:2])
    crop = np.ascontiguousarray(pixels[top : top + CROP, left : left + CROP])
    room = bytes_per_pixel * crop.shape[0] * crop.shape[1]
    least, most = 30, 97
    while least < most:
        quality = (least + most + 1) // 2
        if len(encode(crop, "JPEG", quality=quality)) <= room:
            least = quality
        else:
            most = quality - 1
    return encode(pixels, "JPEG", quality=least, exif=exif) if exif else encode(pixels, "JPEG", quality=least)


def encode_bits(sheets: list[Sheet], format: str, **options: object) -> bytes:
    """Pages in black and white."""
    pages = [
        Image.fromarray(sheet.pixels).convert("L").point(lambda value: 255 * (value > 140), mode="1")
        for sheet in sheets
    ]
    if len(pages) > 1:
        options["append_images"] = pages[1:]
    buffer = io.BytesIO()
    pages[0].save(buffer, format, **options)
    return buffer.getvalue()
