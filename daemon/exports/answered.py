"""An image with its answers, as the formats need it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

import msgspec

from daemon.core.labels import NO_LABELS, Box, Kind, Label, ObjectLabel
from daemon.core.sidecar import cut_name
from daemon.ledger.record import Record
from stages.contract.base import UNFAMILIAR
from stages.contract.binning import has_text, likely_tags, sure_text_of
from stages.registry.registry import kind_of, list_variants

Explain = Callable[[int], Mapping[str, Any] | None]  # signal, stage and score of what disagrees in an image
Write = Callable[[Path, Iterator["Answered"]], None]  # makes the files of a format in an empty folder

# Characters that XML does not have.
CONTROLS = dict.fromkeys([*range(9), 11, 12, *range(14, 32), 0xFFFE, 0xFFFF, *range(0xD800, 0xE000)])
LONGEST_STEM = 180  # bytes: a name of 255 has room for the number and several suffixes


@dataclass
class ImageAnswers:
    """What is known about an image. document: its sidecar, or as much of it as there is. size: width and height of the upright
    image, in pixels. labels: what people say; where they do, it takes the place of the answers, with a score of 1."""

    document: dict[str, Any]
    size: tuple[int, int]
    labels: Mapping[Kind, Label] = field(default_factory=dict)

    @property
    def origins(self) -> dict[Kind, str]:
        """Where those labels are from that take the place of answers. Text has no boxes, so it never does; nor do
        classes."""
        never = (Kind.TEXT, Kind.CLASSES)
        return {kind: label.origin for kind, label in self.labels.items() if kind not in never}

    @cached_property
    def objects(self) -> list[tuple[str, float, Box]]:
        """Label, score and box of each object that YOLO found; boxes are cut at the borders of the image."""
        if given := self.labels.get(Kind.OBJECTS):
            return [
                (each.label, 1.0, each.box)
                for each in given.value
                if isinstance(each, ObjectLabel) and not each.crowd
            ]
        found = self.document.get("objects", {}).get("detections", [])
        return [(each["label"], each["score"], self._cut(each["box"])) for each in found]

    @cached_property
    def lines(self) -> list[tuple[str, float, list[list[float]]]]:
        """Text, score and the four corners of each line of OCR that is text and was not guessed. A page reader has none."""
        return [
            (line["text"], line["score"], line["box"])
            for line in self.document.get("ocr", {}).get("lines", [])
            if has_text(line["text"], line["score"]) and not line.get("guessed")
        ]

    @property
    def page_text(self) -> str:
        """The text of a page reader; "" for others."""
        return self.document.get("ocr", {}).get("text") or ""

    @property
    def text(self) -> str:
        """All text that was not guessed, in reading order."""
        return sure_text_of(self.document.get("ocr", {}))

    @property
    def is_unfamiliar(self) -> bool:
        """Whether the demonstration models do not know what it shows: their caption and tag only say so."""
        caption = self.document.get("caption", {})
        return "clip" in self.document and caption.get("similarity", 0.0) is None

    @property
    def caption(self) -> str:
        return next(iter(self.captions), "")

    @property
    def captions(self) -> list[str]:
        """All captions of people or captioners, that of the main captioner first."""
        return [text for _, text in self.captioned]

    @property
    def captioned(self) -> list[tuple[str, str]]:
        """The same, each with the stage that wrote it, or "people"."""
        if given := self.labels.get(Kind.CAPTION):
            return [("people", str(each)) for each in given.value]
        main = {} if self.is_unfamiliar else {"blip": "caption"}
        stages = main | {key: key for key in self.document if kind_of(key) == "blip"}
        texts = [(stage, self.document.get(key, {}).get("text")) for stage, key in stages.items()]
        return [(stage, text) for stage, text in texts if text and text != UNFAMILIAR]

    @cached_property
    def tags(self) -> list[tuple[str, float]]:
        """Label and score of those of CLIP's tags that count, the most likely one first."""
        if given := self.labels.get(Kind.TAGS):
            return [(str(tag), 1.0) for tag in given.value]
        answered = [] if self.is_unfamiliar else self.document.get("clip", {}).get("tags", [])
        scored = [(tag["label"], tag["score"]) for tag in answered]
        likely = {*likely_tags(scored)}
        return [tag for tag in scored if tag[0] in likely]

    @cached_property
    def classes(self) -> list[tuple[str, str, float]]:
        """Of each classifier its name, and the label with the highest score."""
        said = [(stage, self.document[stage]) for stage in list_variants("classifier", self.document)]
        return [(stage, answer["label"], answer["score"]) for stage, answer in said]

    def _cut(self, box: list[float]) -> Box:
        width, height = self.size
        x0, y0, x1, y1 = box
        return max(0, x0), max(0, y0), min(width, x1), min(height, y1)


class Answered(ImageAnswers):
    """An image that is DONE.

    name: its path in the inbox, below the inbox's name if there are several. Images that were moved may have equal ones.
    left_out: gets the locations of images that the export has to leave out.
    """

    def __init__(
        self, record: Record, name: str, left_out: list[str], labels: Mapping[Kind, Label] = NO_LABELS
    ) -> None:
        document: dict[str, Any] = msgspec.json.decode(record.sidecar)
        super().__init__(document, (record.width, record.height), labels)
        self.record, self.name, self.left_out = record, name, left_out

    def own_name(self, suffix: str, mark: str = "") -> PurePath:
        """A name with its number, or another mark, which no other image has: for a data set that has the images too. The
        suffix takes the place of its own. Folders and dots are those of its name, but for what readers of data sets
        misunderstand: folders called images or labels, and dots before the suffix. A name that is too long is cut."""
        place = PurePath(self.name)
        folders = (
            f"{part}_" if part.lower() in ("images", "labels") else part for part in place.parent.parts
        )
        stem = os.fsdecode(cut_name(os.fsencode(place.stem.replace(".", "_")), LONGEST_STEM))
        return PurePath(*folders, f"{stem}-{mark or self.record.id}{suffix}")

    @property
    def digest(self) -> str:
        return f"sha256:{self.record.digest.hex()}"

    def leave_out(self) -> None:
        """Note that the export is without it."""
        self.left_out.append(self.location)

    @property
    def location(self) -> str:
        """Where its file is now: an absolute path, or an address in an object store."""
        return os.fsdecode(self.record.location)

    @property
    def models(self) -> Mapping[str, str]:
        """What people call the model of each stage, or its fingerprint."""
        return {m.stage: m.provenance.title or m.fingerprint for m in self.record.models}
