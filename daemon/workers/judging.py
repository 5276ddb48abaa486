"""Whether a worker's answers to the known images can be right: pure functions.

Some answers are wrong in themselves, as one embedding for all pictures. The others are compared with a reference: the first
answers of the same models. A false alarm stops a healthy GPU, so only gross differences count: answers differ a little
between GPUs, and between drivers and libraries.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import chain, combinations
from typing import Any

import msgspec

from daemon.core.messages import Outcome
from stages.blip.descriptor import Caption
from stages.clip.descriptor import Clip
from stages.contract.base import Result, StageSpec
from stages.ocr.descriptor import Ocr, bounds_of
from stages.registry import registry
from stages.yolo.descriptor import Box, Objects, overlap

Payloads = Mapping[str, bytes]  # of one picture, by stage, as JSON

LEAST_COSINE = 0.95  # of a picture's embedding and its embedding in the reference
SAME_COSINE = 0.9999  # above it two embeddings are the same but for rounding
MARGIN = 0.01  # by which another picture's embedding in the reference is nearer
UNIT = 0.02  # how far the length of an embedding may be from 1: it may be stored in float16
SURE = 0.2  # above the lowest score that a stage reports, an object or a line counts as sure
USUAL_LEAST = 0.5  # that score, if the options say nothing
CLEAR = 0.5  # score of a tag that must stay
ALIKE = 0.6  # of two texts: difflib's ratio
OVERLAP = 0.3  # intersection over union of two boxes of one thing
FEW = 3  # scores that may be equal by chance


@dataclass(frozen=True, slots=True)
class Seen:
    """The answers of one stage to the pictures that it can process. before: those of the reference, None where it has none."""

    spec: StageSpec
    now: list[Any]  # of the type that the stage's descriptor names
    before: list[Any]
    sizes: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, spec: StageSpec, pictures: Sequence[tuple[Any, Outcome]]) -> Seen:
        """pictures: the answer of the reference to each, and what came of it now."""
        pictures = [(old, outcome) for old, outcome in pictures if spec.name in outcome.outputs]
        now = [registry.decode(spec.name, outcome.outputs[spec.name].payload) for _, outcome in pictures]
        sizes = [(outcome.width, outcome.height) for _, outcome in pictures]
        return cls(spec, now, [old for old, _ in pictures], sizes)

    def pairs(self) -> list[tuple[Any, Any]]:
        """Each answer of the reference, and the one to the same picture now."""
        return [(old, new) for old, new in zip(self.before, self.now, strict=True) if old is not None]


def find_faults(
    specs: Sequence[StageSpec], now: Sequence[Outcome], before: Sequence[Payloads]
) -> dict[str, str]:
    """What is wrong, by stage. now, before: of each picture; before: the reference, empty if there is none."""
    wrong = {}
    for spec in specs:
        had = [decode_known(spec.name, known) for known in before] or [None] * len(now)
        pictures = [*zip(had, now, strict=True)]
        lost = [
            outcome.detail
            for old, outcome in pictures
            if old is not None and spec.name not in outcome.outputs
        ]
        if lost:
            wrong[spec.name] = f"it cannot process an image that it could process before: {lost[0]}"
            break  # the stages after it did not get the image either
        seen = Seen.of(spec, pictures)
        if seen.now and (what := judge(seen)):
            wrong[spec.name] = what
    return wrong


def decode_known(stage: str, known: Payloads) -> Result | None:
    """None if there is no answer, or one of another version, of another type."""
    try:
        return registry.decode(stage, known[stage]) if stage in known else None
    except msgspec.DecodeError:
        return None


def judge(seen: Seen) -> str:
    """What is wrong with the answers of one stage; empty if nothing is."""
    rules = RULES.get(type(seen.now[0]), TEXTS)
    return next(filter(None, (rule(seen) for rule in rules)), "")


# Texts, and answers of unknown types. They may be few words: only if the reference has another one for each picture, it is no
# chance that they are equal.


def is_constant(seen: Seen) -> str:
    old, new = list_keys(seen)
    constant = len(set(new)) == 1 < len(new)
    return "it gives the same answer for different images" if old and constant else ""


def is_misplaced(seen: Seen) -> str:
    old, new = list_keys(seen)
    moved = [key for place, key in enumerate(new) if old and key != old[place] and key in old]
    return "it gives the answers of other images" if len(moved) > 1 else ""


def list_keys(seen: Seen) -> tuple[list[object], list[object]]:
    """Of the reference, or none if some are equal or missing; and now."""
    old = [key_of(answer) for answer in seen.before]
    distinct = None not in seen.before and len(set(old)) == len(old)
    return old if distinct else [], [key_of(answer) for answer in seen.now]


def key_of(answer: Result | None) -> object:
    """What is the same for the same answer."""
    return answer.text if isinstance(answer, Caption) else msgspec.json.encode(answer)


# Embeddings and tags.


def read_embedding(clip: Clip) -> list[float]:
    form, data = "e" if clip.embedding.dtype == "float16" else "f", base64.b64decode(clip.embedding.base64)
    return list(struct.unpack(f"<{len(data) // struct.calcsize(form)}{form}", data))


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """0 if a length is 0. NaN if a value is."""
    product = math.sqrt(sum(x * x for x in one) * sum(x * x for x in other))
    return sum(x * y for x, y in zip(one, other, strict=True)) / product if product else 0.0


def is_no_embedding(seen: Seen) -> str:
    lengths = [math.hypot(*read_embedding(answer)) for answer in seen.now]
    # A comparison with NaN is False.
    return "" if all(abs(length - 1) < UNIT for length in lengths) else "an embedding is not of length 1"


def is_one_embedding(seen: Seen) -> str:
    """Models with random weights have cosines up to 0.9 for these pictures."""
    pairs = [*combinations(map(read_embedding, seen.now), 2)]
    constant = bool(pairs) and all(cosine(*pair) > SAME_COSINE for pair in pairs)
    return "it gives the same embedding for different images" if constant else ""


def has_other_embeddings(seen: Seen) -> str:
    """An embedding is far from that of the reference, or nearer to that of another picture."""
    pairs = [(read_embedding(old), read_embedding(new)) for old, new in seen.pairs()]
    for old, new in pairs:
        if len(old) != len(new):
            return f"an embedding has {len(new)} values in place of {len(old)}"
        near = cosine(old, new)
        if near < LEAST_COSINE or any(cosine(other, new) > near + MARGIN for other, _ in pairs):
            return f"the embedding of a known image is another one: the cosine of both is {near:.2f}"
    return ""


def has_other_tags(seen: Seen) -> str:
    for old, new in seen.pairs():
        scores = {tag.label: tag.score for tag in new.tags}
        for tag in old.tags:
            if tag.score >= CLEAR and scores.get(tag.label, 0.0) < tag.score / 2:
                return f'a known image is "{tag.label}" no more'
    return ""


# Objects and lines of text: things with a score and a place.


@dataclass(frozen=True, slots=True)
class Thing:
    name: str
    score: float
    box: Box


def list_things(answer: Result | None) -> list[Thing]:
    if isinstance(answer, Objects):
        return [Thing(found.label, found.score, found.box) for found in answer.detections]
    if isinstance(answer, Ocr):
        return [Thing(line.text, line.score, bounds_of(line.box)) for line in answer.lines]
    return []


def is_out_of_range(seen: Seen) -> str:
    for answer, (width, height) in zip(seen.now, seen.sizes, strict=True):
        for thing in list_things(answer):
            if not -UNIT <= thing.score <= 1 + UNIT:
                return f"a score is {thing.score:g}"
            x0, y0, x1, y1 = thing.box
            reach = max(width, height)  # a detector may see the picture on a square canvas
            if not (-reach <= x0 <= x1 <= width + reach and -reach <= y0 <= y1 <= height + reach):
                return f"a box is outside of its image, which is {width}×{height}"
    return ""


def has_equal_scores(seen: Seen) -> str:
    old, new = [
        [t.score for t in chain.from_iterable(map(list_things, each))] for each in (seen.before, seen.now)
    ]
    return "all scores are equal" if len(new) > FEW and len(set(new)) == 1 < len(set(old)) else ""


def has_lost_things(seen: Seen) -> str:
    """Fewer than half of what was sure in the reference is found again, with the same name, at the same place."""
    least = next((seen.spec.options[key] for key in ("conf", "text_score") if key in seen.spec.options), None)
    sure = (USUAL_LEAST if least is None else least) + SURE
    wanted = again = 0
    for old, new in seen.pairs():
        found = list_things(new)
        for thing in list_things(old):
            if thing.score >= sure:
                wanted += 1
                again += any(is_same(thing, other) for other in found)
    return f"it finds {again} of {wanted} known things again" if 2 * again < wanted else ""


def is_same(thing: Thing, other: Thing) -> bool:
    return overlap(thing.box, other.box) >= OVERLAP and is_alike(thing.name, other.name)


def is_alike(one: str, other: str) -> bool:
    return one == other or SequenceMatcher(None, one, other, autojunk=False).ratio() >= ALIKE


def has_many_more(seen: Seen) -> str:
    old, new = (sum(len(list_things(answer)) for answer in side) for side in (seen.before, seen.now))
    compares = None not in seen.before
    return f"it finds {new} things where it found {old}" if compares and new > 4 * old + 20 else ""


# Texts without boxes.


def has_no_text(seen: Seen) -> str:
    silent = any(old.text and not new.text for old, new in seen.pairs())
    return "it finds no words for an image that it had words for" if silent else ""


def reads_another_text(seen: Seen) -> str:
    """A page reader. Most texts are others: its greedy choices may differ between GPUs for one."""
    texts = [(old.text, new.text or "") for old, new in seen.pairs() if old.text]
    others = sum(not is_alike(old, new) for old, new in texts)
    return f"{others} of {len(texts)} known texts are others" if 2 * others > len(texts) else ""


Rule = Callable[[Seen], str]
TEXTS: tuple[Rule, ...] = (is_constant, is_misplaced)
THINGS: tuple[Rule, ...] = (is_out_of_range, has_equal_scores, has_lost_things, has_many_more)
RULES: dict[type, tuple[Rule, ...]] = {
    Clip: (is_no_embedding, is_one_embedding, has_other_embeddings, has_other_tags),
    Objects: THINGS,
    Ocr: (*THINGS, has_no_text, reads_another_text),
    Caption: (has_no_text, *TEXTS),
}
