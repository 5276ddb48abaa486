"""A GPU whose memory other programs take while the daemon works. The GPU is a fake one: a folder in which each
worker notes what it uses, and a test what a neighbor uses."""

from __future__ import annotations

import contextlib
import json
import signal
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from anyio import to_thread

import daemon.service.lifecycle
from daemon.cli import commands
from daemon.config.loading import parse
from daemon.config.pipeline import PipelineSection
from daemon.core import hints
from daemon.core.errors import NoWorkersLeft
from daemon.core.messages import Beat, Setup
from daemon.core.slab import Slab
from daemon.layout import layout
from daemon.layout.placement import CONTEXT_BYTES
from daemon.monitoring import machine
from daemon.monitoring.metrics import Metrics
from daemon.monitoring.snapshot import WorkerState
from daemon.pipeline.executor import Executor
from daemon.service.lifecycle import Service, run_service
from daemon.system import gpus
from daemon.system.gpus import Gpu
from daemon.workers import batcher, opening, pool, slot
from daemon.workers.opening import open_batchers
from daemon.workers.pool import Pool
from daemon.workers.slot import QUICK_DEATHS, Room, Slot, need_for
from stages.contract.base import Limits
from stages.registry.fake import FAKE_CONTEXT, count_used
from tests.daemon_process import Place, counts_of, picture, until
from tests.faults.test_workers import failed_as

pytestmark = pytest.mark.anyio

GIB = 1 << 30
TOTAL = 16 * GIB
NEIGHBOR = "neighbor"


@dataclass
class Card:
    """A fake GPU: each worker has 1 GiB of weights, and each image of a batch needs 128 MiB."""

    folder: Path

    def list(self) -> list[Gpu]:
        used = count_used(str(self.folder))
        return [Gpu(0, "GPU-fake", "card", TOTAL, TOTAL - used, used, "9.0", None, ())]

    def fill(self, used: float) -> None:
        """A neighbor uses this number of GiB."""
        partial = self.folder / ".partial"
        partial.write_text(str(int(used * GIB)))
        partial.rename(self.folder / NEIGHBOR)

    def clear(self) -> None:
        (self.folder / NEIGHBOR).unlink(missing_ok=True)


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Card:
    folder = tmp_path / "memory"
    folder.mkdir()
    made = Card(folder)
    for looking in (layout, opening):
        monkeypatch.setattr(looking, "list_gpus", made.list)
    for module, changes in (
        (pool, {"FRESH_SECONDS": 0.05, "REST_SECONDS": 0.1, "LONGEST_REST_SECONDS": 0.2}),
        (slot, {"FIRST_PAUSE_SECONDS": 0.1, "LONGEST_PAUSE_SECONDS": 0.2}),
    ):
        for name, seconds in changes.items():
            monkeypatch.setattr(module, name, seconds)
    return made


def open_place(tmp_path: Path, card: Card, workers: int, *, mps: bool = False, **options: Any) -> Place:
    memory = {
        "memory_folder": str(card.folder),
        "memory_bytes": TOTAL,
        "load_bytes": GIB,
        "image_bytes": GIB >> 3,
    }
    ocr = {"options": memory | options, "batch_size": 8}
    pipeline = {"devices": ["cuda:0"], "workers_per_device": workers, "mps": mps}
    return Place(tmp_path, {"pipeline": pipeline, "stages": {"ocr": ocr}, "http": {"listen": "127.0.0.1:0"}})


@contextlib.asynccontextmanager
async def running(place: Place) -> AsyncIterator[Service]:
    service = Service(parse(place.settings, place.folder))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(service.run)
        await until(lambda: service.loaded)
        yield service
        tasks.cancel_scope.cancel()


def workers_of(service: Service) -> list[WorkerState]:
    assert service.pipeline
    return [
        worker
        for state in service.pipeline.states()
        for batcher in state.batchers
        for worker in batcher.workers
    ]


def states_of(service: Service) -> list[str]:
    return sorted(worker.state for worker in workers_of(service))


def count_published(place: Place) -> int:
    return int(place.rows("SELECT COUNT(*) FROM image WHERE emitted")[0][0])


async def ask(place: Place, *command: str) -> str:
    return (await to_thread.run_sync(lambda: place.command(*command))).stdout


async def test_when_a_neighbor_takes_memory_there_are_fewer_workers_and_no_image_fails(
    tmp_path: Path, card: Card, capfd: pytest.CaptureFixture[str]
) -> None:
    place = open_place(tmp_path, card, workers=3)
    async with running(place) as service:
        card.fill(13)  # nothing is left beside the weights of three workers
        place.drop_many(range(60))
        await until(lambda: count_published(place) == 60)
        assert "ready" in states_of(service)
        assert "waiting" in states_of(service)
        card.clear()
        await until(lambda: states_of(service) == ["ready"] * 3)
        place.drop_many(range(60, 90))
        await until(lambda: count_published(place) == 90)
    place.assert_kept(DONE=90)
    assert place.rows("SELECT MAX(attempts) FROM image") == [(1,)]
    told = "".join(capfd.readouterr())
    assert "so that the others of its GPU have more memory" in told
    assert "worker lost" not in told


async def test_when_not_even_one_image_fits_the_last_worker_waits_and_says_so(
    tmp_path: Path, card: Card
) -> None:
    place = open_place(tmp_path, card, workers=2)
    async with running(place) as service:
        card.fill(15)  # the weights of one worker fit beside it
        place.drop_many(range(20))
        await until(lambda: states_of(service) == ["waiting", "waiting"])
        await until(
            lambda: any("other programs have taken 15,360 MiB" in w.cause for w in workers_of(service))
        )
        snapshot = json.loads(await ask(place, "status", "--json"))
        assert any("wait for GPU memory" in line for line in snapshot["obstacles"])
        assert "other programs have taken 15,360 MiB of the memory of cuda:0" in await ask(place, "status")
        assert (snapshot["failed"], snapshot["in_flight"]) == (0, 20)
        assert await statuses_of(service, "readyz", "healthz") == [503, 200]
        card.clear()
        await until(lambda: count_published(place) == 20)
        await until(lambda: states_of(service) == ["ready", "ready"])
        assert await statuses_of(service, "readyz", "healthz") == [200, 200]
    place.assert_kept(DONE=20)


async def statuses_of(service: Service, *pages: str) -> list[int]:
    def status_of(page: str) -> int:
        try:
            with urllib.request.urlopen(f"{service.url}/{page}") as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    return [await to_thread.run_sync(status_of, page) for page in pages]


async def test_a_neighbor_that_leaves_before_anyone_looks_fails_no_image(
    tmp_path: Path, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def leave_first(slots: Room) -> int:
        card.clear()
        return await measure_taken(slots)

    measure_taken = Room.measure_taken
    monkeypatch.setattr(Room, "measure_taken", leave_first)
    place = open_place(tmp_path, card, workers=1)
    place.settings["pipeline"]["max_attempts"] = 1
    async with running(place):
        card.fill(15)
        place.drop_many(range(1))
        await until(lambda: count_published(place) == 1)
    place.assert_kept(DONE=1)


async def test_for_a_huge_image_no_worker_leaves_but_it_waits_for_a_neighbor_too(
    tmp_path: Path, card: Card, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(batcher, "USUAL_PIXELS", 0)
    place = open_place(tmp_path, card, workers=2)
    async with running(place) as service:
        card.fill(14)
        place.drop_many(range(4))
        await until(lambda: counts_of(place)["PENDING"] == 4)
        await anyio.sleep(5 * pool.FRESH_SECONDS)
        assert states_of(service) == ["ready", "ready"]
        card.clear()
        await until(lambda: count_published(place) == 4)
    place.assert_kept(DONE=4)
    assert place.rows("SELECT MAX(attempts) FROM image") == [(1,)]
    assert "worker ends" not in "".join(capfd.readouterr())


async def test_gpus_has_what_the_workers_of_a_running_daemon_have_in_tensors_and_keep(
    tmp_path: Path, card: Card, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (machine, gpus):
        monkeypatch.setattr(module, "list_gpus", card.list)
    place, own = open_place(tmp_path, card, workers=2, load_bytes=3 * GIB), 3 * GIB - FAKE_CONTEXT
    monkeypatch.setattr(hints, "_options", [])

    async def list_memory() -> list[int | None]:
        await to_thread.run_sync(lambda: commands.gpus(place.config, as_json=True))
        [document] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return [document["allocated_bytes"], document["cached_bytes"]]

    async with running(place) as service:
        await until(lambda: [worker.gpu_allocated_bytes for worker in workers_of(service)] == [own, own])
        assert await list_memory() == [2 * own, 2 * own]
    assert await list_memory() == [None, None]


async def test_an_image_that_does_not_fit_although_nobody_else_uses_the_gpu_fails(
    tmp_path: Path, card: Card
) -> None:
    place = open_place(tmp_path, card, workers=2, image_bytes=2 * TOTAL)
    place.drop_many(range(2))
    with anyio.fail_after(40):
        await run_service(parse(place.settings, tmp_path), once=True)
    assert len(failed_as(place.assert_kept(FAILED=2), "memory")) == 2


async def test_the_workers_of_another_segment_on_the_same_gpu_are_no_neighbors(
    tmp_path: Path, card: Card
) -> None:
    place = open_place(tmp_path, card, workers=0, image_bytes=2 * TOTAL)
    memory = {"memory_folder": str(card.folder), "memory_bytes": TOTAL, "load_bytes": 4 * GIB}
    place.settings["stages"]["clip"]["options"] = memory
    place.settings["pipeline"] |= {"devices": [], "segment": split_stages("cuda:0")}
    place.drop_many(range(2))
    with anyio.fail_after(40):
        await run_service(parse(place.settings, tmp_path), once=True)
    assert len(failed_as(place.assert_kept(FAILED=2), "memory")) == 2


def split_stages(device: str) -> list[dict[str, Any]]:
    """Two segments on one device, each with two workers."""
    runs = (["ocr", "yolo"], ["clip", "blip"])
    return [{"stages": run, "devices": [device], "workers_per_device": 2} for run in runs]


async def test_an_executor_knows_what_its_own_workers_have_and_counts_nothing_where_others_have_workers_too(
    tmp_path: Path, card: Card
) -> None:
    settings = open_place(tmp_path, card, workers=0).settings
    settings["pipeline"] |= {"devices": [], "segment": split_stages("cuda:0")}
    made = layout.Layout.of(parse(settings, tmp_path))
    with contextlib.closing(Slab(1 << 20)) as slab:
        whole = open_batchers(made, slab, Metrics())
        part = open_batchers(made, slab, Metrics(), [[0], [0]])
    for batchers, counted in ((whole, 4), (part, 2)):
        slots = [slot for batcher in batchers for slot in batcher.pool.slots]
        [gpu] = {id(slot.room): slot.room for slot in slots}.values()
        assert gpu
        assert gpu.slots == slots
        assert len(slots) == counted
    card.fill(8)
    rooms = [batchers[0].pool.slots[0].room for batchers in (whole, part)]
    assert [await gpu.measure_taken() for gpu in rooms if gpu] == [8 * GIB, 0]


async def test_a_slot_that_waits_for_much_memory_does_not_keep_one_of_another_segment_from_starting(
    tmp_path: Path, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = {"memory_folder": str(card.folder), "memory_bytes": TOTAL}
    place = open_place(tmp_path, card, workers=0)
    place.settings["stages"]["clip"]["options"] = memory | {"load_bytes": GIB}
    runs = (["ocr", "yolo"], ["clip", "blip"])
    tables = [{"stages": run, "devices": ["cuda:0"], "workers_per_device": 1} for run in runs]
    place.settings["pipeline"] |= {"devices": [], "segment": tables}
    come_late(card, 15.5, monkeypatch)
    async with running(place) as service:
        await until(lambda: all(worker.short_of_memory for worker in workers_of(service)))
        assert service.pipeline
        [executor] = cast(list[Executor], service.pipeline.executors)
        executor.batchers[0].pool.slots[0].peak_bytes = 8 * GIB  # as of a worker that has been there
        card.fill(10)
        await until(lambda: [worker.state for worker in workers_of(service)] == ["waiting", "ready"])


async def test_an_image_that_does_not_fit_while_others_do_fails_in_spite_of_a_neighbor(
    tmp_path: Path, card: Card
) -> None:
    place = open_place(tmp_path, card, workers=2, fail={"HUGE": "oom"})
    place.settings["pipeline"]["max_attempts"] = 1
    dropped = 0
    async with running(place) as service:
        card.fill(6)
        place.drop("bad.ppm", picture(0) + b"HUGE")
        with anyio.fail_after(60):
            while not counts_of(place)["FAILED"]:
                place.drop_many(range(dropped, dropped + 4))
                dropped += 4
                await anyio.sleep(0.2)
        await until(lambda: count_published(place) == dropped + 1)
        await until(lambda: "ready" in states_of(service))
    assert len(failed_as(place.assert_kept(DONE=dropped, FAILED=1), "memory")) == 1


def come_late(card: Card, used: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The neighbor comes when the daemon has looked at the free memory, and before its workers start."""
    looks = iter([card.list()])
    monkeypatch.setattr(layout, "list_gpus", lambda: next(looks, None) or card.list())
    card.fill(used)


async def test_a_worker_without_memory_to_start_is_started_later(
    tmp_path: Path, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = open_place(tmp_path, card, workers=3)
    come_late(card, 13.5, monkeypatch)
    place.drop_many(range(20))
    async with running(place) as service:
        await until(lambda: count_published(place) == 20)
        assert states_of(service).count("ready") in (1, 2)
        card.clear()
        await until(lambda: states_of(service) == ["ready"] * 3)
    place.assert_kept(DONE=20)


async def test_the_only_worker_waits_for_a_neighbor_who_came_before_it_could_start(
    tmp_path: Path, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = open_place(tmp_path, card, workers=1)
    come_late(card, 15.5, monkeypatch)
    place.drop_many(range(5))
    async with running(place) as service:
        await until(lambda: workers_of(service)[0].short_of_memory)
        card.clear()
        await until(lambda: count_published(place) == 5)
    place.assert_kept(DONE=5)


async def test_a_failed_start_means_fewer_workers_and_closes_no_slot(
    tmp_path: Path, card: Card, capfd: pytest.CaptureFixture[str]
) -> None:
    """More were planned than fit, without any neighbor."""
    place = open_place(tmp_path, card, workers=3, load_bytes=6 * GIB)
    place.drop_many(range(20))
    async with running(place) as service:
        await until(lambda: count_published(place) == 20)
        await until(lambda: any("must be free" in worker.cause for worker in workers_of(service)))
        assert states_of(service) == ["ready", "ready", "waiting"]
        told = "".join(capfd.readouterr())
    place.assert_kept(DONE=20)
    assert 1 <= told.count("worker could not start") < QUICK_DEATHS
    assert "worker slot closed" not in told


async def test_a_worker_comes_back_only_when_as_much_is_free_as_the_largest_had(
    tmp_path: Path, card: Card
) -> None:
    place = open_place(tmp_path, card, workers=2, load_bytes=4 * GIB)
    async with running(place) as service:
        await until(lambda: min(worker.gpu_peak_bytes for worker in workers_of(service)) >= 3 * GIB)
        card.fill(8)
        place.drop_many(range(20))
        await until(lambda: count_published(place) == 20)
        card.fill(7.8)  # 4.2 GiB are free: enough for the weights, but not with a tenth more and images
        await until(lambda: any("must be free" in worker.cause for worker in workers_of(service)))
        assert states_of(service) == ["ready", "waiting"]
        assert "GPU peak MiB" in await ask(place, "status")
        card.clear()
        await until(lambda: states_of(service) == ["ready"] * 2)
    place.assert_kept(DONE=20)


async def test_models_that_are_too_large_for_the_gpu_end_the_daemon_as_before(
    tmp_path: Path, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "BACKOFF_SECONDS", 0.01)
    place = open_place(tmp_path, card, workers=2, load_bytes=2 * TOTAL)
    place.drop_many(range(2))
    with pytest.raises(NoWorkersLeft, match="the fake GPU is full"), anyio.fail_after(60):
        await run_service(parse(place.settings, tmp_path))


async def test_a_stop_does_not_wait_for_memory(
    tmp_path: Path, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        daemon.service.lifecycle, "leave_within", lambda *_: None
    )  # it would end this process
    monkeypatch.setattr(slot, "FIRST_PAUSE_SECONDS", 1000.0)
    monkeypatch.setattr(slot, "LONGEST_PAUSE_SECONDS", 1000.0)
    place = open_place(tmp_path, card, workers=2)
    service = Service(parse(place.settings, place.folder))
    with anyio.CancelScope() as stopping:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(service.run)
            await until(lambda: service.loaded)
            card.fill(15)
            place.drop_many(range(20))
            await until(lambda: states_of(service) == ["waiting", "waiting"])
            stopping.deadline = anyio.current_time() + service.config.pipeline.drain_seconds / 2
            signal.raise_signal(signal.SIGTERM)
    assert not stopping.cancelled_caught
    assert place.judge(finished=False).problems == []
    assert counts_of(place) == {"PENDING": 20}
    assert place.rows("SELECT MAX(attempts) FROM image") == [(0,)]


@pytest.mark.parametrize("queue_images", [1, 2000])
async def test_a_stop_does_not_wait_for_a_worker_that_waits_for_memory_to_start(
    queue_images: int, tmp_path: Path, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        daemon.service.lifecycle, "leave_within", lambda *_: None
    )  # it would end this process
    place = open_place(tmp_path, card, workers=1)
    monkeypatch.setattr("daemon.workers.batcher.QUEUE_IMAGES", queue_images)
    come_late(card, 15.5, monkeypatch)
    place.drop_many(range(20))
    service = Service(parse(place.settings, place.folder))
    with anyio.CancelScope() as stopping:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(service.run)
            taken = min(20, queue_images + 1)  # some are in the queue, and one may wait for room in it
            await until(lambda: service.pipeline is not None and service.pipeline.in_flight >= taken)
            await until(lambda: service.loaded and workers_of(service)[0].short_of_memory)
            await anyio.wait_all_tasks_blocked()
            stopping.deadline = anyio.current_time() + service.config.pipeline.drain_seconds / 2
            signal.raise_signal(signal.SIGTERM)
    assert not stopping.cancelled_caught
    assert place.judge(finished=False).problems == []
    assert counts_of(place) == {"PENDING": 20}
    assert place.rows("SELECT MAX(attempts) FROM image") == [(0,)]


async def test_a_gpu_is_crowded_while_another_worker_is_ready_there_or_others_have_taken_memory(
    card: Card,
) -> None:
    setup = Setup("w", "cuda:0", [], slab_bytes=0, threads=1, decoders=1, limits=Limits(), cascade=None)
    shared = Room(card.list(), card.list)
    first, second = (Slot(setup, "cuda:0", {}, room=shared) for _ in range(2))
    with contextlib.closing(Slab(1 << 20)) as slab:
        held = Pool("w", [first, second], slab.fd, PipelineSection(), Metrics())
    assert not await held._is_crowded(first)
    card.fill(1)
    assert await held._is_crowded(first)
    card.clear()
    second.state, second.worker = (
        "ready",
        cast(Any, SimpleNamespace(heard_at=time.monotonic(), beat=Beat(0), busy=0)),
    )
    assert await held._is_crowded(first)


async def test_that_a_gpu_is_full_is_not_shown_for_longer_than_it_is_known() -> None:
    """The image that did not fit may have been done by another GPU, and no other has come."""
    setup = Setup("w", "cuda:0", [], slab_bytes=0, threads=1, decoders=1, limits=Limits(), cascade=None)
    now = time.monotonic()
    worker = SimpleNamespace(heard_at=now, beat=Beat(0), busy=0, answered=0, shared=False, stages_loaded=[])
    slot = Slot(setup, "cuda:0", {}, state="ready", worker=cast(Any, worker), full_until=now + 60)
    assert (slot.describe().state, slot.describe().short_of_memory) == ("waiting", True)
    slot.full_until = now - 1
    assert (slot.describe().state, slot.describe().short_of_memory) == ("ready", False)


def slot_of(reserved: int | None) -> Any:
    """A slot with a worker that has reserved this number of bytes, or without one."""
    beat = Beat(0, device_used_bytes=reserved or 0)
    return SimpleNamespace(worker=None if reserved is None else SimpleNamespace(beat=beat))


class TestRoom:
    def make(self, used: float) -> Room:
        before = Gpu(0, "GPU-1", "card", TOTAL, TOTAL - GIB, GIB, "9.0", None, ())
        now = Gpu(0, "GPU-1", "card", TOTAL, 0, int(used * GIB), "9.0", None, ())
        return Room([before], lambda: [now])

    async def test_what_others_have_taken_is_neither_what_they_had_nor_what_the_workers_have(self) -> None:
        held = self.make(used=8)
        held.slots += [slot_of(GIB), slot_of(2 * GIB), slot_of(None)]
        assert await held.measure_taken() == 8 * GIB - GIB - 3 * GIB - 2 * CONTEXT_BYTES

    async def test_without_an_answer_of_the_driver_nobody_has_taken_anything(self) -> None:
        gone = Room([Gpu(0, "GPU-1", "card", TOTAL, 0, 0, "9.0", None, ())], lambda: [])
        assert await gone.measure_taken() == 0
        assert await gone.measure_free() is None

    async def test_pauses_grow_until_something_fits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        room_of = self.make(used=8)
        assert [room_of.next_pause() for _ in range(6)] == [2, 4, 8, 16, 30, 30]
        room_of.note_fit()
        assert room_of.next_pause() == 2

    async def test_a_worker_needs_what_the_largest_had_and_a_tenth_more(self) -> None:
        assert need_for([GIB, 3 * GIB]) == pytest.approx(1.1 * (3 * GIB + CONTEXT_BYTES), abs=1)


async def test_rests_grow_up_to_a_limit_for_days() -> None:
    assert [pool.rest_seconds(rests) for rests in (1, 2, 3, 5, 5000)] == [5.0, 10.0, 20.0, 60.0, 60.0]
