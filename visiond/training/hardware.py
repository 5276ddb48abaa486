"""The devices of a training: their precision, the batch that fits into their memory, and what processes exchange."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import accelerate
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_functional
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

TRACKERS = ("wandb", "tensorboard")  # those of Accelerate that can be asked for
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
PROBE_STEPS = 2  # the second one runs with the memory as the first left it
MEMORY_SHARE = 0.92  # of the device, that a batch may use when its size is probed
FIRST_SECONDS = 120.0  # for the first exchange
# For each later one, in which all may wait for the first process, as it scores a model or writes a checkpoint.
EXCHANGE_SECONDS = 1800.0


class TrainingBatches(Protocol):
    """Examples in the form that a module takes."""

    def __len__(self) -> int: ...

    def take(self, places: npt.NDArray[np.int64], rng: np.random.Generator) -> dict[str, Tensor]:
        """The examples at these indices, on the device. All random choices come from rng."""


def make_accelerator(
    precision: str, trackers: Sequence[str] = (), folder: Path | None = None, *, skips_weights: bool = False
) -> accelerate.Accelerator:
    """trackers: of TRACKERS. folder: for their files. skips_weights: whether some weights get no gradient in some steps,
    which the processes then have to find out. Raises ValueError if a tracker is not installed."""
    for name in trackers:
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"{name} is not installed: pip install {name}, or do without it.")
    handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)] if skips_weights else []
    return accelerate.Accelerator(
        mixed_precision=choose_precision(precision),
        cpu=not torch.cuda.is_available(),
        log_with=list(trackers) or None,
        project_dir=folder,
        kwargs_handlers=handlers,
        step_scheduler_with_optimizer=False,
    )


def choose_precision(wanted: str) -> str:
    """auto: bfloat16 on GPUs that have it, float16 on others, and float32 on a CPU."""
    if wanted != "auto":
        return wanted
    if not torch.cuda.is_available():
        return "no"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def number_device(device: torch.device) -> torch.device:
    """A GPU with its number: without one it is the current GPU, of which each thread has its own."""
    if str(device) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return device


def join_processes(say: Callable[[str], None]) -> None:
    """Connect the processes that torchrun's variables name: by NCCL, or by Gloo on CPUs and where NCCL does not work in one of
    them. Does nothing for a single process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    store, rank, count = next(rendezvous("env://", timeout=timedelta(seconds=FIRST_SECONDS)))
    found = PrefixStore("visiond", store)
    trouble = ""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        trouble = _try_nccl(PrefixStore("nccl", store), rank, count)
        found.set(f"nccl/{rank}", trouble or "works")
        answers = [found.get(f"nccl/{each}").decode() for each in range(count)]
        trouble = next((answer for answer in answers if answer != "works"), "")
        if not trouble:
            return
        if dist.is_initialized():
            dist.destroy_process_group()
        say(
            f"NCCL does not work here ({trouble}): the processes exchange gradients by Gloo, which is slower."
        )
    limit = timedelta(seconds=EXCHANGE_SECONDS)
    dist.init_process_group(
        "gloo", store=PrefixStore("gloo", store), rank=rank, world_size=count, timeout=limit
    )


def _try_nccl(store: Store, rank: int, count: int) -> str:
    """Connect and exchange once. Returns what is wrong."""
    if not dist.is_nccl_available():
        return "this PyTorch has no NCCL"
    try:
        limit = timedelta(seconds=EXCHANGE_SECONDS)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=count, timeout=limit)
        first = dist.all_reduce(torch.ones(1, device="cuda"), async_op=True)
        first.wait(timedelta(seconds=FIRST_SECONDS))
        torch.cuda.synchronize()
    except RuntimeError as error:  # DistBackendError is one
        return str(error).strip().splitlines()[0]
    return ""


def is_of_peer(error: RuntimeError) -> bool:
    """Whether an exchange failed, as it does when another process has ended. Gloo raises no class of its own."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


def measure_batch(
    module: nn.Module,
    batches: TrainingBatches,
    device: torch.device,
    precision: str,
    start: int,
    most: int,
) -> int:
    """The most examples of which forward and backward passes leave some of the device's memory free. Raises MemoryError if not
    even one fits."""

    def fits(count: int) -> bool:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        free, total = torch.cuda.mem_get_info(device)
        room = MEMORY_SHARE * total - (total - free - torch.cuda.memory_reserved(device))
        places = np.arange(count) % len(batches)
        dtype = AUTOCAST.get(choose_precision(precision))
        try:
            for _ in range(PROBE_STEPS):
                with torch.autocast(device.type, dtype, enabled=dtype is not None):
                    loss = module(batches.take(places, np.random.default_rng(0)))["loss"]
                loss.backward()
        except torch.OutOfMemoryError:
            return False
        finally:
            module.zero_grad(set_to_none=True)
        return torch.cuda.max_memory_reserved(device) <= room

    return probe_batch(fits, min(start, most), most)


def make_deterministic() -> None:
    """Set it for the whole process. Call it before the first use of CUDA."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def probe_batch(fits: Callable[[int], bool], start: int, most: int) -> int:
    """The largest batch up to `most` that fits: doubled until the memory is full, then reduced by bisection, three times.

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
    """The rows of all processes, in order. The gradient of a loss of all rows reaches each process's own rows."""
    if not tensor.requires_grad:
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts)
    gathered: Tensor = torch.cat(dist_functional.all_gather(tensor.contiguous()))  # type: ignore[no-untyped-call]
    return gathered
