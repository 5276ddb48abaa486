"""Each format is read by the program that it is for, and what that reads is compared with the ledger."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
import tarfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, get_args
from xml.etree import ElementTree

import msgspec
import pyarrow.parquet
import pytest
import yaml
from PIL import Image

from daemon.core.labels import Kind, Label, ObjectLabel
from daemon.core.messages import Output
from daemon.exports import huggingface
from daemon.exports.answered import Answered, ImageAnswers
from daemon.exports.columns import ExportColumns
from daemon.exports.datasets import name_images, name_inboxes, write_images
from daemon.exports.export import FILES
from daemon.exports.formats import FOLDERS
from daemon.ledger.record import Record
from daemon.terminal.options import Format
from daemon.unpacking.kinds import SUFFIXES
from stages.contract.base import UNFAMILIAR
from tests.daemon.exports.comparing import compare, is_installed
from tests.daemon.exports.reading import READERS
from tests.makers import make_outputs, make_record

WITH_FILES = ("captions", "hocr", "alto", "xmp", "xmp-adobe", "yolo", "webdataset")  # for each image
# Labels, texts and names that JSON, YAML, XML, HTML or a path could misread.
LABELS = ["cat", "traffic light", 'a "big" dog', "yes", "1", "<b>&amp;", "ключ: №", "- dash"]
TEXTS = ["Total: 12,50 €", "<script>1 & 2</script>", "\u200fשלום", "bell\x07 tab\t end", "日本語の行"]
NAMES = ["a.jpg", "images/b c.jpg", "images/ü#1.jpg", "images/b c.png", "x.y.z.jpeg"]


def answers(number: int) -> dict[str, Output]:
    """Of one image: each has other labels and lines."""
    labels = [LABELS[(number + step) % len(LABELS)] for step in range(number % 4)]
    detections = [
        {"label": label, "score": 0.9 - place / 10, "box": [-3.5 + 7 * place, 10.25, 200 + place, 480.5]}
        for place, label in enumerate(labels)
    ]
    lines = [
        {"text": text, "score": 0.95, "box": [[5, 6], [105.4, 8], [104, 30.6], [4, 28]]}
        for text in TEXTS[: number % 6]
    ] + [{"text": "gu3ss", "score": 0.95, "box": [[0, 0]] * 4, "guessed": True}]
    given: dict[str, Any] = {
        "yolo": {"detections": detections, "count": len(labels), "unique": len(labels), "dispersion": 0.0},
        "ocr": {"lines": lines, "count": len(lines), "area_ratio": 0.1},
    }
    if number % 5 == 2:
        given["classifier_safety"] = {"label": "s&fe", "score": 0.75, "scores": {"s&fe": 0.75, "nsfw": 0.25}}
        given["blip_long"] = {"text": f"a long caption {number}", "similarity": 0.5, "truncated": False}
    return make_outputs(number % 4) | {n: Output(msgspec.json.encode(a), 0.1) for n, a in given.items()}


@pytest.fixture
def records(tmp_path: Path) -> list[Record]:
    """Of images that are there."""
    found = []
    for number, name in enumerate(NAMES * 4):
        path = name.encode() if number < len(NAMES) else f"{number}/{name}".encode()
        buffer = io.BytesIO()
        kind = "PNG" if "png" in name else "JPEG"
        Image.new("RGB", (640, 480), (number, 90, 120)).save(buffer, kind)
        outputs = answers(number)
        found.append(
            make_record(tmp_path / "in", path, buffer.getvalue(), id=number + 1, outputs=outputs, format=kind)
        )
    return found


@pytest.fixture
def images(records: list[Record]) -> list[Answered]:
    return named(records)


def named(records: list[Record], inboxes: dict[bytes, str] | None = None) -> list[Answered]:
    return list(name_images(records, inboxes or {}, []))


def write(folder: Path, format: str, images: list[Answered]) -> Path:
    folder.mkdir()
    FOLDERS[format](folder, iter(images))
    return folder


def test_the_command_has_every_format() -> None:
    assert [*get_args(Format)] == [*FILES, "lance", *FOLDERS]


def test_the_main_caption_is_the_first_and_what_a_pack_does_not_know_is_none() -> None:
    said: dict[str, Any] = {"text": UNFAMILIAR, "similarity": None}
    further = {"text": "a red bicycle", "similarity": 0.3}
    known = {"text": "a bicycle", "similarity": 0.2}
    clip = {"clip": {"tags": [{"label": "bicycle", "score": 0.9}]}}
    for document, captions in (
        ({"caption": known, "blip_a": further}, ["a bicycle", "a red bicycle"]),
        ({"caption": known, "blip_a": said}, ["a bicycle"]),
        ({"blip_a": further}, ["a red bicycle"]),
        ({"blip_a": further | {"similarity": None}}, ["a red bicycle"]),
        ({"caption": said, "blip_a": further}, ["a red bicycle"]),
        ({"blip_a": said, "classifier_a": {}}, []),
    ):
        answers = ImageAnswers(clip | document, (640, 480))
        assert (answers.captions, answers.caption) == (captions, (captions or [""])[0])
        assert bool(answers.tags) == (document.get("caption") != said), (
            "a further captioner says nothing of CLIP"
        )


@pytest.mark.parametrize("format", FOLDERS)
def test_the_reader_of_a_format_finds_what_the_ledger_has(
    tmp_path: Path, images: list[Answered], format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_installed(format):
        pytest.skip(f"{READERS[format].library} is not installed: make tools")
    monkeypatch.setattr("daemon.exports.webdataset.SHARD_IMAGES", 8)
    if format == "cvat":  # its names have no suffix for datumaro
        images = [image for image in images if image.record.format != "PNG"]
    folder = write(tmp_path / "export", format, images)
    found = compare(format, folder, images, tmp_path / "in")
    assert (found.images, found.differences) == (len(images), [])
    # Those of another image are noticed.
    images[3].document["caption"] = {"text": "another", "similarity": 0.1}
    images[3].__dict__.update(objects=[], lines=[])
    assert len(compare(format, folder, images, tmp_path / "in").differences) == 1


def test_answers_held_against_themselves_are_all_right_by_coco(
    tmp_path: Path, images: list[Answered]
) -> None:
    coco = pytest.importorskip("pycocotools.coco", reason="pycocotools is not installed: make tools")
    from pycocotools.cocoeval import COCOeval

    file = write(tmp_path / "coco", "coco", images) / "instances.json"
    with redirect_stdout(io.StringIO()):
        truth = coco.COCO(file)
        scores = COCOeval(truth, truth.loadRes(json.loads(file.read_text())["annotations"]), "bbox")
        scores.evaluate()
        scores.accumulate()
        scores.summarize()
    assert scores.stats[0] == pytest.approx(1.0)


def test_a_jpeg_that_ultralytics_may_write_anew_is_a_copy_and_others_are_links(tmp_path: Path) -> None:
    """It writes those with bytes behind their end marker, as phones make them; older versions do so through a link."""
    buffer = io.BytesIO()
    Image.new("RGB", (64, 48), (200, 90, 120)).save(buffer, "JPEG")
    bytes_of = {"plain.jpg": buffer.getvalue(), "phone.jpg": buffer.getvalue() + b"SEFT trailer"}
    found = [
        make_record(tmp_path / "in", name.encode(), content, id=number)
        for number, (name, content) in enumerate(bytes_of.items())
    ]
    folder = write(tmp_path / "yolo", "yolo", named(found))
    made = {file.name: file for file in folder.rglob("*.jpg")}
    known = {f"{Path(name).stem}-{number}.jpg": data for number, (name, data) in enumerate(bytes_of.items())}
    assert {name: file.read_bytes() for name, file in made.items()} == known
    assert {name for name, file in made.items() if file.is_symlink()} == {"plain-0.jpg"}


def test_equal_files_are_on_one_side_of_a_yolo_data_set(tmp_path: Path) -> None:
    twins = [
        make_record(tmp_path, b"%d.jpg" % n, b"%d" % (n // 2), id=n + 1, format="PNG") for n in range(200)
    ]
    folder = write(tmp_path / "yolo", "yolo", named(twins))
    sides = {
        part: {int(file.stem.partition("-")[0]) // 2 for file in (folder / "images" / part).iterdir()}
        for part in ("train", "val")
    }
    assert not sides["train"] & sides["val"]
    assert 3 <= len(sides["val"]) <= 25, "a tenth of 100"


def test_an_image_from_a_tar_keeps_the_key_that_it_had_there(tmp_path: Path) -> None:
    """In a shard no two images have one."""
    tars = [f"a{suffix.decode()}.unpacked" for suffix in SUFFIXES["tar"]]
    names = [f"{tars[0]}/sub/0001.jpg", f"{tars[1]}/sub/0002.left.jpg", f"{tars[1]}/sub/0002.right.jpg"]
    names += [f"x/{each}/{n}.jpg" for n, each in enumerate(tars[2:])] + [
        f"{tars[0]}/.jpg",
        f"{tars[-1]}/0.jpg",
    ]
    names += ["a.zip.unpacked/3.jpg", "0.jpg"]
    found = [make_record(tmp_path, n.encode(), b"%d" % i, id=i) for i, n in enumerate(names, 101)]
    folder = write(tmp_path / "shards", "webdataset", named(found))
    with tarfile.open(folder / "shard-000000.tar") as tar:
        keys = [each.removesuffix(".json") for each in tar.getnames() if each.endswith(".json")]
    assert keys[:3] == ["sub/0001", "sub/0002", "sub/0002-103"]
    assert keys[3:] == [*"01234", "109", "0-110", "a.zip.unpacked/3-111", "0-112"]


def test_webdataset_leaves_out_a_file_whose_bytes_have_changed(tmp_path: Path) -> None:
    found = [make_record(tmp_path, b"%d.jpg" % number, b"%d" % number, id=number) for number in (1, 2)]
    (tmp_path / "2.jpg").write_bytes(b"3")
    left_out: list[str] = []
    write(tmp_path / "shards", "webdataset", list(name_images(found, {}, left_out)))
    with tarfile.open(tmp_path / "shards" / "shard-000000.tar") as tar:
        assert {member.partition(".")[0] for member in tar.getnames()} == {"1-1"}
    assert left_out == [str(tmp_path / "2.jpg")]


def test_a_task_of_label_studio_has_each_answer_in_percent(tmp_path: Path, images: list[Answered]) -> None:
    [task] = json.loads((write(tmp_path / "t", "label-studio", images[3:4]) / "tasks.json").read_text())
    [prediction] = task["predictions"]
    kinds = [result["type"] for result in prediction["result"]]
    assert kinds == ["rectanglelabels"] * 3 + ["rectangle", "textarea"] * 3 + ["textarea", "choices"]
    first = prediction["result"][1]["value"]
    assert first == {
        "x": 100 * 3.5 / 640,
        "y": 100 * 10.25 / 480,
        "width": 100 * 197.5 / 640,
        "height": 100 * 469.75 / 480,
        "rotation": 0,
        "rectanglelabels": ["1"],
    }
    line, text = prediction["result"][3:5]
    assert (line["id"], text["value"]["text"]) == (text["id"], [TEXTS[0]])
    assert "score" not in prediction
    assert "disagreement" not in task["meta"]["visiond"]
    assert task["data"]["image"] == f"/data/local-files/?d={str(tmp_path).lstrip('/')}/in/images/b%20c.png"


def printed(image: Answered) -> list[str]:
    """Its lines without what XML does not have."""
    return [text.replace("\x07", "") for text, _, _ in image.lines]


def test_hocr_and_alto_have_each_line_with_its_box(tmp_path: Path, images: list[Answered]) -> None:
    hocr, alto = write(tmp_path / "hocr", "hocr", images), write(tmp_path / "alto", "alto", images)
    for image in images:
        root = ElementTree.parse(hocr / f"{image.name}.hocr").getroot()
        words = [(each.get("title"), each.text) for each in root.iterfind(".//*[@class='ocrx_word']")]
        assert words == [("bbox 4 6 105 31; x_wconf 95", text) for text in printed(image)]
        root = ElementTree.parse(alto / f"{image.name}.alto.xml").getroot()
        strings = root.iterfind(".//{http://www.loc.gov/standards/alto/ns-v4#}String")
        found = [(each.get("CONTENT"), each.get("HPOS"), each.get("WIDTH")) for each in strings]
        assert found == [(text.replace("\t", " "), "4", "101") for text in printed(image)]


def test_cvat_has_each_object_line_tag_and_caption_with_its_label(
    tmp_path: Path, images: list[Answered]
) -> None:
    folder = write(tmp_path / "cvat", "cvat", images)
    root = ElementTree.parse(folder / "annotations.xml").getroot()
    assert (root.findtext("version"), root.findtext("meta/task/size")) == ("1.1", str(len(images)))
    labels = {each.findtext("name"): each for each in root.iterfind("meta/task/labels/label")}
    described = {each["name"]: each for each in json.loads((folder / "labels.json").read_text())}
    assert [*described] == [*labels]
    for image, found in zip(images, root.iterfind("image"), strict=True):
        assert (found.get("id"), found.get("name"), found.get("width"), found.get("height")) == (
            str(image.record.id),
            image.name,
            "640",
            "480",
        )
        boxes = [
            (each.get("label"), *(float(each.attrib[key]) for key in ("xtl", "ytl", "xbr", "ybr")))
            for each in found.iterfind("box")
        ]
        assert boxes == [(label, *box) for label, _, box in image.objects]
        lines = [
            (each.findtext("attribute[@name='text']"), each.get("points"))
            for each in found.iterfind("polygon")
        ]
        assert lines == [(text, "5.00,6.00;105.40,8.00;104.00,30.60;4.00,28.00") for text in printed(image)]
        tags = [
            (each.get("label"), each.findtext("attribute[@name='score']")) for each in found.iterfind("tag")
        ]
        caption = [("caption", None)] * len(image.captions)
        scored = [*image.tags, *((label, score) for _, label, score in image.classes)]
        assert tags == [(label, f"{score:.3f}") for label, score in scored] + caption
        assert (found.findtext("tag[@label='caption']/attribute") or "") == image.caption
        for shape in [each for each in found if each.tag in ("box", "polygon", "tag")]:
            known = {
                each.findtext("name") for each in labels[shape.get("label")].iterfind("attributes/attribute")
            }
            assert {each.get("name") for each in shape.iterfind("attribute")} <= known
            assert known == {each["name"] for each in described[str(shape.get("label"))]["attributes"]}
    assert sum(len(image.objects) for image in images) > 20


def test_no_name_of_an_image_makes_a_split_of_a_hugging_face_data_set(tmp_path: Path) -> None:
    names = (b"test/a.jpg", b"val-1.jpg", b"train/metadata.jsonl.jpg")
    found = [make_record(tmp_path / "in", name, name, id=number) for number, name in enumerate(names)]
    folder = write(tmp_path / "huggingface", "huggingface", named(found))
    assert sorted(str(file.relative_to(folder)) for file in folder.rglob("*.*")) == [
        "README.md",
        *(f"images/0/{number}.jpg" for number in range(3)),
        "metadata.parquet",
    ]


def test_the_types_for_hugging_face_are_those_of_the_card_whatever_the_images_have(
    tmp_path: Path, images: list[Answered]
) -> None:
    folders = [
        write(tmp_path / name, "huggingface", of)
        for name, of in (("a", images), ("b", images[:1]), ("c", []))
    ]
    first, *others = [pyarrow.parquet.read_schema(folder / "metadata.parquet") for folder in folders]
    assert all(other.equals(first) for other in others)
    assert str(first.field("objects").type) == (
        "struct<category: list<element: string>, score: list<element: double>, bbox: list<element: list<element: double>>>"
    )
    heads = [yaml.safe_load((folder / "README.md").read_text().split("---\n")[1]) for folder in folders]
    [image, *columns] = heads[0]["dataset_info"]["features"]
    assert image == {"name": "image", "dtype": "image"}
    assert ["file_name", *(column["name"] for column in columns)] == first.names
    assert all(head["dataset_info"] == heads[0]["dataset_info"] for head in heads)
    assert heads[0]["classes"] == {
        "objects": sorted({label for image in images for label, _, _ in image.objects}),
        "tags": sorted({label for image in images for label, _ in image.tags}),
        "classes": ["s&fe"],
    }


def test_the_card_for_hugging_face_names_the_tasks_and_the_models_with_their_commits(
    tmp_path: Path, images: list[Answered]
) -> None:
    [_, header, body] = (
        (write(tmp_path / "h", "huggingface", images) / "README.md").read_text().split("---\n")
    )
    card = yaml.safe_load(header)
    assert card["task_categories"] == ["image-to-text", "object-detection", "image-classification"]
    assert card["size_categories"] == ["n<1K"]
    assert "license" not in card
    models = {model["stage"]: (model["name"], model["commit"]) for model in card["models"]}
    assert models == {
        model.stage: (f"{model.stage}-small", "0123456789ab") for model in images[0].record.models
    }
    assert "| clip | clip-small | 0123456789ab |" in body
    [_, header, _] = (write(tmp_path / "e", "huggingface", []) / "README.md").read_text().split("---\n")
    assert yaml.safe_load(header)["task_categories"] == []


def test_the_text_of_a_page_reader_is_in_hocr_and_alto_without_boxes(tmp_path: Path) -> None:
    payload = b'{"lines":[],"count":0,"area_ratio":0.0,"text":"# Bill\\n\\nTotal <5>"}'
    record = make_record(tmp_path, outputs=make_outputs() | {"ocr": Output(payload, 0.25)})
    [image] = named([record])
    for format in ("hocr", "alto"):
        [file] = write(tmp_path / format, format, [image]).iterdir()
        assert "# Bill" in file.read_text()
        assert "Total &lt;5&gt;" in file.read_text()
        ElementTree.parse(file)


def test_captions_are_named_as_trainers_want_them_and_none_replaces_another(
    tmp_path: Path, images: list[Answered]
) -> None:
    folder = write(tmp_path / "captions", "captions", images)
    assert (folder / "images" / "b c.txt").read_text() == f"{images[1].caption}\n"
    assert (folder / "b c-4.txt").read_text() == f"{images[3].caption}\n"
    assert len(list(folder.rglob("*.txt"))) == len(images)


# Names and folders


def test_no_image_takes_the_file_of_another_whatever_they_are_called(tmp_path: Path) -> None:
    names = ["a-3.jpg", "a.jpg", "a.jpg", "a.png", "a.png.jpg", "a.b.jpg", "a_b.jpg", "a.txt/b.jpg", "A.JPG"]
    names += ["a.jpg.xmp/c.jpg", f"{'n' * 251}.jpg", f"{'ü' * 125}.jpg", "\udcff.jpg"]
    found = [
        make_record(tmp_path / str(number), os.fsencode(name), b"\xff\xd9", id=number)
        for number, name in enumerate(names, 1)
    ]
    for format in WITH_FILES:
        folder = write(tmp_path / format, format, named(found))
        kinds = (".txt", ".xmp", ".hocr", ".xml")
        files = [file for file in folder.rglob("*") if file.is_file() and file.suffix in kinds]
        if format == "webdataset":
            with tarfile.open(folder / "shard-000000.tar") as tar:
                files = [Path(each) for each in tar.getnames() if each.endswith(".txt")]
        assert len({*files}) == len(names), format
    assert list((tmp_path / "xmp").glob("a-3*.xmp")), "an image is named in the file's name"


def test_several_inboxes_have_different_names_also_those_that_are_not_configured_any_more() -> None:
    roots = [b"/old/in", b"/new/in", b"/photos", b"s3://bucket/in/"]
    assert name_inboxes(roots, {b"/new/in": "in", b"/photos": "mine"}) == {
        b"/old/in": "in",
        b"/new/in": "in-2",
        b"/photos": "mine",
        b"s3://bucket/in/": "in-3",
    }
    assert name_inboxes(roots[:1], {}) == {b"/old/in": ""}
    records = [make_record(Path("/old/in")), make_record(Path("/new/in"), id=8)]
    names = [image.name for image in named(records, name_inboxes(roots, {}))]
    assert names == ["in/a.jpg", "in-2/a.jpg"]


def test_texts_are_utf_8_whatever_the_locale_is(tmp_path: Path, images: list[Answered]) -> None:
    program = f"""
import pickle, sys
from pathlib import Path
from daemon.exports.formats import FOLDERS
for format in {[*WITH_FILES]}:
    folder = Path(sys.argv[1], format)
    folder.mkdir()
    FOLDERS[format](folder, iter(pickle.load(open(sys.argv[2], "rb"))))
"""
    (tmp_path / "images").write_bytes(pickle.dumps(images[:2]))
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    made = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path), str(tmp_path / "images")]
    subprocess.run(made, check=True, env=environment)
    assert "Total: 12,50 €" in (tmp_path / "hocr" / "images" / "b c.jpg.hocr").read_text("utf-8")


def test_data_sets_say_which_part_is_by_people_and_where_that_is_from(
    tmp_path: Path, records: list[Record]
) -> None:
    given = {
        Kind.OBJECTS: Label([ObjectLabel("my car", (1.0, 2.0, 3.0, 4.0))], "coco.json", 0.0),
        Kind.TEXT: Label("has no boxes", "by hand", 0.0),
    }
    labels = {records[3].digest: given}
    images = list(name_images(records[1:4], {}, [], lambda digest: labels.get(digest, {})))

    coco = {
        file.stem: json.loads(file.read_text()) for file in write(tmp_path / "c", "coco", images).iterdir()
    }
    origins = [(each["image_id"], each.get("origin")) for each in coco["instances"]["annotations"]]
    assert origins == [(2, None), (3, None), (3, None), (4, "coco.json")]
    assert [each["visiond"]["labels"] for each in coco["instances"]["images"]] == [
        {},
        {},
        {"objects": "coco.json"},
    ]
    assert {name: each["info"]["description"] for name, each in coco.items()} == {
        "instances": "Answers of models and labels of people, by visiond",
        "captions": "Answers of models, by visiond",
        "text": "Answers of models, by visiond",
    }
    assert "origin" not in str([coco["captions"], coco["text"]])

    folder = write(tmp_path / "h", "huggingface", images)
    rows = pyarrow.parquet.read_table(folder / "metadata.parquet")["labels"].to_pylist()
    assert sorted(rows, key=str)[0] == {"kind": ["objects"], "origin": ["coco.json"]}
    assert sorted(rows, key=str)[1:] == [{"kind": [], "origin": []}] * 2
    card = (folder / "README.md").read_text()
    assert yaml.safe_load(card.split("---\n")[1])["annotations_creators"] == ["machine-generated", "other"]
    assert "People have labelled 1 of 3 images" in card
    card = (write(tmp_path / "m", "huggingface", images[:2]) / "README.md").read_text()
    assert yaml.safe_load(card.split("---\n")[1])["annotations_creators"] == ["machine-generated"]
    assert "No person has checked these answers." in card

    shapes = ElementTree.parse(write(tmp_path / "v", "cvat", images) / "annotations.xml").iterfind("image/*")
    people = [each.get("label") for each in shapes if each.get("source") == "manual"]
    assert people == ["my car"]


def test_label_studio_offers_the_names_of_people_and_of_predictions(tmp_path: Path) -> None:
    given = {Kind.OBJECTS: Label([ObjectLabel("my car", (1.0, 2.0, 3.0, 4.0))], "coco.json", 0.0)}
    image = Answered(make_record(tmp_path), "a.jpg", [], given)
    folder = write(tmp_path / "t", "label-studio", [image])
    offered = {each.get("value") for each in ElementTree.parse(folder / "config.xml").iter("Label")}
    (task,) = json.loads((folder / "tasks.json").read_text())
    regions = [region for part in ("predictions", "annotations") for region in task[part][0]["result"]]
    used = {name for region in regions for name in region["value"].get("rectanglelabels", ())}
    assert len(used) > 1
    assert offered == used


@pytest.mark.parametrize("stages", [["ocr"], ["ocr", "yolo"]])
def test_label_studio_has_no_empty_control_and_people_can_draw_the_first_box(
    tmp_path: Path, stages: list[str]
) -> None:
    record = make_record(tmp_path, outputs=make_outputs(0, stages=["ocr"]))
    write_images(tmp_path, "label-studio", [record], {}, [], ExportColumns(stages))
    config = ElementTree.parse(tmp_path / "config.xml")
    boxes = {"RectangleLabels", "Label"} if "yolo" in stages else set()
    assert {element.tag for element in config.iter()} == {"View", "Image", "Rectangle", "TextArea"} | boxes
    assert [each.get("value") for each in config.iter("Label")] == (["object"] if boxes else [])


def test_names_in_a_card_are_yaml_whatever_characters_they_have() -> None:
    names = ["a\x7fb", "\x85", "\x9f", "é", "\u2028", "\ufffe", '"', "\n"]
    assert yaml.safe_load(huggingface._json(names)) == names
