"""The table of second looks: which images wait for one, and how each look ended.

An image stays DONE all the time. The transaction that ends an image also asks for its looks. The transaction that
ends a look stores its result and marks the image as not published, so that its sidecar is written again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

import msgspec

from daemon.core.jobs import Content, Ending, Job, JobStatus, Version, reason_of
from daemon.ledger import checksums
from daemon.ledger.record import Model
from daemon.ledger.rows import Key, postponed_row, read_stored, result_row
from daemon.ledger.statements import SQL, run_rows
from daemon.system.clock import steady_seconds

ASIDE = 1e15  # Unix seconds: looks of an inbox that is not configured are due then


class Tally(NamedTuple):
    """Images of one look."""

    waiting: int
    done: int
    failed: int


@dataclass(frozen=True, slots=True)
class WaitingLooks:
    """Looks that may be taken. some_left: more may be due; ask again at once."""

    jobs: list[Job]
    some_left: bool


def want(
    connection: sqlite3.Connection, endings: Sequence[Ending], ended: Collection[int], names: Collection[str]
) -> None:
    """Note which looks these images get. A redo asks for its image's looks again; those of other names keep their
    answers. names: of the configured looks."""
    done = [e for e in endings if e.job.id in ended and not e.keeps_result]
    for name in names:
        rows = [(e.job.id, name) for e in done if e.job.has_result and name not in e.looks]
        connection.executemany(SQL["drop_look"], rows)
    run_rows(connection, "want_look", [(e.job.id, name, 0) for e in done for name in e.looks])


def begin(connection: sqlite3.Connection, names: Collection[str], inboxes: Collection[int]) -> int:
    """At a start: delete the waiting looks that are no longer configured, and set aside those of inboxes that are
    not, until they are again. Returns how many were deleted."""
    known = {"names": _json(names), "inboxes": _json(inboxes), "aside": ASIDE}
    dropped = connection.execute(SQL["drop_unknown_looks"], known).rowcount
    connection.execute(SQL["take_up_looks"], known)
    connection.execute(SQL["set_looks_aside"], known)
    return dropped


def _json(values: Collection[object]) -> str:
    return msgspec.json.encode(list(values)).decode()


def take(
    connection: sqlite3.Connection,
    name: str,
    limit: int,
    busy: Collection[int],
    inboxes: Collection[int],
    only: Collection[int] | None = None,
) -> WaitingLooks:
    """The looks of this name that have waited longest, as jobs. busy: images in work already.
    inboxes: the numbers of those that can be read. only: images that may be taken."""
    now, most = steady_seconds(), limit + len(busy)
    asked = (name, now, _json(inboxes), *([None] * 2 if only is None else [_json(only)] * 2), most)
    rows = connection.execute(SQL["next_looks"], asked).fetchall()
    by_fate: dict[Fate, list[sqlite3.Row]] = {fate: [] for fate in Fate}
    for row in rows:
        if row["id"] not in busy:
            by_fate[_fate(row)].append(row)
    connection.executemany(SQL["drop_look"], [(row["id"], name) for row in by_fate[Fate.DROP]])
    for fate, pause in PAUSES.items():
        later = [(row["look_attempts"], now + pause, None, row["id"], name) for row in by_fate[fate]]
        connection.executemany(SQL["postpone_look"], later)
    return WaitingLooks([_job_of(row) for row in by_fate[Fate.READY][:limit]], len(rows) == most)


class Fate(Enum):
    """What becomes of a look that is due."""

    READY = auto()
    DROP = auto()  # a newer version of the file asks for its own looks
    SOON = auto()  # the image is being published
    LATER = auto()  # it waits for a new result, or its source cannot leave the inbox


PAUSES = {Fate.SOON: 1.0, Fate.LATER: 60.0}  # seconds until it is tried again


def _fate(row: sqlite3.Row) -> Fate:
    status = row["status"]
    if not row["is_newest"] or status not in (JobStatus.DONE, JobStatus.PENDING):
        return Fate.DROP
    if status == JobStatus.DONE and row["emitted"]:
        return Fate.READY
    is_held = row["not_before"] == row["finished_at"]
    return Fate.LATER if status == JobStatus.PENDING or is_held else Fate.SOON


def is_wanted(
    connection: sqlite3.Connection, name: str, inboxes: Collection[int], only: Collection[int] | None = None
) -> bool:
    """Whether a published image of these inboxes waits for the look. only: images that count."""
    asked = (name, _json(inboxes), *([None] * 2 if only is None else [_json(only)] * 2))
    return connection.execute(SQL["is_look_wanted"], asked).fetchone() is not None


def _job_of(row: sqlite3.Row) -> Job:
    version = Version(row["inode"], row["size"], row["mtime_ns"], row["ctime_ns"])
    origin = (row["id"], row["inbox"], row["path"], row["location"] or b"", version)
    return Job(*origin, row["look_attempts"], row["seen_at"], row["look_deaths"], has_result=True)


def recall(
    connection: sqlite3.Connection,
    read: Sequence[tuple[int, bytes]],
    models: Mapping[int, Model],
    number: int,
    *,
    reuse: bool = True,
) -> tuple[dict[int, Content], set[Key]]:
    """What is known about the bytes of these images, by image: the results of the other stages by the models that it
    has, and, with `reuse`, the look's own result if the model of this number has made it before. An image whose bytes are
    other ones now is left out: it is gone. read: images, and the digests of their files. Also returns the damaged rows,
    which were not used."""
    rows = run_rows(connection, "images", [(image,) for image, _ in read])
    made_by = {(row["id"], row["digest"]): row["models"] for row in rows}
    stored = read_stored(connection, {digest for _, digest in read}, models)
    contents = {}
    for image, digest in read:
        if (used := made_by.get((image, digest))) is None:  # other bytes, or pruned meanwhile
            continue
        known, stage = stored.results.get(digest, {}), models[number].stage
        numbers = msgspec.json.decode(used)
        outputs = {models[each].stage: known[each] for each in numbers if each in known}
        outputs.pop(stage, None)
        if reuse and number in known:
            outputs[stage] = known[number]
        contents[image] = Content(digest, *stored.contents.get(digest, ("", 0, 0, 1)), outputs)
    return contents, stored.damaged


def end(
    connection: sqlite3.Connection,
    name: str,
    endings: Sequence[Ending],
    models: Mapping[int, Model],
    number: int,
    damaged: Collection[Key],
) -> set[int]:
    """Write how looks ended. Returns the images whose sidecars must be written again; they are marked as not published. The
    look of an image that a newer version has replaced, or that waits for a new result, is not ended: it will be dropped, or
    asked for again. number: of the look's model. damaged: rows of `result` that a new result replaces."""
    model = models[number]
    gone = [(e.job.id, name, e.job.path) for e in endings if e.status is JobStatus.GONE]
    connection.executemany(SQL["drop_gone_look"], gone)
    later = [(*postponed_row(e), name) for e in endings if e.status is JobStatus.PENDING]
    connection.executemany(SQL["postpone_look"], later)
    _store_answers(connection, endings, model, number, damaged)
    final = {e.job.id: e for e in endings if e.status in (JobStatus.DONE, JobStatus.FAILED)}
    ended: list[sqlite3.Row] = []
    for (image,) in run_rows(connection, "publishable", [(image,) for image in final]):
        ending = final[image]
        reason, detail = reason_of(ending.failure)
        checksum = checksums.of_look(image, name, model, reason or "", detail or "")
        row = (ending.attempts, number, reason, detail, checksum, image, name)
        ended += connection.execute(SQL["end_look"], row).fetchall()
    run_rows(connection, "publish_again", ended)
    return {image for (image,) in ended}


def _store_answers(
    connection: sqlite3.Connection,
    endings: Sequence[Ending],
    model: Model,
    number: int,
    damaged: Collection[Key],
) -> None:
    """number, damaged: as of `end`."""
    done = [e for e in endings if e.status is JobStatus.DONE]
    outputs = {e.content.digest: e.content.outputs[model.stage] for e in done}
    replaced = [key for key in damaged if key.model == number and key.digest in outputs]
    connection.executemany(SQL["drop_result"], replaced)
    rows = [result_row(digest, number, model, output) for digest, output in outputs.items()]
    run_rows(connection, "keep_result", rows)


class EndedLook(NamedTuple):
    """A row of a look that has ended."""

    model: int
    reason: str
    detail: str
    checksum: int | None


def read_ended(connection: sqlite3.Connection, images: Iterable[int]) -> dict[int, dict[str, EndedLook]]:
    """By image and name, the looks that have ended."""
    found: dict[int, dict[str, EndedLook]] = {}
    for image, name, model, reason, detail, checksum in run_rows(
        connection, "ended_looks", [(image,) for image in images]
    ):
        found.setdefault(image, {})[name] = EndedLook(model, reason or "", detail or "", checksum)
    return found


def count(connection: sqlite3.Connection, name: str) -> Tally:
    """How many images wait for the look of this name, or have had it. Reads the whole table."""
    return Tally(*connection.execute(SQL["count_looks"], (name,)).fetchone())


def names(connection: sqlite3.Connection) -> list[str]:
    """Of all looks that the ledger knows."""
    return [row[0] for row in connection.execute(SQL["look_names"])]
