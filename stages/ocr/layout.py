"""Puts a page's lines into reading order."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise, zip_longest
from operator import itemgetter
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from stages.ocr import direction
from stages.ocr.descriptor import VERTICAL_RATIO

if TYPE_CHECKING:
    from stages.ocr.dbpost import Quads

# Lengths are in ems: the median height of a page's boxes, which the detector draws half as high again as the letters.
CORE = 0.25  # of a box above and below that may overlap the rows beside it
BESIDE = 0.4  # between the middles of two boxes of one row, at most
ALIGNED = 0.25  # and if their columns are those of a table
NEAR = 0.7  # and if their columns are beside each other at all
IN_ROWS = 0.5  # of the lines of two such columns, at least the share that is in common rows
SENTENCES = 0.75  # the same, of a column of sentences
SHORT = 0.5  # of the height of such a column, one beside it that is no part of a table
GUTTER = 0.25  # between two columns, at least
FLUSH = 0.5  # between the left edges of lines of one column, at most
FEW_ROWS = 3  # from which on a run of rows keeps its gutters
SET_OFF = 0.3  # above a heading or a foot, more than between other lines
BREAK = 1.5  # above the next part of a page, more than between other lines
LARGE = 1.25  # heights of other lines, a heading
AHEAD = 3  # rows that show what follows
HOLES = 0.15  # of the rows of columns of text, those that may lack a line
CLOSE = 1.5  # from the middle of a label to that of its value, at most
LABELS = 0.75  # of the lines of a column that begins a table, those with a colon
MOST_FIELDS = 0.6  # of a form, the share that have a label and a value
APART = 0.2  # by which the next label is further away, at least
SLACK = 0.3  # by which columns of fields that are far from each other may differ more than rows
SMALL_PRINT = 0.88  # of a value's height, its label


class LinePlace(NamedTuple):
    """A line on a page that was made straight: its edges in pixels, its text, and its number."""

    left: float
    top: float
    right: float
    bottom: float
    height: float
    middle: float
    text: str
    number: int


Row = Sequence[LinePlace]  # or a column
Rows = Sequence[Row]  # or columns
Span = tuple[float, float]
Shares = Sequence[tuple[float, bool]]  # of two columns beside each other, see `share_rows`


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
    x, y = direction.turn_corners(quads, turns).transpose(2, 0, 1).astype(np.float64)
    x, y = ((x, y), (y, -x), (-x, -y), (-y, x))[turns % 4]
    slope = direction.find_slope(x, y)
    x, y = x + slope * y, y - slope * x
    if direction.runs_left(texts):
        x = -x
    left, top, right, bottom = x.min(axis=1), y.min(axis=1), x.max(axis=1), y.max(axis=1)
    edges = np.array([left, top, right, bottom, bottom - top, (top + bottom) / 2]).tolist()
    is_tall = turns == 0 and sum(edges[4]) > sum(edges[2]) - sum(edges[0])
    if is_tall and direction.guess_turns(quads[[len(text) > 1 for text in texts]]):
        # Vertical Japanese: a line runs down, the next one is at its left.
        return order_lines(quads, texts, turns=1)
    places, margin = split_margin(list(map(LinePlace, *edges, map(str.strip, texts), range(len(texts)))))
    em = max(median(place.height for place in places), 1.0)
    return [place.number for part in (places, margin) for place in order_region(part, em)]


def split_margin(places: list[LinePlace]) -> tuple[list[LinePlace], list[LinePlace]]:
    """The lines in rows, and those that run up or down, as a number in the margin does."""
    tall = [place for place in places if place.height > VERTICAL_RATIO * (place.right - place.left)]
    margin = [place for place in tall if len(place.text) > 2]
    if not margin or len(margin) == len(places):
        return places, []
    return [place for place in places if place not in margin], margin


def order_region(places: Row, em: float) -> list[LinePlace]:
    """The lines of a region, in reading order: one section after the other."""
    rows, gaps = split_rows(places, em)
    if len(rows) == len(places) and all(
        above.left < below.right and below.left < above.right for (above,), (below,) in pairwise(rows)
    ):
        return flatten(rows)
    return flatten(order_section(*section, em) for section in split_sections(rows, gaps, em))


def order_section(rows: Rows, gaps: Sequence[float], gutters: Sequence[float], em: float) -> list[LinePlace]:
    """The lines of rows that share gutters: column by column, field by field, or row by row. gaps: see `split_sections`."""
    if not gutters:
        return flatten(order_row(row, em) for row in rows)
    columns = split_columns(flatten(rows), gutters)
    shares = [share_rows(*pair, em) for pair in pairwise(columns)]
    parts = split_blocks(rows, em) or join_columns(columns, shares)
    if len(parts) > 1:
        return flatten(order_region(part, em) for part in parts)
    return order_rows([order_row(row, em) for row in rows], gaps, gutters, shares, em)


def order_rows(
    rows: Rows, gaps: Sequence[float], gutters: Sequence[float], shares: Shares, em: float
) -> list[LinePlace]:
    """The lines of a section whose columns have common rows."""
    by_rows = flatten(rows)
    columns = split_columns(by_rows, gutters)
    marks = direction.compare_marks(texts_of(by_rows), texts_of(flatten(columns)))
    if marks > 0:
        return by_rows
    if not marks and (groups := split_groups(rows, gaps, gutters, em)):
        return flatten(flatten(split_columns(flatten(group), gutters)) for group in groups)
    if marks < 0 or are_columns(rows, columns, gutters, shares):
        return flatten(order_region(column, em) for column in columns)
    return by_rows


def flatten(groups: Iterable[Iterable[LinePlace]]) -> list[LinePlace]:
    return list(chain.from_iterable(groups))


def texts_of(places: Iterable[LinePlace]) -> list[str]:
    return [place.text for place in places]


def middle_of(row: Row) -> float:
    """The mean of its lines' middles."""
    return sum(place.middle for place in row) / len(row)


def split_rows(places: Row, em: float) -> tuple[list[list[LinePlace]], list[float]]:
    """The lines between cuts that go across a whole region, from top to bottom; and the gap above each row and below the
    last one, infinite at both ends."""
    rows: list[list[LinePlace]] = []
    gaps: list[float] = []
    bottom = cut = -np.inf
    for place in sorted(places, key=itemgetter(1, 0)):
        edge = CORE * min(place.height, em)
        if place.top + edge < cut:
            rows[-1].append(place)
        else:
            rows.append([place])
            gaps.append(place.top - bottom)
        cut, bottom = max(cut, place.bottom - edge), max(bottom, place.bottom)
    return rows, [*gaps, np.inf]


def split_sections(
    rows: Rows, gaps: Sequence[float], em: float
) -> Iterator[tuple[Rows, Sequence[float], list[float]]]:
    """Runs of rows that share gutters; with the gaps above each row and below the last one, and the gutters' middles."""
    usual = max(median(gaps[1:-1]), 0.0) if len(rows) > 1 else 0.0
    start, covered = 0, find_columns(rows[0])
    gutters = find_gutters(covered, em)
    for end in range(1, len(rows)):
        own = find_columns(rows[end])
        wider = join(covered + own)
        left = find_gutters(wider, em)
        closes = not left or (len(left) < len(gutters) and end - start >= FEW_ROWS)
        if closes or ends_above(rows, gaps, start, end, covered, usual, em):
            yield rows[start:end], gaps[start : end + 1], gutters
            start, wider, left = end, own, find_gutters(own, em)
        covered, gutters = wider, left
    yield rows[start:], gaps[start:], gutters


def ends_above(
    rows: Rows, gaps: Sequence[float], start: int, end: int, columns: Sequence[Span], usual: float, em: float
) -> bool:
    """Whether a section ends above a row: as all that it has is a heading, or as this row is a heading or a foot, or is set
    off and begins where no column does. Headings and feet are single lines; a foot begins where no line near it does."""
    row, above = rows[end], rows[start]
    is_set_off = gaps[end] - SET_OFF * em > usual
    following = flatten(rows[end + 1 : end + 1 + AHEAD])
    if end == start + 1 and len(above) == 1:  # a title
        return above[0].height > LARGE * em or not begins(above, find_columns([*row, *following])[1:], em)
    if len(row) > 1:
        return is_set_off and (gaps[end] > usual + BREAK * em or not begins(row, columns, em))
    if not begins(row, columns, em):
        around = [*flatten(rows[max(start, end - AHEAD) : end]), *following]
        return is_set_off or not begins(row, around, em)
    own = median(gaps[start + 1 : end] or [usual])
    return gaps[end] - SET_OFF * em > max(usual, own) and is_heading(rows, gaps, end, columns, em)


def is_heading(rows: Rows, gaps: Sequence[float], end: int, columns: Sequence[Span], em: float) -> bool:
    """Whether a line that is set off and begins where a column does is large, or above columns, or close to a wide line."""
    row, has_columns = rows[end], find_gutters(find_columns(flatten(rows[end + 1 : end + 1 + AHEAD])), em)
    if row[0].height > LARGE * em or begins(row, columns[1:], em):
        return row[0].height > LARGE * em or not has_columns
    is_close = gaps[end + 1] + SET_OFF * em < gaps[end]
    return bool(has_columns) or (
        is_close and not find_gutters(join([*columns, *find_columns(rows[end + 1])]), em)
    )


def find_gutters(columns: Sequence[Span], em: float) -> list[float]:
    """The middle of each gutter between columns."""
    return [(a + b) / 2 for (_, a), (b, _) in pairwise(columns) if b - a >= GUTTER * em]


def begins(row: Row, others: Row | Sequence[Span], em: float) -> bool:
    """Whether each line of a row begins at the left edge of another line, or of a column."""
    return all(any(abs(place.left - other[0]) < FLUSH * em for other in others) for place in row)


def find_columns(places: Row) -> list[Span]:
    """The left and right edges of what lines cover, from left to right."""
    return join([(place.left, place.right) for place in places])


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


def share_rows(first: Row, second: Row, em: float) -> tuple[float, bool]:
    """Of the lines of the shorter column, the share that is in a row with one of the other; and whether half are beside it."""
    fewer, more = sorted((first, second), key=len)
    middles, aligned, beside = sorted([-np.inf, *(place.middle for place in more), np.inf]), 0, 0
    for place in fewer:
        after = bisect(middles, place.middle)
        away = min(place.middle - middles[after - 1], middles[after] - place.middle)
        aligned += away <= (ALIGNED if len(fewer) >= FEW_ROWS else BESIDE) * em
        beside += away <= NEAR * em
    return aligned / len(fewer), 2 * beside >= len(fewer)


def join_columns(columns: Sequence[list[LinePlace]], shares: Shares) -> list[list[LinePlace]]:
    """Columns with common rows in one part. Labels with colons do not belong to what is left of them."""
    labels = [direction.are_labels(texts_of(column), LABELS) for column in columns]
    first = labels.index(True) if any(labels) else 0
    parts = [[*columns[0]]]
    for i, (aligned, are_beside) in enumerate(shares, start=1):
        pair = columns[i - 1 : i + 1]
        is_apart = i == first
        if not is_apart and max(map(len, pair)) >= FEW_ROWS:
            is_apart = aligned < IN_ROWS or are_sentences(pair, aligned)
        if is_apart and are_beside:
            parts.append([*columns[i]])
        else:
            parts[-1] += columns[i]
    return parts


def split_blocks(rows: Rows, em: float) -> list[list[LinePlace]]:
    """Blocks beside each other, each a heading above rows of several lines that begin with words; nothing if there are none."""
    heads, places = sorted(rows[0]), flatten(rows)
    if len(rows) < FEW_ROWS or len(heads) < 2 or len(places) <= len(rows) * len(heads):
        return []
    empty = [(right - left, (left + right) / 2) for (_, left), (right, _) in pairwise(find_columns(places))]
    middles = [  # of the widest gap between two heads
        max((gap for gap in empty if a.left < gap[1] < b.left), default=(0, 0))[1] for a, b in pairwise(heads)
    ]
    blocks = split_columns(places, middles)
    return blocks if all(has_labels(block[1:], em) for block in blocks) else []


def has_labels(places: Row, em: float) -> bool:
    """Whether most rows below a heading are fields: several lines, the first of which says something."""
    rows = split_rows(places, em)[0]
    labels = [min(row).text for row in rows if len(row) > 1]
    return 2 * len(labels) > len(rows) and median(map(direction.count_words, labels)) >= 1


def are_sentences(pair: Rows, aligned: float) -> bool:
    """Whether one of two columns is a text, and the other one has no common rows with it, or is much shorter and no amounts.
    aligned: see `share_rows`."""
    heights = [column[-1].bottom - column[0].top for column in pair]
    is_short = min(heights) < SHORT * max(heights)
    if aligned >= SENTENCES and not is_short:
        return False
    says = [median(map(direction.count_words, texts_of(column))) for column in pair]
    return max(says) >= direction.PROSE and (aligned < SENTENCES or min(says) >= 1)


def are_columns(rows: Rows, columns: Rows, gutters: Sequence[float], shares: Shares) -> bool:
    """Whether columns with common rows are columns of text, to be read one after the other: few rows lack a line, and they
    say what columns of text do."""
    if not all(are_beside for _, are_beside in shares) or min(map(len, columns)) < 2:
        return False
    has_holes = count_holes(rows, gutters) > max(1, HOLES * len(rows))
    is_prose = has_holes or len(rows) < max(FEW_ROWS, *map(len, columns))
    return direction.are_text(list(map(texts_of, columns)), direction.PROSE if is_prose else direction.PHRASE)


def count_holes(rows: Rows, gutters: Sequence[float]) -> int:
    """The rows that lack a line, of the column with most of them."""
    filled: list[list[int]] = [[] for _ in range(len(gutters) + 1)]
    for number, row in enumerate(rows):
        for column in {bisect(gutters, place.left) for place in row}:
            filled[column].append(number)
    return max(numbers[-1] - numbers[0] + 1 - len(numbers) for numbers in filled)


def split_groups(rows: Rows, gaps: Sequence[float], gutters: Sequence[float], em: float) -> list[Rows]:
    """Groups of rows to be read column by column: the fields of a form, in each the label above its value or below it, or
    the rows of a table whose cells have several lines; nothing if this is neither.

    Proximity decides, as in docstrum (O'Gorman, "The document spectrum for page layout analysis", 1993): a value is close
    to its label, and the next field is further away.
    """
    groups = group_rows(rows, gaps, em)
    pairs = [group for group in groups if len(group) == 2]
    are_fields = len(pairs) >= MOST_FIELDS * len(groups) > 0 and are_pairs(pairs)
    return groups if are_fields or are_cells(groups, gutters[0]) else []


def are_cells(groups: Sequence[Rows], gutter: float) -> bool:
    """Whether each group is a row of a table: its further rows go on in the cells after the first gutter."""
    later = [flatten(group[1:]) for group in groups if len(group) > 1]
    if not later or any(place.left <= gutter for place in flatten(later)):
        return False
    return len(later) > 1 or not direction.share_numbers(texts_of(later[0]))


def group_rows(rows: Rows, gaps: Sequence[float], em: float) -> list[Rows]:
    """Groups of rows that are closer to each other than to the rows above and below; none if no rows are."""
    steps = [gaps[0] + em, *(b - a for a, b in pairwise(map(middle_of, rows))), gaps[-1] + em]
    least = min(steps)
    jumps = [(a + b) / 2 for a, b in pairwise(sorted(steps)) if b - a >= APART * em]
    limit = min([*jumps[:1], least + em])
    if least > CLOSE * em or min(steps[0], steps[-1]) <= limit:
        return []
    starts = [i for i, step in enumerate(steps[:-1]) if step > limit]
    return [rows[a:b] for a, b in pairwise([*starts, len(rows)])]


def are_pairs(pairs: Sequence[Rows]) -> bool:
    """Whether the rows of each pair are labels and values: labels are in smaller print, or their words show it."""
    rows = list(map(flatten, zip(*pairs, strict=True)))
    heights = [median(place.height for place in row) for row in rows]
    small, other = map(texts_of, rows if heights[0] <= heights[1] else reversed(rows))
    if min(heights) < SMALL_PRINT * max(heights) and direction.are_small_labels(small, other):
        return True
    places = zip_longest(*map(sorted, chain.from_iterable(pairs)))
    columns = [texts_of(filter(None, column)) for column in places]
    return direction.are_fields(list(map(texts_of, rows)), columns, SLACK if len(pairs) > 1 else None)


def order_row(row: Row, em: float) -> list[LinePlace]:
    """The lines of one row from left to right; of one with several, as a large letter beside small lines, part by part."""
    if len(row) == 1:
        return [*row]
    row = sorted(row, key=lambda place: (place.left, place.top, place.number))
    middles, heights = [place.middle for place in row], [place.height for place in row]
    if max(middles) - min(middles) <= BESIDE * em:
        return row
    gutters = find_gutters(find_columns(row), 0)
    if not gutters or max(heights) < 1.8 * min(heights):
        return trace_rows(row, em)
    return flatten(order_region(column, em) for column in split_columns(row, gutters))


def trace_rows(places: Row, em: float) -> list[LinePlace]:
    """Lines, from left to right, in rows that bend, as in a photograph: each goes on with the nearest at its right end."""
    rows: list[list[LinePlace]] = []
    for place in places:
        nearest = min(rows, key=lambda row: abs(row[-1].middle - place.middle), default=None)
        if nearest and abs(nearest[-1].middle - place.middle) <= 0.6 * em:
            nearest.append(place)
        else:
            rows.append([place])
    rows.sort(key=lambda row: (middle_of(row), row[0].left))
    return flatten(rows)
