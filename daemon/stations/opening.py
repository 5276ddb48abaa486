"""The stations of this daemon: one in its own process, or several, each in a process of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence

from daemon.layout import Layout, open_slab, size_slabs
from daemon.monitoring.metrics import Metrics
from daemon.placement import share_out
from daemon.results.destinations import Destination
from daemon.results.judge import Judge
from daemon.stations import wire
from daemon.stations.remote import RemoteStation
from daemon.stations.station import Station
from daemon.stations.tracing import check_traces, opened_tracer
from daemon.system.cores import bind


def open_stations(
    stack: contextlib.ExitStack,
    layout: Layout,
    metrics: Metrics,
    judge: Judge,
    destinations: Mapping[int, Destination],
    numbers: Sequence[int],
    bins: Iterable[str],
) -> list[Station] | list[RemoteStation]:
    """The stations, not started yet. numbers: of the inboxes, in the order of the configuration. bins: those
    that a rule has named before now."""
    parts = share_out(layout.placement, layout.config.pipeline.stations)
    if len(parts) == 1:
        held = [device for segment in layout.placement.segments for device in segment.first_devices]
        bind(layout.cores.common(held))  # before the slab is touched
        slab = open_slab(layout.config, layout.gpus)
        stack.callback(slab.close)
        lanes, tracer = (
            layout.open_lanes(slab, metrics),
            stack.enter_context(opened_tracer(layout.config.traces)),
        )
        return [Station(slab, lanes, judge, destinations, metrics, tracer=tracer)]
    check_traces(layout.config.traces)
    slab_bytes = size_slabs(layout.config, layout.gpus, len(parts))
    for segment in layout.placement.segments:
        metrics.begin_segment(segment.name, segment.stages, segment.devices)
    stations: list[RemoteStation] = []
    for number, part in enumerate(parts):
        setup = describe(layout, f"station {number}", part, slab_bytes, numbers, bins)
        stations.append(RemoteStation(setup, metrics, stations))
    return stations


def describe(
    layout: Layout,
    name: str,
    part: Sequence[list[int]],
    slab_bytes: int,
    numbers: Sequence[int],
    bins: Iterable[str],
) -> wire.Setup:
    """What a station needs to know. part: for each segment, the numbers of its workers there."""
    segments = layout.placement.segments
    return wire.Setup(
        name=name,
        config=layout.config.model_dump_json().encode(),
        specs=list(layout.specs.values()),
        cores=layout.cores,
        gpus=layout.gpus,
        segments=[(list(segment.stages), list(segment.devices)) for segment in segments],
        workers=list(part),
        inboxes=list(numbers),
        bins=list(bins),
        slab_bytes=slab_bytes,
    )
