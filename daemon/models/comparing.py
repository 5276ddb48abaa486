"""Holds what a stage would answer with other settings against what the ledger has, on a sample of the images that are DONE:
which share would change, which images most, and what it would cost for all. The share of other answers is the churn of
Milani Fard and others: Launch and Iterate: Reducing Prediction Churn (NIPS 2016). It needs no labels, and says nothing about
which answers are better."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import msgspec

from daemon.config.loading import Config
from daemon.core.errors import NothingFound, WrongArgument
from daemon.core.labels import LookUp, by_stage
from daemon.exports.choice import draw, find_records
from daemon.labels.scoring import Estimate
from daemon.labels.store import LabelStore
from daemon.ledger.record import Model, Record
from daemon.ledger.records import Reader
from daemon.ledger.statements import SQL
from daemon.maintenance.keeping import Keep
from daemon.maintenance.redo import attempt_of
from daemon.models.changes import LARGE, AnswerChange, estimate_share, measure_change, measure_error
from daemon.models.sampling import SampleRun, run_stage
from daemon.results.judge import Judge
from daemon.terminal.progress import Progress

JOULES = 3.6e6  # of a kWh
CHUNK = 256  # images that are looked up at once
MOST_COUNTED = 10_000  # contents, to estimate how many a redo computes: within 1 % of all
MOST_LOOKED = 100_000  # numbers that are looked at, in a ledger with few answers of the stage


@dataclass(frozen=True)
class Pair:
    """Both answers to an image. bins: that it has with each of them, by the rule of now; "": none."""

    record: Record
    before: bytes
    after: bytes
    change: AnswerChange
    bins: tuple[str, str]


class Cost(NamedTuple):
    """Of a redo. images: that it would compute; of several with the same bytes only one, unless reuse_results is off. None: not
    known."""

    images: int
    images_per_second: float | None
    hours: float | None
    kwh: float | None


@dataclass(frozen=True)
class ModelComparison:
    """population: images that are DONE and have an answer of the stage, estimated from those that were drawn unless these are
    all. pairs: the sample, those that change most first. models: that the stored answers are of, and how many. others: stages
    that a redo would run too, as other models are configured than their answers are of, and for how many images of the sample.
    labelled: of each image with labels, how much farther from them the new answer is than the stored one. left: images
    that a redo would compute, estimated in a large ledger."""

    stage: str
    population: int
    pairs: Sequence[Pair]
    models: Counter[Model]
    others: Counter[str]
    labelled: Sequence[float]
    left: int
    run: SampleRun

    @property
    def model(self) -> Model:
        return self.run.models[self.stage]

    def share(self, has: Callable[[Pair], bool]) -> Estimate:
        """Of all images with answers of the stage."""
        return estimate_share(sum(map(has, self.pairs)), len(self.pairs), self.population)

    @property
    def drawn(self) -> int:
        """Images with an answer of the stage."""
        return len(self.pairs) + sum(self.run.failures.values())

    def shares(self) -> dict[str, Estimate]:
        return {
            "changed": self.share(lambda pair: pair.change.is_other),
            "changed_much": self.share(lambda pair: pair.change.amount >= LARGE),
            "other_bin": self.share(lambda pair: pair.bins[0] != pair.bins[1]),
        }

    def moves(self) -> Counter[tuple[str, str]]:
        """From which bin to which one, in the sample."""
        return Counter(pair.bins for pair in self.pairs if pair.bins[0] != pair.bins[1])

    def empty(self) -> tuple[int, int]:
        """How many images of the sample have an answer with nothing in it: before, and now."""
        changes = [pair.change for pair in self.pairs]
        return sum(each.was_empty for each in changes), sum(each.is_empty for each in changes)

    def cost(self) -> Cost:
        run = self.run
        if not run.computed or not run.seconds:
            return Cost(self.left, None, None, None)
        rate = run.computed / run.seconds
        kwh = None if run.joules is None else run.joules / run.computed * self.left / JOULES
        return Cost(self.left, rate, self.left / rate / 3600, kwh)


def compare(
    config: Config,
    stage: str,
    reader: Reader,
    sample: int,
    seed: int,
    progress: Progress,
    keep: Keep,
) -> ModelComparison:
    """config: with the new settings of the stage, which is one of its stages. keep: as of `run_stage`. Raises
    NothingFound, WrongArgument, MissingLibrary, KeyboardInterrupt, and what loading models raises."""
    records, population = _draw(reader, stage, sample, seed)
    if not records:
        raise NothingFound(
            f"No image that is DONE has an answer of {stage}, so there is nothing to compare with."
        )
    first = records[0].outputs[stage].payload
    measure_change(stage, (1, 1), first, first)  # raises before all that computing if a library is missing
    progress.load(len(records), f"loading the model of {stage}")
    run = run_stage(config, stage, records, reader, progress.begin, progress.step, keep)
    stored = Counter(model for record in records for model in record.models if model.stage == stage)
    if {model.fingerprint for model in stored} == {run.models[stage].fingerprint}:
        raise WrongArgument(
            f"The answers of {stage} in the ledger are of this model and these settings already: nothing would change. Name "
            f"another model, or other settings with --set."
        )
    judge = Judge.of(config, reader.inboxes())
    pairs = [_pair(record, stage, run, judge) for record in records if record.id in run.outputs]
    if not pairs:
        _explain_none(run)
    pairs.sort(key=lambda pair: (pair.change, pair.record.id), reverse=True)
    with LabelStore(config.state.path).lookup() as find:
        labelled = [*_hold_against_labels(pairs, stage, find)]
    left = count_left(config, reader, run.models[stage], population)
    others = _count_others(records, stage, run)
    return ModelComparison(stage, population, pairs, stored, others, labelled, left, run)


def _draw(reader: Reader, stage: str, sample: int, seed: int) -> tuple[list[Record], int]:
    """Images with an answer of the stage, and about how many there are."""
    found: list[Record] = []
    last, drawn = reader.last_number(), draw(reader, seed)
    while chunk := dict(itertools.islice(drawn, CHUNK)):
        for record in find_records(reader, chunk):
            if stage in record.outputs and not record.damage:
                found.append(record)
            if len(found) == sample or chunk[record.id] > MOST_LOOKED:
                return found, max(len(found), round(last * len(found) / chunk[record.id]))
    return found, len(found)


def _explain_none(run: SampleRun) -> NoReturn:
    """Raises NothingFound, KeyboardInterrupt."""
    if run.stop:
        raise KeyboardInterrupt
    why = ", ".join(run.failures)
    raise NothingFound(f"None of {run.failures.total()} images could be compared: {why}.")


def _count_others(records: Iterable[Record], stage: str, run: SampleRun) -> Counter[str]:
    """By other stage, how many of its answers are of another model than it has now."""
    used = (model for record in records for model in record.models if model.stage != stage)
    return Counter(
        model.stage for model in used if run.models.get(model.stage, model).fingerprint != model.fingerprint
    )


def count_left(config: Config, reader: Reader, model: Model, population: int) -> int:
    """About how many contents a redo computes: if results are reused, those with an answer of the stage of this model, but none
    of the model itself. Of a large ledger some contents are looked at, as all of ten million would take seconds of CPU."""
    if not config.pipeline.reuse_results:
        return population
    with reader.lend() as connection:
        [last] = connection.execute(SQL["last_content"]).fetchone()
        drawn = sorted(random.Random(0).sample(range(1, last + 1), min(last, MOST_COUNTED)))
        asked = {
            "contents": msgspec.json.encode(drawn).decode(),
            "stage": model.stage,
            "fingerprint": model.fingerprint,
        }
        [left] = connection.execute(SQL["count_left"], asked).fetchone()
    return int(min(population, round(left / max(1, len(drawn)) * last)))


def _pair(record: Record, stage: str, run: SampleRun, judge: Judge) -> Pair:
    """Raises MissingLibrary."""
    before, output = record.outputs[stage].payload, run.outputs[record.id]
    change = measure_change(stage, (record.width, record.height), before, output.payload)
    now = attempt_of(record)
    then = attempt_of(record)
    then.content = then.content.with_outputs(record.outputs | {stage: output})
    first, second = (ending.bin for ending in judge.endings([now, then]))
    return Pair(record, before, output.payload, change, (first, second))


def _hold_against_labels(pairs: Sequence[Pair], stage: str, find: LookUp) -> Iterator[float]:
    """Of each image with labels that say what the stage says, how much farther from them the new answer is."""
    for pair in pairs:
        for kind, label in find(pair.record.digest).items():
            if stage in (said := by_stage(kind, label.value)):
                size, given = (pair.record.width, pair.record.height), label._replace(value=said[stage])
                before, after = (measure_error(kind, size, given, each) for each in (pair.before, pair.after))
                yield after - before
