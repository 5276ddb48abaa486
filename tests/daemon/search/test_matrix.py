"""The files of embeddings."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from daemon.search import matrix
from tests.daemon_process import wait_for

ROWS, DIM = 20_000, 512
PLACES = np.arange(0, ROWS, 200)  # each in a page of its own


def count_resident(file: mmap.mmap) -> int:
    """How many pages of a mapped file are in memory, whoever has read them. What else this process reads does not
    count."""
    pages = (ctypes.c_ubyte * -(-len(file) // mmap.PAGESIZE))()
    start = ctypes.addressof(ctypes.c_char.from_buffer(file))
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(file)), pages) == 0
    return sum(page & 1 for page in pages)


@pytest.fixture
def cold(tmp_path: Path) -> matrix.Rows:
    """A matrix whose exact rows are not in memory."""
    vectors = np.random.default_rng(1).standard_normal((ROWS, DIM)).astype(np.float16)
    matrix.append(tmp_path, 0, range(1, ROWS + 1), vectors)
    fd = os.open(tmp_path / "float16", os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    rows = matrix.open_rows(tmp_path, ROWS, DIM)
    if count_resident(rows.file):
        pytest.skip("this file system has no disk, or keeps everything in memory")
    return rows


def test_only_the_exact_rows_that_are_needed_are_read(cold: matrix.Rows) -> None:
    assert cold.exact[PLACES].shape == (len(PLACES), DIM)
    assert len(PLACES) <= count_resident(cold.file) <= 2 * len(PLACES)


def test_rows_that_will_be_needed_are_read_before_anyone_waits(cold: matrix.Rows) -> None:
    cold.fetch(PLACES)
    wait_for(lambda: count_resident(cold.file) >= len(PLACES), "all rows at once")


def test_a_file_that_is_too_short_is_refused(tmp_path: Path) -> None:
    matrix.append(tmp_path, 0, [1], np.ones((1, DIM), np.float16))
    with pytest.raises(ValueError, match="length"):
        matrix.open_rows(tmp_path, 2, DIM)
