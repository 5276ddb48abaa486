"""Publishes what is durable in the ledger to files, and tries again to move sources that could not leave their inbox."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import anyio
import structlog
from anyio import to_thread

from daemon.errors import ResultsLost
from daemon.jobs import Job
from daemon.ledger.ledger import Ledger
from daemon.ledger.records import Record
from daemon.results.damage import leave_out_damaged
from daemon.results.destinations import Destination, NotSynced, Publication, publish_records, sync_folders
from daemon.results.outbox import Outbox
from daemon.system.retry import Retry

log = structlog.get_logger()

OWED = 128  # images published together
PAUSE_SECONDS = 5.0  # between attempts for held images


class Publisher:
    """Publishes one group of images at a time, in the order of the ledger."""

    def __init__(
        self,
        ledger: Ledger,
        destinations: Mapping[int, Destination],
        outbox: Outbox,
        retry: Retry,
        in_flight: Mapping[int, Job],
        put_back: Callable[[int], None] = lambda images: None,
    ) -> None:
        """put_back: called with the number of images that are PENDING again."""
        self._ledger = ledger
        self._destinations = destinations
        self._outbox = outbox
        self._retry = retry
        self._in_flight = in_flight
        self._put_back = put_back
        self._turn = anyio.Lock()  # an earlier version's sidecar is not written after a later one's
        self._held: dict[int, str] = {}  # inboxes that sources cannot leave, and why
        self._held_of_late: set[int] = set()

    def held_back(self) -> list[str]:
        return [f"an image cannot leave its inbox: {why}" for why in self._held.values()]

    async def publish(self, records: Sequence[Record]) -> Publication:
        """Publish these records; of those that are held, only the sidecars."""
        async with self._turn:
            return await self._publish(records)

    async def confirm(self, publications: Sequence[Publication]) -> None:
        """Flush them to the disk, and then mark them in the ledger. Raises ResultsLost."""
        folders = set[bytes]().union(*(publication.folders for publication in publications))
        await self._retry("results", self._sync, folders)
        placed = [placed for publication in publications for placed in publication.placed]
        records = {record.id: record for publication in publications for record in publication.records}
        mark = partial(self._ledger.mark_emitted, superseding=bool(self._held), for_sinks=list(records))
        if added := await self._retry("ledger", mark, placed):
            self._outbox.add({sequence: records[image] for sequence, image in added.items()})

    async def publish_owed(self, inboxes: set[int], *, again: bool = False) -> None:
        """Publish the images of these inboxes that have ended and are not in work. again: they are in the outbox already."""
        self._held_of_late -= inboxes
        last = 0
        while inboxes:
            async with self._turn:
                if not (records := await self._ledger.owed(last, OWED)):
                    break
                last = records[-1].id
                in_work = {(job.inbox, job.path) for job in self._in_flight.values()}  # the file, perhaps in a later version
                mine = [record for record in records if record.inbox in inboxes]
                free = [record for record in mine if (record.inbox, record.path) not in in_work]
                if len(free) < len(mine):  # the others may still be held
                    self._held_of_late |= self._held.keys() & inboxes
                sound, put_back = await self._retry("ledger", leave_out_damaged, self._ledger, free)
                if put_back:
                    self._put_back(put_back)
                publication = await self._publish(sound, again=again)
            await self.confirm([publication])
        for inbox in inboxes - self._held_of_late:
            self._held.pop(inbox, None)

    async def try_again(self) -> None:
        await self.publish_owed(set(self._held), again=True)

    async def release(self) -> None:
        """Try held images again, at intervals that leave most of the time to other images."""
        while True:
            started = time.monotonic()
            await self.try_again()
            await anyio.sleep(PAUSE_SECONDS + 10 * (time.monotonic() - started))

    async def _publish(self, records: Sequence[Record], *, again: bool = False) -> Publication:
        publication = await self._retry.in_thread("results", publish_records, records, self._destinations)
        for inbox, why in publication.held.items():
            if inbox not in self._held:
                log.error("an image cannot leave its inbox", why=why)
            self._held[inbox] = why
        self._held_of_late |= publication.held.keys()
        return replace(publication, records=[]) if again or not self._outbox.deliveries else publication

    async def _sync(self, folders: set[bytes]) -> None:
        try:
            await to_thread.run_sync(sync_folders, folders)
        except NotSynced as error:
            # The system has dropped what it could not write, so another call would not help.
            raise ResultsLost(f"{error}. What is missing is published again at the next start.") from error
