"""Finds which way round a page's text is, and gives its lines as seen from there.

A way is a number of quarter turns, clockwise, that the page was given: 0 upright, 1 text runs down, 2 upside down, 3 text runs
up. The detector finds lines in any direction, and the shape of its boxes shows whether a page lies on its side. Only
reading shows which of the two ways it lies: upside down, letters are guessed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stages.ocr.dbpost import NEXT, Quads, order_rows
from stages.ocr.warp import TALL

SURE = 0.9  # the mean of a page's scores, over its characters, from which on it is not read the other way round as well
COIN = 0.5  # a character's probability that speaks neither for nor against a way

RUNS = ((1, 0), (0, 1), (-1, 0), (0, -1))  # where text goes, x and y, by way

Scored = Sequence[tuple[str, float]]  # texts and their scores


def guess_way(quads: Quads) -> int:
    """0 or 1: whether most of the lines' length runs across or down."""
    sides = quads[:, [1, 3]] - quads[:, :1]  # the corners of a tall box that leans may begin at its foot
    lengths = np.linalg.norm(sides, axis=2)
    longer = np.arange(len(quads)), lengths.argmax(axis=1)
    across, down = np.abs(sides[longer]).T
    lies = (down > across) & (lengths.max(axis=1) >= TALL * lengths.min(axis=1))
    length = lengths[longer]
    return int(length[lies].sum() > length[~lies].sum())


def turn_corners(quads: Quads, way: int) -> Quads:
    """Boxes with corners clockwise from the image's top left, changed to start at the text's top left."""
    if way == 0:
        return quads
    sides = quads[:, NEXT] - quads
    along = sides @ np.array(RUNS[way], dtype=np.float32) / np.maximum(np.linalg.norm(sides, axis=2), 1e-6)
    corners = (along.argmax(axis=1)[:, None] + np.arange(4)) % 4
    turned: Quads = quads[np.arange(len(quads))[:, None], corners]
    return turned


def order_lines(quads: Quads, way: int) -> NDArray[np.int64]:
    """The indices of a page's boxes, in reading order."""
    x, y = turn_corners(quads, way)[:, 0].T
    left, top = ((x, y), (y, -x), (-x, -y), (-y, x))[way]
    return order_rows(np.stack([left, top], axis=1), np.zeros(len(quads), dtype=np.int64))


def is_sure(texts: Scored) -> bool:
    count = sum(len(text.strip()) for text, _ in texts)
    return sum(score * len(text.strip()) for text, score in texts) >= SURE * max(count, 1)


def weigh(texts: Scored) -> float:
    """How likely a page was read the right way round: its characters, weighted by how far their line's score is over COIN."""
    return sum((score - COIN) * len(text.strip()) for text, score in texts if score > COIN)
