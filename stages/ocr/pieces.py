"""The sizes of an image on its way to the detector, and the pieces in which a long one is read. No torch.

rapidocr shrinks an image until its longer side is max_side, however narrow that makes it: of a screenshot of 1080×15,000
pixels 144×2,000 are left, and no letter of it. Such an image is read in pieces that overlap, each as an image of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import cv2
import numpy as np

from stages.ocr.dbpost import Quads, order_corners, order_rows
from stages.ocr.descriptor import OcrOptions

STRIDE = 32  # of the detector; the sides of its maps are multiples of it
MAX_RATIO, MIN_HEIGHT = 8, 30  # a page is padded above this width / height, or up to this height
LONGEST_MAP = 8 * 736  # pixels: by rapidocr's rule, for a page of the greatest ratio without padding
NARROW = 0.6  # of map_side, the shorter side of a shrunk page below which its image is read in pieces
OVERLAP = 8  # of a piece's length one part: the tallest line that is whole in one of two pieces
SMALLER = 4  # times, the second scale
LARGE = 220  # pixels of a map, the height of a line from which it may be a part of one that is too large for the detector
WHOLE = 0.9  # of a line at the second scale, the share that one at the first scale covers if it is no part


@dataclass(frozen=True, slots=True)
class PiecePlan:
    """The sizes of an image or piece, by rapidocr's rules. Width before height, in pixels."""

    image: tuple[int, int]
    page: tuple[int, int]  # without the padding
    padding: int  # black rows above, and the same number below
    map: tuple[int, int]
    origin: tuple[int, int] = (0, 0)  # of a piece, in its image

    @classmethod
    def fit(cls, width: int, height: int, options: OcrOptions) -> PiecePlan:
        page = (width, height)
        if max(page) > options.max_side:
            page = scale(page, options.max_side / max(page))
        if min(page) < options.min_side:
            page = scale(page, min(options.min_side / min(page), options.max_side / max(page)))
        padding = 0
        if page[1] <= MIN_HEIGHT or page[0] / page[1] > MAX_RATIO:
            padding = abs(2 * max(page[0] // MAX_RATIO, MIN_HEIGHT) - page[1]) // 2
        padded = (page[0], page[1] + 2 * padding)
        ratio = max(options.map_side / min(padded), 1.0)
        return cls((width, height), page, padding, scale(padded, min(ratio, LONGEST_MAP / max(padded))))

    def to_image(self, quads: Quads) -> Quads:
        """Boxes of the padded page as boxes of the image, in rapidocr's float32 arithmetic."""
        image, page = (np.array(size, dtype=np.float64) for size in (self.image, self.page))
        moved = (quads - np.array([0, self.padding], dtype=np.float32)) * (image / page).astype(np.float32)
        return np.clip(moved, 0, image.astype(np.float32)) + np.array(self.origin, dtype=np.float32)


def scale(size: tuple[int, int], ratio: float) -> tuple[int, int]:
    """Both sides times a ratio, rounded down, then to the nearest multiple of the stride."""
    width, height = (max(round(int(side * ratio) / STRIDE), 1) * STRIDE for side in size)
    return width, height


def plan_pieces(width: int, height: int, options: OcrOptions) -> list[PiecePlan]:
    """An image whole; or, if it would become too narrow, in pieces of equal length along its longer side."""
    long, short = max(width, height), min(width, height)
    if long <= options.max_side or short * options.max_side >= NARROW * options.map_side * long:
        return [PiecePlan.fit(width, height, options)]
    length = max(options.max_side, short)
    overlap = length // OVERLAP
    count = -(-(long - overlap) // (length - overlap))
    starts = [i * (long - length) // (count - 1) for i in range(count)]
    piece = PiecePlan.fit(*((length, height) if width > height else (width, length)), options)
    return [replace(piece, origin=(start, 0) if width > height else (0, start)) for start in starts]


def shrink(pieces: Sequence[PiecePlan], options: OcrOptions) -> float | None:
    """The scale at which an image is read, if max_side makes it smaller."""
    longer = max(pieces[0].image)
    return round(options.max_side / longer, 4) if longer > options.max_side else None


def join_pieces(pieces: Sequence[PiecePlan], found: Iterable[Quads]) -> Quads:
    """The boxes of all pieces in pixels of the image, each line once, in rapidocr's order. A line that goes on from one
    piece into the next one becomes one box."""
    axis = 0 if pieces[0].origin[0] != pieces[-1].origin[0] else 1
    joined: list[Quads] = []
    end = 0
    for piece, quads in zip(pieces, found, strict=True):
        start = piece.origin[axis]
        before = [box for box in joined if box[:, axis].max() >= start] if joined else []
        joined = [box for box in joined if box[:, axis].max() < start]
        after = list(piece.to_image(quads))
        joined += join_boxes(before, after, axis, start, end)
        end = start + piece.image[axis]
    boxes = np.array(joined, dtype=np.float32).reshape(-1, 4, 2)
    return boxes[order_rows(boxes[:, 0], np.zeros(len(boxes), dtype=np.int64))]


def join_boxes(before: list[Quads], after: list[Quads], axis: int, start: int, end: int) -> list[Quads]:
    """The boxes of one piece that reach into the next one, and those of the next one, without doubles. start, end: of
    what both pieces show, along the axis."""
    for first in before:
        same = [i for i, second in enumerate(after) if is_same(first, second, axis)]
        # Only a piece of a line is at the edge of one piece, and not at all in the other one.
        if not same and first[:, axis].min() >= start and first[:, axis].max() >= end - 2:
            continue
        for i in reversed(same):
            first = unite(first, after.pop(i))
        after.append(first)
    return after


def is_same(first: Quads, second: Quads, axis: int) -> bool:
    """Whether two boxes are of one line: one beside the other along the axis, and they share some of it."""
    low, high = (np.stack([box.min(axis=0), box.max(axis=0)]) for box in (first, second))
    shared = np.minimum(low[1], high[1]) - np.maximum(low[0], high[0])
    sizes = np.minimum(low[1] - low[0], high[1] - high[0])
    across = 1 - axis
    # Along the axis a line that is cut shares no more than what both pieces show; lines one below the other touch.
    enough = 0.0 if axis == 0 else 0.5 * sizes[axis]
    return bool(shared[across] >= 0.5 * sizes[across] and shared[axis] > enough)


def unite(first: Quads, second: Quads) -> Quads:
    """The larger of two boxes of one line; or if both have a part that the other lacks, a box around both."""
    low, high = (np.stack([box.min(axis=0), box.max(axis=0)]) for box in (first, second))
    larger, smaller = (
        (first, second) if np.ptp(low, axis=0).prod() >= np.ptp(high, axis=0).prod() else (second, first)
    )
    edges = np.stack([larger.min(axis=0), larger.max(axis=0)])
    margin = 0.25 * (edges[1] - edges[0]).min()
    if (smaller.min(axis=0) >= edges[0] - margin).all() and (smaller.max(axis=0) <= edges[1] + margin).all():
        return larger
    corners = cv2.boxPoints(cv2.minAreaRect(np.concatenate([first, second])))
    around: Quads = order_corners(np.round(corners[None]).astype(np.float32))[0]
    return around


def smaller_map(plan: PiecePlan) -> tuple[int, int]:
    """The second scale, for letters that are too large for the detector at the first one: those of 450 pixels and more."""
    width, height = plan.map
    return scale((width, height), 1 / SMALLER)


def has_large(quads: Quads, plan: PiecePlan) -> bool:
    """Whether a box is so large that the detector may have split it."""
    return bool(len(quads)) and float(heights_of(quads).max()) * plan.map[1] >= LARGE * (
        plan.page[1] + 2 * plan.padding
    )


def heights_of(quads: Quads) -> Quads:
    """The shorter side of each box."""
    heights: Quads = np.linalg.norm(quads[:, [1, 3]] - quads[:, :1], axis=2).min(axis=1)
    return heights


def replace_parts(first: Quads, texts: Sequence[bool], second: Quads) -> tuple[list[int], list[int]]:
    """The numbers of the lines at the first and at the second scale that stay. A line at the second scale replaces the
    lines inside it; but one of these stays instead if it covers nearly all of it, or if it is a small line of text."""
    gone, is_text = np.zeros(len(first), bool), np.array(texts, bool)
    added: list[int] = []
    own, middles = np.ptp(first, axis=1).prod(axis=1), (first.min(axis=1) + first.max(axis=1)) / 2
    heights, second_heights = heights_of(first), heights_of(second)
    for number, box in enumerate(second):
        low, high = box.min(axis=0), box.max(axis=0)
        edges = np.minimum(first.max(axis=1), high) - np.maximum(first.min(axis=1), low)
        shared = np.maximum(edges, 0).prod(axis=1)
        area = (high - low).prod()
        is_inside = ((middles >= low) & (middles <= high)).all(axis=1)
        is_inside |= shared >= 0.5 * np.maximum(own, area)
        read = np.flatnonzero(is_inside & is_text)
        if (heights[read] < 0.4 * second_heights[number]).any():
            continue
        whole = read[shared[read] >= WHOLE * area]
        is_inside[whole[:1]] = False
        gone |= is_inside
        if not len(whole):
            added.append(number)
    return np.flatnonzero(~gone).tolist(), added
