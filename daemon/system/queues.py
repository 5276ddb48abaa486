"""Queues."""

from __future__ import annotations

import asyncio
import sys
from typing import TypeVar

T = TypeVar("T")


def drain(queue: asyncio.Queue[T], most: int = sys.maxsize) -> list[T]:
    """The items that are in the queue now, at most this many, without waiting."""
    return [queue.get_nowait() for _ in range(min(most, queue.qsize()))]
