"""Puts text of right-to-left scripts into logical order: the order in which one reads and writes it.

A recognizer reads a picture from left to right, so it gives Arabic and Hebrew backwards. This is the inverse of
what the Unicode bidirectional algorithm (UAX #9) does for display, on one line without control characters:
numbers and words of left-to-right scripts keep their direction. PaddleOCR and rapidocr use python-bidi for it, which
takes the direction of a line from its leftmost letter; that is wrong for an Arabic line that ends with a Latin word.

A picture does not show everything: a number beside a Latin word is read together with it, from left to right.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from unicodedata import bidirectional

RIGHT_TO_LEFT = ("R", "AL")
DIRECTIONS = {"L": "L", "R": "R", "AL": "R", "EN": "N", "AN": "N"}  # N: a number
WITHIN_NUMBERS = ("CS", "ES")  # a separator between two digits is part of the number
AROUND_NUMBERS = ("ET",)  # a currency or percent sign beside a number is part of it
MIRRORED = str.maketrans("()[]{}<>«»‹›", ")(][}{><»«›‹")


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
    levels = [
        find_level(direction, leftwards=leftwards)
        for direction in fill_neutrals(directions, leftwards=leftwards)
    ]
    return reverse_runs(text, levels)


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


def find_level(direction: str, *, leftwards: bool) -> int:
    """The levels of UAX #9: even ones go right."""
    if leftwards:
        return 1 if direction == "R" else 2
    return 1 if direction == "R" else 0


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
