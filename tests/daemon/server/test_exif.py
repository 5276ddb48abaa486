"""Date and camera from files of all formats, and from damaged ones."""

from __future__ import annotations

import io
import random

import pytest
from PIL import Image
from PIL.TiffImagePlugin import IFDRational

from daemon.server.page.exif import read_exif

TOLD = [
    ("Taken", "2024-05-01 12:30:59 +02:00"),
    ("Camera", "Canon EOS 5D"),
    ("Lens", "EF 35mm"),
    ("Exposure", "1/250 s, f/2.8, ISO 400, 35 mm"),
]


def encode(kind: str) -> bytes:
    out, exif = io.BytesIO(), Image.Exif()
    exif[271], exif[272], exif[306] = "Canon", "Canon EOS 5D", "2026:01:01 00:00:00"
    details = exif.get_ifd(34665)
    details |= {36867: "2024:05:01 12:30:59", 36881: "+02:00", 42036: "EF 35mm", 34855: 400}
    details |= {33434: IFDRational(1, 250), 33437: IFDRational(28, 10), 37386: IFDRational(35, 1)}
    if kind == "TIFF":  # EXIF is one; Pillow writes not all of it into its own
        return exif.tobytes().removeprefix(b"Exif\0\0")
    Image.new("RGB", (40, 30), "red").save(out, kind, exif=exif)
    return out.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_each_format_says_when_and_with_which_camera_it_was_made(kind: str) -> None:
    assert read_exif(encode(kind)) == TOLD


def test_a_file_without_exif_says_nothing() -> None:
    out = io.BytesIO()
    Image.new("RGB", (40, 30)).save(out, "JPEG")
    for data in (out.getvalue(), b"", b"RIFF", b"RIFF....WEBPEXIF", b"II*\0", b"MM\0*\0\0\0\x08"):
        assert read_exif(data) == []


def test_damaged_bytes_are_only_read_wrongly() -> None:
    chance = random.Random(7)
    whole = {kind: encode(kind) for kind in ("JPEG", "TIFF", "WEBP")}
    for turn in range(3000):
        data = bytearray(whole[("JPEG", "TIFF", "WEBP")[turn % 3]])
        start = max(0, data.find(b"Canon") - 200)
        for _ in range(chance.randint(1, 8)):
            data[chance.randrange(start, min(len(data), start + 500))] = chance.randrange(256)
        read_exif(bytes(data[: chance.choice((len(data), chance.randrange(len(data))))]))
