"""Reads labels of YOLO (https://docs.ultralytics.com/datasets/detect)."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from daemon.core.errors import WrongArgument
from daemon.core.labels import Box, Kind, LeftOut, ObjectLabel, Said
from daemon.labels.saying import bounds, has_image_suffix
from daemon.labels.splits import find_held_out

CLASSES = "classes.txt"  # the names of the classes, by programs that write no data.yaml
OUTSIDE = 0.1  # by how much a share may lie outside its image


def read_yolo(described: Path, left_out: LeftOut) -> Iterator[Said]:
    """described: data.yaml; or classes.txt with a line for each class, as Label Studio and LabelImg write it. Labels are below
    a folder called labels, with the images below one called images; or each is beside its image. An empty file says
    that its image has no object; an image without a file is not labelled."""
    about = _describe(described)
    names, has_points = _class_names(described, about), "kpt_shape" in about
    root = described.parent.parent if described.parent.name == "labels" else described.parent
    files = sorted(
        os.path.relpath(os.path.join(at, name), root) for at, _, found in os.walk(root) for name in found
    )
    images = {os.path.splitext(file)[0]: file for file in filter(has_image_suffix, files)}
    texts = fnmatch.filter(files, "*.txt")
    image_of = {file: _image_of(file, images) for file in texts if os.path.basename(file) != CLASSES}
    held_out = find_held_out(about, root, filter(None, image_of.values()))
    for file, image in image_of.items():
        if not image:
            left_out("texts beside no image")
        elif not (read := _read_boxes(root / file, names, has_points=has_points)):
            left_out("images with lines that have neither a box nor an outline in shares of 0 to 1")
        else:
            boxes, by_model = read
            is_held_out = held_out.get(image)
            yield Said(image, Kind.OBJECTS, boxes, (1.0, 1.0), held_out=is_held_out, by_model=by_model)


def _image_of(file: str, images: Mapping[str, str]) -> str:
    """For one below labels/, the path below images/, without a suffix if the image is not here; for others the image beside
    it, or nothing. images: by their paths without suffix."""
    stem = os.path.splitext(file)[0]
    before, labels, behind = f"/{stem}".rpartition(
        "/labels/"
    )  # the last such folder, as ultralytics takes it
    if not labels:
        return images.get(stem, "")
    below_images = f"{before}/images/{behind}"[1:]
    return images.get(below_images, below_images)


def _describe(described: Path) -> Mapping[str, Any]:
    """What data.yaml says, or classes.txt as `names`. Raises WrongArgument."""
    import yaml

    text = described.read_text("utf-8-sig")
    if described.name == CLASSES:
        return {"names": [line.strip() for line in text.splitlines()]}
    try:
        return dict(yaml.load(text, yaml.BaseLoader))
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        raise WrongArgument(f"{described} is no data.yaml of YOLO: {error}.") from None


def _class_names(described: Path, about: Mapping[str, Any]) -> Mapping[int, str]:
    """By number. Raises WrongArgument."""
    try:
        names = about["names"]
        found = names if isinstance(names, dict) else dict(enumerate(names))
        return {int(number): str(name) for number, name in found.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise WrongArgument(f"{described} does not say what its classes are (`names`): {error}.") from None


def _read_boxes(
    file: Path, names: Mapping[int, str], *, has_points: bool
) -> tuple[list[ObjectLabel], bool] | None:
    """Of each line that is not empty, and whether one has a score; None if one has no box. Raises WrongArgument."""
    rows = [*filter(None, map(str.split, file.read_text("utf-8-sig").splitlines()))]
    boxes = [box for row in rows if (box := _read_box(row, names, file, has_points=has_points))]
    by_model = any(len(row) == 6 and float(row[5]) != 1 for row in rows)
    return (boxes, by_model) if len(boxes) == len(rows) else None


def _read_box(
    row: list[str], names: Mapping[int, str], file: Path, *, has_points: bool
) -> ObjectLabel | None:
    """Of class and box, which a score may follow, or of class and the corners of an outline. Raises WrongArgument."""
    try:
        number, figures = int(float(row[0])), [float(figure) for figure in row[1:]]
    except (ValueError, OverflowError):
        raise WrongArgument(
            f"{file} has a line that is not class x y width height: {' '.join(row)}"
        ) from None
    if number not in names:
        raise WrongArgument(f"{file} has class {number}, and only {len(names)} classes have names.")
    box = _box_of(figures, has_points=has_points)
    is_inside = all(-OUTSIDE <= edge <= 1 + OUTSIDE for edge in box or ())  # NaN is not
    return ObjectLabel(names[number], box) if box and is_inside else None


def _box_of(figures: list[float], *, has_points: bool) -> Box | None:
    if len(figures) in (4, 5) or (has_points and len(figures) > 5):
        x, y, width, height = figures[:4]
        return x - width / 2, y - height / 2, x + width / 2, y + height / 2
    is_outline = len(figures) >= 6 and len(figures) % 2 == 0
    return bounds(zip(figures[::2], figures[1::2], strict=True)) if is_outline else None
