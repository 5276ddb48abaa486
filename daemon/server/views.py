"""What the templates show of an image: plain values, in the image's own pixels. Templates escape all of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from daemon.core.jobs import JobStatus
from daemon.ledger.record import Record
from daemon.search.entries import LEAST_SCORE
from stages.contract.binning import text_of

SHORT_TEXT = 160  # characters on a card
# In a name these would be invisible, or turn what follows around: "a<U+202E>gpj.exe" would look like "aexe.jpg".
TURNING = "\u202a-\u202e\u2066-\u2069"
HIDDEN = re.compile(f"[\x00-\x1f\x7f-\x9f{TURNING}]")


@dataclass(frozen=True, slots=True)
class Polygon:
    """points: of a polygon, as SVG writes them. x, y: where its label begins."""

    points: str
    label: str
    kind: str  # "text" or "object"
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class View:
    """An image and its results. score: the cosine, if it was found by its meaning."""

    id: int
    name: str
    folder: str
    place: str  # the folder in the inbox: of an image from an archive, that of the archive
    state: str
    bin: str
    reason: str
    detail: str
    width: int
    height: int
    digest: str
    score: float | None = None
    caption: str = ""
    text: str = ""
    tags: list[tuple[str, float]] = field(default_factory=list)
    objects: list[tuple[str, int]] = field(default_factory=list)
    shapes: list[Polygon] = field(default_factory=list)

    @property
    def short_text(self) -> str:
        return self.text if len(self.text) <= SHORT_TEXT else f"{self.text[: SHORT_TEXT - 1]}…"

    @property
    def alt(self) -> str:
        """What the picture shows, for those who do not see it."""
        return self.caption or self.name


def visible(path: str) -> str:
    """A path with everything in it to be seen. path: from os.fsdecode."""
    whole = path.encode(errors="replace").decode()
    return HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), whole)


def raw_of(record: Record) -> str:
    """Its sidecar as JSON to be read."""
    if record.damage:
        return ""
    text = msgspec.json.format(record.sidecar, indent=2).decode(errors="replace")
    return re.sub(f"[{TURNING}]", lambda found: f"\\u{ord(found[0]):04x}", text)


def document_of(record: Record) -> dict[str, Any]:
    """What its sidecar has; nothing if it has no result, or its data is damaged."""
    is_whole = record.status is JobStatus.DONE and not record.damage
    return msgspec.json.decode(record.sidecar) if is_whole else {}


def view_of(record: Record, score: float | None = None) -> View:
    """record: DONE or FAILED."""
    document: dict[str, Any] = document_of(record)
    ocr, objects = document.get("ocr") or {}, document.get("objects") or {}
    clip, caption = document.get("clip") or {}, document.get("caption") or {}
    labels = [found["label"] for found in objects.get("detections", ())]
    folder, name = os.path.split(os.fsdecode(record.path))
    return View(
        id=record.id,
        name=visible(name),
        folder=visible(os.path.join(os.fsdecode(record.inbox_path), folder)),
        place=visible(folder),
        state=record.status.name.lower(),
        bin=record.bin,
        reason=record.damage or record.reason,
        detail=record.detail,
        width=record.width or 4,
        height=record.height or 3,
        digest=record.digest.hex()[:16],
        score=score,
        caption=caption.get("text") or "",
        text=" ".join(text_of(ocr).split("\n")),
        tags=[(tag["label"], tag["score"]) for tag in clip.get("tags", ())],
        objects=[(label, labels.count(label)) for label in dict.fromkeys(labels)],
        shapes=[*_texts(ocr.get("lines", ())), *_objects(objects.get("detections", ()))],
    )


def suggest(views: Sequence[View]) -> dict[str, list[str]]:
    """The tags and objects of these images, which the page's filters suggest."""
    tags = {
        label
        for view in views
        for place, (label, score) in enumerate(view.tags)
        if place == 0 or score >= LEAST_SCORE
    }
    return {"tag": sorted(tags), "object": sorted({label for view in views for label, _ in view.objects})}


def _texts(lines: Sequence[dict[str, Any]]) -> Iterator[Polygon]:
    for line in lines:
        if box := line.get("box"):
            points = " ".join(f"{x:g},{y:g}" for x, y in box)
            yield Polygon(points, line["text"], "text", min(x for x, _ in box), min(y for _, y in box))


def _objects(detections: Sequence[dict[str, Any]]) -> Iterator[Polygon]:
    for found in detections:
        x0, y0, x1, y1 = found["box"]
        points = f"{x0:g},{y0:g} {x1:g},{y0:g} {x1:g},{y1:g} {x0:g},{y1:g}"
        yield Polygon(points, f"{found['label']} {found['score']:.0%}", "object", x0, y0)
