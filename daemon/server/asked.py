"""What an address of the gallery asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any
from urllib.parse import urlencode

import msgspec
from starlette.requests import Request

from daemon.ledger.soundness import MOST
from daemon.search.query import DATES, Query, QueryError, parse, read_day
from daemon.search.searcher import By

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
    cursor: Annotated[int, msgspec.Meta(ge=0, le=MOST)] = 0

    @classmethod
    def of(cls, request: Request) -> Asked:
        """Raises QueryError."""
        given = {name: value for name, value in request.query_params.items() if name in cls.__struct_fields__}
        try:
            asked = msgspec.convert(given, cls, strict=False)
        except msgspec.ValidationError as error:
            raise QueryError(f"the address has a value that cannot be used: {error}") from error
        return asked if asked.by in (*By, "newest") else msgspec.structs.replace(asked, by="both")

    def query(self) -> Query:
        """Raises QueryError."""
        choices = {name: [value] for name in CHOICES if (value := getattr(self, name).strip())}
        query = parse(self.q).narrowed(**choices)
        after, before = (
            read_day(name, getattr(self, name)) if getattr(self, name) else None for name in DATES
        )
        return replace(query, after=after or query.after, before=before or query.before)

    @property
    def is_for_failed(self) -> bool:
        return self.state == "failed" or "state:failed" in self.q

    def values(self) -> dict[str, Any]:
        """Those that are not as by default, for an address."""
        return {
            name: value for name, value in msgspec.structs.asdict(self).items() if value and value != "both"
        }

    def is_only(self, **values: str) -> bool:
        """Whether it asks for this, and how to order it, and nothing else."""
        return {name: value for name, value in self.values().items() if name != "by"} == values


def address(path: str, **values: object) -> str:
    """With the values that are not empty as its query."""
    given = {name: str(value) for name, value in values.items() if value not in ("", 0, None)}
    return f"{path}?{urlencode(given)}" if given else path
