"""What the templates get, as plain values: what an address asks for, images in their own pixels, and the configuration as a
table for each section, without secrets. Templates escape all of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.requests import Request

from daemon.core.jobs import JobStatus
from daemon.ledger.record import Record
from daemon.ledger.soundness import MOST
from daemon.search.entries import FIELDS, LEAST_SCORE
from daemon.search.marking import Part, excerpt, split_at_words
from daemon.search.query import DATES, Query, QueryError, Term, parse, read_day
from daemon.search.searcher import NEWEST, By, Found, Hit, Searcher
from stages.contract.binning import text_of

CHOICES = ("bin", "inbox", "state", "tag", "object")
SHORT_TEXT = 160  # characters on a card
# In a name these would be invisible, or turn what follows around: "a<U+202E>gpj.exe" would look like "aexe.jpg".
TURNING = "\u202a-\u202e\u2066-\u2069"
HIDDEN = re.compile(f"[\x00-\x1f\x7f-\x9f{TURNING}]")
NOTHING = "–"


# What is asked for


class Asked(msgspec.Struct, frozen=True):
    """The search box, and the choices beside it."""

    q: str = ""
    by: str = "both"
    bin: str = ""
    inbox: str = ""
    state: str = ""
    tag: str = ""
    object: str = ""
    after: str = ""
    before: str = ""
    cursor: Annotated[int, msgspec.Meta(ge=0, le=MOST)] = 0

    @classmethod
    def of(cls, request: Request) -> Asked:
        """Raises QueryError."""
        given = {name: value for name, value in request.query_params.items() if name in cls.__struct_fields__}
        try:
            asked = msgspec.convert(given, cls, strict=False)
        except msgspec.ValidationError as error:
            raise QueryError(f"the address has a value that cannot be used: {error}") from error
        return asked if asked.by in (*By, "newest") else msgspec.structs.replace(asked, by="both")

    def query(self) -> Query:
        """Raises QueryError."""
        choices = {name: [value] for name in CHOICES if (value := getattr(self, name).strip())}
        query = parse(self.q).narrowed(**choices)
        after, before = (
            read_day(name, getattr(self, name)) if getattr(self, name) else None for name in DATES
        )
        return replace(query, after=after or query.after, before=before or query.before)

    @property
    def has_choices(self) -> bool:
        """Whether a filter or an order is chosen; the failed images alone have a page of their own."""
        chosen = {name: value for name, value in self.values().items() if name not in ("q", "cursor")}
        return chosen not in ({}, {"state": "failed"})

    @property
    def is_for_failed(self) -> bool:
        return self.state == "failed" or "state:failed" in self.q

    def values(self) -> dict[str, Any]:
        """Those that are not as by default, for an address."""
        return {
            name: value for name, value in msgspec.structs.asdict(self).items() if value and value != "both"
        }

    def is_only(self, **values: str) -> bool:
        """Whether it asks for this, and how to order it, and nothing else."""
        return {name: value for name, value in self.values().items() if name != "by"} == values


def find_images(searcher: Searcher, asked: Asked, most: int, wait: bool = False) -> Found:
    """wait: until the model that understands sentences is loaded. Raises QueryError, SearchUnusable."""
    searcher.catch_up()
    query = asked.query()
    if query.sentence and asked.by != "newest":
        return searcher.best(query, By(asked.by), asked.cursor, most, wait=wait)
    return searcher.newest(query, asked.cursor or NEWEST, most)


class _Number(IntegerConvertor):
    """Python refuses to read numbers of thousands of digits. What is more than the ledger can have becomes the
    largest, which no image has."""

    regex = f"[0-9]{{1,{len(str(MOST))}}}"

    def convert(self, value: str) -> int:
        return min(int(value), MOST)


register_url_convertor("number", _Number())


def number_in(text: str) -> int | None:
    """As in the path of an address; None if it is no number."""
    if re.fullmatch(_Number.regex, text):
        return min(int(text), MOST)
    return MOST if re.fullmatch("[0-9]+", text) else None


# Images


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
    bin: str
    reason: str
    detail: str
    width: int
    height: int
    digest: str
    hit: Hit | None = None
    terms: tuple[Term, ...] = ()
    caption: str = ""
    text: str = ""
    tags: list[tuple[str, float]] = field(default_factory=list)
    objects: list[tuple[str, int]] = field(default_factory=list)
    shapes: list[Polygon] = field(default_factory=list)

    def marked(self, field: str) -> list[Part]:
        """One of its texts, by the field of the index, with the words that were looked for."""
        tags = (label for place, (label, score) in enumerate(self.tags) if place == 0 or score >= LEAST_SCORE)
        texts = {
            "text": self.text if self.state == "done" else f"{self.reason}: {self.detail}",
            "caption": self.caption,
            "tags": ", ".join(tags),
            "objects": ", ".join(label for label, _ in self.objects),
            "name": self.name,
        }
        return split_at_words(texts[field], self.terms, field)

    @property
    def short_text(self) -> list[Part]:
        """What is around the first word that was looked for; otherwise the beginning."""
        return excerpt(self.marked("text"), SHORT_TEXT)

    @property
    def why(self) -> str:
        """How it was found, as a sentence goes on after its name; empty if nothing was looked for."""
        if not (self.hit and self.hit.by):
            return ""
        found = []
        if self.hit.by is not By.meaning:
            names = {"text": "reason"} if self.state == "failed" else {}
            places = [
                names.get(name, name) for name in FIELDS if any(part.is_match for part in self.marked(name))
            ]
            found.append(f"has the words in its {' and '.join(places)}" if places else "has the words")
        if self.hit.score is not None:
            found.append(f"is near in meaning (nearness {self.hit.score:.2f})")
        return " and ".join(found)

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


def view_of(record: Record, hit: Hit | None = None, terms: tuple[Term, ...] = ()) -> View:
    """record: DONE or FAILED."""
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
        bin=record.bin,
        reason=record.damage or record.reason,
        detail=record.detail,
        width=record.width or 4,
        height=record.height or 3,
        digest=record.digest.hex()[:16],
        hit=hit,
        terms=terms,
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


# The configuration


@dataclass(frozen=True, slots=True)
class SettingsTable:
    """name: of the section, as in daemon.toml. rows: each key with its value."""

    name: str
    rows: list[tuple[str, str]]


def list_tables(values: Mapping[str, Any], name: str = "") -> Iterator[SettingsTable]:
    """values: of a configuration, by section and key. A section without keys of its own is left out."""
    rows = [(key, say(value)) for key, value in values.items() if not _parts(value)]
    if rows and name:
        yield SettingsTable(name, rows)
    for key, value in values.items():
        for part in _parts(value):
            yield from list_tables(part, f"{name}.{key}" if name else key)


def say(value: object) -> str:
    """A value as daemon.toml has it, without quotes. Of an address only scheme and host: the rest, and what stands
    before the host, may be a secret."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ", ".join(map(say, value)) or NOTHING
    if isinstance(value, str) and "://" in value:
        return _without_secrets(value)
    return NOTHING if value in ("", None, {}) else str(value)


def _without_secrets(url: str) -> str:
    scheme, _, rest = url.partition("://")
    host = urlsplit(f"//{rest}").netloc.rpartition("@")[2]
    return f"{scheme}://{host}" + ("/…" if rest.partition(host)[2].strip("/") else "")


def _parts(value: object) -> list[Mapping[str, Any]]:
    """The sections in a value: itself, or those in a list."""
    found = value if isinstance(value, list) else [value]
    return [part for part in found if isinstance(part, Mapping)]


def shorten(value: object) -> str:
    """A number with few digits; a dash for nothing."""
    return NOTHING if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
