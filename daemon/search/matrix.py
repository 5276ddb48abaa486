"""The embeddings of one model as files that can be memory-mapped: one row for each publication.

    int8      [rows, dim]  each row times 127 / its largest value; read whole by each search
    scales    [rows]       float32: what a row of int8 is multiplied with
    float16   [rows, dim]  as in the ledger; read for the best rows only
    numbers   [rows]       int64, ascending: of the publications
    sharpness [rows]       float32: of the images; 0 if not known

How many rows are complete is in the index, which is committed after the files were flushed.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daemon.system.ownership import hand_over, make_folder

LIMIT = 127.0  # of int8
PARTS = {
    "int8": np.int8,
    "scales": np.float32,
    "float16": np.float16,
    "numbers": np.int64,
    "sharpness": np.float32,
}


class Rows(NamedTuple):
    """Memory-mapped. values, exact: [rows, dim]. file: the mapping of `exact`."""

    values: NDArray[np.int8]
    scales: NDArray[np.float32]
    exact: NDArray[np.float16]
    numbers: NDArray[np.int64]
    file: mmap.mmap

    def fetch(self, places: NDArray[np.int64]) -> None:
        """Ask the kernel to read these rows of `exact` from the disk, all at once, and do not wait for it. A row that is in
        memory costs a microsecond."""
        size = self.exact[0].nbytes
        for place in places.tolist():
            start = place * size & -mmap.PAGESIZE
            self.file.madvise(mmap.MADV_WILLNEED, start, (place + 1) * size - start)


def folder_of(root: Path, maker: str) -> Path:
    """maker: a fingerprint, which may have any characters."""
    return root / hashlib.blake2b(maker.encode(), digest_size=10).hexdigest()


def append(
    folder: Path,
    rows: int,
    numbers: Sequence[int],
    embeddings: NDArray[np.float16],
    sharpness: Sequence[float] = (),
) -> None:
    """Write rows behind the first `rows`, durably. embeddings: [n, dim]. sharpness: of each; without any,
    it is not known. Raises OSError."""
    make_folder(folder)
    values, scales = quantize(embeddings)
    new: dict[str, NDArray[Any]] = {
        "int8": values,
        "scales": scales,
        "float16": embeddings,
        "numbers": np.asarray(numbers, np.int64),
        "sharpness": np.asarray(sharpness or [0.0] * len(numbers), np.float32),
    }
    for name, part in new.items():
        content = np.ascontiguousarray(part)
        fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            hand_over(folder / name)
            written = os.pwrite(fd, content.data.cast("B"), rows * content[0].nbytes)
            if written != content.nbytes:
                raise OSError(f"{folder / name}: only {written} of {content.nbytes} bytes were written")
            os.fdatasync(fd)
        finally:
            os.close(fd)


def quantize(embeddings: NDArray[np.float16]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """int8 [n, dim] and what each row is multiplied with [n]."""
    exact = embeddings.astype(np.float32)
    scales = np.maximum(np.abs(exact).max(axis=1), np.float32(1e-12)) / np.float32(LIMIT)
    return np.rint(exact / scales[:, None]).astype(np.int8), scales


def open_rows(folder: Path, rows: int, dim: int) -> Rows:
    """The first rows. Raises OSError, and ValueError if a file is shorter."""

    def part(name: str, *shape: int) -> tuple[mmap.mmap, NDArray[Any]]:
        fd = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            length = math.prod(shape) * np.dtype(PARTS[name]).itemsize
            # Copy on write: torch warns of arrays that cannot be written.
            mapped = mmap.mmap(fd, length, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)
        return mapped, np.frombuffer(mapped, PARTS[name]).reshape(shape)

    file, exact = part("float16", rows, dim)
    # Otherwise the kernel reads 128 KiB around each row that is needed.
    file.madvise(mmap.MADV_RANDOM)
    values, scales, numbers = (
        part(name, *shape)[1]
        for name, shape in (("int8", (rows, dim)), ("scales", (rows,)), ("numbers", (rows,)))
    )
    return Rows(values, scales, exact, numbers, file)
