"""Puts a page's lines into reading order."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise, zip_longest
from statistics import median
from typing import Any, NamedTuple
from unicodedata import bidirectional

import numpy as np
from numpy.typing import NDArray

from stages.ocr.dbpost import Quads
from stages.ocr.direction import (
    PROSE,
    RIGHT_TO_LEFT,
    are_fields,
    are_labels,
    are_prose,
    are_text,
    compare_marks,
    count_words,
    find_slope,
    share_values,
    turn_corners,
)

# Lengths are in ems: the median height of a page's boxes, which the detector draws half as high again as the letters.
CORE = 0.25  # of a box above and below that may overlap the rows beside it
BESIDE = 0.4  # between the middles of two boxes of one row, at most
ALIGNED = 0.25  # and if their columns are those of a table
GUTTER = 0.4  # between two columns, at least
FLUSH = 0.5  # between the left edges of lines of one column, at most
FEW_ROWS = 3  # from which on a run of rows keeps its gutters
BREAK = 3.0  # between two rows of the same columns, at most
SET_OFF = 0.3  # above a heading or a foot, more than between other lines
LARGE = 1.25  # heights of other lines, a heading
AHEAD, LOOK = 3, 12  # rows that show what follows, and lines among which the next one below is found
HOLES = 0.15  # of the rows of columns of text, those that may lack a line
CLOSE = 1.5  # from the middle of a label to that of its value, at most
LABELS = 0.75  # of the lines of a column that begins a table, those with a colon
CLOSER = 1.12  # heights of the higher one, if there is no other field
MOST_FIELDS = 0.6  # of a form, the share that have a label and a value
APART = 0.2  # by which the next label is further away, at least
SLACK = 0.3  # by which columns of fields that are far from each other may differ more than rows
SMALL_PRINT = 0.88  # of a value's height, its label
PITCH = 0.12  # by which the distances of lines in two columns differ if they are in no common rows


class LinePlace(NamedTuple):
    """A line on a page that was made straight: its edges in pixels, its text, and its number."""

    left: float
    top: float
    right: float
    bottom: float
    text: str
    number: int
    height: float
    middle: float


Row = Sequence[LinePlace]  # or a column
Span = tuple[float, float]


def order_lines(quads: Quads, texts: Sequence[str], turns: int = 0) -> list[int]:
    """The indices of a page's lines, in reading order. texts: what was read in each box.

    Recursive XY-cut (Nagy and Seth, "Hierarchical representation of optically scanned documents", 1984; on boxes:
    Ha, Haralick and Phillips, "Recursive X-Y cut using bounding boxes of connected components", 1995), on a page that
    is made straight as Baird does it ("The skew angle of printed documents", 1987). A region is cut into sections, whose
    rows share gutters. XY-cut alone cannot tell columns of text, which are read one after the other, from tables, which
    are read row by row, and from forms, which are read field by field: all have gutters. `order_section` tells them apart
    by how lines stand to each other, and by what they say.
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
        LinePlace(left, top, right, bottom, text.strip(), i, bottom - top, (top + bottom) / 2)
        for i, ((left, top, right, bottom), text) in enumerate(zip(edges, texts, strict=True))
    ]
    em = median(place.height for place in places)
    return [place.number for place in order_region(places, max(em, 1.0))]


def goes_left(texts: Sequence[str]) -> bool:
    """Whether most letters of a page are of a right-to-left script."""
    if all(text.isascii() for text in texts):
        return False
    kinds = [bidirectional(character) for text in texts for character in text]
    return sum(kind in RIGHT_TO_LEFT for kind in kinds) > kinds.count("L")


def order_region(places: Row, em: float) -> list[LinePlace]:
    """The lines of a region, in reading order: one section after the other."""
    rows, ordered, start = split_rows(places, em), list[LinePlace](), 0
    usual = find_usual_gap(rows)
    while start < len(rows):
        end, gutters = find_section(rows, start, usual, em)
        ordered += order_section(rows[start:end], gutters, em)
        start = end
    return ordered


def order_section(rows: Sequence[Row], gutters: Sequence[float], em: float) -> list[LinePlace]:
    """The lines of rows that share gutters: column by column, field by field, or row by row."""
    by_rows = flatten(order_row(row, em) for row in rows)
    if not gutters:
        return by_rows
    columns = split_columns(flatten(rows), gutters)
    away = [find_distances(*pair) for pair in pairwise(columns)]
    parts = join_columns(columns, away, em)
    if len(parts) > 1:
        return flatten(order_region(part, em) for part in parts)
    marks = compare_marks([place.text for place in by_rows], [place.text for place in flatten(columns)])
    if marks > 0:
        return by_rows
    if not marks and (fields := split_fields(rows, gutters, em)):
        return flatten(fields)
    if marks < 0 or are_columns(rows, columns, gutters, away, em):
        return flatten(order_region(column, em) for column in columns)
    return by_rows


def flatten(groups: Iterable[Iterable[LinePlace]]) -> list[LinePlace]:
    return list(chain.from_iterable(groups))


def split_rows(places: Row, em: float) -> list[list[LinePlace]]:
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


def find_usual_gap(rows: Sequence[Row]) -> float:
    """The median gap between a line and the next one below it."""
    places, gaps = [place for row in rows for place in row], []
    for i, place in enumerate(places):
        for below in places[i + 1 : i + LOOK]:
            if below.left < place.right and place.left < below.right:
                gaps.append(below.top - place.bottom)
                break
    return max(median(gaps), 0.0) if gaps else 0.0


def find_section(rows: Sequence[Row], start: int, usual: float, em: float) -> tuple[int, list[float]]:
    """The longest run of rows from `start` that are one section: where it ends, and the middle of each gutter.
    usual: the gap between two of its lines."""
    covered: list[Span] = []
    gutters: list[float] = []
    for end in range(start, len(rows)):
        wider = join([*covered, *((place.left, place.right) for place in rows[end])])
        left = find_gutters(wider, em)
        closes = len(left) < len(gutters) and (not left or end - start >= FEW_ROWS)
        if end > start and (
            closes or not left or ends_above(rows, start, end, [left for left, _ in covered], usual, em)
        ):
            return end, gutters
        covered, gutters = wider, left
    return len(rows), gutters


def ends_above(
    rows: Sequence[Row], start: int, end: int, lefts: Sequence[float], usual: float, em: float
) -> bool:
    """Whether a section ends above a row that is far below, or begins where no column does, or is a heading or a foot.

    A heading or foot is a single line. It begins where no column does; or it is set off, and large, or above columns.
    lefts: the edges of the section's columns.
    """
    row, above, below = rows[end], rows[end - 1], rows[end + 1 : end + 1 + AHEAD]
    gap = min(place.top for place in row) - max(place.bottom for place in above)
    is_set_off, is_single = gap > usual + SET_OFF * em, len(row) == 1
    if end == start + 1 and len(above) == 1:
        others = [left for left, _ in find_columns([row, *below])[1:]]
        return is_set_off or not begins(above, others, em)
    if gap > BREAK * em or not begins(row, lefts, em):
        return is_set_off or (is_single and not begins(row, [place.left for place in flatten(below)], em))
    is_heading = len(find_gutters(find_columns(below), em)) > 0
    is_elsewhere = row[0].height > LARGE * em or is_heading != begins(row, lefts[1:], em)
    return is_single and is_set_off and is_elsewhere


def find_gutters(columns: Sequence[Span], em: float) -> list[float]:
    """The middle of each gutter between columns."""
    return [(a + b) / 2 for (_, a), (b, _) in pairwise(columns) if b - a >= GUTTER * em]


def begins(row: Row, lefts: Sequence[float], em: float) -> bool:
    """Whether each line of a row begins at one of these edges."""
    return all(any(abs(place.left - left) < FLUSH * em for left in lefts) for place in row)


def find_columns(rows: Sequence[Row]) -> list[Span]:
    """The left and right edges of what rows cover, from left to right."""
    return join([(place.left, place.right) for row in rows for place in row])


def join(spans: Sequence[Span]) -> list[Span]:
    """The union of intervals, from left to right."""
    joined: list[Span] = []
    for left, right in sorted(spans):
        if joined and left <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], right)
        else:
            joined.append((left, right))
    return joined


def split_columns(places: Row, gutters: Sequence[float]) -> list[list[LinePlace]]:
    """The lines between gutters, from left to right."""
    columns: list[list[LinePlace]] = [[] for _ in range(len(gutters) + 1)]
    for place in places:
        columns[bisect(gutters, place.left)].append(place)
    return columns


def join_columns(
    columns: Sequence[list[LinePlace]], away: Sequence[NDArray[Any]], em: float
) -> list[list[LinePlace]]:
    """Columns with common rows in one part. Labels with colons do not belong to what is left of them.
    away: of two neighbors, see find_distances."""
    labels = [are_labels([place.text for place in column], LABELS) for column in columns]
    first = labels.index(True) if any(labels) else 0
    parts = [[*columns[0]]]
    for i, distances in enumerate(away, start=1):
        is_apart = i == first or are_separate(columns[i - 1], columns[i], distances, em)
        if is_apart and is_beside(distances, em):
            parts.append([*columns[i]])
        else:
            parts[-1] += columns[i]
    return parts


def find_distances(first: Row, second: Row) -> NDArray[Any]:
    """Of the lines of the shorter column: how far their middles are from the nearest one in the other."""
    fewer, more = ([place.middle for place in column] for column in sorted((first, second), key=len))
    middles = np.array([-np.inf, *sorted(more), np.inf])
    after = np.searchsorted(middles, fewer)
    distances: NDArray[Any] = np.minimum(fewer - middles[after - 1], middles[after] - fewer)
    return distances


def is_beside(away: NDArray[Any], em: float) -> bool:
    """Whether these are two columns beside each other, and not a line beside a column, or lines by turns."""
    return len(away) > 1 and bool((away <= 1.5 * em).mean() >= 0.5)


def are_separate(first: Row, second: Row, away: NDArray[Any], em: float) -> bool:
    """Whether two columns have no common rows: lines are not in rows, or are in a few by chance, as the distances of a
    text's lines are others than those of a table's."""
    if max(len(first), len(second)) < FEW_ROWS:
        return False
    aligned = (away <= ALIGNED * em).mean()
    if aligned < 0.5 or aligned == 1 or len(away) < FEW_ROWS:
        return bool(aligned < 0.5)
    if max(median([count_words(place.text) for place in column]) for column in (first, second)) < PROSE:
        return False
    pitches = [np.median(np.diff(sorted(place.middle for place in column))) for column in (first, second)]
    ratio = max(pitches) / max(min(pitches), 1.0)
    return bool(abs(ratio - round(ratio)) > PITCH)


def are_columns(
    rows: Sequence[Row],
    columns: Sequence[Row],
    gutters: Sequence[float],
    away: Sequence[NDArray[Any]],
    em: float,
) -> bool:
    """Whether columns with common rows are columns of text, to be read one after the other: few rows lack a line, and they
    say what columns of text do."""
    if not all(is_beside(distances, em) for distances in away):
        return False
    texts = [[place.text for place in column] for column in columns]
    if max(map(len, columns)) < FEW_ROWS:
        return are_prose(texts, PROSE)
    return count_holes(rows, gutters) <= max(1, HOLES * len(rows)) and are_text(texts)


def count_holes(rows: Sequence[Row], gutters: Sequence[float]) -> int:
    """The rows that lack a line, of the column with most of them."""
    filled: list[list[int]] = [[] for _ in range(len(gutters) + 1)]
    for number, row in enumerate(rows):
        for column in {bisect(gutters, place.left) for place in row}:
            filled[column].append(number)
    return max(numbers[-1] - numbers[0] + 1 - len(numbers) for numbers in filled)


def split_fields(rows: Sequence[Row], gutters: Sequence[float], em: float) -> list[list[LinePlace]]:
    """The fields of a form, in each the label above its value or below it; nothing if this is no such form.

    Proximity decides, as in docstrum (O'Gorman, "The document spectrum for page layout analysis", 1993): a value is close
    to its label, and the next field is further away.
    """
    groups, jump = group_rows(rows, em)
    pairs = [group for group in groups if len(group) == 2]
    if not pairs or len(pairs) < MOST_FIELDS * len(groups):
        return []
    tops, bottoms = (sorted(flatten(pair[i] for pair in pairs)) for i in (0, 1))
    if len(pairs) == 1 and not are_close(tops, bottoms):
        return []
    slack = SLACK * (jump >= 2 * APART)
    if not have_small_labels(tops, bottoms) and not have_plain_labels(pairs, tops, bottoms, slack):
        return []
    return [field for group in groups for field in split_columns(flatten(group), gutters)]


def group_rows(rows: Sequence[Row], em: float) -> tuple[list[list[Row]], float]:
    """Rows in groups that are apart from each other, and how much further than the rows in a group, in ems. Each row by
    itself if they are not close."""
    middles = [sum(place.middle for place in row) / len(row) for row in rows]
    steps = [(below - above) / em for above, below in pairwise(middles)]
    jump, limit = max(((b - a, (a + b) / 2) for a, b in pairwise(sorted(steps))), default=(0.0, CLOSE))
    if jump < APART:
        limit = max(steps, default=0.0)
    if max([step for step in steps if step <= limit], default=0.0) > CLOSE:
        return [[row] for row in rows], 0.0
    groups = [[rows[0]]]
    for step, row in zip(steps, rows[1:], strict=True):
        if step > limit:
            groups.append([])
        groups[-1].append(row)
    return groups, jump


def are_close(tops: Row, bottoms: Row) -> bool:
    step = median(place.middle for place in bottoms) - median(place.middle for place in tops)
    return step <= CLOSER * max(median(place.height for place in row) for row in (tops, bottoms))


def have_plain_labels(pairs: Sequence[Sequence[Row]], tops: Row, bottoms: Row, slack: float) -> bool:
    """Whether the words of rows show which ones are labels."""
    texts = [[place.text for place in row] for row in (tops, bottoms)]
    places = zip_longest(*(sorted(row) for pair in pairs for row in pair))
    columns = [[place.text for place in column if place] for column in places]
    return are_fields(texts[0], texts[1], columns, slack if len(pairs) > 1 else None)


def have_small_labels(tops: Row, bottoms: Row) -> bool:
    """Whether one of two rows is in smaller print, is as full as the other, and looks less like values."""
    above, below = (median(place.height for place in row) for row in (tops, bottoms))
    labels, values = (tops, bottoms) if above < below else (bottoms, tops)
    shares = [share_values([place.text for place in row]) for row in (labels, values)]
    is_full = len(labels) >= max(len(values), 2)
    return (
        is_full and min(above, below) < SMALL_PRINT * max(above, below) and shares[0] <= max(shares[1], 0.5)
    )


def order_row(row: Row, em: float) -> list[LinePlace]:
    """The lines of one row from left to right; of a row that holds several, as a large letter beside small lines does,
    each part by itself."""
    if len(row) == 1:
        return [*row]
    row = sorted(row, key=lambda place: (place.left, place.top, place.number))
    middles = [place.middle for place in row]
    if max(middles) - min(middles) <= BESIDE * em:
        return row
    if max(place.height for place in row) < 1.8 * min(place.height for place in row):
        return trace_rows(row, em)
    gutters = [(a + b) / 2 for (_, a), (b, _) in pairwise(join([(place.left, place.right) for place in row]))]
    if not gutters:
        return trace_rows(row, em)
    return [place for column in split_columns(row, gutters) for place in order_region(column, em)]


def trace_rows(places: Row, em: float) -> list[LinePlace]:
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
