"""Draws the panels of a board as HTML, from the board's JSON and the answers to its queries: for docs/boards.py."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import pairwise
from typing import Any, NamedTuple

WIDTH, COLUMNS = 1200, 24  # the page's width in pixels, and the columns of Grafana's grid
CELL, GAP = 26, 8  # the height of a row of the grid, and the room between two
LEFT, BOTTOM, TOP = 62, 20, 6  # of a chart: for the labels of its axes
COLORS = [
    "#3b7dd8",
    "#e0752d",
    "#3f9c35",
    "#b04fc4",
    "#d6a100",
    "#18a3a3",
    "#d3383f",
    "#7a6a58",
    "#6b5bd2",
    "#e377a2",
]
# Of legends: the most lines, the width of a letter, and of the mark and margin.
LEGEND_LINES, LETTER, MARK = 2, 5.9, 26
SCALES = {  # by unit, the largest first
    "short": ((1e9, " Bil"), (1e6, " Mil"), (1e3, " K"), (1, "")),
    "bytes": ((1024.0**4, " TiB"), (1024.0**3, " GiB"), (1024.0**2, " MiB"), (1024, " KiB"), (1, " B")),
    "s": ((86_400, " days"), (3600, " hours"), (60, " mins"), (1, " s"), (1e-3, " ms"), (1e-6, " µs")),
    "percentunit": ((0.01, "%"),),
}
SMALLEST = ("", " B", " µs", "%")
STYLE = """
* { box-sizing: border-box }
body { margin: 0; padding: 14px; background: #f4f5f5; color: #24292e; font: 13px 'DejaVu Sans', sans-serif; width: 1200px }
header { display: flex; gap: 10px; align-items: baseline; margin-bottom: 10px }
header h1 { font-size: 17px; margin: 0 14px 0 0 }
header span { background: #fff; border: 1px solid #d8dade; border-radius: 3px; padding: 4px 9px; font-size: 12px }
header span b { color: #3b7dd8; font-weight: normal; margin-right: 6px }
header time { margin-left: auto; color: #66696e; font-size: 12px }
main { display: grid; grid-template-columns: repeat(24, 1fr); column-gap: 8px; row-gap: 8px; grid-auto-rows: 26px }
h2 { font-size: 13px; margin: 0; align-self: end }
section { background: #fff; border: 1px solid #dfe1e4; border-radius: 3px; padding: 5px 8px; overflow: hidden;
          display: flex; flex-direction: column; min-width: 0 }
h3 { font-size: 12px; margin: 0 0 3px; font-weight: bold; white-space: nowrap }
.value { font-size: 22px; margin: auto; z-index: 1; white-space: nowrap }
.stat { position: relative }
.stat svg { position: absolute; left: 0; bottom: 0 }
.none { margin: auto; color: #8a8d91 }
ul { list-style: none; margin: 2px 0 0; padding: 0; font-size: 10px; line-height: 14px; max-height: 28px; overflow: hidden }
li { display: inline-block; margin-right: 10px; white-space: nowrap }
i { display: inline-block; width: 11px; height: 3px; margin-right: 4px; vertical-align: middle }
text { font-size: 10px; fill: #66696e }
"""

Points = Sequence[tuple[float, float]]
Time = tuple[float, float]  # start and end, Unix seconds


class Series(NamedTuple):
    legend: str
    points: Points


def draw_page(
    board: Mapping[str, Any], menus: Mapping[str, str], answers: Mapping[int, Sequence[Series]], span: Time
) -> str:
    """menus: by title, what is chosen. answers: by the panel's id."""
    chosen = "".join(f"<span><b>{escape(title)}</b>{escape(value)}</span>" for title, value in menus.items())
    shown = " to ".join(datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S") for at in span)
    parts = []
    for panel in board["panels"]:
        place = panel["gridPos"]
        style = f"grid-area: {place['y'] + 1} / {place['x'] + 1} / span {place['h']} / span {place['w']}"
        if panel["type"] == "row":
            parts.append(f'<h2 style="{style}">{escape(panel["title"])}</h2>')
        else:
            content = draw_panel(panel, answers[panel["id"]], span)
            title = f"<h3>{escape(panel['title'])}</h3>"
            parts.append(f'<section class="{panel["type"]}" style="{style}">{title}{content}</section>')
    return (
        f'<!doctype html><meta charset="utf-8"><style>{STYLE}</style>'
        f"<header><h1>{escape(board['title'])}</h1>{chosen}<time>{shown} UTC</time></header>"
        f"<main>{''.join(parts)}</main>"
    )


def draw_panel(panel: Mapping[str, Any], series: Sequence[Series], span: Time) -> str:
    place, defaults = panel["gridPos"], panel["fieldConfig"]["defaults"]
    width = place["w"] * (WIDTH - 2 * 14 + GAP) // COLUMNS - GAP - 18
    height = place["h"] * (CELL + GAP) - GAP
    known = [Series(each.legend, kept) for each in series if (kept := finite(each.points))]
    if not known:
        return '<p class="none">No data</p>'
    if panel["type"] == "stat":
        value = write_value(known[0].points[-1][1], defaults["unit"])
        line = draw_lines([known[0]], span, (0, 0, width + 18, height // 3), limits(known, stacked=False))
        return f'<p class="value">{escape(value)}</p><svg width="{width + 18}" height="{height // 3}">{line}</svg>'
    chart = draw_chart(
        known,
        span,
        (width, height - 60),
        defaults["unit"],
        stacked=defaults["custom"]["stacking"]["mode"] == "normal",
    )
    return chart + draw_legends(known, width)


def finite(points: Points) -> Points:
    return [(at, value) for at, value in points if math.isfinite(value)]


def draw_legends(series: Sequence[Series], width: int) -> str:
    """As many as there is room for; the others are counted."""
    shown: list[str] = []
    line, x = 1, 0.0
    for number, each in enumerate(series):
        needed = LETTER * len(each.legend) + MARK
        line, x = (line + 1, needed) if shown and x + needed > width else (line, x + needed)
        if line > LEGEND_LINES or (line == LEGEND_LINES and number + 1 < len(series) and x + needed > width):
            shown.append(f"<li>… {len(series) - number} more</li>")
            break
        shown.append(f'<li><i style="background: {color_of(number)}"></i>{escape(each.legend)}</li>')
    return f"<ul>{''.join(shown)}</ul>"


def draw_chart(
    series: Sequence[Series], span: Time, size: tuple[int, int], unit: str, *, stacked: bool
) -> str:
    width, height = size
    top = limits(series, stacked=stacked)
    area = (LEFT, TOP, width, height - BOTTOM)
    axes = "".join(_axes(span, area, top, unit))
    lines = draw_lines(stack(series) if stacked else series, span, area, top, stacked=stacked)
    return f'<svg width="{width}" height="{height}">{axes}{lines}</svg>'


def _axes(span: Time, area: tuple[int, int, int, int], top: float, unit: str) -> Iterator[str]:
    left, up, right, low = area
    for value in ticks(top, unit):
        y = low - (low - up) * value / top
        yield f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e8e9eb"/>'
        yield f'<text x="{left - 5}" y="{y + 3:.1f}" text-anchor="end">{escape(write_value(value, unit, short=True))}</text>'
    step = next(each for each in (30, 60, 120, 300, 600, 1800, 3600, 7200) if (span[1] - span[0]) / each <= 5)
    at = math.ceil(span[0] / step) * step
    while at <= span[1]:
        x = left + (right - left) * (at - span[0]) / (span[1] - span[0])
        clock = datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S" if step % 60 else "%H:%M")
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{up}" y2="{low}" stroke="#f1f2f3"/>'
        if left + 14 < x < right - 14:
            yield f'<text x="{x:.1f}" y="{low + 14}" text-anchor="middle">{clock}</text>'
        at += step


def draw_lines(
    series: Sequence[Series],
    span: Time,
    area: tuple[int, int, int, int],
    top: float,
    *,
    stacked: bool = False,
) -> str:
    """Lines, and what is under them; for a stack, the upper ones first."""
    left, up, right, low = area
    found = []
    for number in reversed(range(len(series))):
        for part in split(series[number].points):
            places = [
                (left + (right - left) * (at - span[0]) / (span[1] - span[0]), low - (low - up) * value / top)
                for at, value in part
            ]
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            color, ground = color_of(number), f"{places[-1][0]:.1f},{low} {places[0][0]:.1f},{low}"
            if stacked:  # hides the series above it, which is drawn first
                found.append(f'<polygon points="{line} {ground}" fill="#fff"/>')
            found.append(
                f'<polygon points="{line} {ground}" fill="{color}" fill-opacity="{0.3 if stacked else 0.06}"/>'
                f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.3"/>'
            )
    return "".join(found)


def split(points: Points) -> Iterator[Points]:
    """Where values are missing, a line ends."""
    usual = min((after[0] - before[0] for before, after in pairwise(points)), default=0)
    part: list[tuple[float, float]] = []
    for point in points:
        if part and point[0] - part[-1][0] > 1.5 * usual:
            yield part
            part = []
        part.append(point)
    yield part


def stack(series: Sequence[Series]) -> list[Series]:
    """Each on top of those before it."""
    sums: dict[float, float] = {}
    found = []
    for each in series:
        for at, value in each.points:
            sums[at] = sums.get(at, 0.0) + value
        found.append(Series(each.legend, [(at, sums[at]) for at, _ in each.points]))
    return found


def limits(series: Sequence[Series], *, stacked: bool) -> float:
    """The upper end of the axis; the lower one is 0."""
    shown = stack(series) if stacked else series
    most = max(value for each in shown for _, value in each.points)
    return most * 1.05 if most > 0 else 1.0


def ticks(top: float, unit: str) -> Iterator[float]:
    """Round numbers of the unit from 0 to the end of the axis, about four."""
    size = scale_of(top, unit)[0]
    rough = top / size / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = size * next(power * each for each in (1, 2, 2.5, 5, 10) if power * each >= rough)
    yield from (step * number for number in range(int(top / step) + 1))


def color_of(number: int) -> str:
    return COLORS[number % len(COLORS)]


def write_value(value: float, unit: str, *, short: bool = False) -> str:
    """As Grafana writes it with this unit. short: on an axis."""
    size, sign = scale_of(value, unit)
    number = digits(value / size)
    if unit.startswith("suffix:") and short:
        return number
    return f"{number}{sign.removesuffix('s') if (number, sign) == ('1', ' mins') else sign}"


def scale_of(value: float, unit: str) -> tuple[float, str]:
    """What such a value is divided by, and what is written after it."""
    if unit.startswith("suffix:"):
        return 1, f" {unit.removeprefix('suffix:').strip()}"
    return next((size, sign) for size, sign in SCALES[unit] if abs(value or 1) >= size or sign in SMALLEST)


def digits(value: float) -> str:
    """With three significant digits, but with all digits of the whole part."""
    value = round(value, 9)
    if value == int(value) or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"
