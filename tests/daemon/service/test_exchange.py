"""Exchanges of models, with stations that only pretend to load and to work."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from daemon.config.loading import Config, parse
from daemon.core.errors import ConfigError, ModelsUnusable
from daemon.layout.layout import Layout
from daemon.layout.second_looks import lay_out
from daemon.ledger.ledger import Ledger
from daemon.monitoring.metrics import Metrics
from daemon.monitoring.snapshot import ExchangeState, LaneState, StationState, WorkerState
from daemon.pipeline.coordinator import Pipeline
from daemon.pipeline.executor import Executor
from daemon.pipeline.remote import RemoteStation
from daemon.results.judge import Judge
from daemon.service.exchange import Exchange, ModelSet, describe_unready
from stages.contract.binning import Thresholds
from tests.daemon_process import PATIENCE, STAGES, until
from tests.makers import open_destination

SETTINGS = ["stages.yolo.options"]


def config(folder: Path, salt: int, **options: Any) -> Config:
    stages: dict[str, Any] = {name: {"backend": "fake"} for name in STAGES}
    stages["yolo"]["options"] = {"salt": salt, **options}
    return parse({"stages": stages, "pipeline": {"stations": 2, "workers_per_device": 2}}, folder)


class FakeStation:
    """Asks for jobs, and keeps those that it gets. problem: why its models do not load. loads: set when they have."""

    def __init__(self, salt: int, problem: str = "", loads: anyio.Event | None = None) -> None:
        self.salt, self.problem, self.loads = salt, problem, loads
        self.jobs: list[Any] = []
        self.ready = self.asks = True
        self.stopped, self.gone = anyio.Event(), anyio.Event()
        self.gone.set()

    async def run(self, coordinator: Any) -> None:
        while self.asks and (jobs := await coordinator.next_jobs(self)):
            self.jobs += jobs

    async def staff(self, *, task_status: Any) -> None:
        if self.problem:
            raise ModelsUnusable(self.problem)
        if self.loads:
            await self.loads.wait()
        task_status.started()
        await self.stopped.wait()
        await self.gone.wait()

    def stop(self) -> None:
        self.stopped.set()

    def drain(self, *, hurried: bool = True) -> None: ...

    def log_at(self, level: str) -> None: ...

    def state(self) -> StationState:
        worker = WorkerState(
            "w", "cpu", "ready" if self.ready else "waiting", 0, "" if self.ready else "no room"
        )
        return StationState(
            lanes=[LaneState("all", 0, [worker])], slab_used=0, slab_size=1, progressed_at=0.0
        )


class Place:
    """Two stations at work, and an exchange of their models. make: opens a station for salt and place."""

    def __init__(self, ledger: Ledger, folder: Path) -> None:
        self.folder = folder
        self.make: Callable[[int, int], FakeStation] = lambda salt, place: FakeStation(salt)
        self.pipeline = open_pipeline(ledger, folder)
        first = config(folder, 0)
        layout, _ = lay_out(first)
        self.pipeline.executors = [Executor(self.open(layout, place)) for place in (0, 1)]
        self.status = SimpleNamespace(models_changed=lambda *_: None, count_outdated=self.count_outdated)
        opening: Any = self
        status: Any = self.status
        self.exchange = Exchange(self.pipeline, opening, ModelSet(first, layout, "", 0), status)
        self.done: list[Config] = []
        self.undone: list[Config] = []
        self.exchange.done, self.exchange.undone = self.done.append, self.undone.append

    async def count_outdated(self) -> None: ...

    def open(self, layout: Layout, place: int) -> Any:
        return self.make(layout.specs["yolo"].options.get("salt", 0), place)

    def accept(self, place: int, station: Any) -> None: ...

    async def count_current(self) -> set[int]:
        """The generations whose model for yolo is current in the ledger."""
        query = "SELECT id FROM model WHERE stage = 'yolo' AND is_current"
        ids = await self.pipeline.ledger.run(lambda c: [row[0] for row in c.execute(query)])
        numbers = self.pipeline.ledger.generations.numbers
        return {each for each in (0, 1) for i in ids if numbers[each]["yolo"] == i}

    @property
    def salts(self) -> list[int]:
        stations: list[Any] = self.pipeline.stations
        return [station.salt for station in stations]

    @property
    def state(self) -> ExchangeState:
        return self.exchange.state

    async def want(self, salt: int) -> None:
        models = await self.exchange.check(config(self.folder, salt), SETTINGS)
        self.exchange.begin(models, SETTINGS)

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[anyio.abc.TaskGroup]:
        with anyio.fail_after(PATIENCE):
            async with anyio.create_task_group() as tasks:
                for executor in self.pipeline.executors:
                    await tasks.start(executor.staff)
                tasks.start_soon(self.exchange.run, tasks)
                yield tasks
                tasks.cancel_scope.cancel()


def open_pipeline(ledger: Ledger, folder: Path) -> Pipeline:
    async def watch(*_: object, once: bool) -> None:
        await anyio.sleep_forever()

    watcher: Any = SimpleNamespace(answering=lambda: {1}, run=watch)
    return Pipeline(
        ledger=ledger,
        watcher=watcher,
        stations=[],
        judge=Judge(Thresholds()),
        destinations={1: open_destination(folder)},
        metrics=Metrics(),
    )


@pytest.fixture
async def place(ledger: Ledger, tmp_path: Path) -> Place:
    return Place(ledger, tmp_path)


@pytest.mark.anyio
async def test_a_reload_to_the_old_models_while_a_station_goes_back_to_them_leaves_none_without_work(
    place: Place,
) -> None:
    loads, opened = anyio.Event(), list[int]()

    def make(salt: int, number: int) -> FakeStation:
        opened.append(salt)
        return FakeStation(salt, "no such layer" if salt else "", None if salt else loads)

    place.make = make
    async with place.working():
        await place.want(1)
        await until(lambda: opened == [1, 0])
        await place.want(0)
        loads.set()
        await until(lambda: place.state.outcome == "done")
        for executor in place.pipeline.executors:
            station: Any = executor.station
            assert (executor.is_accepted, station.stopped.is_set()) == (True, False)


@pytest.mark.anyio
async def test_one_station_changes_after_another(place: Place) -> None:
    loads = [anyio.Event(), anyio.Event()]
    place.make = lambda salt, number: FakeStation(salt, loads=loads[number])
    async with place.working():
        await place.want(1)
        await until(lambda: place.salts == [1, 0])
        assert place.state.sentence() == "models are being exchanged: 0 of 2 stations changed"
        loads[0].set()
        await until(lambda: place.salts == [1, 1])
        assert place.state.changed == 1
        loads[1].set()
        await until(lambda: place.state.outcome == "done")
    assert [executor.generation for executor in place.pipeline.executors] == [1, 1]
    assert await place.count_current() == {1}, "the models with which results are not outdated"
    assert [each.stages.yolo.options for each in place.done] == [{"salt": 1}]  # type: ignore[attr-defined]
    assert place.pipeline.metrics.value("visiond_exchanges_total", outcome="done") == 1


@pytest.mark.anyio
@pytest.mark.parametrize("broken", [0, 1])
async def test_if_models_do_not_load_every_station_has_the_former_ones_again(
    place: Place, broken: int
) -> None:
    place.make = lambda salt, number: FakeStation(salt, "no such layer" if salt and number == broken else "")
    async with place.working():
        await place.want(1)
        await until(lambda: place.state.outcome == "undone")
        assert place.salts == [0, 0]
        await place.want(2)  # without a restart
        place.make = lambda salt, number: FakeStation(salt)
        await until(lambda: place.state.outcome == "done")
    assert place.salts == [2, 2]
    assert [each.stages.yolo.options for each in place.undone] == [{"salt": 0}]  # type: ignore[attr-defined]


@pytest.mark.anyio
async def test_a_station_without_a_worker_that_is_ready_does_not_count_as_loaded(place: Place) -> None:
    def make(salt: int, number: int) -> FakeStation:
        station = FakeStation(salt)
        station.ready = salt == 0
        return station

    place.make = make
    async with place.working():
        await place.want(1)
        await until(lambda: place.state.outcome == "undone")
    assert (place.salts, place.state.problem) == ([0, 0], "all: no room")


@pytest.mark.anyio
async def test_when_the_former_models_do_not_load_any_more_the_daemon_ends(place: Place) -> None:
    place.make = lambda salt, number: FakeStation(salt, "the disk is gone")

    async def work() -> None:
        async with place.working():
            await place.want(1)
            await anyio.sleep_forever()

    with pytest.raises(BaseExceptionGroup) as caught:
        await work()
    assert caught.group_contains(ModelsUnusable, match="the disk is gone")


@pytest.mark.anyio
async def test_a_reload_during_an_exchange_goes_on_with_the_newest_models(place: Place) -> None:
    loads = anyio.Event()
    place.make = lambda salt, number: FakeStation(salt, loads=loads if salt == 1 else None)
    async with place.working():
        await place.want(1)
        await until(lambda: place.salts == [1, 0])
        await place.want(2)
        loads.set()
        await until(lambda: place.state.outcome == "done")
    assert place.salts == [2, 2]
    assert [each.stages.yolo.options for each in place.done] == [{"salt": 2}]  # type: ignore[attr-defined]


@pytest.mark.anyio
async def test_a_reload_at_the_very_end_of_an_exchange_is_not_forgotten(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    generations = place.pipeline.ledger.generations
    make_current = generations.make_current

    async def reload_and_make_current(generation: int) -> None:
        if generation == 1:
            await place.want(2)
        await make_current(generation)

    monkeypatch.setattr(generations, "make_current", reload_and_make_current)
    async with place.working():
        await place.want(1)
        await until(lambda: place.state.outcome == "done")
    assert place.salts == [2, 2]


@pytest.mark.anyio
async def test_a_reload_that_takes_an_exchange_back_does_not_wait_for_its_models(
    place: Place,
) -> None:
    loads, opened = anyio.Event(), list[tuple[int, int]]()

    def make(salt: int, number: int) -> FakeStation:
        opened.append((salt, number))
        return FakeStation(salt, loads=loads if salt == 1 else None)

    place.make = make
    async with place.working():
        await place.want(1)
        await until(lambda: place.salts == [1, 0])
        await place.want(0)
        await until(lambda: place.state.outcome == "done")
    assert (place.salts, opened) == ([0, 0], [(1, 0), (0, 0)])


@pytest.mark.anyio
@pytest.mark.parametrize("during", ["loading", "a failure", "the way back"])
async def test_a_drain_during_an_exchange_ends_the_work(place: Place, during: str) -> None:
    """Even if no station could ask for jobs any more: it is the station's answer that ends the pipeline."""
    loads, ended = anyio.Event(), anyio.Event()
    place.pipeline.executors = place.pipeline.executors[:1]
    station = FakeStation(1, loads=loads)
    station.asks = during != "the way back"  # its process has ended
    place.make = lambda salt, number: station

    async def run_pipeline() -> None:
        await place.pipeline.run()
        ended.set()

    async with place.working() as tasks:
        tasks.start_soon(run_pipeline)
        await place.want(1)
        await until(lambda: place.salts == [1])
        if during != "loading":
            station.ready = False
            loads.set()
        if during == "the way back":
            station.gone = anyio.Event()
            await station.stopped.wait()
        place.pipeline.drain()
        station.gone.set()
        await ended.wait()


@pytest.mark.anyio
async def test_models_that_would_move_stations_to_other_devices_need_a_restart(place: Place) -> None:
    fewer = config(place.folder, 1)
    pipeline = fewer.pipeline.model_copy(update={"workers_per_device": 1})
    with pytest.raises(ConfigError, match="restart the daemon for that"):
        await place.exchange.check(fewer.model_copy(update={"pipeline": pipeline}), SETTINGS)
    assert place.state.outcome == "refused"
    assert "other devices" in place.state.sentence()
    place.exchange.forget_problem()
    assert place.state.sentence() == ""


@pytest.mark.anyio
async def test_a_refusal_during_an_exchange_does_not_hide_it(place: Place) -> None:
    loads = anyio.Event()
    place.make = lambda salt, number: FakeStation(salt, loads=loads)
    async with place.working():
        await place.want(1)
        with pytest.raises(ConfigError):
            await place.exchange.check(config(place.folder, 2, no_such_option=True), SETTINGS)
        assert place.state.outcome == "running"
        loads.set()
        await until(lambda: place.state.outcome == "done")
    assert place.salts == [1, 1]


@pytest.mark.anyio
async def test_an_exchange_that_is_called_off_counts_no_station_that_gave_up(place: Place) -> None:
    loads, counted = anyio.Event(), list[int]()
    place.make = lambda salt, number: FakeStation(salt, loads=loads)
    async with place.working():
        await place.want(1)
        await until(lambda: place.salts == [1, 0])
        await place.want(0)

        def is_going_back() -> bool:
            counted.append(place.state.changed)
            return place.salts == [0, 0]

        await until(is_going_back)
        counted.append(place.state.changed)
        loads.set()
        await until(lambda: place.state.outcome == "done")
    assert set(counted) == {0}
    assert place.state.success().endswith(", because of: stages.yolo.options")


@pytest.mark.anyio
async def test_stations_that_go_back_do_not_count_as_changed(place: Place) -> None:
    loads = anyio.Event()

    def make(salt: int, number: int) -> FakeStation:
        return FakeStation(salt, "no such layer" if salt and number else "", None if salt else loads)

    place.make = make
    async with place.working():
        await place.want(1)
        await until(lambda: place.state.goes_back)
        told = "the new models do not load: the stations go back to those that they had"
        assert place.state.sentence() == told
        loads.set()
        await until(lambda: place.state.outcome == "undone")
    assert place.state.success() == ""


def test_a_closed_station_says_why_it_ended() -> None:
    station = RemoteStation.__new__(RemoteStation)
    station.closed = True
    for cause, told in (
        ("it ran out of memory", "w: it ran out of memory"),
        ("", "w: its processes keep ending"),
    ):
        worker = WorkerState("w/0", "cpu", "closed", 0, cause)
        lanes = [LaneState("w", 0, [worker])]
        station._state = StationState(lanes=lanes, slab_used=0, slab_size=1, progressed_at=0.0)
        assert describe_unready(station) == told
