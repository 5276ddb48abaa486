"""How much memory there is for workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from daemon.system import host
from daemon.system.cores import Cores
from daemon.system.host import Host, measure_free
from stages.contract import processes

AVAILABLE = 64 << 30


def limit(group: Path, most: str, high: str = "max", anon: int = 0) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.high").write_text(f"{high}\n")
    (group / "memory.stat").write_text(f"anon {anon}\nfile {1 << 40}\n")


def test_without_cgroups_what_is_available_is_free(tmp_path: Path) -> None:
    assert measure_free(AVAILABLE, tmp_path / "missing", "/") == AVAILABLE


def test_each_limit_on_the_way_to_the_root_counts_and_files_in_memory_do_not(tmp_path: Path) -> None:
    service = tmp_path / "system.slice" / "visiond.service"
    limit(service, "max")
    assert measure_free(AVAILABLE, tmp_path, "/system.slice/visiond.service") == AVAILABLE
    limit(service.parent, str(32 << 30), anon=2 << 30)
    assert measure_free(AVAILABLE, tmp_path, "/system.slice/visiond.service") == 30 << 30
    limit(service, str(16 << 30), high=str(8 << 30), anon=1 << 30)
    assert measure_free(AVAILABLE, tmp_path, "/system.slice/visiond.service") == 7 << 30
    limit(service, "1", anon=5)
    assert measure_free(AVAILABLE, tmp_path, "/system.slice/visiond.service") == 0


@pytest.mark.parametrize(
    ("free", "held", "share"),
    [
        pytest.param(240, 0, 30, id="the first to start"),
        pytest.param(100, 140, 30, id="one that starts again, while the others hold their shares"),
        pytest.param(16, 0, 2, id="where other programs hold nearly everything"),
        pytest.param(2, 140, 2, id="where less than a share is left"),
    ],
)
def test_each_of_eight_gets_its_share_of_what_is_free_and_of_what_workers_hold(
    free: int, held: int, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "measure_free", lambda *_: free << 30)
    monkeypatch.setattr(host, "measure_held", lambda: held << 30)
    assert Host.here(8).free_bytes == share << 30
    assert Host.here().free_bytes == free << 30


def test_the_memory_of_workers_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "WORKER", f"worker of {os.getpid()}")  # others may run beside it
    assert host.measure_held() == 0
    program = "import sys; held = b'x' * (64 << 20); print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program, host.WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as worker:
        assert worker.stdout
        assert worker.stdout.readline() == b"ready\n"
        assert 64 << 20 < host.measure_held() < 128 << 20
        worker.communicate()


def test_this_machine_has_cores_and_memory() -> None:
    here = Host.here()
    assert here.cores > 0
    assert 0 < here.free_bytes < psutil.virtual_memory().total


def cgroups(monkeypatch: pytest.MonkeyPatch, root: Path, files: dict[str, str], own: str) -> None:
    """Let this process be in these cgroups; `own` is what /proc/self/cgroup has."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(processes, "CGROUPS", root)
    read = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda file: own if file == Path("/proc/self/cgroup") else read(file)
    )
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))


@pytest.mark.parametrize(
    ("files", "own", "cores"),
    [
        pytest.param({}, "0::/", 16, id="no quota"),
        pytest.param({"cpu.max": "max 100000\n"}, "0::/", 16, id="none in a container"),
        pytest.param({"cpu.max": "200000 100000\n"}, "0::/", 2, id="of a container"),
        pytest.param({"cpu.max": "150000 100000\n"}, "0::/", 2, id="a part of a core"),
        pytest.param({"cpu.max": "5000 100000\n"}, "0::/", 1, id="less than a core"),
        pytest.param(
            {"a.slice/cpu.max": "300000 100000\n", "a.slice/b.service/cpu.max": "800000 100000\n"},
            "0::/a.slice/b.service\n",
            3,
            id="of a slice, which is less than that of its service",
        ),
        pytest.param(
            {"cpu/docker/x/cpu.cfs_quota_us": "400000\n", "cpu/docker/x/cpu.cfs_period_us": "100000\n"},
            "3:memory:/docker/y\n1:cpu,cpuacct:/docker/x\n",
            4,
            id="version 1",
        ),
        pytest.param(
            {"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            "1:cpu:/docker/not-seen-from-inside\n",
            4,
            id="version 1 in a container",
        ),
        pytest.param(
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            "1:cpu:/\n",
            16,
            id="none in version 1",
        ),
    ],
)
def test_a_quota_of_cpu_time_counts_as_cores(
    files: dict[str, str], own: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cgroups(monkeypatch, tmp_path, files, own)
    assert processes.count_cores() == Host.here().cores == Cores.of([], []).total == cores


def test_fewer_cores_than_the_quota_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cgroups(monkeypatch, tmp_path, {"cpu.max": "800000 100000\n"}, "0::/")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 5, 7})
    assert processes.count_cores() == 3
