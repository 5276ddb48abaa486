"""What the readers of all formats share."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from daemon.core.jobs import IMAGE_SUFFIXES
from daemon.core.labels import Box, Kind, Said, Value
from stages.ocr.layout import order_lines


class Exported(msgspec.Struct, frozen=True):
    """What an export says of an image with labels: their kinds, with where they were from."""

    digest: str = ""
    labels: dict[Kind, str] = {}


def say(
    name: str,
    kind: Kind,
    parts: list[Any],
    scale: tuple[float, float] | None = None,
    size: tuple[float, float] | None = None,
    digest: str = "",
    *,
    by_model: bool = False,
) -> Iterator[Said]:
    """parts: objects, tags or captions; for text, boxes and lines; for classes, each with its classifier before it. Without
    captions or classes nothing is said; otherwise, that there is nothing. Lines are put in reading order, as those of OCR are:
    people draw them in any."""
    value: Value = parts
    if kind is Kind.TEXT:
        value = "\n".join(_in_reading_order(parts, scale, size))
    elif kind is Kind.CLASSES:
        value = dict(parts)
    if value or kind not in (Kind.CAPTION, Kind.CLASSES):
        yield Said(name, kind, value, scale, size, digest, by_model=by_model)


def _in_reading_order(
    parts: list[tuple[Box | None, str]], scale: tuple[float, float] | None, size: tuple[float, float] | None
) -> list[str]:
    """The lines, if each has a box."""
    lines = [text for _, text in parts]
    boxes = [box for box, _ in parts if box]
    if len(boxes) < len(lines) or len(lines) < 2:
        return lines
    quads = [[(x0, y0), (x1, y0), (x1, y1), (x0, y1)] for x0, y0, x1, y1 in boxes]
    stretch = np.divide(size or (1.0, 1.0), scale) if scale else np.ones(2)
    return [lines[at] for at in order_lines(np.array(quads, np.float32) * stretch.astype(np.float32), lines)]


def bounds(points: Iterable[Sequence[float]]) -> Box:
    """Of no points: an empty box."""
    xs, ys = zip(*points, strict=True) if (points := list(points)) else ((0.0,), (0.0,))
    return min(xs), min(ys), max(xs), max(ys)


def has_image_suffix(path: str) -> bool:
    return os.fsencode(os.path.splitext(path)[1].lower()) in IMAGE_SUFFIXES
