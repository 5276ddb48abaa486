"""What a reader of a format should find, by the ledger, and where that is not what it finds (reading.py)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from daemon.exports.answered import CONTROLS, Answered
from daemon.exports.columns import ExportColumns
from daemon.exports.pages import PAGES
from daemon.exports.parquet import cells_of, vector_of
from daemon.exports.webdataset import ending_of
from stages.ocr.descriptor import bounds_of
from tests.daemon.exports import reading

# How much a number may differ, as the format has so many digits.
TOLERANCES = {"yolo": 1e-6, "label-studio": 1e-9, "cvat": 5.1e-3, "hocr": 0.51, "alto": 1.01}


Name = Callable[[Answered], str]


class Comparison(NamedTuple):
    """version: of the reader. differences: the first names that are missing or too many, or whose rows differ."""

    version: str
    images: int
    differences: list[str]


def is_installed(format: str) -> bool:
    library, _, environment = reading.READERS[format]
    if library == "exiftool":
        return shutil.which(library) is not None
    module = {"pylance": "lance", "python": "csv"}.get(library, library)
    return _python(environment).exists() if environment else find_spec(module) is not None


def _python(environment: str) -> Path:
    return Path(sys.prefix, environment, "bin", "python")


def compare(
    format: str, target: Path, images: Iterable[Answered], inbox: Path, name: Name | None = None
) -> Comparison:
    """target: an export of these images in this format. inbox: the folder with the images. name: what it calls an image, if
    not as an export does."""
    python = _python(reading.READERS[format].environment)
    command = [str(each) for each in (python, reading.__file__, format, target)]
    told = subprocess.run(command, cwd=inbox, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    said = json.loads(told.stdout)
    wanted = json.loads(json.dumps(dict(_expect(format, images, name)), default=str))
    rows = {str(name): row for name, row in said["rows"]}
    differences = sorted(rows.keys() ^ wanted.keys())
    differences += [
        f"{name}: {rows[name]} instead of {row}"
        for name, row in wanted.items()
        if name in rows and not _is_same(rows[name], row, TOLERANCES.get(format, 0))
    ]
    assert len(rows) == len(said["rows"]), "an image comes twice"
    return Comparison(said["version"], len(rows), differences)


def _is_same(found: Any, wanted: Any, tolerance: float) -> bool:
    match found, wanted:
        case list(), list():
            pairs = zip(found, wanted, strict=False)
            return len(found) == len(wanted) and all(_is_same(*pair, tolerance) for pair in pairs)
        case dict(), dict():
            return found.keys() == wanted.keys() and all(
                _is_same(each, wanted[key], tolerance) for key, each in found.items()
            )
        case bool() | str() | None, _:
            return bool(found == wanted)
    return isinstance(wanted, int | float) and abs(found - wanted) <= tolerance


def _expect(format: str, images: Iterable[Answered], named: Name | None) -> Iterator[tuple[str, Any]]:
    """By the name that the reader has for an image, its row."""
    taken = set[str]()
    for image in images:
        row = EXPECTED[format](image)
        name = named(image) if named else _name(format, image)
        if page := PAGES.get(format):
            if name in taken:
                name = image.own_name(page.suffix).name
            taken.add(name)
        if row is not None:
            yield name, row


def _name(format: str, image: Answered) -> str:
    if page := PAGES.get(format):
        path = Path(image.name)
        return str(path.with_suffix(page.suffix) if page.replaces else f"{path}{page.suffix}")
    if format in ("csv", "jsonl", "parquet", "lance"):
        return str(image.record.id)
    return {
        "yolo": str(image.own_name(f".{ending_of(image.record.format)}")),
        "cvat": str(Path(image.name).with_suffix("")),
        "webdataset": str(image.own_name("")),
    }.get(format, image.name)


def _row(image: Answered) -> dict[str, Any]:
    return ExportColumns((m.stage for m in image.record.models), models=True).row_of(image.record)


def _csv(image: Answered) -> dict[str, str]:
    def cell(value: Any) -> str:
        return msgspec.json.encode(value).decode() if isinstance(value, list | dict) else str(value)

    return {key: "" if value is None else cell(value) for key, value in _row(image).items()}


def _parquet(image: Answered) -> dict[str, Any]:
    vector = vector_of(image.document)
    embedding = None if vector is None else vector.tolist()
    return cells_of(_row(image), image.document) | {"embedding": embedding}


def _coco(image: Answered) -> dict[str, Any]:
    return {
        "size": image.size,
        "objects": [[label, score, _corner_and_size(box)] for label, score, box in image.objects],
        "captions": image.captioned,
        "lines": [
            [text, score, [[*chain.from_iterable(corners)]], True] for text, score, corners in image.lines
        ],
    }


def _corner_and_size(box: Iterable[float]) -> list[float]:
    x0, y0, x1, y1 = box
    return [x0, y0, x1 - x0, y1 - y0]


def _yolo(image: Answered) -> list[Any]:
    width, height = image.size
    return [
        [label, (x0 + x1) / 2 / width, (y0 + y1) / 2 / height, (x1 - x0) / width, (y1 - y0) / height]
        for label, _, (x0, y0, x1, y1) in image.objects
    ]


def _label_studio(image: Answered) -> dict[str, Any]:
    def percent(box: Iterable[float]) -> list[float]:
        return [100 * each / of for each, of in zip(_corner_and_size(box), image.size * 2, strict=True)]

    lines = [(text, percent(bounds_of(corners)), score) for text, score, corners in image.lines]
    said = {
        "objects": [[label, *percent(box), score] for label, score, box in image.objects],
        "line": [[*box, score] for _, box, score in lines],
        "text": [[text, *box, score] for text, box, score in lines],
        "caption": [[*image.captions, None]] * bool(image.captions),
        "tags": [[*(label for label, _ in image.tags), None]] * bool(image.tags),
        **{stage: [[label, score]] for stage, label, score in image.classes},
    }
    return {"wrong": []} | {key: rows for key, rows in said.items() if rows}


def _cvat(image: Answered) -> dict[str, Any]:
    tags = [[label, [], {"score": f"{score:.3f}"}] for label, score in image.tags]
    tags += [
        [label, [], {"classifier": stage, "score": f"{score:.3f}"}] for stage, label, score in image.classes
    ]
    return {
        "size": image.size,
        "bbox": [[label, box, {"score": f"{score:.3f}"}] for label, score, box in image.objects],
        "polygon": [
            ["text", [*chain.from_iterable(corners)], {"text": _printed(text), "score": f"{score:.3f}"}]
            for text, score, corners in image.lines
        ],
        "label": tags + [["caption", [], {"text": caption}] for caption in image.captions],
    }


def _printed(text: str) -> str:
    """Without what XML does not have."""
    return text.translate(CONTROLS)


def _huggingface(image: Answered) -> dict[str, Any]:
    def columns(names: str, rows: Iterable[tuple[Any, ...]]) -> dict[str, list[Any]]:
        rows = list(rows)
        return {name: [row[place] for row in rows] for place, name in enumerate(names.split())}

    record, (width, height) = image.record, image.size
    lines = [(text, score, _corner_and_size(bounds_of(box))) for text, score, box in image.lines]
    return {
        **{"image": image.size, "id": record.id, "width": width, "height": height, "path": image.name},
        **{"digest": f"sha256:{record.digest.hex()}", "bin": record.bin, "caption": image.caption},
        "text": "\n".join(text for text, _, _ in lines),
        "lines": columns("text score bbox", lines),
        "objects": columns("category score bbox", [(n, s, _corner_and_size(b)) for n, s, b in image.objects]),
        "tags": columns("label score", image.tags),
        "classes": columns("classifier label score", image.classes),
        "labels": columns("kind origin", image.origins.items()),
    }


def _webdataset(image: Answered) -> dict[str, Any]:
    document = msgspec.json.decode(image.record.sidecar)
    return {"image": image.record.digest.hex(), "caption": image.caption, "sidecar": document}


def _hocr(image: Answered) -> dict[str, Any]:
    lines = [[bounds_of(corners), [[_printed(text), 100 * score]]] for text, score, corners in image.lines]
    return {"size": image.size, "lines": lines}


def _alto(image: Answered) -> dict[str, Any]:
    lines = [
        [_printed(text).replace("\t", " "), score, _corner_and_size(bounds_of(corners))]
        for text, score, corners in image.lines
    ]
    return {"wrong": [], "size": image.size, "lines": lines}


def _xmp(image: Answered) -> dict[str, Any]:
    classes = [f"{stage.removeprefix('classifier_')}: {label}" for stage, label, _ in image.classes]
    labels = [label for label, *_ in (*image.objects, *image.tags)] + classes
    return {"caption": image.caption, "labels": list(dict.fromkeys(labels))}


EXPECTED: Mapping[str, Any] = {
    "csv": _csv,
    "jsonl": lambda image: image.document,
    "parquet": _parquet,
    "lance": _parquet,
    "coco": _coco,
    "yolo": _yolo,
    "label-studio": _label_studio,
    "cvat": _cvat,
    "huggingface": _huggingface,
    "webdataset": _webdataset,
    "captions": lambda image: f"{image.caption}\n" if image.caption else None,
    "hocr": _hocr,
    "alto": _alto,
    "xmp": _xmp,
    "xmp-adobe": _xmp,
}
