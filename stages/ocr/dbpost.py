"""From a map of text probabilities to quadrilaterals: the post-processing of differentiable binarization. No torch.

Reference: Liao et al., "Real-time Scene Text Detection with Differentiable Binarization", 2020, with rapidocr's constants:
the boxes are the same as rapidocr's, but for maps with more than 1,000 outlines, of which rapidocr leaves out some: here only
those count that may be text. This runs for every image under the interpreter lock. So each box takes only a few calls
of cv2, which releases the lock, and numpy does all arithmetic for all boxes of a batch at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

Map = NDArray[np.float32] | NDArray[np.uint8]  # [height, width]
Maps = Map  # [maps, height, width]
Mask = NDArray[np.uint8]  # [height, width], 0 or 1
Quads = NDArray[np.float32]  # [N, 4, 2]: x, y of the corners, clockwise from top left

SQUARE = np.ones((2, 2), dtype=np.uint8)
WINDOW = np.ones((3, 3), dtype=np.uint8)  # which holds a speck
RING = np.pad(1 - WINDOW, 1, constant_values=1)  # around it
MOST_CONTOURS = 1000
SHORTEST_SIDE = 3  # pixels, of a box in the map
SHORTEST_GROWN_SIDE = 5
SHORTEST_KEPT_SIDE = 4  # pixels, of a box in the page
ROW_GAP = 10  # pixels between the tops of two boxes from which the second begins a new row
NEXT, PREVIOUS = [1, 2, 3, 0], [3, 0, 1, 2]  # corners
# In an upright box: the corners with the same x, and those with the same y.
BESIDE, ABOVE = [3, 2, 1, 0], [1, 0, 3, 2]
ARC_TOLERANCE = 0.25  # pixels between the chords of a rounded corner and its arc


class TextMaps(NamedTuple):
    """The detector's answers, as `find_boxes` takes them."""

    probabilities: Maps
    masks: Iterable[Mask]


def mask_text(maps: Maps, threshold: float = 0.3) -> Iterator[Mask]:
    """1 where a line of text may be: rapidocr's mask without specks and holes that cannot become a box. The noise of a
    photograph has thousands, which would take most of the time.

    maps: as for `find_boxes`.
    """
    level = level_of(threshold, maps.itemsize)
    for probabilities in maps:
        yield drop_specks(cv2.dilate((probabilities > level).view(np.uint8), SQUARE))


def unpack_masks(words: NDArray[np.int32], width: int) -> Iterator[Mask]:
    """Masks of which 32 pixels of a row are a number, the first of them its lowest bit. words: [maps, height, numbers]."""
    for rows in words:
        yield np.unpackbits(rows.view(np.uint8), axis=1, count=width, bitorder="little")


def level_of(threshold: float, itemsize: int) -> float:
    """A threshold for probabilities as bytes, or as they are."""
    return math.floor(threshold * 255) if itemsize == 1 else threshold


def drop_specks(mask: Any) -> Any:
    """A mask without what is alone in a window of 3×3 pixels, which is too thin for text, and with holes that fit into a window
    of 2×2 or 3×3 filled, as find_outlines leaves out holes."""
    beside = cv2.dilate(mask, RING, borderType=cv2.BORDER_CONSTANT, borderValue=0)
    kept = cv2.bitwise_and(mask, cv2.erode(beside, WINDOW))
    for window in (SQUARE, WINDOW):
        size = len(window)
        # of each window of the map, at its first pixel
        is_enclosed = cv2.erode(
            mask, fence(size), anchor=(1, 1), borderType=cv2.BORDER_CONSTANT, borderValue=0
        )
        kept = cv2.bitwise_or(kept, cv2.dilate(is_enclosed, window, anchor=(size - 1, size - 1)))
    return kept


def fence(size: int) -> Mask:
    """The pixels beside a window of size×size, which enclose a hole in it. Those at its corners need not: no hole goes on
    diagonally."""
    beside = np.zeros((size + 2, size + 2), dtype=np.uint8)
    beside[1:-1, [0, -1]] = beside[[0, -1], 1:-1] = 1
    return beside


def find_boxes(
    maps: Maps,
    masks: Iterable[Mask],
    sizes: Sequence[tuple[int, int]],
    box_threshold: float = 0.5,
    unclip_ratio: float = 1.6,
) -> list[Quads]:
    """The boxes around each map's text lines in reading order, in whole pixels of the map's page.

    maps: [maps, map height, map width], float32 in 0..1 or uint8 in 0..255.
    masks: of these maps, by `mask_text`.
    sizes: width and height of each page.
    """
    outlines = [find_outlines(mask) for mask in masks]
    owner = np.repeat(np.arange(len(maps)), [len(found) for found in outlines])  # the map of each box
    cores, kept = enclose(itertools.chain.from_iterable(outlines), SHORTEST_SIDE)
    owner = owner[kept]
    sure = mean_inside(maps, owner, cores) >= box_threshold
    quads, kept = enclose(grow(cores[sure], unclip_ratio), SHORTEST_GROWN_SIDE)
    owner = owner[sure][kept]
    pages = np.array(sizes, dtype=np.float32)[owner, None]
    quads = np.clip(np.round(quads / np.array(maps.shape[:0:-1], dtype=np.float32) * pages), 0, pages)
    quads = np.minimum(order_corners(quads), pages - 1)
    thick = is_thick(quads)
    quads, owner = quads[thick], owner[thick]
    order = order_rows(quads[:, 0], owner)
    quads, owner = quads[order], owner[order]
    return np.split(quads, np.searchsorted(owner, np.arange(1, len(maps))))


def find_outlines(mask: Mask) -> list[Any]:
    """The outlines, int32 points, of each region that may be text; not those of holes in regions, which rapidocr looks
    at too. An outline has a point for each end of each row, so fewer than 8 points mean fewer than four rows, which is too
    thin; and so are fewer than four columns."""
    outlines = cv2.findContoursLinkRuns(mask)[0]  # takes half as long as findContours
    thick = [outline for outline in outlines if len(outline) >= 2 * (SHORTEST_SIDE + 1)]
    # A hole begins from right to left.
    regions = (outline for outline in thick if outline[0, 0, 0] <= outline[1, 0, 0])
    wide = (outline for outline in regions if cv2.boundingRect(outline)[2] > SHORTEST_SIDE)
    # They are turned, as minAreaRect rounds by the order of the points.
    return [
        np.concatenate([outline[:1], outline[:0:-1]]) for outline in itertools.islice(wide, MOST_CONTOURS)
    ]


def enclose(outlines: Iterable[Any], shortest_side: float) -> tuple[Quads, NDArray[np.bool_]]:
    """The rectangle of least area around each outline, without those that are too thin; and a mask of the outlines kept."""
    rectangles = [cv2.minAreaRect(outline) for outline in outlines]
    kept = np.array([min(size) >= shortest_side for _, size, _ in rectangles], dtype=bool)
    quads = [cv2.boxPoints(rectangle) for rectangle in itertools.compress(rectangles, kept)]
    return order_corners(np.array(quads, dtype=np.float32).reshape(-1, 4, 2)), kept


def order_corners(quads: Quads) -> Quads:
    """Corners clockwise from top left: of the two leftmost the upper, of the two rightmost the upper, and so on."""
    pairs = quads[np.arange(len(quads))[:, None], np.argsort(quads[:, :, 0], axis=1, kind="stable")].reshape(
        -1, 2, 2
    )
    pairs = pairs[np.arange(len(pairs))[:, None], np.argsort(pairs[:, :, 1], axis=1, kind="stable")]
    return pairs.reshape(-1, 4, 2)[:, [0, 2, 3, 1]]


def mean_inside(maps: Maps, owner: NDArray[np.int64], quads: Quads) -> NDArray[np.float64]:
    """The mean of its map, 0..1, inside each quadrilateral. Corners are rounded down to whole pixels."""
    last = np.array(maps.shape[:0:-1]) - 1
    first = np.clip(np.floor(quads.min(axis=1)), 0, last).astype(np.int32)
    end = np.clip(np.ceil(quads.max(axis=1)), 0, last).astype(np.int32) + 1
    outlines = (quads - first[:, None]).astype(np.int32, order="C")
    upright = (
        (outlines == np.stack([outlines[:, BESIDE, 0], outlines[:, ABOVE, 1]], axis=2))
        .all(axis=(1, 2))
        .tolist()
    )
    means = np.empty(len(quads))
    for i, ((left, top), (right, bottom)) in enumerate(zip(first.tolist(), end.tolist(), strict=True)):
        around = maps[owner[i], top:bottom, left:right]
        if upright[i]:  # then the inside is a slice, which takes a fifth of the time
            (x, y), (u, v) = outlines[i, 0].tolist(), outlines[i, 2].tolist()
            means[i] = cv2.mean(around[max(y, 0) : v + 1, max(x, 0) : u + 1])[0]
        else:
            inside = cv2.fillPoly(np.zeros(around.shape, dtype=np.uint8), [outlines[i]], 255)
            means[i] = mean_where(around, inside)
    return means / 255 if maps.dtype == np.uint8 else means


def mean_where(values: Any, inside: Mask) -> float:
    """cv2.mean of the values where `inside` is 255; for bytes in a quarter of its time."""
    if values.dtype != np.uint8:
        return float(cv2.mean(values, inside)[0])
    return float(cv2.sumElems(cv2.min(values, inside))[0] * (1 / max(cv2.countNonZero(inside), 1)))


def grow(quads: Quads, ratio: float) -> NDArray[np.int32]:
    """Rectangles moved outwards by ratio · area / perimeter, with rounded corners: [N, points, 2], some points repeated.

    This is the polygon offset with round joins of the Clipper library (Johnson, version 6.4) for convex
    outlines: corners are rounded down to whole pixels, each becomes an arc of chords between the normals of
    its two edges, and every point is rounded half away from zero.
    """
    if not len(quads):
        return np.empty((0, 0, 2), dtype=np.int32)
    exact = quads.astype(np.float64)
    edges = exact[:, NEXT] - exact
    distance = ratio * area(exact) / np.hypot(edges[..., 0], edges[..., 1]).sum(axis=1)
    chords = np.minimum(
        np.pi / np.arccos(1 - np.minimum(ARC_TOLERANCE, distance / 4) / distance), np.pi * distance
    )
    corners = np.trunc(exact)
    edges = corners[:, NEXT] - corners
    # Directions of the outward normals: the corners go clockwise.
    directions = np.arctan2(-edges[..., 0], edges[..., 1])
    before = directions[:, PREVIOUS]
    bend = (directions - before) % (2 * np.pi)
    steps = np.maximum(np.floor(chords[:, None] / (2 * np.pi) * bend + 0.5), 1)
    step = np.minimum(np.arange(steps.max() + 1), steps[..., None])
    angle = before[..., None] + step * (2 * np.pi / chords)[:, None, None]
    angle = np.where(step == steps[..., None], directions[..., None], angle)
    arms = np.stack([np.cos(angle), np.sin(angle)], axis=-1) * distance[:, None, None, None]
    points = corners[:, :, None] + arms
    rounded: NDArray[np.int32] = (points + np.copysign(0.5, points)).astype(np.int32, order="C")
    return rounded.reshape(len(quads), -1, 2)


def area(quads: NDArray[Any]) -> NDArray[Any]:
    """Areas by the shoelace formula, [N]."""
    after = quads[:, NEXT]
    doubled: NDArray[Any] = np.abs(
        (quads[..., 0] * after[..., 1] - after[..., 0] * quads[..., 1]).sum(axis=1)
    )
    return doubled / 2


def is_thick(quads: Quads) -> NDArray[np.bool_]:
    width = np.linalg.norm(quads[:, 0] - quads[:, 1], axis=1)
    height = np.linalg.norm(quads[:, 0] - quads[:, 3], axis=1)
    thick: NDArray[np.bool_] = np.minimum(width, height) >= SHORTEST_KEPT_SIDE
    return thick


def order_rows(corners: NDArray[Any], owner: NDArray[np.int64]) -> NDArray[np.int64]:
    """The order of boxes by their top left corners [N, 2]: by map, then from top to bottom,
    and from left to right among boxes whose tops are close together."""
    down = np.lexsort((corners[:, 1], owner))
    tops, left = corners[down, 1], corners[down, 0]
    begins = (np.diff(tops, prepend=0) >= ROW_GAP) | (np.diff(owner[down], prepend=0) > 0)
    order: NDArray[np.int64] = down[np.lexsort((left, np.cumsum(begins)))]
    return order
