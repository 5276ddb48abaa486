"""The words that a page marks are those that the index has found."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from daemon.search.marking import excerpt, split_at_words
from daemon.search.query import parse
from tests.daemon.search.place import Place

MOST_SECONDS = 1.0  # of CPU time; the page has 48 cards
LONG = "some words that come before it, more than fit " * 20 + "the needle" + " and much more behind it" * 20


def marked(query: str, text: str, field: str = "text") -> list[str]:
    return [part.text for part in split_at_words(text, parse(query).terms, field) if part.is_match]


@pytest.mark.parametrize(
    ("query", "text", "words"),
    [
        ("red car", "A RED fire engine; a car, a cart", ["RED", "car"]),
        ("cafe", "Café and cafeteria, cafe\u0301", ["Café", "café"]),
        ('"red car"', "red car, red-car, red and car", ["red car", "red-car"]),
        ("invo*", "invoice no invocation", ["invoice", "invocation"]),
        ("invoice -draft", "invoice draft", ["invoice"]),
        ("caption:total total", "total", ["total"]),
        ("caption:total", "total", []),
        ("東京", "cat東京都", ["東京"]),
        ("cat", "cat東京, concat", ["cat"]),
        ("한글", "한글이다", ["한글"]),
        ("a.b*c", "axbbc a.b*c", ["a.b*c"]),
    ],
)
def test_the_words_are_marked_as_the_index_compares_them(query: str, text: str, words: list[str]) -> None:
    assert marked(query, text) == words


def test_what_the_index_finds_by_its_words_has_a_mark(tmp_path: Path) -> None:
    place = Place(tmp_path)
    try:
        for number, text in enumerate(
            ("Straße nach Żółw", "ÅNGSTRÖM 12-34", "x_y under", "ภาษาไทย", "Ǆ 中文字")
        ):
            place.add(f"{number}.jpg", text)
            for word in text.split():
                assert number + 1 in place.find(f"text:{word}"), word
                assert marked(f"text:{word}", text) == [word]
    finally:
        place.close()


def test_the_parts_are_the_whole_text() -> None:
    parts = split_at_words("a red, red car", parse("red").terms, "text")
    assert "".join(part.text for part in parts) == "a red, red car"
    assert split_at_words("", parse("red").terms, "text") == []


def test_an_excerpt_of_a_long_text_has_the_first_word_that_was_found() -> None:
    shown = excerpt(split_at_words(LONG, parse("needle").terms, "text"), 160)
    assert [part.text for part in shown if part.is_match] == ["needle"]
    whole = "".join(part.text for part in shown)
    assert len(whole) == 160
    assert whole[0] == whole[-1] == "…"
    assert whole[1:-1] in LONG
    at_end = excerpt(split_at_words(LONG + " final", parse("final").terms, "text"), 160)
    assert at_end[-1] == ("final", True)
    assert sum(len(part.text) for part in at_end) == 160
    at_start = "".join(part.text for part in excerpt(split_at_words(LONG, (), "text"), 160))
    assert at_start == LONG[:159] + "…"


@pytest.mark.parametrize("words", ['"' + "a " * 3000 + 'x"', " ".join(f"a{n}" for n in range(64)), "a*"])
def test_no_search_takes_long_to_mark_a_huge_text(words: str) -> None:
    text = "a " * 1_000_000
    started = time.thread_time()  # of this thread only, so that a busy machine does not count
    parts = split_at_words(text, parse(words).terms, "text")
    assert time.thread_time() - started < MOST_SECONDS
    assert "".join(part.text for part in parts) == text
