from __future__ import annotations

import msgspec
import pytest
from structlog.testing import capture_logs

from daemon.core.jobs import Outdated
from daemon.layout.announcing import warn_of_outdated
from daemon.monitoring.snapshot import GpuState, LookState, Snapshot, WorkerState
from daemon.terminal.progress import Progress

STAGES = ["ocr", "yolo", "clip", "blip"]


def worker(state: str, loaded: int) -> WorkerState:
    return WorkerState("w", "cpu", state, 0, "", stages=STAGES, stages_loaded=STAGES[:loaded])


def snapshot(*workers: WorkerState) -> Snapshot:
    return Snapshot(running=True, pending=3, done=0, failed=0, skipped=0, gone=0, workers=list(workers))


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        ([worker("loading", 0)], "loading models: ocr, yolo, clip, blip to go"),
        ([worker("loading", 2)], "loading models: ocr, yolo loaded; clip, blip to go"),
        ([worker("loading", 4)], "loading models: ocr, yolo, clip, blip loaded; first test run"),
        (
            [worker("loading", 3), worker("loading", 1)],
            "loading models: 0 of 2 workers ready; ocr loaded; yolo, clip, blip to go",
        ),
        ([worker("ready", 4), worker("loading", 1)], "0 images/s, 1 of 2 workers ready"),
        ([worker("ready", 4), worker("ready", 4)], "0 images/s"),
    ],
)
def test_the_sentence_shows_how_far_the_models_are(workers: list[WorkerState], said: str) -> None:
    assert snapshot(*workers).sentence() == f"0 done, 0 failed, 0 skipped, 3 pending, {said}"


def test_the_last_problem_of_a_worker_says_when_it_was_over() -> None:
    lost = WorkerState("w", "cpu", "loading", 0, "it was killed by SIGKILL")
    assert lost.problem == "it was killed by SIGKILL"
    back = msgspec.structs.replace(lost, state="ready", ready_at=1.8e9)
    assert back.problem.startswith("it was killed by SIGKILL; ready again since 2027-01-15 ")


def test_memory_of_a_gpu_is_that_of_its_own_workers_and_unknown_for_a_part_of_a_group() -> None:
    def on(device: str, allocated: int, kept: int) -> WorkerState:
        return WorkerState("w", device, "ready", 0, "", gpu_allocated_bytes=allocated, gpu_bytes=kept)

    cards = [GpuState(f"cuda:{number}", "H200", 0, 0, uuid=f"GPU-{number}") for number in range(4)]
    workers = [on("cuda:0", 1, 10), on("cuda:0", 2, 20), on("cuda:1", 4, 40), on("cuda:2+cuda:1", 8, 80)]
    now = msgspec.structs.replace(snapshot(*workers), gpus=cards)
    found = [now.memory_on(card.uuid) for card in cards]
    assert found == [(3, 30), (None, None), (None, None), (0, 0)]
    assert now.memory_on("GPU-of-another-machine") == (None, None)


def test_the_bar_is_full_when_this_run_has_done_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[int, int | None]] = []
    monkeypatch.setattr(Progress, "step", lambda _, done, total, note: steps.append((done, total)))
    with Progress("images") as progress:
        now = snapshot(worker("ready", 4))
        progress.show(msgspec.structs.replace(now, pending=4_998, ended_in_this_run=2, left_in_this_run=18))
    assert steps == [(2, 20)]


def test_without_a_terminal_each_step_of_the_loading_is_a_line_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Progress("images") as progress:
        for loaded in (0, 0, 1, 1):
            progress.show(snapshot(worker("loading", loaded)))
    assert capsys.readouterr().err.splitlines() == [
        "loading models: ocr, yolo, clip, blip to go",
        "loading models: ocr loaded; yolo, clip, blip to go",
    ]


@pytest.mark.parametrize(
    ("outdated", "said"),
    [
        (Outdated(1), "1 file has results of earlier models or options."),
        (Outdated(2, at_least=True), "at least 2 files have results of earlier models or options."),
        (Outdated(0, at_least=True), "some files may have results of earlier models or options."),
    ],
)
def test_files_with_results_of_earlier_models_are_reported_even_if_none_was_counted(
    outdated: Outdated, said: str
) -> None:
    sentence = msgspec.structs.replace(snapshot(), outdated=outdated).outdated_sentence()
    assert sentence.startswith(said)
    assert "`visiond redo --stale`" in sentence
    with capture_logs() as logs:
        warn_of_outdated(outdated)
    assert "have results of earlier models or options" in logs[0]["event"]


def test_images_that_wait_for_second_looks_are_counted() -> None:
    looks = [LookState(name=name, waiting=2, done=1, failed=0) for name in ("a", "b")]
    state = snapshot(worker("ready", 4))
    assert "4 second looks to do" in msgspec.structs.replace(state, second_looks=looks).sentence()
    assert "second look" not in state.sentence()
