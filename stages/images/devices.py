"""What all stages need of torch and its devices: a lock, dtypes, errors, the check for kernels, threads, batches."""

from __future__ import annotations

import threading
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import TypeVar

import torch
import torch.nn.functional as F

from stages.contract.base import (
    COMPILATION,
    PLAN,
    PREPARED,
    SIZE_STEP,
    DeviceLost,
    Image,
    OutOfMemory,
    StageSpec,
)
from stages.contract.descriptor import SMALL
from stages.kernels.cache import OLDEST_GPU, wait_for_compiler

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

BACKGROUND = "background"  # the name of threads that prepare something for later

_planned = threading.local()

_OUT_OF_MEMORY = (
    *("CUDA error: out of memory", "Triton Error [CUDA]: out of memory"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
)
_DEVICE_LOST = (
    *("CUDA error", "CUDA driver error", "Triton Error [CUDA]"),
    *("CUBLAS_STATUS", "CUDNN_STATUS", "cuDNN error", "NCCL error"),
)


def dtype_of(spec: StageSpec) -> torch.dtype:
    """The dtype of what layers exchange."""
    if spec.dtype in SMALL:
        return torch.bfloat16
    if spec.dtype not in DTYPES:
        names = ", ".join([*DTYPES, *SMALL])
        raise ValueError(f'{spec.name}: there is no dtype "{spec.dtype}"; choose one of {names}.')
    return DTYPES[spec.dtype]


@contextmanager
def hold_device(lock: threading.Lock) -> Iterator[None]:
    """For the part of a stage that runs on the device: takes the lock, sets inference mode, and translates torch's errors.

    Such a part must end with a copy to the host, so that no work is in flight when the next
    thread takes the lock: it may use another stream. Raises OutOfMemory and DeviceLost.
    """
    with lock, torch.inference_mode(), device_errors():
        yield


@contextmanager
def device_errors() -> Iterator[None]:
    """Translate torch's device errors to OutOfMemory and DeviceLost. Other errors pass unchanged."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(str(error)) from error
    except RuntimeError as error:
        text = str(error)
        if any(sign in text for sign in _OUT_OF_MEMORY):
            raise OutOfMemory(text) from error
        if isinstance(error, torch.AcceleratorError) or any(sign in text for sign in _DEVICE_LOST):
            raise DeviceLost(text) from error
        raise


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels can be used on a device. Raises OutOfMemory, DeviceLost.

    One of the largest kernels is run. Triton also needs a C compiler with Python's headers, a folder for
    compiled kernels, and a GPU that it supports and that has enough shared memory: only a try shows all of
    this. If another process is compiling the kernels of this host, this one waits for it.
    """
    if find_spec("triton") is None or (
        device.type == "cuda" and torch.cuda.get_device_capability(device) < OLDEST_GPU
    ):
        return False
    try:
        from triton import knobs  # type: ignore[import-untyped]

        from stages.kernels.launch import try_pointwise_linear

        knobs.compilation.listener = note_compilation
        wait_for_compiler(knobs.cache.dir)
        try_pointwise_linear(device)
        synchronize(str(device))
    except Exception as error:
        with device_errors():
            if isinstance(error, torch.AcceleratorError) or "out of memory" in str(error):
                raise
        warn_unfused(error)
        return False
    return True


def note_compilation(*, cache_hit: bool, **_: object) -> None:
    """Triton calls this for each kernel that it compiles, or finds in the folder of compiled ones."""
    PREPARED[COMPILATION] += not cache_hit


def warn_unfused(error: Exception) -> None:
    message = f"The GPU kernels cannot be compiled, so the stages run without them, more slowly: {error!r}"
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def has_kernels_for(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and has_kernels(tensor.device)


def synchronize(device: str) -> None:
    """Wait until a device has finished its work. Does nothing on the CPU."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def warm_up_size(device: str, batch_size: int) -> int:
    """How many images a stage runs while it loads: on a GPU a full batch, which then has its memory and its kernels. A CPU
    needs neither, and one image shows that the model runs."""
    return 1 if device == "cpu" else batch_size


def pad_batch(batch: torch.Tensor, most: int, network: str) -> torch.Tensor:
    """On a GPU, a batch [N, ...] with rows of zeros up to one of a few sizes, and at most `most`. cuDNN plans its convolutions
    and its attention again for each size that is new to a thread, which takes YOLOv8n about 0.1 s on an H200, ten times as long
    as the batch."""
    if not batch.is_cuda:
        return batch
    more = min(padded_size(len(batch)), max(most, len(batch))) - len(batch)
    padded = F.pad(batch, (0, 0) * (batch.ndim - 1) + (0, more)) if more else batch
    note_plan(network, padded.shape)
    return padded


def note_plan(network: str, shape: tuple[int, ...]) -> None:
    """Count it if this network has had no batch of this shape in this thread."""
    known = _planned.__dict__.setdefault("batches", set())
    if (network, shape) not in known:
        known.add((network, shape))
        PREPARED[PLAN] += 1


def padded_size(count: int) -> int:
    """The next power of two, or above SIZE_STEP its next multiple. Fewer images than that take a GPU as long."""
    return 1 << (count - 1).bit_length() if count <= SIZE_STEP else -(-count // SIZE_STEP) * SIZE_STEP


def run_in_background(make: Callable[[], Item]) -> Future[Item]:
    """Run `make` in a separate thread. Unlike an executor's threads, it does not keep the process alive."""
    future: Future[Item] = Future()

    def work() -> None:
        try:
            future.set_result(make())
        except BaseException as error:  # noqa: BLE001 - raised again by the future's result()
            traceback.clear_frames(error.__traceback__)  # otherwise the failed call keeps its device memory
            future.set_exception(error)

    threading.Thread(target=work, name=BACKGROUND, daemon=True).start()
    return future


def pixels_of(images: Sequence[Image]) -> list[torch.Tensor]:
    """The pixels of images. Raises ValueError if one was not decoded, which is a bug of the caller."""
    pixels = [image.pixels for image in images if image.pixels is not None]
    if len(pixels) < len(images):
        raise ValueError("a stage that reads pixels was given an image that was not decoded.")
    return pixels


def group_places(keys: Iterable[Key]) -> dict[Key, list[int]]:
    """The indices at which each key occurs, in order."""
    groups: dict[Key, list[int]] = {}
    for place, key in enumerate(keys):
        groups.setdefault(key, []).append(place)
    return groups


def split_batches(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    """Consecutive slices of at most `size` items."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
