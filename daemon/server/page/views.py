"""What the templates get of an image, as plain values in its own pixels. Templates escape all of it."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import msgspec

from daemon.core.jobs import JobStatus
from daemon.core.sidecar import KEYS, timestamp
from daemon.ledger.record import Record
from daemon.search.entries import FIELDS
from daemon.search.marking import Part, excerpt, split_at_words
from daemon.search.query import Term
from daemon.search.searcher import By, Hit
from stages.contract.binning import describe, likely_tags, text_of
from stages.registry.registry import list_variants

SHORT_TEXT = 160  # characters on a card
MOST_SCORES = 5  # of a classifier, on the page of an image
# In a name these would be invisible, or turn what follows around: "a<U+202E>gpj.exe" would look like "aexe.jpg".
TURNING = "\u202a-\u202e\u2066-\u2069"
HIDDEN = re.compile(f"[\x00-\x1f\x7f-\x9f{TURNING}]")
NOTHING = "–"
NOT_LOOKED_FOR = Hit(0, 0)
WITHOUT_RESULT = (JobStatus.PENDING, JobStatus.SKIPPED)


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
    """An image and its results. hit: how it was found, if it was looked for, and terms: with these words."""

    id: int
    name: str
    folder: str
    place: str  # the folder in the inbox: of an image from an archive, that of the archive
    state: str
    day: str  # on which its result was made, in UTC as the filters have it; "" if it has none, or it is damaged
    bin: str
    reason: str
    detail: str
    width: int
    height: int
    digest: str
    hit: Hit = NOT_LOOKED_FOR
    terms: tuple[Term, ...] = ()
    caption: str = ""
    captions: str = ""  # of further captioners
    text: str = ""
    tags: list[tuple[str, float]] = field(default_factory=list)
    objects: list[tuple[str, int]] = field(default_factory=list)
    shapes: list[Polygon] = field(default_factory=list)
    _marked: dict[str, list[Part]] = field(default_factory=dict)

    def marked(self, name: str) -> list[Part]:
        """One of its texts, by the field of the index, or its folder, with the words that were looked for."""
        if name not in self._marked:
            self._marked[name] = self._mark(name)
        return self._marked[name]

    def _mark(self, name: str) -> list[Part]:
        texts = {
            "text": f"{self.reason}: {self.detail}" if self.state == "failed" else self.text,
            "caption": self.caption,
            "captions": self.captions,
            "tags": ", ".join(likely_tags(self.tags)),
            "objects": ", ".join(label for label, _ in self.objects),
            "name": self.name,
            "folder": self.place,
        }
        # The index has the whole path under "name", and all captions in one field.
        field = {"folder": "name", "captions": "caption"}.get(name, name)
        return split_at_words(texts[name], self.terms, field)

    @property
    def short_text(self) -> list[Part]:
        """What is around the first word that was looked for; otherwise the beginning."""
        return excerpt(self.marked("text"), SHORT_TEXT)

    @property
    def why(self) -> str:
        """How it was found, as a sentence goes on after its name; empty if nothing was looked for."""
        if self.hit.evidence:
            return self.hit.evidence.sentence
        if not self.hit.by:
            return ""
        found = []
        if self.hit.by is not By.meaning:
            places = self._places()
            found.append(f"has the words in its {' and '.join(places)}" if places else "has the words")
        if self.hit.score is not None:
            chance = self.hit.probability
            likely = "" if chance is None else f", probability {100 * chance:.3g} %"
            found.append(f"is near in meaning (nearness {self.hit.score:.2f}{likely})")
        return " and ".join(found)

    def _places(self) -> list[str]:
        """Where the words are that were looked for."""
        names = {"captions": "further captions"} | ({"text": "reason"} if self.state == "failed" else {})
        return [
            names.get(name, name)
            for name in (*FIELDS, "folder", "captions")
            if any(part.is_match for part in self.marked(name))
        ]

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


def view_digest(record: Record) -> str:
    return record.digest.hex()[:16]


def view_of(record: Record, hit: Hit = NOT_LOOKED_FOR, terms: tuple[Term, ...] = ()) -> View:
    """An image without a result has as its text why that is."""
    document = document_of(record)
    ocr, objects, clip, caption = (document.get(name) or {} for name in ("ocr", "objects", "clip", "caption"))
    labels = [found["label"] for found in objects.get("detections", ())]
    folder, name = os.path.split(os.fsdecode(record.path))
    return View(
        id=record.id,
        name=visible(name),
        folder=visible(os.path.join(os.fsdecode(record.inbox_path), folder)),
        place=visible(folder),
        state=record.status.name.lower(),
        day=timestamp(record.finished_at)[:10] if record.finished_at else "",
        bin=record.bin,
        reason=record.damage or record.reason,
        detail=record.detail,
        width=record.width or 4,
        height=record.height or 3,
        digest=view_digest(record),
        hit=hit,
        terms=terms,
        caption=caption.get("text") or "",
        captions="\n".join(text for _, text in list_captions(document)),
        text=_why(record) if record.status in WITHOUT_RESULT else " ".join(text_of(ocr).split("\n")),
        tags=[(tag["label"], tag["score"]) for tag in clip.get("tags", ())],
        objects=[(label, labels.count(label)) for label in dict.fromkeys(labels)],
        shapes=[*draw(ocr), *draw(objects)],
    )


def _why(record: Record) -> str:
    return ": ".join(filter(None, (record.status.name.lower(), record.reason, record.detail)))


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a stage found at first, and what a second look found; or why it found nothing."""

    name: str
    stage: str
    model: str  # its fingerprint
    first: str
    second: str
    problem: str


def compare_looks(document: Mapping[str, Any]) -> list[Comparison]:
    """document: of a sidecar."""
    return [
        Comparison(
            name,
            look["stage"],
            look["model"],
            summarize(document.get(KEYS.get(look["stage"], look["stage"]))),
            summarize(look["result"]),
            "" if look["result"] is not None else f"{look['reason']}: {look['detail']}",
        )
        for name, look in document.get("second_looks", {}).items()
    ]


def summarize(result: Mapping[str, Any] | None) -> str:
    """What a person reads in a stage's result, whichever stage it is of; of a plug-in's, all of it."""
    return NOTHING if result is None else _in_words(result) or NOTHING


def _in_words(result: Mapping[str, Any]) -> str:
    if "lines" in result:
        return text_of(result)
    if "detections" in result:
        counts = Counter(found["label"] for found in result["detections"])
        return ", ".join(f"{count} × {label}" for label, count in counts.items())
    if "tags" in result or "scores" in result:
        return ", ".join(_say_labels(result))
    return str(result.get("text") or "") if "similarity" in result else msgspec.json.encode(result).decode()


def _say_labels(result: Mapping[str, Any]) -> list[str]:
    """Of CLIP's tags or a classifier's labels."""
    tags = [f"{tag['label']} {tag['score']:.0%}" for tag in result.get("tags", ())]
    return tags or [f"{label} {score:.3g}" for label, score in list_scores(result)]


def list_scores(result: Mapping[str, Any]) -> list[tuple[str, float]]:
    """The labels of a classifier's result with the highest scores."""
    return [*result.get("scores", {}).items()][:MOST_SCORES]


def list_classes(document: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, float]]]]:
    """Of each classifier its name, and its labels with the highest scores."""
    stages = list_variants("classifier", document.get("models", {}))
    return [(name, list_scores(document[name])) for name in stages]


def list_captions(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The name and the caption of each further captioner."""
    stages = list_variants("blip", document.get("models", {}))
    return [(name, document[name]["text"]) for name in stages if name != "blip"]


def describe_one(record: Record) -> dict[str, Any]:
    """What an image's own page shows."""
    document = document_of(record)
    return {
        "view": view_of(record),
        "record": record,
        "location": visible(os.fsdecode(record.location)),
        "document": document,
        "provenance": record.provenance(),
        "text": text_of(document.get("ocr") or {}),
        "captions": list_captions(document),
        "classes": list_classes(document),
        "criteria": describe(document["bin"]) if document else [],
        "comparisons": compare_looks(document),
        "raw": raw_of(record),
    }


def is_copy(view: View, record: Record) -> bool:
    """Whether its file has the same bytes."""
    return bool(record.digest) and view.digest == view_digest(record)


def name_day(day: str) -> str:
    """day: as in an address. For people."""
    return f"{date.fromisoformat(day):%A, %d %B %Y}".replace(" 0", " ")


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.0f}" if seconds >= 0.001 else "under 1"


def suggest(views: Sequence[View]) -> dict[str, list[str]]:
    """The tags and objects of these images, which the page's filters suggest."""
    tags = {label for view in views for label in likely_tags(view.tags)}
    return {"tag": sorted(tags), "object": sorted({label for view in views for label, _ in view.objects})}


def draw(result: Mapping[str, Any]) -> Iterator[Polygon]:
    """What a stage's result draws over the picture."""
    yield from _texts(result.get("lines", ()))
    yield from _objects(result.get("detections", ()))


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
