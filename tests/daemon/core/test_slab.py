from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from hypothesis import given
from hypothesis import strategies as st

from daemon.core.jobs import Extent
from daemon.core.slab import ALIGNMENT, Slab

pytestmark = pytest.mark.anyio

BLOCKS = 8


@pytest.fixture
def slab() -> Iterator[Slab]:
    opened = Slab(BLOCKS * ALIGNMENT)
    yield opened
    opened.close()


def take(slab: Slab, blocks: int) -> Extent:
    extent = slab.try_reserve(blocks * ALIGNMENT)
    assert extent is not None
    return extent


def test_a_file_gets_the_first_gap_that_is_large_enough(slab: Slab) -> None:
    small, _, large, _ = (take(slab, blocks) for blocks in (1, 1, 3, 1))
    slab.release(small)
    slab.release(large)
    assert take(slab, 2).offset == large.offset
    assert take(slab, 1).offset == small.offset
    assert slab.try_reserve(3 * ALIGNMENT) is None


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_free_neighbors_become_one_gap_in_whatever_order_they_are_released(
    slab: Slab, order: tuple[int, ...]
) -> None:
    extents = [take(slab, BLOCKS // 4) for _ in range(4)]
    for index in order:
        slab.release(extents[index])
    assert slab.used == 0
    assert take(slab, BLOCKS) == Extent(0, slab.size)


def test_extents_start_on_a_cache_line_and_keep_their_exact_length(slab: Slab) -> None:
    first, second = slab.try_reserve(1), slab.try_reserve(ALIGNMENT + 1)
    assert first == Extent(0, 1)
    assert second == Extent(ALIGNMENT, ALIGNMENT + 1)
    assert slab.used == 3 * ALIGNMENT
    assert len(slab.window(second)) == ALIGNMENT + 1


def test_an_empty_file_gets_its_own_extent(slab: Slab) -> None:
    empty, next_ = slab.try_reserve(0), slab.try_reserve(0)
    assert empty is not None
    assert next_ is not None
    assert empty.offset != next_.offset
    slab.release(empty)
    slab.release(next_)
    assert slab.used == 0


def test_only_what_can_ever_be_held_fits() -> None:
    slab = Slab(2 * ALIGNMENT + 5)
    assert slab.try_reserve(3 * ALIGNMENT + 1) is None
    assert slab.try_reserve(2 * ALIGNMENT + 5) is not None, (
        "as the message about a file that is too large says"
    )
    slab.close()


async def test_waiters_are_served_in_order(slab: Slab) -> None:
    everything = take(slab, BLOCKS)
    served: list[int] = []

    async def wait_for(blocks: int) -> None:
        await slab.reserve(blocks * ALIGNMENT)
        served.append(blocks)

    async with anyio.create_task_group() as tasks:
        for blocks in (3, 1, 2):
            tasks.start_soon(wait_for, blocks)
            await wait_all_tasks_blocked()
        slab.release(everything)
    assert served == [3, 1, 2]


async def test_a_small_file_does_not_overtake_a_large_one_that_waits(slab: Slab) -> None:
    most = take(slab, BLOCKS - 1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(slab.reserve, 4 * ALIGNMENT)
        await wait_all_tasks_blocked()
        assert slab.try_reserve(1) is None
        slab.release(most)
    assert slab.try_reserve(1) is not None


async def test_a_waiter_that_is_cancelled_does_not_delay_the_next(slab: Slab) -> None:
    most = take(slab, BLOCKS - 1)
    reserved: list[Extent] = []

    async def wait_for_one() -> None:
        reserved.append(await slab.reserve(ALIGNMENT))

    async with anyio.create_task_group() as tasks:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as others:
                others.start_soon(slab.reserve, slab.size)
                await wait_all_tasks_blocked()
                tasks.start_soon(wait_for_one)
                await wait_all_tasks_blocked()
                assert reserved == []
                scope.cancel()
    assert [extent.offset for extent in reserved] == [most.length]


async def test_a_waiter_that_is_cancelled_in_the_moment_it_is_woken_loses_no_room(slab: Slab) -> None:
    everything = take(slab, BLOCKS)
    reserved: list[Extent] = []

    async def wait_for_one() -> None:
        reserved.append(await slab.reserve(ALIGNMENT))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait_for_one)
        await wait_all_tasks_blocked()
        slab.release(everything)
        tasks.cancel_scope.cancel()
    assert slab.used == ALIGNMENT * len(reserved)  # whichever came first
    assert slab.try_reserve(slab.size - slab.used) is not None


@given(st.lists(st.one_of(st.integers(0, 700), st.floats(0, 0.999)), max_size=60))
def test_extents_never_overlap_and_all_is_one_gap_in_the_end(steps: list[int | float]) -> None:
    """An integer reserves this number of bytes, a float releases one of the reserved extents."""
    slab = Slab(2048)
    held: list[Extent] = []
    for number, step in enumerate(steps):
        if isinstance(step, int):
            if (extent := slab.try_reserve(step)) is not None:
                slab.window(extent)[:] = bytes([number]) * step
                held.append(extent)
        elif held:
            slab.release(held.pop(int(step * len(held))))
        ends = sorted((extent.offset, extent.offset + max(extent.length, 1)) for extent in held)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
        assert all(end <= slab.size for _, end in ends)
        assert all(len(set(slab.window(extent))) <= 1 for extent in held)
        assert slab.used == sum(max(ALIGNMENT, -(-extent.length // ALIGNMENT) * ALIGNMENT) for extent in held)
    for extent in held:
        slab.release(extent)
    assert slab.try_reserve(slab.size) == Extent(0, slab.size)
    slab.close()


def test_another_process_sees_the_bytes_through_the_descriptor(slab: Slab) -> None:
    extent = take(slab, 2)
    slab.window(extent)[:5] = b"bytes"
    program = (
        "import mmap, sys\n"
        "memory = mmap.mmap(int(sys.argv[1]), int(sys.argv[2]))\n"
        "at = int(sys.argv[3])\n"
        "assert memory[at:at + 5] == b'bytes'\n"
        "memory[at:at + 5] = b'BYTES'\n"
    )
    command = [sys.executable, "-c", program, str(slab.fd), str(slab.size), str(extent.offset)]
    subprocess.run(command, pass_fds=[slab.fd], check=True)
    assert bytes(slab.window(extent)[:5]) == b"BYTES"


def test_a_closed_slab_gives_its_memory_back() -> None:
    slab = Slab(ALIGNMENT)
    slab.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(slab.fd)
