"""Reads labels of COCO (https://cocodataset.org/#format-data)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec

from daemon.core.labels import Kind, LeftOut, ObjectLabel, Said, bounds, say


class _Image(msgspec.Struct):
    id: int | str
    file_name: str
    width: float | None = None
    height: float | None = None
    location: str = ""  # of an export of visiond


class _Category(msgspec.Struct):
    id: int | str
    name: str


class _Annotation(msgspec.Struct):
    image_id: int | str
    category_id: int | str | None = None
    bbox: list[float] | None = None
    segmentation: Any = None
    iscrowd: int = 0
    caption: str | None = None
    utf8_string: str | None = None


class Coco(msgspec.Struct):
    images: list[_Image]
    annotations: list[_Annotation]
    categories: list[_Category] = []


def read_coco(coco: Coco, left_out: LeftOut) -> Iterator[Said]:
    """Objects of annotations with categories, captions, and text (`utf8_string`, as in COCO-Text), whatever the file has. Of an
    image without any, a file of objects says that it has none."""
    for kind, parts in _by_kind(coco, left_out).items():
        for image in coco.images:
            size = (image.width, image.height) if image.width and image.height else None
            yield from say(image.location or image.file_name, kind, parts.get(image.id, []), size, size)


def _by_kind(coco: Coco, left_out: LeftOut) -> dict[Kind, dict[int | str, list[Any]]]:
    """By the id of the image."""
    said: dict[Kind, dict[int | str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    names = {category.id: category.name for category in coco.categories}
    if names and not coco.annotations:
        said[Kind.OBJECTS] = {}
    for each in coco.annotations:
        if each.caption is not None:
            said[Kind.CAPTION][each.image_id].append(each.caption)
        elif each.utf8_string is not None:
            said[Kind.TEXT][each.image_id].append(each.utf8_string)
        elif (found := _coco_object(each, names, left_out)) is not None:
            said[Kind.OBJECTS][each.image_id].append(found)
    return said


def _coco_object(each: _Annotation, names: dict[int | str, str], left_out: LeftOut) -> ObjectLabel | None:
    if each.category_id not in names:
        left_out("annotations of a category that the file does not name")
        return None
    box = each.bbox
    if not box and isinstance(each.segmentation, list):
        numbers = [number for outline in each.segmentation for number in outline]
        x0, y0, x1, y1 = bounds(zip(numbers[::2], numbers[1::2], strict=False))
    elif box and len(box) == 4:
        x0, y0, x1, y1 = box[0], box[1], box[0] + box[2], box[1] + box[3]
    else:
        left_out("annotations without a box")
        return None
    return ObjectLabel(names[each.category_id], (x0, y0, x1, y1), bool(each.iscrowd))
