"""The stream of what is published, for programs that go on at a number."""

from __future__ import annotations

import os

import msgspec

from daemon.core.errors import VisiondError
from daemon.ledger import publications
from daemon.ledger.records import Reader
from daemon.search.index import check_ledger

GROUP = 256  # images read at once


def read_last(reader: Reader) -> int:
    """The number of the last publication. Raises SearchUnusable if the ledger is too old to have numbers."""
    check_ledger(reader)
    with reader.lend() as ledger:
        return publications.read_last(ledger)


class NumberUnknown(VisiondError):
    """Nobody has this number yet; the message says why that may be."""

    exit_status = os.EX_USAGE


def encode_events(reader: Reader, after: int, *, full: bool = False) -> tuple[list[tuple[int, bytes]], int]:
    """The next images as JSON, with their numbers, and the number to go on at. full: all that their sidecars have.
    Images whose data is damaged are left out: they are processed again, and come then. Raises NumberUnknown."""
    if after > (last := read_last(reader)):
        raise NumberUnknown(
            f"The last publication has the number {last}, not {after}: a backup was restored, or the ledger was made again. "
            "Begin with 0, or with the number of the last image that you know from before."
        )
    found, following = reader.published_after(after, GROUP)
    events = [
        (number, msgspec.json.encode({"number": number} | (record.document() if full else record.outline())))
        for number, record in found.items()
        if not record.damage
    ]
    return events, following
