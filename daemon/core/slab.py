"""The slab: the shared memory that holds the bytes of every image in flight.

Its size is the daemon's byte budget. A file is read only when there is room for it here, so the slowest GPU
limits how fast files are read. The slab is an anonymous memfd that the workers inherit: the kernel frees it
with the last process, even after kill -9.
"""

from __future__ import annotations

import bisect
import mmap
import os
from collections import deque

import anyio

from daemon.core.jobs import Extent

ALIGNMENT = 64  # bytes; a cache line


class Slab:
    """A first-fit allocator over one shared mapping. Single-threaded: only the event loop reserves and releases."""

    def __init__(self, size: int) -> None:
        self.size = _padded(size)  # a file of exactly this size fits
        self.used = 0
        self.fd = os.memfd_create("visiond-slab", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.size)
        self._map = mmap.mmap(self.fd, self.size)
        self.view = memoryview(self._map)
        self._free: list[Extent] = [Extent(0, self.size)]  # by offset, never adjacent
        self._waiting: deque[tuple[int, anyio.Event]] = deque()

    def try_reserve(self, length: int, *, is_next: bool = False) -> Extent | None:
        """Room for `length` bytes, if it is free now and nobody is waiting. is_next: who asks is the first who waits."""
        if self._waiting and not is_next:
            return None
        size = _padded(length)
        for index, gap in enumerate(self._free):
            if gap.length >= size:
                self._free[index : index + 1] = (
                    [Extent(gap.offset + size, gap.length - size)] if gap.length > size else []
                )
                self.used += size
                return Extent(gap.offset, length)
        return None

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for room."""
        return bool(self._waiting)

    async def reserve(self, length: int) -> Extent:
        """Wait, first come first served, until `length` bytes are free. No more than `size`."""
        extent = self.try_reserve(length)
        if extent is not None:
            return extent
        waiter = (length, anyio.Event())
        self._waiting.append(waiter)
        try:
            await waiter[1].wait()
            # This cannot fail: only the first in line is woken, and nobody overtakes it.
            extent = self.try_reserve(length, is_next=True)
            assert extent is not None
            return extent
        finally:
            self._waiting.remove(waiter)
            self._wake()

    def release(self, extent: Extent) -> None:
        """Free an extent and merge it with its free neighbors."""
        size = _padded(extent.length)
        self.used -= size
        index = bisect.bisect(self._free, extent)
        start, end = extent.offset, extent.offset + size
        if index < len(self._free) and self._free[index].offset == end:
            end += self._free.pop(index).length
        if index and sum(self._free[index - 1]) == start:
            index -= 1
            start = self._free.pop(index).offset
        self._free.insert(index, Extent(start, end - start))
        if self._waiting:
            self._wake()

    def window(self, extent: Extent) -> memoryview:
        return self.view[extent.offset : extent.offset + extent.length]

    def close(self) -> None:
        self.view.release()
        self._map.close()
        os.close(self.fd)

    def _wake(self) -> None:
        if self._waiting and any(gap.length >= _padded(self._waiting[0][0]) for gap in self._free):
            self._waiting[0][1].set()


def _padded(length: int) -> int:
    return max(ALIGNMENT, -(-length // ALIGNMENT) * ALIGNMENT)
