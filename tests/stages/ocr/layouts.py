"""Pages whose reading order is known: boxes as the detector draws them, and what they say."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

WORDS = [
    *("river", "stone", "paper", "market", "garden", "window", "silver", "morning", "letter"),
    *("coffee", "bridge", "winter", "under", "before", "the", "of", "and"),
]
NAMES = [
    *("Ada Lovelace", "14 Garden Row", "London", "4711"),
    *("123.45 EUR", "12.03.2026", "+49 30 1234", "Charles Babbage King"),
]
LABELS = ["Name", "Street", "City", "Invoice number", "Total", "Date of birth", "Phone:", "Contact:"]

DISHES = [
    *("Tomato soup", "Green salad", "Apple pie", "Fried rice", "Lemon tart", "Black coffee", "Onion rings"),
    *("Lamb stew", "Garlic bread", "Cheese plate", "Iced tea", "Fish and chips", "Ice cream", "Beef burger"),
]
FIELDS = [
    ("Name", "John Smith"),
    ("Date", "2024-05-01"),
    ("City", "Oslo"),
    ("Phone", "47 11"),
    ("Job", "Clerk"),
    ("Tax", "19 %"),
]
ARABIC = ["كتاب جديد عن النهر", "مدينة على البحر", "طريق إلى السوق", "بيت تحت الشمس"]

GLYPH = 0.5  # width of a letter, in heights

Cell = tuple[float, float, float, str]  # left, top, height of the letters, text
Page = list[Cell]  # in reading order


def prose(pick: random.Random, count: int, most: int = 40) -> list[str]:
    """Lines of words, filled up to `most` characters; the last one of a paragraph is shorter."""
    lines = [" ".join(pick.choices(WORDS, k=12))[:most].rsplit(" ", 1)[0] for _ in range(count)]
    return [*lines[:-1], lines[-1][: most // 2].rsplit(" ", 1)[0]]


def columns(pick: random.Random, count: int, *, top: float = 60, offset: float = 0) -> Page:
    """Columns of text; offset: of each one's rows from those of the one before, in pixels."""
    size, pitch = 22, pick.choice([32, 40, 56])
    return [
        (60 + column * (1180 / count), top + column * offset + row * pitch, size, text)
        for column in range(count)
        for row, text in enumerate(prose(pick, pick.randint(5, 14), 80 // count))
    ]


def headed(pick: random.Random, count: int) -> Page:
    heading = (200.0, 40.0, 44.0, "The long heading of a page about rivers")
    return [heading, *columns(pick, count, top=130)]


def footed(pick: random.Random) -> Page:
    return [*headed(pick, 2), (520, 1100, 20, "Page 3 of a longer report on rivers")]


def form(pick: random.Random) -> Page:
    pitch, left = pick.choice([44, 60, 80]), pick.choice([300, 500, 750])
    rows = list(zip(LABELS, pick.sample(NAMES, len(LABELS)), strict=True))[: pick.randint(2, 8)]
    return [
        cell
        for row, pair in enumerate(rows)
        for cell in zip((75.0, left), (60.0 + row * pitch,) * 2, (28.0, 28.0), pair, strict=True)
    ]


def labels_above(pick: random.Random, rows: int) -> Page:
    """Fields of a form, two beside each other, with the label above the value."""
    size = pick.choice([20, 26, 30])
    pitch = size * pick.choice([3.5, 4.2])
    return [
        (60.0 + 480 * (i % 2), 60 + pitch * (i // 2) + 1.5 * size * part, size, FIELDS[i][part])
        for i in range(2 * rows)
        for part in (0, 1)
    ]


def phrases(pick: random.Random, texts: list[str], count: int) -> Page:
    """A list in columns; the last one may be shorter."""
    rows = -(-len(texts) // count)
    pitch = pick.choice([34, 40, 48])
    return [(60.0 + 400 * (i // rows), 60.0 + pitch * (i % rows), 24, text) for i, text in enumerate(texts)]


def capitals(pick: random.Random) -> Page:
    """A table without numbers."""
    rows = [
        ("Country", "Capital"),
        ("Austria", "Vienna"),
        ("Kenya", "Nairobi"),
        ("Peru", "Lima"),
        ("Japan", "Tokyo"),
    ]
    return [
        (left, 60 + 46 * i, 24, text)
        for i, row in enumerate(rows)
        for left, text in zip((60.0, 330.0), row, strict=True)
    ]


def captions(pick: random.Random) -> Page:
    """Of two lines each, below two pictures."""
    rows = [(left, 400 + 30 * row, 20) for left in (60.0, 560.0) for row in range(2)]
    texts = pick.sample(["when the river was high that spring", "they came down on rafts of wood"] * 2, 4)
    return [(*place, text) for place, text in zip(rows, texts, strict=True)]


def leftwards(pick: random.Random) -> Page:
    """Two columns of Arabic, the right one first."""
    return [
        (right - 12.0 * len(text), 60 + 40 * row, 24, text)
        for right in (1200, 600)
        for row, text in enumerate(pick.sample(ARABIC, 4))
    ]


def receipt(pick: random.Random) -> Page:
    page: Page = [(300, 30, 40, "CORNER SHOP"), (280, 90, 24, "12 Market Street")]
    for row in range(pick.randint(5, 14)):
        y = 160 + row * 40
        page += [
            (60, y, 24, " ".join(pick.choices(WORDS, k=pick.randint(1, 3)))),
            (640, y, 24, f"{row + 1}.50"),
        ]
    return [*page, (60, 760, 30, "TOTAL"), (620, 760, 30, "87.50")]


def table(pick: random.Random) -> Page:
    """Some cells are empty."""
    page: Page = []
    for row in range(pick.randint(4, 12)):
        cells = [
            f"{row + 1}",
            " ".join(pick.choices(WORDS, k=3)),
            f"{pick.randint(1, 99)}",
            f"{pick.random() * 90:.2f}",
        ]
        for column, text in enumerate(cells):
            if column == 1 or pick.random() < 0.9:
                page.append(((60.0, 160.0, 640.0, 860.0)[column], 60.0 + row * 46, 26.0, text))
    return page


def terms(pick: random.Random) -> Page:
    """A table whose cells have one or several lines; its rows are further from each other than these lines."""
    page, top = Page(), 60.0
    for name in pick.sample(["Theft", "Delay", "Illness", "Fire"], 3):
        count = pick.randint(2, 3)
        page.append((60, top, 22, name))
        page += [(300, top + 32 * row, 22, text) for row, text in enumerate(prose(pick, count))]
        page.append((900, top, 22, f"{pick.randint(2, 30)} days"))
        top += 32 * count + 36
    return page


def aside(pick: random.Random) -> Page:
    """A text, and beside its first lines a short list in nearly the same rows."""
    text = [(60, 60 + 30 * row, 20, line) for row, line in enumerate(prose(pick, 20, 60))]
    notes = ["two brushes", "sandpaper, three grades", "a liter of varnish", "masking tape", "old cloths"]
    return [*text, *((860, 61 + 29.5 * row, 18, line) for row, line in enumerate(notes))]


def plate(pick: random.Random) -> Page:
    return [(40, 120, 30, "D"), (120, 40, 130, "M AB"), (560, 42, 130, str(pick.randint(1000, 9999)))]


def sign(pick: random.Random) -> Page:
    """A large number beside two small lines."""
    return [(40, 40, 160, "24"), (400, 50, 50, "Platform"), (400, 140, 50, "to the city center")]


def letter(pick: random.Random) -> Page:
    """After the sender, a date at the right margin, then the text."""
    body = [(60, 420 + 36 * row, 24, text) for row, text in enumerate(prose(pick, 12))]
    return [
        (60, 60, 24, "Ada Lovelace"),
        (60, 100, 24, "14 Garden Row"),
        (900, 200, 24, "May 27, 1993"),
        (60, 300, 24, "Dear Sir,"),
        *body,
    ]


def chat(pick: random.Random) -> Page:
    """Messages at the left and at the right, one below the other."""
    return [(60.0 if row % 2 else 760.0, 60 + row * 90, 26, text) for row, text in enumerate(prose(pick, 12))]


MAKERS: dict[str, Callable[[random.Random], Page]] = {
    "two columns": lambda pick: columns(pick, 2),
    "two columns with rows of their own": lambda pick: columns(pick, 2, offset=17),
    "three columns": lambda pick: columns(pick, 3),
    "a heading over two columns": lambda pick: headed(pick, 2),
    "a heading over three columns": lambda pick: headed(pick, 3),
    "a heading and a footer": footed,
    "form": form,
    "two labels above their values": lambda pick: labels_above(pick, 1),
    "a form with labels above their values": lambda pick: labels_above(pick, pick.randint(2, 3)),
    "a menu in two columns": lambda pick: phrases(pick, pick.sample(DISHES, pick.randint(7, 14)), 2),
    "a menu in three columns": lambda pick: phrases(pick, pick.sample(DISHES, pick.randint(11, 14)), 3),
    "a glossary": lambda pick: phrases(pick, sorted(WORDS), pick.randint(2, 3)),
    "a table of words": capitals,
    "captions": captions,
    "right to left": leftwards,
    "receipt": receipt,
    "table": table,
    "a table whose cells have several lines": terms,
    "a text beside a list": aside,
    "plate": plate,
    "sign": sign,
    "letter": letter,
    "chat": chat,
}


def draw_boxes(page: Page, degrees: float, pick: random.Random, width: float = GLYPH) -> np.ndarray:
    """The boxes of a page that is turned clockwise, float32 [N, 4, 2]. Like a detector's, they are larger than the letters,
    short ones are upright whatever the page's angle is, and their edges are not exact. width: of a letter, in heights."""
    angle = np.radians(degrees)
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    square = np.array([[0, 0], [1, 0], [1, 1], [0, 1]])
    quads = []
    for left, top, size, text in page:
        box = (
            np.array([left, top]) + square * [width * size * len(text), size] + (square * 2 - 1) * 0.2 * size
        )
        quad = box @ turn
        if len(text) < 8:
            low, high = quad.min(axis=0), quad.max(axis=0)
            quad = low + square * (high - low)
        quads.append(quad + np.array([pick.uniform(-1.5, 1.5), pick.uniform(-1.5, 1.5)]))
    return np.array(quads, dtype=np.float32) + 100


def draw_scan(page: Page, pick: random.Random, drop: float = 0.0) -> tuple[Page, np.ndarray]:
    """What a detector finds of a page that is slanted by up to two degrees: edges are not exact, and some pages lack a line."""
    if pick.random() < drop and len(page) > 8:
        lost = pick.randrange(len(page))
        page = [*page[:lost], *page[lost + 1 :]]
    page = [(left, top, size * pick.uniform(0.96, 1.04), text) for left, top, size, text in page]
    quads = draw_boxes(page, pick.uniform(-2, 2), pick, GLYPH * pick.uniform(0.9, 1.0))
    sizes = np.array([cell[2] for cell in page])[:, None, None]
    edges = np.array([[[pick.gauss(0, 0.03) for _ in range(4)]] for _ in page])[
        :, 0
    ]  # left, top, right, bottom
    return page, (quads + sizes * edges[:, [[0, 1], [2, 1], [2, 3], [0, 3]]]).astype(np.float32)
