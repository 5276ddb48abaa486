"""The formats that are a folder of files."""

from __future__ import annotations

from collections.abc import Mapping

from daemon.exports.answered import Write
from daemon.exports.coco import write_coco
from daemon.exports.cvat import write_cvat
from daemon.exports.huggingface import write_huggingface
from daemon.exports.label_studio import write_label_studio
from daemon.exports.pages import PAGES
from daemon.exports.webdataset import write_webdataset
from daemon.exports.yolo import write_yolo

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
