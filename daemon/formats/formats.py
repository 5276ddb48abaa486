"""The formats that are a folder of files."""

from __future__ import annotations

from collections.abc import Mapping

from daemon.formats.answered import Write
from daemon.formats.coco import write_coco
from daemon.formats.cvat import write_cvat
from daemon.formats.huggingface import write_huggingface
from daemon.formats.label_studio import write_label_studio
from daemon.formats.pages import PAGES
from daemon.formats.webdataset import write_webdataset
from daemon.formats.yolo import write_yolo

FOLDERS: Mapping[str, Write] = {
    "coco": write_coco,
    "yolo": write_yolo,
    "label-studio": write_label_studio,
    "cvat": write_cvat,
    "huggingface": write_huggingface,
    "webdataset": write_webdataset,
    **{name: page.write for name, page in PAGES.items()},
}
# What these have needs the files of the images.
WITH_IMAGES = frozenset({"yolo", "huggingface", "webdataset"})
