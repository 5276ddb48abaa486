"""Which entries fit a filter, as one bit for each number: bit n is for entry n, the lowest bit of a byte first.

An entry is never changed, so a mask is read from the index once, and then only what was added since. That makes a search by
meaning with a filter that fits most images about as fast as one without."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from daemon.search.duplicates import number_grouped

if TYPE_CHECKING:
    from daemon.ledger.records import Reader
    from daemon.search.index import Index
    from daemon.search.query import Query

Bits = NDArray[np.uint8]
MOST_KEPT = 32  # masks; with ten million images each has 1.2 MiB


@dataclass
class _Mask:
    """place: the last entry that it knows of. history: of the index; after a backup was restored it is another one."""

    history: tuple[str, int, str] = ("", 0, "")
    place: int = 0
    bits: Bits = field(default_factory=lambda: np.zeros(1, np.uint8))


class Masks:
    """The masks that were asked for last. Any thread may use it."""

    def __init__(self, index: Index, reader: Reader) -> None:
        self._index, self._reader = index, reader
        self._kept: OrderedDict[str, _Mask] = OrderedDict()  # by expression of FTS5, the last used at the end
        self._lock = threading.Lock()

    def of(self, query: Query) -> Bits:
        """The entries that fit all of the query, which is not empty; of a group of near-duplicates those that `choose_grouped`
        may choose. Raises SearchUnusable."""
        wanted, excluded = query.parts()
        with self._lock:
            parts = [self._bits(part) for part in wanted]
            absent = [self._bits(part) for part in excluded]
        size = max(len(part) for part in (*parts, *absent))
        found = np.full(size, 255, np.uint8)
        for part in parts:
            found &= _resize(part, size)
        for part in absent:
            found &= ~_resize(part, size)
        if not query.has_few:
            return found
        numbers = number_grouped(self._reader, self._index, query.group)
        return found & make_bits(numbers[numbers < 8 * size], 8 * size - 1)

    def older(self, query: Query, before: int, count: int) -> list[int]:
        """Entries with a lower number, as of `of`, the newest first."""
        if not query.has_few:
            return self._index.newest(query, before, count)
        numbers = self._numbers(query)
        return numbers[: bisect_left(numbers, before)][: -count - 1 : -1]

    def newer(self, query: Query, after: int, count: int) -> list[int]:
        """The same with a higher number, the oldest first."""
        if not query.has_few:
            return self._index.oldest(query, after, count)
        numbers = self._numbers(query)
        return numbers[bisect_right(numbers, after) :][:count]

    def _numbers(self, query: Query) -> list[int]:
        found: list[int] = np.flatnonzero(np.unpackbits(self.of(query), bitorder="little")).tolist()
        return found

    def _bits(self, expression: str) -> Bits:
        mask = self._kept.pop(expression, None) or _Mask()
        self._kept[expression] = mask
        if len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        about, numbers = self._index.matching(expression, mask.place)
        history = (about.ledger, about.start, about.token)
        if mask.place and mask.history != history:
            self._kept[expression] = mask = _Mask()
            about, numbers = self._index.matching(expression, 0)
            history = (about.ledger, about.start, about.token)
        if about.place > mask.place:
            bits = _resize(mask.bits, about.place // 8 + 1).copy()
            bits |= make_bits(numbers, about.place)
            mask.bits, mask.place = bits, about.place
        mask.history = history
        return mask.bits


def make_bits(numbers: Iterable[int] | NDArray[np.int64], last: int) -> Bits:
    """last: the highest number that may be among them."""
    found = np.zeros(8 * (last // 8 + 1), np.bool_)
    found[numbers if isinstance(numbers, np.ndarray) else list(numbers)] = True
    return np.packbits(found, bitorder="little")


def _resize(bits: Bits, size: int) -> Bits:
    return bits if len(bits) == size else np.pad(bits[:size], (0, max(0, size - len(bits))))
