"""The columns of an export, and an image as a row of them. What only Parquet and Lance have is in
daemon/exports/parquet.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from datetime import datetime
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from daemon.core.labels import LookUp, describe, no_labels
from daemon.exports.parquet import Row
from daemon.ledger.record import Record
from stages.contract.binning import sure_text_of, text_of
from stages.contract.descriptor import Descriptor
from stages.registry.registry import BUILT_IN, find_stage

COLUMNS = {  # lists are lists of strings; a datetime is a string, except in Parquet
    "id": int,
    "inbox": str,
    "path": str,
    "path_base64": str,
    "location": str,
    "bin": str,
    "format": str,
    "width": int,
    "height": int,
    "pages": int,
    "bytes": int,
    "digest": str,
    "text": str,
    "text_boxes": int,
    "text_area_ratio": float,
    "objects": list,
    "object_count": int,
    "unique_objects": int,
    "spatial_dispersion": float,
    "caption": str,
    "clip_similarity": float,
    "tags": list,
    "seconds": float,
    "finished_at": datetime,
    "notice": str,
    "sure_text": str,
    "text_cut": bool,
    "criteria": str,
    "stage_seconds": dict,  # text → number
    "second_looks": str,
}
NEAR = {"near_duplicate_of": int, "nearness": float}  # if near-duplicates are looked for
# Functions for conditions of SQL, which give the score of a label; and where that is in a sidecar.
SCORES = {"object_score": ("objects", "detections"), "tag_score": ("clip", "tags")}
KINDS: dict[type[inspect.Type], type] = {
    inspect.IntType: int,
    inspect.FloatType: float,
    inspect.StrType: str,
    inspect.BoolType: bool,
}


class PlugInColumn(NamedTuple):
    """name: the result's key, a _ and the field's name. kind: the type of its cells."""

    name: str
    kind: type
    key: str
    field: str


class ExportColumns:
    """The columns of an export.

    kinds: the type of each column, by its name.
    stages: those that are configured. A plug-in and a classifier have columns for the fields of their results. models:
    whether each stage has a column with the fingerprint of its model. labels: those of people, for a column of their own.
    """

    def __init__(self, stages: Iterable[str], *, models: bool = False, labels: LookUp = no_labels) -> None:
        used = [find_stage(name) for name in stages]
        self.stages = [stage.name for stage in used]
        self._plug_ins = list_columns(stage for stage in used if stage not in BUILT_IN)
        self._models = {f"{stage.name}_fingerprint": stage.name for stage in used} if models else {}
        self._better: Mapping[int, tuple[int, float]] | None = None
        plug_ins = {column.name: column.kind for column in self._plug_ins}
        self.labels = labels
        own = {} if labels is no_labels else {"labels": str}
        self.kinds: dict[str, type] = COLUMNS | own | dict.fromkeys(self._models, str) | plug_ins

    def with_near(self, better: Mapping[int, tuple[int, float]]) -> ExportColumns:
        """These and two more. better: by image, the best one of its group of near-duplicates and the nearness of the two; read
        when a row is made."""
        more = copy(self)
        more._better, more.kinds = better, self.kinds | NEAR
        return more

    @property
    def has_models(self) -> bool:
        return bool(self._models)

    def rows_of(self, records: Iterable[Record]) -> Iterator[Row]:
        for record in records:
            document = msgspec.json.decode(record.sidecar)
            yield self.row_of(record, document), document

    def row_of(self, record: Record, document: dict[str, Any] | None = None) -> dict[str, Any]:
        """A record as one flat row with the keys of `kinds`. None for a stage that did not run, and for everything that is
        not known about an image that failed. document: its decoded sidecar, if the caller has it."""
        document = document or msgspec.json.decode(record.sidecar)
        made_by = document.get("models", {})
        said = (
            {"labels": describe(self.labels(record.digest)).decode() or None}
            if "labels" in self.kinds
            else {}
        )
        return {
            **_about_file(record, document["source"]),
            **_results_of(document),
            "finished_at": document["finished_at"],
            "notice": document.get("notice", ""),
            **_details_of(document),
            **said,
            **{name: made_by.get(stage) for name, stage in self._models.items()},
            **{name: document.get(key, {}).get(field) for name, _, key, field in self._plug_ins},
            **self._near_of(record.id),
        }

    def _near_of(self, image: int) -> dict[str, Any]:
        if self._better is None:
            return {}
        best, nearness = self._better.get(image, (None, None))
        return {"near_duplicate_of": best, "nearness": None if nearness is None else round(nearness, 6)}


def line_of(record: Record, labels: LookUp) -> bytes:
    """Its sidecar, with labels of people if there are any."""
    said = describe(labels(record.digest))
    return record.sidecar[:-2] + b',"labels":' + said + b"}\n" if said else record.sidecar


def _about_file(record: Record, source: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": record.id,
        "inbox": source["inbox"],
        "path": source["path"],
        "path_base64": source.get("path_base64", ""),
        "location": record.location.decode(errors="replace"),
        "bin": record.bin or None,
        "format": record.format or None,
        "width": record.width or None,
        "height": record.height or None,
        "pages": record.pages,
        "bytes": source["bytes"],
        "digest": source.get("digest"),
    }


def _results_of(document: dict[str, Any]) -> dict[str, Any]:
    ocr, objects = document.get("ocr", {}), document.get("objects", {})
    caption, tags = document.get("caption", {}), document.get("clip", {}).get("tags", [])
    # Only lines that count for the bin, fewer than OCR found.
    measured = document.get("bin", {}).get("criteria", {}).get("A", {})
    text_boxes, text_area = (measured.get(name, {}).get("value") for name in ("text_boxes", "text_area"))
    return {
        "text": text_of(ocr) if ocr else None,
        "text_boxes": None if text_boxes is None else int(text_boxes),
        "text_area_ratio": text_area,
        "objects": [found["label"] for found in objects["detections"]] if objects else None,
        "object_count": objects.get("count"),
        "unique_objects": objects.get("unique"),
        "spatial_dispersion": objects.get("dispersion"),
        "caption": caption.get("text"),
        "clip_similarity": caption.get("similarity"),
        "tags": [tag["label"] for tag in tags] if "clip" in document else None,
        "seconds": round(sum(document["timings"].values()), 6) if "timings" in document else None,
    }


def _details_of(document: dict[str, Any]) -> dict[str, Any]:
    ocr, bin_ = document.get("ocr", {}), document.get("bin")
    looks = document.get("second_looks")
    return {
        "sure_text": sure_text_of(ocr) if ocr else None,
        "text_cut": ocr.get("cut", False) if ocr else None,
        "criteria": msgspec.json.encode(bin_["criteria"]).decode() if bin_ else None,
        "stage_seconds": document.get("timings"),
        "second_looks": msgspec.json.encode(looks).decode() if looks else None,
    }


def scores_of(document: dict[str, Any]) -> dict[str, dict[str, float] | None]:
    """By function of SCORES, the highest score of each label; None for a stage that did not run."""
    return {
        name: {each["label"]: each["score"] for each in sorted(document[key][part], key=itemgetter("score"))}
        if key in document
        else None
        for name, (key, part) in SCORES.items()
    }


def list_columns(stages: Iterable[Descriptor]) -> list[PlugInColumn]:
    """A column for each field that is a number, a text, or a table of numbers by text. Other
    fields are only in sidecars and in exports as JSON lines."""
    return [
        PlugInColumn(f"{stage.key}_{field.encode_name}", kind, stage.key, field.encode_name)
        for stage in stages
        for field in msgspec.structs.fields(stage.result)
        if (kind := kind_of(inspect.type_info(field.type)))
    ]


def kind_of(kind: inspect.Type) -> type | None:
    """The type of a plain value, or of one that may also be missing."""
    if isinstance(kind, inspect.Metadata):
        return kind_of(kind.type)
    if isinstance(kind, inspect.UnionType):
        kinds = [part for part in kind.types if not isinstance(part, inspect.NoneType)]
        return kind_of(kinds[0]) if len(kinds) == 1 else None
    if isinstance(kind, inspect.DictType) and kind_of(kind.key_type) is str:
        return dict if kind_of(kind.value_type) in (int, float) else None
    return KINDS.get(type(kind))
