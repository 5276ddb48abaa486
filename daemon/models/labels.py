"""The labels of the configured classifiers, and which of them a user's rule asks for that do not exist."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from daemon.config.loading import Config
from daemon.config.models import table_of
from stages.classifier.descriptor import CLASSIFIER, Classes, ClassifierOptions
from stages.classifier.recognition import list_labels
from stages.contract.base import Result
from stages.contract.manifest import PackError
from stages.registry.fake import answer
from stages.registry.registry import UnknownName, kind_of
from stages.weights import packs

SAMPLE = (3, 640, 480)  # variant of the fake answers, and the image's width and height
MOST_NAMED = 20  # labels in a message


class Labels(NamedTuple):
    """names: all labels of a model. most: how many of them an answer has."""

    names: list[str]
    most: int


def find_labels(config: Config) -> dict[str, Labels]:
    """By stage, of each classifier whose model can be read. Another is reported with the models."""
    found = {}
    for stage in config.stage_names:
        table = table_of(config.stages, stage)
        if kind_of(stage) != CLASSIFIER.name or table.backend == "fake":
            continue
        try:
            pack = packs.open_pack(
                table.model or config.models.pack, config.models.folder, record=False, base=config.folder
            )
            pack, entry = packs.find_entry(pack, CLASSIFIER.name, table.backend)
            options = msgspec.convert(entry.options | table.options, ClassifierOptions)
            found[stage] = Labels(list_labels(pack.files_of(entry)["model"]), options.top_k)
        except (PackError, UnknownName, msgspec.ValidationError):
            continue
    return found


def invent_answers(stages: Sequence[str], labels: Mapping[str, Labels]) -> dict[str, Result]:
    """By stage, for a sample record: invented answers, of classifiers with all labels of their models."""
    earlier = frozenset(stages)
    answers = {stage: answer(stage, *SAMPLE, earlier) for stage in stages}
    for stage, (names, _) in labels.items():
        scores = dict.fromkeys(names, round(1 / len(names), 6))
        answers[stage] = Classes(names[0], scores[names[0]], scores)
    return answers


class WatchedScores(dict[str, float]):
    """The scores of a record. They note what is wrong with how a rule reads them: a label that the model does not have, for
    which `get` would give the rule its default in every image; or one that an answer may be without, read without a default.
    """

    def __init__(self, stage: str, scores: Mapping[str, float], labels: Labels) -> None:
        super().__init__(scores)
        self._stage, self._labels = stage, labels
        self.problem = ""  # the first one

    def ask(self, label: object) -> None:
        names = self._labels.names
        if self.problem or not isinstance(label, str) or label in names:
            return
        near = difflib.get_close_matches(label, names, n=1, cutoff=0.5)
        known = ", ".join(names[:MOST_NAMED]) + ", …" * (len(names) > MOST_NAMED)
        hint = f'did you mean "{near[0]}"?' if near else f"it has {known}."
        self.problem = f'it reads the label "{label}", which the model of {self._stage} does not have; {hint}'

    def __getitem__(self, label: str) -> float:
        self.ask(label)
        if not self.problem and len(self._labels.names) > self._labels.most:
            self.problem = (
                f'it reads scores["{label}"], which fails for an image where the label is not among the {self._labels.most} '
                f'with the highest scores (top_k of {self._stage}); write scores.get("{label}", 0.0), or raise top_k.'
            )
        return super().__getitem__(label)

    def __contains__(self, label: object) -> bool:
        self.ask(label)
        return super().__contains__(label)

    def get(self, label: str, default: Any = None) -> Any:
        self.ask(label)
        return super().get(label, default)


class WatchedLabel(str):
    """The label of a record. Its scores note it if a rule compares it with a label that the model does not have."""

    __slots__ = ("_ask",)
    _ask: Callable[[object], None]
    __hash__ = str.__hash__

    def __new__(cls, label: str, ask: Callable[[object], None]) -> WatchedLabel:
        watched = super().__new__(cls, label)
        watched._ask = ask
        return watched

    def __eq__(self, other: object) -> bool:
        self._ask(other)
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


def watch_scores(record: dict[str, Any], labels: Mapping[str, Labels]) -> list[WatchedScores]:
    """Watch the scores and the label of classifiers in a record. labels: by stage."""
    watched = []
    for stage in labels.keys() & record.keys():
        answer = record[stage]
        scores = answer["scores"] = WatchedScores(stage, answer["scores"], labels[stage])
        answer["label"] = WatchedLabel(answer["label"], scores.ask)
        watched.append(scores)
    return watched
