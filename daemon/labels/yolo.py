"""Reads labels of YOLO (https://docs.ultralytics.com/datasets/detect)."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from daemon.core.errors import WrongArgument
from daemon.core.labels import Box, Kind, LeftOut, ObjectLabel, Said
from daemon.labels.saying import bounds, has_image_suffix

CLASSES = "classes.txt"  # the names of the classes, by programs that write no data.yaml
OUTSIDE = 0.1  # by how much a share may lie outside its image


def read_yolo(described: Path, left_out: LeftOut) -> Iterator[Said]:
    """described: data.yaml; or classes.txt with a line for each class, as Label Studio and LabelImg write it. Labels are below
    a folder called labels, with the images below one called images; or each is beside its image. An empty file says
    that its image has no object; an image without a file is not labelled."""
    root = described.parent.parent if described.parent.name == "labels" else described.parent
    names, has_points, tests = _read_description(described, root)
    files = sorted(
        os.path.relpath(os.path.join(at, name), root) for at, _, found in os.walk(root) for name in found
    )
    images = {os.path.splitext(file)[0]: file for file in filter(has_image_suffix, files)}
    for file in fnmatch.filter(files, "*.txt"):
        if os.path.basename(file) == CLASSES:
            continue
        if not (image := _image_of(file, images)):
            left_out("texts beside no image")
        elif not (read := _read_boxes(root / file, names, has_points=has_points)):
            left_out("images with lines that have neither a box nor an outline in shares of 0 to 1")
        else:
            boxes, by_model = read
            is_test = _is_among(tests, os.path.splitext(image)[0])
            yield Said(image, Kind.OBJECTS, boxes, (1.0, 1.0), is_test=is_test, by_model=by_model)


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


class _Description(NamedTuple):
    """names: of the classes, by number. has_points: there are keypoints behind each box. tests: folders of images, and images
    without suffix, that are only for scores."""

    names: Mapping[int, str]
    has_points: bool = False
    tests: Collection[str] = ()


def _read_description(described: Path, root: Path) -> _Description:
    """root: the folder of all images. Raises WrongArgument."""
    import yaml

    text = described.read_text("utf-8-sig")
    if described.name == CLASSES:
        return _Description(dict(enumerate(line.strip() for line in text.splitlines())))
    try:
        about: dict[str, Any] = yaml.load(text, yaml.BaseLoader)
        names = about["names"]
        found = names if isinstance(names, dict) else dict(enumerate(names))
        classes = {int(number): str(name) for number, name in found.items()}
        tests = (
            _find_part(about, "test", root)
            - _find_part(about, "train", root)
            - _find_part(about, "val", root)
        )
        return _Description(classes, "kpt_shape" in about, tests)
    except (yaml.YAMLError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise WrongArgument(f"{described} does not say what its classes are (`names`): {error}.") from None


def _find_part(about: Mapping[str, Any], part: str, root: Path) -> set[str]:
    """The folders of a part of the data set, and the images of its lists without suffix, from root."""
    given = about.get(part) or ()
    found = set()
    for place in (_from_root(str(each), root) for each in ([given] if isinstance(given, str) else given)):
        if place.endswith(".txt") and (root / place).is_file():
            lines = (root / place).read_text("utf-8-sig").split()
            found |= {os.path.splitext(_from_root(line, root))[0] for line in lines}
        else:
            found.add(place)
    return found


def _is_among(places: Collection[str], stem: str) -> bool:
    return any(stem == place or stem.startswith(f"{place}/") for place in places)


def _from_root(path: str, root: Path) -> str:
    """As much of the end of a path as is there: it may begin with a folder of another machine, or with one "../" too many."""
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    ends = ("/".join(parts[first:]) for first in range(len(parts)))
    return next((end for end in ends if (root / end).exists()), "/".join(parts))


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
