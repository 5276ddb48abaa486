"""Hugging Face: a folder that datasets.load_dataset("imagefolder", data_dir=FOLDER) reads
(https://huggingface.co/docs/datasets/image_dataset): links to the images, metadata.jsonl with a row for each, and a card."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from daemon.exports.answered import Answered
from daemon.exports.webdataset import ending_of
from daemon.ledger.record import Model, describe_models
from stages.ocr.descriptor import bounds_of

IN_A_FOLDER = 1000  # images; the hub takes up to 10,000
# By column.
TASKS = {"caption": "image-to-text", "objects": "object-detection", "tags": "image-classification"}
SIZES = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B")
CARD = """---
annotations_creators: {creators}
task_categories: {tasks}
size_categories: {sizes}
tags: ["visiond"]
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
| `labels` | what people say about this image, in place of the answer: kind (objects, tags, caption) and where that is from |

| stage | model | commit | license |
|---|---|---|---|
{table}
"""


def write_huggingface(folder: Path, images: Iterator[Answered]) -> None:
    """The first image with an object, the first one with a line and so on have the first rows: the library takes the types of
    all rows from the first ten megabytes, and an empty list has none."""
    count, labelled, models, seen = 0, 0, dict[Model, None](), set[str]()
    with (folder / "metadata.jsonl").open("wb") as out, tempfile.TemporaryFile(dir=folder) as waiting:
        for image in images:
            row = _row(image)
            link = folder / row["file_name"]
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(image.location)
            new = _filled(row) - seen
            (out if new else waiting).write(msgspec.json.encode(row) + b"\n")
            seen |= new
            models |= dict.fromkeys(image.record.models)
            count += 1
            labelled += bool(image.origins)
        waiting.seek(0)
        shutil.copyfileobj(waiting, out)
    card = _describe(count, labelled, seen, describe_models(models))
    (folder / "README.md").write_text(card, encoding="utf-8", newline="\n")


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
        "labels": _columns(("kind", "origin"), image.origins.items()),
    }


def _box(x0: float, y0: float, x1: float, y1: float) -> list[float]:
    return [float(value) for value in (x0, y0, x1 - x0, y1 - y0)]


def _columns(names: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> dict[str, list[Any]]:
    rows = list(rows)
    return {name: [row[place] for row in rows] for place, name in enumerate(names)}


def _filled(row: dict[str, Any]) -> set[str]:
    """The columns in which a row has something."""
    return {
        name
        for name, value in row.items()
        if value and not (isinstance(value, dict) and not any(value.values()))
    }


def _describe(count: int, labelled: int, filled: set[str], models: list[dict[str, Any]]) -> str:
    size = SIZES[min(max(0, len(str(count)) - 3), len(SIZES) - 1)]
    known = [{name: value for name, value in model.items() if value} for model in models]
    people = f"People have labelled {labelled:,} of {count:,} images, see `labels`; no person has checked the other answers."
    return CARD.format(  # JSON is YAML
        creators=_json(["machine-generated", *["other"] * bool(labelled)]),
        makers="the answers of models" + " and labels of people" * bool(labelled),
        people=people if labelled else "No person has checked these answers.",
        tasks=_json([task for column, task in TASKS.items() if column in filled]),
        sizes=_json([size]),
        models=_json(known),
        table="\n".join(map(_table_row, known)),
    )


def _table_row(model: dict[str, Any]) -> str:
    name = model.get("repository") or model.get("name") or model["fingerprint"]
    cells = (model["stage"], name, model.get("commit", ""), model.get("license", ""))
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
