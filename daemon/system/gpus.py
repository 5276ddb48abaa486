"""The GPUs, as NVIDIA's management library (NVML) describes them. It opens no CUDA context, so the daemon may always use it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

LIBRARY, CUDA_LIBRARY = "libnvidia-ml.so.1", "libcuda.so.1"  # of the driver
# Numbers of CUdevice_attribute in the driver's API.
ATTRIBUTES = {
    "multiprocessors": 16,
    "threads_per_multiprocessor": 39,
    "threads_per_block": 1,
    "shared_memory_per_block_bytes": 8,
    "shared_memory_per_block_optin_bytes": 97,  # what a kernel may ask for
    "registers_per_block": 12,
    "warp_size": 10,
}
SCHED_BLOCKING_SYNC = 4  # of CUctx_flags
# Why a GPU runs below its clocks: bits of nvmlDeviceGetCurrentClocksEventReasons. The others are idleness and settings.
SLOWED_BY = {"power": 0x4 | 0x80, "heat": 0x20 | 0x40, "hardware": 0x8}


@dataclass(frozen=True, slots=True)
class Sensors:
    """What a GPU measures of itself. None: the driver does not report it, or it is the whole GPU's and this is a part."""

    celsius: int | None = None
    watts: float | None = None
    joules: float | None = None  # since the driver was loaded
    corrected: int | None = None  # errors of its memory (ECC) since the driver was loaded
    uncorrected: int | None = None
    slowed_by: frozenset[str] | None = None  # of SLOWED_BY


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or one MIG device, which is a part of a GPU that its administrator has divided.

    index: the GPU's number in PCI order, among those that CUDA_VISIBLE_DEVICES names.
    """

    index: int
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    used_bytes: int
    compute_capability: str  # "9.0"
    utilisation: float | None  # 0..1; None if the driver does not report it
    processes: tuple[int, ...]  # PIDs with a context on it
    part: int | None = None  # a MIG device's number in its GPU
    bus_id: str = ""  # PCI address, as in /sys/bus/pci/devices
    sensors: Sensors = Sensors()

    @property
    def number(self) -> str:
        """ "0", or "0:1" for a MIG device, as NVIDIA's container toolkit names it."""
        return f"{self.index}" if self.part is None else f"{self.index}:{self.part}"

    @property
    def device(self) -> str:
        """Its name in the configuration."""
        return f"cuda:{self.number}"


class _Handle(NamedTuple):
    """What NVML calls a GPU. mig: a MIG device of it, and part: the number of that."""

    gpu: Any
    mig: Any = None
    part: int | None = None


def list_gpus() -> list[Gpu]:
    """The usable GPUs; empty without NVIDIA's driver. A GPU that does not answer is left out.

    A GPU that is divided is replaced by its MIG devices: CUDA cannot use it as a whole.
    """
    with _library() as nvml:
        if not nvml:
            return []
        handles, described, index = [], list[Gpu](), 0
        for number in range(nvml.nvmlDeviceGetCount()):
            with contextlib.suppress(nvml.NVMLError):
                handles.append(_Handle(nvml.nvmlDeviceGetHandleByIndex(number)))
        for handle in _visible(nvml, handles):
            parts = _divide(nvml, handle)
            found = []
            for part in [handle] if parts is None else parts:
                with contextlib.suppress(nvml.NVMLError):
                    found.append(_describe(nvml, index, part))
            described += found
            index += bool(found) or parts is not None
        return described


def read_attributes() -> dict[str, dict[str, int]]:
    """Of each GPU that CUDA shows to this process, by UUID, what ATTRIBUTES names. Makes no context. Empty without a driver."""
    value, identity, found = ctypes.c_int(), (ctypes.c_ubyte * 16)(), {}
    for cuda, device in _open_devices():
        if not cuda.cuDeviceGetUuid_v2(identity, device):
            found[str(uuid.UUID(bytes=bytes(identity)))] = {
                name: value.value
                for name, attribute in ATTRIBUTES.items()
                if not cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            }
    return found


def sleep_while_waiting() -> None:
    """Let threads of this process sleep while they wait for a GPU. Otherwise each takes a core to ask it again and again. Must
    come before the first use of a GPU. Without a driver it does nothing."""
    for cuda, device in _open_devices():
        cuda.cuDevicePrimaryCtxSetFlags(device, SCHED_BLOCKING_SYNC)


def _open_devices() -> Iterator[tuple[ctypes.CDLL, ctypes.c_int]]:
    """Each GPU that CUDA shows to this process, as a CUdevice, with the driver's library. Makes no context."""
    try:
        cuda = ctypes.CDLL(CUDA_LIBRARY)
    except OSError:
        return
    count = ctypes.c_int()
    if not (cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))):
        for number in range(count.value):
            device = ctypes.c_int()
            if not cuda.cuDeviceGet(ctypes.byref(device), number):
                yield cuda, device


def driver_errors() -> tuple[type[Exception], ...]:
    """What `list_gpus` raises when the driver itself fails."""
    pynvml = sys.modules.get("pynvml")
    return (pynvml.NVMLError,) if pynvml else ()


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


def _visible(nvml: Any, handles: list[_Handle]) -> list[_Handle]:
    """Those that CUDA_VISIBLE_DEVICES names, by number or by the start of a UUID; all when it is not set."""
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return handles
    by_name = {str(number): handle for number, handle in enumerate(handles)}
    parts = [part for handle in handles for part in _divide(nvml, handle) or []]
    for handle in [*handles, *parts]:
        by_name[nvml.nvmlDeviceGetUUID(handle.gpu if handle.mig is None else handle.mig)] = handle._replace(
            part=None
        )
    return [handle for name in setting.split(",") for handle in _find(by_name, name.strip())]


def _find(by_name: dict[str, _Handle], name: str) -> list[_Handle]:
    if name in by_name:
        return [by_name[name]]
    matches = [handle for uuid, handle in by_name.items() if uuid.startswith(name)]
    return matches if len(matches) == 1 and name.startswith(("GPU-", "MIG-")) else []


def _divide(nvml: Any, handle: _Handle) -> list[_Handle] | None:
    """The MIG devices of a GPU; None if it is not divided."""
    if handle.mig is not None:
        return None
    try:
        if nvml.nvmlDeviceGetMigMode(handle.gpu)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return None
        most = nvml.nvmlDeviceGetMaxMigDeviceCount(handle.gpu)
    except nvml.NVMLError:  # a GPU or driver without MIG
        return None
    parts = []
    for part in range(most):
        with contextlib.suppress(nvml.NVMLError):  # its place is empty
            mig = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle.gpu, part)
            parts.append(_Handle(handle.gpu, mig, part))
    return parts


def _describe(nvml: Any, index: int, handle: _Handle) -> Gpu:
    """Not every figure exists for a MIG device; the others are of its GPU."""
    device = handle.gpu if handle.mig is None else handle.mig
    memory = nvml.nvmlDeviceGetMemoryInfo(device)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle.gpu)
    utilisation, processes, bus_id = None, (), ""
    with contextlib.suppress(nvml.NVMLError):
        utilisation = nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100
    with contextlib.suppress(nvml.NVMLError):
        processes = tuple(process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(device))
    with contextlib.suppress(nvml.NVMLError):
        bus_id = _write_address(nvml.nvmlDeviceGetPciInfo(handle.gpu).busId)
    whole, name = nvml.nvmlDeviceGetName(handle.gpu), nvml.nvmlDeviceGetName(device)
    return Gpu(
        index,
        nvml.nvmlDeviceGetUUID(device),
        name if whole in name else f"{whole} {name}",
        int(memory.total),
        int(memory.free),
        int(memory.used),
        f"{major}.{minor}",
        utilisation,
        processes,
        handle.part,
        bus_id,
        _read_sensors(nvml, handle.gpu) if handle.mig is None else Sensors(),
    )


def _read_sensors(nvml: Any, gpu: Any) -> Sensors:
    def ask(name: str, *arguments: int) -> int | None:
        try:
            return int(getattr(nvml, name)(gpu, *arguments))
        except (nvml.NVMLError, AttributeError):  # an older driver, or pynvml
            return None

    def errors(kind: int) -> int | None:
        return ask("nvmlDeviceGetTotalEccErrors", kind, 0)  # 0: since the driver was loaded

    milliwatts, millijoules = ask("nvmlDeviceGetPowerUsage"), ask("nvmlDeviceGetTotalEnergyConsumption")
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
    return Sensors(
        ask("nvmlDeviceGetTemperature", 0),
        None if milliwatts is None else milliwatts / 1000,
        None if millijoules is None else millijoules / 1000,
        errors(0),
        errors(1),
        None if reasons is None else frozenset(name for name, bits in SLOWED_BY.items() if reasons & bits),
    )


def _write_address(bus_id: str | bytes) -> str:
    """NVML writes "00000000:1B:00.0", Linux "0000:1b:00.0"."""
    text = bus_id.decode() if isinstance(bus_id, bytes) else bus_id
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"
