"""The whole pipeline with fake stages, in this process except for its workers; where it must crash,
in a separate process."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
import pytest

from daemon.config.loading import parse
from daemon.core.jobs import Failure, Job, Read
from daemon.inbox import disk
from daemon.ledger.ledger import Ledger
from daemon.monitoring.metrics import Metrics
from daemon.pipeline import executor, schedule
from daemon.pipeline.coordinator import Pipeline
from daemon.results import publisher
from daemon.results.judge import Judge
from daemon.service.lifecycle import Service
from daemon.system.clock import steady_seconds
from daemon.workers.pool import Pool
from stages.contract.base import Reason
from stages.contract.binning import Thresholds
from tests.daemon_process import PATIENCE, STAGES, Daemon, Gate, Place, picture, until, wait_for
from tests.makers import done, make_file, open_destination, postponed

PASSING = ("id", "timings", "finished_at")  # what differs from run to run


def run_once(place: Place) -> Service:
    """Process all files; returns the service for its metrics."""
    service = Service(parse(place.settings, place.folder), once=True)
    anyio.run(service.run, backend_options={"use_uvloop": True})
    return service


def answers(place: Place) -> dict[bytes, dict[str, Any]]:
    """Every sidecar, without what differs between runs and folders."""
    documents = {path: document for (_, path), document in place.judge().results.items()}
    for document in documents.values():
        del document["source"]["inbox"], document["source"]["seen_at"]
        for key in PASSING:
            del document[key]
    return documents


def reused(service: Service) -> dict[str, float]:
    return {stage: service.metrics.value("visiond_reused_results_total", stage=stage) for stage in STAGES}


def asked(service: Service) -> dict[str, float]:
    """The number of images that each stage processed."""
    return {stage: service.metrics.value("visiond_stage_images_total", stage=stage) for stage in STAGES}


def test_the_inbox_of_the_highest_priority_is_served_first(
    tmp_path: Path,
    lend_when: Callable[[Callable[[Pool], object]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("daemon.workers.batcher.QUEUE_IMAGES", 4)
    inboxes = [{"name": "low", "settle_seconds": 0}, {"name": "high", "priority": 5, "settle_seconds": 0}]
    stages = {name: {"batch_size": 4} for name in STAGES}
    place = Place(tmp_path, {"inbox": inboxes, "pipeline": {"threads_per_worker": 1}, "stages": stages})
    # whichever inbox is read faster
    lend_when(lambda _: place.rows("SELECT COUNT(*) FROM image") == [(310,)])
    place.drop_many(range(300), "low")
    place.drop_many(range(300, 310), "high")
    run_once(place)
    place.assert_kept(DONE=310)
    order = [name for (name,) in place.rows("SELECT priority FROM image ORDER BY finished_at, id")]
    # Low was found first; the images of it that were fed by then, at most 64, may come before.
    assert max(index for index, priority in enumerate(order) if priority == 5) < 2 * 64 + 10


def test_the_same_bytes_under_the_same_models_cost_no_work(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.drop_many(range(12))
    assert asked(run_once(place)) == dict.fromkeys(STAGES, 12)
    for number in range(12):
        place.drop(f"copies/{number}.ppm", picture(number))
    second = run_once(place)
    assert reused(second) == dict.fromkeys(STAGES, 12)
    assert asked(second) == dict.fromkeys(STAGES, 0)
    place.configure({"stages": {"clip": {"dtype": "float16"}}})  # another model: only its stage runs again
    for number in range(12):
        place.drop(f"more/{number}.ppm", picture(number))
    assert asked(run_once(place)) == {"ocr": 0, "yolo": 0, "clip": 12, "blip": 0}
    place.assert_kept(DONE=36)


def test_the_jsonl_output_has_the_whole_name_of_its_results_folder(tmp_path: Path) -> None:
    place = Place(tmp_path, {"output": {"results": "res.1", "sinks": ["jsonl"]}})
    place.drop_many(range(3))
    run_once(place)
    assert len((tmp_path / "res.1.jsonl").read_bytes().splitlines()) == 3


@pytest.mark.parametrize(
    "segments",
    [
        [("ocr", "yolo"), ("clip", "blip")],
        [("ocr",), ("yolo",), ("clip",), ("blip",)],
    ],
    ids=len,
)
def test_pipelined_over_several_workers_gives_the_results_of_replicated_file_for_file(
    tmp_path: Path, segments: list[tuple[str, ...]]
) -> None:
    tables = [{"stages": list(stages), "devices": ["cpu"], "workers_per_device": 1} for stages in segments]
    tables[0]["workers_per_device"] = 2
    results = []
    for name, pipeline in (("replicated", {"placement": "replicated"}), ("pipelined", {"segment": tables})):
        place = Place(tmp_path / name, {"pipeline": pipeline})
        place.drop_many(range(60))
        run_once(place)
        place.assert_kept(DONE=60)
        results.append(answers(place))
    assert results[0] == results[1]


def test_in_mode_cascade_the_stages_behind_a_decided_bin_are_skipped(tmp_path: Path) -> None:
    tables = [
        {"stages": ["ocr"], "devices": ["cpu"]},
        {"stages": ["yolo", "clip", "blip"], "devices": ["cpu"]},
    ]
    for name, pipeline in (("one", {}), ("two", {"segment": tables})):
        place = Place(tmp_path / name, {"pipeline": {"mode": "cascade", **pipeline}})
        place.drop_many(range(40))
        service = run_once(place)
        place.assert_kept(DONE=40)
        stages = {"A": ["ocr"], "B": ["ocr", "yolo"], "C": list(STAGES)}
        documents = answers(place).values()
        assert all(list(document["models"]) == stages[document["bin"]["name"]] for document in documents)
        bins = [document["bin"]["name"] for document in documents]
        assert asked(service)["yolo"] == 40 - bins.count("A") < 40
        assert asked(service)["blip"] == bins.count("C") < asked(service)["yolo"]


def test_a_backlog_larger_than_the_slab_is_processed_and_a_file_larger_than_it_fails(tmp_path: Path) -> None:
    place = Place(tmp_path, {"pipeline": {"slab_bytes": 1 << 20}})
    for number in range(40):
        place.drop(f"{number}.ppm", picture(number, bytes(100_000)))
    place.drop("fits-exactly.ppm", picture(100, bytes((1 << 20) - len(picture(100)))))
    place.drop("too-large.ppm", picture(101, bytes((1 << 20) + 1)))
    service = run_once(place)
    assert place.assert_kept(DONE=41, FAILED=1).reasons("FAILED") == {b"too-large.ppm": "bytes"}
    assert service.metrics.value("visiond_slab_size_bytes") == 1 << 20


def test_after_a_crash_between_segments_work_resumes_at_the_stage_it_had_reached(tmp_path: Path) -> None:
    tables = [
        {"stages": ["ocr", "yolo"], "devices": ["cpu"]},
        {"stages": ["clip", "blip"], "devices": ["cpu"]},
    ]
    place = Place(
        tmp_path,
        {"pipeline": {"segment": tables}, "stages": {"blip": {"options": {"latency_seconds": 60.0}}}},
    )
    place.drop_many(range(30))
    with Daemon(place) as daemon:
        wait_for(lambda: place.rows("SELECT COUNT(*) FROM result") == [(60,)], "the first segment's results")
        daemon.kill(group=True)
    assert place.rows("SELECT DISTINCT status FROM image") == [(0,)]
    place.configure({"stages": {"blip": {"options": {"latency_seconds": 0.0}}}})
    service = run_once(place)
    assert asked(service) == {"ocr": 0, "yolo": 0, "clip": 30, "blip": 30}
    place.assert_kept(DONE=30)


def test_a_file_deleted_or_replaced_while_it_waits_is_gone_and_its_new_version_done(tmp_path: Path) -> None:
    place, gate = Place(tmp_path, {"pipeline": {"slab_bytes": 1 << 20}}), Gate(tmp_path)
    for number in range(90):  # more than the slab has room for
        place.drop(f"{number:05d}.ppm", picture(number, bytes(1 << 16)))
    with Daemon(place, ready=False, environment=gate.environment) as daemon:
        wait_for(
            lambda: place.has_ledger() and place.rows("SELECT COUNT(*) FROM image") == [(90,)], "a backlog"
        )
        last = [path for (path,) in place.rows("SELECT path FROM image ORDER BY id DESC LIMIT 2")]
        deleted, replaced = (path.decode() for path in last)
        (place.inbox() / deleted).unlink()
        place.drop(replaced, picture(1000))
        wait_for(lambda: place.rows("SELECT COUNT(*) FROM image") == [(91,)], "the new version")
        gate.let_in()
        daemon.wait_idle(91)
        assert daemon.stop() == 0
    verdict = place.judge(deleted=frozenset([deleted.encode()]))
    assert verdict.problems == []
    assert verdict.counts == {"DONE": 89, "GONE": 2}


def test_a_version_that_is_replaced_while_a_worker_has_it_is_never_published(tmp_path: Path) -> None:
    place, gate = Place(tmp_path, {"output": {"sinks": ["jsonl"]}}), Gate(tmp_path)
    place.drop("a.ppm", picture(1))
    with Daemon(place, ready=False, environment=gate.environment) as daemon:
        wait_for(lambda: place.has_ledger() and place.rows("SELECT id FROM image"), "its row")
        daemon.wait_until(lambda status: status["slab_used_bytes"], "its bytes in the slab")
        place.drop("a.ppm", picture(2))
        wait_for(lambda: place.rows("SELECT COUNT(*) FROM image") == [(2,)], "the new version")
        gate.let_in()
        daemon.wait_idle(2)
        assert daemon.stop() == 0
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 1
    place.assert_kept(DONE=1, GONE=1)


def test_retries_wait_and_end_in_failure_after_max_attempts(tmp_path: Path) -> None:
    place = Place(tmp_path, {"pipeline": {"max_attempts": 3}})
    place.configure({"stages": {"yolo": {"options": {"fail": {"TRANSIENT": "transient"}}}}})
    place.drop("a.ppm", picture(1, b"TRANSIENT"))
    place.drop_many(range(5))
    service = run_once(place)
    place.assert_kept(DONE=5, FAILED=1)
    assert place.rows("SELECT attempts, reason FROM image WHERE status = 2") == [(3, "stage")]
    assert service.metrics.value("visiond_retries_total", reason="stage") == 2


def test_when_file_descriptors_run_out_the_pipeline_waits_and_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = []

    def short_at_first(step: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if step not in refused:
                refused.append(step)
                raise OSError(errno.EMFILE, "Too many open files")
            return step(*arguments)

        return call

    for module, name in (
        (disk.FolderOrigin, "read"),
        (executor, "publish_records"),
        (publisher, "sync_folders"),
    ):
        monkeypatch.setattr(module, name, short_at_first(getattr(module, name)))
    place = Place(tmp_path, {"pipeline": {"max_attempts": 1}})
    place.drop_many(range(5))
    run_once(place)
    assert len(refused) == 3
    place.assert_kept(DONE=5)


def published(folder: Path) -> list[str]:
    return [file.name for file in folder.rglob("*.json")]


async def run_nothing(coordinator: Pipeline) -> None: ...


EXECUTOR = SimpleNamespace(run=run_nothing, drain=lambda **_: None)


def make_coordinator(ledger: Ledger, folder: Path) -> Pipeline:
    async def watch(*_: object, once: bool) -> None:
        await anyio.sleep_forever()

    watcher: Any = SimpleNamespace(answering=lambda: {1}, run=watch)
    executor: Any = EXECUTOR
    return Pipeline(
        ledger=ledger,
        watcher=watcher,
        executors=[executor],
        judge=Judge(Thresholds()),
        destinations={1: open_destination(folder)},
        metrics=Metrics(),
    )


async def next_jobs(coordinator: Pipeline) -> list[Job]:
    return await coordinator.next_jobs(EXECUTOR)


@pytest.mark.anyio
async def test_a_version_waits_while_another_one_of_its_file_is_with_an_executor(
    ledger: Ledger, tmp_path: Path
) -> None:
    """Otherwise two executors might publish the earlier one last."""
    coordinator = make_coordinator(ledger, tmp_path)
    await coordinator.admit([make_file(b"a.jpg", mtime_ns=1)])
    [first] = await next_jobs(coordinator)
    await coordinator.admit([make_file(b"a.jpg", mtime_ns=2), make_file(b"b.jpg")])
    assert [job.path for job in await next_jobs(coordinator)] == [b"b.jpg"]
    coordinator.let_go([first.id])
    assert [job.version.mtime_ns for job in await next_jobs(coordinator)] == [1]
    coordinator.schedule.forget(first.id)
    assert [job.version.mtime_ns for job in await next_jobs(coordinator)] == [2]


@pytest.mark.anyio
async def test_what_a_lost_executor_has_committed_is_published_before_a_later_version_is_handed_out(
    ledger: Ledger, tmp_path: Path
) -> None:
    coordinator, handed_out = make_coordinator(ledger, tmp_path), []
    await coordinator.admit([make_file(b"a.jpg", mtime_ns=1)])
    [first] = await next_jobs(coordinator)
    await coordinator.end([done(first)])
    await coordinator.admit([make_file(b"a.jpg", mtime_ns=2)])

    async def take_next() -> None:
        handed_out.extend(await next_jobs(coordinator))
        assert published(tmp_path) == ["a.jpg.json"]

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(take_next)
        await anyio.wait_all_tasks_blocked()
        coordinator.lose(EXECUTOR)
    assert [job.version.mtime_ns for job in handed_out] == [2]
    assert coordinator.metrics.counts.ended.total() == 1


@pytest.mark.anyio
async def test_the_jobs_of_a_lost_executor_are_handed_out_again(ledger: Ledger, tmp_path: Path) -> None:
    coordinator = make_coordinator(ledger, tmp_path)
    await coordinator.admit([make_file(b"a.jpg"), make_file(b"b.jpg")])
    jobs = await next_jobs(coordinator)
    coordinator.lose(EXECUTOR)
    with anyio.fail_after(PATIENCE):
        assert [job.path for job in await next_jobs(coordinator)] == [job.path for job in jobs]


@pytest.mark.anyio
async def test_jobs_that_come_back_while_the_ledger_is_read_are_handed_out_again(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, ask = make_coordinator(ledger, tmp_path), ledger._ask
    await coordinator.admit([make_file(b"a.jpg")])
    lost = await next_jobs(coordinator)
    await coordinator.admit([make_file(b"b.jpg")])

    async def ask_and_lose(work: Callable[..., Any]) -> Any:
        answer = await ask(work)
        if lost and isinstance(answer, tuple) and len(answer) == 2 and answer[0]:  # rows and cursors
            coordinator.let_go([lost.pop().id])
        return answer

    monkeypatch.setattr(ledger, "_ask", ask_and_lose)
    with anyio.fail_after(PATIENCE):
        assert [job.path for job in await next_jobs(coordinator)] == [b"a.jpg", b"b.jpg"]


@pytest.mark.anyio
@pytest.mark.parametrize("away", [False, True])
async def test_a_run_does_not_end_without_an_image_that_was_passed_over_and_is_due_by_the_time_of_the_answer(
    away: bool, ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was in flight, or its inbox rested, when the ledger was asked for jobs."""
    monkeypatch.setattr(schedule, "REST_SECONDS", 0.3)
    coordinator, ask = make_coordinator(ledger, tmp_path), ledger.seconds_to_next_try
    coordinator.schedule.found_all = True
    await coordinator.admit([make_file(b"a.jpg")])
    [job] = await next_jobs(coordinator)
    await coordinator.end([postponed(job, steady_seconds())])

    def leave() -> None:
        if coordinator.in_flight:
            coordinator.schedule.publish([job.id])
            coordinator.schedule.confirm([job.id])

    if away:
        away_now = Read(failure=Failure(Reason.UNREADABLE, "no answer", away=True))
        coordinator.schedule.note_read([(1, away_now)], time.monotonic())
        leave()

    async def ask_later(*arguments: Any) -> float | None:
        leave()
        await until(lambda: not coordinator.schedule.resting(time.monotonic()))
        return await ask(*arguments)

    monkeypatch.setattr(ledger, "seconds_to_next_try", ask_later)
    with anyio.fail_after(PATIENCE):
        assert [again.id for again in await next_jobs(coordinator)] == [job.id]


@pytest.mark.anyio
async def test_a_bin_that_one_executor_has_filled_is_known_to_all(ledger: Ledger, tmp_path: Path) -> None:
    coordinator = make_coordinator(ledger, tmp_path)
    await coordinator.admit([make_file(b"a.jpg")])
    [job] = await next_jobs(coordinator)
    await coordinator.end([msgspec.structs.replace(done(job), bin="mine")])
    assert list(coordinator.bins) == ["mine"]
    assert b"mine" in coordinator._destinations[1].known_bins


@pytest.mark.anyio
async def test_what_a_lost_executor_has_committed_is_published_before_a_stop(
    ledger: Ledger, tmp_path: Path
) -> None:
    coordinator = make_coordinator(ledger, tmp_path)
    await coordinator.admit([make_file(b"a.jpg")])
    [job] = await next_jobs(coordinator)
    await coordinator.end([done(job)])
    coordinator.lose(EXECUTOR)
    assert coordinator.in_flight == 1
    coordinator.drain()
    with anyio.fail_after(PATIENCE):
        await coordinator.run()
    assert coordinator.in_flight == 0
    assert (tmp_path / "results" / "a.jpg.json").exists()


@pytest.mark.anyio
async def test_a_drain_hands_out_nothing_that_the_ledger_still_answers(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, find = make_coordinator(ledger, tmp_path), ledger.next_jobs
    await coordinator.admit([make_file(b"a.jpg")])

    async def find_and_drain(*arguments: Any, **options: Any) -> list[Job]:
        found = await find(*arguments, **options)
        coordinator.drain()
        return found

    monkeypatch.setattr(ledger, "next_jobs", find_and_drain)
    assert await next_jobs(coordinator) == []
    assert coordinator.in_flight == 0


@pytest.mark.anyio
async def test_a_drain_ends_a_question_that_the_ledger_does_not_answer(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = make_coordinator(ledger, tmp_path)
    await coordinator.admit([make_file(b"a.jpg")])

    async def find(*arguments: Any, **options: Any) -> None:
        await anyio.sleep_forever()

    monkeypatch.setattr(ledger, "next_jobs", find)
    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            for _ in range(2):  # one asks the ledger, and one waits for its turn
                tasks.start_soon(next_jobs, coordinator)
            await anyio.wait_all_tasks_blocked()
            coordinator.drain()


@pytest.mark.anyio
async def test_a_doubt_that_comes_while_an_inbox_is_recovered_is_not_forgotten(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = make_coordinator(ledger, tmp_path)
    publish_owed = coordinator.publisher.publish_owed

    async def publish_and_doubt(inboxes: set[int]) -> None:
        await publish_owed(inboxes)
        coordinator.schedule.unsettle()

    with monkeypatch.context() as patch:
        patch.setattr(coordinator.publisher, "publish_owed", publish_and_doubt)
        await coordinator.recover({1})
    assert coordinator.schedule.unsettled({1}) == {1}
    await coordinator.recover({1})
    assert coordinator.schedule.unsettled({1}) == set()


@pytest.mark.anyio
async def test_a_run_does_not_end_before_what_is_owed_of_an_inbox_that_answers_late_is_published(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, answering, recovered = make_coordinator(ledger, tmp_path), {1}, list[set[int]]()
    monkeypatch.setattr(coordinator, "answering", lambda: set(answering))

    async def recover(inboxes: set[int]) -> None:
        recovered.append(inboxes)
        coordinator.schedule.settle(inboxes, ())
        answering.add(2)  # its listing ends meanwhile, and is the last one
        coordinator.schedule.found_all = True
        coordinator.wake()

    monkeypatch.setattr(coordinator, "recover", recover)
    with anyio.fail_after(PATIENCE):
        assert await next_jobs(coordinator) == []
    assert recovered == [{1}, {2}]
