"""Reads annotations of Label Studio (https://labelstud.io/guide/export#JSON)."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from daemon.core.errors import WrongArgument
from daemon.core.labels import Box, Kind, LeftOut, ObjectLabel, Said
from daemon.labels.saying import Exported, bounds, has_image_suffix, say
from stages.registry.registry import kind_of

UPLOADS, LOCAL_FILES = "/data/upload/", "/data/local-files/"
UPLOADED = re.compile(r"^[0-9a-f]{8}-")  # before the name of an uploaded file
# Labels and texts of a rectangle or polygon are results of their own.
KNOWN = ("rectanglelabels", "polygonlabels", "labels", "choices", "class", "textarea", "rectangle", "polygon")


class _Value(msgspec.Struct):
    x: float | None = None
    y: float = 0.0
    width: float = 0.0
    height: float = 0.0
    rotation: float | None = None
    points: list[tuple[float, float]] | None = None
    rectanglelabels: list[str] = []
    polygonlabels: list[str] = []
    labels: list[str] = []
    choices: list[str] = []
    text: list[str] | str = []

    @property
    def texts(self) -> list[str]:
        return [self.text] if isinstance(self.text, str) else self.text


class _Result(msgspec.Struct):
    type: str = ""
    from_name: str = ""
    value: _Value = msgspec.field(default_factory=_Value)
    original_width: float | None = None
    original_height: float | None = None

    def __post_init__(self) -> None:
        """A control that is named after a classifier, as an export does it, has its classes."""
        if self.type == "choices" and kind_of(self.from_name) == "classifier":
            self.type = "class" if len(self.value.choices) == 1 else "several classes"


class _Answer(msgspec.Struct):
    result: list[_Result] | None = None
    was_cancelled: bool | None = None
    ground_truth: bool | None = None
    updated_at: str | float | None = None  # in UTC, all of a file in one form


class _Meta(msgspec.Struct, frozen=True):
    visiond: Exported = Exported()


class LabelTask(msgspec.Struct):
    data: dict[str, Any]
    meta: Any = None  # people may have something else there
    annotations: list[_Answer] | None = None
    completions: list[_Answer] | None = None  # as they were called before version 1.0

    @property
    def about(self) -> Exported:
        try:
            return msgspec.convert(self.meta, _Meta).visiond
        except msgspec.ValidationError:
            return Exported()


def read_label_studio(tasks: Sequence[LabelTask], left_out: LeftOut) -> Iterator[Said]:
    """Of each task the annotation that was changed last, of those that are marked as ground truth if some are. A kind of
    which some task has a label is labelled in all annotated tasks, but for captions and classes: an image may have none of it.
    An image with a shape that has no box here, such as one of a brush, gets no label of objects."""
    annotated = [(task, results) for task in tasks if (results := _results_of(task, left_out)) is not None]
    found = [(task, results, _by_kind(results, left_out)) for task, results in annotated]
    for kind in sorted({kind for task, _, parts in found for kind in (*parts, *task.about.labels)}):
        for task, results, parts in found:
            if (value := parts.get(kind, [])) is not None:
                yield from say(
                    _name_of(task), kind, value, (100.0, 100.0), _size_of(results), task.about.digest
                )


def _results_of(task: LabelTask, left_out: LeftOut) -> list[_Result] | None:
    """None: no person has annotated it."""
    whole = [each for each in task.annotations or task.completions or () if not each.was_cancelled]
    if best := [each for each in whole if each.ground_truth] or whole:
        return _find_latest(best, left_out).result or []
    left_out("tasks without an annotation by a person")
    return None


def _find_latest(answers: Sequence[_Answer], left_out: LeftOut) -> _Answer:
    for _ in answers[1:]:
        left_out("annotations of tasks that have several: the one that was changed last counts")
    return max(reversed(answers), key=lambda each: str(each.updated_at or ""))


def _size_of(results: Sequence[_Result]) -> tuple[float, float] | None:
    sizes = ((each.original_width, each.original_height) for each in results)
    return next(((width, height) for width, height in sizes if width and height), None)


def _by_kind(results: Sequence[_Result], left_out: LeftOut) -> dict[Kind, list[Any] | None]:
    """None: something of this kind cannot be taken."""
    said: dict[Kind, list[Any] | None] = {}
    for kind, parts in filter(None, map(_read, results)):
        said[kind] = [*(said.get(kind) or ()), *parts]
    for type in [each.type for each in results if each.type not in KNOWN]:
        left_out(f"results of the type {type or 'relation'}")
        if type.endswith("labels"):
            said[Kind.OBJECTS] = None
    return said


def _read(result: _Result) -> tuple[Kind, Sequence[Any]] | None:
    """What it says, if it is known here."""
    value = result.value
    match result.type, value.x is not None or bool(value.points):  # whether it is about a region
        case "rectanglelabels" | "polygonlabels" | "labels", True:
            named = (*value.rectanglelabels, *value.polygonlabels, *value.labels)
            return Kind.OBJECTS, [ObjectLabel(each, _box_of(result)) for each in named]
        case "class", False:
            return Kind.CLASSES, [(result.from_name, *value.choices)]
        case "choices", False:  # those of a region are about it
            return Kind.TAGS, value.choices
        case "textarea", True:  # a line of text
            return Kind.TEXT, [(_box_of(result), each) for each in value.texts]
        case "textarea", False:
            return Kind.CAPTION, value.texts
    return None


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


def _names_image(text: str) -> bool:
    return has_image_suffix(text.partition("?")[0]) or text.startswith(LOCAL_FILES)


def _name_of(task: LabelTask) -> str:
    """Raises WrongArgument."""
    texts = [value for value in (task.data.get("image"), *task.data.values()) if isinstance(value, str)]
    address = max(texts, key=_names_image, default="")  # the first one that does, else the first
    if not address:
        raise WrongArgument(f"a task names no image; its data is {task.data}.")
    parts = urlsplit(address)
    path = unquote(parts.path)
    if path.startswith(LOCAL_FILES):  # below its document root, which may be any folder
        return unquote(parts.query.removeprefix("d=")).lstrip("/") or unquote(path.removeprefix(LOCAL_FILES))
    if path.startswith(UPLOADS):
        return UPLOADED.sub("", os.path.basename(path))
    return path.lstrip("/") if parts.scheme in ("http", "https") else address  # also one of an object store
