"""The composition root: what a daemon is made of. Every part is made here, and gets what it needs by name."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import structlog
from anyio import to_thread

from daemon.config.loading import Config
from daemon.config.state import LEDGER
from daemon.inbox.watcher import Watcher
from daemon.layout.layout import Layout
from daemon.layout.second_looks import LookPlan
from daemon.ledger.identity import describe_lost_ledger
from daemon.ledger.ledger import Ledger
from daemon.ledger.record import Model
from daemon.ledger.records import Reader
from daemon.monitoring.metrics import Metrics
from daemon.pipeline.coordinator import Pipeline
from daemon.pipeline.opening import open_stations
from daemon.pipeline.running import open_looks
from daemon.pipeline.schedule import Schedule
from daemon.pipeline.unpacker import open_unpacker
from daemon.results.destinations import Destination, remember_folders
from daemon.results.judge import LONGEST_PAUSE_SECONDS, Judge
from daemon.results.outbox import Outbox
from daemon.results.sinks import open_sinks
from daemon.system.retry import Retry

log = structlog.get_logger()


async def open_ledger(
    stack: contextlib.ExitStack,
    config: Config,
    layout: Layout,
    plans: list[LookPlan],
    metrics: Metrics,
    retry: Retry,
) -> tuple[Ledger, list[int]]:
    """The ledger, and the numbers of the inboxes in it."""
    if warning := await to_thread.run_sync(describe_lost_ledger, config):
        log.warning(warning)
    ledger = Ledger(config.state.path / LEDGER, metrics.commit_seconds.observe, retry)
    stack.callback(ledger.close)
    if ledger.remark:
        log.warning(ledger.remark)
    numbers = await ledger.register(
        [(inbox.root, inbox.priority) for inbox in config.inbox],
        [*map(Model.of, layout.specs.values())],
        [Model.of(plan.spec) for plan in plans],
        [inbox.root for inbox in config.inbox if inbox.unpack],
        config.kept_inboxes,
        [inbox.root for inbox in config.inbox if not config.keeps_in_place(inbox)],
    )
    if dropped := await ledger.begin_looks([plan.name for plan in plans]):
        log.warning("second looks that are no longer configured were dropped", images=dropped)
    await ledger.bound_waits(config.pipeline.retry_seconds, LONGEST_PAUSE_SECONDS)
    return ledger, numbers


async def open_pipeline(
    stack: contextlib.ExitStack,
    config: Config,
    layout: Layout,
    plans: list[LookPlan],
    ledger: Ledger,
    reader: Reader,
    numbers: Sequence[int],
    metrics: Metrics,
    retry: Retry,
    *,
    once: bool,
) -> Pipeline:
    """The pipeline, not running yet. numbers: of the inboxes in the ledger."""
    inboxes = dict(zip(numbers, config.inbox, strict=True))
    bins = await to_thread.run_sync(reader.bins) if config.output.bins in ("link", "copy") else ()
    destinations = {number: Destination.of(inbox, config, bins) for number, inbox in inboxes.items()}
    await to_thread.run_sync(remember_folders, destinations.values())
    watcher = Watcher(
        inboxes,
        reader,
        config.pipeline.rescan_seconds,
        metrics,
        longest={number: destination.longest_path for number, destination in destinations.items()},
        retry=retry,
        keep_marker=ledger.keep_marker,
    )
    judge = Judge.of(config, {number: each.inbox for number, each in destinations.items()})
    schedule = Schedule()
    return Pipeline(
        ledger=ledger,
        watcher=watcher,
        stations=open_stations(stack, layout, metrics, judge, destinations, bins, retry),
        judge=judge,
        destinations=destinations,
        metrics=metrics,
        schedule=schedule,
        looks=open_looks(
            stack,
            plans,
            ledger=ledger,
            reader=reader,
            schedule=schedule,
            judge=judge,
            destinations=destinations,
            metrics=metrics,
            retry=retry,
        ),
        unpacker=open_unpacker(config, inboxes, destinations, judge, once=once),
        outbox=await Outbox.open(ledger, reader, open_sinks(config), metrics.counts.changed),
        retry=retry,
        reuse_results=config.pipeline.reuse_results,
    )
