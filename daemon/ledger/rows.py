"""Converts jobs, records and endings to rows of the ledger's tables, and rows to jobs."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from daemon.jobs import Ending, File, Job, JobStatus, Version, reason_of
from daemon.ledger import checksums
from daemon.ledger.record import Model, Record
from daemon.messages import Output
from stages.base import Reason

Root = Path | bytes  # of an inbox: the absolute path of its folder, or its URL


def content_row(known: Job | Record) -> tuple[Any, ...]:
    """A row for `keep_content`."""
    fields = (known.digest, known.format, known.width, known.height, known.pages)
    return (*fields, checksums.of_content(*fields))


def result_row(digest: bytes, number: int, model: Model, output: Output) -> tuple[Any, ...]:
    """A row for `keep_result`. number: the model's number in the ledger."""
    checksum = checksums.of_result(digest, model.stage, model.fingerprint, output.payload, output.seconds)
    return (digest, number, output.payload, output.seconds, checksum)


def ending_checksum(ending: Ending, inbox_path: bytes, models: Sequence[Model]) -> int | None:
    """The checksum of the record that an ending makes; only images with a sidecar or a reason have one."""
    job = ending.job
    image = checksums.Image(
        job.id, inbox_path, job.path, job.version.size, job.seen_at, ending.at, job.digest
    )
    if ending.status is JobStatus.DONE:
        return checksums.of_done(image, models, ending.bin, ending.criteria or b"{}")
    if ending.status is JobStatus.FAILED:
        reason, detail = reason_of(ending.failure)
        return checksums.of_failed(image, reason or "", detail or "", ending.attempts)
    return None


def look_rows(record: Record, numbers: Mapping[Model, int]) -> list[tuple[Any, ...]]:
    """Rows for `restore_look`. numbers: of the models in the ledger."""
    return [
        (
            *(record.id, name, None, 1, numbers[look.model], look.reason or None, look.detail or None),
            checksums.of_look(record.id, name, look.model, look.reason, look.detail),
        )
        for name, look in record.looks.items()
    ]


def end_row(
    ending: Ending, inbox_path: bytes, models: Mapping[int, Model], numbers: Mapping[str, int]
) -> tuple[Any, ...]:
    """A row for `end`. numbers: of each stage's current model."""
    job, used = ending.job, None
    if ending.status is JobStatus.DONE:
        used = msgspec.json.encode([numbers[stage] for stage in job.outputs]).decode()
    result = (job.digest or None, used, ending.bin or None, ending.criteria or None)
    made_by = [models[numbers[stage]] for stage in job.outputs]
    checksum = ending_checksum(ending, inbox_path, made_by)
    reason = reason_of(ending.failure)
    return (job.id, int(ending.status), *result, *reason, ending.at, ending.attempts, checksum)


def file_row(file: File, priority: int, now: float) -> tuple[Any, ...]:
    """A row for `admit`."""
    status, reason = (JobStatus.PENDING, None) if file.regular else (JobStatus.SKIPPED, Reason.NOT_REGULAR)
    return (file.inbox, file.path, *file.version, priority, int(status), now, reason, 0, 0)


def job_of(row: sqlite3.Row) -> Job:
    """A job from a row of `fresh` or `again`."""
    # Without the columns' names, which sqlite3 looks up one after another.
    id, inbox, path, location, inode, size, mtime_ns, ctime_ns, attempts, seen_at, deaths, has_result = row
    version = Version(inode, size, mtime_ns, ctime_ns)
    return Job(id, inbox, path, location or b"", version, attempts, seen_at, deaths, bool(has_result))
