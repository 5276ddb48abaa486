"""The composition root: what a daemon is made of. Every part is made here, and gets what it needs by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from anyio import to_thread

from daemon.config.loading import Config
from daemon.inbox.names import check_names
from daemon.inbox.watcher import Watcher
from daemon.layout.announcing import announce, warn_of_outdated
from daemon.layout.layout import Layout, digest_settings
from daemon.layout.second_looks import LookPlan, lay_out
from daemon.ledger.ledger import Ledger
from daemon.ledger.records import Reader
from daemon.maintenance.schedule import Upkeep
from daemon.monitoring.counts import WaitingCount
from daemon.monitoring.disks import Disks, list_written_folders
from daemon.monitoring.metrics import Metrics
from daemon.pipeline.coordinator import Pipeline
from daemon.pipeline.opening import open_executors
from daemon.pipeline.running import open_looks
from daemon.pipeline.schedule import Schedule
from daemon.pipeline.unpacker import open_unpacker
from daemon.results.destinations import Destination, remember_folders
from daemon.results.judge import Judge
from daemon.results.outbox import Outbox
from daemon.results.sinks import open_sinks
from daemon.server.answers import Answers
from daemon.server.status import Status
from daemon.service.ledger import open_ledger
from daemon.system.retry import Retry


@dataclass(frozen=True, slots=True)
class DaemonParts:
    """What a run of the daemon works with."""

    layouts: list[Layout]  # of first and second looks
    pipeline: Pipeline
    upkeep: Upkeep
    status: Status
    answers: Answers


async def open_parts(
    stack: contextlib.ExitStack,
    config: Config,
    metrics: Metrics,
    *,
    once: bool,
    page_problem: Callable[[], str],
) -> DaemonParts:
    """Make them in order of dependence; no image is processed yet. page_problem: why there is no page, or empty."""
    layout, plans = await to_thread.run_sync(lay_out, config)
    announce(layout, plans, with_notices=not once)  # then its summary has them
    retry = Retry()
    ledger, numbers = await open_ledger(stack, config, layout, plans, metrics, retry)
    reader = stack.enter_context(contextlib.closing(Reader(ledger.path)))
    await to_thread.run_sync(check_names, config, reader)
    every_stage = config.pipeline.mode == "full"
    count_outdated = partial(reader.count_outdated, config.kept_inboxes, every_stage=every_stage)
    if not once:  # its summary says so at the end
        warn_of_outdated(await to_thread.run_sync(count_outdated))
    pipeline = await open_pipeline(
        stack, config, layout, plans, ledger, reader, numbers, metrics, retry, once=once
    )
    metrics.counts.begin(await to_thread.run_sync(reader.counts))
    upkeep = Upkeep(config, ledger, metrics, lambda: not pipeline.in_flight, pipeline.watcher.folders)
    status = Status(
        pipeline,
        notices=layout.notices(),
        upkeep=upkeep,
        settings_digest=await to_thread.run_sync(digest_settings, config, layout.specs),
        count_outdated=count_outdated,
        waiting=WaitingCount(reader.count_waiting),
        disks=Disks(list_written_folders(config)),
        page_problem=page_problem,
    )
    return DaemonParts([layout, *(plan.layout for plan in plans)], pipeline, upkeep, status, Answers(status))


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
        executors=open_executors(stack, layout, metrics, judge, destinations, bins, retry),
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
