from __future__ import annotations

import enum
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from stages.invented import invent
from stages.registry import STAGES


class Colour(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


class Part(msgspec.Struct, frozen=True):
    place: tuple[float, float]
    sure: bool


class Whole(msgspec.Struct, frozen=True):
    text: str
    count: Annotated[int, Meta(ge=100)]
    share: Annotated[float, Meta(le=0.5)]
    colour: Colour
    kind: Literal["a", "b"]
    parts: list[Part]
    missing: str | None
    table: dict[str, int]


@pytest.mark.parametrize("kind", [Whole, *(stage.result for stage in STAGES.values())])
def test_what_is_made_up_fits_its_type_and_differs(kind: type[msgspec.Struct]) -> None:
    answers = {msgspec.json.encode(invent(kind, variant, 640, 480, frozenset())) for variant in range(64)}
    assert len(answers) > 8
    for answer in answers:
        msgspec.json.decode(answer, type=kind)
