"""Decides how a job ends: its bin if it has its results, else another attempt or FAILED.
Policy only: no I/O but the log."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec
import structlog

from daemon.config.loading import Config
from daemon.config.second_look import SecondLook
from daemon.core.errors import ConfigError
from daemon.core.jobs import IMAGE_SUFFIXES, UNREAD, Attempt, Content, Ending, Failure, Job, JobStatus
from daemon.core.sidecar import KEYS, describe_source
from daemon.system.clock import steady_seconds
from stages.contract import binning
from stages.contract.base import Reason
from stages.contract.binning import Bin, Rule, Thresholds, apply_rule, is_decided, judge, load_rule

OF_OTHER_FILES = (Reason.UNPACKED, Reason.NOT_AN_IMAGE, Reason.EMPTY, Reason.BYTES)
SKIPPED = {True: (Reason.UNPACKED,), False: OF_OTHER_FILES}  # by whether the file has the name of an image
LONGEST_PAUSE_SECONDS = 600.0

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Selection:
    """Which images get a second look: those of a bin, or if that is empty, those that the function chooses."""

    name: str
    bin: str
    rule: Callable[[dict[str, Any]], object] | None = None
    share: float = 1.0

    @classmethod
    def of(cls, look: SecondLook) -> Selection:
        """Raises ValueError."""
        if look.function:
            rule = load_rule(look.function, f"[[second_look]] {look.name}: when")
            return cls(look.name, "", rule, look.share)
        return cls(look.name, look.when, share=look.share)

    def includes(self, digest: bytes) -> bool:
        """Whether these bytes are in the share."""
        return int.from_bytes(digest[:8]) < self.share * 2**64


class Judge:
    """Chooses the bin by the thresholds or the user's rule,
    and another attempt by the number of attempts so far.

    inboxes: their folders by number, for the rule. cascade: all stages, if
    those that cannot change the bin are to be skipped; empty if all run. looks: which images get a second look.
    """

    def __init__(
        self,
        thresholds: Thresholds,
        *,
        rule: Rule | None = None,
        inboxes: Mapping[int, bytes] = MappingProxyType({}),
        cascade: Sequence[str] = (),
        looks: Sequence[Selection] = (),
        max_attempts: int = 3,
        retry_seconds: float = 5.0,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = steady_seconds,
    ) -> None:
        self._thresholds = thresholds
        self._rule = rule
        self._inboxes = inboxes
        self._cascade = cascade
        self._looks = looks
        self._max_attempts = max_attempts
        self._retry_seconds = retry_seconds
        self._clock = clock
        self._steady = steady  # for the time of the next attempt
        self._logged: set[tuple[type[Exception], str]] = set()  # errors of the rule: their types and places

    @classmethod
    def of(cls, config: Config, inboxes: Mapping[int, bytes]) -> Judge:
        """inboxes: their folders by id. Raises ConfigError."""
        try:
            rule = load_rule(config.binning.rules) if config.binning.rules else None
            looks = [Selection.of(look) for look in config.second_look]
        except ValueError as error:
            raise ConfigError([str(error)]) from error
        return cls(
            config.binning.thresholds(),
            rule=rule,
            looks=looks,
            inboxes=inboxes,
            cascade=config.stage_names if config.pipeline.mode == "cascade" else (),
            max_attempts=config.pipeline.max_attempts,
            retry_seconds=config.pipeline.retry_seconds,
        )

    def is_decided(self, content: Content) -> bool:
        """Whether the remaining stages can be skipped."""
        return bool(self._cascade and content.outputs) and is_decided(
            content.payloads, self._thresholds, self._cascade
        )

    def endings(self, attempts: Sequence[Attempt]) -> list[Ending]:
        """How each of these ends. Runs in a thread, as a user's rule may be slow."""
        now = self._clock()
        return [self._ending(attempt, now) for attempt in attempts]

    def _ending(self, attempt: Attempt, now: float) -> Ending:
        job, content = attempt.job, attempt.content
        if attempt.gone:
            return Ending(job, JobStatus.GONE, now, job.attempts)
        if attempt.failure:
            return self.failed(job, attempt.failure, now, content)
        try:
            verdict = judge(content.payloads, self._thresholds)
            record = self._describe(job, content, verdict) if self._rule else {}
        except msgspec.DecodeError as error:
            failure = Failure(Reason.STAGE, f"a stage's result cannot be read: {error}")
            return self.failed(job, failure, now, content)
        name = verdict.name
        if self._rule:
            try:
                name = apply_rule(self._rule, record)
            except Exception as error:  # noqa: BLE001 - the user's code may raise anything
                return self.failed(job, Failure(Reason.RULE, self._explain(error, record)), now, content)
        looks = self._choose_looks(job, content, name, verdict) if self._looks else ()
        return Ending(
            job,
            JobStatus.DONE,
            now,
            job.attempts + 1,
            name,
            msgspec.json.encode(verdict.criteria),
            looks=looks,
            content=content,
            began_at=attempt.began_at,
        )

    def _describe(self, job: Job, content: Content, verdict: Bin) -> dict[str, Any]:
        return describe(job, content, verdict, self._inboxes.get(job.inbox, b""))

    def _choose_looks(self, job: Job, content: Content, bin_name: str, verdict: Bin) -> tuple[str, ...]:
        digest = content.digest
        chosen = [look for look in self._looks if look.includes(digest) and look.bin in ("", bin_name)]
        if not any(look.rule for look in chosen):
            return tuple(look.name for look in chosen)
        record = self._describe(job, content, verdict)
        record["bin"]["name"] = bin_name
        return tuple(look.name for look in chosen if look.rule is None or self._fits(look, record))

    def _fits(self, look: Selection, record: dict[str, Any]) -> bool:
        """Whether the user's function chooses the image. After an error the image gets no second look."""
        assert look.rule
        try:
            return bool(look.rule(record))
        except Exception as error:
            if (type(error), place := place_in_rule(error)) not in self._logged:
                self._logged.add((type(error), place))
                log.error(
                    "the rule of a second look raised an error; such images get no second look",
                    look=look.name,
                    exc_info=error,
                )
            return False

    def _explain(self, error: Exception, record: dict[str, Any]) -> str:
        """What the rule raised, and where. The traceback of each kind of error is logged once."""
        place = place_in_rule(error)
        if (type(error), place) not in self._logged:
            self._logged.add((type(error), place))
            log.error(
                "the binning rule raised an error; further errors of this kind are reported without a traceback",
                exc_info=error,
            )
        return explain(error, record, os.path.basename(place))

    def failed(self, job: Job, failure: Failure, now: float, content: Content = UNREAD) -> Ending:
        """Another attempt, or FAILED."""
        status, attempts, not_before = JobStatus.PENDING, job.attempts + 1, 0.0
        if failure.away or failure.written or failure.sought:  # without a limit
            # The longer a file has been open for writing, the longer it may take.
            pause = min(LONGEST_PAUSE_SECONDS, now - job.seen_at) if failure.written else 0.0
            not_before = self._steady() + (failure.sought or max(self._retry_seconds, pause))
            attempts = job.attempts
        elif failure.transient and attempts < self._max_attempts:
            not_before = self._steady() + pause_before(attempts, self._retry_seconds)
        else:
            named_as_image = os.path.splitext(job.path)[1].lower() in IMAGE_SUFFIXES
            status = JobStatus.SKIPPED if failure.reason in SKIPPED[named_as_image] else JobStatus.FAILED
        return Ending(job, status, now, attempts, failure=failure, not_before=not_before, content=content)


def pause_before(attempts: int, retry_seconds: float) -> float:
    """Seconds until the next attempt, after this number of attempts."""
    return min(LONGEST_PAUSE_SECONDS, retry_seconds * 2.0 ** (attempts - 1))


def explain(error: Exception, record: dict[str, Any], place: str) -> str:
    """What a rule raised, and where."""
    said = f"{type(error).__name__}: {error}" + (f" ({place})" if place else "")
    return (
        f"{said}; the record has {', '.join(sorted(map(str, record)))}"
        if isinstance(error, KeyError)
        else said
    )


def place_in_rule(error: Exception, caller: str = __file__) -> str:
    """ "/etc/visiond/rules.py, line 7": the last line in the rule's own file; empty if the error is about what the rule
    returned. caller: the file that has called the rule."""
    steps = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    outside = [step for step in steps if step[0] not in (__file__, binning.__file__, caller)]
    lines = [line for file, line in outside if file == outside[0][0]]
    return f"{outside[0][0]}, line {lines[-1]}" if lines else ""


def describe(job: Job, content: Content, verdict: Bin, inbox: bytes) -> dict[str, Any]:
    """The record that a user's rule gets: the image as in its sidecar, except for what is not known yet, with
    the bin by the built-in rule. It also has each stage's result under the stage's name, the path and the
    size."""
    document: dict[str, Any] = {"id": job.id, "source": describe_source(inbox, job, content)}
    for stage, payload in content.payloads.items():
        document[stage] = document[KEYS.get(stage, stage)] = msgspec.json.decode(payload)
    document |= {"path": os.fsdecode(job.path), "width": content.width, "height": content.height}
    document["timings"] = {stage: round(output.seconds, 6) for stage, output in content.outputs.items()}
    document["bin"] = msgspec.to_builtins(verdict)
    return document


def log_failures(endings: Sequence[Ending], roots: Mapping[int, bytes]) -> None:
    """Log why these images have no result. roots: the inboxes' folders."""
    for ending in endings:
        if (failure := ending.failure) and failure.is_logged:
            log.warning(
                "image failed" if ending.status is JobStatus.FAILED else "image not done",
                inbox=os.fsdecode(roots[ending.job.inbox]),
                path=os.fsdecode(ending.job.path),
                outcome=ending.status.name,
                reason=failure.reason.value,
                detail=failure.detail,
            )
