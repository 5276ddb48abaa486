"""Scenes that are text: pages, receipts, slides, signs, posters and charts.

Sizes depend on `em`, the smallest text size of the scene in pixels,
so that a small scene for training is the large one in miniature.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import cv2
import numpy as np

from stages.scenes.drawing import COLORS, Pixels, Rgb, fill_plain, luminance, mix
from stages.scenes.sheets import (
    INK,
    MONTHS,
    NAMES,
    PAPER,
    WORDS,
    Font,
    Sheet,
    blank_sheet,
    compose_date,
    compose_text,
    compose_title,
    list_words,
    load_font,
)

SHOPS = (
    "Market",
    "Bakery",
    "Coffee House",
    "Book Shop",
    "Garden Center",
    "Hardware",
    "Pharmacy",
    "Grocery",
    "Bistro",
)
GOODS = list_words(
    """Apples Bread Butter Carrots Cheese Coffee Cookies Eggs Flour Grapes Honey Juice Lemons Milk Noodles Olives Onions
    Pasta Pepper Potatoes Rice Salad Soup Sugar Tea Tomatoes Water Yogurt Batteries Candles Notebook Pencils"""
)
FAREWELLS = ("Thank you", "Please come again", "Have a good day")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
SIGN_WORDS = list_words(
    """OPEN CLOSED PARKING EXIT ENTRANCE BAKERY STATION MUSEUM LIBRARY WELCOME CAUTION SLOW MARKET HARBOUR THEATRE
    PHARMACY TICKETS REPAIR GARDEN PLATFORM HOTEL COFFEE HOSPITAL SCHOOL AIRPORT"""
)
CHART_COLORS = [
    COLORS[name] for name in ("red", "orange", "green", "blue", "purple", "brown", "pink", "grey")
]
ACCENTS = tuple(
    mix(COLORS[name], (0, 0, 0), 0.15) for name in ("red", "green", "blue", "purple", "orange", "brown")
)

# Pages, receipts, slides.


def draw_page(sheet: Sheet) -> None:
    """A heading and paragraphs, sometimes a date above and a number below."""
    rng, em, margin = sheet.rng, sheet.em, sheet.width * 0.08
    face = rng.choice(("DejaVuSans", "DejaVuSerif", "STIXGeneral", "Aileron"))
    body = load_font(face, em)
    bold = load_font(rng.choice(("DejaVuSans-Bold", "DejaVuSerif-Bold")), em * 1.35)
    width, leading = sheet.width - 2 * margin, em * rng.uniform(1.5, 1.75)
    y, bottom = max(margin, 1.6 * em), sheet.height - max(margin, 1.6 * em)
    if rng.random() < 0.4:
        sheet.write(compose_date(rng), sheet.width - margin, y, body, align=1)
        y += 2 * leading
    sheet.write(compose_title(rng, bold, width), margin, y, bold)
    y += 1.7 * leading
    left_in_paragraph = rng.randint(3, 7)
    while y < bottom - 2 * em:
        last = left_in_paragraph == 1
        text = compose_text(rng, body, width * (rng.uniform(0.3, 0.8) if last else 1))
        sheet.write(text + ("." if last else ""), margin, y, body)
        left_in_paragraph = rng.randint(3, 7) if last else left_in_paragraph - 1
        y += leading * (1.7 if last else 1)
    if rng.random() < 0.4:
        sheet.write(f"Page {rng.randint(2, 240)}", sheet.width / 2, bottom - em * 0.4, body, align=0.5)


def draw_receipt(sheet: Sheet) -> None:
    """A shop's name, a date, goods with prices, a sum."""
    rng, em, margin = sheet.rng, sheet.em, sheet.width * 0.08
    font = load_font(rng.choice(("DejaVuSansMono", "DejaVuSansMono", "DejaVuSans", "Aileron")), em)
    bold, leading = load_font("DejaVuSans-Bold", em * 1.3), em * 1.5
    middle, y = sheet.width / 2, 1.4 * em
    sheet.write(rng.choice(SHOPS), middle, y, bold, align=0.5)
    y += 1.25 * leading
    for text in (f"{rng.randint(10, 99)} {rng.choice(NAMES)} Street", compose_date(rng)):
        sheet.write(text, middle, y, font, align=0.5)
        y += leading
    y = _rule_off(sheet, y, margin)
    prices = [rng.randint(100, 2999) for _ in range(max(2, min(12, int((sheet.height - y) / leading) - 5)))]
    for price, name in zip(prices, rng.sample(GOODS, len(prices)), strict=True):
        _write_sum(sheet, name, price, y, margin, font)
        y += leading
    y = _rule_off(sheet, y, margin)
    _write_sum(sheet, "Total", sum(prices), y, margin, load_font("DejaVuSans-Bold", em))
    if y + 3.4 * leading < sheet.height:
        sheet.write(rng.choice(FAREWELLS), middle, y + 1.6 * leading, font, align=0.5)


def _rule_off(sheet: Sheet, y: float, margin: float) -> float:
    """A dashed line across; the y after it."""
    em, row = sheet.em, round(y + sheet.em * 0.35)
    for x in np.arange(margin, sheet.width - margin, em * 0.6):
        cv2.line(sheet.pixels, (round(x), row), (round(x + em * 0.3), row), INK, max(1, round(em / 14)))
    return y + em * 0.8


def _write_sum(sheet: Sheet, name: str, cents: int, y: float, margin: float, font: Font) -> None:
    sheet.write(name, margin, y, font)
    sheet.write(f"{cents / 100:.2f}", sheet.width - margin, y, font, align=1)


def draw_slide(sheet: Sheet) -> None:
    """A title and bullets on a plain or dark background with a colored bar."""
    rng, em, margin, accent = sheet.rng, sheet.em, sheet.width * 0.07, sheet.rng.choice(ACCENTS)
    ground = rng.choice((PAPER, PAPER, mix(accent, (255, 255, 255), 0.9), mix(accent, (10, 14, 30), 0.75)))
    ink = INK if luminance(ground) > 128 else (244, 244, 246)
    sheet.fill(ground)
    face = rng.choice(("DejaVuSans", "Aileron", "DejaVuSans"))
    title, body = load_font("DejaVuSans-Bold", em * 1.6), load_font(face, em * 1.1)
    _draw_slide_bar(sheet, accent)
    y = sheet.height * 0.1
    sheet.write(
        compose_title(rng, title, sheet.width - 2.5 * margin, 5), margin, y, title, mix(accent, ink, 0.5)
    )
    leading = em * rng.uniform(1.9, 2.4)
    y += em * 3.4
    for _ in range(min(8, int((sheet.height - y - 1.2 * em) / leading))):
        spot = (round(margin + em * 0.3), round(y + body.size * 0.6))
        cv2.circle(
            sheet.pixels, spot, max(1, round(em * 0.16)), accent if ink is INK else ink, -1, cv2.LINE_AA
        )
        text = compose_text(rng, body, sheet.width - 3.2 * margin - em, rng.randint(3, 8)).capitalize()
        sheet.write(text, margin + em, y, body, ink)
        y += leading


def _draw_slide_bar(sheet: Sheet, accent: Rgb) -> None:
    width, height, thick = sheet.width, sheet.height, max(1, round(sheet.em * 0.5))
    where = sheet.rng.choice(("left", "top", "bottom", "none"))
    if where == "left":
        sheet.pixels[:, :thick] = accent
    elif where == "top":
        sheet.pixels[:thick] = accent
    elif where == "bottom":
        sheet.pixels[height - thick :, : round(width * 0.7)] = accent


# Signs and posters.


def _measure_rows(rows: Sequence[str], em: float) -> float:
    font = load_font("DejaVuSans-Bold", em)
    return max(font.getlength(row) for row in rows)


def draw_board(rows: Sequence[str], em: float, rng: Random, room: tuple[float, float]) -> Sheet:
    """The board of a sign: a frame and centered rows, larger than em if the room (width, height) is large enough."""
    ground = rng.choice((*ACCENTS[:4], PAPER, (248, 214, 60), INK))
    ink = INK if luminance(ground) > 120 else PAPER
    widest = _measure_rows(rows, em)
    grow = max(1.0, min(room[0] / widest, room[1] / (em * (1.45 * len(rows) + 1)), rng.uniform(1.2, 3.5)))
    em, font, leading = em * grow, load_font("DejaVuSans-Bold", em * grow), em * grow * 1.45
    sheet = blank_sheet(
        round(_measure_rows(rows, em) + 2 * em), round(leading * len(rows) + em), em, rng, ground
    )
    inset, thick = round(em * 0.2), max(1, round(em * 0.09))
    cv2.rectangle(
        sheet.pixels, (inset, inset), (sheet.width - 1 - inset, sheet.height - 1 - inset), ink, thick
    )
    for number, row in enumerate(rows):
        sheet.write(row, sheet.width / 2, em * 0.62 + number * leading, font, ink, align=0.5)
    return sheet


def compose_notice(rng: Random) -> list[str]:
    """Five or more short rows: opening hours, or a heading and details."""
    if rng.random() < 0.5:
        days = DAYS[: rng.randint(4, 6)]
        return [
            "OPENING HOURS",
            *(f"{day} {rng.randint(7, 9)}:30 - {rng.randint(15, 20)}:00" for day in days),
        ]
    rows = [" ".join(rng.sample(WORDS, 2)).upper() for _ in range(rng.randint(4, 6))]
    return [rng.choice(SIGN_WORDS), *rows]


def draw_post(canvas: Pixels, x: float, y: float, thick: float) -> None:
    """The post of a sign, from its board's middle down out of the image."""
    left, right = round(x - thick / 2), round(x + thick / 2) + 1
    canvas[round(y) :, left:right] = np.linspace((150, 152, 156), (88, 90, 96), right - left).astype(np.uint8)


def write_panel(canvas: Pixels, em: float, rng: Random, area: tuple[int, int, int, int], rows: int) -> Sheet:
    """`rows` lines of text on a transparent panel over the part x0, y0, x1, y1 of the picture."""
    x0, y0, x1, y1 = area
    dark = rng.random() < 0.5
    panel = fill_plain(x1 - x0, y1 - y0, (16, 18, 26) if dark else PAPER)
    canvas[y0:y1, x0:x1] = cv2.addWeighted(canvas[y0:y1, x0:x1], 0.16, panel, 0.84, 0)
    sheet = Sheet(canvas, em, rng)
    ink = PAPER if dark else INK
    head = load_font("DejaVuSans-Bold", em * 1.25)
    body = load_font(rng.choice(("DejaVuSans", "DejaVuSerif", "Aileron")), em)
    leading, width, x = (y1 - y0 - 1.2 * em) / rows, x1 - x0 - 1.6 * em, x0 + 0.8 * em
    for row in range(rows):
        font = body if row else head
        text = compose_text(rng, font, width, rng.randint(3, 8)).capitalize()
        sheet.write(text, x, y0 + 0.6 * em + row * leading + (leading - 1.3 * em) / 2, font, ink)
    return sheet


# Charts.


def draw_chart(sheet: Sheet, kind: str) -> None:
    """kind: "bar chart", "line chart" or "pie chart"."""
    rng, em = sheet.rng, sheet.em
    sheet.fill(rng.choice((PAPER, (255, 255, 255), (240, 244, 250), (252, 246, 236))))
    title = load_font("DejaVuSans-Bold", em * 1.25)
    sheet.write(compose_title(rng, title, sheet.width * 0.86), sheet.width / 2, 0.9 * em, title, align=0.5)
    colors = rng.sample(CHART_COLORS, 6)
    if kind == "pie chart":
        _draw_pie(sheet, colors)
        return
    plot = _draw_axes(sheet)
    if kind == "bar chart":
        _draw_bars(sheet, plot, colors)
    else:
        _draw_curves(sheet, plot, colors)


@dataclass(frozen=True)
class Plot:
    """Where a chart's data go: edges in pixels, and the middles of its columns."""

    left: float
    top: float
    right: float
    bottom: float
    columns: tuple[float, ...]

    def y(self, share: float) -> float:
        return self.bottom - share * (self.bottom - self.top)


def _draw_axes(sheet: Sheet) -> Plot:
    """Grid lines with numbers at the left, names below."""
    rng, em, font = sheet.rng, sheet.em, load_font(sheet.rng.choice(("DejaVuSans", "Aileron")), sheet.em)
    ticks, step = rng.randint(4, 6), rng.choice((10, 20, 25, 40, 50, 100, 150, 200, 500))
    top, bottom, right = 3.8 * em, sheet.height - 2.8 * em, sheet.width - 1.5 * em
    left = 2.2 * em + font.getlength(str(ticks * step))
    thick, gray = max(1, round(em / 16)), (212, 214, 218)
    for tick in range(ticks + 1):
        row = round(bottom - (bottom - top) * tick / ticks)
        cv2.line(sheet.pixels, (round(left), row), (round(right), row), gray if tick else INK, thick)
        if tick:
            sheet.write(str(tick * step), left - 0.5 * em, row - 0.62 * em, font, align=1)
    names = _choose_names(rng, font, right - left, em)
    slot = (right - left) / len(names)
    columns = tuple(left + slot * (k + 0.5) for k in range(len(names)))
    for name, x in zip(names, columns, strict=True):
        sheet.write(name, x, bottom + 0.6 * em, font, align=0.5)
    return Plot(left, top, right, bottom, columns)


def _choose_names(rng: Random, font: Font, width: float, em: float) -> list[str]:
    """Names for a chart's columns, as many as stand apart in the width."""
    first = rng.randint(1990, 2015)
    years, days = [str(first + k) for k in range(9)], [day[:3] for day in DAYS]
    family = rng.choice((MONTHS, years, days, rng.sample(NAMES, 8), ("Q1", "Q2", "Q3", "Q4")))
    widest = max(font.getlength(name) for name in family)
    return list(family[: max(2, min(9, int(width / (widest + 1.5 * em))))])


def _draw_bars(sheet: Sheet, plot: Plot, colors: list[Rgb]) -> None:
    rng, half = sheet.rng, (plot.right - plot.left) / len(plot.columns) * sheet.rng.uniform(0.25, 0.4)
    several = rng.random() < 0.4
    for k, x in enumerate(plot.columns):
        corner = (round(x - half), round(plot.y(rng.uniform(0.12, 1))))
        cv2.rectangle(
            sheet.pixels, corner, (round(x + half), round(plot.bottom)), colors[k % 6 if several else 0], -1
        )


def _draw_curves(sheet: Sheet, plot: Plot, colors: list[Rgb]) -> None:
    rng, thick = sheet.rng, max(1, round(sheet.em * 0.14))
    for color in colors[: rng.randint(1, 3)]:
        share, points = rng.uniform(0.2, 0.8), []
        for x in plot.columns:
            share = min(0.96, max(0.08, share + rng.uniform(-0.28, 0.28)))
            points.append((round(x), round(plot.y(share))))
        cv2.polylines(sheet.pixels, [np.array(points, np.int32)], False, color, thick, cv2.LINE_AA)
        for point in points:
            cv2.circle(sheet.pixels, point, round(thick * 1.8), color, -1, cv2.LINE_AA)


def _draw_pie(sheet: Sheet, colors: list[Rgb]) -> None:
    """A pie with its legend beside it, or below it where the sheet is not wide enough."""
    rng, em, parts = sheet.rng, sheet.em, sheet.rng.randint(4, 6)
    leading, top, width = 1.7 * em, 3.4 * em, 12 * em
    legend = leading * (parts + 0.6)
    if sheet.width > max(sheet.height, 28 * em):
        room = (sheet.width * 0.5, sheet.height - top - em)
        x, y = sheet.width * 0.54, top + (room[1] - leading * parts) / 2
    else:
        room = (float(sheet.width), sheet.height - top - legend)
        x, y = (sheet.width - width) / 2, sheet.height - legend
    middle, start = (room[0] / 2, top + room[1] / 2), rng.uniform(0, 360)
    for share, name, color in zip(_split_hundred(rng, parts), rng.sample(NAMES, parts), colors, strict=False):
        _draw_slice(sheet, middle, min(room) * 0.45, (start, start + 3.6 * share), color)
        _write_key(sheet, (x, y, width), color, name, f"{share}%")
        start, y = start + 3.6 * share, y + leading


def _write_key(sheet: Sheet, place: tuple[float, float, float], color: Rgb, name: str, value: str) -> None:
    """One row of a legend at x, y, of this width: the color, the name, the value at the right."""
    (x, y, width), em, font = place, sheet.em, load_font("DejaVuSans", sheet.em)
    corner = (round(x + 0.9 * em), round(y + 0.95 * em))
    cv2.rectangle(sheet.pixels, (round(x), round(y + 0.3 * em)), corner, color, -1)
    sheet.write(name, x + 1.6 * em, y, font)
    sheet.write(value, x + width, y, font, align=1)


def _draw_slice(
    sheet: Sheet, middle: tuple[float, float], radius: float, span: tuple[float, float], color: Rgb
) -> None:
    angles = np.radians(np.linspace(*span, 40))
    arc = np.stack([middle[0] + radius * np.cos(angles), middle[1] + radius * np.sin(angles)], axis=1)
    contour = [(np.vstack([middle, arc]) * 16).round().astype(np.int32)]
    cv2.fillPoly(sheet.pixels, contour, color, cv2.LINE_AA, 4)
    cv2.polylines(sheet.pixels, contour, True, (255, 255, 255), max(1, round(sheet.em / 10)), cv2.LINE_AA, 4)


def _split_hundred(rng: Random, parts: int) -> list[int]:
    """Whole numbers above 10 that add up to 100."""
    cuts = [0, *sorted(rng.sample(range(1, 100 - 10 * parts), parts - 1)), 100 - 10 * parts]
    return [10 + stop - start for start, stop in itertools.pairwise(cuts)]
