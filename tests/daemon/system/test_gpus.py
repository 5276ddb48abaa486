"""The list of GPUs, with a fake of NVIDIA's management library."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from daemon.system import gpus
from daemon.system.gpus import ATTRIBUTES, Sensors, list_gpus, read_attributes, sleep_while_waiting

GIB = 1 << 30


class NVMLError(Exception):
    pass


@dataclass
class Device:
    """A GPU, or a MIG device; `migs` are the MIG devices of a divided GPU, by place."""

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    total: int = 80 * GIB
    migs: Mapping[int, Device] | None = None
    broken: bool = False
    bus_id: str | bytes = b"00000000:1B:00.0"
    questions: list[str] = field(default_factory=list)
    slowed: int | None = 0  # bits; None: the driver does not say


class FakeNvml:
    """The functions of pynvml that list_gpus uses. As in the real one, a MIG device answers only some."""

    NVMLError = NVMLError
    NVML_DEVICE_MIG_ENABLE = 1

    def __init__(self, devices: list[Device]) -> None:
        self.devices = devices

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> Device:
        return self.devices[number]

    def nvmlDeviceGetMigMode(self, device: Device) -> list[int]:
        if device not in self.devices or device.migs is None:
            raise NVMLError("not supported")
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, _device: Device) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Device, part: int) -> Device:
        if part not in (device.migs or {}):
            raise NVMLError("not found")
        return (device.migs or {})[part]

    def nvmlDeviceGetUUID(self, device: Device) -> str:
        return device.uuid

    def nvmlDeviceGetName(self, device: Device) -> str:
        return device.name

    def nvmlDeviceGetMemoryInfo(self, device: Device) -> Any:
        if device.broken:
            raise NVMLError("lost")
        return SimpleNamespace(total=device.total, free=device.total, used=0)

    def nvmlDeviceGetCudaComputeCapability(self, device: Device) -> tuple[int, int]:
        self._refuse_parts(device)
        return 9, 0

    def nvmlDeviceGetUtilizationRates(self, device: Device) -> Any:
        self._refuse_parts(device)
        return SimpleNamespace(gpu=50)

    def nvmlDeviceGetComputeRunningProcesses(self, _device: Device) -> list[Any]:
        return [SimpleNamespace(pid=17)]

    def nvmlDeviceGetPciInfo(self, device: Device) -> Any:
        self._refuse_parts(device)
        return SimpleNamespace(busId=device.bus_id)

    def nvmlDeviceGetTemperature(self, device: Device, _sensor: int) -> int:
        self._refuse_parts(device)
        return 41

    def nvmlDeviceGetPowerUsage(self, _device: Device) -> int:
        return 350_500

    def nvmlDeviceGetTotalEnergyConsumption(self, _device: Device) -> int:
        return 7_000_000_000

    def nvmlDeviceGetTotalEccErrors(self, _device: Device, kind: int, _counter: int) -> int:
        if kind:
            raise NVMLError("not supported")
        return 3

    def nvmlDeviceGetCurrentClocksEventReasons(self, device: Device) -> int:
        if device.slowed is None:
            raise NVMLError("not supported")
        return device.slowed

    def _refuse_parts(self, device: Device) -> None:
        if device not in self.devices:
            raise NVMLError("not supported")


PARTS = {0: Device("MIG-a", "MIG 1g.10gb", 10 * GIB), 2: Device("MIG-b", "MIG 3g.40gb", 40 * GIB)}
DIVIDED = [Device("GPU-1"), Device("GPU-2", migs=PARTS), Device("GPU-3", bus_id="00000001:9A:00.0")]


def listed(
    monkeypatch: pytest.MonkeyPatch, devices: list[Device], visible: str | None = None
) -> list[gpus.Gpu]:
    @contextlib.contextmanager
    def library() -> Iterator[FakeNvml]:
        yield FakeNvml(devices)

    monkeypatch.setattr(gpus, "_library", library)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return list_gpus()


def test_a_gpu_has_its_number_and_its_pci_address_as_linux_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    [gpu] = listed(monkeypatch, [Device("GPU-1")])
    assert (gpu.device, gpu.bus_id, gpu.utilisation, gpu.processes) == ("cuda:0", "0000:1b:00.0", 0.5, (17,))
    assert gpu.compute_capability == "9.0"


def test_a_gpu_reports_what_its_sensors_say_and_nothing_for_those_that_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    idle, busy = 0x1, 0x4 | 0x40  # busy: at its power limit, and hot
    first, second, old = listed(
        monkeypatch, [Device("1", slowed=busy), Device("2", slowed=idle), Device("3", slowed=None)]
    )
    assert first.sensors == Sensors(41, 350.5, 7e6, 3, None, frozenset({"power", "heat"}))
    assert (second.sensors.slowed_by, old.sensors.slowed_by) == (frozenset(), None)


def test_a_part_of_a_gpu_has_no_sensors_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum over the parts would count their GPU several times."""
    assert [gpu.sensors for gpu in listed(monkeypatch, [Device("1", migs=PARTS)])] == [Sensors()] * 2


def test_a_divided_gpu_is_listed_as_its_mig_devices_and_changes_no_other_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = listed(monkeypatch, DIVIDED)
    assert [(gpu.device, gpu.uuid) for gpu in found] == [
        ("cuda:0", "GPU-1"),
        ("cuda:1:0", "MIG-a"),
        ("cuda:1:2", "MIG-b"),
        ("cuda:2", "GPU-3"),
    ]
    assert [gpu.total_bytes // GIB for gpu in found] == [80, 10, 40, 80]
    part = found[1]
    assert (part.name, part.compute_capability) == ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "9.0")
    assert (part.utilisation, part.bus_id, found[3].bus_id) == (None, "0000:1b:00.0", "0001:9a:00.0")


def test_a_divided_gpu_without_mig_devices_keeps_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    found = listed(monkeypatch, [Device("GPU-1", migs={}), Device("GPU-2")])
    assert [(gpu.device, gpu.uuid) for gpu in found] == [("cuda:1", "GPU-2")]


def test_a_gpu_that_does_not_answer_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found = listed(monkeypatch, [Device("GPU-1", broken=True), Device("GPU-2")])
    assert [gpu.device for gpu in found] == ["cuda:0"]


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        ("", []),
        ("2,0", ["cuda:0 GPU-3", "cuda:1 GPU-1"]),
        ("1", ["cuda:0:0 MIG-a", "cuda:0:2 MIG-b"]),
        ("GPU-3", ["cuda:0 GPU-3"]),
        ("MIG-b", ["cuda:0 MIG-b"]),
        ("MIG-", []),  # the start of two
        ("GPU-2, 0", ["cuda:0:0 MIG-a", "cuda:0:2 MIG-b", "cuda:1 GPU-1"]),
    ],
)
def test_only_what_cuda_visible_devices_names_is_listed(
    visible: str, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = listed(monkeypatch, DIVIDED, visible)
    assert [f"{gpu.device} {gpu.uuid}" for gpu in found] == devices


@pytest.mark.gpu
@pytest.mark.skipif(not list_gpus(), reason="needs CUDA")
def test_the_driver_says_what_a_gpu_has_as_torch_does() -> None:
    import torch

    found = read_attributes()
    for number in range(torch.cuda.device_count()):
        torchs = torch.cuda.get_device_properties(number)
        assert found[str(torchs.uuid)].keys() == ATTRIBUTES.keys()
        assert found[str(torchs.uuid)]["multiprocessors"] == torchs.multi_processor_count
        assert found[str(torchs.uuid)]["shared_memory_per_block_bytes"] == torchs.shared_memory_per_block
    assert {gpu.uuid.partition("-")[2] for gpu in list_gpus()} == found.keys()


def test_without_a_driver_nothing_is_said_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "CUDA_LIBRARY", "libnothing.so")
    assert read_attributes() == {}
    sleep_while_waiting()


class Driver:
    """Of two GPUs."""

    def __init__(self) -> None:
        self.flags: dict[int, int] = {}

    def cuInit(self, _: int) -> int:
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def cuDeviceGet(self, device: Any, number: int) -> int:
        device._obj.value = number
        return 0

    def cuDevicePrimaryCtxSetFlags(self, device: ctypes.c_int, flags: int) -> int:
        self.flags[device.value] = flags
        return 0


def test_threads_sleep_while_they_wait_for_any_of_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: driver)
    sleep_while_waiting()
    assert driver.flags == {0: 4, 1: 4}  # CU_CTX_SCHED_BLOCKING_SYNC


WAIT = """
import time, torch
from daemon.system.gpus import sleep_while_waiting
sleep_while_waiting()
torch.cuda._sleep(2_000_000_000)  # cycles: a second
before = time.thread_time()
torch.cuda.synchronize()
print(time.thread_time() - before)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not list_gpus(), reason="needs CUDA")
def test_a_thread_that_waits_for_a_gpu_takes_no_core() -> None:
    waited = subprocess.run([sys.executable, "-c", WAIT], capture_output=True, text=True, check=True)
    assert float(waited.stdout) < 0.1
