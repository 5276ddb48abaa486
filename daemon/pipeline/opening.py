"""The stations of this daemon: one in its own process, or several, each in a process of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence

from daemon.layout.layout import Layout
from daemon.layout.slabs import open_slab, size_slabs
from daemon.monitoring.metrics import Metrics
from daemon.pipeline import wire
from daemon.pipeline.remote import RemoteStation
from daemon.pipeline.station import Station
from daemon.pipeline.tracing import check_traces, opened_tracer
from daemon.placement.placement import share_out
from daemon.results.destinations import Destination
from daemon.results.judge import Judge
from daemon.system.cores import bind
from daemon.system.retry import Retry
from daemon.workers.slab import Slab


class Opening:
    """Opens the stations of this daemon: those of its start, and others with other models in their places."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        layout: Layout,
        metrics: Metrics,
        judge: Judge,
        destinations: Mapping[int, Destination],
        bins: Iterable[str],
        retry: Retry,
    ) -> None:
        """layout: of the start. bins: those that a rule has named before now. retry: of the coordinator."""
        self._layout, self._metrics, self._judge = layout, metrics, judge
        self._destinations, self._bins, self._retry = destinations, list(bins), retry
        self.level = layout.config.log.level  # at which stations in other processes log
        self._siblings: list[RemoteStation] = []
        self._slab: Slab | None = None  # of the only station, if it is in this process
        parts = parts_of(layout)
        if len(parts) > 1:
            check_traces(layout.config.traces)
            self._slab_bytes = size_slabs(layout.config, layout.gpus, len(parts))
            return
        held = [device for segment in layout.placement.segments for device in segment.first_devices]
        bind(layout.cores.common(held))  # before the slab is touched
        self._slab = open_slab(layout.config, layout.gpus)
        stack.callback(self._slab.close)
        self._tracer = stack.enter_context(opened_tracer(layout.config.traces))

    def open_all(self) -> list[Station | RemoteStation]:
        """The stations of the start. None of them is started yet."""
        stations = [self.open(self._layout, place) for place in range(len(parts_of(self._layout)))]
        for place, station in enumerate(stations):
            self.accept(place, station)
        return stations

    def open(self, layout: Layout, place: int) -> Station | RemoteStation:
        """A station for this place, with the models of this layout. It is not started yet."""
        for segment in layout.placement.segments:
            self._metrics.begin_segment(segment.name, segment.stages, segment.devices)
        if self._slab:
            lanes = layout.open_lanes(self._slab, self._metrics)
            parts = (self._judge, self._destinations, self._metrics)
            return Station(self._slab, lanes, *parts, tracer=self._tracer, beside=self._retry)
        part = parts_of(layout)[place]
        setup = describe(layout, f"station {place}", part, self._slab_bytes, self._destinations, self._bins)
        station = RemoteStation(setup, self._metrics, self._siblings)
        station.log_at(self.level)
        return station

    def accept(self, place: int, station: Station | RemoteStation) -> None:
        """The station has this place from now on: the daemon fails when all that have one are closed."""
        if isinstance(station, RemoteStation):
            self._siblings[place : place + 1] = [station]


def parts_of(layout: Layout) -> list[list[list[int]]]:
    """For each station, and for each segment, the numbers of its workers there."""
    return share_out(layout.placement, layout.config.pipeline.stations)


def describe(
    layout: Layout,
    name: str,
    part: Sequence[list[int]],
    slab_bytes: int,
    destinations: Mapping[int, Destination],
    bins: Iterable[str],
) -> wire.StationSetup:
    """What a station needs to know. part: for each segment, the numbers of its workers there."""
    segments = layout.placement.segments
    return wire.StationSetup(
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
