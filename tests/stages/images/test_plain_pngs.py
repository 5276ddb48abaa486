"""PNGs as screenshots are, which libspng reads: pixels and refusals are those of Pillow."""

from __future__ import annotations

import io
import random
import zlib

import numpy as np
import pytest
from PIL import Image

from stages.contract.base import ImageError, Limits
from stages.images import pixels
from stages.images.images import inspect
from stages.images.profiles import make_profile

WIDE = make_profile((0.68, 0.32, 0.265, 0.69, 0.15, 0.06, 0.3127, 0.329), 0.0)  # as phones and Macs have it
WIDTH, HEIGHT = 61, 47


def picture(alpha: int | None = None) -> Image.Image:
    """Rectangles and noise. alpha: of its right half."""
    noise = np.random.default_rng(1).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    noise[10:30, 5:40] = (200, 30, 90)
    image = Image.fromarray(noise)
    if alpha is not None:
        image.putalpha(255)
        image.paste((10, 20, 30, alpha), (WIDTH // 2, 0, WIDTH, HEIGHT))
    return image


def png(image: Image.Image, orientation: int = 1, **options: object) -> bytes:
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x112] = orientation
    image.save(file, "PNG", exif=exif, **options)
    return file.getvalue()


def answer(data: bytes) -> tuple[object, ...]:
    """The pixels, or what is wrong."""
    try:
        header = inspect(memoryview(data), Limits())
        out = bytearray(3 * header.width * header.height)
        pixels.write_rgb(memoryview(data), header, memoryview(out))
        return header.width, header.height, bytes(out)
    except ImageError as error:
        return error.reason, error.detail
    except (OSError, SyntaxError, ValueError) as error:  # the decoder's child makes an ImageError of it
        return type(error), str(error)


def answer_of_pillow(data: bytes, monkeypatch: pytest.MonkeyPatch) -> tuple[object, ...]:
    with monkeypatch.context() as patch:
        patch.setattr(pixels, "PLAIN", ())
        return answer(data)


PLAIN = {
    "rgb": png(picture()),
    "opaque": png(picture(alpha=255)),
    "transparent": png(picture(alpha=90)),
    "one clear color": png(picture(), transparency=(200, 30, 90)),
    "wide colors": png(picture(), icc_profile=WIDE),
    "wide and transparent": png(picture(alpha=90), icc_profile=WIDE),
    **{f"turned {n}": png(picture(), n) for n in range(2, 9)},
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_png_has_the_pixels_that_pillow_reads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = answer(PLAIN[name])
    assert isinstance(given[2], bytes)
    assert given == answer_of_pillow(PLAIN[name], monkeypatch)


@pytest.mark.parametrize(("name", "is_read"), [("rgb", True), ("opaque", True), ("one clear color", False)])
def test_libspng_reads_rgb_and_rgba_and_no_single_clear_color(name: str, is_read: bool) -> None:
    assert (pixels._read_plain_png(memoryview(PLAIN[name])) is not None) == is_read


def damaged(data: bytes, dice: random.Random) -> bytes:
    """Cut; or a bit is wrong; or a bit of the compressed pixels, with a new checksum."""
    copy, how = bytearray(data), dice.randrange(3)
    if how == 0:
        return bytes(copy[: dice.randrange(40, len(copy))])
    at = copy.index(b"IDAT")
    length = int.from_bytes(copy[at - 4 : at], "big")
    copy[at + 4 + dice.randrange(length)] ^= 1 << dice.randrange(8)
    if how == 1:
        end = at + 4 + length
        copy[end : end + 4] = zlib.crc32(copy[at:end]).to_bytes(4, "big")
    return bytes(copy)


def test_a_damaged_png_gets_the_answer_of_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    dice, answers = random.Random(1), set()
    for _ in range(300):
        data = damaged(dice.choice([PLAIN["rgb"], PLAIN["transparent"]]), dice)
        given = answer(data)
        assert given == answer_of_pillow(data, monkeypatch)
        answers.add(given[0])
    assert len(answers) > 2  # of several kinds
