"""Finds a page's orientation, and puts its lines into reading order.

`turns` is the number of quarter turns, clockwise, of the page: 0 upright, 1 text runs down, 2 upside down, 3
text runs up. The detector finds lines in any direction, and the shape of its boxes shows whether a page is on
its side. Only reading shows which of the two remaining orientations it has: upside down, letters are guessed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stages.ocr.dbpost import NEXT, Quads, order_rows
from stages.ocr.warp import VERTICAL_RATIO

SURE = 0.9  # mean score of a page's characters from which the opposite orientation is not tried
NEUTRAL = 0.5  # a character's probability that is evidence neither for nor against an orientation

DIRECTIONS = ((1, 0), (0, 1), (-1, 0), (0, -1))  # of text, x and y, by number of turns

Scored = Sequence[tuple[str, float]]  # texts and their scores


def guess_turns(quads: Quads) -> int:
    """0 if most of the lines' length is horizontal, else 1."""
    sides = quads[:, [1, 3]] - quads[:, :1]  # the first corner of a slanted vertical box may be at its bottom
    lengths = np.linalg.norm(sides, axis=2)
    longer = np.arange(len(quads)), lengths.argmax(axis=1)
    width, height = np.abs(sides[longer]).T
    vertical = (height > width) & (lengths.max(axis=1) >= VERTICAL_RATIO * lengths.min(axis=1))
    length = lengths[longer]
    return int(length[vertical].sum() > length[~vertical].sum())


def turn_corners(quads: Quads, turns: int) -> Quads:
    """Boxes whose corners go clockwise from the image's top left, changed to begin at the text's top left."""
    if turns == 0:
        return quads
    sides = quads[:, NEXT] - quads
    along = (
        sides
        @ np.array(DIRECTIONS[turns], dtype=np.float32)
        / np.maximum(np.linalg.norm(sides, axis=2), 1e-6)
    )
    corners = (along.argmax(axis=1)[:, None] + np.arange(4)) % 4
    turned: Quads = quads[np.arange(len(quads))[:, None], corners]
    return turned


def order_lines(quads: Quads, turns: int) -> NDArray[np.int64]:
    """The indices of a page's boxes, in reading order."""
    x, y = turn_corners(quads, turns)[:, 0].T
    left, top = ((x, y), (y, -x), (-x, -y), (-y, x))[turns]
    return order_rows(np.stack([left, top], axis=1), np.zeros(len(quads), dtype=np.int64))


def is_sure(texts: Scored) -> bool:
    """Whether the mean score of the characters is at least SURE."""
    count = sum(len(text.strip()) for text, _ in texts)
    return sum(score * len(text.strip()) for text, score in texts) >= SURE * max(count, 1)


def score_reading(texts: Scored) -> float:
    """How likely it is that a page was read upright: its characters,
    weighted by their line's score above NEUTRAL."""
    return sum((score - NEUTRAL) * len(text.strip()) for text, score in texts if score > NEUTRAL)
