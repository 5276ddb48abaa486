"""Describes the stage classifier for the rest of the program. Imports no torch."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from stages.classifier import recognition
from stages.contract.descriptor import Descriptor
from stages.contract.invented import LABELS
from stages.contract.options import Count
from stages.contract.recognition import make_backend


class Classes(msgspec.Struct, frozen=True):
    """The scores of an image's classes."""

    label: str  # with the highest score
    score: float  # of this label
    scores: dict[str, float]  # by label, the highest first


class ClassifierOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The scores."""

    activation: Annotated[
        Literal["softmax", "sigmoid", "none"] | None,
        Meta(
            description="What makes scores of the model's numbers. softmax: all scores add up to 1. sigmoid: each "
            "label has a probability of its own. none: the numbers themselves, such as a rating. Not set: as the model was "
            "trained, by problem_type in its config.json; without that, none for a single label, and softmax for several."
        ),
    ] = None
    top_k: Annotated[
        Count,
        Meta(description="Most labels in the scores of an image; those with the highest scores are kept."),
    ] = 100


@lru_cache(maxsize=4096)
def fake(variant: int, width: int, height: int, earlier: frozenset[str]) -> Classes:
    first, second = (LABELS[(variant + place) % len(LABELS)] for place in range(2))
    return Classes(first, 0.75, {first: 0.75, second: 0.25})


CLASSIFIER = Descriptor(
    name="classifier",
    key="classifier",
    result=Classes,
    backends={
        "transformers": make_backend(
            "stages.classifier.stage:ClassifierStage",
            ClassifierOptions,
            recognition.CLASSIFIERS,
            find=recognition.find,
            check=recognition.check,
        ),
    },
    half="bfloat16",  # it does not overflow
    cost=0.03,
    has_variants=True,
    fake=fake,
)
