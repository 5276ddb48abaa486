"""Tries what a configuration names, for `visiond check` and `visiond models make`: each stage on test images, and the
user's rules on one image, before they fail on thousands.

Stages are built in a child process (daemon/workers/tryout.py), so that this one needs no torch, and a crash is one
more finding.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

import msgspec

from daemon.config.loading import Config
from daemon.config.second_look import SecondLook
from daemon.core.errors import VisiondError
from daemon.core.jobs import Attempt, Content, Job, JobStatus, Version
from daemon.core.messages import Output
from daemon.layout.layout import Layout
from daemon.layout.placement import Segment
from daemon.ledger.records import open_reader
from daemon.maintenance.redo import attempt_of
from daemon.models.labels import Labels, find_labels, invent_answers, watch_scores
from daemon.results.judge import describe, explain, place_in_rule
from daemon.workers.tryout import IMAGES, TrialRequest, Tryout, note
from stages.contract import processes
from stages.contract.binning import Rule, apply_rule, judge, load_rule

COMMAND = processes.python("-m", "daemon.workers.tryout")
CHUNK = 1 << 16
DEATH_SECONDS = 10.0


def try_stages(layout: Layout) -> Iterator[Tryout]:
    """Try every stage in turn, on the first device that holds it."""
    known: list[dict[str, bytes]] = [{} for _ in range(IMAGES)]
    for segment in layout.placement.segments:
        stages = list(segment.stages)
        while stages:  # after a stage that ended its process, a new one tries the others
            for tryout in _try_segment(layout, Segment(tuple(stages), segment.devices), known):
                stages.remove(tryout.stage)
                note(tryout, known)
                yield tryout


def _try_segment(layout: Layout, segment: Segment, known: list[dict[str, bytes]]) -> Iterator[Tryout]:
    """Try these stages in one child. If the child dies, the last tryout is of the stage that it died of."""
    setup, environment = layout.set_up(segment, 0, 0)
    settings = layout.config.pipeline
    patience = settings.load_timeout_seconds + settings.batch_timeout_seconds
    waiting, device = list(segment.stages), segment.devices[0]
    with tempfile.TemporaryDirectory() as kernels, tempfile.TemporaryFile() as log:
        try:
            child = _start(TrialRequest(setup, known), environment | {"TRITON_CACHE_DIR": kernels}, log)
        except OSError as error:
            yield Tryout(
                waiting[0], device, problem=f"no process can be started to try it: {error.strerror}."
            )
            return
        try:
            for line in _lines(child, patience):
                tryout = msgspec.json.decode(line, type=Tryout)
                waiting.remove(tryout.stage)
                yield msgspec.structs.replace(tryout, device=device)
            if waiting:
                yield Tryout(waiting[0], device, problem=_describe_end(child, log))
        except (TimeoutError, subprocess.TimeoutExpired):
            if waiting:
                yield Tryout(
                    waiting[0], device, problem=f"building and trying it took longer than {patience:g} s."
                )
        finally:
            child.kill()
            # A child that hangs in the kernel, as on a broken GPU, cannot be reaped.
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(DEATH_SECONDS)
            assert child.stdout
            child.stdout.close()


def _start(order: TrialRequest, environment: dict[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    with tempfile.TemporaryFile() as file:  # a pipe is full after 64 KiB, and nobody reads yet
        file.write(msgspec.msgpack.encode(order))
        file.seek(0)
        return subprocess.Popen(
            [*COMMAND, str(os.getpid())],
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=log,
            env=processes.environment(environment),
        )


def _lines(child: subprocess.Popen[bytes], patience_seconds: float) -> Iterator[bytes]:
    """The child's lines, until it ends. Raises TimeoutError when one takes longer than patience_seconds."""
    assert child.stdout
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        rest, deadline = b"", time.monotonic() + patience_seconds
        while True:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            data = os.read(child.stdout.fileno(), CHUNK)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            if lines:
                yield from lines
                deadline = time.monotonic() + patience_seconds


def _describe_end(child: subprocess.Popen[bytes], log: IO[bytes]) -> str:
    status = child.wait(DEATH_SECONDS)
    how = processes.describe_end(status, "was killed by", "ended with status")
    log.seek(0)
    printed = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    last = f": {printed[-1].strip()}" if printed and status >= 0 else ""
    return f"its test process {how}{last}."


class RuleFailed(Exception):
    """The rule cannot be used, for the reason given."""


def try_rule(config: Config) -> str:
    """Try the rule on the newest image that is DONE, else on a sample. Returns which bin it chose.
    Raises RuleFailed."""
    reference, key = config.binning.rules, "[binning] rules"
    chosen, name = _try(config, reference, key, f'{key} = "{reference}"', apply_rule)
    return f"binning rule {reference} puts {name} into bin {chosen}."


def try_choice(config: Config, look: SecondLook) -> str:
    """Try the function of a second look in the same way. Raises RuleFailed."""
    table = f"[[second_look]] {look.name}"
    where = f'{table}: when = "{look.when}"'
    chosen, name = _try(
        config, look.function, f"{table}: when", where, lambda rule, record: bool(rule(record))
    )
    return f"second look {look.name}: {look.when} {'chooses' if chosen else 'does not choose'} {name}."


def _try(
    config: Config, reference: str, key: str, where: str, use: Callable[[Rule, dict[str, Any]], object]
) -> tuple[object, str]:
    """What a user's function answers, and the name of the image. key, where: name it in errors. Raises RuleFailed."""
    try:
        rule = load_rule(reference, key)
    except ValueError as error:
        raise RuleFailed(str(error)) from error
    labels = find_labels(config)
    attempt, inbox, name = _find_image(config, labels)
    record = describe(
        attempt.job, attempt.content, judge(attempt.content.payloads, config.binning.thresholds()), inbox
    )
    watched = watch_scores(record, labels)
    try:
        chosen = use(rule, record)
    except Exception as error:
        place = place_in_rule(error, __file__) or _definition_of(rule)
        why = (
            next(filter(None, (scores.problem for scores in watched)), "")
            or f"{explain(error, record, place)}."
        )
        raise RuleFailed(f"{where} fails on {name}: {why}") from error
    for problem in filter(None, (scores.problem for scores in watched)):
        raise RuleFailed(f"{where} is wrong: {problem}")
    return chosen, name


def _find_image(config: Config, labels: Mapping[str, Labels]) -> tuple[Attempt, bytes, str]:
    """An image with results of all stages, the folder of its inbox, and a name for messages. labels: of the classifiers,
    for a sample."""
    try:
        with open_reader(config) as reader:
            for record in reader.newest(JobStatus.DONE, 1):
                if record.outputs.keys() >= {*config.stage_names}:
                    return (
                        attempt_of(record),
                        record.inbox_path,
                        f"image {record.id} (the newest that is DONE)",
                    )
    except VisiondError:  # another finding reports it
        pass
    answers = invent_answers(config.stage_names, labels)
    outputs = {stage: Output(msgspec.json.encode(each), 0.1) for stage, each in answers.items()}
    job = Job(1, 1, b"sample.jpg", b"sample.jpg", Version(0, 1, 0, 0), 0, time.time())
    sample = Attempt(job, Content(format="JPEG", width=640, height=480, outputs=outputs))
    return sample, str(config.inbox[0].path).encode(errors="surrogateescape"), "a sample record"


def _definition_of(rule: Rule) -> str:
    """The rule's file and line."""
    code = getattr(inspect.unwrap(rule), "__code__", None)
    return f"{code.co_filename}, line {code.co_firstlineno}" if code else ""
