"""Documents whose reading order is known: newspapers, forms, invoices, as boxes of lines that are not exact."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from tests.stages.ocr.layouts import DISHES, GLYPH, Cell, Page, prose

HEADINGS = [
    "Flood in the north",
    "Harbor opens again",
    "Council votes",
    "A winter of records",
    "Sport",
    "Local news",
]
PEOPLE = [
    "Ada Lovelace",
    "J. Smith",
    "Maria Gonzalez Ruiz",
    "Tom Baker",
    "Dr. E. Weiss",
    "Li Wei",
    "Anna-Lena Voss",
]
STREETS = [
    "14 Garden Row",
    "Hauptstr. 7",
    "221B Baker Street",
    "PO Box 1180",
    "3 rue de la Paix",
    "Unit 9, Dock Road",
]
TOWNS = ["London", "10115 Berlin", "75002 Paris", "Springfield IL 62704", "Leeds LS1 4DY", "Oslo"]
FIRMS = [
    "Acme Ltd.",
    "Northwind Traders",
    "Weber & Sons GmbH",
    "Blue River Supplies",
    "Contoso",
    "City Hospital",
]
ENDS = ["Germany", "VAT DE123456789", "Tel. 030 1234567", "office@acme.example", "United Kingdom"]
FIELDS: list[tuple[str, Callable[[random.Random], str]]] = [
    ("Surname", lambda pick: pick.choice(["Smith", "Gonzalez Ruiz", "Baker", "Weiss"])),
    ("Given names", lambda pick: pick.choice(["John Peter", "Maria", "Tom", "Eva Anna"])),
    (
        "Date of birth",
        lambda pick: f"{pick.randint(10, 28)}.{pick.randint(10, 12)}.{pick.randint(1940, 2005)}",
    ),
    ("Nationality", lambda pick: pick.choice(["British", "Norwegian", "German"])),
    ("Sex", lambda pick: pick.choice(["F", "M"])),
    ("Place of birth", lambda pick: pick.choice(["Oslo", "New York", "Leeds"])),
    ("Passport no.", lambda pick: f"C{pick.randint(1000000, 9999999)}"),
    ("Expires", lambda pick: f"20{pick.randint(26, 36)}-0{pick.randint(1, 9)}-{pick.randint(10, 28)}"),
    ("Street", lambda pick: pick.choice(STREETS)),
    ("Postal code", lambda pick: str(pick.randint(10000, 99999))),
    ("City", lambda pick: pick.choice(["Oslo", "Berlin", "New York"])),
    ("Telephone", lambda pick: f"+49 30 {pick.randint(10000, 99999)}"),
    ("E-mail", lambda pick: pick.choice(["ada@mill.example", "tom.baker@post.example"])),
    ("Employer", lambda pick: pick.choice(FIRMS)),
    ("Occupation", lambda pick: pick.choice(["Clerk", "Nurse", "Software engineer"])),
    ("Marital status", lambda pick: pick.choice(["single", "married"])),
]
QUESTIONS = [
    "What is the capital of Peru?",
    "Which river is the longest?",
    "Who wrote the book Emma?",
    "What is 12 times 12?",
]
ANSWERS = [
    "Lima",
    "Paris",
    "the Nile",
    "144",
    "132",
    "Jane Austen",
    "Charles Dickens",
    "a kind of bread",
    "none of these",
]


def lines(left: float, top: float, size: float, texts: Sequence[str], pitch: float = 1.5) -> Page:
    """A block of lines; pitch: in sizes."""
    return [(left, top + i * pitch * size, size, text) for i, text in enumerate(texts)]


def bottom(page: Page) -> float:
    return max(top + size for _, top, size, _ in page)


def story(
    pick: random.Random, top: float, lefts: Sequence[float], size: float, right: float = 1240.0
) -> Page:
    """Columns of text, in rows or not, the last one shorter."""
    pitch, most, page = pick.choice([1.35, 1.5, 1.8]), pick.randint(4, 14), Page()
    offset = pick.choice([0.0, 0.0, pick.uniform(0.3, 0.7) * pitch * size])
    for i, left in enumerate(lefts):
        width = (lefts[i + 1] if i + 1 < len(lefts) else right) - left - 1.6 * size
        count = most - (i == len(lefts) - 1) * pick.randint(0, most // 3)
        page += lines(
            left, top + offset * (i % 2), size, prose(pick, count, int(width / (GLYPH * size))), pitch
        )
    return page


def split(pick: random.Random) -> list[float]:
    return pick.choice([[60.0, 650.0], [60.0, 450.0], [60.0, 820.0], [60.0, 460.0, 860.0]])


def heading(pick: random.Random, top: float, size: float) -> Cell:
    text = pick.choice(HEADINGS)
    large = size * pick.choice([1.0, 1.2, 1.5, 2.0])
    return pick.choice([60.0, 650 - GLYPH * large * len(text) / 2]), top, large, text


def foot(pick: random.Random, count: int) -> Page:
    size = pick.uniform(16, 24)
    page = story(pick, 60, [60.0 + i * 1180 / count for i in range(count)], size)
    text = pick.choice(
        [str(pick.randint(1, 99)), f"- {pick.randint(1, 99)} -", "Page 3 of 12", "continued on page 4"]
    )
    if pick.random() < 0.3:
        text = " ".join(prose(pick, 2, int(1100 / GLYPH / size)))[: int(1180 / GLYPH / size)]
    small = size * pick.choice([0.8, 1.0])
    left = 650 - GLYPH * small * len(text) / 2
    return [*page, (max(left, 60), bottom(page) + size * pick.uniform(0.8, 3), small, text)]


def stories(pick: random.Random, same: bool) -> Page:
    """Several stories, one below the other, each in columns, with a heading across."""
    size, lefts, page, top = pick.uniform(16, 22), split(pick), Page(), 60.0
    for _ in range(pick.randint(2, 3)):
        page.append(heading(pick, top, size))
        page += story(pick, bottom(page) + size * pick.uniform(0.5, 1.2), lefts, size)
        top, lefts = bottom(page) + size * pick.uniform(1.2, 3), lefts if same else split(pick)
    return page


def grid(pick: random.Random, across: int) -> Page:
    """Fields of a form, each label above its value; some are empty."""
    size, fields, page = pick.uniform(16, 26), pick.sample(FIELDS, len(FIELDS)), Page()
    small, step = size * pick.choice([0.7, 0.85, 1.0]), pick.choice([1.3, 1.45])
    pitch, width = (step + pick.uniform(2.0, 3.2)) * size, pick.uniform(13, 16) * size
    for i in range(across * pick.randint(1 if across > 2 else 2, 4)):
        label, value = fields[i % len(fields)]
        left, top = 60 + width * (i % across), 60 + pitch * (i // across)
        page.append((left, top, small, label))
        if i % 7 != 5 or pick.random() < 0.7:
            page.append((left, top + step * size, size, value(pick)))
    return page


def answers(pick: random.Random, marks: str) -> Page:
    """Questions, each with answers in two rows of two."""
    size, page, top = pick.uniform(18, 26), Page(), 60.0
    step, right = pick.choice([1.4, 1.6, 2.0]), pick.choice([400, 640])
    indent = pick.choice([0, 40])
    for number in range(pick.randint(1, 4)):
        page.append((60, top, size, f"{number + 1}. {QUESTIONS[number]}"))
        for i, text in enumerate(pick.sample(ANSWERS, 4)):
            mark = marks.replace("A", "ABCD"[i]).replace("a", "abcd"[i])
            page.append(((60 + indent, right)[i % 2], top + step * size * (1 + i // 2), size, mark + text))
        top = bottom(page) + size * pick.choice([0.4, 1.0, 1.8])
    return page


def signatures(pick: random.Random) -> Page:
    """Below a text, lines to sign on: what was written is above its label."""
    size, across = pick.uniform(18, 26), pick.randint(2, 3)
    page = lines(60, 60, size, prose(pick, pick.randint(2, 6), 60))
    labels = pick.sample(["Signature", "Date", "Place, date", "Name", "Witness", "Position"], across)
    small = size * pick.choice([0.7, 0.85, 1.0])
    for _ in range(pick.randint(1, 2)):
        top = bottom(page) + pick.uniform(2.5, 4) * size
        for i, label in enumerate(labels):
            value = pick.choice(["12.03.2026", "May 3, 2026"]) if "ate" in label else pick.choice(PEOPLE)
            left = 60 + i * size * 17
            page += [(left, top, size, value), (left, top + 1.4 * size, small, label)]
    return page


def address(pick: random.Random, head: str, count: int) -> list[str]:
    return [
        *([head] if head else []),
        *(pick.choice(part) for part in (PEOPLE, STREETS, TOWNS, ENDS, FIRMS)[:count]),
    ]


def addresses(pick: random.Random, top: float = 60.0) -> Page:
    """Blocks beside each other."""
    size, across = pick.uniform(18, 26), pick.choice([2, 2, 3])
    heads = pick.choice(
        [
            ["From:", "To:", "Ship to:"],
            ["Seller", "Buyer", "Payer"],
            ["BILL TO", "SHIP TO", "REMIT TO"],
            [""] * 3,
        ]
    )
    pitch, even = pick.choice([1.3, 1.5, 1.8]), pick.randint(3, 5)
    return [
        cell
        for i in range(across)
        for cell in lines(
            60 + i * size * 18,
            top,
            size,
            address(pick, heads[i], pick.choice([even, pick.randint(3, 5)])),
            pitch,
        )
    ]


def items(pick: random.Random, top: float, size: float) -> Page:
    """The table of an invoice with its totals."""
    pitch, lefts = size * pick.choice([1.5, 1.9]), (60, 60 + 18 * size, 60 + 24 * size, 60 + 31 * size)
    page = [
        (left, top, size, text)
        for left, text in zip(lefts, ("Description", "Qty", "Price", "Amount"), strict=True)
    ]
    for row in range(1, pick.randint(2, 8)):
        texts = (
            pick.choice(DISHES),
            str(pick.randint(1, 20)),
            f"{pick.randint(1, 99)}.50",
            f"{pick.randint(9, 999)}.00",
        )
        page += [(left, top + row * pitch, size, text) for left, text in zip(lefts, texts, strict=True)]
    top = bottom(page) + pick.choice([0.6, 1.5, 3]) * size
    for row, label in enumerate(
        pick.choice([["Subtotal", "VAT 19 %", "Total"], ["Net", "Tax", "Shipping", "Total due"]])
    ):
        page += [
            (lefts[2], top + row * pitch, size, label),
            (lefts[3], top + row * pitch, size, f"{pick.randint(9, 999)}.00"),
        ]
    return page


def invoice(pick: random.Random) -> Page:
    size = pick.uniform(18, 24)
    page = [(60.0, 60.0, 2 * size, "INVOICE"), *addresses(pick, 60 + 5 * size)]
    if pick.random() < 0.5:
        for label, value in (("Invoice no.", "2026-0417"), ("Date", "12.03.2026"), ("Due", "26.03.2026"))[
            : pick.randint(2, 3)
        ]:
            top = bottom(page) + (3 if label == "Invoice no." else 0.6) * size
            page += [(60, top, size, label), (60 + 10 * size, top, size, value)]
    return [*page, *items(pick, bottom(page) + 2.5 * size, size)]


def meta(pick: random.Random) -> Page:
    """An address at the left, and beside it labels with their values."""
    size, pitch = pick.uniform(18, 24), pick.choice([1.4, 1.6])
    page = lines(60, 60, size, address(pick, "", pick.randint(3, 5)), pitch)
    rows = list(
        zip(
            ["Invoice no:", "Date:", "Customer:", "Due:"],
            ["2026-0417", "12.03.2026", "4711", "26.03.2026"],
            strict=True,
        )
    )
    top = 60 + pick.choice([0, 0.5]) * size
    return page + [
        (left, top + row * pitch * size, size, text)
        for row, pair in enumerate(rows[: pick.randint(3, 4)])
        for left, text in zip((60 + 24 * size, 60 + 32 * size), pair, strict=True)
    ]


def notes(pick: random.Random) -> Page:
    """Totals at the right, and beside them sentences."""
    size = pick.uniform(18, 24)
    page, small = lines(60, 60, 0.85 * size, prose(pick, pick.randint(3, 5), 36), 1.45), size
    for row, label in enumerate(["Subtotal", "VAT 19 %", "Total"]):
        top = 65 + row * 1.9 * size
        page += [
            (60 + 24 * size, top, small, label),
            (60 + 34 * size, top, small, f"{pick.randint(9, 999)}.00"),
        ]
    return page


def receipt(pick: random.Random) -> Page:
    """Items with their amounts; below some of them how many there are."""
    size, page, top = (
        pick.uniform(18, 26),
        [(200.0, 30.0, 34.0, "CITY MARKET"), (180.0, 84.0, 22.0, "12 Market Street")],
        160.0,
    )
    for _ in range(pick.randint(3, 12)):
        page += [
            (60, top, size, pick.choice(DISHES)),
            (60 + 26 * size, top, size, f"{pick.randint(1, 40)}.50"),
        ]
        top += pick.choice([1.4, 1.5]) * size
        if pick.random() < 0.3:
            page.append((60 + 2 * size, top, size, f"{pick.randint(2, 9)} x {pick.randint(1, 9)}.25"))
            top += 1.4 * size
    for label, value in (("TOTAL", "87.50"), ("CASH", "100.00"), ("CHANGE", "12.50")):
        top += 1.6 * size
        page += [(60, top, size, label), (60 + 26 * size, top, size, value)]
    return [*page, (160, top + 3 * size, size, "Thank you for your visit")]


def form(pick: random.Random, pairs: int) -> Page:
    """Labels before their values, one or two pairs in a row."""
    size, pitch, fields = pick.uniform(18, 28), pick.uniform(1.4, 3), pick.sample(FIELDS, len(FIELDS))
    colon, page = pick.choice([":", ""]), Page()
    for i in range(pairs * pick.randint(2, 7)):
        label, value = fields[i]
        left, top = 60 + 26 * size * (i % pairs), 60 + pitch * size * (i // pairs)
        page.append((left, top, size, label + colon))
        if i % 7 != 3 or pick.random() < 0.7:
            page.append((left + 11 * size, top, size, value(pick)))
    return page


def numbered(pick: random.Random) -> Page:
    """A list with numbers in two or three columns."""
    size, across, rows = pick.uniform(18, 26), pick.randint(2, 3), pick.randint(3, 8)
    mark = pick.choice(["{}. ", "{}) ", "({}) "])
    texts = [
        mark.format(i + 1) + pick.choice([*DISHES, *FIRMS, "Oslo", "Rain"])
        for i in range(across * rows - pick.randint(0, 1))
    ]
    return [
        (60 + (i // rows) * 17 * size, 60 + (i % rows) * 1.6 * size, size, text)
        for i, text in enumerate(texts)
    ]


def timetable(pick: random.Random) -> Page:
    size, across = pick.uniform(18, 26), pick.randint(2, 6)
    rows = [["Station", *(f"RE {pick.randint(1, 99)}" for _ in range(across))]]
    for name in pick.sample(
        ["Oslo S", "Lillestrom", "Hamar", "Otta", "Dombas", "Oppdal", "Trondheim S"], pick.randint(3, 7)
    ):
        rows.append([name, *(f"{pick.randint(10, 23)}:{pick.randint(10, 59)}" for _ in range(across))])
    return [
        (60 + (10 + 5 * (column - 1) if column else 0) * size, 60 + row * 1.6 * size, size, text)
        for row, texts in enumerate(rows)
        for column, text in enumerate(texts)
        if not (row and column) or pick.random() < 0.9
    ]


def paper(pick: random.Random) -> Page:
    """Title, authors beside each other, abstract, two columns, a note below the left one, the number of the page."""
    size = pick.uniform(15, 19)
    page: Page = [(250, 60, 2 * size, "On the order of lines on a page of text")]
    across = pick.randint(2, 3)
    for i in range(across):
        page += lines(
            60 + i * 1240 / across + 40,
            150,
            size,
            [pick.choice(PEOPLE), "University of Oslo", f"a.b{i}@mail.example"],
            1.4,
        )
    page.append((600, bottom(page) + 2 * size, size, "Abstract"))
    page += lines(200, bottom(page) + 0.6 * size, size, prose(pick, 5, int(850 / GLYPH / size)), 1.4)
    top, width, count = bottom(page) + 2.5 * size, int(540 / GLYPH / size), pick.randint(12, 25)
    page += [
        (60, top, size, "1 Introduction"),
        *lines(60, top + 1.6 * size, size, prose(pick, count, width), 1.4),
    ]
    page += lines(60, bottom(page) + size, 0.8 * size, ["1 Work done while the author was at Oslo."])
    page += lines(680, top, size, prose(pick, count + 1, width), 1.4)
    return [*page, (645, bottom(page) + 2.5 * size, size, str(pick.randint(1, 20)))]


DOCUMENTS: dict[str, Callable[[random.Random], Page]] = {
    "a foot below two columns": lambda pick: foot(pick, 2),
    "a foot below three columns": lambda pick: foot(pick, 3),
    "stories in the same columns": lambda pick: stories(pick, same=True),
    "stories in other columns": lambda pick: stories(pick, same=False),
    "fields, two beside each other": lambda pick: grid(pick, 2),
    "fields, three beside each other": lambda pick: grid(pick, 3),
    "fields, four beside each other": lambda pick: grid(pick, 4),
    "answers with letters": lambda pick: answers(pick, pick.choice(["A. ", "a) ", "(A) "])),
    "answers": lambda pick: answers(pick, ""),
    "signatures": signatures,
    "addresses": addresses,
    "invoice": invoice,
    "address beside labels": meta,
    "sentences beside totals": notes,
    "receipt with counts": receipt,
    "form": lambda pick: form(pick, 1),
    "form with two pairs in a row": lambda pick: form(pick, 2),
    "numbered list": numbered,
    "timetable": timetable,
    "paper": paper,
}
