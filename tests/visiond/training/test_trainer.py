"""The trainer resumes exactly, divides batches, and backs off when memory is full."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import msgspec
import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import LoggerType
from torch import Tensor, nn

from visiond.training.hardware import choose_precision, measure_batch, number_device, probe_batch
from visiond.training.log import read_log
from visiond.training.schedule import LearningRates
from visiond.training.settings import CHECKPOINTS, LOG, TrainerSettings, find_checkpoint
from visiond.training.trainer import ResumeError, Trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
SETTINGS = TrainerSettings(batch_size=16, steps=8, log_every=1, checkpoint_every=3, learning_rate=3e-3)


def read_losses(folder: Path) -> list[float]:
    return [msgspec.json.decode(line)["loss"] for line in (folder / LOG).read_bytes().splitlines()]


# Resuming.


class Dropped(nn.Module):
    """Draws from torch's own random numbers at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": (nn.functional.dropout(batch["values"], 0.5) @ self.weight).pow(2).mean()}


@dataclass
class Values:
    count: int = 32

    def __len__(self) -> int:
        return self.count

    def take(self, places: np.ndarray, rng: np.random.Generator) -> dict[str, Tensor]:
        return {"values": torch.from_numpy(places[:, None] / 32 + rng.random((len(places), 4))).float()}


class OnGpu(Values):
    def take(self, places: np.ndarray, rng: np.random.Generator) -> dict[str, Tensor]:
        return {name: values.cuda() for name, values in super().take(places, rng).items()}


def test_torchs_random_numbers_are_resumed_too(tmp_path: Path) -> None:
    Trainer(Dropped(), Values(), SETTINGS, tmp_path / "whole").run()
    Trainer(Dropped(), Values(), SETTINGS, tmp_path / "killed").run(stop_after=4)
    torch.rand(100)
    Trainer(Dropped(), Values(), SETTINGS, tmp_path / "killed").run(resume=True)
    assert read_losses(tmp_path / "killed") == read_losses(tmp_path / "whole")


def test_a_line_of_the_log_that_was_torn_is_passed_over(tmp_path: Path) -> None:
    Trainer(Dropped(), Values(), SETTINGS, tmp_path).run(stop_after=4)
    with (tmp_path / LOG).open("ab") as log:
        log.write(b'{"step":5,"epo')
    assert read_log(tmp_path / LOG)[-1]["progress"] == 0.5
    Trainer(Dropped(), Values(), SETTINGS, tmp_path).run(resume=True)
    assert len(read_losses(tmp_path)) == SETTINGS.steps


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, sync = list[str](), os.fsync

    def record(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        sync(fd)

    monkeypatch.setattr(os, "fsync", record)
    Trainer(Dropped(), Values(), SETTINGS, tmp_path).run(stop_after=3)
    whole, folder = find_checkpoint(tmp_path), tmp_path / CHECKPOINTS
    assert whole is not None
    part = folder / f".{whole.name}"
    files = {str(part / path.relative_to(whole)) for path in whole.rglob("*")}
    assert len(files) > 3
    assert set(synced[:-2]) == files
    assert synced[-2:] == [str(part), str(folder)]


def test_a_half_written_checkpoint_is_passed_over(tmp_path: Path) -> None:
    Trainer(Dropped(), Values(), SETTINGS, tmp_path).run(stop_after=3)
    whole = find_checkpoint(tmp_path)
    (tmp_path / "checkpoints" / "step-00000006").mkdir()
    assert whole is not None
    assert whole.name == "step-00000003"
    assert find_checkpoint(tmp_path) == whole


def test_another_seed_does_not_resume_a_run(tmp_path: Path) -> None:
    Trainer(Dropped(), Values(), SETTINGS, tmp_path).run(stop_after=3)
    with pytest.raises(ResumeError, match="seed 1"):
        Trainer(Dropped(), Values(), msgspec.structs.replace(SETTINGS, seed=2), tmp_path).run(resume=True)


def test_after_a_new_start_the_new_run_is_resumed_and_not_the_earlier_one(tmp_path: Path) -> None:
    Trainer(Dropped(), Values(), SETTINGS, tmp_path).run()
    Trainer(Dropped(), Values(), SETTINGS, tmp_path).run(stop_after=5)
    last = find_checkpoint(tmp_path)
    assert last is not None
    assert last.name == "step-00000003"


def test_only_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    Trainer(Dropped(), Values(), msgspec.structs.replace(SETTINGS, checkpoint_every=1), tmp_path).run()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-00000007",
        "step-00000008",
    ]


def test_slow_steps_are_kept_sooner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = msgspec.structs.replace(SETTINGS, checkpoint_every=1000)
    Trainer(Dropped(), Values(), settings, tmp_path / "quick").run(stop_after=5)
    assert not (tmp_path / "quick" / "checkpoints").exists()
    monkeypatch.setattr("visiond.training.trainer.CHECKPOINT_SECONDS", 0.0)
    Trainer(Dropped(), Values(), settings, tmp_path / "slow").run(stop_after=5)
    assert sorted(path.name for path in (tmp_path / "slow" / "checkpoints").iterdir())[-1] == "step-00000005"


# Batches.


def test_a_pass_divides_its_share_of_the_batch(tmp_path: Path) -> None:
    trainer = Trainer(
        Dropped(), Values(), msgspec.structs.replace(SETTINGS, batch_size=12, micro_batch=5), tmp_path
    )
    trainer.run()
    assert (trainer.batch_size, trainer.micro_batch, trainer.accumulation) == (12, 4, 3)


def test_more_examples_in_a_batch_than_there_are_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lower batch_size"):
        Trainer(Dropped(), Values(8), SETTINGS, tmp_path).run()


def test_a_batch_of_less_than_an_example_for_each_process_is_an_error_that_says_so(tmp_path: Path) -> None:
    trainer = Trainer(Dropped(), Values(), msgspec.structs.replace(SETTINGS, batch_size=4), tmp_path)
    trainer.processes = 8
    with pytest.raises(ValueError, match=r"batch_size 4 .* each of 8 processes"):
        trainer.run()


@pytest.mark.parametrize(
    ("room", "most", "least_found"), [(100, 1000, 88), (1000, 64, 64), (5, 64, 4), (8, 64, 8)]
)
def test_the_probe_fills_the_memory_and_backs_off(room: int, most: int, least_found: int) -> None:
    asked: list[int] = []

    def fits(count: int) -> bool:
        asked.append(count)
        return count <= room

    found = probe_batch(fits, 8, most)
    assert least_found <= found <= min(room, most)
    assert len(asked) < 12


def test_the_probe_says_when_nothing_fits() -> None:
    with pytest.raises(MemoryError, match="batch of one"):
        probe_batch(lambda _: False, 8, 64)


@pytest.mark.gpu
@NEEDS_CUDA
def test_a_batch_that_fills_the_gpu_does_not_fit() -> None:
    most = torch.cuda.mem_get_info()[1] >> 33

    class Greedy(Dropped):
        def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
            torch.empty(len(batch["values"]) << 33, dtype=torch.uint8, device=self.weight.device)
            return super().forward(batch)

    device = torch.device("cuda:0")
    found = measure_batch(Greedy().to(device), OnGpu(), device, "no", 1, 10 * most)
    assert 1 <= found < most


def test_a_gpu_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    asked = [torch.device(name) for name in ("cuda", "cuda:1", "cpu")]
    assert [str(number_device(each)) for each in asked] == ["cuda:3", "cuda:1", "cpu"]


@pytest.mark.gpu
@NEEDS_CUDA
def test_a_training_of_one_process_runs_on_the_gpu(tmp_path: Path) -> None:
    trainer = Trainer(Dropped(), OnGpu(), SETTINGS, tmp_path)
    trainer.run()
    assert trainer.device == torch.device("cuda:0")
    assert len(read_losses(tmp_path)) == SETTINGS.steps


def test_the_next_batch_is_read_while_the_model_computes(tmp_path: Path) -> None:
    read = threading.Semaphore(0)

    class Counted(Values):
        taken = 0

        def take(self, places: np.ndarray, rng: np.random.Generator) -> dict[str, Tensor]:
            self.taken += 1
            if self.taken > 1:  # the first batch is needed anyway
                read.release()
            return super().take(places, rng)

    class Waiting(Dropped):
        def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
            assert read.acquire(timeout=30)
            return super().forward(batch)

    Trainer(Waiting(), Counted(), SETTINGS, tmp_path).run()


# Precision.


class Line(nn.Module):
    """Its gradients are smaller than any number of float16 but 0."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.seen = nn.Linear(4, 1), set[torch.dtype]()

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        found = self.line(batch["values"])
        self.seen.add(found.dtype)
        return {"loss": found.float().mean() * 1e-9}


@pytest.fixture
def changed_precision() -> Iterator[None]:
    """Accelerate has one for each process."""
    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()


def train_line(batches: Values, precision: str, folder: Path) -> tuple[Trainer, Line, float]:
    """Also returns how far its weights have moved."""
    line = Line()
    began = line.line.weight.detach().clone()
    settings = msgspec.structs.replace(SETTINGS, precision=precision, weight_decay=0)
    trainer = Trainer(line, batches, settings, folder)
    trainer.run()
    return trainer, line, float((line.line.weight.detach().cpu() - began).abs().min())


@pytest.mark.usefixtures("changed_precision")
def test_bfloat16_is_for_the_passes_and_the_weights_stay_float32(tmp_path: Path) -> None:
    batches = OnGpu() if torch.cuda.is_available() else Values()
    trainer, line, moved = train_line(batches, "bf16", tmp_path)
    assert (line.seen, line.line.weight.dtype) == ({torch.bfloat16}, torch.float32)
    assert (trainer.accelerator.scaler, moved > 1e-4) == (None, True)


@pytest.mark.usefixtures("changed_precision")
@pytest.mark.parametrize("gpu", [False, pytest.param(True, marks=[pytest.mark.gpu, NEEDS_CUDA])])
def test_float16_learns_from_small_gradients_as_the_loss_is_scaled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, gpu: bool
) -> None:
    """On a CPU Accelerate has no float16 and no scaler, but torch has."""

    def make_on_cpu(precision: str, *_: object, **__: object) -> accelerate.Accelerator:
        made = accelerate.Accelerator(cpu=True, step_scheduler_with_optimizer=False)
        made.state._mixed_precision, made.native_amp = precision, True
        made.scaler = torch.amp.GradScaler("cpu")
        return made

    if not gpu:
        monkeypatch.setattr("visiond.training.trainer.make_accelerator", make_on_cpu)
    trainer, line, moved = train_line(OnGpu() if gpu else Values(), "fp16", tmp_path)
    assert (line.seen, line.line.weight.dtype) == ({torch.float16}, torch.float32)
    assert trainer.accelerator.scaler.is_enabled()
    assert moved > 1e-4


@pytest.mark.parametrize(
    ("on_gpu", "precision"), [("has bfloat16", "bf16"), ("has none", "fp16"), ("no GPU", "no")]
)
def test_the_precision_is_one_that_the_device_has(
    on_gpu: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu != "no GPU")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: on_gpu == "has bfloat16")
    assert choose_precision("auto") == precision
    assert choose_precision("bf16") == "bf16"


# Trackers.


def run_tracked(tracker: str, folder: Path) -> None:
    """Eight steps, two in an epoch, with a score after each epoch."""
    settings = msgspec.structs.replace(SETTINGS, trackers=(tracker,), project="mine")
    Trainer(Dropped(), Values(), settings, folder).run(score=lambda: {"mAP": 0.25})


def test_tensorboard_gets_the_losses_and_scores_of_the_log(tmp_path: Path) -> None:
    name = "tensorboard.backend.event_processing.event_accumulator"
    events = pytest.importorskip(name, reason="TensorBoard is not installed: make tools")
    run_tracked("tensorboard", tmp_path)
    found = events.EventAccumulator(str(tmp_path / "mine")).Reload()
    losses = [(event.step, event.value) for event in found.Scalars("loss")]
    entries = [entry for entry in read_log(tmp_path / LOG) if "loss" in entry]
    assert losses == [(entry["step"], pytest.approx(entry["loss"])) for entry in entries]
    assert [(event.step, event.value) for event in found.Scalars("mAP")] == [(n, 0.25) for n in (2, 4, 6, 8)]


class Wandb:
    """What the library of this name is given."""

    __spec__ = "is installed"

    def __init__(self) -> None:
        self.given: list[Any] = []
        self.config = self

    def init(self, project: str, dir: str) -> Wandb:
        self.given.append((project, dir))
        return self

    def update(self, settings: dict[str, Any], **_: bool) -> None:
        self.given.append(settings["batch_size"])

    def log(self, figures: dict[str, Any], step: int) -> None:
        self.given.append((step, figures))

    def finish(self) -> None:
        self.given.append("end")


def test_weights_and_biases_gets_the_lines_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb: Any = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr("accelerate.tracking._available_trackers", [LoggerType.WANDB])
    run_tracked("wandb", tmp_path)
    begun, batch, *lines, end = wandb.given
    assert (begun, batch, end) == (("mine", str(tmp_path)), SETTINGS.batch_size, "end")
    expected = []
    for entry in read_log(tmp_path / LOG):
        expected.append((entry["step"], entry | entry.pop("scores", {})))
    assert lines == expected
    assert sum("mAP" in figures for _, figures in lines) == 4


# The schedule.


def test_a_schedule_warms_up_and_ends_at_nothing() -> None:
    schedule, factors = LearningRates(100, 0, 0.1), []
    while not schedule.done:
        factors.append(schedule.factor)
        schedule.advance()
    assert len(factors) == 100
    assert factors.index(max(factors)) == 10
    assert 0 < factors[0] < 0.2
    assert schedule.factor == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("steps", [0, 100_000])
def test_a_budget_of_seconds_ends_a_training_that_would_take_longer(steps: int) -> None:
    schedule = LearningRates(steps, 10.0, 0.1)
    while not schedule.done:
        schedule.advance()
        schedule.keep_time(elapsed=0.05 * schedule.step)
    assert schedule.step * 0.05 == pytest.approx(10.0, rel=0.05)


def test_a_training_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a limit"):
        LearningRates(0, 0, 0.1)
