"""How a job ends: its bin when it has its results, another try or FAILED when it has not. Policy only, no I/O."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from daemon.jobs import Ending, Failure, Job, JobStatus
from stages.base import Reason
from stages.binning import Rule, Thresholds, apply_rule, is_decided, judge

# A file with such a name claims to be an image: FAILED when it is none. Any other is only SKIPPED.
IMAGE_SUFFIXES = frozenset(
    suffix.encode()
    for suffix in (
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".jp2", ".jxl", ".png", ".webp", ".gif", ".tif", ".tiff", ".bmp"),
        *(".avif", ".heic", ".heif", ".ppm", ".pgm", ".pbm", ".pnm", ".psd", ".svg"),
    )
)
LONGEST_PAUSE_SECONDS = 600.0


class Judge:
    """Decides on the bin by the thresholds or the user's rule, and on another try by the number of tries so far.

    cascade: the stages there are, where those that cannot change the bin are to be skipped; empty: all run.
    """

    def __init__(
        self,
        thresholds: Thresholds,
        *,
        rule: Rule | None = None,
        cascade: Sequence[str] = (),
        max_attempts: int = 3,
        retry_seconds: float = 5.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._thresholds = thresholds
        self._rule = rule
        self._cascade = cascade
        self._max_attempts = max_attempts
        self._retry_seconds = retry_seconds
        self._clock = clock

    def is_decided(self, job: Job) -> bool:
        """Whether the remaining stages are to be skipped."""
        return bool(self._cascade and job.outputs) and is_decided(_payloads(job), self._thresholds, self._cascade)

    def endings(self, jobs: Sequence[Job]) -> list[Ending]:
        """How each of these jobs ends. Runs in a thread, as a user's rule may take its time."""
        now = self._clock()
        return [self._ending(job, now) for job in jobs]

    def _ending(self, job: Job, now: float) -> Ending:
        if job.gone:
            return Ending(job, JobStatus.GONE, now, job.attempts)
        if job.failure:
            return self._failed(job, job.failure, now)
        try:
            verdict = judge(_payloads(job), self._thresholds)
        except msgspec.DecodeError as error:
            return self._failed(job, Failure(Reason.STAGE, f"a stage's result cannot be read: {error}"), now)
        name = verdict.name
        if self._rule:
            try:
                name = apply_rule(self._rule, _document(job, verdict))
            except Exception as error:  # noqa: BLE001 - the user's code may raise anything
                return self._failed(job, Failure(Reason.RULE, f"{type(error).__name__}: {error}"), now)
        return Ending(job, JobStatus.DONE, now, job.attempts + 1, name, msgspec.json.encode(verdict.criteria))

    def _failed(self, job: Job, failure: Failure, now: float) -> Ending:
        attempts = job.attempts + 1
        if failure.transient and attempts < self._max_attempts:
            pause = min(LONGEST_PAUSE_SECONDS, self._retry_seconds * 2.0**job.attempts)
            # not_before 0 means "never tried", so a pause of nothing must not give it.
            return Ending(job, JobStatus.PENDING, now, attempts, failure=failure, not_before=now + pause)
        claims_image = os.path.splitext(job.path)[1].lower() in IMAGE_SUFFIXES
        skipped = failure.reason in (Reason.NOT_AN_IMAGE, Reason.EMPTY, Reason.BYTES) and not claims_image
        return Ending(job, JobStatus.SKIPPED if skipped else JobStatus.FAILED, now, attempts, failure=failure)


def _payloads(job: Job) -> dict[str, bytes]:
    return {stage: output.payload for stage, output in job.outputs.items()}


def _document(job: Job, verdict: Any) -> dict[str, Any]:
    """What a user's rule is shown: size, each stage's result by stage name, and the bin by the built-in rule."""
    document: dict[str, Any] = {stage: msgspec.json.decode(payload) for stage, payload in _payloads(job).items()}
    document |= {"path": os.fsdecode(job.path), "width": job.width, "height": job.height}
    document["bin"] = msgspec.to_builtins(verdict)
    return document
