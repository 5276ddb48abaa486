"""Reads labels of COCO (https://cocodataset.org/#format-data)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from daemon.core.labels import Box, Kind, LeftOut, ObjectLabel, Said
from daemon.labels.saying import Exported, bounds, say

Id = str | int | float | None
SHAPE = msgspec.json.Decoder(list[list[float]], strict=False)


class _Image(msgspec.Struct):
    id: Id
    file_name: str
    width: float | None = None
    height: float | None = None
    location: str | None = None  # of an export of visiond
    visiond: Exported = Exported()


class _Category(msgspec.Struct):
    id: Id
    name: str | int


class _Annotation(msgspec.Struct):
    image_id: Id
    category_id: Id = None
    bbox: list[float] | None = None
    segmentation: msgspec.Raw = msgspec.Raw(b"null")
    iscrowd: bool | int | None = None
    caption: str | None = None
    utf8_string: str | None = None
    score: Any = None


class Coco(msgspec.Struct):
    images: list[_Image]
    annotations: list[_Annotation]
    categories: list[_Category] = []


def read_coco(coco: Coco, left_out: LeftOut) -> Iterator[Said]:
    """Objects, captions, and lines of text (`utf8_string`), whatever the file has. Of an image without any, a file of objects
    says that it has none. An image with an annotation that cannot be taken gets no label of that kind. If none
    of a kind can be taken, the other images get none either."""
    known, found = {_key(image.id) for image in coco.images}, _by_kind(coco, left_out)
    by_model = _find_scored(coco)
    for kind, parts in found.items():
        for _ in parts.keys() - known:
            left_out("images with annotations that the file does not list")
        for image in coco.images:
            size = (image.width, image.height) if image.width and image.height else None
            if (value := parts.get(_key(image.id), [])) is not None:
                name, digest = image.location or image.file_name, image.visiond.digest
                yield from say(name, kind, value, size, size, digest, by_model=_key(image.id) in by_model)


def _find_scored(coco: Coco) -> set[str]:
    """Images with a score that a model gave: of labels of people, some programs write 1."""
    scored = (each for each in coco.annotations if isinstance(each.score, int | float) and each.score != 1)
    return {_key(each.image_id) for each in scored}


def _key(id: Id) -> str:
    """Programs write 1, 1.0 and "1" for one image."""
    return str(int(id)) if isinstance(id, float) and id.is_integer() else str(id)


def _by_kind(coco: Coco, left_out: LeftOut) -> Mapping[Kind, Mapping[str, list[Any] | None]]:
    """By the image. None: it has something that cannot be taken."""
    names = {_key(category.id): str(category.name) for category in coco.categories}
    said: dict[Kind, dict[str, list[Any] | None]] = defaultdict(dict, {kind: {} for kind in _kinds_of(coco)})
    for each in coco.annotations:
        kind, part = _read(each, names)
        parts = said[kind]
        image = _key(each.image_id)
        if part is None and parts.get(image, []) is not None:
            left_out("images with annotations that have no box, or a category without a name")
            parts[image] = None
        elif (found := parts.setdefault(image, [])) is not None:
            found.append(part)
    # If none can be taken, as `categories` is missing, the file does not say of other images that they have nothing.
    return {kind: parts for kind, parts in said.items() if any(parts.values()) or not parts}


def _kinds_of(coco: Coco) -> Iterator[Kind]:
    """Those of which it says something even if all images have nothing."""
    if coco.categories and not coco.annotations:
        yield Kind.OBJECTS
    for image in coco.images:
        yield from image.visiond.labels


def _read(each: _Annotation, names: Mapping[str, str]) -> tuple[Kind, Any]:
    """None: it cannot be taken."""
    box = _box_of(each)
    if each.caption is not None:
        return Kind.CAPTION, each.caption
    if each.utf8_string is not None:
        return Kind.TEXT, (box, each.utf8_string)
    name = names.get(_key(each.category_id))
    return Kind.OBJECTS, ObjectLabel(name, box, bool(each.iscrowd)) if name is not None and box else None


def _box_of(each: _Annotation) -> Box | None:
    """Its box, or that around its outlines."""
    if each.bbox and len(each.bbox) == 4:
        x, y, width, height = each.bbox
        return x, y, x + width, y + height
    try:
        numbers = [number for outline in SHAPE.decode(each.segmentation) for number in outline]
    except msgspec.MsgspecError:  # a mask, or null
        return None
    return bounds(zip(numbers[::2], numbers[1::2], strict=False)) if numbers else None
