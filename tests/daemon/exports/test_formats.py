"""Each format is read by the program that it is for, and what that reads is compared with the ledger."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
from contextlib import redirect_stdout
from html.parser import HTMLParser
from importlib.util import find_spec
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
from tests.makers import make_outputs, make_record

WITH_FILES = ("captions", "hocr", "alto", "xmp", "xmp-adobe", "yolo", "webdataset")  # for each image
LABEL_STUDIO = Path(sys.prefix, "label-studio", "bin", "python")  # its library wants an older numpy
CHECK_TASKS = """
import json, pathlib
from label_studio_sdk.label_interface import LabelInterface
project = LabelInterface(pathlib.Path("config.xml").read_text())
tasks = json.loads(pathlib.Path("tasks.json").read_text())
given = [prediction for task in tasks for prediction in task["predictions"]]
wrong = [error for each in given for error in project.validate_prediction(each, return_errors=True)]
print(json.dumps([[task["meta"]["visiond"]["id"] for task in tasks], wrong]))
"""
READ_SHARDS = """
import pickle, sys
import webdataset
samples = list(webdataset.WebDataset(sys.argv[1:], shardshuffle=False, empty_check=False))
sys.stdout.buffer.write(pickle.dumps([{key: s[key] for key in s if key != "__local_path__"} for s in samples]))
"""
READ_DATA_SETS = """
import pickle, sys
import datasets, yaml
def read(folder):
    card = yaml.safe_load(open(f"{folder}/README.md").read().split("---\\n")[1])
    features = datasets.Features._from_yaml_list(card["dataset_info"]["features"])
    found = {
        "imagefolder": datasets.load_dataset("imagefolder", data_dir=folder, split="train"),
        "folder": datasets.load_dataset(folder, split="train"),
    }
    rows = [row | {"image": row["image"].size} for row in found["imagefolder"]]
    return {"features": str(found["imagefolder"].features), "rows": rows}, {
        name: each.features == features for name, each in found.items()
    }
sys.stdout.buffer.write(pickle.dumps([read(folder) for folder in sys.argv[1:]]))
"""
EXIFTOOL = shutil.which("exiftool")
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
    given = {
        "yolo": {"detections": detections, "count": len(labels), "unique": len(labels), "dispersion": 0.0},
        "ocr": {"lines": lines, "count": len(lines), "area_ratio": 0.1},
    }
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


@pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy keyword"
)  # pycocotools and numpy 2
def test_pycocotools_reads_each_object_caption_and_line(tmp_path: Path, images: list[Answered]) -> None:
    coco = pytest.importorskip("pycocotools.coco", reason="pycocotools is not installed: make tools")
    folder = write(tmp_path / "coco", "coco", images)
    with redirect_stdout(io.StringIO()):
        instances, captions, text = (
            coco.COCO(folder / f"{name}.json") for name in ("instances", "captions", "text")
        )
    for image in images:
        [known] = instances.loadImgs(image.record.id)
        assert (known["file_name"], known["width"], known["height"]) == (image.name, 640, 480)
        found = instances.loadAnns(instances.getAnnIds(imgIds=image.record.id))
        objects = [
            (instances.cats[each["category_id"]]["name"], each["score"], tuple(each["bbox"]))
            for each in found
        ]
        expected = [(n, score, (x0, y0, x1 - x0, y1 - y0)) for n, score, (x0, y0, x1, y1) in image.objects]
        assert objects == expected
        lines = text.loadAnns(text.getAnnIds(imgIds=image.record.id))
        assert [each["utf8_string"] for each in lines] == [line for line, _, _ in image.lines]
        assert [text.annToMask(each).any() for each in lines] == [True] * len(lines)
        assert [each["caption"] for each in captions.imgToAnns[image.record.id]] == [image.caption]
    assert sum(len(image.objects) for image in images) == len(instances.anns) > 20


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


def test_ultralytics_reads_the_boxes_of_every_image(tmp_path: Path, images: list[Answered]) -> None:
    data = pytest.importorskip("ultralytics.data.dataset", reason="ultralytics is not installed: make setup")
    from ultralytics.data.utils import check_det_dataset

    folder = write(tmp_path / "yolo", "yolo", images)
    described = check_det_dataset(str(folder / "data.yaml"), autodownload=False)
    names = described["names"]
    found: dict[str, list[tuple[str, list[float]]]] = {}
    for part in {Path(described[part]).name for part in ("train", "val")}:
        read = data.YOLODataset(
            img_path=str(folder / "images" / part), data=described, augment=False, imgsz=64
        )
        for label in read.labels:
            place = Path(label["im_file"]).relative_to(folder / "images" / part).as_posix()
            boxes = zip(label["cls"].flatten(), label["bboxes"].tolist(), strict=True)
            found[place] = [(names[int(number)], box) for number, box in boxes]
    expected = {
        str(image.own_name(".png" if image.name.endswith("png") else ".jpg")): [
            (name, [(x0 + x1) / 1280, (y0 + y1) / 960, (x1 - x0) / 640, (y1 - y0) / 480])
            for name, _, (x0, y0, x1, y1) in image.objects
        ]
        for image in images
    }
    assert found.keys() == expected.keys()
    for place, things in found.items():
        assert [name for name, _ in things] == [name for name, _ in expected[place]], place
        for (_, box), (_, wanted) in zip(things, expected[place], strict=True):
            assert box == pytest.approx(wanted, abs=1e-6)


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


def test_webdataset_reads_each_image_with_its_sidecar_and_caption(
    tmp_path: Path, images: list[Answered], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("daemon.exports.webdataset.SHARD_IMAGES", 8)
    folder = write(tmp_path / "shards", "webdataset", images)
    shards = sorted(map(str, folder.iterdir()))
    assert len(shards) == 3, "of 20 images"
    # In a process of its own, as it leaves files open.
    read = subprocess.run([sys.executable, "-c", READ_SHARDS, *shards], check=True, capture_output=True)
    samples = pickle.loads(read.stdout)
    for image, sample in zip(images, samples, strict=True):
        [data] = (sample[ending] for ending in ("jpg", "png") if ending in sample)
        assert data == Path(image.location).read_bytes()
        assert sample["json"] == image.record.sidecar
        assert sample["txt"].decode() == image.caption
    assert len({sample["__key__"] for sample in samples}) == len(images)


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


@pytest.mark.skipif(not LABEL_STUDIO.exists(), reason="label-studio-sdk is not installed: make tools")
def test_label_studio_accepts_every_prediction(tmp_path: Path, images: list[Answered]) -> None:
    folder = write(tmp_path / "tasks", "label-studio", images)
    checked = subprocess.run([LABEL_STUDIO, "-c", CHECK_TASKS], cwd=folder, check=True, capture_output=True)
    numbers, wrong = json.loads(checked.stdout)
    assert numbers == [image.record.id for image in images]
    assert wrong == []


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


class Hocr(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []
        self._title = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self._title = str(known["title"]) if known.get("class") == "ocr_line" else ""

    def handle_endtag(self, tag: str) -> None:
        self._title = ""

    def handle_data(self, data: str) -> None:
        if self._title:
            self.lines.append((self._title.partition(";")[0], data))


def printed(image: Answered) -> list[str]:
    """Its lines without what XML does not have."""
    return [text.replace("\x07", "") for text, _, _ in image.lines]


def test_hocr_and_alto_have_each_line_with_its_box(tmp_path: Path, images: list[Answered]) -> None:
    hocr, alto = write(tmp_path / "hocr", "hocr", images), write(tmp_path / "alto", "alto", images)
    for image in images:
        file = hocr / f"{image.name}.hocr"
        ElementTree.parse(file)  # it is XML too
        reader = Hocr()
        reader.feed(file.read_text())
        assert reader.lines == [("bbox 4 6 105 31", text) for text in printed(image)]
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
        caption = [("caption", None)] if image.caption else []
        assert tags == [(label, f"{score:.3f}") for label, score in image.tags] + caption
        assert (found.findtext("tag[@label='caption']/attribute") or "") == image.caption
        for shape in [each for each in found if each.tag in ("box", "polygon", "tag")]:
            known = {
                each.findtext("name") for each in labels[shape.get("label")].iterfind("attributes/attribute")
            }
            assert {each.get("name") for each in shape.iterfind("attribute")} <= known
            assert known == {each["name"] for each in described[str(shape.get("label"))]["attributes"]}
    assert sum(len(image.objects) for image in images) > 20


def test_a_folder_for_hugging_face_has_a_row_and_the_file_of_each_image(
    tmp_path: Path, images: list[Answered]
) -> None:
    folder = write(tmp_path / "huggingface", "huggingface", images)
    rows = pyarrow.parquet.read_table(folder / "metadata.parquet").to_pylist()
    found = {row["id"]: row for row in rows}
    assert len(rows) == len(found) == len(images)
    assert {str(file.relative_to(folder)) for file in (folder / "images").rglob("*.*")} == {
        row["file_name"] for row in rows
    }
    for image in images:
        row = found[image.record.id]
        assert (folder / row["file_name"]).read_bytes() == Path(image.location).read_bytes()
        assert (row["path"], row["caption"], row["bin"]) == (image.name, image.caption, image.record.bin)
        assert row["digest"] == f"sha256:{image.record.digest.hex()}"  # as in all exports
        assert row["objects"] == {
            "category": [label for label, _, _ in image.objects],
            "score": [score for _, score, _ in image.objects],
            "bbox": [[x0, y0, x1 - x0, y1 - y0] for _, _, (x0, y0, x1, y1) in image.objects],
        }
        assert row["lines"]["text"] == [text for text, _, _ in image.lines] == row["text"].splitlines()
        assert row["lines"]["bbox"] == [[4.0, 6.0, pytest.approx(101.4), pytest.approx(24.6)]] * len(
            image.lines
        )
        assert row["tags"]["label"] == [label for label, _ in image.tags]


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
    }


@pytest.mark.skipif(not find_spec("datasets"), reason="datasets is not installed: make tools")
def test_datasets_reads_each_image_with_the_types_of_the_card(tmp_path: Path, images: list[Answered]) -> None:
    folders = [write(tmp_path / name, "huggingface", of) for name, of in (("a", images), ("b", images[:1]))]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    read = subprocess.run(
        [sys.executable, "-c", READ_DATA_SETS, *folders], check=True, capture_output=True, env=environment
    )
    (whole, typed), (empty, _) = pickle.loads(read.stdout)
    assert not any(row["objects"]["category"] or row["lines"]["text"] for row in empty["rows"])
    assert typed == {"imagefolder": True, "folder": True}
    assert whole["features"] == empty["features"]
    assert len(whole["rows"]) == len(images)
    rows = {row["id"]: row for row in whole["rows"]}
    for image in images:
        row = rows[image.record.id]
        assert row["image"] == (640, 480)
        assert row["objects"]["category"] == [label for label, _, _ in image.objects]
        assert row["objects"]["score"] == [score for _, score, _ in image.objects]
        assert row["lines"]["text"] == [text for text, _, _ in image.lines]
        assert row["tags"]["label"] == [label for label, _ in image.tags]
        assert row["caption"] == image.caption


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


@pytest.mark.skipif(EXIFTOOL is None, reason="exiftool is not installed: make tools")
@pytest.mark.parametrize("format", ["xmp", "xmp-adobe"])
def test_exiftool_reads_captions_tags_and_objects(
    tmp_path: Path, images: list[Answered], format: str
) -> None:
    folder = write(tmp_path / "xmp", format, images)
    command = [
        str(EXIFTOOL),
        "-json",
        "-XMP-dc:all",
        "-charset",
        "filename=utf8",
        "-r",
        "-ext",
        "xmp",
        str(folder),
    ]
    known = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    found = {Path(each["SourceFile"]).relative_to(folder).as_posix(): each for each in known}
    assert len(found) == len(images)
    for image in images[:3]:
        name = Path(image.name).with_suffix("").as_posix() if format == "xmp-adobe" else image.name
        each = found[f"{name}.xmp"]
        labels = [label for label, _, _ in image.objects] + [label for label, _ in image.tags]
        subject = each.get("Subject", [])
        assert [str(s) for s in (subject if isinstance(subject, list) else [subject])] == list(
            dict.fromkeys(labels)
        )
        assert each["Description"] == image.caption


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
