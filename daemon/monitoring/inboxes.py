"""The metrics of each inbox."""

from __future__ import annotations

import contextlib
import math
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import anyio
import prometheus_client
from anyio import to_thread
from prometheus_client import CollectorRegistry, Gauge

from daemon.core.errors import VisiondError
from daemon.core.jobs import Admitted, Ending, JobStatus, Waiting
from daemon.ledger.reading import ReaderClosed
from stages.contract.binning import BINS

COUNT_SECONDS = 0.5  # a scrape's wait for a count
LEAST_SECONDS = 1.0  # between two counts
REST = 50  # between two counts, as a multiple of what one takes
OUTCOMES = (JobStatus.DONE, JobStatus.FAILED, JobStatus.SKIPPED, JobStatus.GONE)


class Count:
    """The images that wait, counted now and then: with a million of them that takes half a second."""

    def __init__(
        self, count: Callable[[], dict[int, Waiting]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """count: by inbox; called in a thread. Raises VisiondError, sqlite3.Error."""
        self._count, self._clock = count, clock
        self._last: dict[int, Waiting] = {}
        self._again_at = 0.0  # infinite while it is being counted
        self._has_begun = False

    async def count(self) -> dict[int, Waiting]:
        """The last count; waits COUNT_SECONDS at most for a new one, when it is time for that."""
        if self._clock() >= self._again_at:
            self._again_at, self._has_begun = math.inf, False
            try:
                with anyio.move_on_after(COUNT_SECONDS):
                    await to_thread.run_sync(self._count_again, abandon_on_cancel=True)
            finally:
                if not self._has_begun:  # no thread was free
                    self._again_at = self._clock()
        return self._last

    def _count_again(self) -> None:
        self._has_begun = True
        started = self._clock()
        try:
            with contextlib.suppress(VisiondError, ReaderClosed, sqlite3.Error):  # reported elsewhere
                self._last = self._count()
        finally:
            now = self._clock()
            self._again_at = now + max(LEAST_SECONDS, REST * (now - started))


class InboxMetrics:
    """Every metric with the label `inbox`, and the names that stand in it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(prometheus_client.Counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        self._names: dict[int, str] = {}
        self.images = counter("visiond_inbox_images", "Finished images of an inbox.", ["inbox", "outcome"])
        self.bins = counter("visiond_inbox_bins", "Finished images of an inbox by bin.", ["inbox", "bin"])
        self.image_seconds = counter(
            "visiond_inbox_image_seconds",
            "Time from reading to the durable result, added up over the images that became DONE.",
            ["inbox"],
        )
        self.wait_seconds = counter(
            "visiond_inbox_wait_seconds",
            "Time from seeing to reading, added up over the images that became DONE for the first time.",
            ["inbox"],
        )
        self.first_results = counter(
            "visiond_inbox_first_results", "Images that became DONE for the first time.", ["inbox"]
        )
        self.pending = gauge("visiond_inbox_pending", "Images of an inbox that are not finished.", ["inbox"])
        self.oldest = gauge(
            "visiond_inbox_oldest_pending_seconds",
            "Age of the image of an inbox that has waited longest; 0 if none waits.",
            ["inbox"],
        )
        self.scan_seconds = gauge(
            "visiond_inbox_scan_seconds", "Duration of the last scan of an inbox.", ["inbox"]
        )
        self.scanned_at = gauge(
            "visiond_inbox_last_scan_timestamp_seconds",
            "When an inbox was last scanned; 0: not yet.",
            ["inbox"],
        )
        self.missed = counter(
            "visiond_inbox_missed", "Files of an inbox that only a later scan found.", ["inbox"]
        )
        self.unread_folders = gauge(
            "visiond_unread_folders", "Folders in an inbox that cannot be read.", ["inbox"]
        )
        self.away = gauge(
            "visiond_inbox_away", "1 while an inbox cannot be read or does not answer.", ["inbox"]
        )

    def begin(self, names: Mapping[int, str]) -> None:
        """Create all series at 0. names: of the inboxes, by their numbers in the ledger."""
        self._names = dict(names)
        for name in names.values():
            for status in OUTCOMES:
                self.images.labels(name, status.name.lower())
            for bin_name in (*BINS, "other"):
                self.bins.labels(name, bin_name)
            for metric in (self.image_seconds, self.wait_seconds, self.first_results, self.missed):
                metric.labels(name)
            for level in (self.pending, self.oldest, self.scan_seconds, self.scanned_at, self.away):
                level.labels(name)

    def admitted(self, admitted: Admitted, inbox: int) -> None:
        """What became of files of one inbox."""
        for status, count in ((JobStatus.SKIPPED, admitted.skipped), (JobStatus.GONE, admitted.replaced)):
            if count:
                self.images.labels(self._name(inbox), status.name.lower()).inc(count)

    def finished(self, endings: Sequence[Ending]) -> None:
        """Count a group of images: a label is looked up once for all that share it."""
        now, clock = time.monotonic(), time.time()
        ended: Counter[tuple[int, JobStatus]] = Counter()
        bins: Counter[tuple[int, str]] = Counter()
        sums: dict[int, list[float]] = {}
        for ending in endings:
            job = ending.job
            if ending.keeps_result or ending.status is JobStatus.PENDING:
                continue
            ended[job.inbox, ending.status] += 1
            if ending.status is JobStatus.DONE:
                bins[job.inbox, ending.bin if ending.bin in BINS else "other"] += 1
                total = sums.setdefault(job.inbox, [0.0, 0.0, 0])
                seconds = max(0.0, now - ending.began_at)
                total[0] += seconds
                if not job.has_result:  # else it was seen long ago
                    total[1] += max(0.0, clock - job.seen_at - seconds)
                    total[2] += 1
        for (inbox, status), count in ended.items():
            self.images.labels(self._name(inbox), status.name.lower()).inc(count)
        for (inbox, bin_name), count in bins.items():
            self.bins.labels(self._name(inbox), bin_name).inc(count)
        for inbox, (seconds, waited, first) in sums.items():
            self.image_seconds.labels(self._name(inbox)).inc(seconds)
            self.wait_seconds.labels(self._name(inbox)).inc(waited)
            self.first_results.labels(self._name(inbox)).inc(first)

    def scanned(self, inbox: int, seconds: float) -> None:
        self.scan_seconds.labels(self._name(inbox)).set(seconds)
        self.scanned_at.labels(self._name(inbox)).set(time.time())

    def found_late(self, inbox: int, files: int) -> None:
        self.missed.labels(self._name(inbox)).inc(files)

    def measured(self, waiting: Mapping[int, Waiting]) -> None:
        """waiting: of each inbox that has pending images."""
        for number, name in self._names.items():
            images, oldest = waiting.get(number, Waiting(0, None))
            self.pending.labels(name).set(images)
            # The clock may have been set back.
            self.oldest.labels(name).set(max(0.0, time.time() - oldest) if oldest else 0.0)

    def _name(self, inbox: int) -> str:
        return self._names.get(inbox, str(inbox))
