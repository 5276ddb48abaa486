"""The border between torch's device and the stages: one lock, one dtype table, one translation of errors."""

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

from stages.base import DeviceLost, Image, OutOfMemory, StageSpec

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

APART = "apart"  # threads that do something for later
OLDEST_GPU = (8, 0)  # Ampere: for older ones Triton compiles a kernel for minutes

_OUT_OF_MEMORY = (
    *("CUDA error: out of memory", "Triton Error [CUDA]: out of memory"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
)
_DEVICE_LOST = (
    *("CUDA error", "CUDA driver error", "Triton Error [CUDA]"),
    *("CUBLAS_STATUS", "CUDNN_STATUS", "cuDNN error", "NCCL error"),
)


def dtype_of(spec: StageSpec) -> torch.dtype:
    if spec.dtype not in DTYPES:
        raise ValueError(f'{spec.name}: there is no dtype "{spec.dtype}"; choose one of {", ".join(DTYPES)}.')
    return DTYPES[spec.dtype]


@contextmanager
def hold_device(lock: threading.Lock) -> Iterator[None]:
    """Round the part of a stage that runs on the device: its lock, inference mode, and its errors by our names.

    Every such part must end with a copy to the host, so that nothing is in flight when the next thread, which may use
    another stream, takes the lock. Raises OutOfMemory and DeviceLost.
    """
    with lock, torch.inference_mode(), device_errors():
        yield


@contextmanager
def device_errors() -> Iterator[None]:
    """Translate torch's device errors. Those that are no device's fault pass as they are."""
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
    """Whether Triton's kernels can be used there. One of the largest is tried: Triton also wants a C compiler with
    Python's headers, a folder for what it has compiled, and a GPU that it knows and that has the room; all that is known
    only then. Raises OutOfMemory, DeviceLost."""
    if find_spec("triton") is None or (device.type == "cuda" and torch.cuda.get_device_capability(device) < OLDEST_GPU):
        return False
    try:
        from stages.kernels.launch import try_project

        try_project(device)
        settle(str(device))
    except Exception as error:
        with device_errors():
            if isinstance(error, torch.AcceleratorError) or "out of memory" in str(error):
                raise
        tell_unfused(error)
        return False
    return True


def tell_unfused(error: Exception) -> None:
    """Slower, but all goes on."""
    told = f"The kernels for the GPU cannot be compiled, and the stages run without: {error!r}"
    warnings.warn(told, RuntimeWarning, stacklevel=3)


def has_kernels_for(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and has_kernels(tensor.device)


def settle(device: str) -> None:
    """Wait until all that was asked of a device is done; no wait on the CPU."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def run_apart(make: Callable[[], Item]) -> Future[Item]:
    """What `make` gives, in a thread of its own; unlike an executor's, it keeps no process from its end."""
    future: Future[Item] = Future()

    def work() -> None:
        try:
            future.set_result(make())
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result is told
            traceback.clear_frames(error.__traceback__)  # else what has failed keeps the device's memory
            future.set_exception(error)

    threading.Thread(target=work, name=APART, daemon=True).start()
    return future


def pixels_of(images: Sequence[Image]) -> list[torch.Tensor]:
    """The decoded images. Raises ValueError when one was not decoded, which is the caller's mistake."""
    pixels = [image.pixels for image in images if image.pixels is not None]
    if len(pixels) < len(images):
        raise ValueError("an image came to a stage that reads pixels without its pixels.")
    return pixels


def group_places(keys: Iterable[Key]) -> dict[Key, list[int]]:
    """Where each key stands: the places of what has it, in order."""
    groups: dict[Key, list[int]] = {}
    for place, key in enumerate(keys):
        groups.setdefault(key, []).append(place)
    return groups


def split_batches(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    """Runs of at most `size` items, in order."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
