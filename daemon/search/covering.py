"""Groups of images that are nearly the same, exactly, by the cosines of their embeddings.

The images come in an order, the best first. Each one either is near an earlier image that leads a group, and belongs to the
first such group, or leads a group itself. So every member of a group is near its leader, no two leaders are near each
other, and the groups are the same in every run. Groups of all that is linked by pairs would not do: in a large collection
a chain of small steps links pictures that have nothing in common.

Most pairs are excluded by an upper bound of their cosine. The embeddings are turned, so that the first coordinates have
most of the length (principal components, not centered). Of each embedding the first coordinates are kept, and the length of
the rest as one more. The product of two such rows is never less than the cosine, as by Cauchy and Schwarz the rests cannot
add more than the product of their lengths. Pairs that pass are compared in full. Only leaders are compared with what
follows: a million copies of one image are a million comparisons, not half a million million.

A GPU compares all pairs in full, in float16, and again without rounding what may be near: there the products cost less
than finding out which of them are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK = 1024  # images that are compared with all that follow at once
STRIP = 1024  # images that they are compared with in one product, which stays in the cache of a core
STRIPS = 16  # that a thread takes at once
SAMPLE = 16_384  # images by which the coordinates are turned
PAIRED = 2048  # of these, all pairs show how many pairs would pass
WIDTHS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # coordinates that may be kept
COMPARISON = 200_000  # a comparison in full costs as much as the product of so many coordinates
MOST_BYTES = 768 << 20  # of the kept coordinates; with more images fewer are kept
READ = 4096  # embeddings in memory at once, for each thread
DENSE = 64  # entries of a product of matrices cost as much as one comparison of two rows from anywhere
STALE = 8  # rows are moved together when one of so many belongs to a group
GPU_PART = 1 << 19  # images that a block is compared with at once on a GPU: products and marks take 1.5 GiB
GPU_PAIRS = 1 << 17  # compared in float64 at once there

Note = Callable[[int], object]
Places = NDArray[np.int64]
Cosines = NDArray[np.float64]
_NONE = np.empty(0, np.int64)


class Cover(NamedTuple):
    """For each image, in their order: the place of the leader of its group, which may be itself, and the cosine of the
    two; 1 for a leader."""

    leaders: Places
    cosines: Cosines


class _Pairs(NamedTuple):
    """Places of two images, of which the left one is better, and their cosine."""

    left: Places
    right: Places
    cosines: Cosines

    def choose(self, some: NDArray[Any] | slice) -> _Pairs:
        return _Pairs(self.left[some], self.right[some], self.cosines[some])


def find_cover(
    exact: NDArray[np.float16],
    order: Places,
    near: float,
    threads: int = 1,
    note: Note = lambda done: None,
    device: str = "",
) -> Cover:
    """exact: embeddings of about unit length, [rows, dim]; may be memory-mapped. order: the rows of the images, the best
    first. near: the least cosine of a member and its leader, below 1. threads: each makes products of its own, so BLAS
    should use one. note: called with how many images have their group. device: of torch, such as "cuda", which then
    compares instead of the threads. A row with values that are not finite is near no other one. Raises RuntimeError if the
    device cannot be used."""
    with ThreadPoolExecutor(1 if device else threads) as pool:
        if device:
            return _CoveringByTorch(exact, order, near, pool, device).run(note)
        return _Covering(exact, order, near, pool).run(note)


class _Covering:
    part = STRIP * STRIPS  # images that a block is compared with by one thread at once

    def __init__(
        self, exact: NDArray[np.float16], order: Places, near: float, pool: ThreadPoolExecutor
    ) -> None:
        self._exact, self._order, self._near, self._pool = exact, order, near, pool
        # Twice the worst that rounding to float32 does to a product: dim steps, each of 2**-24.
        self._error = exact.shape[1] * 2.0**-23
        self._leaders = np.arange(len(order))
        self._cosines = np.ones(len(order))
        self._is_taken = np.zeros(len(order), np.bool_)  # by place: it is in the group of another image
        self._places = np.arange(len(order))  # of the rows of `_kept`
        self._stale = 0  # about how many rows of `_kept` belong to a group
        self._kept = self._keep()

    def _keep(self) -> Any:
        return reduce(self._exact, self._order, self._near - self._error)

    def run(self, note: Note) -> Cover:
        first = 0  # row of `_kept`: those before it have their groups
        while first < len(self._places):
            end = min(first + BLOCK, len(self._places))
            self._lead(slice(first, end))
            leading = np.flatnonzero(~self._is_taken[self._places[first:end]]) + first
            for pairs in self._pool.map(partial(self._compare, leading), self._parts(end)):
                self._take(pairs)
            note(len(self._order) - len(self._places) + end)
            first = self._move_together(end)
        return Cover(self._leaders, self._cosines)

    def _lead(self, block: slice) -> None:
        """Choose the leaders of a block."""
        rows = np.flatnonzero(~self._is_taken[self._places[block]]) + block.start
        pairs = self._compare(rows, block)
        pairs = pairs.choose(pairs.left < pairs.right)
        pairs = pairs.choose(np.argsort(pairs.left, kind="stable"))
        lefts, starts = np.unique(pairs.left, return_index=True)
        for left, (start, end) in zip(lefts, pairwise([*starts, len(pairs.left)]), strict=True):
            if not self._is_taken[left]:
                mine = pairs.choose(slice(start, end))
                self._take(mine.choose(~self._is_taken[mine.right]))

    def _take(self, pairs: _Pairs) -> None:
        """The images on the right belong to the groups of the first ones on the left."""
        pairs = pairs.choose(np.lexsort((pairs.left, pairs.right)))
        right, firsts = np.unique(pairs.right, return_index=True)
        self._leaders[right], self._cosines[right] = pairs.left[firsts], pairs.cosines[firsts]
        self._is_taken[right] = True
        self._stale += len(right)

    def _parts(self, start: int) -> Iterator[slice]:
        for begin in range(start, len(self._places), self.part):
            yield slice(begin, min(begin + self.part, len(self._places)))

    def _compare(self, leading: Places, part: slice) -> _Pairs:
        """All near pairs of these rows and the rows of a part, without images that are in a group already."""
        found, left, right = [], [_NONE], [_NONE]
        better, least = self._kept[leading], np.float32(self._near - self._error)
        for start in range(part.start, part.stop, STRIP):
            strip = slice(start, min(start + STRIP, part.stop))
            bounds = better @ self._kept[strip].T
            some = np.flatnonzero(bounds.max(axis=1, initial=0) >= least)
            passed = bounds[some] >= least
            if np.count_nonzero(passed) * DENSE > passed.size:
                found.append(self._multiply(self._places[leading[some]], self._places[strip]))
            else:
                row, column = np.nonzero(passed)
                left.append(leading[some[row]])
                right.append(column + start)
        pairs = self._places[np.concatenate(left)], self._places[np.concatenate(right)]
        found += [self._measure(pairs[0][rows], pairs[1][rows]) for rows in divide(len(pairs[0]))]
        whole = (
            _Pairs(*map(np.concatenate, zip(*found, strict=True)))
            if found
            else _Pairs(_NONE, _NONE, np.empty(0))
        )
        return whole.choose(~self._is_taken[whole.right])

    def _multiply(self, left: Places, right: Places) -> _Pairs:
        """The near pairs of all pairs of these images."""
        cosines = self._read(left, np.float32) @ self._read(right, np.float32).T
        row, column = np.nonzero(cosines >= self._near - self._error)
        return self._judge(left[row], right[column], cosines[row, column].astype(np.float64))

    def _measure(self, left: Places, right: Places) -> _Pairs:
        """The near pairs of these."""
        pairs = self._read(left, np.float32), self._read(right, np.float32)
        return self._judge(left, right, np.einsum("ij,ij->i", *pairs).astype(np.float64))

    def _judge(self, left: Places, right: Places, cosines: Cosines) -> _Pairs:
        """The pairs that are near. Where rounding could decide, the cosine is taken again, without any: the product of two
        values of float16 is a multiple of 2**-48, so no sum of products of unit vectors loses a bit of a float64."""
        for rows in divide(len(close := np.flatnonzero(np.abs(cosines - self._near) <= self._error))):
            pairs = self._read(left[close[rows]], np.float64), self._read(right[close[rows]], np.float64)
            cosines[close[rows]] = np.einsum("ij,ij->i", *pairs)
        return _Pairs(left, right, cosines).choose(cosines >= self._near)

    def _read(self, places: Places, dtype: type[Any]) -> NDArray[Any]:
        return _read(self._exact, self._order[places], dtype)

    def _move_together(self, first: int) -> int:
        """Drop rows that need not be looked at again, if there are many. Returns where the rows from `first` on are now."""
        if self._stale < (len(self._places) - first) // STALE and first < len(self._places) - first:
            return first
        rows = np.flatnonzero(~self._is_taken[self._places[first:]]) + first
        count, self._stale = len(rows), 0
        self._places = self._places[rows]
        for part in divide(count):
            self._kept[part] = self._kept[rows[part]]
        self._kept = self._kept[:count]
        return 0


class _CoveringByTorch(_Covering):
    part = GPU_PART

    def __init__(
        self, exact: NDArray[np.float16], order: Places, near: float, pool: ThreadPoolExecutor, device: str
    ) -> None:
        import torch

        self._torch, self._device = torch, device
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        super().__init__(exact, order, near, pool)
        # A product below 2, and what it is compared with, are each rounded to float16 by at most 2**-11.
        self._least = near - self._error - 2.0**-10

    def _keep(self) -> Any:
        # Embeddings are read from their file in the order in which they lie there.
        by_row = np.argsort(self._order)
        kept = self._torch.empty(
            (len(by_row), self._exact.shape[1]), dtype=self._torch.float16, device=self._device
        )
        for part in divide(len(by_row)):
            rows = _read(self._exact, self._order[by_row[part]], np.float16)
            kept[by_row[part]] = self._torch.from_numpy(rows).to(self._device)
        return kept

    def _compare(self, leading: Places, part: slice) -> _Pairs:
        better, other = self._kept[leading], self._kept[part]
        lefts, rights = self._torch.nonzero(better @ other.T >= self._least, as_tuple=True)
        found = [(_NONE, _NONE, np.empty(0))]
        for left, right in zip(
            *(self._torch.split(each, GPU_PAIRS) for each in (lefts, rights)), strict=True
        ):
            cosines = (better[left].double() * other[right].double()).sum(dim=1)  # exact, as in `_judge`
            near = cosines >= self._near
            found.append(tuple(each[near].cpu().numpy() for each in (left, right, cosines)))
        left, right, cosines = map(np.concatenate, zip(*found, strict=True))
        whole = _Pairs(self._places[leading[left]], self._places[right + part.start], cosines)
        return whole.choose(~self._is_taken[whole.right])


def reduce(exact: NDArray[np.float16], order: Places, least: float) -> NDArray[np.float32]:
    """Rows whose products are never less than the cosines of these embeddings, but for rounding to float32, [images, width].
    least: only pairs with greater products matter."""
    return shorten(exact, order, find_axes(exact, order, least))[:, 1:]


def find_axes(exact: NDArray[np.float16], order: Places, least: float) -> NDArray[np.float64]:
    """The coordinates that are kept, [dim, width]."""
    sample = _read(exact, order[:: -(-len(order) // SAMPLE) or 1])
    _, axes = np.linalg.eigh(sample.T @ sample)
    axes = np.ascontiguousarray(axes[:, ::-1])
    width = _choose_width(sample[:: -(-len(sample) // PAIRED) or 1], axes, least, len(order))
    return np.ascontiguousarray(axes[:, :width])


def shorten(exact: NDArray[np.float16], order: Places, axes: NDArray[np.float64]) -> NDArray[np.float32]:
    """Of each row: the length without the first half of these coordinates, the coordinates, and the length of the rest,
    [rows, width + 2]. So it has two bounds: the columns to that half, and all but the first."""
    kept = np.empty((len(order), axes.shape[1] + 2), np.float32)
    for part in divide(len(order)):
        kept[part] = _shorten(_read(exact, order[part]), axes)
    return kept


class Leaders(NamedTuple):
    """Those of a cover, in their order. rows: of their embeddings. kept: of `shorten` with these axes."""

    rows: Places
    kept: NDArray[np.float32]
    axes: NDArray[np.float64]


def extend_cover(exact: NDArray[np.float16], leaders: Leaders, new: Places, near: float) -> Cover:
    """What `find_cover` finds for rows that come behind all others in the order. new: these rows; some hundred are compared
    in hardly more time than one. Returns for each the place of its leader: among the leaders, or behind them that of a new row,
    which may be itself."""
    count, error = len(leaders.rows), exact.shape[1] * 2.0**-23
    fresh, short = _read(exact, new), shorten(exact, new, leaders.axes)
    first = np.ascontiguousarray(short[:, : leaders.axes.shape[1] // 2 + 1].T)
    least = np.float32(near - error)
    found, cosines = np.arange(count, count + len(new)), np.ones(len(new))
    for begin in range(0, count, STRIP * STRIPS):
        passed = []
        for start in range(begin, min(begin + STRIP * STRIPS, count), STRIP):
            bounds = leaders.kept[start : start + STRIP, : len(first)] @ first
            passed.append(np.flatnonzero(bounds >= least) + start * len(new))
        left, right = np.divmod(np.concatenate(passed), len(new))
        undecided = np.flatnonzero(found[right] >= count)
        # From the end, as the first leader of an image must be written last.
        for part in reversed([*divide(len(undecided))]):
            places, some = left[undecided[part]], right[undecided[part]]
            bounds = np.einsum("ij,ij->i", leaders.kept[places][:, 1:], short[some][:, 1:])
            places, some = places[bounds >= least], some[bounds >= least]
            exactly = np.einsum("ij,ij->i", _read(exact, leaders.rows[places]), fresh[some])
            near_ones = np.flatnonzero(exactly >= near)[::-1]
            found[some[near_ones]], cosines[some[near_ones]] = places[near_ones], exactly[near_ones]
    among = fresh @ fresh.T
    for at in np.flatnonzero(found >= count):
        better = np.flatnonzero((among[at, :at] >= near) & (found[:at] == np.arange(count, count + at)))
        if len(better):
            found[at], cosines[at] = count + better[0], among[at, better[0]]
    return Cover(found, cosines)


def _read(exact: NDArray[np.float16], rows: Places, dtype: type[Any] = np.float64) -> NDArray[Any]:
    """A row with values that are not finite becomes 0."""
    found = exact[rows].astype(dtype)
    found[~np.isfinite(found).all(axis=1)] = 0.0
    return found


def _shorten(embeddings: NDArray[np.float64], axes: NDArray[np.float64]) -> NDArray[np.float64]:
    kept = embeddings @ axes
    lengths = np.einsum("ij,ij->i", embeddings, embeddings)
    first, rest = (
        np.sqrt(np.maximum(lengths - np.einsum("ij,ij->i", some, some), 0.0))
        for some in (kept[:, : axes.shape[1] // 2], kept)
    )
    return np.column_stack([first, kept, rest])


def _choose_width(sample: NDArray[np.float64], axes: NDArray[np.float64], least: float, images: int) -> int:
    """How many coordinates are kept: with more, each product takes longer, and fewer pairs are compared in full."""
    dim = len(axes)
    most = max(WIDTHS[1], MOST_BYTES // (4 * max(1, images)) - 2)
    costs = {}
    for width in (*(each for each in WIDTHS if each < dim), dim):
        rows = _shorten(sample, axes[:, :width])[:, 1:].astype(np.float32)
        passing = (np.count_nonzero(rows @ rows.T >= least) - len(rows)) / max(1, len(rows) * (len(rows) - 1))
        costs[width] = width + COMPARISON * passing
    return min((width for width in costs if width <= most), key=costs.__getitem__, default=dim)


def divide(count: int) -> Iterator[slice]:
    for start in range(0, count, READ):
        yield slice(start, min(start + READ, count))
