"""Which PENDING images come next.

Files that are to be unpacked wait in a line of their own: their priority is that of their inbox and CONTAINERS more.
Otherwise a million documents would all be unpacked before the first of their pages is looked at.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import msgspec

from daemon.ledger.statements import SQL
from daemon.system.clock import steady_seconds

CONTAINERS = 10_000_000  # far above every priority of an inbox
LEAST_OF_CONTAINERS = CONTAINERS // 2  # a higher priority is one of a file to be unpacked
PRIORITIES = {"containers": CONTAINERS, "least": LEAST_OF_CONTAINERS}  # for statements


class Wanted(NamedTuple):
    """busy: ids in work already. inboxes: only images of these. only: only those of these ids that are due for another
    attempt; None: all. containers: those to be unpacked, or the images."""

    limit: int
    busy: Collection[int]
    inboxes: Collection[int]
    only: Collection[int] | None = None
    containers: bool = False

    def takes(self, image: int) -> bool:
        return image not in self.busy and (self.only is None or image in self.only)


class WaitingImages:
    """Remembers how far it has read in each priority, so that a million images in work are not read again and again.
    One caller of `find` at a time for images, and one for containers."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}  # priority → the last row that was found
        self._asked_of: frozenset[int] = frozenset()  # the inboxes whose rows have not been skipped
        self._rounds = 0  # how often it began again

    def add(self, priorities: Iterable[int]) -> None:
        """There may be images of these priorities from now on."""
        for priority in priorities:
            self._places.setdefault(priority, 0)

    def read_again(self) -> None:
        """Begin with the first row again: images that were found were not taken."""
        self._places = dict.fromkeys(self._places, 0)
        self._rounds += 1

    def expect(self, inboxes: Collection[int]) -> int:
        """The next `find` is for these inboxes. Call it in the event loop. Returns what `move` wants."""
        if not self._asked_of.issuperset(inboxes):
            self.read_again()
        self._asked_of = frozenset(inboxes)
        return self._rounds

    def find(self, connection: sqlite3.Connection, wanted: Wanted) -> tuple[list[Any], dict[int, int]]:
        """Rows of images that are due for another attempt, then the highest priority first, and the oldest first within
        it; and the places, for `move`. Runs in the writing thread."""
        inboxes = msgspec.json.encode(sorted(wanted.inboxes)).decode()
        most = wanted.limit + len(wanted.busy) if wanted.only is None else -1  # others may come before them
        asked = (steady_seconds(), inboxes, LEAST_OF_CONTAINERS, wanted.containers, most)
        due = connection.execute(SQL["again"], asked).fetchall()
        rows = [row for row in due if wanted.takes(row["id"])][: wanted.limit]
        places: dict[int, int] = {}
        for priority in sorted(self._places, reverse=True) if wanted.only is None else ():
            if (priority > LEAST_OF_CONTAINERS) != wanted.containers:
                continue
            place = self._places[priority]
            while (room := wanted.limit - len(rows)) and (
                found := connection.execute(SQL["fresh"], (priority, place, inboxes, room)).fetchall()
            ):
                rows += [row for row in found if wanted.takes(row["id"])]
                places[priority] = place = found[-1]["id"]
        return rows, places

    def oldest(self, connection: sqlite3.Connection) -> float | None:
        """When the image that waits longest was seen, in Unix seconds. Runs in the writing thread."""
        rows = [
            connection.execute(SQL["oldest_pending"], (priority,)).fetchone()
            for priority in list(self._places)
        ]
        return min((row[0] for row in rows if row), default=None)

    def move(self, places: dict[int, int], expected: int) -> None:
        """Go on there, unless it had to begin again meanwhile."""
        if expected == self._rounds:
            self._places |= places


def has_containers(connection: sqlite3.Connection, inboxes: Collection[int]) -> bool:
    """Whether files of these inboxes could be unpacked now. Runs in the writing thread."""
    values = {
        "least": LEAST_OF_CONTAINERS,
        "now": steady_seconds(),
        "inboxes": msgspec.json.encode(sorted(inboxes)).decode(),
    }
    return connection.execute(SQL["has_containers"], values).fetchone() is not None


def take_as_image(connection: sqlite3.Connection, number: int) -> None:
    """A file that waited to be unpacked waits as an image from now on. Runs in the writing thread."""
    connection.execute(SQL["take_as_image"], {"id": number, **PRIORITIES})
