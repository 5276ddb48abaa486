"""Labels in the forms in which annotation tools write them."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from daemon.core.errors import WrongArgument
from daemon.core.labels import Kind, ObjectLabel, Said
from daemon.labels.reading import read_labels

# As the converter of label-studio-sdk 2.1.2 writes COCO's boxes, and as a project exports a turned rectangle and an outline.
RECTANGLE = {
    "id": "57782aba48",
    "type": "rectanglelabels",
    "value": {"x": 10, "y": 20, "width": 30, "height": 40, "rotation": 0, "rectanglelabels": ["dog"]},
    "to_name": "image",
    "from_name": "label_rectangles",
    "image_rotation": 0,
    "original_width": 640,
    "original_height": 480,
}
LINE = {"original_width": 640, "original_height": 480, "to_name": "image", "id": "a"}


def read(path: Path) -> list[Said]:
    return [*read_labels(path, lambda why: None)]


def read_json(folder: Path, document: Any) -> list[Said]:
    (folder / "labels.json").write_text(json.dumps(document))
    return read(folder / "labels.json")


def task(*results: dict[str, Any], image: str = "/data/upload/3/1a2b3c4d-a%20b.jpg") -> dict[str, Any]:
    return {"id": 7, "data": {"image": image}, "annotations": [{"result": results}], "predictions": []}


def test_objects_of_coco_are_boxes_with_their_categories_and_an_image_without_any_has_none(
    tmp_path: Path,
) -> None:
    document = {
        "images": [
            {"id": 1, "file_name": "a.jpg", "width": 40, "height": 30},
            {"id": 2, "file_name": "b.jpg"},
        ],
        "categories": [{"id": 18, "name": "dog"}],
        "annotations": [
            {
                "id": 1,
                "image_id": 1,
                "category_id": 18,
                "bbox": [1, 2, 3, 4],
                "iscrowd": 0,
                "segmentation": {"counts": "x"},
            },
            {"id": 2, "image_id": 1, "category_id": 18, "segmentation": [[5, 6, 9, 6, 9, 9]], "iscrowd": 1},
        ],
    }
    objects = [ObjectLabel("dog", (1, 2, 4, 6)), ObjectLabel("dog", (5, 6, 9, 9), crowd=True)]
    assert read_json(tmp_path, document) == [
        Said("a.jpg", Kind.OBJECTS, objects, (40, 30), (40, 30)),
        Said("b.jpg", Kind.OBJECTS, []),
    ]


def test_an_image_of_coco_has_several_captions_and_the_lines_of_its_text(tmp_path: Path) -> None:
    images = [{"id": "x", "file_name": "a.jpg"}, {"id": "y", "file_name": "b.jpg"}]
    captions = [{"id": n, "image_id": "x", "caption": text} for n, text in enumerate(["A dog.", "One dog."])]
    lines = [
        {"id": n, "image_id": "x", "utf8_string": text, "bbox": [0, 0, 1, 1]} for n, text in enumerate("ab")
    ]
    assert read_json(tmp_path, {"images": images, "annotations": captions + lines}) == [
        Said("a.jpg", Kind.CAPTION, ["A dog.", "One dog."]),
        Said("a.jpg", Kind.TEXT, "a\nb"),
        Said("b.jpg", Kind.TEXT, ""),
    ]


def test_what_coco_says_without_a_box_or_of_no_category_is_counted_and_left_out(tmp_path: Path) -> None:
    annotations = [{"image_id": 1, "category_id": 1}, {"image_id": 1, "category_id": 2, "bbox": [0, 0, 1, 1]}]
    document = {"images": [{"id": 1, "file_name": "a.jpg"}], "categories": [{"id": 1, "name": "dog"}]}
    (tmp_path / "a.json").write_text(json.dumps(document | {"annotations": annotations}))
    left_out: Counter[str] = Counter()
    assert [*read_labels(tmp_path / "a.json", lambda why: left_out.update([why]))] == []
    assert [*left_out.values()] == [1, 1]


def test_a_rectangle_of_label_studio_is_in_percent_also_if_it_is_turned(tmp_path: Path) -> None:
    turned = RECTANGLE | {"value": RECTANGLE["value"] | {"rotation": 90, "width": 15, "height": 10}}  # type: ignore[operator]
    outline = {
        "type": "polygonlabels",
        "value": {"points": [[1, 2], [5, 3], [2, 9]], "polygonlabels": ["cat"]},
    }
    [said] = read_json(tmp_path, [task(RECTANGLE, turned, LINE | outline)])
    assert (said.name, said.kind, said.scale, said.size) == ("a b.jpg", Kind.OBJECTS, (100, 100), (640, 480))
    boxes = [(each.label, pytest.approx(each.box)) for each in said.value if isinstance(each, ObjectLabel)]
    # 96 × 48 pixels, turned by 90° around its corner: 48 to the left of it, 96 below
    assert boxes == [("dog", (10, 20, 40, 60)), ("dog", (2.5, 20, 10, 40)), ("cat", (1, 2, 5, 9))]


def test_of_a_task_the_last_annotation_counts_that_was_not_cancelled(tmp_path: Path) -> None:
    choices = [
        {
            "result": [{"type": "choices", "value": {"choices": [word]}, "from_name": "tags"}],
            "was_cancelled": gone,
        }
        for word, gone in (("first", False), ("last", False), ("cancelled", True))
    ]
    tasks = [{"data": {"image": "s3://b/a.jpg"}, "annotations": choices}, {"data": {"image": "b.jpg"}}]
    assert read_json(tmp_path, tasks) == [Said("s3://b/a.jpg", Kind.TAGS, ["last"], (100, 100))]


def test_texts_of_regions_are_lines_and_others_are_captions(tmp_path: Path) -> None:
    region = {"x": 1, "y": 2, "width": 3, "height": 4}
    results = [
        LINE | {"type": "rectangle", "value": region, "from_name": "line"},
        LINE | {"type": "textarea", "value": region | {"text": ["SALE"]}, "from_name": "text"},
        {"type": "textarea", "value": {"text": ["A shop."]}, "from_name": "caption"},
    ]
    name = "/data/local-files/?d=srv/in/a%20b.jpg"
    assert [(s.name, s.kind, s.value) for s in read_json(tmp_path, [task(*results, image=name)])] == [
        ("srv/in/a b.jpg", Kind.CAPTION, ["A shop."]),
        ("srv/in/a b.jpg", Kind.TEXT, "SALE"),
    ]


@pytest.mark.parametrize("names", ["names: [cat, dog]", "names:\n  0: cat\n  1: dog", "classes.txt"])
def test_a_folder_of_yolo_has_boxes_and_outlines_as_shares(tmp_path: Path, names: str) -> None:
    is_list = names == "classes.txt"
    (tmp_path / (names if is_list else "data.yaml")).write_text(
        "cat\ndog\n" if is_list else f"train: images\n{names}\n"
    )
    for name, text in (("train/a", "1 0.5 0.5 0.2 0.4\n0 0.1 0.1 0.3 0.1 0.3 0.2\n"), ("train/labels/b", "")):
        (tmp_path / "labels" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "labels" / f"{name}.txt").write_text(text)
    (tmp_path / "images" / "train").mkdir(parents=True)
    (tmp_path / "images" / "train" / "a.PNG").write_bytes(b"")
    first, second = read(tmp_path)
    assert (first.name, first.scale) == ("images/train/a.PNG", (1, 1))
    assert [(o.label, pytest.approx(o.box)) for o in first.value if isinstance(o, ObjectLabel)] == [
        ("dog", (0.4, 0.3, 0.6, 0.7)),
        ("cat", (0.1, 0.1, 0.3, 0.2)),
    ]
    assert second == Said("labels/train/images/b", Kind.OBJECTS, [], (1, 1))


def test_labels_of_yolo_may_lie_beside_their_images(tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_text("cat\n")
    (tmp_path / "a.txt").write_text("0 0.5 0.5 1 1\n")
    (tmp_path / "readme.txt").write_text("nothing to see\n")
    (tmp_path / "a.jpg").write_bytes(b"")
    assert read(tmp_path) == [Said("a.jpg", Kind.OBJECTS, [ObjectLabel("cat", (0, 0, 1, 1))], (1, 1))]


def test_cells_of_csv_are_labels_and_empty_ones_say_nothing(tmp_path: Path) -> None:
    rows = [
        {"Path": "a.jpg", "tags": "cat; dog", "caption": "'=a cat", "text": ""},
        {"Path": "b,.jpg", "tags": '["a;b"]', "caption": "", "text": "x" * 200_000},
    ]
    with (tmp_path / "a.csv").open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    assert read(tmp_path / "a.csv") == [
        Said("a.jpg", Kind.TAGS, ["cat", "dog"]),
        Said("a.jpg", Kind.CAPTION, ["=a cat"]),
        Said("b,.jpg", Kind.TAGS, ["a;b"]),
        Said("b,.jpg", Kind.TEXT, "x" * 200_000),
    ]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.json", '{"shapes": []}', "neither COCO .* nor an export of Label Studio"),
        ("a.json", '[{"image": "x", "label": []}]', "neither COCO .* missing required field `data`"),
        ("a.csv", "path,class\n", "needs a column that names the image .* It has path, class"),
        ("data.yaml", "train: images\n", "does not say what its classes are"),
        ("data.yaml", "names: [cat]\n", "class 7, and only 1 classes have names"),
        ("a.txt", "", "neither COCO"),
        ("missing.json", None, "cannot be read: No such file"),
        ("a.csv", "path,tags\n\udcff,x\n", "is not UTF-8"),
    ],
)
def test_a_file_that_is_something_else_is_refused_with_what_it_should_be(
    tmp_path: Path, name: str, text: str | None, expected: str
) -> None:
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "x.txt").write_text("7 0.5 0.5 1 1\n")
    if text is not None:
        (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(WrongArgument, match=expected):
        read(tmp_path / name)
