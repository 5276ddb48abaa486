"""What users type into the search box."""

from __future__ import annotations

from datetime import date

import pytest

from daemon.search.entries import mark
from daemon.search.query import QueryError, Term, parse

FIELDS = "{text caption tags objects name}"


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("two cars", (Term("two"), Term("cars"))),
        ('"red car"', (Term("red car"),)),
        ('"not closed', (Term("not closed"),)),
        ("invo* -draft", (Term("invo", prefix=True), Term("draft", excluded=True))),
        ("text:total", (Term("total", "text"),)),
        ("AND OR NOT NEAR(", (Term("AND"), Term("OR"), Term("NOT"), Term("NEAR("))),
        ("- * ... “", ()),
        ("12:30", (Term("12:30"),)),
    ],
)
def test_words_become_terms(text: str, terms: tuple[Term, ...]) -> None:
    assert parse(text).terms == terms


@pytest.mark.parametrize("text", ["!!!", "...", "“ ”", '"?"', "text:…", "* -draft", "-"])
def test_a_search_of_signs_alone_finds_nothing(text: str) -> None:
    assert f"marks : ({mark('state', 'none')})" in parse(text).expression()


@pytest.mark.parametrize("text", ["", "  ", "car - !", "-!!! bin:A"])
def test_signs_beside_words_change_nothing(text: str) -> None:
    assert mark("state", "none") not in parse(text).expression()


def test_values_of_one_filter_are_alternatives_and_filters_narrow() -> None:
    found = parse("car bin:A bin:B state:done after:2026-11-01")
    assert found.filters == (("bin", ("A", "B")), ("state", ("done",)))
    assert found.after == date(2026, 11, 1)
    assert f"marks : ({mark('bin', 'A')} OR {mark('bin', 'B')})" in found.expression()
    assert found.sentence == "car"
    assert found.without_words().terms == ()


def test_a_state_may_be_written_as_in_the_ledger() -> None:
    assert parse("state:FAILED") == parse("state:failed")


def test_a_phrase_cannot_leave_its_quotes() -> None:
    assert parse('x"y').expression() == f'({FIELDS} : "x""y")'


def test_a_time_is_made_of_few_years_months_and_days() -> None:
    spans = parse("after:2024-12-30 before:2026-02-02").expression()
    wanted = ("2024-12-30", "2024-12-31", "2025", "2026-01", "2026-02-01")
    assert spans == f"(marks : ({' OR '.join(mark('date', day) for day in wanted)}))"


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("foo:bar", 'there is no foo:. To search for the words themselves, quote them: "foo:bar".'),
        ("captoin:x", "Do you mean caption:?"),
        ("after:tomorrow", "write it as after:2026-11-23"),
        ("-bin:A", "only words can"),
        ("state:gone", "only state:done and state:failed"),
    ],
)
def test_what_cannot_be_understood_is_explained(text: str, advice: str) -> None:
    with pytest.raises(QueryError) as error:
        parse(text)
    assert advice in str(error.value)
