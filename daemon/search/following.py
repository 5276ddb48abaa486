"""The stream of what is published, for programs that go on at a number."""

from __future__ import annotations

import msgspec

from daemon.ledger import publications
from daemon.ledger.records import Reader
from daemon.results.webhook import describe
from daemon.search.index import check_ledger

GROUP = 256  # images read at once


def read_last(reader: Reader) -> int:
    """The number of the last publication. Raises SearchUnusable if the ledger is too old to have numbers."""
    check_ledger(reader)
    with reader.lend() as ledger:
        return publications.read_last(ledger)


def encode_events(reader: Reader, after: int, *, full: bool = False) -> tuple[list[tuple[int, bytes]], int]:
    """The next images as JSON, with their numbers, and the number to go on at. full: all that their sidecars have.
    Images whose data is damaged are left out: they are processed again, and come then."""
    check_ledger(reader)
    found, following = reader.published_after(after, GROUP)
    events = [
        (number, msgspec.json.encode({"number": number} | (record.document() if full else describe(record))))
        for number, record in found.items()
        if not record.damage
    ]
    return events, following
