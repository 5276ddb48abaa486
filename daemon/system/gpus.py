"""The GPUs, as NVIDIA's management library (NVML) describes them. It opens no CUDA context,
so the daemon may always use it."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"  # of the driver


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `index` is its number in PCI order, among the GPUs that CUDA_VISIBLE_DEVICES names."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    used_bytes: int
    compute_capability: str  # "9.0"
    utilisation: float | None  # 0..1; None if the driver does not report it
    processes: tuple[int, ...]  # PIDs with a context on it

    @property
    def device(self) -> str:
        """Its name in the configuration."""
        return f"cuda:{self.index}"


def list_gpus() -> list[Gpu]:
    """The usable GPUs; empty without NVIDIA's driver. A GPU that does not answer is left out."""
    with _library() as nvml:
        if not nvml:
            return []
        handles, described = [], list[Gpu]()
        for number in range(nvml.nvmlDeviceGetCount()):
            with contextlib.suppress(nvml.NVMLError):
                handles.append(nvml.nvmlDeviceGetHandleByIndex(number))
        for handle in _visible(nvml, handles):
            with contextlib.suppress(nvml.NVMLError):
                described.append(_describe(nvml, len(described), handle))
        return described


def driver_version() -> str | None:
    """Version of NVIDIA's driver; None without one."""
    with _library() as nvml:
        return str(nvml.nvmlSystemGetDriverVersion()) if nvml else None


@contextlib.contextmanager
def _library() -> Iterator[Any]:
    """The module pynvml; None without a driver. Importing it takes longer than everything else in a command."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        yield None
        return
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _visible(nvml: Any, handles: list[Any]) -> list[Any]:
    """Those that CUDA_VISIBLE_DEVICES names, by number or by UUID; all when it is not set."""
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return handles
    by_name = {str(number): handle for number, handle in enumerate(handles)}
    by_name |= {nvml.nvmlDeviceGetUUID(handle): handle for handle in handles}
    return [by_name[name.strip()] for name in setting.split(",") if name.strip() in by_name]


def _describe(nvml: Any, index: int, handle: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    utilisation, processes = None, ()
    with contextlib.suppress(nvml.NVMLError):
        utilisation = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    with contextlib.suppress(nvml.NVMLError):
        processes = tuple(process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    return Gpu(
        index,
        nvml.nvmlDeviceGetUUID(handle),
        nvml.nvmlDeviceGetName(handle),
        int(memory.total),
        int(memory.free),
        int(memory.used),
        f"{major}.{minor}",
        utilisation,
        processes,
    )
