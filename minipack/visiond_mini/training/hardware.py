"""The devices of a training: their precision, the batch that fits into their memory, and what processes exchange."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import accelerate
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_functional
from torch import Tensor


def make_accelerator(precision: str, *, wandb: bool) -> accelerate.Accelerator:
    """Raises ValueError if W&B is set but not installed."""
    if wandb and importlib.util.find_spec("wandb") is None:
        raise ValueError("wandb is not installed: pip install wandb, or leave the setting empty.")
    if precision == "auto":
        precision = "bf16" if torch.cuda.is_available() else "no"
    return accelerate.Accelerator(
        mixed_precision=precision,
        cpu=not torch.cuda.is_available(),
        log_with="wandb" if wandb else None,
        step_scheduler_with_optimizer=False,
    )


def make_deterministic() -> None:
    """Set it for the whole process. Call it before the first use of CUDA."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def probe_batch(fits: Callable[[int], bool], start: int, most: int) -> int:
    """The largest batch up to `most` that fits: doubled until the memory is full, then reduced by bisection,
    three times.

    Raises MemoryError when not even `start`, halved down to one, fits.
    """
    good, size = 0, start
    while size <= most and fits(size):
        good, size = size, size * 2
    if good and size > most:
        return most if good == most or fits(most) else good
    bad = size
    while not good and bad > 1:
        bad //= 2
        good = bad if fits(bad) else 0
    if not good:
        raise MemoryError(
            "the device does not have enough memory for a batch of one; use a smaller model or image size."
        )
    for _ in range(3):
        middle = (good + bad) // 2
        if middle in (good, bad):
            break
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def gather_with_gradient(tensor: Tensor) -> Tensor:
    """The rows of all processes, in order. The gradient of a
    loss of all rows reaches each process's own rows."""
    if not tensor.requires_grad:
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts)
    gathered: Tensor = torch.cat(dist_functional.all_gather(tensor.contiguous()))  # type: ignore[no-untyped-call]
    return gathered
