"""What is flushed, and when it gets its name, in files that no daemon has to write at once: for those see test_order.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daemon.config.state import UPKEEP
from daemon.monitoring.upkeep import write_upkeep
from daemon.search import matrix
from daemon.server.app import own_token
from visiond.cluster.places import ClusterFolder

Calls = list[tuple[str, str]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Each flush with its file, and each new name with the file that got it, in order."""
    seen: Calls = []

    def watch_flush(name: str) -> None:
        flush = getattr(os, name)

        def note(fd: int) -> None:
            seen.append(("flush", os.readlink(f"/proc/self/fd/{fd}")))
            flush(fd)

        monkeypatch.setattr(os, name, note)

    def watch_name(name: str) -> None:
        give = getattr(os, name)

        def note(source: Any, target: Any, **options: Any) -> None:
            seen.append(("name", os.fsdecode(source)))
            give(source, target, **options)

        monkeypatch.setattr(os, name, note)

    for name in ("fsync", "fdatasync"):
        watch_flush(name)
    for name in ("rename", "replace", "link"):
        watch_name(name)
    return seen


def assert_flushed_before_it_has_its_name(calls: Calls) -> str:
    """Returns the file's first name."""
    [named] = [place for place, (what, _) in enumerate(calls) if what == "name"]
    assert ("flush", calls[named][1]) in calls[:named]
    return calls[named][1]


def test_the_pages_token_is_on_the_disk_before_it_has_its_name(tmp_path: Path, calls: Calls) -> None:
    own_token(tmp_path / "page.token")
    first = assert_flushed_before_it_has_its_name(calls)
    assert not os.path.exists(first)


def test_the_upkeep_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, calls: Calls) -> None:
    write_upkeep(tmp_path, [])
    assert Path(assert_flushed_before_it_has_its_name(calls)).name != UPKEEP


def test_a_part_of_a_cluster_is_on_the_disk_before_it_has_its_name_and_its_name_before_it_counts(
    tmp_path: Path, calls: Calls
) -> None:
    assert ClusterFolder(str(tmp_path)).write_whole("part", b"rows")
    assert_flushed_before_it_has_its_name(calls)
    assert calls[-1] == ("flush", str(tmp_path))


def test_embeddings_are_on_the_disk_before_the_index_names_them(tmp_path: Path, calls: Calls) -> None:
    matrix.append(tmp_path / "model", 0, [1], np.ones((1, 4), np.float16))
    assert {Path(file).name for what, file in calls if what == "flush"} >= {
        "int8",
        "scales",
        "float16",
        "numbers",
    }


def test_a_link_with_the_name_of_an_embeddings_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "diary").write_text("precious")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "int8").symlink_to(tmp_path / "diary")
    with pytest.raises(OSError, match="symbolic links"):
        matrix.append(tmp_path / "model", 0, [1], np.ones((1, 4), np.float16))
    assert (tmp_path / "diary").read_text() == "precious"
