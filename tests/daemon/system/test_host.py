"""How much memory there is for workers."""

from __future__ import annotations

from pathlib import Path

import psutil

from daemon.system.host import Host, measure_free

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


def test_this_machine_has_cores_and_memory() -> None:
    host = Host.here()
    assert host.cores > 0
    assert 0 < host.free_bytes < psutil.virtual_memory().total
