"""What users type into the search box, and what the index is asked for it.

two red cars          all three words, in any field
"red car"             these words one after another
invo*                 words that begin so
-draft                images without this word
text:total            in one field: text, caption, tags, objects or name
bin:A state:failed    a filter: bin, tag, object, inbox, state, reason
group:17 group:best   of the near-duplicates of image 17; of each group only the best; group:others: all but the best
after:2026-11-01      finished on that day (UTC) or later; before: is the day after the last one
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta

from daemon.core.errors import VisiondError
from daemon.search.entries import FIELDS, mark, separate

FILTERS = ("bin", "tag", "object", "inbox", "state", "reason")
DATES = ("after", "before")
GROUP, GROUPS = "group", ("best", "others")
STATES = ("done", "failed")
UNPUBLISHED = ("pending", "skipped")  # that the index does not have
MOST_TERMS = 64
YEARS = range(2000, 2200)
FIRST_DAY = date(2020, 1, 1)  # before there was a visiond
TERM = re.compile(r'(-?)(?:([a-z]+):)?(?:"([^"]*)"?|(\S+))')
WORD = re.compile(r"[^\W_]")  # what the index takes for a part of a word


class QueryError(VisiondError):
    """The search cannot be understood; the message says why and what to type."""

    exit_status = os.EX_USAGE


@dataclass(frozen=True, slots=True)
class Term:
    """Words that must, or must not, stand one after another. field: in this field only."""

    words: str
    field: str = ""
    prefix: bool = False
    excluded: bool = False

    def expression(self) -> str:
        """In FTS5's language."""
        quoted = '"' + separate(self.words).replace('"', '""') + '"' + " *" * self.prefix
        return f"{self.field} : {quoted}" if self.field else f"{{{' '.join(FIELDS)}}} : {quoted}"


@dataclass(frozen=True, slots=True)
class Query:
    """filters: each a kind, and values of which an image has at least one. after, before: days, the second not included.
    group: of near-duplicates, one of GROUPS or the number of an image; it is no part of the expression."""

    terms: tuple[Term, ...] = ()
    filters: tuple[tuple[str, tuple[str, ...]], ...] = ()
    after: date | None = None
    before: date | None = None
    group: str = ""

    @property
    def sentence(self) -> str:
        """The words that are looked for in any field, as a text encoder would read them."""
        return " ".join(term.words for term in self.terms if not (term.excluded or term.field))

    @property
    def is_empty(self) -> bool:
        return not (self.terms or self.filters or self.after or self.before or self.group)

    @property
    def has_few(self) -> bool:
        """Whether it asks for one group, or for images that are near a better one, which few are."""
        return self.group not in ("", "best")

    def narrowed(self, **filters: Iterable[str]) -> Query:
        """With these filters too."""
        wanted = [(kind, found) for kind, values in filters.items() if (found := tuple(values))]
        return replace(self, filters=(*self.filters, *wanted))

    def without_words(self) -> Query:
        """Only the filters, and the words that are excluded or looked for in one field."""
        return replace(self, terms=tuple(term for term in self.terms if term.excluded or term.field))

    def of_names(self) -> tuple[list[str], list[str]]:
        """Words of the path, and inboxes: all that files without a result can be searched for. Raises QueryError if the
        query has anything else."""
        filters = dict(self.filters)
        inboxes, state = filters.pop("inbox", ()), filters.pop("state", ("",))[0]
        terms = [term for term in self.terms if not term.excluded and term.field in ("", "name")]
        if filters or self.after or self.before or self.group or len(terms) < len(self.terms):
            raise QueryError(
                f"files that are {state} have no result: only words of their names and the inbox narrow them."
            )
        return [term.words for term in terms], list(inboxes)

    def parts(self) -> tuple[list[str], list[str]]:
        """What an image has to fit, all of it, and what it must not fit, any of it: in FTS5's language."""
        parts = [term.expression() for term in self.terms if not term.excluded]
        parts += [_one_of(kind, values) for kind, values in self.filters]
        if self.after or self.before:
            parts.append(_one_of("date", _spans(self.after or FIRST_DAY, self.before or _tomorrow())))
        excluded = [term.expression() for term in self.terms if term.excluded]
        if (excluded or self.group) and not parts:
            parts = [_one_of("state", STATES)]
        return parts, excluded

    def expression(self) -> str:
        """In FTS5's language; empty for every image."""
        parts, excluded = self.parts()
        wanted = " AND ".join(f"({part})" for part in parts)
        return f"({wanted}) NOT ({' OR '.join(f'({part})' for part in excluded)})" if excluded else wanted


def parse(text: str) -> Query:
    """Raises QueryError."""
    terms: list[Term] = []
    filters: dict[str, tuple[str, ...]] = {}
    days: dict[str, date] = {}
    group = ""
    has_signs = False
    for minus, name, phrase, word in TERM.findall(text.replace("\0", " ")):
        value = phrase or word
        if minus and name in (*FILTERS, *DATES, GROUP):
            raise QueryError(f"-{name}: cannot be excluded; only words can, for example -draft.")
        if name in FILTERS:
            filters[name] = (*filters.get(name, ()), read_state(value) if name == "state" else value)
        elif name in DATES:
            days[name] = read_day(name, value)
        elif name == GROUP:
            group = read_group(value)
        elif term := read_term(value, name, is_word=not phrase, excluded=bool(minus)):
            terms.append(term)
        else:
            has_signs |= not minus
    if len(terms) > MOST_TERMS:
        raise QueryError(f"a search has at most {MOST_TERMS} words; this one has {len(terms)}.")
    # nothing has these signs, as far as the index knows
    if has_signs and all(term.excluded for term in terms):
        filters["state"] = ("none",)
    return Query(tuple(terms), tuple(filters.items()), days.get("after"), days.get("before"), group)


def read_term(value: str, name: str, *, is_word: bool, excluded: bool) -> Term | None:
    """None if it is only punctuation, which is not in the index. Raises QueryError."""
    if name and name not in FIELDS:
        near = difflib.get_close_matches(name, (*FIELDS, *FILTERS, *DATES, GROUP), n=1, cutoff=0.5)
        raise QueryError(
            f"there is no {name}:. {f'Do you mean {near[0]}:? ' if near else ''}"
            f'To search for the words themselves, quote them: "{name}:{value}".'
        )
    prefix = is_word and value.endswith("*")
    words = value.rstrip("*") if prefix else value
    return Term(words, name, prefix, excluded) if WORD.search(words) else None


def read_state(value: str) -> str:
    """As in the index. value: as there, or as in the ledger. Raises QueryError."""
    state = value.lower()
    if state in UNPUBLISHED:
        raise QueryError(
            f"state:{state} cannot be searched for: choose it in the page's filter State, or use "
            f"`visiond list --status {state}`."
        )
    if state not in STATES:
        raise QueryError(f"state:{state} cannot be searched for; only state:done and state:failed are.")
    return state


def read_group(value: str) -> str:
    """Raises QueryError."""
    if value.lower() in GROUPS or (value.isdecimal() and len(value) < 19):
        return value.lower()
    raise QueryError(
        f"group:{value} is no group; write group:best, group:others or the number of an image, group:17."
    )


def read_day(name: str, value: str) -> date:
    """Raises QueryError."""
    try:
        day = date.fromisoformat(value)
        if day.year not in YEARS:
            raise ValueError(value)
        return day
    except ValueError:
        raise QueryError(f"{name}:{value} is no day; write it as {name}:2026-11-23.") from None


def _tomorrow() -> date:
    # this clock may be behind that of the images' machine
    return datetime.now(UTC).date() + timedelta(days=2)


def _one_of(kind: str, values: Iterable[str]) -> str:
    return f"marks : ({' OR '.join(mark(kind, value) for value in values)})"


def _spans(first: date, end: date) -> Iterator[str]:
    """The years, months and days that make up a time, few of them. end: not included."""
    if first >= end:
        yield "none"
    while first < end:
        for length, following in (
            (4, _next_year(first)),
            (7, _next_month(first)),
            (10, first + timedelta(days=1)),
        ):
            is_whole = first.isoformat()[length:] in ("", "-01", "-01-01")
            if is_whole and following <= end:
                yield first.isoformat()[:length]
                first = following
                break


def _next_year(day: date) -> date:
    return date(day.year + 1, 1, 1)


def _next_month(day: date) -> date:
    return date(day.year + day.month // 12, day.month % 12 + 1, 1)
