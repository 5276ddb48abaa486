"""A trainer for any module that computes losses from a batch, on one or more GPUs with Hugging Face Accelerate.

    trainer = Trainer(learner, batches, Settings(steps=5000), Path("run"))
    trainer.run(resume=True)

Started by itself it uses one device; started by `accelerate launch` or torchrun, one for each process. The content of a batch
depends only on the seed and the number of the step. So a run that was killed and is resumed from its last checkpoint has the
same curve as one that was not killed, with the same number of processes.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from accelerate.utils import broadcast_object_list, set_seed
from torch import Tensor, nn

from stages.contract.folders import remove_folder, sync, sync_tree
from visiond.training.hardware import (
    TrainingBatches,
    gather_with_gradient,
    make_accelerator,
    measure_batch,
    number_device,
)
from visiond.training.log import ProgressBar, cut_log
from visiond.training.schedule import LearningRates
from visiond.training.settings import (
    CHECKPOINTS,
    LOG,
    STATE,
    TrainerSettings,
    find_checkpoint,
    list_checkpoints,
)

Score = Callable[[], dict[str, float]]  # figures by name
CHECKPOINTS_KEPT = 2
# Most seconds of work that can be lost if steps are slow, in addition to one log_every.
CHECKPOINT_SECONDS = 120.0


class TrainingState(msgspec.Struct, kw_only=True):
    """The content of a checkpoint besides the weights, the optimizer and the random states."""

    batch_size: int
    micro_batch: int
    processes: int
    seed: int
    elapsed: float


class ResumeError(Exception):
    """A checkpoint is from another run than the one to be resumed."""


class Trainer:
    def __init__(
        self, module: nn.Module, batches: TrainingBatches, settings: TrainerSettings, folder: Path
    ) -> None:
        """module: its forward computes named losses from a batch; "loss" is minimized.
        folder: for log and checkpoints."""
        self.settings, self.folder, self.batches = settings, folder, batches
        self.accelerator = make_accelerator(
            settings.precision,
            settings.trackers,
            folder,
            skips_weights=bool(getattr(module, "skips_weights", False)),
        )
        set_seed(settings.seed, device_specific=True)
        self.device, self.processes = number_device(self.accelerator.device), self.accelerator.num_processes
        self.bare = module.to(self.device).train()
        self.elapsed, self.losses = 0.0, list[dict[str, Tensor]]()
        self.order: tuple[int, npt.NDArray[np.int64]] | None = None

    def run(self, *, resume: bool = False, stop_after: int = 0, score: Score | None = None) -> None:
        """Train to the end, or until step `stop_after`.

        resume: continue from the last checkpoint if there is one. Without it, existing checkpoints are removed. score: called
        after each epoch, in all processes; the figures of the first one go into the log.
        """
        last = self._find_last(resume=resume)
        self._prepare(last)
        self._start_log(keep=last is not None)
        began, self.marked = time.monotonic() - self.elapsed, (self.schedule.step, time.monotonic())
        self.clock = self.saved_at = self.elapsed
        shown = self.accelerator.is_main_process and sys.stderr.isatty()
        with (
            ProgressBar(self.folder.name, shown) as bar,
            ThreadPoolExecutor(1, initializer=self._use_device) as reader,
        ):
            upcoming = reader.submit(self._read, self.schedule.step)
            while not self.schedule.done and not (stop_after and self.schedule.step >= stop_after):
                upcoming = self._take_step(upcoming, reader)
                bar(self.schedule.progress)
                self.elapsed = time.monotonic() - began
                if self._ends(self.settings.log_every):
                    self._keep_time()
                    self._write_log()
                if score and self._ends(self.steps_per_epoch):
                    self._score(score)
                if self._is_due():
                    self._save()
        if self.schedule.done:
            self._save()
            self.accelerator.end_training()

    def _ends(self, steps: int) -> bool:
        """Whether the last of so many steps was taken, or the last of all."""
        return self.schedule.step % steps == 0 or self.schedule.done

    def _use_device(self) -> None:
        """Kernels of a thread run on its current device."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    # Setting up.

    def _find_last(self, *, resume: bool) -> Path | None:
        """The last checkpoint, to resume from. Otherwise all are removed: a later resume would take them for this run's."""
        if resume:
            return find_checkpoint(self.folder)
        if self.accelerator.is_main_process:
            remove_folder(self.folder / CHECKPOINTS)
        return None

    def _prepare(self, checkpoint: Path | None) -> None:
        """Set sizes, optimizer and schedule; from the checkpoint if there is one."""
        if checkpoint:
            state = msgspec.json.decode((checkpoint / STATE).read_bytes(), type=TrainingState)
            self._check_state(state, checkpoint)
            self.batch_size, self.elapsed = state.batch_size, state.elapsed
            asked = self.settings.micro_batch or state.micro_batch  # less than before, if memory ran out
            self.micro_batch = divide(state.batch_size // self.processes, min(asked, state.micro_batch))
        else:
            self._choose_sizes()
        self.accumulation = self.batch_size // (self.micro_batch * self.processes)
        self.accelerator.gradient_accumulation_steps = self.accumulation
        self.steps_per_epoch = len(self.batches) // self.batch_size
        if not self.steps_per_epoch:
            raise ValueError(
                f"{len(self.batches)} examples are fewer than one batch of {self.batch_size}; lower batch_size."
            )
        planned = [self.settings.steps, round(self.settings.epochs * self.steps_per_epoch)]
        steps = min((count for count in planned if count), default=0)
        self.schedule = LearningRates(steps, self.settings.seconds, self.settings.warmup)
        self.module, self.optimizer = self.accelerator.prepare(self.bare, self._make_optimizer())
        if self.processes > 1 and hasattr(self.bare, "gather"):
            self.bare.gather = gather_with_gradient  # type: ignore[assignment]
        self.accelerator.register_for_checkpointing(self.schedule)
        set_seed(self.settings.seed, device_specific=True)  # the probing has used random numbers
        if checkpoint:
            self.accelerator.load_state(str(checkpoint))

    def _check_state(self, state: TrainingState, checkpoint: Path) -> None:
        if (state.processes, state.seed) != (self.processes, self.settings.seed):
            raise ResumeError(
                f"{checkpoint} was written by {state.processes} processes with seed {state.seed}, and these are "
                f"{self.processes} with seed {self.settings.seed}: resume it with the same settings, "
                "or start again in another folder."
            )

    def _choose_sizes(self) -> None:
        """Choose the batch sizes of a step and of a pass, the same in all processes; the second divides the first."""
        share = self.settings.batch_size // self.processes
        if self.settings.batch_size and not share:
            raise ValueError(
                f"batch_size {self.settings.batch_size} is less than one example for each of {self.processes} processes; "
                "raise it, or set 0 for as many as fit into the memory."
            )
        most = share or max(1, len(self.batches) // self.processes)
        micro = self.settings.micro_batch
        if not micro:
            micro = self._measure(most) if self.device.type == "cuda" else min(most, 64)
        if self.processes > 1:
            smallest = torch.tensor([micro], device=self.device)
            dist.all_reduce(smallest, dist.ReduceOp.MIN)
            micro = int(smallest)
        self.micro_batch = divide(share, micro) if share else micro
        self.batch_size = (share or micro) * self.processes

    def _measure(self, most: int) -> int:
        settings = self.settings
        return measure_batch(
            self.bare, self.batches, self.device, settings.precision, settings.probe_from, most
        )

    def _make_optimizer(self) -> torch.optim.Optimizer:
        """AdamW without weight decay for norms, biases and scales."""
        weights = [parameter for parameter in self.bare.parameters() if parameter.requires_grad]
        groups = [
            {
                "params": [weight for weight in weights if weight.ndim > 1],
                "weight_decay": self.settings.weight_decay,
            },
            {"params": [weight for weight in weights if weight.ndim <= 1], "weight_decay": 0.0},
        ]
        cuda = self.device.type == "cuda"
        return torch.optim.AdamW(groups, lr=self.settings.learning_rate, betas=(0.9, 0.98), fused=cuda)

    # Steps.

    def _read(self, step: int) -> list[dict[str, Tensor]]:
        """This process's part of the step's batch, split into passes."""
        epoch, number = divmod(step, self.steps_per_epoch)
        places = self._shuffle(epoch)[number * self.batch_size : (number + 1) * self.batch_size]
        own = places.reshape(self.processes, self.accumulation, self.micro_batch)[
            self.accelerator.process_index
        ]
        rank = self.accelerator.process_index
        return [
            self.batches.take(part, np.random.default_rng((self.settings.seed, step, rank, number)))
            for number, part in enumerate(own)
        ]

    def _shuffle(self, epoch: int) -> npt.NDArray[np.int64]:
        """The order of the examples in an epoch; the last result is cached."""
        if self.order is None or self.order[0] != epoch:
            order = np.random.default_rng((self.settings.seed, epoch)).permutation(len(self.batches))
            self.order = (epoch, order)
        return self.order[1]

    def _take_step(
        self, upcoming: Future[list[dict[str, Tensor]]], reader: ThreadPoolExecutor
    ) -> Future[list[dict[str, Tensor]]]:
        """One step of the optimizer, while the next step's batch is read. Returns that batch."""
        passes = upcoming.result()
        following = reader.submit(self._read, self.schedule.step + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * self.schedule.factor
        seen = []
        for batch in passes:
            with self.accelerator.accumulate(self.module):
                losses = self.module(batch)
                self.accelerator.backward(losses["loss"])
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.module.parameters(), self.settings.clip_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
            seen.append({name: loss.detach() for name, loss in losses.items()})
        self.losses.append({name: torch.stack([part[name] for part in seen]).mean() for name in seen[0]})
        self.schedule.advance()
        return following

    def _keep_time(self) -> None:
        """Use the main process's clock in all processes:
        otherwise they would save and end at different steps."""
        clock = [self.elapsed]
        if self.processes > 1:
            broadcast_object_list(clock)
        [self.clock] = clock
        self.schedule.keep_time(self.clock)

    # The log.

    def _start_log(self, *, keep: bool) -> None:
        """keep: remove only the lines after the checkpoint."""
        if not self.accelerator.is_main_process:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        cut_log(self.folder / LOG, self.schedule.step if keep else 0)
        if self.settings.trackers:
            at = {"wandb": {"dir": str(self.folder)}}  # otherwise in the current folder
            self.accelerator.init_trackers(self.settings.project, flatten(self.settings), at)

    def _write_log(self) -> None:
        """The mean losses since the last line, of all processes."""
        means = {
            name: torch.stack([losses[name] for losses in self.losses]).mean() for name in self.losses[0]
        }
        self.losses.clear()
        reduced = self.accelerator.reduce(torch.stack(list(means.values())), "mean").tolist()
        (step, moment), now = self.marked, time.monotonic()
        self.marked = (self.schedule.step, now)
        memory = torch.cuda.max_memory_reserved(self.device) if self.device.type == "cuda" else 0
        entry = {
            "step": self.schedule.step,
            "epoch": self._epoch,
            "progress": round(self.schedule.progress, 6),
            **dict(zip(means, reduced, strict=True)),
            "learning_rate": self.settings.learning_rate * self.schedule.factor,
            "images_per_second": round((self.schedule.step - step) * self.batch_size / (now - moment), 1),
            "memory_bytes": memory,
            "elapsed": round(self.elapsed, 3),
            "batch_size": self.batch_size,
            "micro_batch": self.micro_batch,
            "processes": self.processes,
        }
        self._append(entry)

    def _score(self, score: Score) -> None:
        self.module.eval()
        with torch.no_grad(), self.accelerator.autocast():
            figures = score()
        self.module.train()
        self.marked = (self.schedule.step, time.monotonic())  # scoring is no training
        self._append({"step": self.schedule.step, "epoch": self._epoch, "scores": figures})

    def _append(self, entry: dict[str, Any]) -> None:
        """Write a line of the log."""
        if self.accelerator.is_main_process:
            with (self.folder / LOG).open("ab") as file:
                file.write(msgspec.json.encode(entry) + b"\n")
        if self.settings.trackers:
            figures = {**entry, **entry.get("scores", {})}
            figures.pop("scores", None)
            self.accelerator.log(figures, step=self.schedule.step)

    @property
    def _epoch(self) -> float:
        return round(self.schedule.step / self.steps_per_epoch, 3)

    # Checkpoints.

    def _is_due(self) -> bool:
        every = self.settings.checkpoint_every
        return every > 0 and (
            self.schedule.step % every == 0 or self.clock - self.saved_at >= CHECKPOINT_SECONDS
        )

    def _save(self) -> None:
        """Save under a temporary name and rename, so that a checkpoint is complete or missing, even after a power failure."""
        self.saved_at = self.clock
        name = f"step-{self.schedule.step:08}"
        part, whole = self.folder / CHECKPOINTS / f".{name}", self.folder / CHECKPOINTS / name
        if whole.exists():
            return
        self.accelerator.save_state(str(part), safe_serialization=False)  # BLIP shares tensors
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            state = TrainingState(
                batch_size=self.batch_size,
                micro_batch=self.micro_batch,
                processes=self.processes,
                seed=self.settings.seed,
                elapsed=self.elapsed,
            )
            (part / STATE).write_bytes(msgspec.json.encode(state))
            sync_tree(part)
            os.replace(part, whole)
            sync(whole.parent)
            for old in list_checkpoints(self.folder)[:-CHECKPOINTS_KEPT]:
                shutil.rmtree(old)
        self.accelerator.wait_for_everyone()


def divide(share: int, most: int) -> int:
    """The largest part of a share, at most `most`, of which a whole number makes the share."""
    parts = next(parts for parts in range(-(-share // most), share + 1) if share % parts == 0)
    return share // parts


def flatten(settings: TrainerSettings) -> dict[str, Any]:
    """As TensorBoard takes them."""
    values = msgspec.to_builtins(settings)
    return {
        name: ", ".join(value) if isinstance(value, list | tuple) else value for name, value in values.items()
    }
