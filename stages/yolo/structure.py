"""Recognizes YOLOv8 by its structure, as a yolo.json has it: visiond has this network itself (stages/yolo/yolov8.py),
and all other networks come from ultralytics (stages/yolo/library.py). Imports no torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Rows as in a YAML of ultralytics: sources (-1 is the layer before), repeats, kind, arguments (channels first).
Row = list[Any]
# Of a structure, as ultralytics' trainer writes it today and as it did in its version 8.0.
KEYS = {"backbone", "head", "nc", "scales", "scale", "depth_multiple", "width_multiple"}
# What else it writes, with the only values that YOLOv8 for detection has.
CONSTANTS = {"ch": 3, "channels": 3, "task": "detect"}
LIMITS = (1024, 768, 512)  # of the channels, in the published sizes
UPSAMPLE: Row = [-1, 1, "nn.Upsample", ["None", 2, "nearest"]]


@dataclass(frozen=True, slots=True)
class Size:
    """depth: factor of the repeats. width: factor of the channels. max_channels: limit of the channels before that factor."""

    depth: float
    width: float
    max_channels: int = 1024


# As published (https://docs.ultralytics.com/models/yolov8).
SIZES = {
    "n": Size(0.33, 0.25),
    "s": Size(0.33, 0.5),
    "m": Size(0.67, 0.75, 768),
    "l": Size(1.0, 1.0, 512),
    "x": Size(1.0, 1.25, 512),
}
NAMED = {"yolov8.yaml": SIZES["n"], **{f"yolov8{letter}.yaml": size for letter, size in SIZES.items()}}


def list_backbone(deepest: int = 1024) -> list[Row]:
    """deepest: channels of the last layers."""
    rows: list[Row] = [[-1, 1, "Conv", [64, 3, 2]]]
    for channels, repeats in ((128, 3), (256, 6), (512, 6), (deepest, 3)):
        rows += [[-1, 1, "Conv", [channels, 3, 2]], [-1, repeats, "C2f", [channels, True]]]
    return [*rows, [-1, 1, "SPPF", [deepest, 5]]]


def list_head(deepest: int = 1024) -> list[Row]:
    rows: list[Row] = []
    for beside, channels in ((6, 512), (4, 256)):
        rows += [UPSAMPLE, [[-1, beside], 1, "Concat", [1]], [-1, 3, "C2f", [channels]]]
    for beside, channels, made in ((12, 256, 512), (9, 512, deepest)):
        rows += [[-1, 1, "Conv", [channels, 3, 2]], [[-1, beside], 1, "Concat", [1]], [-1, 3, "C2f", [made]]]
    return [*rows, [[15, 18, 21], 1, "Detect", ["nc"]]]


def describe(size: Size, classes: int) -> dict[str, Any]:
    """YOLOv8 of a size, for a yolo.json."""
    return {
        "nc": classes,
        "scales": {"n": [size.depth, size.width, size.max_channels]},
        "backbone": list_backbone(),
        "head": list_head(),
        "scale": "n",
    }


def find_size(model: object) -> Size | None:
    """The size of a YOLOv8 network; None for any other network.

    model: of a yolo.json, the name or the content of one of ultralytics' YAMLs.
    """
    if isinstance(model, str):
        return NAMED.get(model)
    if not isinstance(model, Mapping) or not has_known_keys(model):
        return None
    rows = [UPSAMPLE if row == [*UPSAMPLE[:3], [None, 2, "nearest"]] else row for row in list_rows(model)]
    limits = [limit for limit in LIMITS if rows == [*list_backbone(limit), *list_head(limit)]]
    match limits, find_factors(model):
        case [1024], [float() | int() as depth, float() | int() as width, int() as limit]:
            return Size(depth, width, limit)
        case [limit], [float() | int() as depth, float() | int() as width]:
            return Size(depth, width, limit)
    return None


def has_known_keys(model: Mapping[str, Any]) -> bool:
    are_known = model.keys() <= KEYS | CONSTANTS.keys()
    return are_known and all(model.get(key, value) == value for key, value in CONSTANTS.items())


def find_factors(model: Mapping[str, Any]) -> object:
    """Depth and width; and the limit of the channels, which the rows of version 8.0 have already."""
    if "scales" not in model:
        return [model.get("depth_multiple"), model.get("width_multiple")]
    scales, scale = model["scales"], model.get("scale")
    if not isinstance(scales, Mapping) or not scales:
        return None
    return scales.get(str(scale)) if scale else next(iter(scales.values()))  # as ultralytics


def list_rows(model: object) -> list[Row]:
    """Empty if a model has no rows."""
    rows = [model.get(part) for part in ("backbone", "head")] if isinstance(model, Mapping) else []
    return [row for part in rows if isinstance(part, list) for row in part]


def list_layers(model: object) -> list[str]:
    """The kinds of layers that YOLOv8 does not have."""
    ours = {row[2] for row in (*list_backbone(), *list_head())}
    kinds = {str(row[2]) for row in list_rows(model) if isinstance(row, list) and len(row) > 2}
    return sorted(kinds - ours)


def needs_library(model: object) -> bool:
    """Whether only ultralytics can build the network."""
    return find_size(model) is None


def has_library() -> bool:
    spec = importlib.util.find_spec("ultralytics")
    return spec is not None and spec.origin is not None  # not only a folder that pip left behind
