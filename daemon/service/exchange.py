"""An exchange of models: one station after another ends its shift, and begins another one with the new models, while the
other stations work on. If the new models do not load, the stations go back to those that they had.

A station that changes gets no more jobs, gives back those that wait for a worker, publishes the results of the others,
and ends its workers. Then its place is taken by a station whose workers load the new models, so a GPU never has to hold
both. No job belongs to two generations: each has the generation of its station, and the ledger stores its results under the
models of that one (daemon/ledger/rows.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import anyio
import anyio.abc
import msgspec
import structlog
from anyio import to_thread

from daemon.config.loading import Config
from daemon.config.state import KERNELS
from daemon.core.errors import ConfigError, ModelsUnusable
from daemon.layout.layout import Layout, digest_settings
from daemon.layout.second_looks import LookPlan, lay_out
from daemon.monitoring.snapshot import ExchangeState
from daemon.pipeline.announcing import announce, warn_of_outdated
from daemon.pipeline.coordinator import Pipeline
from daemon.pipeline.executor import Executor
from daemon.pipeline.opening import Opening, parts_of
from daemon.pipeline.remote import RemoteStation
from daemon.pipeline.station import Station
from daemon.server.status import Status
from daemon.workers.kernels import compile_for_workers

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ModelSet:
    """Models that stations have or get, and what follows from them. config: the configuration that names them.
    generation: their number; -1: they have none yet."""

    config: Config
    layout: Layout
    settings_digest: str
    generation: int = -1


class LoadFailed(Exception):
    """The workers of a station have not loaded their models; the message says why."""


class Exchange:
    """Exchanges the models of a pipeline's stations, one exchange after another."""

    def __init__(self, pipeline: Pipeline, opening: Opening, models: ModelSet, status: Status) -> None:
        """models: those of the start."""
        self.pipeline, self._opening, self._metrics = pipeline, opening, pipeline.metrics
        self._status = status
        status.exchange = lambda: self.state
        # Called with the configuration whose models all stations have: after an exchange, or one that went back.
        self.done: Callable[[Config], None] = lambda config: None
        self.undone: Callable[[Config], None] = lambda config: None
        self._standing = models  # of all stations, unless an exchange is under way
        self._wanted: ModelSet | None = None  # of an exchange that is under way, or begins
        self._loading: Executor | None = None  # whose station loads its models
        self._asked = anyio.Event()
        self.state = ExchangeState()
        self._began = 0.0  # monotonic seconds

    async def check(self, config: Config, settings: list[str]) -> ModelSet:
        """Check the models of a configuration as at a start, and whether they can take the places of the present
        ones. settings: those that differ, for people. Raises ConfigError, ModelsUnusable."""
        try:
            return await to_thread.run_sync(self._check, config, abandon_on_cancel=True)
        except Exception as error:
            # A plug-in's own code may raise anything, and the daemon works on.
            known = isinstance(error, ConfigError | ModelsUnusable)
            problem = (
                str(error) if known else f"the models cannot be checked: {type(error).__name__}: {error}"
            )
            self._metrics.exchanges.labels("refused").inc()
            self._note("refused", settings, problem)
            if known:
                raise
            raise ConfigError([problem]) from error

    def _check(self, config: Config) -> ModelSet:
        standing = self._standing
        if (config.models, config.stages) == (standing.config.models, standing.config.stages):
            return replace(standing, config=config)
        layout, plans = lay_out(config, standing.layout.gpus)
        if problems := [*_list_misfits(standing.layout, layout), *self._list_changed_looks(plans)]:
            raise ConfigError([f"{problem}; restart the daemon for that." for problem in problems])
        return ModelSet(config, layout, digest_settings(config, layout.specs))

    def _list_changed_looks(self, plans: list[LookPlan]) -> list[str]:
        running = {look.plan.name: look.plan.spec.fingerprint for look in self.pipeline.looks}
        changed = [plan.name for plan in plans if plan.spec.fingerprint != running[plan.name]]
        return [f"the second look {name} would have another model too" for name in changed]

    def begin(self, models: ModelSet, settings: list[str]) -> None:
        """Let `run` bring these models to all stations. An exchange that is under way goes on with them."""
        self._wanted = models
        if self._loading:
            self._loading.give_up()
        self._asked.set()
        self._note("running", settings)

    def forget_problem(self) -> None:
        """The configuration names the models that are in use."""
        if self._wanted is None:
            self.state = ExchangeState()

    async def run(self, tasks: anyio.abc.TaskGroup) -> None:
        """Run exchanges until cancelled. tasks: the daemon's; an error in one of them ends it. Raises ModelsUnusable,
        NoWorkersLeft when a station cannot go back to the models that it had."""
        while True:
            await self._asked.wait()
            self._asked = anyio.Event()
            if wanted := self._wanted:
                await self._exchange(wanted, tasks)

    async def _exchange(self, wanted: ModelSet, tasks: anyio.abc.TaskGroup) -> None:
        try:
            models = await self._register(wanted)
            log.info("models are being exchanged", settings=self.state.settings)
            await self._bring(models, wanted, tasks)
        except LoadFailed as problem:
            if self._wanted is wanted:
                await self._go_back(str(problem), tasks)
            return
        if self._wanted is wanted and not self.pipeline.draining:
            await self._finish(models, wanted)

    async def _register(self, wanted: ModelSet) -> ModelSet:
        """The models with their number, and with their kernels compiled, while all stations still work."""
        if wanted.generation >= 0:
            return wanted
        announce(wanted.layout, [], self._standing.layout)
        folder = wanted.config.state.path / KERNELS
        await compile_for_workers(folder, wanted.layout.wanted_kernels())
        generation = await self.pipeline.ledger.generations.begin(wanted.layout.models())
        return replace(wanted, generation=generation)

    async def _bring(self, models: ModelSet, wanted: ModelSet | None, tasks: anyio.abc.TaskGroup) -> None:
        """Bring the models to each station that has others, as long as nothing else is wanted. wanted: None: the
        stations go back to these models, and their workers need not be ready. Raises NotLoaded."""
        for place, executor in enumerate(self.pipeline.executors):
            if self._wanted is not wanted or self.pipeline.draining:
                return
            is_right = executor.is_accepted and executor.generation == models.generation
            if not is_right and not is_closed(executor.station):
                await self._relieve(place, models, wanted, tasks)
            self._count(models, wanted)

    async def _relieve(
        self, place: int, models: ModelSet, wanted: ModelSet | None, tasks: anyio.abc.TaskGroup
    ) -> None:
        """Let a station with these models take this place. Raises NotLoaded."""
        pipeline, began = self.pipeline, time.monotonic()
        before = pipeline.executors[place]
        await pipeline.retire(before)
        finished = time.monotonic()
        await before.leave()
        station = self._opening.open(models.layout, place)
        executor = pipeline.executors[place] = Executor(station, models.generation, on_trial=True)
        tasks.start_soon(executor.run, pipeline)
        if pipeline.draining:
            executor.drain()
            return
        self._loading = executor
        if self._wanted is not wanted:
            executor.give_up()
        await executor.try_out(tasks)
        self._loading = None
        problem = executor.problem or (describe_unready(station) if wanted else "")
        if not problem and self._wanted is wanted:
            self._opening.accept(place, station)
            executor.accept()
            seconds = {"finished": finished - began, "stood_still": time.monotonic() - finished}
            rounded = {f"{name}_seconds": round(value, 2) for name, value in seconds.items()}
            log.info("a station has other models", station=place, **rounded)
            executor.when_published = partial(_log_pause, place, seconds["stood_still"])
        elif not pipeline.draining:
            await executor.leave()
            if self._wanted is wanted:  # if not, it was given up
                raise LoadFailed(problem)

    async def _go_back(self, problem: str, tasks: anyio.abc.TaskGroup) -> None:
        """Bring the former models to the stations that have others. Raises ModelsUnusable if they do not load any
        more."""
        standing = self._standing
        log.error("the new models do not load; the stations go back to those that they had", why=problem)
        self._metrics.exchanges.labels("undone").inc()
        self._wanted = None
        self.state = msgspec.structs.replace(self.state, goes_back=True)
        try:
            await self._bring(standing, None, tasks)
        except LoadFailed as error:
            raise ModelsUnusable(
                f"the new models do not load: {problem}; nor do the old ones: {error}"
            ) from None
        if self._wanted is None:
            self._note("undone", self.state.settings, problem)
            self.undone(standing.config)

    async def _finish(self, models: ModelSet, wanted: ModelSet) -> None:
        generations = self.pipeline.ledger.generations
        await generations.make_current(models.generation)
        self._standing = models
        if self._wanted is not wanted:  # there was another reload in the meantime
            return
        self._wanted = None
        self._metrics.exchanges.labels("done").inc()
        self._note("done", self.state.settings)
        log.info("models exchanged", settings=self.state.settings, seconds=self.state.seconds)
        self._status.models_changed(models.layout.notices(), models.settings_digest)
        self.done(models.config)
        warn_of_outdated(await self._status.count_outdated())

    def _note(self, outcome: str, settings: list[str], problem: str = "") -> None:
        """Show this in the status. While an exchange is under way, a refusal of another one is only in the log."""
        if outcome == "refused" and self._wanted is not None:
            return
        if outcome == "running":
            self._began = time.monotonic()
        stations = len(self.pipeline.executors)
        seconds = round(time.monotonic() - self._began, 2) if outcome in ("done", "undone") else 0.0
        changed = stations if outcome == "done" else 0
        line = " ".join(problem.split())
        ended_at = 0.0 if outcome == "running" else time.time()
        self.state = ExchangeState(outcome, settings, changed, stations, seconds, line, ended_at=ended_at)
        self._metrics.exchange_running.set(outcome == "running")

    def _count(self, models: ModelSet, wanted: ModelSet | None) -> None:
        """Show in the status how many stations have these models, if they are still those that are wanted."""
        if self._wanted is not wanted:
            return
        changed = sum(each.generation == models.generation for each in self.pipeline.executors)
        self.state = msgspec.structs.replace(self.state, changed=changed)


def is_closed(station: Station | RemoteStation) -> bool:
    """Whether it has failed too often, and stays without work until the daemon is started again."""
    return isinstance(station, RemoteStation) and station.closed


def describe_unready(station: Station | RemoteStation) -> str:
    """Why a station cannot work although its workers had their time to load; empty if it can."""
    for lane in station.state().lanes:
        if not any(worker.state == "ready" for worker in lane.workers):
            usual = "its processes keep ending" if is_closed(station) else "no worker is ready"
            cause = next((worker.cause for worker in lane.workers if worker.cause), usual)
            return f"{lane.name}: {cause}"
    return ""


def _log_pause(place: int, stood_still: float, worked: float) -> None:
    """The pause that users see ends with the first image, not when the models are loaded. stood_still: seconds until they
    were. worked: seconds from the first jobs to the first results."""
    log.info(
        "a station has finished its first images with other models",
        station=place,
        first_batch_seconds=round(worked, 2),
        without_images_seconds=round(stood_still + worked, 2),
    )


def _list_misfits(before: Layout, after: Layout) -> list[str]:
    """Why stations of these layouts cannot take each other's places."""
    old, new = _list_devices(before), _list_devices(after)
    if len(old) == len(new) == 1 or old == new:
        return []
    return [f"the stations would have other devices with these models ({after.placement.why})"]


def _list_devices(layout: Layout) -> list[set[str]]:
    """The devices of each station."""
    segments = layout.placement.segments
    return [
        {segment.devices[n] for segment, numbers in zip(segments, part, strict=True) for n in numbers}
        for part in parts_of(layout)
    ]
