"""YOLO: a data set as ultralytics reads it (https://docs.ultralytics.com/datasets/detect). images/ has links to the files,
labels/ a file for each image with a line for each object: its class, and center and size of its box as shares of the image."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from daemon.core.labels import Box
from daemon.exports.answered import Answered
from daemon.exports.webdataset import ending_of

# Of 256, by the digest's first byte: a tenth. Equal files are on one side, so that nothing that was trained on is validated on.
VALIDATED = 26
END_OF_JPEG = b"\xff\xd9"


def write_yolo(folder: Path, images: Iterator[Answered]) -> None:
    classes: dict[str, int] = {}
    for image in images:
        part = "val" if image.record.digest[:1] < bytes([VALIDATED]) else "train"
        place = part / image.own_name(f".{ending_of(image.record.format)}")
        link, label = folder / "images" / place, (folder / "labels" / place).with_suffix(".txt")
        link.parent.mkdir(parents=True, exist_ok=True)
        label.parent.mkdir(parents=True, exist_ok=True)
        try:
            if _would_be_changed(image):
                shutil.copyfile(image.location, link)
            else:
                link.symlink_to(image.location)
        except (FileNotFoundError, PermissionError):
            image.leave_out()
            continue
        rows = (
            (classes.setdefault(name, len(classes)), *_shares(box, image.size))
            for name, _, box in image.objects
        )
        text = "".join(f"{number} {x:.6f} {y:.6f} {w:.6f} {h:.6f}\n" for number, x, y, w, h in rows)
        label.write_text(text, encoding="utf-8", newline="\n")
    # Of few images perhaps none is for one of the two, and ultralytics refuses an empty folder.
    parts = [f"images/{part}" for part in ("train", "val") if (folder / "images" / part).is_dir()]
    names = msgspec.json.encode(list(classes)).decode()  # JSON is YAML
    described = f"train: {parts[0]}\nval: {parts[-1]}\nnames: {names}\n" if parts else ""
    (folder / "data.yaml").write_text(described, encoding="utf-8", newline="\n")


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
