"""Errors about [stages.*.options] are in the words of the other errors about daemon.toml."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from stages.contract.base import StageSpec
from stages.contract.options import Fraction, read_options


class Every(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An option of each kind. least and most: their order is checked by __post_init__."""

    share: Fraction = 0.5
    ratio: Annotated[float, Meta(gt=0, le=10, description="It has a description.")] = 1.5
    level: Annotated[int, Meta(ge=1)] = 3
    side: Annotated[int, Meta(ge=32, le=4096)] = 2000
    flag: bool = False
    words: str = ""
    pattern: Annotated[str, Meta(pattern=r"\{\}")] = "a {}"
    mode: Literal["fast", "exact"] = "fast"
    labels: list[str] | None = None
    faults: dict[str, int] = {}
    day: date = date(2026, 1, 1)
    least: int = 0
    most: int = 1

    def __post_init__(self) -> None:
        if self.least > self.most:
            raise ValueError("least is larger than most")


class Needy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    weights: str


def problems(kind: type[msgspec.Struct], **options: Any) -> list[str]:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - its lines are compared
        read_options(StageSpec("ocr", "ppocr", options=options), kind)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("share", 2, "a number from 0 to 1, for example 0.5 (it is 2)"),
        ("ratio", 0, "a number above 0, at most 10, for example 1.5 (it is 0)"),
        ("level", "x", "a whole number from 1, for example 3 (it is 'x')"),
        ("side", 2000.5, "a whole number from 32 to 4_096, for example 2000 (it is 2000.5)"),
        ("flag", 1, "true or false (it is 1)"),
        ("words", 1, "text in quotes (it is 1)"),
        ("pattern", "x", r"""text in quotes that matches \{\}, for example "a {}" (it is 'x')"""),
        ("mode", "x", """"exact" or "fast", for example "fast" (it is 'x')"""),
        ("labels", [1], "a list in square brackets, each entry text in quotes (it is [1])"),
        ("faults", {"a": "b"}, "a table, each value a whole number (it is {'a': 'b'})"),
    ],
)
def test_a_wrong_value_is_named_with_what_to_write_instead(key: str, value: object, wanted: str) -> None:
    assert problems(Every, **{key: value}) == [f"stages.ocr.options.{key}: write {wanted}"]


def test_every_wrong_option_is_named() -> None:
    keys = "share, ratio, level, side, flag, words, pattern, mode, labels, faults, day, least, most"
    assert problems(Every, flagg=True, zzz=1, level=0) == [
        'stages.ocr.options.flagg: unknown key; did you mean "flag"?',
        f"stages.ocr.options.zzz: unknown key; ppocr takes {keys}.",
        "stages.ocr.options.level: write a whole number from 1, for example 3 (it is 0)",
    ]
    assert problems(Needy) == ["stages.ocr.options.weights: this key is missing; write text in quotes"]


def test_what_has_no_words_of_ours_keeps_those_of_the_library() -> None:
    [problem] = problems(Every, day="today")
    assert problem.startswith("stages.ocr.options.day: ")
    assert problem.endswith(" (it is 'today')")
    assert problems(Every, least=5) == ["stages.ocr.options: least is larger than most"]


def test_right_options_are_taken() -> None:
    taken = read_options(StageSpec("ocr", "ppocr", options={"share": 1, "labels": ["a"]}), Every)
    assert (taken.share, taken.labels, taken.side) == (1.0, ["a"], 2000)
