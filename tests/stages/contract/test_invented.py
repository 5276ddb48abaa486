from __future__ import annotations

import datetime
import decimal
import enum
import uuid
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from stages.contract.invented import invent
from stages.registry.registry import STAGES


class Color(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


class Part(msgspec.Struct, frozen=True):
    place: tuple[float, float]
    sure: bool


class Whole(msgspec.Struct, frozen=True):
    text: str
    count: Annotated[int, Meta(ge=100)]
    share: Annotated[float, Meta(le=0.5)]
    color: Color
    kind: Literal["a", "b"]
    parts: list[Part]
    missing: str | None
    table: dict[str, int]


class Bounded(msgspec.Struct, frozen=True, tag="bounded"):
    taken: datetime.datetime
    local: Annotated[datetime.datetime, Meta(tz=False)]
    day: datetime.date
    hour: Annotated[datetime.time, Meta(tz=True)]
    took: datetime.timedelta
    raw: bytes
    digest: Annotated[bytes, Meta(min_length=20, max_length=20)]
    code: Annotated[str, Meta(max_length=3)]
    long: Annotated[str, Meta(min_length=12)]
    positive: Annotated[float, Meta(gt=0)]
    negative: Annotated[float, Meta(lt=0)]
    open: Annotated[float, Meta(gt=0, lt=1)]
    beyond: Annotated[float, Meta(gt=5)]
    above: Annotated[int, Meta(gt=100)]
    below: Annotated[int, Meta(lt=-10)]
    even: Annotated[int, Meta(ge=3, multiple_of=2)]
    few: Annotated[list[str], Meta(max_length=1)]
    many: Annotated[list[int], Meta(min_length=5)]
    table: Annotated[dict[str, float], Meta(min_length=2)]
    labels: set[str]
    cost: decimal.Decimal
    id: uuid.UUID


@pytest.mark.parametrize("kind", [Whole, Bounded, *(stage.result for stage in STAGES.values())])
def test_made_up_results_fit_their_type_and_differ(kind: type[msgspec.Struct]) -> None:
    answers = {msgspec.json.encode(invent(kind, variant, 640, 480, frozenset())) for variant in range(64)}
    assert len(answers) > 8
    for answer in answers:
        msgspec.json.decode(answer, type=kind)
