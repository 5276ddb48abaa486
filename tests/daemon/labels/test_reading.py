"""Labels in the forms in which annotation tools write them."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from daemon.core.errors import WrongArgument
from daemon.core.labels import Kind, ObjectLabel, Said
from daemon.labels.label_studio import LabelTask
from daemon.labels.reading import read_labels
from daemon.labels.saying import Exported
from daemon.labels.table import ANSWERS
from stages.scenes.generator import write_samples
from stages.scenes.truth import TRUTH, read_truth

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


def boxes_of(said: Said) -> list[tuple[str, object]]:
    return [(each.label, pytest.approx(each.box)) for each in said.value if isinstance(each, ObjectLabel)]


def read_json(folder: Path, document: Any) -> list[Said]:
    (folder / "labels.json").write_text(json.dumps(document))
    return read(folder / "labels.json")


def task(*results: object, image: str = "/data/upload/3/1a2b3c4d-a%20b.jpg") -> dict[str, Any]:
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
            {
                "id": 2,
                "image_id": "1",
                "category_id": 18.0,
                "segmentation": [[5, 6, 9, 6, 9, 9]],
                "iscrowd": True,
            },
        ],
    }
    objects = [ObjectLabel("dog", (1, 2, 4, 6)), ObjectLabel("dog", (5, 6, 9, 9), crowd=True)]
    assert read_json(tmp_path, document) == [
        Said("a.jpg", Kind.OBJECTS, objects, (40, 30), (40, 30)),
        Said("b.jpg", Kind.OBJECTS, []),
    ]


def test_an_image_of_coco_has_several_captions_and_the_lines_of_its_text_in_reading_order(
    tmp_path: Path,
) -> None:
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


@pytest.mark.parametrize(
    "annotation",
    [
        {"image_id": 1, "category_id": 1},
        {"image_id": 1, "category_id": 1, "segmentation": {"size": [9, 9], "counts": "04"}},
        {"image_id": 1, "category_id": 1, "segmentation": [1, 2, 3, 4]},
        {"image_id": 1, "category_id": 2, "bbox": [0, 0, 1, 1]},
    ],
)
def test_an_image_with_something_that_cannot_be_taken_is_not_one_without_objects(
    tmp_path: Path, annotation: dict[str, Any]
) -> None:
    document = {"images": [{"id": 1, "file_name": "a.jpg"}], "categories": [{"id": 1, "name": "dog"}]}
    whole = {"image_id": 1, "category_id": 1, "bbox": [0, 0, 1, 1]}
    left_out: Counter[str] = Counter()
    (tmp_path / "a.json").write_text(json.dumps(document | {"annotations": [whole, annotation, whole]}))
    assert [*read_labels(tmp_path / "a.json", lambda why: left_out.update([why]))] == []
    assert [*left_out.values()] == [1]


def test_a_file_without_categories_does_not_say_that_its_other_images_have_no_object(tmp_path: Path) -> None:
    images = [{"id": 1, "file_name": "a.jpg"}, {"id": 2, "file_name": "b.jpg"}]
    annotations = [{"image_id": 1, "category_id": 1, "bbox": [0, 0, 1, 1]}]
    assert read_json(tmp_path, {"images": images, "annotations": annotations}) == []


def test_annotations_of_an_image_that_is_not_listed_are_counted(tmp_path: Path) -> None:
    annotations = [{"image_id": 9, "category_id": 1, "bbox": [0, 0, 1, 1]}]
    document = {"images": [{"id": 1, "file_name": "a.jpg"}], "categories": [{"id": 1, "name": "dog"}]}
    left_out: Counter[str] = Counter()
    (tmp_path / "a.json").write_text(json.dumps(document | {"annotations": annotations}))
    assert [said.value for said in read_labels(tmp_path / "a.json", lambda why: left_out.update([why]))] == [
        []
    ]
    assert [*left_out] == ["images with annotations that the file does not list"]


def test_a_rectangle_of_label_studio_is_in_percent_also_if_it_is_turned(tmp_path: Path) -> None:
    turned = RECTANGLE | {"value": RECTANGLE["value"] | {"rotation": 90, "width": 15, "height": 10}}  # type: ignore[operator]
    outline = {
        "type": "polygonlabels",
        "value": {"points": [[1, 2], [5, 3], [2, 9]], "polygonlabels": ["cat"]},
    }
    [said] = read_json(tmp_path, [task(RECTANGLE, turned, LINE | outline)])
    assert (said.name, said.kind, said.scale, said.size) == ("a b.jpg", Kind.OBJECTS, (100, 100), (640, 480))
    # 96 × 48 pixels, turned by 90° around its corner: 48 to the left of it, 96 below
    assert boxes_of(said) == [("dog", (10, 20, 40, 60)), ("dog", (2.5, 20, 10, 40)), ("cat", (1, 2, 5, 9))]


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


def test_a_region_of_label_studio_may_have_its_labels_in_a_result_of_their_own(tmp_path: Path) -> None:
    """As the control Labels writes it; and a choice for the region says nothing of the image."""
    region = {"x": 1, "y": 2, "width": 3, "height": 4}
    results = [
        LINE | {"type": "rectangle", "value": region},
        LINE | {"type": "labels", "value": region | {"labels": ["dog"]}},
        LINE | {"type": "choices", "value": region | {"choices": ["occluded"]}},
        {"type": "relation", "from_id": "a", "to_id": "a", "direction": "right"},
    ]
    [said] = read_json(tmp_path, [task(*results)])
    assert (said.kind, said.value) == (Kind.OBJECTS, [ObjectLabel("dog", (1, 2, 4, 6))])


@pytest.mark.parametrize(
    "times",
    [[f"2026-11-{day}T10:00:00Z" for day in ("02", "09", "04")], [1604300000, 1604900000, 1604500000]],
)
def test_of_several_annotations_of_label_studio_the_one_that_was_changed_last_counts(
    tmp_path: Path, times: list[object]
) -> None:
    annotations = [
        {"result": [{"type": "choices", "value": {"choices": [name]}}], "updated_at": time}
        for name, time in zip(("cat", "dog", "owl"), times, strict=True)
    ]
    left_out: Counter[str] = Counter()
    (tmp_path / "a.json").write_text(json.dumps([{"data": {"image": "a.jpg"}, "annotations": annotations}]))
    [said] = read_labels(tmp_path / "a.json", lambda why: left_out.update([why]))
    assert said.value == ["dog"]
    assert left_out == {"annotations of tasks that have several: the one that was changed last counts": 2}


def test_an_image_with_a_mask_of_label_studio_is_not_one_without_objects(tmp_path: Path) -> None:
    mask = LINE | {"type": "brushlabels", "value": {"format": "rle", "rle": [1], "brushlabels": ["dog"]}}
    tasks = [task(RECTANGLE), task(mask, image="b.jpg"), task(image="c.jpg")]
    assert [(said.name, len(said.value)) for said in read_json(tmp_path, tasks)] == [
        ("a b.jpg", 1),
        ("c.jpg", 0),
    ]


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("https://x.org/upload/1.jpg?token=2", "upload/1.jpg"),
        ("/srv/upload/deadbeef-1.jpg", "/srv/upload/deadbeef-1.jpg"),
        ("s3://b/upload/deadbeef-1.jpg", "s3://b/upload/deadbeef-1.jpg"),
        ("/data/upload/3/deadbeef-1.jpg", "1.jpg"),
        ("/data/local-files/?d=in/%C3%BC.jpg", "in/ü.jpg"),
    ],
)
def test_the_address_of_a_task_becomes_the_name_of_a_file(tmp_path: Path, address: str, name: str) -> None:
    data = {"id": "abc", "image_url": address}
    [said] = read_json(
        tmp_path, [{"data": data, "completions": [{"result": [RECTANGLE]}], "annotations": None}]
    )
    assert said.name == name


@pytest.mark.parametrize(
    "line", ["0 100 200 30 40", "0 .5 .5 .2 .2 .9 17", "0 nan .5 .5 .5", "0 .5 .5 .2 .2 100 200 2"]
)
def test_an_image_of_yolo_with_lines_of_another_kind_is_not_labelled(tmp_path: Path, line: str) -> None:
    (tmp_path / "data.yaml").write_text("names: [cat]\n")
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "a.txt").write_text(f"0 0.5 0.5 1 1\n{line}\n")
    assert read(tmp_path) == []


def test_keypoints_of_yolo_stand_behind_the_box_and_names_are_texts(tmp_path: Path) -> None:
    (tmp_path / "args.yaml").write_text("epochs: 3\n")
    (tmp_path / "data.yaml").write_text("kpt_shape: [1, 3]\nnames: {'0': no}\n")
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "a.txt").write_text("0 0.5 0.5 1 1 0.1 0.1 2\n")
    assert [said.value for said in read(tmp_path)] == [[ObjectLabel("no", (0, 0, 1, 1))]]


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
    assert boxes_of(first) == [("dog", (0.4, 0.3, 0.6, 0.7)), ("cat", (0.1, 0.1, 0.3, 0.2))]
    assert second == Said("labels/train/images/b", Kind.OBJECTS, [], (1, 1))


@pytest.mark.parametrize(("score", "is_refused"), [(0.93, True), (1, False), (None, False), ("high", False)])
def test_answers_of_another_programs_model_are_no_labels_unless_people_have_corrected_them(
    tmp_path: Path, score: object, is_refused: bool
) -> None:
    box = {"image_id": 1, "category_id": 1, "bbox": [1, 1, 2, 2]} | (
        {} if score is None else {"score": score}
    )
    images = [{"id": 1, "file_name": "a.jpg"}]
    (tmp_path / "a.json").write_text(
        json.dumps({"images": images, "annotations": [box], "categories": [{"id": 1, "name": "cat"}]})
    )
    if is_refused:
        with pytest.raises(WrongArgument, match=r"has scores, .* type: visiond labels import --corrected"):
            read(tmp_path / "a.json")
    else:
        assert len(read(tmp_path / "a.json")) == 1
    assert len([*read_labels(tmp_path / "a.json", print, corrected=True)]) == 1


def test_a_folder_of_yolo_with_scores_has_answers_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "data.yaml").write_text("names: [cat]\n")
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "a.txt").write_text("0 0.5 0.5 1 1 0.93\n")
    with pytest.raises(WrongArgument, match=r"has scores, .* type: visiond labels import --corrected"):
        read(tmp_path)
    assert len([*read_labels(tmp_path, print, corrected=True)]) == 1


def test_classes_may_lie_among_the_labels_as_labelimg_writes_them(tmp_path: Path) -> None:
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "classes.txt").write_text("\ufeffcat \n")
    (tmp_path / "labels" / "a.txt").write_text("0 0.5 0.5 1 1\n")
    for path in (tmp_path, tmp_path / "labels", tmp_path / "labels" / "classes.txt"):
        assert read(path) == [Said("images/a", Kind.OBJECTS, [ObjectLabel("cat", (0, 0, 1, 1))], (1, 1))]


def test_labels_of_yolo_may_lie_beside_their_images(tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_text("cat\n")
    (tmp_path / "a.txt").write_text("0 0.5 0.5 1 1\n")
    (tmp_path / "readme.txt").write_text("nothing to see\n")
    (tmp_path / "a.jpg").write_bytes(b"")
    (tmp_path / "a.json").write_bytes(b"")
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
    ("text", "encoding"),
    [
        ("path;tags;caption\na.jpg;['cat', 'b'];x\n", "utf-8"),
        ("path\ttags\na.jpg\tcat, b", "utf-16"),
        ("File Name|TAGS\na.jpg|cat, b", "utf-8"),
    ],
)
def test_csv_of_excel_and_of_pandas_is_read_too(tmp_path: Path, text: str, encoding: str) -> None:
    (tmp_path / "a.csv").write_text(text, encoding)
    assert read(tmp_path / "a.csv")[0] == Said("a.jpg", Kind.TAGS, ["cat", "b"])


def test_what_samples_show_is_read_as_labels_of_every_kind(tmp_path: Path) -> None:
    write_samples(tmp_path, 12, 1)
    said = list(read_labels(tmp_path / TRUTH, print))
    by_image = {(each.name, each.kind): each for each in said}
    truths = read_truth(tmp_path / TRUTH)
    assert len(said) == len(by_image) == 12 * len([*Kind][:-1])  # all but classes
    assert any(truth.lines for truth in truths)
    for truth in truths:
        size = (truth.width, truth.height)
        objects = [ObjectLabel(each.label, each.box) for each in truth.objects]
        assert by_image[truth.file, Kind.OBJECTS] == Said(truth.file, Kind.OBJECTS, objects, size, size)
        assert by_image[truth.file, Kind.TAGS].value == truth.tags
        assert by_image[truth.file, Kind.CAPTION].value == truth.captions
        text = by_image[truth.file, Kind.TEXT].value
        assert isinstance(text, str)
        assert sorted(text.splitlines()) == sorted(line.text for line in truth.lines)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.json", '{"shapes": []}', "neither COCO .* nor an export of Label Studio"),
        ("a.json", '[{"image": "x", "label": []}]', "neither COCO .* missing required field `data`"),
        ("a.jsonl", '{"path": "a.jpg"}\n', "is not the .truth.jsonl of `visiond samples`"),
        (
            "a.csv",
            "path,class\n",
            "needs a column that names the image .* It has path, class.* Write these names",
        ),
        ("a.csv", "image,id,label,annotator,annotation_id\n", "Export JSON from Label Studio"),
        ("data.yaml", "train: images\n", "does not say what its classes are"),
        ("data.yaml", "names: [cat]\n", "class 7, and only 1 classes have names"),
        ("a.zip", "PK\3\4", "neither COCO .* It is a zip file: unpack it"),
        ("a.json", "[" * 200_000, "neither COCO"),
        ("a.csv", "path,tags,clip_similarity\n", "has answers of models"),
        ("a.csv", "path,tags\na.jpg,[cat\n", "line 2"),
        ("a.csv", 'path,caption\na.jpg,"never ends\n', "unexpected end of data"),
        (
            "visiond.json",
            '{"files": ["visiond.json"]}',
            "has answers of models, .* type: visiond labels import --corrected",
        ),
        ("0-a.txt", "0 0.5 0.5 1 1", "is a part of a data set of YOLO"),
        ("a.csv", "path,tags\na.jpg,car,moon\n", "line 2: it has more cells than the header"),
        ("missing.json", None, "cannot be read: No such file"),
        ("a.csv", "path,tags\n\udcff,x\n", "is not UTF-8.* type: iconv -f cp1252 -t utf-8 .*a.csv > new.csv"),
        ("a.csv", "path,tags\n" + "a.jpg,x\n" * 9_000 + "\udcff,x\n", "is not UTF-8.* type: iconv"),
        ("a.csv", "path,caption,Caption\na.jpg,x,y\n", "several columns called caption"),
        ("a.csv", "path,path,tags\na.jpg,b.jpg,x\n", "several columns called path"),
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


def test_corrections_in_the_answers_of_an_exported_table_are_counted(tmp_path: Path) -> None:
    label = json.dumps({"tags": {"value": ["cat"], "origin": "me"}}).replace('"', '""')
    (tmp_path / "a.csv").write_text(
        f'digest,tags,caption,clip_similarity,labels\nsha256:0,"[""dog""]",corrected,0.3,"{label}"\n'
    )
    left_out = Counter[str]()
    said = [*read_labels(tmp_path / "a.csv", lambda why: left_out.update([why]))]
    assert [(each.kind, each.value) for each in said] == [(Kind.TAGS, ["cat"])]
    assert list(left_out.items()) == [(ANSWERS, 1)]


def test_meta_that_is_not_of_visiond_is_passed_over() -> None:
    for meta in ("words", [1], {"visiond": 3}, None):
        task = msgspec.convert({"data": {"image": "a.jpg"}, "meta": meta}, LabelTask)
        assert task.about == Exported()
