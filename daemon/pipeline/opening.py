"""The executors of this daemon: one in its own process, or several, each in a process of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence

from daemon.layout.layout import Layout
from daemon.layout.placement import share_out
from daemon.layout.slabs import open_slab, size_slabs
from daemon.monitoring.metrics import Metrics
from daemon.pipeline import wire
from daemon.pipeline.executor import Executor
from daemon.pipeline.remote import RemoteExecutor
from daemon.pipeline.tracing import check_traces, opened_tracer
from daemon.results.destinations import Destination
from daemon.results.judge import Judge
from daemon.system.cores import bind
from daemon.system.retry import Retry
from daemon.workers.opening import open_batchers


def open_executors(
    stack: contextlib.ExitStack,
    layout: Layout,
    metrics: Metrics,
    judge: Judge,
    destinations: Mapping[int, Destination],
    bins: Sequence[str],
    retry: Retry,
) -> Sequence[Executor | RemoteExecutor]:
    """None of them is started yet. bins: those that a rule has named before now. retry: of the coordinator."""
    config = layout.config
    for segment in layout.placement.segments:
        metrics.begin_segment(segment.name, segment.stages, segment.devices)
    parts = share_out(layout.placement, config.pipeline.executors)
    if len(parts) == 1:
        held = [device for segment in layout.placement.segments for device in segment.first_devices]
        bind(layout.cores.common(held))  # before the slab is touched
        slab = open_slab(config, layout.gpus)
        stack.callback(slab.close)
        tracer = stack.enter_context(opened_tracer(config.traces))
        batchers = open_batchers(layout, slab, metrics)
        return [Executor(slab, batchers, judge, destinations, metrics, tracer=tracer, beside=retry)]
    check_traces(config.traces)
    slab_bytes = size_slabs(config, layout.gpus, len(parts))
    executors: list[RemoteExecutor] = []
    for place, part in enumerate(parts):
        setup = describe(layout, f"executor {place}", part, slab_bytes, destinations, bins)
        executors.append(RemoteExecutor(setup, metrics, executors))
    return executors


def describe(
    layout: Layout,
    name: str,
    part: Sequence[list[int]],
    slab_bytes: int,
    destinations: Mapping[int, Destination],
    bins: Iterable[str],
) -> wire.ExecutorSetup:
    """What an executor needs to know. part: for each segment, the numbers of its workers there."""
    segments = layout.placement.segments
    return wire.ExecutorSetup(
        name=name,
        config=layout.config.model_dump_json().encode(),
        specs=list(layout.specs.values()),
        cores=layout.cores,
        gpus=layout.gpus,
        segments=[(list(segment.stages), list(segment.devices)) for segment in segments],
        workers=list(part),
        inboxes=list(destinations),
        bins=list(bins),
        known=[list(destination.known) for destination in destinations.values()],
        slab_bytes=slab_bytes,
    )
