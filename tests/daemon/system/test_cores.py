"""Which cores are near a GPU, with a fake /sys; and processes that are really kept on them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import anyio
import pytest

from daemon.config.loading import parse
from daemon.layout import layout
from daemon.service.lifecycle import Service
from daemon.system import cores
from daemon.system.children import descendants
from daemon.system.cores import Cores, read_list, write_list
from daemon.system.gpus import Gpu
from tests.daemon_process import Place, running, until

HERE = sorted(os.sched_getaffinity(0))
several_cores = pytest.mark.skipif(len(HERE) < 2, reason="needs two cores")


def make_gpu(index: int, bus_id: str | None = None) -> Gpu:
    address = f"0000:{index:02x}:00.0" if bus_id is None else bus_id
    return Gpu(index, f"GPU-{index}", "card", 1 << 36, 1 << 36, 0, "9.0", None, (), None, address)


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "sys"
    monkeypatch.setattr(cores, "SYSFS", root)
    return root


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process may use 128 cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(128)))


def write_host(
    root: Path,
    nodes: Sequence[str],
    gpus: Sequence[int],
    distances: Mapping[tuple[int, int], int] | None = None,
) -> None:
    """nodes: the cores of each; gpus: the node of each GPU; distances: where they are not 10 and 20."""
    for number, held in enumerate(nodes):
        folder = root / "devices" / "system" / "node" / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{held}\n")
        row = [
            (distances or {}).get((number, other), 10 if other == number else 20)
            for other in range(len(nodes))
        ]
        (folder / "distance").write_text(" ".join(map(str, row)) + "\n")
    for index, node in enumerate(gpus):
        folder = root / "bus" / "pci" / "devices" / f"0000:{index:02x}:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")


def find(gpus: Sequence[Gpu], workers: int) -> dict[str, str]:
    devices = [gpu.device for gpu in gpus] * workers
    return Cores.of(gpus, devices).describe()


@pytest.mark.usefixtures("pretend")
def test_workers_run_on_the_cores_of_their_gpus_node(sysfs: Path) -> None:
    write_host(sysfs, ["0-31,64-95", "32-63,96-127"], [0, 0, 0, 0, 1, 1, 1, 1])
    near = find([make_gpu(index) for index in range(8)], workers=5)
    assert near == {f"cuda:{n}": "0-31,64-95" if n < 4 else "32-63,96-127" for n in range(8)}


@pytest.mark.usefixtures("pretend")
@pytest.mark.parametrize(
    ("nodes", "of_gpu", "bus_id"),
    [
        (["0-127"], 0, None),  # one node
        (["0-127", ""], 0, None),  # another one with memory only
        (["0-63", "64-127"], -1, None),  # the firmware does not say
        (["0-63", "64-127"], 7, None),
        (["0-63", "64-127"], 0, ""),  # the driver does not say
        (["0-63", "64-127"], 0, "0000:77:00.0"),
        (["128-255", "0-127"], 0, None),  # none that the daemon may use
        ([], 0, None),  # no /sys
    ],
)
def test_without_a_reason_to_choose_workers_run_on_any_core(
    nodes: list[str], of_gpu: int, bus_id: str | None, sysfs: Path
) -> None:
    write_host(sysfs, nodes, [of_gpu])
    assert find([make_gpu(0, bus_id)], workers=1) == {}


def test_no_core_is_used_that_the_daemon_may_not_use(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {3, 4, 5, 64})
    write_host(sysfs, ["0-63", "64-127"], [0])
    assert find([make_gpu(0)], workers=1) == {"cuda:0": "3-5"}


@pytest.mark.usefixtures("pretend")
def test_where_a_node_has_too_few_cores_the_nearest_ones_help(sysfs: Path) -> None:
    """Two sockets with four nodes each, and GPUs on a part of them, as on some EPYC hosts."""
    nodes = [f"{16 * n}-{16 * n + 15}" for n in range(8)]
    same_socket = {(a, b): 12 if a // 4 == b // 4 else 32 for a in range(8) for b in range(8) if a != b}
    write_host(sysfs, nodes, [1, 1, 5, 5], same_socket)
    gpus = [make_gpu(index) for index in range(4)]
    assert find(gpus, workers=2) == dict.fromkeys(["cuda:0", "cuda:1"], "16-31") | dict.fromkeys(
        ["cuda:2", "cuda:3"], "80-95"
    )
    assert find(gpus, workers=5) == dict.fromkeys(["cuda:0", "cuda:1"], "0-63") | dict.fromkeys(
        ["cuda:2", "cuda:3"], "64-127"
    )
    assert find(gpus[:2], workers=30) == {}  # they need all


def test_workers_share_the_cores_that_they_may_use() -> None:
    eight = Cores(128, {f"cuda:{n}": list(range(64)) if n < 4 else list(range(64, 128)) for n in range(8)})
    devices = [f"cuda:{n}" for n in range(8)] * 5
    assert eight.share("cuda:0", devices) == 3.2
    crowded = Cores(128, {"cuda:0": list(range(8)), "cuda:1": list(range(64, 128))})
    assert crowded.share("cuda:0", ["cuda:0", "cuda:1"] * 2) == 4
    assert crowded.share("cuda:1", ["cuda:0", "cuda:1"] * 2) == 32
    assert crowded.share("cpu", ["cuda:0", "cuda:1", "cpu"]) == 128 / 3
    assert crowded.share("cuda:0", ["cuda:0", "cpu"]) == 4  # the CPU's worker runs there too
    assert Cores(16).share("cuda:0", ["cuda:0"] * 5) == 3.2


def test_an_executor_is_bound_if_all_its_devices_are_near_the_same_cores() -> None:
    known = Cores(8, {"cuda:0": [0, 1], "cuda:1": [0, 1], "cuda:2": [2, 3]})
    assert known.common(["cuda:0", "cuda:1"]) == [0, 1]
    assert known.common(["cuda:0", "cuda:2"]) == []
    assert known.common(["cuda:0", "cpu"]) == []


@pytest.mark.parametrize(("text", "numbers"), [("0-2,7\n", {0, 1, 2, 7}), ("\n", set()), ("5", {5})])
def test_lists_of_cores_are_read_and_written_as_linux_does(text: str, numbers: set[int]) -> None:
    assert read_list(text) == numbers
    assert write_list(numbers) == text.strip()


BINDER = """
import os, sys, threading
from daemon.system.cores import bind
go = threading.Event()
thread = threading.Thread(target=go.wait)
thread.start()
bind([int(number) for number in sys.argv[1].split(",")])
print(*[sorted(os.sched_getaffinity(number)) for number in (0, thread.native_id)])
go.set()
"""


@several_cores
@pytest.mark.parametrize(
    ("cores", "kept"),
    [(f"{HERE[0]}", HERE[:1]), (f"{HERE[1]},4000", HERE[1:2]), ("4000", HERE)],
)
def test_all_threads_of_a_process_are_bound_but_never_to_nothing(cores: str, kept: list[int]) -> None:
    told = subprocess.run([sys.executable, "-c", BINDER, cores], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == f"{kept} {kept}"


@pytest.fixture
def bound() -> Iterator[None]:
    """A daemon with one executor binds its own process, here that of the tests."""
    yield
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # a thread may have ended since listdir
            os.sched_setaffinity(int(thread), HERE)


@several_cores
@pytest.mark.anyio
@pytest.mark.usefixtures("bound")
@pytest.mark.parametrize(
    ("gpus", "changes", "held"),
    [
        (2, {"executors": 2}, {"worker/0": HERE[:1], "worker/1": HERE[1:2], "executors": HERE[:2]}),
        (2, {"executors": 1}, {"worker/0": HERE[:1], "worker/1": HERE[1:2], "daemon": HERE}),
        (1, {"executors": 1}, {"worker/0": HERE[:1], "daemon": HERE[:1]}),
    ],
)
async def test_processes_run_near_their_gpu(
    gpus: int,
    changes: dict[str, object],
    held: dict[str, list[int]],
    tmp_path: Path,
    sysfs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    write_host(sysfs, [f"{HERE[0]}", ",".join(map(str, HERE[1:]))], [0, 1])
    monkeypatch.setattr(layout, "list_gpus", lambda: [make_gpu(index) for index in range(gpus)])
    monkeypatch.setattr(cores, "NEAR_CORES_PER_WORKER", 1)
    place = Place(tmp_path, {"pipeline": {"workers_per_device": 1} | changes})
    service = Service(parse(place.settings, tmp_path))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(service.run)
        await until(lambda: service.loaded)
        seen = observe()
        tasks.cancel_scope.cancel()
    assert {name: seen[name] for name in held} == held
    told = "".join(capfd.readouterr())
    assert told.count("cores of their GPU's NUMA node") == 1


def observe() -> dict[str, list[int]]:
    """On which cores the threads of the daemon's processes may run."""
    seen = {"daemon": cores_of(os.getpid())}
    processes = [*descendants(os.getpid())]
    for pid in running("daemon.workers.child", processes):
        device = next(
            entry for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if b"VISIBLE" in entry
        )
        seen[f"worker/{device.decode()[-1]}"] = cores_of(pid)
    executors = [cores_of(pid) for pid in running("daemon.pipeline.child", processes)]
    return seen | {"executors": [core for held in sorted(executors) for core in held]}


def cores_of(pid: int) -> list[int]:
    """Of all its threads, which must have the same."""
    found = set()
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            found.add(tuple(sorted(os.sched_getaffinity(int(thread)))))
    [cores] = found
    return list(cores)
