"""Text on a surface: the fonts, the words, and the position of each line."""

from __future__ import annotations

import functools
import importlib.util
import math
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import cv2
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from stages.scenes.drawing import Pixels, Points, Rgb, blend, fill_plain, vary


def list_words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


WORDS = list_words(
    """about above account across active address advice after again agree airport almost always amount angle animal
    annual answer apple april area around arrive artist august autumn average back balance bakery basket beach before
    begin behind better between bicycle board border bottle bottom branch bread breakfast bridge bright broad brother
    brown budget build button camera canal candle capital carbon careful carpet castle cause center central change
    chapter cheese chicken choice church circle city clean clear client climate close coast coffee collect colour
    common company complete concert contact copper corner cotton council country course cover create credit culture
    current customer daily dance danger daughter december decide degree deliver demand dentist depart design detail
    dinner direct discount doctor double dream drive during early earth east economy editor effort eight electric
    energy engine enough entrance equal evening event every exact example except expert export express fabric factory
    family famous farmer father february field figure final finger finish first flight floor flower follow forest
    forward fourth fresh friday friend front fruit future garden gather general gentle glass global golden grade grand
    green ground group growth guide harbour harvest health heart heavy height history holiday honey hotel house hundred
    image improve include income increase index indoor industry island january journey judge july june keep kitchen
    knife ladder language large later laundry leader learn leather lecture lemon lesson letter level library light
    listen local london machine manager march margin market master matter meadow measure medical member memory message
    method middle minute mirror mobile model modern moment monday money month morning mother motor mountain museum
    music narrow nation nature nearby never night normal north november number ocean october offer office often olive
    open orange orchard order outdoor owner oxygen package paint paper parent park partner passage patient people
    pepper period person phone photo piano picture planet plant platform player pocket point police popular position
    potato power present price printer private problem process product profit program project public quality quarter
    question quick quiet railway random reader reason recent record reduce region regular remain repair report rescue
    research result return review river road rocket rough round sample saturday school science season second section
    select senior september series service seven shadow share shelter shoulder signal silver simple single sister
    sketch small social soft solar south spring square stable staff station steady stone storage story street strong
    student studio summer sunday supply surface system table teacher team thank theatre thing thursday ticket timber
    today together tomorrow total tower town track trade traffic train travel tuesday twelve under uniform unique
    update urban useful valley value vehicle village visit visitor volume walking water weather wednesday week welcome
    west wheel white window winter wonder wooden worker world writing yellow young"""
)
NAMES = list_words(
    """Adams Baker Carter Dixon Evans Foster Grant Harris Jones Keller Lewis Martin Nelson Owens Parker Quinn
    Roberts Stevens Turner Vaughn Walker Young Anna Bruno Clara David Emma Felix Greta Hanna Julia Karl Laura Marco
    Nina Oscar Paula Robert Sofia Thomas Vera"""
)
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
INK: Rgb = (28, 30, 36)
PAPER: Rgb = (250, 250, 247)


@functools.cache
def _font_folder() -> Path:
    """The folder of matplotlib's fonts, found without
    importing matplotlib: that would be slow and write caches."""
    spec = importlib.util.find_spec("matplotlib")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            "text scenes use the fonts of matplotlib, which is not installed: pip install matplotlib"
        )
    return Path(spec.submodule_search_locations[0], "mpl-data", "fonts", "ttf")


Font = ImageFont.FreeTypeFont


@functools.lru_cache(maxsize=512)
def _load_font(face: str, size: float) -> Font:
    if face == "Aileron":
        font = ImageFont.load_default(size)
        assert isinstance(font, Font)  # Pillow's wheels contain FreeType
        return font
    return ImageFont.truetype(_font_folder() / f"{face}.ttf", size, layout_engine=ImageFont.Layout.BASIC)


def load_font(face: str, size: float) -> Font:
    """face: a file of matplotlib's fonts, or Aileron, which is Pillow's own. size: pixels to the em."""
    return _load_font(face, max(1.0, round(size * 8) / 8))


@dataclass
class Sheet:
    """A surface with text. lines: each text and the four corners of its ink, clockwise from top left."""

    pixels: Pixels
    em: float
    rng: Random
    lines: list[tuple[str, Points]] = field(default_factory=list)

    @property
    def width(self) -> int:
        return int(self.pixels.shape[1])

    @property
    def height(self) -> int:
        return int(self.pixels.shape[0])

    def fill(self, color: Rgb) -> None:
        self.pixels = fill_plain(self.width, self.height, color)

    def write(self, text: str, x: float, y: float, font: Font, color: Rgb = INK, align: float = 0) -> None:
        """One line whose top is at y; x is its left end (align 0), center (0.5) or right end (1)."""
        left, top, right, bottom = (round(edge) for edge in font.getbbox(text))
        stencil = Image.new("L", (right - left, bottom - top))
        ImageDraw.Draw(stencil).text((-left, -top), text, fill=255, font=font)
        ink = np.asarray(stencil)
        x0, y0 = round(x - align * (right - left)), round(y) + top
        window = self.pixels[y0 : y0 + bottom - top, x0 : x0 + right - left]
        if x0 < 0 or y0 < 0 or window.shape[:2] != ink.shape:
            raise ValueError(
                f"{text!r} at {x0}, {y0} does not fit on a sheet of {self.width}×{self.height} pixels"
            )
        window[:] = blend(window, fill_plain(right - left, bottom - top, color), ink)
        u, v, w, h = cv2.boundingRect(ink)
        u, v = u + x0, v + y0
        self.lines.append((text, np.array([(u, v), (u + w, v), (u + w, v + h), (u, v + h)], np.float64)))

    def place(self, onto: Pixels, corners: Points) -> Sheet:
        """This sheet in perspective: its corners (clockwise from top left) at these points of `onto`."""
        own = np.array([(0, 0), (self.width, 0), (self.width, self.height), (0, self.height)], np.float32)
        matrix = cv2.getPerspectiveTransform(own, corners.astype(np.float32))
        size = (onto.shape[1], onto.shape[0])
        cv2.warpPerspective(self.pixels, matrix, size, dst=onto, borderMode=cv2.BORDER_TRANSPARENT)
        lines = [(text, cv2.perspectiveTransform(box[None], matrix)[0]) for text, box in self.lines]
        return Sheet(onto, self.em, self.rng, lines)

    def place_tilted(self, onto: Pixels, x: float, y: float) -> Sheet:
        """This sheet with its middle at (x, y) of `onto`, turned by up to 3° and seen a little from the side."""
        turn = math.radians(self.rng.uniform(-3, 3))
        half = np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)]) * (self.width / 2, self.height / 2)
        matrix = np.array([(math.cos(turn), math.sin(turn)), (-math.sin(turn), math.cos(turn))])
        jitter = np.array([[self.rng.uniform(-0.3, 0.3) * self.em for _ in range(2)] for _ in range(4)])
        corners = half @ matrix + jitter + (x, y)
        _shade_under(onto, corners, self.em)
        return self.place(onto, corners)


def _shade_under(canvas: Pixels, corners: Points, reach: float) -> None:
    """The soft shadow of a sheet, computed at an eighth of the size."""
    small = np.full((canvas.shape[0] // 8 + 1, canvas.shape[1] // 8 + 1), 255, np.uint8)
    cv2.fillConvexPoly(small, ((corners + reach * 0.4) / 8).round().astype(np.int32), 150)
    soft = cv2.resize(cv2.blur(small, (5, 5)), (canvas.shape[1], canvas.shape[0]))
    cv2.multiply(canvas, cv2.cvtColor(soft, cv2.COLOR_GRAY2RGB), dst=canvas, scale=1 / 255)


def blank_sheet(width: int, height: int, em: float, rng: Random, color: Rgb = PAPER) -> Sheet:
    return Sheet(fill_plain(width, height, vary(color, rng, 4)), em, rng)


# Words.


def compose_text(rng: Random, font: Font, width: float, most: int = 99) -> str:
    """Words that fill a line of this width, at least one."""
    text = rng.choice(WORDS)
    for _ in range(most - 1):
        longer = f"{text} {compose_item(rng)}"
        if font.getlength(longer) > width:
            break
        text = longer
    return text


def compose_item(rng: Random) -> str:
    """A word; in some places a name, a number or a year."""
    dice = rng.random()
    if dice < 0.05:
        return rng.choice(NAMES)
    if dice < 0.09:
        return rng.choice(
            (str(rng.randint(10, 999)), str(rng.randint(1950, 2030)), f"{rng.randint(10, 95)}%")
        )
    return rng.choice(WORDS)


def compose_title(rng: Random, font: Font, width: float, most: int = 4) -> str:
    title = compose_text(rng, font, width * 0.9, most)
    return title.title() if rng.random() < 0.5 else title.capitalize()


def compose_date(rng: Random) -> str:
    day, month, year = rng.randint(10, 28), rng.randint(1, 12), rng.randint(2015, 2029)
    return rng.choice(
        (f"{day} {MONTHS[month - 1]} {year}", f"{year}-{month:02}-{day}", f"{day}.{month:02}.{year}")
    )
