"""Where a text has the words that were looked for, as the index compares words, and the part of the text around them."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile
from typing import NamedTuple

from daemon.search.entries import UNSPACED, separate
from daemon.search.query import Term

MOST_MARKED = 5000  # characters of a text in which words are looked for
MOST_WORDS = 32  # that are looked for: a long phrase of equal words would take the square of its length
BEFORE = 50  # characters of an excerpt before the first word
LETTER = rf"[^\W_{UNSPACED.pattern[2:-2]}]"  # of a script with spaces between words
WORDS = re.compile(rf"{LETTER}+|{UNSPACED.pattern}")


class Part(NamedTuple):
    """A piece of a text. is_match: it is what was looked for."""

    text: str
    is_match: bool


class _Folds(dict[int, str]):
    """Each character without its accent and in lower case, always one character."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        if not UNSPACED.match(character):
            character = unicodedata.normalize("NFD", character.lower())[0]
        return self.setdefault(code, character)


_FOLDS = _Folds()


def split_at_words(text: str, terms: Sequence[Term], field: str) -> list[Part]:
    """The text in parts, which together are all of it. field: the one whose text it is."""
    found = unicodedata.normalize("NFC", text)
    parts, end = [], 0
    if pattern := _pattern(tuple(terms), field):
        for match in pattern.finditer(found[:MOST_MARKED].translate(_FOLDS)):
            if match.start() > end:
                parts.append(Part(found[end : match.start()], False))
            parts.append(Part(found[match.start() : match.end()], True))
            end = match.end()
    return [*parts, Part(found[end:], False)] if end < len(found) else parts


def excerpt(parts: Sequence[Part], most: int) -> list[Part]:
    """At most so many characters: around the first match, or from the beginning if there is none."""
    length = sum(len(part.text) for part in parts)
    if length <= most:
        return [*parts]
    first = sum(len(part.text) for part in takewhile(lambda part: not part.is_match, parts))
    start = 0 if first >= length else max(0, min(first - BEFORE, length - most + 1))
    end = start + most - 1
    end -= bool(start) and end < length  # for the second sign that something is left out
    shown, place = [Part("…", False)] if start else [], 0
    for part in parts:
        if piece := part.text[max(0, start - place) : max(0, end - place)]:
            shown.append(Part(piece, part.is_match))
        place += len(part.text)
    return [*shown, Part("…", False)] if end < length else shown


@lru_cache(maxsize=64)
def _pattern(terms: tuple[Term, ...], field: str) -> re.Pattern[str] | None:
    wanted = [term for term in terms if not term.excluded and term.field in ("", field)]
    wanted.sort(key=lambda term: -len(term.words))  # a phrase before its first word
    found = [expression for term in wanted if (expression := _expression(term))]
    return re.compile("|".join(found[:MOST_WORDS])) if found else None


def _expression(term: Term) -> str:
    """Its words one after another, with anything between them that is no part of a word."""
    folded = unicodedata.normalize("NFC", term.words).translate(_FOLDS)
    words = [match[0] for match in WORDS.finditer(separate(folded))]
    if not words or len(words) > MOST_WORDS:
        return ""
    alone = (f"(?<!{LETTER})", f"(?!{LETTER})")  # not inside a longer word
    edges = [("", "") if UNSPACED.match(word) else alone for word in words]
    if term.prefix:
        edges[-1] = (edges[-1][0], f"{LETTER}*")
    return r"[\W_]*".join(
        f"{begin}{re.escape(word)}{end}" for (begin, end), word in zip(edges, words, strict=True)
    )
