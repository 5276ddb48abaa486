"""Label Studio: tasks.json with the answers as predictions, and config.xml, the labeling configuration of a project for them
(https://labelstud.io/guide/predictions)."""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree
from xml.sax.saxutils import quoteattr

import msgspec

from daemon.core.labels import Box
from daemon.core.urls import is_url
from daemon.exports.answered import CONTROLS, Answered, Explain, ImageAnswers
from daemon.exports.coco import JsonArray
from stages.ocr.descriptor import bounds_of

# Label Studio serves files below its document root, which must be / for absolute paths.
LOCAL = "/data/local-files/?d="
OBJECT = "object"  # a name for the first box
Names = defaultdict[str, dict[str, None]]  # by control its labels, in the order of their first appearance
CONFIG = """<View>
  <Image name="image" value="$image"/>
{objects}{tags}{classes}  <Rectangle name="line" toName="image"/>
  <TextArea name="text" toName="image" perRegion="true" editable="true"/>
  <TextArea name="caption" toName="image" editable="true"/>
</View>
"""
OBJECTS = """  <RectangleLabels name="objects" toName="image">
{labels}
  </RectangleLabels>
"""
TAGS = """  <Choices name="tags" toName="image" choice="multiple">
{labels}
  </Choices>
"""
CLASSES = """  <Header value={name}/>
  <Choices name={name} toName="image" choice="single">
{{labels}}
  </Choices>
"""


def write_label_studio(
    folder: Path, images: Iterator[Answered], *, boxes: bool = False, explain: Explain = lambda image: None
) -> None:
    """boxes: let people draw them, even if no image has one yet. explain: says of each image, one after another, what
    disagrees, if that orders them."""
    names = read_config("")
    with (folder / "tasks.json").open("wb") as out:
        out.write(b"[")
        tasks = JsonArray(out)
        for image in images:
            tasks.add(_task(image, explain(image.record.id)))
            collect_labels(image, names)
        out.write(b"]\n")
    (folder / "config.xml").write_text(make_config(names, boxes=boxes), encoding="utf-8", newline="\n")


def make_config(names: Names, *, boxes: bool) -> str:
    """boxes: as of `write_label_studio`."""
    first = dict.fromkeys([OBJECT] * boxes)
    objects = _list(OBJECTS, "Label", names.get("objects") or first)
    tags = _list(TAGS, "Choice", names.get("tags", {}))
    others = (name for name in names if name not in ("objects", "tags"))
    classes = (_list(CLASSES.format(name=quoteattr(name)), "Choice", names[name]) for name in others)
    return CONFIG.format(objects=objects, tags=tags, classes="".join(classes))


def read_config(text: str) -> Names:
    """Of a labeling configuration that `make_config` has made; "": of none. Raises ValueError."""
    names: Names = defaultdict(dict)
    try:
        for control in ElementTree.fromstring(text) if text else ():
            if len(control):
                names[control.attrib["name"]] = {each.attrib["value"]: None for each in control}
    except (ElementTree.ParseError, KeyError) as error:
        raise ValueError("it is none of these") from error
    return names


def write_task(image: Answered) -> str:
    """A task in a file of its own, as Label Studio reads them from a storage."""
    return msgspec.json.encode(_task(image, None)).decode() + "\n"


def collect_labels(image: Answered, names: Names) -> None:
    """Add those of an image to each control."""
    for each in (image, _answers(image)):  # those of people, then those of predictions
        names["objects"].update(_offered(label for label, _, _ in each.objects))
        names["tags"].update(_offered(label for label, _ in each.tags))
    for stage, _, _ in image.classes:
        names[stage].update(_offered(image.document[stage]["scores"]))


def _offered(labels: Iterable[str]) -> dict[str, None]:
    return dict.fromkeys(label.translate(CONTROLS) for label in labels)


def _list(control: str, element: str, labels: Iterable[str]) -> str:
    """A control for these labels; nothing without any, as Label Studio refuses an empty one."""
    rows = [f"    <{element} value={quoteattr(label)}/>" for label in labels]
    return control.format(labels="\n".join(rows)) if rows else ""


def _answers(image: Answered) -> ImageAnswers:
    """Those of the models, also of an image with labels of people."""
    return ImageAnswers(image.document, image.size)


def _task(image: Answered, why: Mapping[str, Any] | None) -> dict[str, Any]:
    location = image.location
    address = location if is_url(location) else LOCAL + quote(os.fsencode(location.lstrip("/")))
    version = ", ".join(image.models.values())
    answers = [*_results(_answers(image))]
    said = [*_results(ImageAnswers({}, image.size, image.labels))]
    about: dict[str, Any] = {"id": image.record.id, "path": image.name, "digest": image.digest}
    about |= {"labels": image.origins} | ({"disagreement": why} if why else {})
    doubted = {"score": round(1 - why["score"], 6)} if why else {}
    return {
        "data": {"image": address},
        "meta": {"visiond": about},
        "predictions": [{"model_version": version, "result": answers, **doubted}],
    } | ({"annotations": [{"result": said}]} if image.labels else {})


def _results(image: ImageAnswers) -> Iterator[dict[str, Any]]:
    """The regions and choices of one prediction."""
    numbers = itertools.count(1)

    def result(kind: str, name: str, value: dict[str, Any], id: str = "", **fields: Any) -> dict[str, Any]:
        width, height = image.size
        size = {"original_width": width, "original_height": height, "image_rotation": 0}
        id = id or str(next(numbers))
        return {
            "id": id,
            "type": kind,
            "from_name": name,
            "to_name": "image",
            "value": value,
            **size,
            **fields,
        }

    for label, score, box in image.objects:
        value = _percent(box, image) | {"rectanglelabels": [label]}
        yield result("rectanglelabels", "objects", value, score=score)
    for text, score, corners in image.lines:
        region = result("rectangle", "line", _percent(bounds_of(corners), image), score=score)
        yield region
        yield result("textarea", "text", region["value"] | {"text": [text]}, region["id"], score=score)
    if image.captions:
        yield result("textarea", "caption", {"text": image.captions})
    if image.tags:
        yield result("choices", "tags", {"choices": [label for label, _ in image.tags]})
    for stage, label, score in image.classes:
        yield result("choices", stage, {"choices": [label]}, score=score)


def _percent(box: Box, image: ImageAnswers) -> dict[str, float]:
    (x0, y0, x1, y1), (width, height) = box, image.size
    return {
        "x": 100 * x0 / width,
        "y": 100 * y0 / height,
        "width": 100 * (x1 - x0) / width,
        "height": 100 * (y1 - y0) / height,
        "rotation": 0,
    }
