"""Reads labels of YOLO (https://docs.ultralytics.com/datasets/detect)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from daemon.core.errors import WrongArgument
from daemon.core.labels import Kind, LeftOut, ObjectLabel, Said, bounds

CLASSES = "classes.txt"  # the names of the classes, by programs that write no data.yaml


def read_yolo(described: Path, left_out: LeftOut) -> Iterator[Said]:
    """described: data.yaml; or classes.txt with a line for each class, as Label Studio and LabelImg write it. Labels are below
    a folder called labels, with the images below one called images, or each is beside its image. An empty file says
    that its image has no object; an image without a file is not labelled."""
    names, root = _class_names(described), described.parent
    files = {
        os.path.relpath(os.path.join(folder, name), root)
        for folder, _, found in os.walk(root)
        for name in found
    }
    images = {
        os.path.splitext(file)[0]: file for file in sorted(files) if not file.endswith((".txt", ".cache"))
    }
    for file in sorted(file for file in files if file.endswith(".txt")):
        parts = os.path.splitext(file)[0].split(os.sep)
        if is_below := "labels" in parts[:-1]:  # the last folder of this name, as ultralytics takes it
            parts[len(parts) - 1 - parts[::-1].index("labels")] = "images"
        stem = os.path.join(*parts)
        if is_below or stem in images:
            rows = [line.split() for line in (root / file).read_text("utf-8").splitlines() if line.strip()]
            value = [found for row in rows if (found := _yolo_object(row, names, root / file, left_out))]
            yield Said(images.get(stem, stem), Kind.OBJECTS, value, (1.0, 1.0))


def _class_names(described: Path) -> dict[Any, Any]:
    """Raises WrongArgument."""
    import yaml

    text = described.read_text("utf-8")
    if described.name == CLASSES:
        return dict(enumerate(text.splitlines()))
    try:
        names = yaml.safe_load(text)["names"]
        return dict(names if isinstance(names, dict) else enumerate(names))
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise WrongArgument(f"{described} does not say what its classes are (`names`): {error}.") from None


def _yolo_object(row: list[str], names: dict[Any, Any], file: Path, left_out: LeftOut) -> ObjectLabel | None:
    """Class and box; or class and the corners of an outline."""
    try:
        number, figures = int(float(row[0])), [float(figure) for figure in row[1:]]
    except ValueError:
        raise WrongArgument(
            f"{file} has a line that is not class x y width height: {' '.join(row)}"
        ) from None
    if number not in names:
        raise WrongArgument(f"{file} has class {number}, and only {len(names)} classes have names.")
    if len(figures) in (4, 5):  # the fifth is a score, of a prediction
        x, y, width, height = figures[:4]
        box = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
    elif len(figures) >= 6 and len(figures) % 2 == 0:
        box = bounds(zip(figures[::2], figures[1::2], strict=True))
    else:
        left_out("lines of YOLO with a number of figures that is neither a box nor an outline")
        return None
    return ObjectLabel(str(names[number]), box)
