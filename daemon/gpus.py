"""What NVIDIA's management library (NVML) says of the GPUs. Opens no CUDA context, so the daemon may ask any time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pynvml


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `index` counts as the daemon does, in PCI order over the GPUs that CUDA_VISIBLE_DEVICES leaves."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    used_bytes: int
    compute_capability: str  # "9.0"
    utilisation: float | None  # 0..1; None where the driver does not tell
    processes: tuple[int, ...]  # PIDs with a context on it


def list_gpus() -> list[Gpu]:
    """The GPUs that may be used; none on a machine without NVIDIA's driver. A GPU that fails to answer is left out."""
    with _library() as available:
        if not available:
            return []
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        described: list[Gpu] = []
        for handle in _visible(handles):
            with contextlib.suppress(pynvml.NVMLError):
                described.append(_describe(len(described), handle))
        return described


def driver_version() -> str | None:
    """NVIDIA's driver; None where there is none."""
    with _library() as available:
        return str(pynvml.nvmlSystemGetDriverVersion()) if available else None


@contextlib.contextmanager
def _library() -> Iterator[bool]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, no library
        yield False
        return
    try:
        yield True
    finally:
        pynvml.nvmlShutdown()


def _visible(handles: list[Any]) -> list[Any]:
    """Those that CUDA_VISIBLE_DEVICES names, by number or by UUID; all when it is not set."""
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return handles
    by_name = {str(number): handle for number, handle in enumerate(handles)}
    by_name |= {pynvml.nvmlDeviceGetUUID(handle): handle for handle in handles}
    return [by_name[name.strip()] for name in setting.split(",") if name.strip() in by_name]


def _describe(index: int, handle: Any) -> Gpu:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    utilisation, processes = None, ()
    with contextlib.suppress(pynvml.NVMLError):
        utilisation = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    with contextlib.suppress(pynvml.NVMLError):
        processes = tuple(process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    return Gpu(
        index,
        pynvml.nvmlDeviceGetUUID(handle),
        pynvml.nvmlDeviceGetName(handle),
        int(memory.total),
        int(memory.free),
        int(memory.used),
        f"{major}.{minor}",
        utilisation,
        processes,
    )
