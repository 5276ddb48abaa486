"""Finds a page's orientation, and puts its lines into reading order.

`turns` is the number of quarter turns, clockwise, of the page: 0 upright, 1 text runs down, 2 upside down, 3
text runs up. The detector finds lines in any direction, and the shape of its boxes shows whether a page is on
its side. Only reading shows which of the two remaining orientations it has: upside down, letters are guessed.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple
from unicodedata import bidirectional

import numpy as np
from numpy.typing import NDArray

from stages.ocr.dbpost import NEXT, Quads
from stages.ocr.direction import RIGHT_TO_LEFT
from stages.ocr.warp import VERTICAL_RATIO

SURE = 0.9  # mean score of a page's characters from which the opposite orientation is not tried
NEUTRAL = 0.5  # a character's probability that is evidence neither for nor against an orientation

DIRECTIONS = ((1, 0), (0, 1), (-1, 0), (0, -1))  # of text, x and y, by number of turns

# Lengths are in ems: the median height of a page's boxes, which the detector draws half as high again as the letters.
CORE = 0.25  # of a box above and below that may overlap the rows beside it
BESIDE = 0.4  # between the middles of two boxes of one row, at most
GUTTER = 0.4  # between two columns, at least
FEW_ROWS = 3  # from which on a run of rows keeps its gutters
BREAK = 3.0  # between two rows of the same columns, at most
SLOPES, SLOPE_STEP = 30, 0.0015  # tried on either side of the boxes' own slope: 2.6° in steps of 0.09°
SLOPE_COST = 25.0  # rows, relative to one em, that a slope of 1 must save

PROSE, PHRASE = 4.0, 1.9  # words of a line of text, and of one of a list or a narrow column
ALIKE_WORDS, ALIKE_NUMBERS = (
    1.6,
    0.25,
)  # between columns of one list: ratio of their words; difference of shares with digits
SORTED = 5  # lines, from which on their order is no chance
CLOSE = 1.5  # from the middle of a label to that of the value below it, at most
APART = 0.2  # by which the next label is further away, at least
CJK = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
CJK_WORD, LATIN_WORD = 2.5, 7.0  # characters; a recognizer often leaves out the spaces of small print

Scored = Sequence[tuple[str, float]]  # texts and their scores


def guess_turns(quads: Quads) -> int:
    """0 if most of the lines' length is horizontal, else 1."""
    sides = quads[:, [1, 3]] - quads[:, :1]  # the first corner of a slanted vertical box may be at its bottom
    lengths = np.linalg.norm(sides, axis=2)
    longer = np.arange(len(quads)), lengths.argmax(axis=1)
    width, height = np.abs(sides[longer]).T
    vertical = (height > width) & (lengths.max(axis=1) >= VERTICAL_RATIO * lengths.min(axis=1))
    length = lengths[longer]
    return int(length[vertical].sum() > length[~vertical].sum())


def turn_corners(quads: Quads, turns: int) -> Quads:
    """Boxes whose corners go clockwise from the image's top left, changed to begin at the text's top left."""
    if turns == 0:
        return quads
    sides = quads[:, NEXT] - quads
    along = (
        sides
        @ np.array(DIRECTIONS[turns], dtype=np.float32)
        / np.maximum(np.linalg.norm(sides, axis=2), 1e-6)
    )
    corners = (along.argmax(axis=1)[:, None] + np.arange(4)) % 4
    turned: Quads = quads[np.arange(len(quads))[:, None], corners]
    return turned


class LinePlace(NamedTuple):
    """A line on a page that was made straight: its edges in pixels, its text, and its number."""

    left: float
    top: float
    right: float
    bottom: float
    text: str
    number: int

    @property
    def height(self) -> float:
        return self.bottom - self.top

    @property
    def middle(self) -> float:
        return (self.top + self.bottom) / 2


def order_lines(quads: Quads, texts: Sequence[str], turns: int = 0) -> list[int]:
    """The indices of a page's lines, in reading order. texts: what was read in each box.

    Recursive XY-cut (Nagy and Seth, "Hierarchical representation of optically scanned documents", 1984; on boxes:
    Ha, Haralick and Phillips, "Recursive X-Y cut using bounding boxes of connected components", 1995), on a page that
    is made straight as Baird does it ("The skew angle of printed documents", 1987). XY-cut alone cannot tell columns,
    which are read one after the other, from tables, forms and receipts, which are read row by row: all have gutters.
    `are_columns` tells them apart by what the lines say, and by whether they stand in rows.
    """
    if len(quads) < 2:
        return list(range(len(quads)))
    x, y = np.moveaxis(turn_corners(quads, turns), 2, 0).astype(np.float64)
    x, y = ((x, y), (y, -x), (-x, -y), (-y, x))[turns % 4]
    slope = find_slope(x, y)
    x, y = x + slope * y, y - slope * x
    if goes_left(texts):
        x = -x
    edges = np.stack([x.min(axis=1), y.min(axis=1), x.max(axis=1), y.max(axis=1)], axis=1).tolist()
    places = [
        LinePlace(left, top, right, bottom, text, i)
        for i, ((left, top, right, bottom), text) in enumerate(zip(edges, texts, strict=True))
    ]
    em = median(place.height for place in places)
    return [place.number for place in cut(places, max(em, 1.0))]


def find_slope(x: NDArray[Any], y: NDArray[Any]) -> float:
    """How far a page's rows fall for each pixel to the right. x, y: [N, 4], corners clockwise from the text's top left.

    First guess: the slope of the boxes, of which the short ones say little. Then the one near it for which the ends of
    the boxes are in the fewest rows, if that saves enough: some slope puts any two lines into one row.
    """
    em = max(median((y.max(axis=1) - y.min(axis=1)).tolist()), 1.0)
    x, y = ((side[:, [0, 1]] + side[:, [3, 2]]).T / 2 for side in (x, y))  # the middles of both ends
    width = np.maximum(x[1] - x[0], 1.0)
    slopes = (y[1] - y[0]) / width
    order = np.argsort(slopes, kind="stable")
    guess = slopes[order[np.searchsorted(np.cumsum(width[order]), width.sum() / 2)]]
    away = np.arange(-SLOPES, SLOPES + 1) * SLOPE_STEP
    ends = np.sort(y.ravel() - (guess + away)[:, None] * x.ravel(), axis=1)
    rows = np.minimum(np.diff(ends, axis=1) / em, 0.5).sum(axis=1)
    return float(guess + away[np.argmin(rows + SLOPE_COST * np.abs(away))])


def goes_left(texts: Sequence[str]) -> bool:
    """Whether most letters of a page are of a right-to-left script."""
    if all(text.isascii() for text in texts):
        return False
    kinds = [bidirectional(character) for text in texts for character in text]
    return sum(kind in RIGHT_TO_LEFT for kind in kinds) > kinds.count("L")


def cut(places: Sequence[LinePlace], em: float) -> list[LinePlace]:
    """The lines of a region, in reading order."""
    rows, ordered, start = split_rows(places, em), [], 0
    while start < len(rows):
        end, gutters = find_run(rows, start, em)
        run = rows[start:end]
        columns = split_columns([place for row in run for place in row], gutters)
        if are_columns(columns, em):
            ordered += [place for column in columns for place in cut(column, em)]
        elif are_fields(run, em):
            for pair in zip(run[::2], run[1::2], strict=True):
                fields = split_columns([place for row in pair for place in row], gutters)
                ordered += [place for field in fields for place in field]
        else:
            ordered += [place for row in run for place in order_row(row, em)]
        start = end
    return ordered


def split_rows(places: Sequence[LinePlace], em: float) -> list[list[LinePlace]]:
    """The lines between cuts that go across a whole region, from top to bottom."""
    rows: list[list[LinePlace]] = []
    bottom = -np.inf
    for place in sorted(places, key=lambda place: (place.top, place.left, place.number)):
        edge = CORE * min(place.height, em)
        if place.top + edge < bottom:
            rows[-1].append(place)
        else:
            rows.append([place])
        bottom = max(bottom, place.bottom - edge)
    return rows


def find_run(rows: Sequence[Sequence[LinePlace]], start: int, em: float) -> tuple[int, list[float]]:
    """The longest run of rows from `start` that share gutters: where it ends, and the middle of each gutter."""
    covered: list[tuple[float, float]] = []
    gutters: list[float] = []
    bottom = np.inf
    for end in range(start, len(rows)):
        wider = join([*covered, *((place.left, place.right) for place in rows[end])])
        left = [(a + b) / 2 for (_, a), (b, _) in pairwise(wider) if b - a >= GUTTER * em]
        is_far = min(place.top for place in rows[end]) - bottom > BREAK * em
        closes = len(left) < len(gutters) and (not left or end - start >= FEW_ROWS)
        if end > start and (is_far or closes or not left):
            return end, gutters
        covered, gutters = wider, left
        bottom = max(place.bottom for place in rows[end])
    return len(rows), gutters


def join(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of intervals, from left to right."""
    joined: list[tuple[float, float]] = []
    for left, right in sorted(spans):
        if joined and left <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], right)
        else:
            joined.append((left, right))
    return joined


def split_columns(places: Sequence[LinePlace], gutters: Sequence[float]) -> list[list[LinePlace]]:
    """The lines between gutters, from left to right."""
    columns: list[list[LinePlace]] = [[] for _ in range(len(gutters) + 1)]
    for place in places:
        columns[bisect(gutters, place.left)].append(place)
    return columns


def are_columns(columns: Sequence[Sequence[LinePlace]], em: float) -> bool:
    """Whether these are columns of text, to be read one after the other; otherwise they are read row by row.

    Beside each other, and either they say what columns do, or the lines of two neighbors are not in rows.
    """
    if len(columns) < 2 or min(map(len, columns)) < 2:
        return False
    shares = [share_rows(min(pair, key=len), max(pair[::-1], key=len), em) for pair in pairwise(columns)]
    if min(beside for beside, _ in shares) < 0.5:
        return False
    texts = [[place.text.strip() for place in column] for column in columns]
    if max(map(len, columns)) < FEW_ROWS:
        return are_prose(texts, PROSE)
    return min(aligned for _, aligned in shares) < 0.5 or are_sorted(texts) or are_prose(texts, PHRASE)


def are_sorted(columns: Sequence[Sequence[str]]) -> bool:
    """Whether the lines of all columns together are in alphabetical order, as names or terms in a list are."""
    texts = [text.casefold() for column in columns for text in column]
    return len(set(texts)) >= SORTED and all(a <= b for a, b in pairwise(texts))


def are_prose(columns: Sequence[Sequence[str]], least_words: float) -> bool:
    """Whether the lines of columns are those of a text; or phrases of one list, which are shorter, but alike in all columns.
    Of labels and values, items and amounts, one says more or has more digits."""
    if any(sum(text.endswith((":", "：")) for text in column) > 0.3 * len(column) for column in columns):
        return False
    words = [median(map(count_words, column)) for column in columns]
    numbers = [share_numbers(column) for column in columns]
    are_alike = max(words) <= ALIKE_WORDS * min(words) and max(numbers) - min(numbers) <= ALIKE_NUMBERS
    return min(words) >= (least_words if are_alike else PROSE)


def share_numbers(texts: Sequence[str]) -> float:
    """The share of lines with digits."""
    return sum(any(map(str.isdigit, text)) for text in texts) / len(texts)


def are_fields(rows: Sequence[Sequence[LinePlace]], em: float) -> bool:
    """Whether these are the fields of a form beside each other, in each the label above its value.

    Proximity decides, as in docstrum (O'Gorman, "The document spectrum for page layout analysis", 1993): a value is close
    below its label, and the next labels are further away. Of two rows alone, the line below the first label must look
    like a value too, and the line beside it must not.
    """
    labels, values = rows[::2], rows[1::2]
    if [*map(len, labels)] != [*map(len, values)] or max(map(len, labels)) < 2:
        return False
    middles = [sum(place.middle for place in row) / len(row) for row in rows]
    steps = [(below - above) / em for above, below in pairwise(middles)]
    if max(steps[::2]) > CLOSE or min(steps[1::2], default=np.inf) < max(steps[::2]) + APART:
        return False
    if share_numbers([place.text for row in labels for place in row]) > 0:
        return False
    if len(labels) > 1:
        return True
    beside, below = (
        sorted(row, key=lambda place: place.left)[i].text for i, row in ((1, labels[0]), (0, values[0]))
    )
    return is_value(below) and not is_value(beside)


def is_value(text: str) -> bool:
    """Whether a line looks like the value of a field: with digits, or a name of several words."""
    words = text.split()
    is_name = len(words) > 1 and all(word.isalpha() and word.istitle() for word in words)
    return is_name or share_numbers([text]) > 0


def share_rows(fewer: Sequence[LinePlace], more: Sequence[LinePlace], em: float) -> tuple[float, float]:
    """Of the lines of a column, the shares that have a line beside them in another, and that are in a row with it."""
    middles = sorted(place.middle for place in more)
    away = []
    for place in fewer:
        after = bisect(middles, place.middle)
        away.append(min(abs(place.middle - middle) for middle in middles[max(after - 1, 0) : after + 1]))
    return (
        sum(distance <= 1.5 * em for distance in away) / len(away),
        sum(distance <= BESIDE * em for distance in away) / len(away),
    )


def count_words(text: str) -> float:
    """How much a line says, in words; of numbers nothing."""
    wide = len(CJK.findall(text))
    words = [word for word in text.split() if any(map(str.isalpha, word)) and not CJK.search(word)]
    return wide / CJK_WORD + max(len(words), sum(map(len, words)) / LATIN_WORD)


def order_row(row: Sequence[LinePlace], em: float) -> list[LinePlace]:
    """The lines of one row from left to right; of a row that holds several, as a large letter beside small lines does,
    each part by itself."""
    row = sorted(row, key=lambda place: (place.left, place.top, place.number))
    middles = [place.middle for place in row]
    if max(middles) - min(middles) <= BESIDE * em:
        return row
    if max(place.height for place in row) < 1.8 * min(place.height for place in row):
        return trace_rows(row, em)
    gutters = [(a + b) / 2 for (_, a), (b, _) in pairwise(join([(place.left, place.right) for place in row]))]
    if not gutters:
        return trace_rows(row, em)
    return [place for column in split_columns(row, gutters) for place in cut(column, em)]


def trace_rows(places: Sequence[LinePlace], em: float) -> list[LinePlace]:
    """Lines in rows that bend, as on a photographed page: each line goes on with the nearest one at its right end.
    places: from left to right."""
    rows: list[list[LinePlace]] = []
    for place in places:
        near = [row for row in rows if abs(row[-1].middle - place.middle) <= 0.6 * em]
        if near:
            min(near, key=lambda row: abs(row[-1].middle - place.middle)).append(place)
        else:
            rows.append([place])
    rows.sort(key=lambda row: (sum(place.middle for place in row) / len(row), row[0].left))
    return [place for row in rows for place in row]


def is_sure(texts: Scored) -> bool:
    """Whether the mean score of the characters is at least SURE."""
    count = sum(len(text.strip()) for text, _ in texts)
    return sum(score * len(text.strip()) for text, score in texts) >= SURE * max(count, 1)


def score_reading(texts: Scored) -> float:
    """How likely it is that a page was read upright: its characters,
    weighted by their line's score above NEUTRAL."""
    return sum((score - NEUTRAL) * len(text.strip()) for text, score in texts if score > NEUTRAL)
