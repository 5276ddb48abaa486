"""Measures decoding alone, by format: CPU time of one core for a photograph, a window with text and a scanned page, as a
decoder's child decodes them.

    python -m benchmarks.decoding --rounds 5
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from random import Random

from PIL import Image

from benchmarks.harness import read_options, spread
from stages.contract.base import Limits
from stages.images import pixels
from stages.images.images import inspect
from stages.scenes.inputs import PHONE, draw_screen, draw_sheet, take_photograph

WINDOW = 1  # the index of a screenshot without a photograph
PHOTOGRAPH: dict[str, dict[str, object]] = {
    "JPEG": {"quality": 92},
    "JPEG, progressive": {"quality": 92, "progressive": True},
    "PNG": {"compress_level": 3},
    "WebP": {"quality": 82, "method": 2},
    "AVIF": {"quality": 70, "speed": 8},
    "HEIF": {"quality": 64},
    "TIFF": {},
    "TIFF, LZW": {"compression": "tiff_lzw"},
    "TIFF, deflate": {"compression": "tiff_adobe_deflate"},
    "BMP": {},
}


def main() -> None:
    options = read_options(__doc__, rounds=5)
    pixels.prepare()
    files = dict(make_files())
    seconds: dict[str, list[float]] = {name: [] for name in files}
    for _ in range(options.rounds):  # in turns
        for name, data in files.items():
            seconds[name].append(decode(data))
    for name, data in files.items():
        milliseconds = [1000 * each for each in seconds[name]]
        print(f"{name:44} {len(data):12,} bytes  {spread(milliseconds, 1)} ms")


def make_files() -> Iterator[tuple[str, bytes]]:
    photograph = take_photograph(Random(1), 1, *PHONE, grain=0.08)
    for name, options in PHOTOGRAPH.items():
        format = name.partition(",")[0]
        if format.upper() in Image.SAVE:  # HEIC is an extra
            yield f"photograph of 12 megapixels, {name}", save(Image.fromarray(photograph), format, options)
    screen = take_photograph(Random(2), 1, 1920, 1080, grain=0.04)
    yield "1920×1080, a photograph, PNG", save(Image.fromarray(screen), "PNG", {"compress_level": 3})
    yield "1920×1080, windows with text, PNG", draw_screen(Random(3), WINDOW)[1]
    page = Image.fromarray(draw_sheet(Random(4)).pixels)
    yield "A4 at 300 dpi, JPEG", save(page, "JPEG", {"quality": 82})
    yield "A4 at 300 dpi, gray PNG", save(page.convert("L"), "PNG", {})
    bits = page.convert("L").point(lambda value: 255 * (value > 140), mode="1")
    yield "A4 at 300 dpi, one bit, TIFF G4", save(bits, "TIFF", {"compression": "group4"})


def save(image: Image.Image, format: str, options: dict[str, object]) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def decode(data: bytes) -> float:
    """CPU seconds."""
    view = memoryview(data)
    header = inspect(view, Limits())
    out = memoryview(bytearray(3 * header.width * header.height))
    started = time.process_time()
    pixels.write_pixels(view, header, out)
    return time.process_time() - started


if __name__ == "__main__":
    main()
