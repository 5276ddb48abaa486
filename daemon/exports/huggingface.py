"""Hugging Face: a folder that datasets.load_dataset("imagefolder", data_dir=FOLDER) reads, of version 3.4 or newer
(https://huggingface.co/docs/datasets/image_dataset): links to the images, metadata.parquet with a row for each, and a card."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from daemon.exports.answered import Answered
from daemon.exports.parquet import CHUNK, load_pyarrow
from daemon.exports.webdataset import ending_of
from daemon.ledger.record import Model, describe_models
from stages.ocr.descriptor import bounds_of

IN_A_FOLDER = 1000  # images; the hub takes up to 10,000
TEXTS, NUMBERS, BOXES = {"list": "string"}, {"list": "float64"}, {"list": {"list": "float64"}}
FOUND = [{"name": "score"} | NUMBERS, {"name": "bbox"} | BOXES]
FEATURES: dict[str, dict[str, Any]] = {  # the types of the columns, as the library writes them into a card
    **{name: {"dtype": "int64"} for name in ("id", "width", "height")},
    **{name: {"dtype": "string"} for name in ("path", "digest", "bin", "caption", "text")},
    "lines": {"struct": [{"name": "text"} | TEXTS, *FOUND]},
    "objects": {"struct": [{"name": "category"} | TEXTS, *FOUND]},
    "tags": {"struct": [{"name": "label"} | TEXTS, {"name": "score"} | NUMBERS]},
    "classes": {
        "struct": [{"name": "classifier"} | TEXTS, {"name": "label"} | TEXTS, {"name": "score"} | NUMBERS]
    },
    "labels": {"struct": [{"name": "kind"} | TEXTS, {"name": "origin"} | TEXTS]},
}
# By column.
TASKS = {
    "caption": "image-to-text",
    "objects": "object-detection",
    "tags": "image-classification",
    "classes": "image-classification",
}
SIZES = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B")
CARD = """---
annotations_creators: {creators}
task_categories: {tasks}
size_categories: {sizes}
tags: ["visiond"]
classes: {classes}
dataset_info: {{"features": {features}}}
models: {models}
---
# Images with {makers}

{people} What the license of the images is, only their owner knows.

| column | what it is |
|---|---|
| `image` | the file as it was; boxes are of the upright image, in pixels |
| `id`, `path`, `digest` | its number in the ledger of visiond, its path in the inbox, `sha256:` and the SHA-256 of its bytes |
| `width`, `height`, `bin` | of the upright image, in pixels; the bin it was put into |
| `caption`, `text` | its caption; its text, line by line |
| `lines` | text, score and box (x, y, width, height) of each line |
| `objects` | category, score and box (x, y, width, height) of each object |
| `tags` | label and score of each tag, the most likely one first |
| `classes` | of each classifier its name, and the label with the highest score |
| `labels` | what people say about this image, in place of the answer: kind (objects, tags, caption) and where that is from |

The head of this file has all names of categories, tags and classes under `classes`, and the types of the columns under
`dataset_info`.

| stage | model | commit | license |
|---|---|---|---|
{table}
"""


def write_huggingface(folder: Path, images: Iterator[Answered]) -> None:
    """The file has the types of its columns: the library takes those of JSON from the first rows, and an empty list has none.
    Raises MissingLibrary."""
    arrow = load_pyarrow()
    columns = {"file_name": {"dtype": "string"}} | FEATURES
    schema = arrow.schema([(name, _type(feature, arrow)) for name, feature in columns.items()])
    count, labelled, models, seen = 0, 0, dict[Model, None](), {column: set[str]() for column in TASKS}
    with arrow.parquet.ParquetWriter(folder / "metadata.parquet", schema) as out:
        while chunk := list(itertools.islice(images, CHUNK)):
            rows = [_row(image) for image in chunk]
            for image, row in zip(chunk, rows, strict=True):
                link = folder / row["file_name"]
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(image.location)
                models.update(dict.fromkeys(image.record.models))
                labelled += bool(image.origins)
                seen["caption"] |= {"any"} if image.caption else set()
                seen["objects"].update(row["objects"]["category"])
                for column in ("tags", "classes"):
                    seen[column].update(row[column]["label"])
            count += len(rows)
            out.write_table(arrow.Table.from_pylist(rows, schema))
    card = _describe(count, labelled, seen, describe_models(models))
    (folder / "README.md").write_text(card, encoding="utf-8", newline="\n")


def _type(feature: Any, arrow: Any) -> Any:
    """A type of FEATURES as Arrow has it."""
    match feature:
        case {"list": each}:
            return arrow.list_(_type(each, arrow))
        case {"struct": fields}:
            return arrow.struct([(field["name"], _type(field, arrow)) for field in fields])
        case {"dtype": name} | name:
            return arrow.type_for_alias(name)


def _row(image: Answered) -> dict[str, Any]:
    """No part of a name but the number, as the library takes names such as test/ or val-1.jpg for splits."""
    number, (width, height) = image.record.id, image.size
    lines = [(text, score, _box(*bounds_of(corners))) for text, score, corners in image.lines]
    objects = [(label, score, _box(*box)) for label, score, box in image.objects]
    return {
        "file_name": f"images/{number // IN_A_FOLDER}/{number}.{ending_of(image.record.format)}",
        "id": number,
        "path": image.name,
        "digest": image.digest,
        "width": width,
        "height": height,
        "bin": image.record.bin,
        "caption": image.caption,
        "text": image.page_text or "\n".join(text for text, _, _ in lines),
        "lines": _columns(("text", "score", "bbox"), lines),
        "objects": _columns(("category", "score", "bbox"), objects),
        "tags": _columns(("label", "score"), image.tags),
        "classes": _columns(("classifier", "label", "score"), image.classes),
        "labels": _columns(("kind", "origin"), image.origins.items()),
    }


def _box(x0: float, y0: float, x1: float, y1: float) -> list[float]:
    return [float(value) for value in (x0, y0, x1 - x0, y1 - y0)]


def _columns(names: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> dict[str, list[Any]]:
    rows = list(rows)
    return {name: [row[place] for row in rows] for place, name in enumerate(names)}


def _describe(count: int, labelled: int, seen: Mapping[str, set[str]], models: list[dict[str, Any]]) -> str:
    """seen: by column of TASKS, the labels in it."""
    size = SIZES[min(max(0, len(str(count)) - 3), len(SIZES) - 1)]
    known = [{name: value for name, value in model.items() if value} for model in models]
    people = f"People have labelled {labelled:,} of {count:,} images, see `labels`; no person has checked the other answers."
    features = {"image": {"dtype": "image"}} | FEATURES
    return CARD.format(  # JSON is YAML
        creators=_json(["machine-generated", *["other"] * bool(labelled)]),
        makers="the answers of models" + " and labels of people" * bool(labelled),
        people=people if labelled else "No person has checked these answers.",
        tasks=_json([*dict.fromkeys(task for column, task in TASKS.items() if seen[column])]),
        sizes=_json([size]),
        classes=_json({column: sorted(seen[column]) for column in ("objects", "tags", "classes")}),
        features=_json([{"name": name} | feature for name, feature in features.items()]),
        models=_json(known),
        table="\n".join(map(_table_row, known)),
    )


def _table_row(model: dict[str, Any]) -> str:
    name = model.get("repository") or model.get("name") or model["fingerprint"]
    cells = (model["stage"], name, model.get("commit", ""), model.get("license", ""))
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


_CONTROLS = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def _json(value: Any) -> str:
    """Also as YAML, which refuses these characters where JSON does not."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", msgspec.json.encode(value).decode())
