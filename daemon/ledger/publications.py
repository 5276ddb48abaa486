"""The tables of what was published: which images, in which order, and how far each sink has come.

The transaction that marks an image as published also gives it the next number. An image that is published again, after a
redo or a second look, gets a new number, and the old one goes: who reads on from a number sees the last state of every
image that has changed since, once. So sinks, the search index and listeners keep one number each, and nothing else.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from daemon.config.output import FOLDER_SINKS
from daemon.core.jobs import JobStatus, Placed
from daemon.ledger.statements import SQL, run_rows

LOOKED_AT = 10_000  # images at once, for those that no index has
LOOK_SECONDS = 0.2
UNWRITTEN_SECONDS = 2.0  # for which an image may be DONE without a sidecar and without a word about it
# Sinks whose objects or files are named after the path of the image, or whose rows have that path and can be replaced: they
# are given renamed images again.
BY_PATH = FOLDER_SINKS | {"store"}


class SinkPlace(NamedTuple):
    """How far a sink has come."""

    number: int  # of the last record that it has
    succeeded_at: float | None = None  # Unix seconds


class Opened(NamedTuple):
    """The publications at the start of a daemon. added: the sinks that are new. dropped: those that are no longer
    configured, with how many records each never got."""

    last: int  # the highest number so far
    places: dict[str, SinkPlace]
    added: list[str]
    dropped: dict[str, int]


class Picture(NamedTuple):
    """What tells which of several images is the best one. pixels: 0 if not known."""

    number: int  # of its publication
    image: int
    pixels: int
    bytes: int


class ImagePlace(NamedTuple):
    """Where an image is. width, height: in pixels; 0 if not known."""

    image: int
    location: bytes
    width: int
    height: int
    bytes: int


class Start(NamedTuple):
    """A start of the daemon. A backup that is restored lacks the last starts, or has another one in their place."""

    id: int  # ascending
    token: str  # random
    number: int  # the highest number of a publication at that time


def open_sinks(connection: sqlite3.Connection, names: Collection[str]) -> Opened:
    """Let these sinks follow the publications, and no others. A
    new one gets the records that are published from now on."""
    last = read_last(connection)
    gone = connection.execute(SQL["drop_sinks"], (_json(names),)).fetchall()
    added = [name for name in names if connection.execute(SQL["add_sink"], (name, last)).rowcount]
    return Opened(last, read_places(connection), added, {name: last - place for name, place in gone})


def _json(names: Collection[str] | Collection[int]) -> str:
    return msgspec.json.encode(list(names)).decode()


def read_last(connection: sqlite3.Connection) -> int:
    """The highest number that was ever given."""
    last: int = connection.execute(SQL["last_publication"]).fetchone()[0]
    return last


def read_places(connection: sqlite3.Connection) -> dict[str, SinkPlace]:
    """By sink."""
    return {name: SinkPlace(*place) for name, *place in connection.execute(SQL["sinks"])}


def read_starts(connection: sqlite3.Connection, since: int) -> list[Start]:
    """The starts from the one with this id on, oldest first."""
    return [Start(*row) for row in connection.execute(SQL["starts"], (since,))]


def mark(
    connection: sqlite3.Connection, placed: Sequence[Placed], *, superseding: bool = False
) -> dict[int, int]:
    """Mark images as published, and number them; returns them by number. One that is held cannot leave its inbox yet: it
    is not marked, but numbered now, and not again when it leaves. superseding: as of `Ledger.mark_emitted`."""
    moved = [(p.id, p.location, p.version.inode, p.version.ctime_ns) for p in placed if p.version]
    run_rows(connection, "placed", moved)
    images = [(p.id,) for p in placed if not p.is_held]
    run_rows(connection, "emitted", images)
    if superseding:
        run_rows(connection, "superseded", images)
    added = dict(map(tuple, run_rows(connection, "number_publications", [(p.id,) for p in placed])))
    run_rows(connection, "note_held", [(p.id,) for p in placed if p.is_held])
    if renamed := run_rows(connection, "settle_renamed", images):
        _number_again(connection, renamed)
    return added


def _number_again(connection: sqlite3.Connection, renamed: Iterable[Sequence[int]]) -> None:
    """Images whose files were renamed get new numbers, so that the search finds their new names. Other sinks than BY_PATH
    are not given them again."""
    last = read_last(connection)
    added = run_rows(connection, "number_renamed", list({tuple(row) for row in renamed}))
    if numbers := [number for (number,) in added]:
        connection.execute(SQL["pass_over"], (max(numbers), last, _json(BY_PATH)))


def move(connection: sqlite3.Connection, name: str, number: int) -> SinkPlace:
    """Note that a sink has all records up to this number."""
    place = SinkPlace(number, time.time())
    connection.execute(SQL["move_place"], (*place, name))
    return place


def number_of(connection: sqlite3.Connection, image: int) -> int:
    """Of an image's last publication; 0 if it has none."""
    row = connection.execute(SQL["number_of"], (image,)).fetchone()
    return row[0] if row else 0


def count_unwritten(connection: sqlite3.Connection, image: int = 0) -> int:
    """How many images, or whether this one, are DONE and have waited for their sidecars for longer than usual."""
    wanted = {"before": time.time() - UNWRITTEN_SECONDS, "image": image}
    count: int = connection.execute(SQL["count_unwritten"], wanted).fetchone()[0]
    return count


def read_shown(connection: sqlite3.Connection, numbers: Sequence[int]) -> dict[int, int]:
    """By number, the images that are still as this publication had them, and are not replaced by a newer version."""
    return dict(map(tuple, run_rows(connection, "shown", [(number,) for number in numbers])))


def read_shown_images(connection: sqlite3.Connection, images: Sequence[int]) -> dict[int, int]:
    """Those of these images that are shown, with the numbers of their publications."""
    return dict(map(tuple, run_rows(connection, "shown_images", [(image,) for image in images])))


def read_shown_before(connection: sqlite3.Connection, number: int, limit: int) -> dict[int, int]:
    """The same for the last publications before a number, newest first."""
    return dict(map(tuple, connection.execute(SQL["shown_before"], (number, limit)).fetchall()))


def read_shown_after(connection: sqlite3.Connection, number: int, limit: int) -> dict[int, int]:
    """The same for the first publications after a number, oldest first."""
    return dict(map(tuple, connection.execute(SQL["shown_after"], (number, limit)).fetchall()))


def read_pictures(connection: sqlite3.Connection, last: int, bins: Collection[str] = ()) -> Iterator[Picture]:
    """The images that are DONE, or wait for a new result, and shown, as of publications up to `last`, oldest first. bins:
    only images of these."""
    asked = {"last": last, "bins": _json(bins), "limit": LOOKED_AT, "after": 0}
    while rows := connection.execute(SQL["pictures"], asked).fetchall():
        yield from map(Picture._make, rows)
        asked["after"] = rows[-1][0]


def find_places(connection: sqlite3.Connection, images: Sequence[int]) -> dict[int, ImagePlace]:
    """By number, those images that are there."""
    rows = run_rows(connection, "places", [(image,) for image in images])
    return {
        number: ImagePlace(number, location or os.path.join(inbox, path), width or 0, height or 0, size)
        for number, inbox, path, location, width, height, size in rows
    }


def count_reasons(connection: sqlite3.Connection, numbers: Sequence[int]) -> Counter[str]:
    """How many of these are shown and FAILED, by reason."""
    counts: Counter[str] = Counter()
    for reason, images in run_rows(connection, "reasons", [(number,) for number in numbers]):
        counts[reason] += images
    return counts


def read_unpublished(
    connection: sqlite3.Connection,
    status: JobStatus,
    before: int,
    limit: int,
    *,
    words: Collection[str] = (),
    inboxes: Collection[str] = (),
    seconds: float = LOOK_SECONDS,
) -> tuple[list[int], int]:
    """Files whose newest version is PENDING or SKIPPED, newest first, and the number before which to look for more; 0: there
    are no more. before: a number of an image. words: parts of the path, all of them; of other letters than A to Z the case
    counts. The search stops after some time, even if it has found none: a ledger may have millions of other images."""
    found: list[int] = []
    ends = time.monotonic() + seconds
    before = min(before, connection.execute(SQL["last_number"]).fetchone()[0] + 1)
    asked = {
        "status": status,
        "words": _json([word.lower() for word in words]),
        "inboxes": _json(inboxes) if inboxes else None,
    }
    while before > 1 and len(found) < limit:
        bounds = {"first": before - LOOKED_AT, "before": before, "limit": limit - len(found)}
        ids = [row[0] for row in connection.execute(SQL["unpublished"], asked | bounds)]
        found += ids
        before = ids[-1] if len(found) == limit else max(1, before - LOOKED_AT)
        if time.monotonic() > ends:
            break
    return found, before if before > 1 else 0
