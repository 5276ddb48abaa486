"""On which ground a transparent picture is put: the one that shows what is drawn."""

from __future__ import annotations

import pytest
from PIL import Image, ImageDraw, ImageFont

from stages.images.decoder import Decoder
from tests.inputs import encode
from tests.stages.images.layouts import shown


def on_nothing(level: int) -> bytes:
    image = Image.new("RGBA", (80, 40))
    image.paste((level, level, level, 255), (20, 10, 40, 30))
    return encode(image, "PNG")


def test_light_drawings_on_nothing_get_a_black_ground_and_all_others_a_white_one(decoder: Decoder) -> None:
    assert shown(decoder, on_nothing(250))[0, 0].tolist() == [0, 0, 0]
    assert shown(decoder, on_nothing(150))[0, 0].tolist() == [255, 255, 255]
    page = Image.new("RGBA", (80, 40), "white")
    page.paste((0, 0, 0, 0), (0, 0, 9, 9))  # a window with a corner
    assert shown(decoder, encode(page, "PNG"))[0, 0].tolist() == [255, 255, 255]


def letters(*fills: tuple[int, int, int, int], outline: tuple[int, ...] = ()) -> Image.Image:
    """A line of letters in each of these colors, on nothing."""
    image = Image.new("RGBA", (300, 40 * len(fills) + 20))
    for number, fill in enumerate(fills):
        ImageDraw.Draw(image).text(
            (10, 10 + 40 * number),
            "TOTAL 12.50",
            fill,
            FONT,
            stroke_width=3 * bool(outline),
            stroke_fill=outline or None,
        )
    return image


FONT = ImageFont.load_default(30)
LIGHT, DARK = (255, 255, 255, 255), (0, 0, 0, 255)


def beside_a_block(image: Image.Image) -> Image.Image:
    image.paste(DARK, (240, 5, 290, 55))
    return image


@pytest.mark.parametrize("name", ["PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize(
    ("image", "ground"),
    [
        *((letters((255, 255, 255, alpha)), 0) for alpha in (60, 90, 120)),
        *((letters((0, 0, 0, alpha)), 255) for alpha in (60, 90, 120)),
        (letters((150, 150, 150, 90)), 255),
        (letters((255, 0, 0, 90)), 255),
        (beside_a_block(letters(LIGHT, LIGHT)), 0),
        (beside_a_block(letters((255, 255, 255, 90), LIGHT)), 0),
        (letters(LIGHT, DARK), 128),
        (letters((255, 255, 255, 90), (0, 0, 0, 90)), 128),
        (letters(LIGHT, DARK, DARK, DARK), 128),
        (letters(LIGHT, LIGHT, LIGHT, DARK), 128),
        (letters(LIGHT, DARK, (128, 128, 128, 255)), 64),
        (letters(LIGHT, DARK, (64, 64, 64, 255), (128, 128, 128, 255)), 192),
        (letters((225, 225, 225, 255), DARK), 255),  # OCR reads that
        (letters((255, 255, 0, 255), (0, 0, 160, 255)), 255),
        (letters(DARK, outline=LIGHT), 255),
        (letters(LIGHT, outline=DARK), 255),
    ],
)
def test_the_ground_of_a_drawing_on_nothing_is_the_one_that_shows_it(
    decoder: Decoder, image: Image.Image, ground: int, name: str
) -> None:
    options = {"lossless": True} if name == "WEBP" else {}
    found = shown(decoder, encode(image, name, **options))
    assert found[0, 0].tolist() == [ground] * 3
    assert int(found.max()) - int(found.min()) > 30


@pytest.mark.parametrize(
    ("name", "mode"), [("PNG", "RGBA"), ("PNG", "LA"), ("PNG", "P"), ("GIF", "RGBA"), ("WEBP", "RGBA")]
)
def test_all_letters_are_seen_when_some_are_light_and_some_are_dark(
    decoder: Decoder, name: str, mode: str
) -> None:
    image = letters(LIGHT, DARK).resize((1500, 500), Image.Resampling.NEAREST)  # more than is looked at
    image = image.quantize(method=Image.Quantize.FASTOCTREE) if mode == "P" else image.convert(mode)
    found = shown(decoder, encode(image, name, **{"lossless": True} if name == "WEBP" else {}))
    assert found[0, 0].tolist() == [128] * 3
    assert found[:250].max() > 250
    assert found[250:].min() < 5
