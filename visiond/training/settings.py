"""How to train, and where a training leaves its log and checkpoints. Imports no torch: the command, which only starts the
processes, needs it too."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

LOG, CHECKPOINTS, STATE = "log.jsonl", "checkpoints", "state.json"


class TrainerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to train. The first limit of epochs, steps and seconds that is reached ends the training; 0 is no limit."""

    seed: int = 1
    # Examples in one step of the optimizer, in all processes together; 0: as many as fit into the memory.
    batch_size: int = 512
    # Examples in one pass of one process; 0: as many as fit, at most its share of batch_size.
    micro_batch: int = 0
    epochs: float = 0
    steps: int = 0
    seconds: float = 0
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    warmup: float = 0.05  # share of the training
    clip_norm: float = 1.0
    deterministic: bool = False  # bitwise the same on every run, on CUDA too; see make_deterministic
    precision: str = "auto"  # "bf16", "fp16" or "no"; auto: bf16 on CUDA
    log_every: int = 20  # steps
    checkpoint_every: int = 500  # steps, or sooner if they are slow; 0: only at the end
    probe_from: int = 8  # examples
    trackers: tuple[str, ...] = ()  # of hardware.TRACKERS
    project: str = "visiond"  # the trackers' name for it


class TrainingPlace(NamedTuple):
    """Where a process runs. uuid: of a GPU; empty: on the CPU. name: what people call it."""

    uuid: str
    name: str


def list_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints, the oldest first."""
    return sorted(path for path in (folder / CHECKPOINTS).glob("step-*") if (path / STATE).is_file())


def find_checkpoint(folder: Path) -> Path | None:
    return next(reversed(list_checkpoints(folder)), None)
