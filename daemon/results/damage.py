"""Records that are damaged in the ledger: they are not used; their images are processed again."""

from __future__ import annotations

import os
from collections.abc import Sequence

import structlog

from daemon.ledger.ledger import Ledger
from daemon.ledger.records import Record

log = structlog.get_logger()


async def leave_out_damaged(ledger: Ledger, records: Sequence[Record]) -> tuple[list[Record], int]:
    """The sound records, and how many images are PENDING again because theirs are damaged. Raises LedgerUnusable."""
    damaged = [record for record in records if record.damage]
    if not damaged:
        return list(records), 0
    for record in damaged:
        path = os.fsdecode(os.path.join(record.inbox_path, record.path))
        log.error(
            "result damaged in the ledger; it is not published, and the image is processed again", path=path, what=record.damage
        )
    again = await ledger.annotate_again([record.id for record in damaged])
    return [record for record in records if not record.damage], again
