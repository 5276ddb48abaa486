"""Which bin an image belongs in: A text, B objects, C everything else, and every criterion that led there.

The rule is that of the system visiond descends from. A: more than two text boxes, or text over a fifth of the image.
Else B: more than three kinds of object, more than five objects, or objects spread over three tenths of
the image. Else C, with the likeness of caption and image compared and reported. All comparisons are strict.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec


class Thresholds(msgspec.Struct, frozen=True):
    text_boxes: int = 2
    text_area: float = 0.2  # of the image's area
    object_count: int = 5
    unique_objects: int = 3
    spatial_dispersion: float = 0.3  # of the image's area
    clip_similarity: float = 0.25  # cosine


class Criterion(msgspec.Struct, frozen=True):
    """A measured value against its threshold; value and passed are None when the stage was not asked."""

    value: float | None
    threshold: float
    passed: bool | None


class Bin(msgspec.Struct, frozen=True):
    name: str
    criteria: dict[str, dict[str, Criterion]]  # bin → criterion → figures


class _Ocr(msgspec.Struct, frozen=True):
    count: int
    area_ratio: float


class _Objects(msgspec.Struct, frozen=True):
    count: int
    unique: int
    dispersion: float


class _Caption(msgspec.Struct, frozen=True):
    similarity: float | None


# Decoding only the figures of a stage's JSON takes a microsecond; the lines and boxes are skipped.
_FIGURES = {
    "ocr": msgspec.json.Decoder(_Ocr).decode,
    "yolo": msgspec.json.Decoder(_Objects).decode,
    "blip": msgspec.json.Decoder(_Caption).decode,
}

# bin → (criterion, stage that measures it, field of its result, field of Thresholds)
_RULES = {
    "A": (("text_boxes", "ocr", "count", "text_boxes"), ("text_area", "ocr", "area_ratio", "text_area")),
    "B": (
        ("unique_objects", "yolo", "unique", "unique_objects"),
        ("object_count", "yolo", "count", "object_count"),
        ("spatial_dispersion", "yolo", "dispersion", "spatial_dispersion"),
    ),
    "C": (("clip_similarity", "blip", "similarity", "clip_similarity"),),
}

Rule = Callable[[dict[str, Any]], str]
BIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def judge(payloads: Mapping[str, bytes], thresholds: Thresholds) -> Bin:
    """The bin by the rule, from the stages' JSON by stage name; a stage that did not run passes nothing."""
    figures = {stage: decode(payloads[stage]) for stage, decode in _FIGURES.items() if stage in payloads}
    criteria = {
        name: {
            criterion: _compare(getattr(figures.get(stage), field, None), getattr(thresholds, threshold))
            for criterion, stage, field, threshold in rules
        }
        for name, rules in _RULES.items()
    }
    passing = (name for name in ("A", "B") if any(c.passed for c in criteria[name].values()))
    return Bin(next(passing, "C"), criteria)


def is_decided(payloads: Mapping[str, bytes], thresholds: Thresholds, stages: Sequence[str]) -> bool:
    """Whether no other of these stages can change the bin: in mode "cascade" the rest is not run."""
    name = judge(payloads, thresholds).name
    return name == "A" or (name == "B" and ("ocr" in payloads or "ocr" not in stages))


def load_rule(reference: str) -> Rule:
    """The user's rule named "module:function": it gets the whole record as a dict and returns the bin's name."""
    module, _, function = reference.partition(":")
    try:
        rule = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f'[binning] rules = "{reference}" cannot be loaded: {error}. '
            'Write it as "module:function" and put the module on PYTHONPATH.'
        ) from error
    if not callable(rule):
        raise ValueError(f'[binning] rules = "{reference}" is not a function.')
    return rule  # type: ignore[no-any-return]


def apply_rule(rule: Rule, record: dict[str, Any]) -> str:
    """The bin the user's rule chose. Raises ValueError when it is no plain name, as bins become folders."""
    name = rule(record)
    if not isinstance(name, str) or not BIN_NAME.fullmatch(name):
        raise ValueError(f"the binning rule returned {name!r}; a bin's name is letters, digits, - and _")
    return name


def _compare(value: float | None, threshold: float) -> Criterion:
    return Criterion(value, threshold, None if value is None else value > threshold)
