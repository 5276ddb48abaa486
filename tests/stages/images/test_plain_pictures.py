"""JPEG, PNG and WebP as most are, read without Pillow: pixels and refusals are those of Pillow."""

from __future__ import annotations

import io
import random
import zlib
from contextlib import closing
from functools import partial

import imagecodecs
import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from stages.contract.base import ImageError, Limits
from stages.images import pixels
from stages.images.decoder import Decoders
from stages.images.images import decode, inspect
from stages.images.profiles import make_profile
from tests.inputs import chunk

WIDE = make_profile((0.68, 0.32, 0.265, 0.69, 0.15, 0.06, 0.3127, 0.329), 0.0)  # as phones and Macs have it
DARK = make_profile((), 1.0, is_gray=True)
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


def stored(name: str, image: Image.Image, orientation: int = 1, **options: object) -> bytes:
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x112] = orientation
    image.save(file, name, exif=exif if orientation > 1 else b"", **options)
    return file.getvalue()


png, webp = partial(stored, "PNG"), partial(stored, "WEBP", lossless=True)
jpeg = partial(stored, "JPEG", quality=85)


GRAY = png(picture().convert("L"))  # its header ends at byte 33
LINEAR = chunk(b"gAMA", (100_000).to_bytes(4, "big"))


def answer(data: bytes) -> tuple[object, ...]:
    """The pixels, or what is wrong."""
    try:
        header = inspect(memoryview(data), Limits())
        out = bytearray(3 * header.width * header.height)
        is_gray = pixels.write_pixels(memoryview(data), header, memoryview(out))
        return header.width, header.height, is_gray, bytes(out)
    except ImageError as error:
        return error.reason, error.detail
    except (OSError, SyntaxError, ValueError) as error:  # the decoder's child makes an ImageError of it
        return type(error), str(error)


def answer_of_pillow(data: bytes, monkeypatch: pytest.MonkeyPatch) -> tuple[object, ...]:
    with monkeypatch.context() as patch:
        patch.setattr(pixels, "read_plain", lambda *_: None)
        return answer(data)


def small_frame() -> bytes:
    """An animation whose only frame is smaller than its canvas."""
    frame = webp(picture().crop((0, 0, 20, 10)))[12:]
    size = (WIDTH - 1).to_bytes(3, "little") + (HEIGHT - 1).to_bytes(3, "little")
    chunks = [(b"VP8X", b"\x02\0\0\0" + size), (b"ANIM", bytes(6))]
    chunks += [(b"ANMF", b"\1\0\0\2\0\0" + b"\x13\0\0\x09\0\0" + b"\x64\0\0\0" + frame)]
    body = b"".join(kind + len(data).to_bytes(4, "little") + data for kind, data in chunks)
    return b"RIFF" + (4 + len(body)).to_bytes(4, "little") + b"WEBP" + body


PLAIN = {
    "rgb": png(picture()),
    "opaque": png(picture(alpha=255)),
    "transparent": png(picture(alpha=90)),
    "one clear color": png(picture(), transparency=(200, 30, 90)),
    "wide colors": png(picture(), icc_profile=WIDE),
    "wide and transparent": png(picture(alpha=90), icc_profile=WIDE),
    **{f"turned {n}": png(picture(), n) for n in range(2, 9)},
    "gray": GRAY,
    "gray, turned": png(picture().convert("L"), 6),
    "one clear gray": png(picture().convert("L"), transparency=70),
    "gray, of a gamma and a broken cHRM": b"".join((GRAY[:33], LINEAR, chunk(b"cHRM", bytes(32)), GRAY[33:])),
    "gray, of a gray profile": png(picture().convert("L"), icc_profile=DARK),
    "black and white": png(picture().convert("1")),
    "webp": webp(picture()),
    "webp with losses": webp(picture(), lossless=False, quality=50),
    "webp opaque": webp(picture(alpha=255)),
    "webp transparent": webp(picture(alpha=90)),
    "webp of wide colors": webp(picture(), icc_profile=WIDE),
    "webp turned": webp(picture(), 6),
    "webp of two frames": webp(picture(), save_all=True, append_images=[picture(alpha=90)]),
    "webp of a frame below its canvas": small_frame(),
    "jpeg": jpeg(picture()),
    "jpeg of full colors": jpeg(picture(), subsampling=0),
    "jpeg, progressive": jpeg(picture(), progressive=True, subsampling=1),
    "jpeg, gray": jpeg(picture().convert("L")),
    "jpeg, gray, of a gray profile": jpeg(picture().convert("L"), icc_profile=DARK),
    "jpeg of wide colors": jpeg(picture(), icc_profile=WIDE),
    "jpeg, cmyk": jpeg(picture().convert("CMYK")),
    **{f"jpeg turned {n}": jpeg(picture(), n) for n in range(2, 9)},
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_picture_has_the_pixels_that_pillow_reads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = answer(PLAIN[name])
    assert isinstance(given[-1], bytes)
    assert given == answer_of_pillow(PLAIN[name], monkeypatch)


@pytest.mark.parametrize("height", [1, 51, 60, 102])  # 51 rows fill a block that deflate stores
@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_rows_that_libdeflate_inflates_are_those_of_the_file(mode: str, height: int) -> None:
    noise = np.random.default_rng(height).integers(0, 16, (height, 428, len(mode)), np.uint8)
    file = png(Image.fromarray(noise.squeeze(2) if mode == "L" else noise))
    stored = pixels._inflate(file)
    assert len(stored) > noise.size
    assert stored != file
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(stored))).reshape(noise.shape), noise)


@pytest.mark.parametrize(
    "image",
    [Image.new("RGB", (500, 500)), Image.frombytes("L", (200, 50), random.Random(1).randbytes(10_000))],
)
def test_a_png_that_is_compressed_to_little_or_not_at_all_is_left_as_it_is(image: Image.Image) -> None:
    file = png(image)
    assert pixels._inflate(file) is file


@pytest.mark.parametrize("between", [b"PLTE", b"TEST", b"IHDR"])
@pytest.mark.parametrize("grain", [20, 100])  # compressed, or hardly
def test_a_png_with_a_chunk_among_its_pixels_gets_the_answer_of_pillow(
    between: bytes, grain: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = png(Image.effect_noise((200, 50), grain).convert("RGB"))
    at = file.index(b"IDAT") - 4
    end = at + 12 + int.from_bytes(file[at : at + 4], "big")
    content = file[at + 8 : end - 4]
    foreign = chunk(between, file[16:29] if between == b"IHDR" else bytes(3))
    broken = file[:at] + chunk(b"IDAT", content[:99]) + foreign + chunk(b"IDAT", content[99:]) + file[end:]
    assert answer(broken) == answer_of_pillow(broken, monkeypatch)


def test_a_png_is_decoded_as_it_is_when_memory_is_too_short_for_two_forms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = png(Image.effect_noise((200, 50), 20))
    expected = answer(file)

    def fail(*_: object, **__: object) -> bytes:
        raise MemoryError

    monkeypatch.setattr(imagecodecs, "deflate_decode", fail)
    assert pixels._inflate(file) is file
    assert answer(file) == expected


@pytest.mark.parametrize("rows", [-1, 1])
def test_what_libdeflate_finds_too_short_or_too_long_is_left_as_it_is(rows: int) -> None:
    noise = png(Image.effect_noise((200, 50), 20))
    file = noise[:20] + (50 + rows).to_bytes(4, "big") + noise[24:]  # another height
    assert pixels._inflate(file) is file


LEFT = (
    "one clear color",
    "one clear gray",
    "black and white",
    "webp of wide colors",
    "webp of two frames",
    "jpeg, gray, of a gray profile",
    "jpeg, cmyk",
)


@pytest.mark.parametrize("name", PLAIN)
def test_what_has_one_picture_of_gray_rgb_or_rgba_is_not_left_to_pillow(name: str) -> None:
    data, size = memoryview(PLAIN[name]), (WIDTH, HEIGHT)
    assert (pixels.read_plain(data, inspect(data, Limits()), size) is None) == (name in LEFT)


def damaged(data: bytes, dice: random.Random) -> bytes:
    """Cut; or a bit is wrong; or a bit of a PNG's compressed pixels, with a new checksum."""
    copy, how = bytearray(data), dice.randrange(3)
    if how == 0:
        return bytes(copy[: dice.randrange(40, len(copy))])
    if data[:4] != b"\x89PNG":
        copy[dice.randrange(20, len(copy))] ^= 1 << dice.randrange(8)
        return bytes(copy)
    at = copy.index(b"IDAT")
    length = int.from_bytes(copy[at - 4 : at], "big")
    copy[at + 4 + dice.randrange(length)] ^= 1 << dice.randrange(8)
    if how == 1:
        end = at + 4 + length
        copy[end : end + 4] = zlib.crc32(copy[at:end]).to_bytes(4, "big")
    return bytes(copy)


def test_a_damaged_picture_gets_the_answer_of_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    dice, answers = random.Random(1), set()
    for _ in range(300):
        data = damaged(
            PLAIN[
                dice.choice(["rgb", "transparent", "gray", "webp with losses", "webp transparent", "jpeg"])
            ],
            dice,
        )
        given = answer(data)
        assert given == answer_of_pillow(data, monkeypatch)
        answers.add(given[0])
    assert len(answers) > 2  # of several kinds


@pytest.mark.parametrize("name", ["gray", "gray, turned", "black and white", "jpeg, gray"])
def test_one_byte_of_a_gray_pixel_is_moved_and_all_planes_have_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[tuple[int, ...]] = []
    take = torch.from_numpy

    def note(given: np.ndarray) -> torch.Tensor:
        moved.append(given.shape)
        return take(given)

    monkeypatch.setattr(torch, "from_numpy", note)
    data = memoryview(PLAIN[name])
    entry = data, inspect(data, Limits())
    assert answer(PLAIN[name])[2], "it is gray"
    with closing(Decoders(1, Limits())) as decoders:
        [pixels], [tensor] = decoders.decode_all([entry]), decode([entry], "cpu", decoders)
    assert isinstance(pixels, np.ndarray)
    assert pixels.strides == (pixels.shape[1], 1, 0)
    assert moved == [(*pixels.shape[:2], 1)]
    assert isinstance(tensor, torch.Tensor)
    assert tensor.shape == (3, *pixels.shape[:2])
    assert tensor.is_contiguous()
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(PLAIN[name])).convert("L")))
    for plane in tensor.numpy():
        assert np.array_equal(plane, expected)
