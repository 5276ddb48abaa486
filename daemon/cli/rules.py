"""Tries the user's binning rule on one image, for `visiond check`, before it fails on thousands."""

from __future__ import annotations

import inspect
import time

import msgspec

from daemon.config.loading import Config
from daemon.config.second_look import SecondLook
from daemon.core.errors import VisiondError
from daemon.core.jobs import Attempt, Content, Job, JobStatus, Version
from daemon.core.messages import Output
from daemon.ledger.records import open_reader
from daemon.maintenance.redo import attempt_of
from daemon.results.judge import describe, explain, place_in_rule
from stages.contract.binning import Rule, apply_rule, judge, load_rule
from stages.registry.fake import answer

SAMPLE = (3, 640, 480)  # variant of the fake answers, and the image's width and height


class RuleFailed(Exception):
    """The rule cannot be used, for the reason given."""


def try_rule(config: Config) -> str:
    """Try the rule on the newest image that is DONE, else on a sample. Returns which bin it chose.
    Raises RuleFailed."""
    reference = config.binning.rules
    try:
        rule = load_rule(reference)
    except ValueError as error:
        raise RuleFailed(str(error)) from error
    attempt, inbox, name = _find_image(config)
    payloads = {stage: output.payload for stage, output in attempt.content.outputs.items()}
    record = describe(attempt.job, attempt.content, judge(payloads, config.binning.thresholds()), inbox)
    try:
        chosen = apply_rule(rule, record)
    except Exception as error:
        place = place_in_rule(error, __file__) or _definition_of(rule)
        raise RuleFailed(
            f'[binning] rules = "{reference}" fails on {name}: {explain(error, record, place)}.'
        ) from error
    return f"binning rule {reference} puts {name} into bin {chosen}."


def try_choice(config: Config, look: SecondLook) -> str:
    """Try the function of a second look in the same way. Raises RuleFailed."""
    where = f'[[second_look]] {look.name}: when = "{look.when}"'
    try:
        rule = load_rule(look.function, f"[[second_look]] {look.name}: when")
    except ValueError as error:
        raise RuleFailed(str(error)) from error
    attempt, inbox, name = _find_image(config)
    payloads = {stage: output.payload for stage, output in attempt.content.outputs.items()}
    record = describe(attempt.job, attempt.content, judge(payloads, config.binning.thresholds()), inbox)
    try:
        chosen = bool(rule(record))
    except Exception as error:
        place = place_in_rule(error, __file__) or _definition_of(rule)
        raise RuleFailed(f"{where} fails on {name}: {explain(error, record, place)}.") from error
    return f"second look {look.name}: {look.when} {'chooses' if chosen else 'does not choose'} {name}."


def _find_image(config: Config) -> tuple[Attempt, bytes, str]:
    """An image with results, the folder of its inbox, and a name for messages."""
    try:
        with open_reader(config) as reader:
            for record in reader.newest(JobStatus.DONE, 1):
                if record.outputs:
                    return (
                        attempt_of(record),
                        record.inbox_path,
                        f"image {record.id} (the newest that is DONE)",
                    )
    except VisiondError:  # another finding reports it
        pass
    earlier = frozenset(config.stage_names)
    outputs = {
        stage: Output(msgspec.json.encode(answer(stage, *SAMPLE, earlier)), 0.1)
        for stage in config.stage_names
    }
    job = Job(1, 1, b"sample.jpg", b"sample.jpg", Version(0, 1, 0, 0), 0, time.time())
    sample = Attempt(job, Content(format="JPEG", width=640, height=480, outputs=outputs))
    return sample, str(config.inbox[0].path).encode(errors="surrogateescape"), "a sample record"


def _definition_of(rule: Rule) -> str:
    """The rule's file and line."""
    code = getattr(inspect.unwrap(rule), "__code__", None)
    return f"{code.co_filename}, line {code.co_firstlineno}" if code else ""
