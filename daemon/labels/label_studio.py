"""Reads annotations of Label Studio (https://labelstud.io/guide/export#JSON)."""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from daemon.core.errors import WrongArgument
from daemon.core.labels import Box, Kind, LeftOut, ObjectLabel, Said, bounds, say

UPLOADED = re.compile(r"^[0-9a-f]{8}-")  # before the name of an uploaded file
LOCAL_FILES = "/data/local-files/"


class _Value(msgspec.Struct):
    x: float | None = None
    y: float = 0.0
    width: float = 0.0
    height: float = 0.0
    rotation: float | None = None
    points: list[tuple[float, float]] = []
    rectanglelabels: list[str] = []
    polygonlabels: list[str] = []
    choices: list[str] = []
    text: list[str] | str = []


class _Result(msgspec.Struct):
    type: str = ""
    value: _Value = msgspec.field(default_factory=_Value)
    from_name: str = ""
    original_width: float | None = None
    original_height: float | None = None


class _Answer(msgspec.Struct):
    result: list[_Result] = []
    was_cancelled: bool = False
    ground_truth: bool = False


class _Meta(msgspec.Struct):
    path: str = ""


class _Metas(msgspec.Struct):
    visiond: _Meta | None = None


class Task(msgspec.Struct):
    data: dict[str, Any]
    annotations: list[_Answer] = []
    meta: _Metas | None = None


KINDS = {
    "rectanglelabels": Kind.OBJECTS,
    "polygonlabels": Kind.OBJECTS,
    "choices": Kind.TAGS,
    "textarea": Kind.CAPTION,
    "rectangle": Kind.TEXT,  # around a line of text
}


def read_label_studio(tasks: Sequence[Task], left_out: LeftOut) -> Iterator[Said]:
    """Of each task its last annotation that was not cancelled, or the one that is marked as ground truth. A kind of which some
    task has a label is labelled in all annotated tasks, but for captions: an image may have none of it."""
    annotated = []
    for task in tasks:
        whole = [each for each in task.annotations if not each.was_cancelled]
        if best := [each for each in whole if each.ground_truth] or whole:
            annotated.append((task, best[-1].result, _by_kind(best[-1].result, left_out)))
        else:
            left_out("tasks without an annotation")
    for kind in sorted({kind for _, _, found in annotated for kind in found}):
        for task, results, found in annotated:
            yield from say(_name_of(task), kind, found.get(kind, []), (100.0, 100.0), _size_of(results))


def _size_of(results: Sequence[_Result]) -> tuple[float, float] | None:
    sizes = ((each.original_width, each.original_height) for each in results)
    return next(((width, height) for width, height in sizes if width and height), None)


def _by_kind(results: Sequence[_Result], left_out: LeftOut) -> dict[Kind, list[Any]]:
    said: dict[Kind, list[Any]] = defaultdict(list)
    for result in results:
        value = result.value
        match KINDS.get(result.type):
            case Kind.OBJECTS:
                box = _box_of(result)
                said[Kind.OBJECTS] += [
                    ObjectLabel(each, box) for each in (*value.rectanglelabels, *value.polygonlabels)
                ]
            case Kind.TAGS:
                said[Kind.TAGS] += value.choices
            case Kind.CAPTION:  # that of a region is a line of text
                is_line = value.x is not None or value.points
                texts = [value.text] if isinstance(value.text, str) else value.text
                said[Kind.TEXT if is_line else Kind.CAPTION] += texts
            case Kind.TEXT:
                said[Kind.TEXT] += []
            case _:
                left_out(f"results of the type {result.type or 'relation'}")
    return said


def _box_of(result: _Result) -> Box:
    """Around a rectangle or an outline, in percent. A turned rectangle is turned around its upper left corner, in pixels."""
    value = result.value
    if value.points:
        return bounds(value.points)
    x, y, width, height = value.x or 0.0, value.y, value.width, value.height
    turn = math.radians(value.rotation or 0.0)
    ratio = (result.original_width or 1.0) / (result.original_height or 1.0)
    sine, cosine = math.sin(turn), math.cos(turn)
    corners = ((0.0, 0.0), (width, 0.0), (0.0, height), (width, height))
    turned = [(x + u * cosine - v * sine / ratio, y + u * sine * ratio + v * cosine) for u, v in corners]
    return bounds(turned)


def _name_of(task: Task) -> str:
    """Raises WrongArgument."""
    addresses = [value for value in task.data.values() if isinstance(value, str)]
    if not (address := task.data.get("image") or next(iter(addresses), "")):
        raise WrongArgument(f"a task has no image; its data is {task.data}.")
    if task.meta and task.meta.visiond and task.meta.visiond.path and not address.startswith(LOCAL_FILES):
        return task.meta.visiond.path
    parts = urlsplit(address)
    path = unquote(parts.path)
    if path.startswith(LOCAL_FILES):  # below its document root, which may be any folder
        return unquote(parts.query.removeprefix("d=")).lstrip("/")
    if "/upload/" in path:
        return UPLOADED.sub("", os.path.basename(path))
    return path.lstrip("/") if parts.scheme in ("http", "https") else address  # also one of an object store
