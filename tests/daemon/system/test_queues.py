"""Queues."""

from __future__ import annotations

import asyncio

import pytest

from daemon.system.queues import drain


@pytest.mark.anyio
async def test_it_takes_what_is_there_and_no_more_than_asked_for() -> None:
    queue: asyncio.Queue[int] = asyncio.Queue()
    for number in range(5):
        queue.put_nowait(number)
    assert drain(queue, 2) == [0, 1]
    assert drain(queue) == [2, 3, 4]
    assert drain(queue) == []
