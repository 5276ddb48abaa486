"""Holds the answers of models against what people say: one score for each model that has answered for labelled images."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import numpy as np

from daemon.core.labels import Box, Kind, ObjectLabel, by_stage, is_held_out
from daemon.exports.answered import ImageAnswers
from daemon.labels import metrics
from daemon.labels.metrics import ClassMeasure, Measure, ObjectMeasure
from daemon.labels.store import LabelStore
from daemon.ledger.record import Model
from daemon.ledger.records import Reader
from daemon.ledger.rows import read_stored
from stages.registry.registry import find_stage

CHUNK = 256
# What a measure compares with the label, and the measure.
READ: Mapping[Kind, Callable[[ImageAnswers], Any]] = {
    Kind.OBJECTS: lambda answers: answers.objects,
    Kind.TAGS: lambda answers: [label for label, _ in answers.tags],
    Kind.CAPTION: lambda answers: answers.caption,
    Kind.TEXT: lambda answers: answers.text,
    Kind.CLASSES: lambda answers: answers.classes[0][1],
}
MEASURES: Mapping[Kind, Callable[[Sequence[Any], Sequence[Any]], Measure]] = {
    Kind.OBJECTS: ObjectMeasure,
    Kind.TAGS: metrics.measure_tags,
    Kind.CAPTION: metrics.measure_captions,
    Kind.TEXT: metrics.measure_text,
    Kind.CLASSES: ClassMeasure,
}


class Estimate(NamedTuple):
    """A value, and the range that holds 95 of 100 resamples of the images."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Score:
    """How one model agrees with the labels. images: how many it has answered for, of those with labels. against: figures minus
    those of the first model of its kind, on the images that both have answered for; none for the first. classes: the average
    precision of each label of objects, or the F1 of each class. given, answered: the names of objects, tags or classes that
    people and the model gave, in lower case."""

    kind: Kind
    model: Model
    is_current: bool
    images: int
    labelled: int
    figures: dict[str, Estimate]
    against: dict[str, Estimate] = field(default_factory=dict)
    classes: dict[str, float] = field(default_factory=dict)
    given: frozenset[str] = frozenset()
    answered: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """Its kind; of classes, the classifier."""
        return self.model.stage if self.kind is Kind.CLASSES else self.kind


def score(
    reader: Reader, store: LabelStore, kinds: Sequence[Kind], step: Callable[[int], None], held_out: float = 1
) -> Iterator[Score]:
    """Of each kind, current models first, then those with the most images. step: called with the number of labelled images that
    were read. held_out: only the images that a training with this share holds out. Raises MissingLibrary."""
    current, read = reader.current_models(), 0
    for kind, stage, labels in _list_labels(store, kinds, held_out):
        answers = defaultdict[int, dict[bytes, Any]](dict)
        digests = [*labels]
        for start in range(0, len(digests), CHUNK):
            chunk = digests[start : start + CHUNK]
            for model, found in _read_answers(reader, chunk, kind, stage).items():
                answers[model] |= found
            read += len(chunk)
            step(read)
        order = sorted(answers, key=lambda model: (model not in current, -len(answers[model]), model))
        for model in order:
            first = {} if model == order[0] else answers[order[0]]
            yield _score(
                kind, reader.models[model], labels, answers[model], first, is_current=model in current
            )


def _list_labels(
    store: LabelStore, kinds: Sequence[Kind], held_out: float
) -> Iterator[tuple[Kind, str, dict[bytes, Any]]]:
    """Of each kind the stage that is scored, and the labels by digest; of classes, of each classifier."""
    for kind in kinds:
        found = defaultdict[str, dict[bytes, Any]](dict)
        for digest, label in store.of_kind(kind):
            if is_held_out(digest, held_out, label.held_out):
                for stage, said in by_stage(kind, label.value).items():
                    found[stage][digest] = said
        yield from ((kind, stage, found[stage]) for stage in sorted(found))


def _read_answers(
    reader: Reader, digests: Sequence[bytes], kind: Kind, stage: str
) -> dict[int, dict[bytes, Any]]:
    """By model and digest, what is compared with a label."""
    with reader.lend() as connection:
        stored = read_stored(connection, digests, reader.models)
    found: dict[int, dict[bytes, Any]] = {}
    for digest, outputs in stored.results.items():
        _, width, height, _ = stored.contents[digest]
        for number, output in outputs.items():
            if reader.models[number].stage == stage:
                document = {find_stage(stage).key: msgspec.json.decode(output.payload)}
                answers = ImageAnswers(document, (width, height))
                found.setdefault(number, {})[digest] = READ[kind](answers)
    return found


def _score(
    kind: Kind,
    model: Model,
    labels: Mapping[bytes, Any],
    answers: Mapping[bytes, Any],
    first: Mapping[bytes, Any],
    *,
    is_current: bool,
) -> Score:
    """first: the answers of the first model of this kind, if this is another one."""
    digests = [*answers]
    measure = _measure(kind, digests, labels, answers)
    both = [digest for digest in digests if digest in first]
    against = {}
    if both:
        measures = [_measure(kind, both, labels, each) for each in (first, answers)]
        against = _figures(metrics.difference(*measures), len(both))
    classes = measure.by_class() if isinstance(measure, ObjectMeasure | ClassMeasure) else {}
    return Score(
        kind,
        model,
        is_current,
        len(digests),
        len(labels),
        _figures(measure, len(digests)),
        against,
        classes,
        given=_names(kind, [labels[each] for each in digests]),
        answered=_names(kind, answers.values()),
    )


def _names(kind: Kind, images: Iterable[Any]) -> frozenset[str]:
    """Of the objects, tags or classes in labels, or in what is compared with them, as a score compares them."""
    if kind in (Kind.CAPTION, Kind.TEXT):
        return frozenset()
    parts = images if kind is Kind.CLASSES else chain.from_iterable(images)
    return frozenset(_name_of(each).casefold() for each in parts)


def _name_of(part: ObjectLabel | tuple[str, float, Box] | str) -> str:
    if isinstance(part, ObjectLabel):
        return part.label
    return part if isinstance(part, str) else part[0]


def _measure(
    kind: Kind, digests: Sequence[bytes], labels: Mapping[bytes, Any], answers: Mapping[bytes, Any]
) -> Measure:
    return MEASURES[kind]([labels[each] for each in digests], [answers[each] for each in digests])


def _figures(measure: Measure, images: int) -> dict[str, Estimate]:
    ranges = metrics.interval(measure, images)
    values = measure(np.ones(images))
    return {name: Estimate(value, *ranges[name]) for name, value in values.items()}
