"""How much memory there is for workers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from daemon.system import host
from daemon.system.host import Host, measure_free, measure_limit

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


def test_the_smallest_limit_is_that_of_the_machine_or_of_a_cgroup_whatever_is_in_use(tmp_path: Path) -> None:
    service = tmp_path / "system.slice" / "visiond.service"
    assert measure_limit(AVAILABLE, tmp_path, "/system.slice/visiond.service") == AVAILABLE
    limit(service, "max", anon=5 << 30)
    limit(service.parent, str(32 << 30), anon=31 << 30)
    assert measure_limit(AVAILABLE, tmp_path, "/system.slice/visiond.service") == 32 << 30
    assert measure_limit(8 << 30, tmp_path, "/system.slice/visiond.service") == 8 << 30


@pytest.mark.parametrize(("free", "share"), [(250, 32), (40, 32), (20, 20)])
def test_a_process_gets_its_share_also_if_its_neighbors_hold_theirs(
    free: int, share: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One of eight on a machine with 256 GiB: the first to start, the last, and one where others use much."""
    memory = SimpleNamespace(available=free << 30, total=256 << 30)
    monkeypatch.setattr(host, "CGROUPS", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert Host.here(8).free_bytes == share << 30
    assert Host.here().free_bytes == free << 30


def test_this_machine_has_cores_and_memory() -> None:
    here = Host.here()
    assert here.cores > 0
    assert 0 < here.free_bytes < psutil.virtual_memory().total
