"""What an address asks for: words, choices beside them, and numbers of images."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any
from urllib.parse import parse_qsl, urlsplit

import msgspec
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request

from daemon.core.errors import WrongArgument
from daemon.exports.choice import refuse_unknown_bins
from daemon.ledger.records import Reader
from daemon.ledger.soundness import MOST
from daemon.search.evidence import parse_order
from daemon.search.query import DATES, UNPUBLISHED, Query, QueryError, parse, read_day, read_group
from daemon.search.searcher import NEWEST, By, Found, Searcher

SHOWN = 48  # images at once
CHOICES = ("bin", "inbox", "state", "tag", "object")


class Asked(msgspec.Struct, frozen=True):
    """The search box, and the choices beside it."""

    q: str = ""
    by: str = "both"
    bin: str = ""
    inbox: str = ""
    state: str = ""
    tag: str = ""
    object: str = ""
    after: str = ""
    before: str = ""
    group: str = ""
    cursor: Annotated[int, msgspec.Meta(ge=0, le=MOST)] = 0

    @classmethod
    def of(cls, request: Request) -> Asked:
        """Raises QueryError."""
        return cls.read(request.query_params)

    @classmethod
    def read(cls, values: Mapping[str, str]) -> Asked:
        """values: of an address. Raises QueryError."""
        given = {name: value for name, value in values.items() if name in cls.__struct_fields__}
        given |= {name: given[name].lower() for name in ("by", "state") if name in given}
        try:
            asked = msgspec.convert(given, cls, strict=False)
        except msgspec.ValidationError as error:
            raise QueryError(f"the address has a value that cannot be used: {error}") from error
        if asked.state in UNPUBLISHED:
            return msgspec.structs.replace(asked, by="newest")
        is_order = asked.by in (*By, "newest") or parse_order(asked.by)
        return asked if is_order else msgspec.structs.replace(asked, by="both")

    @classmethod
    def of_list(cls, request: Request, gallery: str) -> Asked:
        """The list from which somebody comes to an image: as its address says or, for a click in the gallery, as the
        browser says. gallery: its path behind a proxy; this machine may leave that path out."""
        try:
            came = urlsplit(request.headers.get("referer", ""))
            is_from_gallery = came.path in ("/", gallery) and not request.query_params
            values = dict(parse_qsl(came.query)) if is_from_gallery else request.query_params
            asked = msgspec.structs.replace(cls.read(values), cursor=0)
            asked.query()
        except (QueryError, ValueError):  # there is no such list
            return cls()
        return asked

    @property
    def ranking(self) -> By | None:
        """What orders the images; None: they come newest first."""
        if parse_order(self.by):
            return By.disagreement
        return By(self.by) if self.by != "newest" and self.query().sentence else None

    @property
    def has_days(self) -> bool:
        """Whether the images of a day come together."""
        return not self.ranking and self.state not in UNPUBLISHED

    @property
    def order_words(self) -> str:
        if self.ranking is By.disagreement:
            return "what disagrees most first"
        return "best first" if self.ranking else "newest first"

    def query(self) -> Query:
        """Raises QueryError."""
        choices = {name: [value] for name in CHOICES if (value := getattr(self, name).strip())}
        query = parse(self.q).narrowed(**choices)
        after, before = (
            read_day(name, getattr(self, name)) if getattr(self, name) else None for name in DATES
        )
        group = read_group(self.group) if self.group else query.group
        return replace(query, after=after or query.after, before=before or query.before, group=group)

    @property
    def title(self) -> str:
        """Of its list, for a link that leads back to it."""
        return f"“{self.q}”" if self.q else "Failed images" if self.is_for_failed else "Images"

    @property
    def has_choices(self) -> bool:
        """Whether a filter or an order is chosen; the failed images alone have a page of their own."""
        chosen = {name: value for name, value in self.values().items() if name not in ("q", "cursor")}
        return chosen not in ({}, {"state": "failed"})

    @property
    def is_for_failed(self) -> bool:
        return self.state == "failed" or "state:failed" in self.q.lower()

    def values(self) -> dict[str, Any]:
        """Those that are not as by default, for an address."""
        return {
            name: value for name, value in msgspec.structs.asdict(self).items() if value and value != "both"
        }

    def is_only(self, **values: str) -> bool:
        """Whether it asks for this, and how to order it, and nothing else."""
        return {name: value for name, value in self.values().items() if name != "by"} == values


def find_images(searcher: Searcher, asked: Asked, most: int, wait: bool = False) -> Found:
    """wait: until the model that understands sentences is loaded. Raises QueryError, SearchUnusable."""
    query = asked.query()
    if asked.state in UNPUBLISHED:
        return searcher.unpublished(query, asked.state, asked.cursor or NEWEST, most)
    searcher.catch_up()
    if asked.ranking is By.disagreement:
        return searcher.disagreeing(query, asked.by, asked.cursor, most)
    if asked.ranking:
        return searcher.best(query, asked.ranking, asked.cursor, most, wait=wait)
    return searcher.newest(query, asked.cursor or NEWEST, most)


class _Number(IntegerConvertor):
    """Python refuses to read numbers of thousands of digits. What is more than the ledger can have becomes the
    largest, which no image has."""

    regex = f"[0-9]{{1,{len(str(MOST))}}}"

    def convert(self, value: str) -> int:
        return min(int(value), MOST)


register_url_convertor("number", _Number())


def refuse_unknown_bin(reader: Reader, asked: Asked) -> None:
    """Only of a search that finds nothing: the bins are found by a look at all images. Raises HTTPException."""
    try:
        refuse_unknown_bins(filter(None, [asked.bin.strip()]), filter(None, reader.bins()))
    except WrongArgument as error:
        raise HTTPException(404, str(error)) from None


def refuse_others(request: Request, known: Sequence[str]) -> None:
    """Raises HTTPException if the address has other parameters."""
    if others := [name for name in dict.fromkeys(request.query_params) if name not in known]:
        those = f"those that it takes are {', '.join(known)}" if known else "it takes none"
        which = "no parameter" if len(others) == 1 else "no parameters"
        raise HTTPException(400, f"{request.scope['path']} has {which} {', '.join(others)}: {those}.")


def number_in(text: str) -> int | None:
    """As in the path of an address; None if it is no number."""
    if re.fullmatch(_Number.regex, text):
        return min(int(text), MOST)
    return MOST if re.fullmatch("[0-9]+", text) else None
