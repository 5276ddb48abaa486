"""How much the answers for an image disagree, with each other and with what people say: what a person should look at first.

MEASURES is the whole list: what is measured, by which function, and where the measure is from. Each is a number from 0 (they
agree, or the model is sure) to 1. Functions take answers as in a sidecar, decoded from JSON.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from daemon.core.labels import Kind, Label, ObjectLabel, by_stage
from daemon.ledger.record import Record
from daemon.search.entries import separate
from stages.contract.binning import has_text, likely_tags, sure_text_of
from stages.registry.registry import kind_of
from stages.yolo.descriptor import Box, overlap

Answer = Mapping[str, Any]
Boxes = Sequence[tuple[str, float, Box]]  # label, weight and box
TEMPERATURE = 0.1  # of `pool`, as in cleanlab
WORD = re.compile(r"\w+")


def pool(parts: Iterable[float]) -> float:
    """Nearly the largest; of two images with the same worst part the one with more bad parts has more. 0 without parts."""
    found = np.fromiter(parts, float)
    weights = np.exp((found - found.max(initial=0.0)) / TEMPERATURE)
    return float(weights @ found / weights.sum()) if len(found) else 0.0


def differ(first: Iterable[str], second: Iterable[str]) -> float:
    """The share of what is in one list and not in the other; 0 if both are empty."""
    one, other = Counter(first), Counter(second)
    total = one.total() + other.total()
    return 1.0 - 2.0 * (one & other).total() / total if total else 0.0


def boxes_differ(first: Boxes, second: Boxes) -> float:
    """Of each object of both, how little the best one of the other with the same label overlaps it, times its weight; then
    the worst."""
    return pool([*_alone(first, second), *_alone(second, first)])


def _alone(some: Boxes, others: Boxes) -> Iterator[float]:
    for label, weight, box in some:
        same = [other for name, _, other in others if name.casefold() == label.casefold()]
        yield weight * (1.0 - max((overlap(box, other) for other in same), default=0.0))


def _pairs(text: str) -> list[str]:
    """Each character with the next one."""
    joined = " ".join(text.casefold().split())
    return [joined[at : at + 2] for at in range(len(joined) - 1)] or [*joined]


def _words(text: str) -> list[str]:
    return WORD.findall(separate(text.casefold()))


def _boxes(answer: Answer) -> Boxes:
    return [(each["label"], each["score"], each["box"]) for each in answer["detections"]]


def _tags(answer: Answer) -> list[tuple[str, float]]:
    return [(tag["label"].casefold(), tag["score"]) for tag in answer["tags"]]


# Two answers of one stage


def texts_differ(first: Answer, second: Answer) -> float:
    return differ(_pairs(sure_text_of(first)), _pairs(sure_text_of(second)))


def objects_differ(first: Answer, second: Answer) -> float:
    return boxes_differ(_boxes(first), _boxes(second))


def tags_differ(first: Answer, second: Answer) -> float:
    return differ(likely_tags(_tags(first)), likely_tags(_tags(second)))


def captions_differ(first: Answer, second: Answer) -> float:
    return differ(_words(first["text"]), _words(second["text"]))


def classes_differ(first: Answer, second: Answer) -> float:
    one, other = first["scores"], second["scores"]
    total: float = sum(abs(one.get(name, 0.0) - other.get(name, 0.0)) for name in {*one, *other})
    return min(1.0, total / 2)


# One answer; None: it has nothing that can be measured


def doubt_of_text(answer: Answer) -> float | None:
    lines = [line for line in answer["lines"] if has_text(line["text"], line["score"])]
    return max((1.0 if line.get("guessed") else 1.0 - line["score"] for line in lines), default=None)


def doubt_of_objects(answer: Answer) -> float | None:
    return max((1.0 - score for _, score, _ in _boxes(answer)), default=None)


def doubt_of_tags(answer: Answer) -> float | None:
    best = sorted((score for _, score in _tags(answer)), reverse=True)
    return 1.0 - (best[0] - best[1]) if len(best) > 1 else None


def doubt_of_caption(answer: Answer) -> float | None:
    similarity = answer["similarity"]
    return None if similarity is None else 1.0 - similarity


def doubt_of_class(answer: Answer) -> float | None:
    return 1.0 - answer["score"] if len(answer["scores"]) > 1 and 0.0 <= answer["score"] <= 1.0 else None


# An answer and what people say


def text_is_other(answer: Answer, given: str) -> float:
    return differ(_pairs(sure_text_of(answer)), _pairs(given))


def objects_are_others(answer: Answer, given: Sequence[ObjectLabel]) -> float:
    """Crowds are left out, and so is what is answered there."""
    crowds = [each.box for each in given if each.crowd]
    named = [(each.label, 1.0, each.box) for each in given if not each.crowd]
    found = [each for each in _boxes(answer) if not any(overlap(each[2], crowd) >= 0.5 for crowd in crowds)]
    return boxes_differ(found, named)


def tags_are_others(answer: Answer, given: Sequence[str]) -> float:
    scores, names = dict(_tags(answer)), {each.casefold() for each in given}
    least = min((scores.get(name, 0.0) for name in names), default=1.0)
    other = max((score for name, score in scores.items() if name not in names), default=0.0)
    return (1.0 - least + other) / 2


def caption_is_other(answer: Answer, given: Sequence[str]) -> float:
    return min((differ(_words(answer["text"]), _words(each)) for each in given), default=0.0)


def class_is_other(answer: Answer, given: str) -> float:
    scores = {name.casefold(): score for name, score in answer["scores"].items()}
    own: float = scores.pop(given.casefold(), 0.0)
    return (1.0 - own + max(scores.values(), default=0.0)) / 2


class Measure(NamedTuple):
    """source: of the idea, or of the formula."""

    function: Callable[..., float | None]
    about: str
    source: str


_DICE = "Dice, Measures of the amount of ecologic association between species (Ecology, 1945)"
_COMMITTEE = (
    "Two models that differ are a committee: Seung, Opper, Sompolinsky, Query by committee (COLT 1992)"
)
_PAIRS = {
    "ocr": Measure(texts_differ, "pairs of characters that only one text has", _DICE),
    "yolo": Measure(
        objects_differ,
        "the worst object: without one of the same label in the other answer, or beside it; times its score",
        "ObjectLab of cleanlab: Tkachenko, Thyagarajan, Mueller (2023), with IoU as the likeness of boxes",
    ),
    "clip": Measure(tags_differ, "tags that count and that only one answer has", _DICE),
    "blip": Measure(captions_differ, "words that only one caption has", _DICE),
    "classifier": Measure(
        classes_differ,
        "half the sum of the differences of the scores",
        "The total variation distance of two distributions: Levin, Peres, Markov Chains and Mixing Times, section 4.1",
    ),
}
# By signal and stage. `looks`: the first answer and that of a second look. `models`: the answer and another one that the ledger
# has of the same bytes, by a former or tried model. `scores`: the answer alone. `labels`: the answer and what people say.
MEASURES: Mapping[tuple[str, str], Measure] = {
    ("labels", "ocr"): Measure(text_is_other, "pairs of characters that only one of both has", _DICE),
    ("labels", "yolo"): Measure(objects_are_others, "as for two answers, with people's boxes", _PAIRS["yolo"].source),
    ("labels", "clip"): Measure(
        tags_are_others,
        "how much more likely a tag is that nobody gave than one that somebody gave",
        "The normalized margin of confident learning: Northcutt, Jiang, Chuang (JAIR 2021), as in cleanlab",
    ),
    ("labels", "classifier"): Measure(
        class_is_other,
        "how much more likely the likeliest other class is than the one that somebody gave",
        "The normalized margin of confident learning: Northcutt, Jiang, Chuang (JAIR 2021), as in cleanlab",
    ),
    ("labels", "blip"): Measure(caption_is_other, "words that the caption and the nearest of people do not share", _DICE),
    **{("looks", stage): each._replace(source=f"{each.source}. {_COMMITTEE}") for stage, each in _PAIRS.items()},
    **{("models", stage): each._replace(source=f"{each.source}. {_COMMITTEE}") for stage, each in _PAIRS.items()},
    ("scores", "ocr"): Measure(
        doubt_of_text,
        "1 - the lowest score of a line; 1 if one was guessed",
        "Least confidence: Lewis, Gale, A sequential algorithm for training text classifiers (SIGIR 1994)",
    ),
    ("scores", "yolo"): Measure(
        doubt_of_objects,
        "1 - the lowest score of an object, so those near the threshold come first",
        "The maximum over boxes of Brust, Käding, Denzler, Active learning for deep object detection (VISAPP 2019)",
    ),
    ("scores", "clip"): Measure(
        doubt_of_tags,
        "1 - the difference of the two highest scores",
        "Margin sampling: Scheffer, Decomain, Wrobel, Active hidden Markov models (IDA 2001)",
    ),
    ("scores", "blip"): Measure(
        doubt_of_caption,
        "1 - the cosine of caption and image",
        "Hessel and others, CLIPScore: a reference-free evaluation metric for image captioning (EMNLP 2021)",
    ),
    ("scores", "classifier"): Measure(
        doubt_of_class, "1 - the highest score", "Least confidence: Lewis, Gale (SIGIR 1994)"
    ),
}  # fmt: skip
SIGNALS = tuple(dict.fromkeys(signal for signal, _ in MEASURES))
STAGES = ("ocr", "yolo", "clip", "blip", "classifier")


def measure(
    record: Record, others: Mapping[str, bytes], labels: Mapping[Kind, Label]
) -> dict[tuple[str, str], float]:
    """By signal and stage, whatever can be measured; of several stages of one kind the highest. others: by stage, the answer
    of another model about the same bytes, as JSON."""
    found: dict[tuple[str, str], float] = {}
    for signal, stage, *parts in _list_parts(record, others, labels):
        key = (signal, kind_of(stage))
        try:
            if (score := MEASURES[key].function(*parts)) is not None:
                found[key] = max(min(1.0, max(0.0, score)), found.get(key, 0.0))
        except (ValueError, TypeError, KeyError, AttributeError):
            pass  # an answer of an older version of a plug-in, say
    return found


def _list_parts(
    record: Record, others: Mapping[str, bytes], labels: Mapping[Kind, Label]
) -> Iterator[tuple[Any, ...]]:
    """Signal, stage, and what its measure takes."""
    answers = {
        stage: msgspec.json.decode(output.payload)
        for stage, output in record.outputs.items()
        if kind_of(stage) in STAGES
    }
    for stage, answer in answers.items():
        yield "scores", stage, answer
    for look in record.looks.values():
        if look.output and look.model.stage in answers:
            yield (
                "looks",
                look.model.stage,
                answers[look.model.stage],
                msgspec.json.decode(look.output.payload),
            )
    for stage in others.keys() & answers.keys():
        yield "models", stage, answers[stage], msgspec.json.decode(others[stage])
    for kind, label in labels.items():
        said = by_stage(kind, label.value)
        for stage in said.keys() & answers.keys():
            yield "labels", stage, answers[stage], said[stage]
