"""The second looks at work: a desk, a station and its workers for each."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import anyio
import structlog

from daemon.errors import NoWorkersLeft, leaves
from daemon.layout import CPU_SLAB
from daemon.ledger.records import Reader
from daemon.looks.desk import Desk, Home, LookJudge
from daemon.looks.planning import Plan
from daemon.monitoring.metrics import LookMetrics, Metrics
from daemon.monitoring.snapshot import LookState, StationState
from daemon.results.destinations import Destination
from daemon.results.judge import Judge
from daemon.stations.station import Station
from daemon.workers.slab import Slab

log = structlog.get_logger()


class RunningLook:
    """Its parts are passed in; it owns none of them."""

    def __init__(self, plan: Plan, desk: Desk, station: Station, reader: Reader) -> None:
        self.plan, self.desk, self.station = plan, desk, station
        self._reader = reader
        self.problem = ""  # why no image gets this look any more

    async def run(self) -> None:
        """Work until cancelled."""
        await self.desk.open()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.desk.count, self._reader.second_looks)
            tasks.start_soon(self.station.run, self.desk)

    async def staff(self) -> None:
        """Run the workers until `stop`. If none is left, first looks go on without this look.
        Raises ModelsUnusable."""
        try:
            async with anyio.create_task_group() as tasks:
                await tasks.start(self.station.staff)
                log.info("second look ready", look=self.desk.name)
        except* NoWorkersLeft as group:
            self.problem = f"second look {self.desk.name}: {next(leaves(group))}"
            log.error(
                "a second look has no workers left; its images wait for the next start", why=self.problem
            )
            self.drain()

    def drain(self) -> None:
        self.desk.drain()
        self.station.drain()

    def stop(self) -> None:
        self.station.stop()

    def state(self) -> LookState:
        waiting, done, failed = self.desk.tally
        return LookState(
            name=self.desk.name,
            stage=self.desk.model.stage,
            model=self.plan.table.model or self.plan.spec.backend,
            waiting=waiting,
            done=done,
            failed=failed,
            in_flight=len(self.desk.in_flight),
            problem=self.problem,
        )

    def station_state(self) -> StationState:
        return self.station.state()


def open_looks(
    stack: contextlib.ExitStack,
    plans: Sequence[Plan],
    home: Home,
    reader: Reader,
    judge: Judge,
    destinations: Mapping[int, Destination],
    metrics: Metrics,
) -> list[RunningLook]:
    """The second looks, not started yet."""
    running = []
    for plan in plans:
        slab = Slab(plan.layout.config.pipeline.slab_bytes or CPU_SLAB)
        stack.callback(slab.close)
        label = plan.segment.name
        lanes = plan.layout.open_lanes(slab, metrics)
        station = Station(slab, lanes, LookJudge(judge), destinations, LookMetrics(metrics, label))
        desk = Desk(plan.name, plan.model, plan.table.images_per_second, home)
        running.append(RunningLook(plan, desk, station, reader))
    return running
