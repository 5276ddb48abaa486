"""Runs one stage of a configuration on images that are DONE, as the daemon would, and measures what that costs."""

from __future__ import annotations

import itertools
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

from daemon.config.loading import Config
from daemon.config.values import members_of
from daemon.core.jobs import UNREAD, Content
from daemon.core.messages import Output
from daemon.inbox.origin import origin_of
from daemon.ledger.record import Model, Record
from daemon.ledger.records import Reader
from daemon.ledger.rows import Stored, read_stored
from daemon.maintenance.keeping import AnswerKeeper, Keep
from daemon.system.gpus import list_gpus
from daemon.system.signals import noting_stop
from stages.contract.base import Reason
from stages.registry.registry import find_stage
from visiond.engine import Annotator
from visiond.engine.calls import LOOK_SECONDS

READ = 32  # files that are in memory at once, beside those in the slab
READERS = 8  # threads


@dataclass(frozen=True)
class SampleRun:
    """models: of all stages, in this configuration. outputs: by image, what the stage says. failures: why it says nothing, and
    of how many images. computed: how many answers the ledger did not have. kept: how many of these it has now, which are those
    that a redo would get too, as the answers that the stage uses are of the same models. trouble: why others could not be kept.
    seconds: that computing took, without loading. joules: that the GPUs used meanwhile; None: not known. stop: the signal that
    has ended it before all was done."""

    models: Mapping[str, Model]
    devices: list[str]
    outputs: Mapping[int, Output]
    failures: Counter[str]
    computed: int
    kept: int
    seconds: float
    joules: float | None
    trouble: Exception | None = None
    stop: signal.Signals | None = None


def run_stage(
    config: Config,
    stage: str,
    records: Sequence[Record],
    reader: Reader,
    begin: Callable[[str, int], None],
    step: Callable[[int], None],
    keep: Keep,
) -> SampleRun:
    """begin: called once the model is loaded, with what is counted from now on and how many there are; step: with how many
    are done; keep: called every few seconds with what a redo would compute
    again otherwise, also after a signal to stop, and before an error is raised. Raises what `Annotator.load` and
    `Annotator.collect` do."""
    with Annotator(_without_bins(config), only=stage) as annotator, noting_stop() as stops:
        assert annotator.layout
        models = {name: Model.of(spec) for name, spec in annotator.layout.specs.items()}
        devices = annotator.layout.only(stage).devices()
        with reader.lend() as connection:
            stored = read_stored(connection, {record.digest for record in records}, reader.models)
        outputs = _find_answers(records, stored, reader, models[stage])
        left = [record for record in records if record.id not in outputs]
        used = _find_used(stage, models)
        known = _find_earlier(stored, reader, used)
        before, started = count_joules(devices), time.monotonic()
        reuse, computed = config.pipeline.reuse_results, 0
        failures: Counter[str] = Counter()
        begin("images", len(left))
        with AnswerKeeper(models[stage], keep) as keeper:
            found = annotator.collect(_read(left, stops), known, lambda: stops)
            for done, (place, answer) in enumerate(found, 1):
                step(done)
                record = left[place]
                if why := _explain(record, stage, answer):
                    failures[why] += 1
                    continue
                outputs[record.id] = answer.outputs[stage]
                computed += 1
                if reuse and len(known.get(record.digest, UNREAD).outputs) == len(used):
                    keeper.add(record.digest, outputs[record.id])
            seconds, after = time.monotonic() - started, count_joules(devices)
    if unfinished := len(left) - computed - failures.total():
        failures["the comparison was stopped first"] = unfinished
    joules = None if before is None or after is None else after - before
    kept, trouble, stop = keeper.kept, keeper.trouble, stops[0] if stops else None
    return SampleRun(models, devices, outputs, failures, computed, kept, seconds, joules, trouble, stop)


def _find_used(stage: str, models: Mapping[str, Model]) -> list[Model]:
    """The models of the stages whose answers this one uses."""
    return [models[name] for name in find_stage(stage).uses if name in models]


def _explain(record: Record, stage: str, answer: Record) -> str:
    """Why an image has no answer, in the same words for all with the same problem; "" if it has one."""
    if not answer.reason:
        is_same = answer.digest == record.digest and stage in answer.outputs
        return "" if is_same else "the file has changed since"
    return answer.detail if answer.reason == Reason.UNREADABLE else f"{answer.reason}"


def _without_bins(config: Config) -> Config:
    """Every image gets its answer, and a user's rule does not run without the other stages."""
    pipeline = config.pipeline.model_copy(update={"mode": "full"})
    binning = config.binning.model_copy(update={"rules": ""})
    return config.model_copy(update={"pipeline": pipeline, "binning": binning, "second_look": []})


def _find_answers(
    records: Sequence[Record], stored: Stored, reader: Reader, model: Model
) -> dict[int, Output]:
    """By image, what the ledger has of this model."""
    numbers = _number(reader, [model])
    said = {record.id: stored.results.get(record.digest, {}) for record in records}
    return {image: outputs[n] for image, outputs in said.items() for n in numbers if n in outputs}


def _find_earlier(stored: Stored, reader: Reader, models: Sequence[Model]) -> dict[bytes, Content]:
    """By digest, what these stages have said, which the stage uses: of these models only."""
    numbers = _number(reader, models)
    earlier = {}
    for digest, outputs in stored.results.items():
        if digest in stored.contents:
            said = {numbers[number]: output for number, output in outputs.items() if number in numbers}
            earlier[digest] = Content(digest, *stored.contents[digest], said)
    return earlier


def _number(reader: Reader, models: Sequence[Model]) -> dict[int, str]:
    """By the numbers that the ledger has for these models, their stages."""
    wanted = {(model.stage, model.fingerprint) for model in models}
    known = reader.models.items()
    return {number: each.stage for number, each in known if (each.stage, each.fingerprint) in wanted}


def _read(records: Sequence[Record], stops: Sequence[object]) -> Iterator[tuple[bytes, bytes | OSError]]:
    """The name and the bytes of each, or why there are none. Ends early after a stop, also if a read hangs."""
    left = iter(records)
    threads = ThreadPoolExecutor(READERS)
    try:
        while chunk := list(itertools.islice(left, READ)):
            reads = [threads.submit(_read_source, record) for record in chunk]
            for record, read in zip(chunk, reads, strict=True):
                while not wait([read], LOOK_SECONDS).done:
                    if stops:
                        return
                yield record.location, read.result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def _read_source(record: Record) -> bytes | OSError:
    try:
        return origin_of(record.inbox_path).read_source(record)
    except OSError as error:
        return error


def count_joules(devices: Sequence[str]) -> float | None:
    """That these GPUs have used since their driver was loaded; None if one does not say it, or is a CPU."""
    members = {member for device in devices for member in members_of(device)}
    known = {gpu.device: gpu.sensors.joules for gpu in list_gpus() if gpu.device in members}
    figures = [known.get(member) for member in members]
    return None if None in figures else sum(figure for figure in figures if figure is not None)
