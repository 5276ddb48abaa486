"""The table of second looks: which images wait for one, and how each look ended.

An image stays DONE all the time. It waits for a look from the transaction that ends it; the transaction that
ends the look stores its result and marks the image as not published, so that its sidecar is written again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from daemon.jobs import Ending, Job, JobStatus, Version, reason_of
from daemon.ledger import checksums
from daemon.ledger.record import Model
from daemon.ledger.rows import result_row
from daemon.ledger.statements import SQL, run_rows
from daemon.ledger.stored import Key, read_stored
from daemon.system.clock import steady_seconds

PAUSE_SECONDS = 1.0  # until a look is tried whose image cannot be read or published yet


class Tally(NamedTuple):
    """Images of one look."""

    waiting: int
    done: int
    failed: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """Looks that may be taken. some_left: others that are due were passed over, so more may follow at once."""

    jobs: list[Job]
    some_left: bool


def want(connection: sqlite3.Connection, endings: Sequence[Ending], ended: Collection[int]) -> None:
    """Note which looks these images get. A redo asks for all of its image's looks again."""
    done = [e for e in endings if e.job.id in ended and (e.looks or e.job.has_result)]
    run_rows(connection, "drop_looks", [(e.job.id,) for e in done if e.job.has_result and not e.keeps_result])
    wanted = [(e.job.id, name, 0) for e in done for name in e.looks]
    run_rows(connection, "want_look", wanted)


def take(
    connection: sqlite3.Connection, name: str, limit: int, busy: Collection[int], inboxes: Collection[int]
) -> Waiting:
    """The looks of this name that have waited longest, as jobs. busy: images in work already.
    inboxes: the numbers of those that can be read."""
    now = steady_seconds()
    rows = connection.execute(SQL["next_looks"], (name, now, limit + len(busy))).fetchall()
    free = [row for row in rows if row["id"] not in busy]
    # A new result of the image, or a newer version of its file, asks for its own looks.
    stale = [row for row in free if row["status"] != JobStatus.DONE or not row["is_newest"]]
    connection.executemany(SQL["drop_look"], [(row["id"], name) for row in stale])
    current = [row for row in free if row["status"] == JobStatus.DONE and row["is_newest"]]
    ready = [row for row in current if row["emitted"] and row["inbox"] in inboxes]
    later = [
        (row["look_attempts"], now + PAUSE_SECONDS, None, row["id"], name)
        for row in current
        if not row["emitted"] or row["inbox"] not in inboxes
    ]
    connection.executemany(SQL["postpone_look"], later)
    return Waiting([_job_of(row) for row in ready[:limit]], len(rows) == limit + len(busy))


def is_wanted(connection: sqlite3.Connection, name: str, inboxes: Collection[int]) -> bool:
    """Whether a published image of these inboxes waits for the look."""
    known = msgspec.json.encode(sorted(inboxes)).decode()
    return connection.execute(SQL["is_look_wanted"], (name, known)).fetchone() is not None


def _job_of(row: sqlite3.Row) -> Job:
    version = Version(row["inode"], row["size"], row["mtime_ns"], row["ctime_ns"])
    return Job(
        row["id"],
        row["inbox"],
        row["path"],
        row["location"] or b"",
        version,
        row["look_attempts"],
        row["seen_at"],
        row["look_deaths"],
        has_result=True,
    )


def recall(
    connection: sqlite3.Connection, jobs: Sequence[Job], models: Mapping[int, Model], number: int
) -> set[Key]:
    """Give each job what is known about its bytes: the results of the other stages by the models that its image
    has, and the look's own result if the model of this number has made it before. A job whose bytes are not
    those of its image is `gone`. Returns the damaged rows, which were not used."""
    rows = {row["id"]: row for row in run_rows(connection, "images", [(job.id,) for job in jobs])}
    stored = read_stored(connection, {job.digest for job in jobs}, models)
    for job in jobs:
        row = rows[job.id]
        if job.digest != row["digest"] or row["models"] is None:
            job.gone = True
            continue
        if job.digest in stored.contents:
            job.format, job.width, job.height, job.pages = stored.contents[job.digest]
        known = stored.results.get(job.digest, {})
        used = [model for model in msgspec.json.decode(row["models"]) if model in known]
        stage = models[number].stage
        job.outputs = {models[model].stage: known[model] for model in used if models[model].stage != stage}
        if number in known:
            job.outputs[stage] = known[number]
    return stored.damaged


def end(
    connection: sqlite3.Connection,
    name: str,
    endings: Sequence[Ending],
    models: Mapping[int, Model],
    number: int,
    damaged: Collection[Key],
) -> set[int]:
    """Write how looks ended. Returns the images whose sidecars must be written again; they are marked as not
    published. number: of the look's model. damaged: rows of `result` that a new result replaces."""
    model = models[number]
    gone = [(e.job.id, name) for e in endings if e.status is JobStatus.GONE]
    connection.executemany(SQL["drop_look"], gone)
    later = [
        (e.attempts, e.not_before, reason_of(e.failure)[1], e.job.id, name)
        for e in endings
        if e.status is JobStatus.PENDING
    ]
    connection.executemany(SQL["postpone_look"], later)
    done = [e for e in endings if e.status is JobStatus.DONE]
    outputs = {e.job.digest: e.job.outputs[model.stage] for e in done}
    replaced = [key for key in damaged if key.model == number and key.digest in outputs]
    connection.executemany(SQL["drop_result"], replaced)
    rows = [result_row(digest, number, model, output) for digest, output in outputs.items()]
    run_rows(connection, "keep_result", rows)
    ended: list[int] = []
    for e in endings:
        if e.status in (JobStatus.DONE, JobStatus.FAILED):
            reason, detail = reason_of(e.failure)
            checksum = checksums.of_look(e.job.id, name, model, reason or "", detail or "")
            row = (e.attempts, number, reason, detail, checksum, e.job.id, name)
            ended += [found[0] for found in connection.execute(SQL["end_look"], row).fetchall()]
    return {row[0] for row in run_rows(connection, "publish_again", [(image,) for image in ended])}


class Ended(NamedTuple):
    """A row of a look that has ended."""

    model: int
    reason: str
    detail: str
    checksum: int | None


def read_ended(connection: sqlite3.Connection, images: Iterable[int]) -> dict[int, dict[str, Ended]]:
    """By image and name, the looks that have ended."""
    found: dict[int, dict[str, Ended]] = {}
    for image, name, model, reason, detail, checksum in run_rows(
        connection, "ended_looks", [(image,) for image in images]
    ):
        found.setdefault(image, {})[name] = Ended(model, reason or "", detail or "", checksum)
    return found


def count(connection: sqlite3.Connection) -> dict[str, Tally]:
    """By name."""
    return {row[0]: Tally(*tuple(row)[1:]) for row in connection.execute(SQL["count_looks"])}
