"""What shows how a page is read: its orientation and slope, the direction of its scripts, and what its lines say.

`turns` is the number of quarter turns, clockwise, of the page: 0 upright, 1 text runs down, 2 upside down, 3
text runs up. The detector finds lines in any direction, and the shape of its boxes shows whether a page is on
its side. Only reading shows which of the two remaining orientations it has: upside down, letters are guessed.

Logical order is the order in which one reads and writes.
A recognizer reads a picture from left to right, so it gives Arabic and Hebrew backwards. This is the inverse of
what the Unicode bidirectional algorithm (UAX #9) does for display, on one line without control characters:
numbers and words of left-to-right scripts keep their direction. PaddleOCR and rapidocr use python-bidi for it, which
takes the direction of a line from its leftmost letter; that is wrong for an Arabic line that ends with a Latin word.

A picture does not show everything: a number beside a Latin word is read together with it, from left to right.
Imports no torch and no cv2: labels of people are put in order by the same rules.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby, pairwise
from statistics import median, median_low
from typing import TYPE_CHECKING, Any
from unicodedata import bidirectional

import numpy as np
from numpy.typing import NDArray

from stages.ocr.descriptor import VERTICAL_RATIO

if TYPE_CHECKING:
    from stages.ocr.dbpost import Quads

SURE = 0.9  # mean score of a page's characters from which the opposite orientation is not tried
NEUTRAL = 0.5  # a character's probability that is evidence neither for nor against an orientation
ALONG = ((1, 0), (0, 1), (-1, 0), (0, -1))  # the direction of text, x and y, by number of turns

RIGHT_TO_LEFT = ("R", "AL")
DIRECTIONS = {"L": "L", "R": "R", "AL": "R", "EN": "N", "AN": "N"}  # N: a number
WITHIN_NUMBERS = ("CS", "ES")  # a separator between two digits is part of the number
AROUND_NUMBERS = ("ET",)  # a currency or percent sign beside a number is part of it
MIRRORED = str.maketrans("()[]{}<>«»‹›", ")(][}{><»«›‹")

SLOPES, SLOPE_STEP = 30, 0.0015  # tried on either side of the boxes' own slope: 2.6° in steps of 0.09°
ENOUGH = 250  # lines, the widest ones, to find the slope
SLOPE_COST = 25.0  # rows, relative to one em, that a slope of 1 must save

PROSE, PHRASE = 4.0, 1.9  # words of a line of text, and of one of a list or a narrow column
ALIKE_WORDS = 1.6  # between columns of one list: ratio of their words
ALIKE_NUMBERS = 0.34  # and difference of their shares of lines with digits
SORTED = 5  # lines, from which on their order is no chance
MARKS = 2  # that follow each other, at least, so that they show the order
MARK = re.compile(r"\(?(\d{1,2}|[A-Za-z])[.)、．](?!\d)")  # "1." or "(b)" at the beginning of a line
CJK = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
WORD = re.compile(r"[^\W\d_]+")
FIELD_NUMBER = re.compile(r"^\d\d? (?=[A-Za-z])")  # "3 Country of origin"
DIGIT = re.compile(r"\d")
AMOUNT = re.compile(r"\d[.,]\d\d(?!\d)")
CJK_WORD, LATIN_WORD = 2.5, 7.0  # characters; a recognizer often leaves out the spaces of small print

Scored = Sequence[
    tuple[str, float] | tuple[str, float, bool]
]  # texts, their scores, and whether they were guessed
Columns = Sequence[Sequence[str]]


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
    sides = np.roll(quads, -1, axis=1) - quads
    along = sides @ np.array(ALONG[turns], dtype=np.float32) / np.maximum(np.linalg.norm(sides, axis=2), 1e-6)
    corners = (along.argmax(axis=1)[:, None] + np.arange(4)) % 4
    turned: Quads = quads[np.arange(len(quads))[:, None], corners]
    return turned


def find_slope(x: NDArray[Any], y: NDArray[Any]) -> float:
    """How far a page's rows fall for each pixel to the right. x, y: [N, 4], corners clockwise from the text's top left.

    First guess: the slope of the boxes, of which the short ones say little. Then the one near it for which the ends of
    the boxes are in the fewest rows, if that saves enough: some slope puts any two lines into one row.
    """
    em = max(median((y.max(axis=1) - y.min(axis=1)).tolist()), 1.0)
    if len(x) > ENOUGH:
        widest = np.argsort(x.min(axis=1) - x.max(axis=1), kind="stable")[:ENOUGH]
        x, y = x[widest], y[widest]
    x, y = ((side[:, :2] + side[:, :1:-1]).T / 2 for side in (x, y))  # the middles of both ends
    width = np.maximum(x[1] - x[0], 1.0)
    slopes = (y[1] - y[0]) / width
    order = np.argsort(slopes, kind="stable")
    guess = slopes[order[np.searchsorted(np.cumsum(width[order]), width.sum() / 2)]]
    away = np.arange(-SLOPES, SLOPES + 1) * SLOPE_STEP
    ends = np.sort(y.ravel() - (guess + away)[:, None] * x.ravel(), axis=1)
    rows = np.minimum((ends[:, 1:] - ends[:, :-1]) / em, 0.5).sum(axis=1)
    return float(guess + away[np.argmin(rows + SLOPE_COST * np.abs(away))])


def is_sure(texts: Scored) -> bool:
    """Whether the mean score of the characters is at least SURE."""
    count = sum(len(text.strip()) for text, *_ in texts)
    return sum(score * len(text.strip()) for text, score, *_ in texts) >= SURE * max(count, 1)


def score_reading(texts: Scored) -> float:
    """How likely it is that a page was read upright: its characters, weighted by their line's score above NEUTRAL."""
    return sum((score - NEUTRAL) * len(text.strip()) for text, score, *_ in texts if score > NEUTRAL)


def reads_right_to_left(characters: Sequence[str]) -> bool:
    """Whether a dictionary has characters of a right-to-left script."""
    return any(bidirectional(character[:1] or " ") in RIGHT_TO_LEFT for character in characters)


def put_in_order(text: str) -> str:
    """Text in logical order, from the order of its characters in the picture."""
    kinds = [bidirectional(character) for character in text]
    letters = ["L" if kind == "L" else "R" for kind in kinds if kind == "L" or kind in RIGHT_TO_LEFT]
    if "R" not in letters:
        return text
    directions, leftwards = resolve(kinds), goes_left(letters)
    # The levels of UAX #9: even ones go right.
    right = 2 if leftwards else 0
    filled = fill_neutrals(directions, leftwards=leftwards)
    levels = [1 if direction == "R" else right for direction in filled]
    return reverse_runs(text, levels)


def runs_left(texts: Sequence[str]) -> bool:
    """Whether most letters of a page are of a right-to-left script."""
    if all(text.isascii() for text in texts):
        return False
    kinds = [bidirectional(character) for text in texts for character in text]
    return sum(kind in RIGHT_TO_LEFT for kind in kinds) > kinds.count("L")


def goes_left(letters: Sequence[str]) -> bool:
    """The direction of a line: that of the letters at its ends; if these differ, of most letters."""
    if letters[0] == letters[-1]:
        return letters[0] == "R"
    return letters.count("R") >= letters.count("L")


def resolve(kinds: Sequence[str]) -> list[str]:
    """Each character's direction: L, R, N for a number, or "" for what has none."""
    found = [DIRECTIONS.get(kind, "") for kind in kinds]
    join_numbers(kinds, found)
    beside = ""
    for i, direction in enumerate(found):  # a number after a word that goes right belongs to it
        if direction == "N" and beside == "L":
            found[i] = "L"
        beside = direction if direction in ("L", "R") else beside
    for i, kind in enumerate(kinds):
        if kind == "NSM":  # a mark has the direction of its letter
            found[i] = found[i - 1] if i else ""
    return found


def join_numbers(kinds: Sequence[str], found: list[str]) -> None:
    """Make signs in and around numbers a part of them."""
    last = len(found) - 1
    for i in range(1, last):
        if kinds[i] in WITHIN_NUMBERS and found[i - 1] == found[i + 1] == "N":
            found[i] = "N"
    for step, places in ((-1, range(1, last + 1)), (1, range(last - 1, -1, -1))):
        for i in places:
            if kinds[i] in AROUND_NUMBERS and found[i + step] == "N":
                found[i] = "N"


def fill_neutrals(directions: Sequence[str], *, leftwards: bool) -> list[str]:
    """What has no direction gets that of both its neighbors, or that of the line. As a neighbor, a number goes left."""
    line = "R" if leftwards else "L"
    filled = list(directions)
    for direction, run in groupby(range(len(filled)), key=lambda i: directions[i]):
        places = list(run)
        if direction == "":
            before = directions[places[0] - 1] if places[0] else line
            after = directions[places[-1] + 1] if places[-1] + 1 < len(filled) else line
            before, after = ("R" if side == "N" else side for side in (before, after))
            for i in places:
                filled[i] = before if before == after else line
    return filled


def reverse_runs(text: str, levels: Sequence[int]) -> str:
    """Reverse what goes left, and what goes right within that again. Brackets that go left are mirrored."""
    places = list(range(len(text)))
    for level in (1, 2) if max(levels) == 2 else (1,):
        start = 0
        for is_deep, run in groupby([levels[place] >= level for place in places]):
            end = start + len(list(run))
            if is_deep:
                places[start:end] = reversed(places[start:end])
            start = end
    return "".join(text[i].translate(MIRRORED) if levels[i] == 1 else text[i] for i in places)


def count_words(text: str) -> float:
    """How much a line says, in words; of numbers nothing."""
    words = WORD.findall(text)
    if text.isascii():
        return max(len(words), sum(map(len, words)) / LATIN_WORD)
    wide = len(CJK.findall(text))
    words = [word for word in words if not CJK.search(word)]
    return wide / CJK_WORD + max(len(words), sum(map(len, words)) / LATIN_WORD)


def share_numbers(texts: Sequence[str]) -> float:
    """The share of lines with digits."""
    return sum(map(bool, map(DIGIT.search, texts))) / len(texts)


def share_values(texts: Sequence[str]) -> float:
    """The share of lines that look like the value of a field."""
    return sum(map(is_value, texts)) / len(texts)


def is_value(text: str) -> bool:
    """Whether a line looks like the value of a field: with digits, an address of e-mail, or a name of several words."""
    text = FIELD_NUMBER.sub("", text)
    if DIGIT.search(text):
        return True
    words = [word for part in text.split() if (word := part.strip(".,&-"))]
    is_name = len(words) > 1 and all(word.replace("-", "").isalpha() and word[0].isupper() for word in words)
    return is_name or "@" in text


def is_label(text: str) -> bool:
    return text.endswith((":", "："))


def are_labels(texts: Sequence[str], least: float = 0.3) -> bool:
    """Whether the lines of a column, below its first one, are labels with colons."""
    return sum(map(is_label, texts[1:])) > least * len(texts[1:])


def are_small_labels(small: Sequence[str], other: Sequence[str]) -> bool:
    """Whether the words of a row in small print are the labels of another row: it is as full, and looks less like values."""
    return len(small) >= max(len(other), 2) and share_values(small) <= max(share_values(other), 0.5)


def are_fields(rows: Columns, columns: Columns, slack: float | None) -> bool:
    """Whether two rows are labels and the values below or above them.

    Labels have no digits, and rows differ more than columns, as those of a form with the label before its value do, or
    less by slack. If slack is None there is only one row of fields: then no label looks like a value, and the first value
    does, or some of several.
    """
    if min(map(share_numbers, rows)) > 0 or all(any(map(is_label, row)) for row in rows):
        return False
    labels, values = sorted(rows, key=share_values)
    if slack is None:
        has_values = is_value(values[0]) or (len(values) > 2 and share_values(values) >= 0.3)
        return has_values and share_values(labels) == 0
    across = list(map(share_values, columns))
    return share_values(values) - share_values(labels) + slack >= max(across) - min(across)


def are_text(columns: Columns, least_words: float) -> bool:
    """Whether columns are to be read one after the other for what they say: as text; or as a list, whose lines are shorter,
    but alike in all columns, or sorted; or as addresses, each of which has lines with digits and lines without.

    In a table, columns differ: one says more or has more digits, and each has either digits or none, as labels have.
    """
    words = []
    for column in reversed(columns):
        said = list(map(count_words, column))
        words.append(median(said))
        if median_low(said) < 1 or are_labels(column) or all(map(AMOUNT.search, column)):
            return False
    if max(min(words), least_words) >= PROSE:
        return min(words) >= PROSE
    numbers = list(map(share_numbers, columns))
    differ = max(numbers) - min(numbers)
    if min(words) >= least_words and max(words) <= ALIKE_WORDS * min(words) and differ <= ALIKE_NUMBERS:
        return True  # a list
    return are_sorted(columns) or (0 < min(numbers) < 1 and differ <= 2 * ALIKE_NUMBERS)


def are_sorted(columns: Columns) -> bool:
    """Whether the lines of all columns together are in alphabetical order, as names or terms in a list are."""
    texts = [text.casefold() for column in columns for text in column]
    return len(set(texts)) >= SORTED and all(a <= b for a, b in pairwise(texts))


def compare_marks(by_rows: Sequence[str], by_columns: Sequence[str]) -> int:
    """1 if lines have marks, such as A. B. C., that follow each other row by row, -1 if column by column, else 0."""
    if sum(map(bool, map(MARK.match, by_rows))) <= MARKS:
        return 0
    rows, columns = count_steps(by_rows), count_steps(by_columns)
    return 0 if max(rows, columns) < MARKS else (rows > columns) - (rows < columns)


def count_steps(texts: Sequence[str]) -> int:
    """How often a mark is followed by the next one."""
    found = [match[1] for text in texts if (match := MARK.match(text))]
    marks = [int(mark) if mark.isdigit() else 1000 + ord(mark) for mark in found]
    return sum(b - a == 1 for a, b in pairwise(marks))
