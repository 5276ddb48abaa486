"""The tables that sinks follow: which published records a sink does not have yet,
and the place of each sink among them.

A record enters the outbox in the transaction that marks its image as published.
It leaves when every sink has it.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from daemon.ledger.statements import SQL, run_rows


class Place(NamedTuple):
    """How far a sink has come."""

    sequence: int  # of the last record that it has
    succeeded_at: float | None = None  # Unix seconds


class Opened(NamedTuple):
    """The outbox at the start of a daemon. dropped: the sinks that are no longer configured,
    with how many records each never got."""

    last: int  # the highest sequence number so far
    places: dict[str, Place]
    dropped: dict[str, int]


def follow(connection: sqlite3.Connection, names: Collection[str]) -> Opened:
    """Let these sinks follow the outbox, and no others. A
    new one gets the records that are published from now on."""
    last: int = connection.execute(SQL["last_sequence"]).fetchone()[0]
    gone = connection.execute(SQL["drop_sinks"], (msgspec.json.encode(list(names)).decode(),)).fetchall()
    for name in names:
        connection.execute(SQL["add_sink"], (name, last))
    connection.execute(SQL["drop_delivered"])
    return Opened(last, read_places(connection), {name: last - place for name, place in gone})


def read_places(connection: sqlite3.Connection) -> dict[str, Place]:
    """By sink."""
    return {name: Place(*place) for name, *place in connection.execute(SQL["sinks"])}


def enqueue(connection: sqlite3.Connection, images: Sequence[int], placed: Sequence[int]) -> dict[int, int]:
    """Add the images' records; returns their images by sequence number. An image that is not placed cannot
    leave its inbox yet: its record is added now, and not again when it leaves."""
    added = dict(map(tuple, run_rows(connection, "enqueue", [(image,) for image in images])))
    if held := set(images).difference(placed):
        run_rows(connection, "note_held", [(image,) for image in held])
    return added


def move(connection: sqlite3.Connection, name: str, sequence: int) -> Place:
    """Note that a sink has all records up to this one; those that every sink has leave the outbox."""
    place = Place(sequence, time.time())
    connection.execute(SQL["move_place"], (*place, name))
    connection.execute(SQL["drop_delivered"])
    return place
