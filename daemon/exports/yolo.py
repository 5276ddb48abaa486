"""YOLO: a data set as ultralytics reads it (https://docs.ultralytics.com/datasets/detect). images/ has links to the files,
labels/ a file for each image with a line for each object: its class, and center and size of its box as shares of the image."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from daemon.core.labels import Box
from daemon.exports.answered import Answered
from daemon.exports.webdataset import ending_of

if TYPE_CHECKING:
    from _typeshed import StrPath

# Of 256, by the digest's first byte: a tenth, of those of which the file of their labels does not say it. Equal files are on
# one side, so that nothing that was trained on is validated on.
VALIDATED = 26
PARTS = ("train", "val")
END_OF_JPEG = b"\xff\xd9"
NAMES = "names: "


def write_yolo(folder: Path, images: Iterator[Answered]) -> None:
    classes: dict[str, int] = {}
    for image in images:
        place = part_of(image) / image.own_name(f".{ending_of(image.record.format)}")
        link, label = folder / "images" / place, (folder / "labels" / place).with_suffix(".txt")
        link.parent.mkdir(parents=True, exist_ok=True)
        label.parent.mkdir(parents=True, exist_ok=True)
        try:
            place_image(image, link)
        except (FileNotFoundError, PermissionError):
            image.leave_out()
            continue
        label.write_text(make_label(image, classes), encoding="utf-8", newline="\n")
    parts = [part for part in PARTS if (folder / "images" / part).is_dir()]
    (folder / "data.yaml").write_text(describe(parts, classes), encoding="utf-8", newline="\n")


def part_of(image: Answered) -> str:
    is_held_out = next((label.held_out for label in image.labels.values()), None)
    if is_held_out is None:
        is_held_out = image.record.digest[:1] < bytes([VALIDATED])
    return "val" if is_held_out else "train"


def make_label(image: Answered, classes: dict[str, int]) -> str:
    """The lines of its objects. classes: the number of each; gets those that are new."""
    rows = (
        (classes.setdefault(name, len(classes)), *_shares(box, image.size)) for name, _, box in image.objects
    )
    return "".join(f"{number} {x:.6f} {y:.6f} {w:.6f} {h:.6f}\n" for number, x, y, w, h in rows)


def describe(parts: Sequence[str], classes: Iterable[str]) -> str:
    """data.yaml. parts: those that have images. Of few images perhaps none is for one of the two, and ultralytics refuses an
    empty folder."""
    names = msgspec.json.encode(list(classes)).decode()  # JSON is YAML
    return f"train: images/{parts[0]}\nval: images/{parts[-1]}\n{NAMES}{names}\n" if parts else ""


def read_classes(described: str) -> dict[str, int]:
    """The numbers of the classes in a data.yaml of `describe`. Raises ValueError."""
    names = msgspec.json.decode(described.partition(NAMES)[2] or "[]", type=list[str])
    return {name: number for number, name in enumerate(names)}


def place_image(image: Answered, path: StrPath) -> None:
    """A link to its file, or a copy. Raises OSError."""
    if _would_be_changed(image):
        shutil.copyfile(image.location, path)
    else:
        os.symlink(image.location, path)


def _would_be_changed(image: Answered) -> bool:
    """Whether ultralytics writes the file anew, as it does with each JPEG that does not end with the end marker, as those of
    many phones do not. Older versions of it write through a link."""
    if image.record.format != "JPEG":
        return False
    with open(image.location, "rb") as file:
        file.seek(-min(2, image.record.version.size), os.SEEK_END)
        return file.read() != END_OF_JPEG


def _shares(box: Box, size: tuple[int, int]) -> tuple[float, float, float, float]:
    """Center, width and height, from 0 to 1."""
    (x0, y0, x1, y1), (width, height) = box, size
    return (x0 + x1) / 2 / width, (y0 + y1) / 2 / height, (x1 - x0) / width, (y1 - y0) / height
