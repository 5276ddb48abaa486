"""Recognizes YOLOv8 by its structure, as a yolo.json has it: visiond has this network itself (stages/yolo/yolov8.py),
and all other networks come from ultralytics (stages/yolo/library.py). Imports no torch.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Rows as in a YAML of ultralytics: sources (-1 is the layer before), repeats, kind, arguments (channels first).
Row = list[Any]
KEYS = {"backbone", "head", "nc", "scales", "scale", "ch"}
UPSAMPLE: Row = [-1, 1, "nn.Upsample", ["None", 2, "nearest"]]


@dataclass(frozen=True, slots=True)
class Size:
    """depth: factor of the repeats. width: factor of the channels, which are at most `most` before."""

    depth: float
    width: float
    most: int


# As published (https://docs.ultralytics.com/models/yolov8).
SIZES = {
    "n": Size(0.33, 0.25, 1024),
    "s": Size(0.33, 0.5, 1024),
    "m": Size(0.67, 0.75, 768),
    "l": Size(1.0, 1.0, 512),
    "x": Size(1.0, 1.25, 512),
}


def list_backbone() -> list[Row]:
    rows: list[Row] = [[-1, 1, "Conv", [64, 3, 2]]]
    for channels, repeats in ((128, 3), (256, 6), (512, 6), (1024, 3)):
        rows += [[-1, 1, "Conv", [channels, 3, 2]], [-1, repeats, "C2f", [channels, True]]]
    return [*rows, [-1, 1, "SPPF", [1024, 5]]]


def list_head() -> list[Row]:
    rows: list[Row] = []
    for beside, channels in ((6, 512), (4, 256)):
        rows += [UPSAMPLE, [[-1, beside], 1, "Concat", [1]], [-1, 3, "C2f", [channels]]]
    for beside, channels in ((12, 512), (9, 1024)):
        rows += [[-1, 1, "Conv", [channels // 2, 3, 2]], [[-1, beside], 1, "Concat", [1]]]
        rows.append([-1, 3, "C2f", [channels]])
    return [*rows, [[15, 18, 21], 1, "Detect", ["nc"]]]


def describe(size: Size, classes: int) -> dict[str, Any]:
    """YOLOv8 of a size, for a yolo.json."""
    return {
        "nc": classes,
        "scales": {"n": [size.depth, size.width, size.most]},
        "backbone": list_backbone(),
        "head": list_head(),
        "scale": "n",
    }


def find_size(model: object) -> Size | None:
    """The size of a YOLOv8 network; None for any other network.

    model: of a yolo.json, the name or the content of one of ultralytics' YAMLs.
    """
    if isinstance(model, str):
        named = re.fullmatch(r"yolov8([nsmlx]?)\.yaml", model)
        return SIZES[named[1] or "n"] if named else None
    if not isinstance(model, Mapping) or not model.keys() <= KEYS or model.get("ch", 3) != 3:
        return None
    rows = [UPSAMPLE if row == [*UPSAMPLE[:3], [None, 2, "nearest"]] else row for row in list_rows(model)]
    scales = model.get("scales") or {"n": None}
    match scales.get(model.get("scale") or next(iter(scales))), rows == [*list_backbone(), *list_head()]:
        case [float() | int() as depth, float() | int() as width, int() as most], True:
            return Size(depth, width, most)
    return None


def list_rows(model: object) -> list[Row]:
    """Empty if a model has no rows."""
    rows = [model.get(part) for part in ("backbone", "head")] if isinstance(model, Mapping) else []
    return [row for part in rows if isinstance(part, list) for row in part]


def list_layers(model: object) -> list[str]:
    """The kinds of layers that YOLOv8 does not have."""
    ours = {row[2] for row in (*list_backbone(), *list_head())}
    return sorted({str(row[2]) for row in list_rows(model)} - ours)


def needs_library(model: object) -> bool:
    """Whether only ultralytics can build the network."""
    return find_size(model) is None


def has_library() -> bool:
    return importlib.util.find_spec("ultralytics") is not None
