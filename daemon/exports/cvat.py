"""CVAT for images 1.1 (https://docs.cvat.ai/docs/dataset_management/formats/format-cvat): annotations.xml has objects as boxes,
lines of text as polygons; tags, classes and captions as tags; labels.json has the labels of a task or project for them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any
from xml.sax.saxutils import escape, quoteattr

import msgspec

from daemon.core.labels import Kind
from daemon.exports.answered import CONTROLS, Answered

LINE, CAPTION = "text", "caption"  # labels; the words are in the attribute "text", since labels are few
START = """<?xml version="1.0" encoding="utf-8"?>
<annotations>
<version>1.1</version>
<meta>
<task>
<name>visiond</name>
<size>{size}</size>
<mode>annotation</mode>
<overlap>0</overlap>
<labels>
{labels}
</labels>
</task>
</meta>
"""
LABEL = "<label><name>{name}</name><type>any</type><attributes>{attributes}</attributes></label>"
ATTRIBUTE = (
    "<attribute><name>{name}</name><mutable>False</mutable><input_type>text</input_type>"
    "<default_value></default_value><values></values></attribute>"
)

# An object, line or tag: its element, its label, where it is, and what else is known of it.
Shape = tuple[str, str, dict[str, str], dict[str, str]]


def write_cvat(folder: Path, images: Iterator[Answered]) -> None:
    # By name the attributes, both in the order of their first appearance.
    labels: dict[str, dict[str, None]] = {}
    count = 0
    # Labels come before the images, and are known after them.
    with (folder / "annotations.xml").open("wb") as out, tempfile.TemporaryFile(dir=folder) as waiting:
        for image in images:
            _write_image(waiting, image, labels)
            count += 1
        known = "\n".join(
            LABEL.format(
                name=_text(name), attributes="".join(ATTRIBUTE.format(name=each) for each in attributes)
            )
            for name, attributes in labels.items()
        )
        out.write(START.format(size=count, labels=known).encode())
        waiting.seek(0)
        shutil.copyfileobj(waiting, out)
        out.write(b"</annotations>\n")
    described = msgspec.json.encode([_describe(name, attributes) for name, attributes in labels.items()])
    (folder / "labels.json").write_bytes(msgspec.json.format(described) + b"\n")


def _write_image(out: IO[bytes], image: Answered, labels: dict[str, dict[str, None]]) -> None:
    width, height = image.size
    where = {"id": str(image.record.id), "name": image.name, "width": str(width), "height": str(height)}
    out.write(f"<image{_attributes(where)}>\n".encode())
    for element, label, place, said in _shapes(image):
        labels.setdefault(label, {}).update(dict.fromkeys(said))
        more = "".join(
            f"<attribute name={quoteattr(name)}>{_text(value)}</attribute>" for name, value in said.items()
        )
        fields = {"label": label, "source": "auto"} | place
        out.write(f"<{element}{_attributes(fields)}>{more}</{element}>\n".encode())
    out.write(b"</image>\n")


def _shapes(image: Answered) -> Iterator[Shape]:
    people = {kind: {"source": "manual"} for kind in image.origins}
    drawn = {"occluded": "0", "z_order": "0"}
    for label, score, box in image.objects:
        corners = zip(("xtl", "ytl", "xbr", "ybr"), (f"{value:.2f}" for value in box), strict=True)
        yield "box", label, people.get(Kind.OBJECTS, {}) | drawn | dict(corners), {"score": f"{score:.3f}"}
    for text, score, outline in image.lines:
        points = ";".join(f"{x:.2f},{y:.2f}" for x, y in outline)
        yield "polygon", LINE, drawn | {"points": points}, {"text": text, "score": f"{score:.3f}"}
    for label, score in image.tags:
        yield "tag", label, people.get(Kind.TAGS, {}), {"score": f"{score:.3f}"}
    for stage, label, score in image.classes:
        yield "tag", label, {}, {"classifier": stage, "score": f"{score:.3f}"}
    for caption in image.captions:
        yield "tag", CAPTION, people.get(Kind.CAPTION, {}), {"text": caption}


def _describe(name: str, attributes: Iterable[str]) -> dict[str, Any]:
    """A label as the constructor of a task takes it under "Raw"."""
    kind = {"mutable": False, "input_type": "text", "default_value": "", "values": [""]}
    return {
        "name": name.translate(CONTROLS),
        "type": "any",
        "attributes": [{"name": each} | kind for each in attributes],
    }


def _attributes(fields: Mapping[str, str]) -> str:
    return "".join(f" {name}={quoteattr(value.translate(CONTROLS))}" for name, value in fields.items())


def _text(text: str) -> str:
    return escape(text.translate(CONTROLS), {"\r": "&#13;"})
