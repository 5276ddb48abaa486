"""When a picture was taken and with which camera, as its file says in EXIF. Plain Python without native code, like
stages/images/tiff.py: bad bytes can only raise an exception, and what they say is only text."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

from stages.images.tiff import EXIF, Directory, walk

SEARCHED = 64 << 20  # bytes of a file in which its EXIF is looked for
BLOCK = 1 << 20  # most bytes of EXIF; in a JPEG there can be 64 KiB
LONGEST = 100  # characters of a text
BEGINNINGS = (b"II*\0", b"MM\0*")  # of a TIFF, which EXIF is
MARKS = (EXIF, b"eXIf")  # what stands before it: in JPEG, HEIF and AVIF; in PNG
CHUNK = b"EXIF"  # in WebP, followed by a size

MAKE, MODEL, CHANGED, DETAILS = 271, 272, 306, 34665
EXPOSURE, APERTURE, SPEED, TAKEN, ZONE, LENGTH, LENS = 33434, 33437, 34855, 36867, 36881, 37386, 42036
RATIO = 5  # a type of values
DATE = re.compile(r"(\d{4}):(\d\d):(\d\d) (\d\d:\d\d:\d\d)")
ZONES = re.compile(r"[+-]\d\d:\d\d")


def read_exif(data: bytes) -> list[tuple[str, str]]:
    """What a file says of its making, by name: Taken, Camera, Lens, Exposure. Empty if it says nothing that can be read."""
    block = _find_block(data)
    try:
        first = next(walk(block), None)
        return [(name, text) for name, text in _describe(first) if text] if first else []
    except (struct.error, IndexError, ValueError):
        return []


def _find_block(data: bytes) -> memoryview:
    if data.startswith(BEGINNINGS):
        return memoryview(data)
    wanted = [mark + beginning for mark in MARKS for beginning in BEGINNINGS]
    found = [at + len(each) - 4 for each in wanted if (at := data.find(each, 0, SEARCHED)) >= 0]
    if data.startswith(b"RIFF") and (at := data.find(CHUNK, 0, SEARCHED)) >= 0:
        found += [at + 8] if data[at + 8 : at + 12] in BEGINNINGS else []
    return memoryview(data)[min(found) :][:BLOCK] if found else memoryview(b"")


def _describe(first: Directory) -> Iterator[tuple[str, str]]:
    at = first.integer(DETAILS)
    details = Directory(first.data, at) if at else first
    date = DATE.match(details.text(TAKEN)) or DATE.match(first.text(CHANGED))
    zone = ZONES.match(details.text(ZONE))
    if date:
        yield "Taken", f"{date[1]}-{date[2]}-{date[3]} {date[4]}{f' {zone[0]}' if zone else ''}"
    make, model = (first.text(tag)[:LONGEST] for tag in (MAKE, MODEL))
    # Many models begin with the make already.
    yield "Camera", model if model.lower().startswith(make.lower()) else f"{make} {model}".strip()
    yield "Lens", details.text(LENS)[:LONGEST]
    yield "Exposure", ", ".join(filter(None, _expose(details)))


def _expose(details: Directory) -> Iterator[str]:
    seconds, aperture, length = (_ratio(details, tag) for tag in (EXPOSURE, APERTURE, LENGTH))
    yield f"1/{1 / seconds:.0f} s" if 0 < seconds < 0.4 else f"{seconds:g} s" if seconds else ""
    yield f"f/{aperture:.2g}" if aperture else ""
    yield f"ISO {speed}" if (speed := details.integer(SPEED)) else ""
    yield f"{length:.3g} mm" if length else ""


def _ratio(details: Directory, tag: int) -> float:
    """A number that is stored as two; 0 if there is none, or in BigTIFF, which no camera writes."""
    try:
        place = details.place_of(tag)
    except ValueError:
        return 0.0
    kind, _, at = struct.unpack_from(f"{details.order}HII", details.data, place - 6)
    if kind != RATIO or details.is_big:
        return 0.0
    over, under = struct.unpack_from(f"{details.order}II", details.data, at)
    return float(over / under) if under else 0.0
