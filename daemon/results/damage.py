"""Records that are damaged in the ledger: they are not used; their images are processed again."""

from __future__ import annotations

import os
from collections.abc import Sequence

import structlog

from daemon.core.jobs import Change
from daemon.ledger.ledger import Ledger
from daemon.ledger.record import Record

log = structlog.get_logger()


async def leave_out_damaged(ledger: Ledger, records: Sequence[Record]) -> tuple[list[Record], list[Change]]:
    """The sound records, and what became of the images whose records are damaged. Raises LedgerUnusable."""
    damaged = [record for record in records if record.damage]
    if not damaged:
        return list(records), []
    for record in damaged:
        path = os.fsdecode(os.path.join(record.inbox_path, record.path))
        log.error(
            "result damaged in the ledger; it is not published, and the image is processed again",
            path=path,
            what=record.damage,
        )
    changes = await ledger.annotate_again([record.id for record in damaged])
    return [record for record in records if not record.damage], changes
