"""Executors in processes of their own: the same results, whatever becomes of an executor."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import anyio
import pytest

from daemon.config.loading import parse
from daemon.core.errors import NoWorkersLeft
from daemon.core.jobs import Ending, Job, JobStatus, Placed
from daemon.ledger.record import Committed, Record
from daemon.monitoring.metrics import Metrics
from daemon.pipeline import remote, wire
from daemon.pipeline.executor import Published
from daemon.pipeline.schedule import Schedule
from daemon.service.lifecycle import Service, run_service
from daemon.system.cores import Cores
from tests.daemon_process import Daemon, Place, picture, running, wait_for, with_pauses
from tests.faults.executors import executors_of
from tests.makers import done, make_job, make_record

SLOW = {name: {"options": {"latency_per_image_seconds": 0.002}} for name in ("blip",)}
PICTURES = {f"{number:05}.ppm": picture(number) for number in range(100)}


def settings(executors: int, **tables: Any) -> dict[str, Any]:
    """One worker in each executor."""
    return {"pipeline": {"executors": executors, "workers_per_device": executors}, **tables}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> list[Place]:
    """What one executor has published of the same files, and what two have."""
    return [publish(tmp_path_factory.mktemp("executors"), executors) for executors in (1, 2)]


def publish(folder: Path, executors: int) -> Place:
    place = Place(folder, settings(executors, output={"sinks": ["jsonl"]}))
    process(place, {**PICTURES, "same.ppm": picture(0), "no picture.jpg": b"not one"})
    return place


def process(place: Place, files: Mapping[str, bytes]) -> None:
    """With a daemon that hands out a few images at a time, when all executors are ready: each has some of them."""
    with Daemon(place, environment=with_pauses({"daemon.pipeline.coordinator.FEED": 8})) as daemon:
        for path, data in files.items():
            place.drop(path, data)
        daemon.wait_idle(len(files))
        daemon.wait_until(
            lambda s: all(worker["batches"] for worker in s["workers"]), "images in each executor"
        )
        assert daemon.stop() == 0


def test_two_executors_publish_what_one_does(places: list[Place]) -> None:
    documents = []
    for place in places:
        place.assert_kept(DONE=101, FAILED=1)
        documents.append({path: place.sidecar(path)["caption"] for path in ("00007.ppm", "same.ppm")})
    assert documents[0] == documents[1]


def test_two_executors_of_a_pipelined_placement_publish_what_one_does(tmp_path: Path) -> None:
    written = []
    for executors in (1, 2):
        tables = [
            {"stages": stages, "devices": ["cpu"], "workers_per_device": executors}
            for stages in (["ocr"], ["yolo", "clip", "blip"])
        ]
        place = Place(tmp_path / str(executors), {"pipeline": {"executors": executors, "segment": tables}})
        process(place, {**PICTURES, "no picture.jpg": b"not one"})
        place.assert_kept(DONE=100, FAILED=1)
        written.append([without_times(place.sidecar(name)) for name in PICTURES])
    assert written[0] == written[1]


def without_times(document: dict[str, Any]) -> dict[str, Any]:
    results = {"ocr", "objects", "clip", "caption", "bin"}
    assert results <= document.keys()
    return {key: document[key] for key in (*results, "models")}


def test_sidecars_of_equal_files_are_what_the_ledger_has(tmp_path: Path) -> None:
    """Two executors may have the same bytes at the same time; the first result that is stored counts."""
    place = Place(tmp_path, settings(2))
    for number in range(300):
        place.drop(f"{number}.ppm", picture(number % 40))
    assert place.run_once().returncode == 0
    verified = place.command("verify")
    assert verified.returncode == 0, verified.stdout


def test_the_checksums_that_executors_compute_are_those_that_a_reader_computes(places: list[Place]) -> None:
    assert json.loads(places[1].command("verify", "--json").stdout)["counts"] == {"whole": 102}


def test_sinks_get_the_records_of_every_executor(places: list[Place]) -> None:
    lines = Path(f"{places[1].site.results}.jsonl").read_bytes().splitlines()
    assert len({json.loads(line)["source"]["path"] for line in lines}) == len(lines) == 101


def test_a_slab_has_room_for_an_image_in_every_executor(tmp_path: Path) -> None:
    tables = settings(2)
    tables["pipeline"]["slab_bytes"] = "1 MiB"
    place = Place(tmp_path, tables)
    place.drop("large.ppm", picture(1) + bytes(700_000))
    assert place.run_once().returncode == 0
    place.assert_kept(DONE=1)


def test_metrics_and_status_count_the_work_of_all_executors(tmp_path: Path) -> None:
    place = Place(tmp_path, settings(2))
    place.drop_many(range(200))
    started = time.time()
    with Daemon(place) as daemon:
        daemon.wait_idle(200)
        assert len(executors_of(place)) == 2
        wait_for(
            lambda: daemon.metric("visiond_stage_images_total", stage="blip") == 200, "the executors' counts"
        )
        assert daemon.metric("visiond_image_wait_seconds_count") == 200
        assert daemon.metric("visiond_device_stage_images_total", device="cpu", stage="blip") == 200
        assert daemon.metric("visiond_inbox_images_total", inbox=str(place.inbox()), outcome="done") == 200
        assert daemon.metric("visiond_images_total", outcome="done", reason="") == 200
        workers = daemon.status()["workers"]
        assert sorted(worker["name"] for worker in workers) == [
            "ocr+yolo+clip+blip/0",
            "ocr+yolo+clip+blip/1",
        ]
        assert all(started < worker["ready_at"] < time.time() for worker in workers)
        assert daemon.stop() == 0
    place.assert_kept(DONE=200)


def test_a_stop_drains_every_executor(tmp_path: Path) -> None:
    place = Place(tmp_path, settings(2, stages=SLOW))
    place.drop_many(range(400))
    with Daemon(place) as daemon:
        daemon.wait_until(lambda s: s["ended_in_this_run"] > 50, "progress")
        assert daemon.stop() == 0
    assert place.judge(finished=False).problems == []
    assert place.run_once().returncode == 0
    place.assert_kept(DONE=400)


def test_a_killed_daemon_takes_its_executors_with_it(tmp_path: Path) -> None:
    place = Place(tmp_path, settings(2, stages=SLOW))
    place.drop_many(range(400))
    with Daemon(place) as daemon:
        daemon.wait_until(lambda s: s["ended_in_this_run"] > 50, "progress")
        daemon.kill()
        assert place.orphans() == []
    assert place.run_once().returncode == 0
    place.assert_kept(DONE=400)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "SILENCE_SECONDS", 6.0)
    monkeypatch.setattr(remote, "BACKOFF_SECONDS", 0.05)


@pytest.fixture
def stopper(tmp_path: Path) -> Iterator[Place]:
    """A place with three executors, of which one is stopped by a signal when all have workers, and so jobs: on a busy
    machine two of them may otherwise do all the work before the third has started."""
    slower = {"blip": {"options": {"latency_per_image_seconds": 0.04}}}
    place = Place(tmp_path, settings(3, stages=slower))
    place.drop_many(range(600))

    def stop_one() -> None:
        wait_for(lambda: len(children()) == 3 and all(map(workers_of, children())), "all executors at work")
        wait_for(lambda: place.has_ledger() and place.rows("SELECT 1 FROM image WHERE emitted = 1"), "work")
        os.kill(children()[0], signal.SIGSTOP)

    thread = threading.Thread(target=stop_one)
    thread.start()
    yield place
    thread.join()


def workers_of(executor: int) -> list[str]:
    return Path(f"/proc/{executor}/task/{executor}/children").read_text().split()


def children() -> list[int]:
    """Executors of this process."""
    own = Path(f"/proc/self/task/{threading.main_thread().native_id}/children").read_text().split()
    return running("daemon.pipeline.child", map(int, own))


@pytest.mark.usefixtures("impatient")
def test_an_executor_that_hangs_is_replaced_and_holds_up_no_other(
    stopper: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    service = Service(parse(stopper.settings, stopper.folder), once=True)
    anyio.run(service.run, backend_options={"use_uvloop": True})
    assert service.counts.ended[JobStatus.DONE] == 600
    stopper.assert_kept(DONE=600)
    assert "it reported nothing for 6 s" in capfd.readouterr().out


@pytest.mark.usefixtures("impatient")
def test_without_any_executor_left_the_daemon_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "QUICK_LOSSES", 2)
    place = Place(tmp_path, settings(2))
    place.drop_many(range(3))
    config = parse(place.settings, place.folder)
    broken = config.model_copy(
        update={"pipeline": config.pipeline.model_copy(update={"max_attempts": -5})}
    )  # which an executor refuses
    with pytest.raises(NoWorkersLeft, match="No executor is left: exited with status"):
        anyio.run(run_service, broken, backend_options={"use_uvloop": True})


class Recorder:
    """A coordinator with two jobs, which notes what it takes back."""

    bins: Mapping[str, None] = MappingProxyType({})
    has_sinks = True

    def __init__(self) -> None:
        self.published: list[Published] = []
        self.jobs = [make_job(b"a.jpg", id=1), make_job(b"b.jpg", id=2)]
        self.schedule = Schedule()

    async def next_jobs(self, executor: object) -> list[Job]:
        self.schedule.offer(self.jobs)
        return self.schedule.take(executor, 2, {1}, 0.0)

    async def end(self, endings: list[Ending]) -> Committed:
        committed = Committed(endings, {ending.job.id for ending in endings}, {})
        self.schedule.end(committed.endings, committed.newest)
        return committed

    def record_of(self, ending: Ending) -> Record:
        return make_record(Path("/inbox"), id=ending.job.id)

    async def note_published(self, group: Published) -> None:
        self.published.append(group)


@contextlib.asynccontextmanager
async def working(coordinator: Any) -> AsyncIterator[remote.RemoteExecutor]:
    """An executor without a process, which has the coordinator's jobs."""
    setup = wire.ExecutorSetup("an executor", b"", [], Cores(1), [], [], [], [], [], [], 1 << 20)
    executor = remote.RemoteExecutor(setup, Metrics())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(executor.run, coordinator)
        await executor._hand_out(wire.NextJobs(1))
        yield executor
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_of_a_lost_executor_committed_images_are_not_handed_out_again() -> None:
    coordinator = Recorder()
    async with working(coordinator) as executor:
        await executor._end(wire.End(2, [done(make_job(id=1))]))
        coordinator.schedule.lose(executor)
    assert [entry.job.id for entry in coordinator.schedule.owed()] == [1]
    assert [job.id for job in coordinator.schedule.take("another", 2, {1}, 0.0)] == [2]


@pytest.mark.anyio
@pytest.mark.parametrize("has_sinks", [True, False])
async def test_sinks_get_images_too_whose_source_cannot_leave_its_inbox_yet(has_sinks: bool) -> None:
    coordinator = Recorder()
    coordinator.has_sinks = has_sinks
    async with working(coordinator) as executor:
        await executor._end(wire.End(2, [done(make_job(id=number)) for number in (1, 2)]))
        await executor._note_published(
            wire.NotePublished(3, [1, 2], {1, 2}, [Placed(1), Placed(2, is_held=True)], {1: "full"}, [], 0.0)
        )
    [group] = coordinator.published
    assert [record.id for record in group.publication.records] == ([1, 2] if has_sinks else [])
