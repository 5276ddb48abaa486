"""The files of embeddings."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from daemon.search import matrix
from tests.daemon_process import wait_for

ROWS, DIM = 20_000, 512
PAGE = 4096


def read_bytes() -> int:
    """How many bytes this process has read from disks so far."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["read_bytes"])


@pytest.fixture
def cold(tmp_path: Path) -> Callable[[], matrix.Rows]:
    """Opens a matrix whose exact rows are not in memory."""
    vectors = np.random.default_rng(1).standard_normal((ROWS, DIM)).astype(np.float16)
    matrix.append(tmp_path, 0, range(1, ROWS + 1), vectors)

    def open_cold() -> matrix.Rows:
        fd = os.open(tmp_path / "float16", os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        return matrix.open_rows(tmp_path, ROWS, DIM)

    before = read_bytes()
    assert open_cold().exact[-1].tolist() == vectors[-1].tolist()
    if read_bytes() == before:
        pytest.skip("this file system has no disk, or keeps everything in memory")
    return open_cold


def test_only_the_exact_rows_that_are_needed_are_read(cold: Callable[[], matrix.Rows]) -> None:
    rows, before = cold(), read_bytes()
    places = np.arange(0, ROWS, 200)
    assert rows.exact[places].shape == (len(places), DIM)
    assert len(places) * PAGE <= read_bytes() - before <= 2 * len(places) * PAGE


def test_rows_that_will_be_needed_are_read_before_anyone_waits(cold: Callable[[], matrix.Rows]) -> None:
    rows, before = cold(), read_bytes()
    places = np.arange(0, ROWS, 200)
    rows.fetch(places)
    wait_for(lambda: read_bytes() - before >= len(places) * PAGE, "all rows at once")


def test_a_file_that_is_too_short_is_refused(tmp_path: Path) -> None:
    matrix.append(tmp_path, 0, [1], np.ones((1, DIM), np.float16))
    with pytest.raises(ValueError, match="length"):
        matrix.open_rows(tmp_path, 2, DIM)
