"""How far two answers of a stage to one image are apart: from 0, as far as it is measured, to 1."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from daemon.core.labels import STAGE_OF, Box, Kind, Label
from daemon.exports.answered import ImageAnswers
from daemon.labels.metrics import Z, count_edits, plain
from daemon.labels.scoring import Estimate
from stages.registry.registry import find_stage, kind_of

IOU = 0.5  # from which on two boxes of one label are the same object, as in AP50
LARGE = 0.5  # a change from here on is a large one
Objects = Sequence[tuple[str, float, Box]]  # label, score and box
Scores = Mapping[str, float]  # by label


class AnswerChange(NamedTuple):
    """amount: 0 to 1. is_other: whether it is another answer, and not the same one with other scores. was_empty, is_empty:
    whether there is nothing in the answers that a change could be measured of: no text, no object, no caption."""

    amount: float
    is_other: bool
    was_empty: bool = False
    is_empty: bool = False

    @classmethod
    def of(cls, amount: float) -> AnswerChange:
        return cls(amount, amount > 0)


def compare_objects(before: Objects, after: Objects) -> AnswerChange:
    """1 - F1 of the boxes: each of `after`, the surest first, is the object of `before` with the same label that it overlaps
    most, from IOU on, and that no surer one is. So does COCO's evaluation at one IoU."""
    matched = sum(
        _count_matches(
            [box for name, _, box in before if name.casefold() == label],
            [box for name, _, box in sorted(after, key=lambda each: -each[1]) if name.casefold() == label],
        )
        for label in {name.casefold() for name, _, _ in after}
    )
    every = len(before) + len(after)
    return AnswerChange.of(1 - 2 * matched / every if every else 0.0)


def _count_matches(before: Sequence[Box], after: Sequence[Box]) -> int:
    """after: the surest first."""
    if not before or not after:
        return 0
    free, matched = np.ones(len(before), bool), 0
    for overlaps in _measure_overlaps(np.array(after, float), np.array(before, float)):
        best = int(np.argmax(np.where(free, overlaps, -1.0)))
        if free[best] and overlaps[best] >= IOU:
            free[best] = False
            matched += 1
    return matched


def _measure_overlaps(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """The IoU of each box of one with each of the other: [one, other]."""
    low = np.maximum(one[:, None, :2], other[None, :, :2])
    high = np.minimum(one[:, None, 2:], other[None, :, 2:])
    shared = np.prod(np.maximum(high - low, 0.0), axis=2)
    areas = [np.prod(each[:, 2:] - each[:, :2], axis=1) for each in (one, other)]
    union = areas[0][:, None] + areas[1][None, :] - shared
    overlaps: npt.NDArray[np.float64] = shared / np.maximum(union, np.finfo(float).tiny)
    return overlaps


def compare_text(before: str, after: str) -> AnswerChange:
    """The character error rate, with `before` as the reference, and at most 1. Raises MissingLibrary."""
    return _rate_edits(plain(before), plain(after))


def compare_words(before: str, after: str) -> AnswerChange:
    """As compare_text, by words. Upper and lower case count as one."""
    return _rate_edits(plain(before).casefold().split(), plain(after).casefold().split())


def _rate_edits(before: Sequence[str], after: Sequence[str]) -> AnswerChange:
    edits = count_edits(before, after)
    return AnswerChange.of(min(1.0, edits / len(before)) if before else float(edits > 0))


def compare_scores(before: Scores, after: Scores) -> AnswerChange:
    """The sum of the differences for the sum of both: the total variation, where scores add up to 1. It is another answer if
    another label is the first."""
    labels = before.keys() | after.keys()
    apart = sum(abs(before.get(label, 0.0) - after.get(label, 0.0)) for label in labels)
    every = sum(abs(score) for scores in (before, after) for score in scores.values())
    firsts = [max(scores, key=scores.__getitem__, default=None) for scores in (before, after)]
    return AnswerChange(apart / every if every else 0.0, firsts[0] != firsts[1])


def compare_anything(before: Any, after: Any) -> AnswerChange:
    """For results of plug-ins, which may be anything."""
    return AnswerChange.of(float(before != after))


# By stage: what is compared, in words, what of an answer is read for that, and the measure.
Measure = tuple[str, Callable[[ImageAnswers, Any], Any], Callable[[Any, Any], AnswerChange]]
MEASURES: Mapping[str, Measure] = {
    "ocr": ("character error rate of the text", lambda answers, _: answers.text, compare_text),
    "yolo": ("1 - F1 of the boxes at IoU 0.5", lambda answers, _: answers.objects, compare_objects),
    "clip": (
        "total variation of the tags' scores",
        lambda _, result: {tag["label"]: tag["score"] for tag in result["tags"]},
        compare_scores,
    ),
    "blip": ("words of the caption that change", lambda answers, _: answers.caption, compare_words),
    "classifier": (
        "total variation of the classes' scores",
        lambda _, result: result["scores"],
        compare_scores,
    ),
}
OTHERS: Measure = ("1 if anything differs", lambda _, result: result, compare_anything)


def describe_measure(stage: str) -> str:
    """What `measure_change` measures, in words."""
    return MEASURES.get(kind_of(stage), OTHERS)[0]


def measure_change(stage: str, size: tuple[int, int], before: bytes, after: bytes) -> AnswerChange:
    """Of two answers to one image. size: its width and height in pixels. Raises MissingLibrary."""
    _, read, compare = MEASURES.get(kind_of(stage), OTHERS)
    key = find_stage(stage).key
    results = [msgspec.json.decode(each) for each in (before, after)]
    old, new = (read(ImageAnswers({key: each}, size), each) for each in results)
    return compare(old, new)._replace(was_empty=not old, is_empty=not new)


def measure_error(kind: Kind, size: tuple[int, int], label: Label, answer: bytes) -> float:
    """How far an answer is from what people say, from 0 to 1; of several captions, from the nearest; of a
    class, 0 or 1. label: of what the stage says. Raises MissingLibrary."""
    answered = msgspec.json.decode(answer)
    if kind is Kind.CLASSES:
        return float(answered["label"].casefold() != str(label.value).casefold())
    said = ImageAnswers({find_stage(STAGE_OF[kind]).key: answered}, size)
    if kind is Kind.OBJECTS:
        return compare_objects(ImageAnswers({}, size, {kind: label}).objects, said.objects).amount
    if kind is Kind.TAGS:
        given, found = {str(tag).casefold() for tag in label.value}, {tag.casefold() for tag, _ in said.tags}
        total = len(given) + len(found)
        return 1 - 2 * len(given & found) / total if total else 0.0
    if kind is Kind.CAPTION:
        apart = [compare_words(str(each), said.caption).amount for each in label.value]
        return min(apart, default=float(bool(said.caption)))
    return compare_text(str(label.value), said.text).amount


def estimate_share(hits: int, drawn: int, population: int) -> Estimate:
    """The share of a population of which `drawn` were looked at, and `hits` of these have something: with the interval of
    Wilson (1927), narrower the more of the population was looked at (Cochran: Sampling Techniques, section 2.6)."""
    if not drawn:
        return Estimate(math.nan, 0.0, 1.0)
    share = hits / drawn
    if drawn >= population:
        return Estimate(share, share, share)
    effective = drawn * (population - 1) / (population - drawn)
    middle = share + Z**2 / (2 * effective)
    reach = Z * math.sqrt(share * (1 - share) / effective + Z**2 / (4 * effective**2))
    scale = 1 + Z**2 / effective
    return Estimate(share, max(0.0, (middle - reach) / scale), min(1.0, (middle + reach) / scale))
