"""The images nearest to a vector, exactly: every row of a matrix of int8 is compared, and the best again in float16.
If only few rows may be found, these are compared in float16 at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ROWS_AT_ONCE = 1 << 18  # of which the scores are in memory
EXACT_AT_ONCE = 1 << 15  # of which the rows are in memory, in float32
FEW = 16  # times CANDIDATES: so many rows take as long in float16 as a million in int8
CANDIDATES = 1000  # the least number of rows that are compared exactly
ROUNDING = 2.0**-8  # of bfloat16, relative
VECTOR = 32  # values of a row that torch's product of int8 takes at once, on any processor
SIGMAS = 6.0  # of the error of a score that comes from rounding to int8

Fetch = Callable[[NDArray[np.int64]], None]


class Nearest(NamedTuple):
    """Places of rows, the nearest first, and their cosines."""

    places: NDArray[np.int64]
    scores: NDArray[np.float32]


def find_nearest(
    query: Tensor,
    values: NDArray[np.int8],
    scales: NDArray[np.float32],
    exact: NDArray[np.float16],
    count: int,
    allowed: NDArray[np.bool_] | None = None,
    fetch: Fetch = lambda places: None,
) -> Nearest:
    """query: of unit length, float32 [dim]. values times scales, and exact: the same unit vectors, [rows, dim].
    allowed: whether each row counts [rows]; without it, all do. fetch: called with the places of rows before these are read
    from `exact`, so that the disk can read them all at once. Raises ValueError if the dims differ."""
    if query.shape != values.shape[1:]:
        raise ValueError(f"the text has {len(query)} values, the images have {values.shape[1]}")
    most = len(values) if allowed is None else int(np.count_nonzero(allowed))
    if allowed is not None and most <= FEW * CANDIDATES:
        return _compare(query, exact, np.flatnonzero(allowed), count, fetch)
    rough = estimate(query, values, scales)
    if allowed is not None:
        rough[~torch.from_numpy(allowed)] = -torch.inf
    wanted = min(max(CANDIDATES, 4 * count), most)
    while True:
        top = rough.topk(wanted)
        best = _compare(query, exact, np.sort(top.indices.numpy()), count, fetch)
        if wanted == most or not count:
            return best
        # No row that was left out can be better than the last of the best, as far as rounding goes.
        error = SIGMAS * float(np.max(scales)) / 12**0.5 + ROUNDING * abs(float(top.values[-1]))
        if float(top.values[-1]) + error < float(best.scores[-1]):
            return best
        wanted = min(4 * wanted, most)


def _compare(
    query: Tensor, exact: NDArray[np.float16], places: NDArray[np.int64], count: int, fetch: Fetch
) -> Nearest:
    """The nearest of these rows, in full precision."""
    best = Nearest(places[:0], np.empty(0, np.float32))
    # equal images may make all rows come here, so only the best are kept
    for part in _parts(len(places), EXACT_AT_ONCE):
        fetch(places[part])
        scores = torch.from_numpy(exact[places[part]].astype(np.float32)) @ query
        found = np.concatenate([best.places, places[part]])
        scored = torch.cat([torch.from_numpy(best.scores), scores])
        top = scored.topk(min(count, len(found)))
        best = Nearest(found[top.indices.numpy()], top.values.numpy())
    return best


def estimate(query: Tensor, values: NDArray[np.int8], scales: NDArray[np.float32]) -> Tensor:
    """The cosine with each row, about, [rows]."""
    cosines = torch.empty(len(values))
    for part in _parts(len(values), ROWS_AT_ONCE):
        cosines[part] = _multiply(query, torch.from_numpy(values[part]), torch.from_numpy(scales[part]))
    return cosines


def _parts(rows: int, most: int) -> Iterator[slice]:
    for start in range(0, rows, most):
        yield slice(start, min(start + most, rows))


def _multiply(query: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """torch's product with weights of int8 reads each value once, which is all the time that it takes. If a row has no
    whole number of vectors, it reads beyond the end, which kills the process or gives wrong scores (torch 2.15, x86)."""
    if values.shape[1] % VECTOR:
        return (values.float() @ query) * scales
    half = query.to(torch.bfloat16)[None]
    product: Tensor = torch._weight_int8pack_mm(half, values, scales.to(torch.bfloat16))
    return product[0].float()
