"""Chooses the bin of an image (A text, B objects, C everything else), and reports every criterion.

The rule is that of visiond's predecessor. A: more than two text boxes, or text on more than a fifth of the image. Otherwise
B: more than three kinds of objects, more than five objects, or objects spread over more than three tenths of the image.
Otherwise C; the similarity of caption and image is compared and reported. All comparisons are strict.

A text box is a line with a high score that is text by `has_text`, and not a sign that a recognizer reads into a
shape. Such lines are in the results, but do not count here. A page reader writes text without boxes and scores: each
of its lines with at least two letters or digits counts, and the area of text is not known.
"""

from __future__ import annotations

import importlib
import math
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

Corners = Sequence[tuple[float, float]]


class Thresholds(msgspec.Struct, frozen=True):
    text_boxes: int = 2
    text_area: float = 0.2  # of the image's area
    text_score: float = 0.7  # of a line, to be counted as a text box
    object_count: int = 5
    unique_objects: int = 3
    spatial_dispersion: float = 0.3  # of the image's area
    clip_similarity: float = 0.25  # cosine


class Criterion(msgspec.Struct, frozen=True):
    """A measured value and its threshold; value and passed are None if the stage did not run, or did not measure it."""

    value: float | None
    threshold: float
    passed: bool | None


class Bin(msgspec.Struct, frozen=True):
    name: str
    criteria: dict[str, dict[str, Criterion]]  # bin → criterion → figures


class _Line(msgspec.Struct, frozen=True):
    text: str
    score: float
    box: Corners


class _Ocr(msgspec.Struct, frozen=True):
    lines: list[_Line]
    area_ratio: float
    text: str | None = None


class TextFigures(msgspec.Struct, frozen=True):
    """The text of an image that counts."""

    count: int
    area_ratio: float | None


class ObjectFigures(msgspec.Struct, frozen=True):
    count: int
    unique: int
    dispersion: float


class _Caption(msgspec.Struct, frozen=True):
    similarity: float | None


# Decoding only the needed fields of a stage's JSON takes 1 µs; OCR's with a dozen lines takes 5 µs.
_FIGURES = {
    "ocr": msgspec.json.Decoder(_Ocr).decode,
    "yolo": msgspec.json.Decoder(ObjectFigures).decode,
    "blip": msgspec.json.Decoder(_Caption).decode,
}

# Bin → (criterion, stage that measures it, field of its result, field of Thresholds), in the order in which
# the rule tries the bins. The last bin has the images that pass no other.
_RULES = {
    "A": (("text_boxes", "ocr", "count", "text_boxes"), ("text_area", "ocr", "area_ratio", "text_area")),
    "B": (
        ("unique_objects", "yolo", "unique", "unique_objects"),
        ("object_count", "yolo", "count", "object_count"),
        ("spatial_dispersion", "yolo", "dispersion", "spatial_dispersion"),
    ),
    "C": (("clip_similarity", "blip", "similarity", "clip_similarity"),),
}
# Of a criterion: a sentence with its value and its threshold, how each is written, and with how many digits at least.
_SENTENCES = {
    "text_boxes": ("text boxes {}, more than {} needed", "{:g}", 0),
    "text_area": ("text on {} of the image, more than {} needed", "{:.{digits}%}", 0),
    "unique_objects": ("kinds of objects {}, more than {} needed", "{:g}", 0),
    "object_count": ("objects {}, more than {} needed", "{:g}", 0),
    "spatial_dispersion": ("objects spread over {} of the image, more than {} needed", "{:.{digits}%}", 0),
    "clip_similarity": ("likeness of caption and image {}, more than {} expected", "{:.{digits}f}", 2),
}
_MOST_DIGITS = 6  # as a sidecar has them
BINS = tuple(_RULES)  # of the built-in rule; a user's rule may have others

_HAS_TWO_CHARACTERS = re.compile(r"[^\W_].*[^\W_]", re.DOTALL)  # two letters or digits, of any script
LEAST_SCORE = 0.1  # of a tag that counts besides the most probable one
_FEW_CHARACTERS, _SURE_SCORE = 3, 0.8

Rule = Callable[[dict[str, Any]], str]
BIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def judge(payloads: Mapping[str, bytes], thresholds: Thresholds) -> Bin:
    """The bin by the rule, from the stages' JSON by stage name. Criteria of a stage that did not run do not pass."""
    figures: dict[str, Any] = {
        stage: decode(payloads[stage]) for stage, decode in _FIGURES.items() if stage in payloads
    }
    if "ocr" in figures:
        figures["ocr"] = _find_text(figures["ocr"], thresholds.text_score)
    return judge_figures(figures, thresholds)


def judge_figures(figures: Mapping[str, Any], thresholds: Thresholds) -> Bin:
    """The same from figures that are known already, by stage."""
    criteria = {
        name: {
            criterion: Criterion(
                value := getattr(figures.get(stage), field, None),
                limit := getattr(thresholds, threshold),
                None if value is None else value > limit,
            )
            for criterion, stage, field, threshold in rules
        }
        for name, rules in _RULES.items()
    }
    passing = (name for name in BINS[:-1] if any(c.passed for c in criteria[name].values()))
    return Bin(next(passing, BINS[-1]), criteria)


def is_decided(payloads: Mapping[str, bytes], thresholds: Thresholds, stages: Sequence[str]) -> bool:
    """Whether none of the remaining stages can change the bin: in mode "cascade" they are not run."""
    name = judge(payloads, thresholds).name
    return name == "A" or (name == "B" and ("ocr" in payloads or "ocr" not in stages))


def describe(bin: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """A bin as in a sidecar, for people: of each criterion the bin that it speaks for, a sentence, and "yes" or "no"; "–" if
    it was not measured. The last bin has the images that pass no other, so its criterion decides nothing."""
    rows = []
    for name, criteria in bin["criteria"].items():
        for criterion, figures in criteria.items():
            words, value = criterion.replace("_", " "), figures["value"]
            sentence = f"{words} not measured"
            if value is not None:
                text, form, digits = _SENTENCES.get(
                    criterion, (words + " {}, more than {} needed", "{:.4g}", 0)
                )
                sentence = text.format(*_write_apart(value, figures["threshold"], form, digits))
            rows.append((name, sentence, {True: "yes", False: "no"}.get(figures["passed"], "–")))
    return rows


def _write_apart(value: float, threshold: float, form: str, digits: int) -> list[str]:
    """Both, with as many digits as it takes to see which one is larger."""
    pairs = [
        [form.format(each, digits=each_digits) for each in (value, threshold)]
        for each_digits in range(digits, _MOST_DIGITS + 1)
    ]
    return next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])


def load_rule(reference: str, key: str = "[binning] rules") -> Any:
    """The user's function "module:function", which gets the whole record as a dict. key: names it in errors.
    Raises ValueError."""
    module, _, function = reference.partition(":")
    try:
        rule = getattr(importlib.import_module(module), function)
    except Exception as error:
        what = (
            str(error)
            if isinstance(error, ImportError | AttributeError | ValueError)
            else f"{type(error).__name__}: {error}"
        )
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = (
            ""
            if last.filename == __file__ or last.filename.startswith("<")
            else f" ({last.filename}, line {last.lineno})"
        )
        raise ValueError(
            f'{key} = "{reference}" cannot be loaded: {what}{where}. '
            'Write it as "module:function" and put the absolute path of the module\'s folder on PYTHONPATH.'
        ) from error
    if not callable(rule):
        raise ValueError(f'{key} = "{reference}" is not a function.')
    return rule


def apply_rule(rule: Rule, record: dict[str, Any]) -> str:
    """The bin that the user's rule chose. Raises ValueError if it is not a plain name: bins become folders."""
    name = rule(record)
    if not isinstance(name, str) or not BIN_NAME.fullmatch(name):
        form = "a bin's name has 1 to 64 letters (A to Z, a to z), digits, - and _, and begins with a letter or a digit"
        raise ValueError(f"the binning rule returned {name!r}; {form}")
    return name


def _find_text(ocr: _Ocr, least_score: float) -> TextFigures:
    if ocr.text is not None:
        return TextFigures(sum(1 for line in ocr.text.splitlines() if has_text(line)), None)
    counted = [line for line in ocr.lines if line.score > least_score and has_text(line.text, line.score)]
    if len(counted) == len(ocr.lines):
        return TextFigures(len(counted), ocr.area_ratio)
    area = _sum_areas(counted)
    return TextFigures(len(counted), ocr.area_ratio * area / _sum_areas(ocr.lines) if area else 0.0)


def _sum_areas(lines: Iterable[_Line]) -> float:
    return sum(measure_area(line.box) for line in lines)


def text_of(ocr: Mapping[str, Any]) -> str:
    """What an image says, line by line, from OCR's result as decoded JSON: without the signs that are not counted for
    bins either. Of a page reader, its whole text."""
    if ocr.get("text") is not None:
        return str(ocr["text"])
    return "\n".join(line["text"] for line in ocr.get("lines", ()) if has_text(line["text"], line["score"]))


def sure_text_of(ocr: Mapping[str, Any]) -> str:
    """As text_of, without lines that were guessed."""
    return text_of({**ocr, "lines": [line for line in ocr.get("lines", ()) if not line.get("guessed")]})


def likely_tags(tags: Iterable[tuple[str, float]]) -> list[str]:
    """Of labels and scores, the most probable first, the labels that count: the first one, and those whose score is not low."""
    return [label for place, (label, score) in enumerate(tags) if place == 0 or score >= LEAST_SCORE]


def has_text(text: str, score: float = 1.0) -> bool:
    """Whether a line is text, and not a sign that a recognizer reads into a shape: a wheel as "O", the windows of a
    house as "中中心". Text has at least two letters or digits; if no more than three of them are different, it also
    needs a score of 0.8. A page reader's lines have no score, and count as sure.

    On 292 real pictures, which took part only in choosing one score over two, this kept 12 of the 15 signs with two letters
    or digits out, and with them 5 of 826 lines of text. Where a box is, and how large, showed no more than the score."""
    if not _HAS_TWO_CHARACTERS.search(text):
        return False
    return score >= _SURE_SCORE or len(set(filter(str.isalnum, text.casefold()))) > _FEW_CHARACTERS


def measure_area(corners: Corners) -> float:
    """The area of a polygon, by the shoelace formula."""
    edges = zip(corners, (*corners[1:], corners[0]), strict=True)
    return abs(math.fsum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in edges)) / 2


def measure_dispersion(boxes: Sequence[tuple[float, float, float, float]], area: float) -> float:
    """The dispersion of objects with boxes x0, y0, x1, y1: the
    area of the bounding box of their centers / the image's area."""
    if not boxes:
        return 0.0
    centers_x = [(x0 + x1) / 2 for x0, _, x1, _ in boxes]
    centers_y = [(y0 + y1) / 2 for _, y0, _, y1 in boxes]
    return (max(centers_x) - min(centers_x)) * (max(centers_y) - min(centers_y)) / area
