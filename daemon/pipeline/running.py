"""Runs second looks, each with its own coordinator, executor and workers."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence

import anyio
import structlog
from anyio import to_thread

from daemon.core.errors import ModelsUnusable, NoWorkersLeft, leaves
from daemon.layout.second_looks import LookPlan
from daemon.layout.slabs import open_slab
from daemon.ledger.ledger import Ledger
from daemon.ledger.record import Model
from daemon.ledger.records import Reader
from daemon.monitoring.metrics import LookMetrics, Metrics
from daemon.monitoring.snapshot import LookState
from daemon.pipeline.executor import Executor
from daemon.pipeline.look_coordinator import FirstLooks, LookCoordinator, LookJudge
from daemon.pipeline.schedule import Schedule
from daemon.results.destinations import Destination, publish_sidecars
from daemon.results.judge import Judge
from daemon.system.retry import Retry
from daemon.workers.opening import open_batchers

log = structlog.get_logger()


class RunningLook:
    """Its parts are passed in; it owns none of them."""

    def __init__(
        self, plan: LookPlan, coordinator: LookCoordinator, executor: Executor, reader: Reader
    ) -> None:
        self.plan, self.coordinator, self.executor = plan, coordinator, executor
        self._reader = reader
        self._work = anyio.CancelScope()
        self.problem = ""  # why this look has stopped
        self.failure: BaseException | None = None

    async def run(self, first_looks: FirstLooks) -> None:
        """Work until `drain`."""
        with self._work:
            await self.coordinator.open(first_looks)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.coordinator.count, self._reader.count_looks)
                tasks.start_soon(self.executor.run, self.coordinator)

    async def staff(self) -> None:
        """Run the workers until `stop`. Without them first looks go on."""
        try:
            async with anyio.create_task_group() as tasks:
                await tasks.start(self.executor.staff)
        except* (NoWorkersLeft, ModelsUnusable) as group:
            self.failure = next(leaves(group))
            self.problem = f"second look {self.coordinator.name}: {self.failure}"
            log.error(
                "a second look has stopped; its images wait for the next start",
                look=self.coordinator.name,
                why=str(self.failure),
            )
            self.drain()

    async def count_waiting(self) -> int:
        """Images that wait for the look now."""
        tally = await to_thread.run_sync(self._reader.count_looks, self.coordinator.name)
        return tally.waiting

    def drain(self) -> None:
        """Stop work; what is in flight begins again at the next start."""
        self._work.cancel()
        self.coordinator.stop()

    def stop(self) -> None:
        self.executor.stop()

    def state(self) -> LookState:
        waiting, done, failed = self.coordinator.tally
        return LookState(
            name=self.coordinator.name,
            stage=self.coordinator.model.stage,
            model=self.plan.table.model or self.plan.spec.backend,
            waiting=waiting,
            done=done,
            failed=failed,
            in_flight=self.coordinator.in_flight,
            problem=self.problem,
        )


async def finish_looks(looks: Sequence[RunningLook], pause: Callable[[float], Awaitable[None]]) -> None:
    """Wait until no image waits for a second look. While one is being published, another of the same image
    cannot be seen. pause: until something has ended, or for so many seconds."""
    while any(look.coordinator.in_flight for look in looks) or not all(
        [await look.coordinator.is_idle() for look in looks]
    ):
        await pause(1.0)


def open_looks(
    stack: contextlib.ExitStack,
    plans: Sequence[LookPlan],
    *,
    ledger: Ledger,
    reader: Reader,
    schedule: Schedule,
    judge: Judge,
    destinations: Mapping[int, Destination],
    metrics: Metrics,
    retry: Retry,
) -> list[RunningLook]:
    """The second looks, not started yet. retry: of the coordinator. Raises ConfigError."""
    running = []
    for plan in plans:
        slab = open_slab(plan.layout.config, plan.layout.gpus)
        stack.callback(slab.close)
        label = plan.segment.name
        batchers = open_batchers(plan.layout, slab, metrics)
        own = LookMetrics(metrics, label, plan.segment.devices)
        executor = Executor(
            slab, batchers, LookJudge(judge), destinations, own, publish_sidecars, beside=retry
        )
        roots = {inbox: destination.inbox for inbox, destination in destinations.items()}
        coordinator = LookCoordinator(
            plan.name,
            Model.of(plan.spec),
            plan.spec.batch_size,
            plan.table.images_per_second,
            ledger,
            schedule,
            roots,
            gathers=plan.shares_devices,
            reuse=plan.layout.config.pipeline.reuse_results,
        )
        running.append(RunningLook(plan, coordinator, executor, reader))
    return running
