"""COCO (https://cocodataset.org/#format-data): instances.json has objects, captions.json captions, and text.json lines of text,
with the key `utf8_string` as in COCO-Text. Scores are kept, as in the results that COCO's tools compare."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import msgspec

from daemon.core.labels import Box, Kind
from daemon.exports.answered import Answered
from stages.ocr.descriptor import bounds_of


class JsonArray:
    """The elements of an array, one after another, without its brackets."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out, self._between = out, b""

    def add(self, value: Any) -> None:
        self._out.write(self._between + msgspec.json.encode(value))
        self._between = b",\n"


class _Dataset(ExitStack):
    """A file with images, annotations and categories. Annotations wait in a temporary file, as they come after all images.
    kind: of labels that take the place of its answers."""

    def __init__(self, file: Path, kind: Kind) -> None:
        super().__init__()
        self._kind, self._makers = kind, set[str]()
        self._out: IO[bytes] = self.enter_context(file.open("wb"))
        self._waiting: IO[bytes] = self.enter_context(tempfile.TemporaryFile(dir=file.parent))  # noqa: SIM115
        self._images, self._annotations = JsonArray(self._out), JsonArray(self._waiting)
        self._numbers = itertools.count(1)  # of annotations
        self._categories: dict[str, int] = {}
        self._out.write(b'{"licenses":[],"images":[')

    def add_image(self, image: Answered) -> None:
        width, height = image.size
        where = {"file_name": image.name, "location": image.record.location.decode(errors="replace")}
        labels = {kind: origin for kind, origin in image.origins.items() if kind is self._kind}
        self._makers.add("labels of people" if labels else "answers of models")
        about = {"digest": image.digest, "labels": labels}
        self._images.add({"id": image.record.id, **where, "width": width, "height": height, "visiond": about})

    def add(self, image: Answered, category: str = "", **fields: Any) -> None:
        """An annotation of an image. category: its name; "" for none."""
        if self._kind in image.origins:
            fields["origin"] = image.origins[self._kind]
        if category:
            fields["category_id"] = self._categories.setdefault(category, len(self._categories) + 1)
        self._annotations.add({"id": next(self._numbers), "image_id": image.record.id, **fields})

    def finish(self) -> None:
        self._out.write(b'],"annotations":[')
        self._waiting.seek(0)
        shutil.copyfileobj(self._waiting, self._out)
        self._out.write(b"]")
        if self._categories:  # pycocotools asks each annotation for its category if there are any
            categories = [{"id": number, "name": name} for name, number in self._categories.items()]
            self._out.write(b',"categories":' + msgspec.json.encode(categories))
        makers = " and ".join(sorted(self._makers)) or "answers of models"
        info = {"description": f"{makers}, by visiond".capitalize()}
        self._out.write(b',"info":' + msgspec.json.encode(info) + b"}\n")


def write_coco(folder: Path, images: Iterator[Answered]) -> None:
    with (
        _Dataset(folder / "instances.json", Kind.OBJECTS) as instances,
        _Dataset(folder / "captions.json", Kind.CAPTION) as captions,
        _Dataset(folder / "text.json", Kind.TEXT) as text,
    ):
        for image in images:
            for dataset in (instances, captions, text):
                dataset.add_image(image)
            for label, score, box in image.objects:
                instances.add(image, label, **_shape(box), score=score)
            for stage, caption in image.captioned:
                captions.add(image, caption=caption, captioner=stage)
            for line, score, corners in image.lines:
                outline = [[value for corner in corners for value in corner]]
                shape = _shape(bounds_of(corners)) | {"segmentation": outline}
                text.add(image, "text", **shape, utf8_string=line, score=score)
        for dataset in (instances, captions, text):
            dataset.finish()


def _shape(box: Box) -> dict[str, Any]:
    x0, y0, x1, y1 = box
    width, height = x1 - x0, y1 - y0
    return {"bbox": [x0, y0, width, height], "area": width * height, "iscrowd": 0}
