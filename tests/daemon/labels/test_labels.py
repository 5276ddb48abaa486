"""Labels of people from the file to the score, with a ledger of fakes."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from daemon.config.state import LABELS
from daemon.core.errors import LedgerDamaged
from daemon.core.labels import Kind, ObjectLabel, Said, Value, is_held_out
from daemon.labels.matching import KnownImage, in_pixels, keep_known
from daemon.labels.store import LabelStore
from tests.daemon_process import Place, picture

ONE, TWO = hashlib.sha256(b"1").digest(), hashlib.sha256(b"2").digest()
DOG = ObjectLabel("dog", (1.0, 2.0, 3.0, 4.0))
IMAGES = 12


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    made = Place(tmp_path_factory.mktemp("labels"))
    for number in range(IMAGES):
        made.drop(f"{'sub/' if number % 2 else ''}{number}.ppm", picture(number))
    made.drop("other/1.ppm", picture(1000))
    made.drop("copy.ppm", picture(2))
    assert made.run_once().returncode == 0
    return made


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Place:
    made = Place(tmp_path_factory.mktemp("second"))
    for number in range(IMAGES):
        made.drop(f"other-{number}.ppm", picture(number))
    assert made.run_once().returncode == 0
    return made


@pytest.fixture
def other(second: Place) -> Place:
    """The images of the first under other names, without labels."""
    (second.folder / "state" / LABELS).unlink(missing_ok=True)
    return second


@pytest.fixture
def labels(place: Place) -> Iterator[Place]:
    """Without labels of another test."""
    yield place
    for file in (place.folder / "state").glob(f"{LABELS}*"):
        file.unlink()


def say(
    place: Place, document: Any, *options: str, name: str = "said.json"
) -> subprocess.CompletedProcess[str]:
    (place.folder / name).write_text(json.dumps(document))
    return place.command("labels", "import", place.folder / name, *options)


def tags_of(*names: str) -> list[dict[str, Any]]:
    choices = [{"type": "choices", "value": {"choices": ["seen"]}}]
    return [{"data": {"image": name}, "annotations": [{"result": choices}]} for name in names]


def test_what_is_exported_comes_back_and_agrees_with_the_answers(labels: Place) -> None:
    for format in ("coco", "label-studio"):
        assert labels.command("export", "--format", format, labels.folder / format).returncode == 0
        assert "has answers of models" in labels.command("labels", "import", labels.folder / format).stderr
    tasks = json.loads((labels.folder / "label-studio" / "tasks.json").read_text())
    corrected = [{**task, "annotations": task["predictions"], "predictions": []} for task in tasks]
    assert say(labels, corrected).returncode == 0
    ended = labels.command("labels", "import", "--corrected", labels.folder / "coco", "--json")
    distinct = IMAGES + 1  # equal files have one label
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout)
    assert said["labels"] == {"objects": distinct, "caption": distinct, "text": distinct}
    assert (said["unknown"], {*said["left_out"].values()}) == ([], {3})  # 2.ppm has labels as copy.ppm too
    scores = json.loads(labels.command("score", "--json").stdout)
    figures = {name: each["figures"][name][0] for each in scores for name in each["figures"]}
    perfect = {"mAP": 1, "AP50": 1, "recall": 1, "precision": 1, "F1": 1, "CER": 0, "WER": 0}
    assert {name: value for name, value in figures.items() if name != "CIDEr"} == pytest.approx(perfect)
    assert figures["CIDEr"] > 1
    assert {each["images"] for each in scores} == {distinct}
    table = labels.command("score", "--only", "objects", "--by-label").stdout
    assert "AP50" in table
    assert "average precision" in table


WHOLE = {
    "coco": [Kind.OBJECTS, Kind.CAPTION],
    "yolo": [Kind.OBJECTS],
    "label-studio": [Kind.OBJECTS, Kind.TAGS, Kind.CAPTION],
    "csv": [*Kind],
}


@pytest.mark.parametrize("format", WHOLE)
def test_labels_go_to_another_ledger_with_their_origins_and_without_the_answers(
    labels: Place, other: Place, format: str
) -> None:
    """There the images have other names."""
    digests = [hashlib.sha256(picture(number)).digest() for number in range(IMAGES)]
    given: list[tuple[bytes, Kind, Value, str]] = [
        (digests[0], Kind.OBJECTS, [DOG, ObjectLabel('a "big" dog', (0.0, 1.5, 8.0, 3.0))], "boxes.json"),
        (digests[1], Kind.OBJECTS, [], "boxes.json"),
        (digests[2], Kind.OBJECTS, [DOG], "boxes.json"),  # there are two such files
        (digests[2], Kind.TAGS, ["=seen", "b;c"], "by hand"),
        (digests[3], Kind.TAGS, [], "by hand"),
        (digests[4], Kind.CAPTION, ["A dog.", "One dog."], "by hand"),
        (digests[5], Kind.TEXT, "one\ntwo", "by hand"),
    ]
    assert LabelStore(labels.folder / "state").keep(given) == 0
    exported = labels.folder / f"moved-{format}"
    assert labels.command("export", "--labels", "--format", format, exported).returncode == 0
    if format == "csv":
        exported = exported.rename(exported.with_suffix(".csv"))
    ended = other.command("labels", "import", exported, "--json")
    assert (ended.returncode, json.loads(ended.stdout)["unknown"]) == (0, []), ended.stderr
    assert labels_in(other) == {
        (digest, kind): (value, origin) for digest, kind, value, origin in given if kind in WHOLE[format]
    }
    assert other.command("labels", "import", exported, "--origin", "me").returncode == 0
    assert {origin for _, origin in labels_in(other).values()} == {"me"}


def labels_in(place: Place) -> dict[tuple[bytes, Kind], tuple[Any, str]]:
    store = LabelStore(place.folder / "state")
    with store.lookup() as lookup:
        found = {(digest, kind): lookup(digest)[kind] for kind in Kind for digest, _ in store.of_kind(kind)}
    return {key: (label.value, label.origin) for key, label in found.items()}


def test_of_an_export_with_labels_corrections_of_labels_are_taken_and_of_answers_only_if_it_is_said(
    labels: Place, other: Place
) -> None:
    one = hashlib.sha256(picture(0)).digest()
    crowd = ObjectLabel("dog", (0.0, 0.0, 4.0, 4.0), crowd=True)
    four = hashlib.sha256(picture(4)).digest()
    boxes: dict[bytes, Value] = {one: [DOG], four: [DOG, crowd]}  # the second is not in COCO as a whole
    store = LabelStore(labels.folder / "state")
    store.keep([(digest, Kind.OBJECTS, value, "me") for digest, value in boxes.items()])
    exported = labels.folder / "corrected-coco"
    assert labels.command("export", "--labels", "--format", "coco", exported).returncode == 0
    file = exported / "instances.json"
    document = json.loads(file.read_text())
    document["categories"] = [each | {"name": "corrected"} for each in document["categories"]]
    file.write_text(json.dumps(document))
    ended = other.command("labels", "import", file)
    assert "Left out: answers of models; if people have corrected them, add --corrected" in ended.stderr
    assert labels_in(other) == {(one, Kind.OBJECTS): ([replace(DOG, label="corrected")], "me")}
    assert (
        labels.command("labels", "import", "--corrected", file).stdout == f"objects of {IMAGES + 1} images\n"
    )


def test_boxes_of_yolo_without_the_images_are_not_taken_for_those_of_another_image(labels: Place) -> None:
    one = hashlib.sha256(picture(0)).digest()
    LabelStore(labels.folder / "state").keep([(one, Kind.OBJECTS, [DOG], "me")])
    exported = labels.folder / "without-images"
    assert labels.command("export", "--labels", "--format", "yolo", exported).returncode == 0
    shutil.rmtree(exported / "images")
    ended = labels.command("labels", "import", exported)
    assert ended.returncode == os.EX_NOINPUT
    assert "Left out: boxes whose image is not in the folder" in ended.stderr


def test_what_differs_from_labels_is_exported_and_found_first(labels: Place) -> None:
    """The fake captioner says how many things there are."""
    rows = [*csv.DictReader(labels.command("export", "-").stdout.splitlines())]
    right = {row["path"]: row["caption"] for row in rows if row["path"] != "copy.ppm"}
    wrong = ["sub/3.ppm", "8.ppm"]
    said = [
        {"path": path, "caption": "nobody is here" if path in wrong else text} for path, text in right.items()
    ]
    with (labels.folder / "said.csv").open("w") as file:
        table = csv.DictWriter(file, ["path", "caption"])
        table.writeheader()
        table.writerows(said)
    assert labels.command("labels", "import", labels.folder / "said.csv").returncode == 0

    found = json.loads(labels.command("search", "--by", "disagreement:labels", "--json").stdout)
    assert {each["source"]["path"] for each in found} == {*wrong}
    assert {each["disagreement"]["signal"] for each in found} == {"labels"}
    tasks = labels.folder / "first"
    options = ("--order", "disagreement", "--limit", "2", "--format", "label-studio")
    assert labels.command("export", *options, tasks).returncode == 0
    made = json.loads((tasks / "tasks.json").read_text())
    told = [task["meta"]["visiond"] for task in made]
    assert [each["path"] for each in told] == [each["source"]["path"] for each in found], (
        "in the order of the list"
    )
    assert [each["disagreement"] for each in told] == [each["disagreement"] for each in found]
    doubts = [1 - each["disagreement"]["score"] for each in found]
    assert [task["predictions"][0]["score"] for task in made] == pytest.approx(doubts)
    narrowed = ("--order", "disagreement:labels", "--where", "path = '8.ppm'", "--format", "jsonl", "-")
    assert labels.command("export", *narrowed).stdout.count("\n") == 1
    for refused in (("--order", "doubt"), ("--limit", 3), ("--order", "disagreement", "--ratio", "A=1")):
        assert labels.command("export", *refused, "-").returncode == os.EX_USAGE


def test_a_folder_of_yolo_comes_back_by_the_bytes_of_its_images(labels: Place) -> None:
    labels.command("export", "--format", "yolo", labels.folder / "yolo")
    shown = labels.command("labels", "import", "--corrected", labels.folder / "yolo")
    assert (shown.stdout, shown.returncode) == (f"objects of {IMAGES + 1} images\n", 0)


def test_an_image_is_found_by_the_end_of_its_path_and_only_if_asked_by_its_file_name_alone(
    labels: Place,
) -> None:
    names = ("sub/3.ppm", str(labels.inbox() / "0.ppm"), "elsewhere/4.ppm", "gone.ppm", "1.ppm")
    said = json.loads(say(labels, tags_of(*names), "--json").stdout)
    assert (said["labels"], said["unknown"]) == ({"tags": 2}, ["elsewhere/4.ppm", "gone.ppm"])
    assert said["ambiguous"] == ["1.ppm"]  # sub/1.ppm and other/1.ppm
    said = json.loads(say(labels, tags_of(*names), "--by-file-name", "--json").stdout)
    assert (said["labels"], said["unknown"], said["by_file_name"]) == ({"tags": 3}, ["gone.ppm"], 1)
    assert said["replaced"] == 2


def test_two_names_are_not_one_image_by_their_last_parts(labels: Place) -> None:
    said = json.loads(
        say(labels, tags_of("x/3.ppm", "y/3.ppm", "sub\\5.ppm"), "--by-file-name", "--json").stdout
    )
    assert (said["labels"], said["ambiguous"]) == ({"tags": 1}, ["x/3.ppm", "y/3.ppm"])


def test_a_name_without_a_suffix_is_any_image_that_is_called_so(labels: Place) -> None:
    """As in a data set of YOLO without the images."""
    folder = labels.folder / "bare" / "labels"
    folder.mkdir(parents=True)
    (folder / "classes.txt").write_text("cat\n")
    (folder / "3.txt").write_text("0 0.5 0.5 1 1\n")
    assert labels.command("labels", "import", folder, "--by-file-name").stdout == "objects of 1 image\n"


def test_a_file_beside_the_labels_is_known_by_its_bytes_whatever_it_is_called(labels: Place) -> None:
    (labels.folder / "elsewhere").mkdir(exist_ok=True)
    (labels.folder / "elsewhere" / "renamed.ppm").write_bytes(picture(5))
    ended = say(labels, tags_of("renamed.ppm"), "--images", str(labels.folder / "elsewhere"))
    assert ended.stdout == "tags of 1 image\n"
    assert "tags by people (said.json)  seen" in labels.command("show", "5.ppm").stdout


def test_a_score_says_when_no_name_of_people_is_one_of_the_model(labels: Place) -> None:
    exported = labels.folder / "names"
    assert labels.command("export", "--format", "coco", exported).returncode == 0
    document = json.loads((exported / "instances.json").read_text())

    def score_with(prefix: str) -> str:
        named = [{**each, "name": prefix + each["name"].upper()} for each in document["categories"]]
        assert say(labels, document | {"categories": named}, "--corrected").returncode == 0
        return labels.command("score", "--only", "objects").stderr

    assert 'used none of the names that people gave ("my ' in score_with("my ")
    assert "Note" not in score_with("")


def test_a_score_on_held_out_images_leaves_out_those_that_a_training_learns_from(labels: Place) -> None:
    names = [f"{'sub/' if number % 2 else ''}{number}.ppm" for number in range(IMAGES)]
    assert say(labels, tags_of(*names)).returncode == 0
    digests = [hashlib.sha256(picture(number)).digest() for number in range(IMAGES)]
    held_out = sum(is_held_out(digest, 0.5) for digest in digests)
    assert 0 < held_out < IMAGES

    def count(*options: str) -> int:
        told = labels.command("score", "--only", "tags", "--json", *options)
        images: int = json.loads(told.stdout)[0]["images"]
        return images

    assert (count(), count("--held-out", "0.5")) == (IMAGES, held_out)


def test_labels_stay_when_the_models_run_again(labels: Place) -> None:
    say(labels, tags_of("0.ppm"))
    assert labels.command("redo", "--all").returncode == 0
    assert labels.run_once().returncode == 0
    assert "tags by people (said.json)  seen" in labels.command("show", "0.ppm").stdout


def test_exports_have_labels_in_a_column_a_key_or_the_place_of_the_answers(labels: Place) -> None:
    boxes = {
        "images": [{"id": 1, "file_name": "0.ppm", "width": 8, "height": 8}],
        "annotations": [{"image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4]}],
        "categories": [{"id": 1, "name": "unicorn"}],
    }
    ended = say(labels, boxes)
    assert ended.returncode == 0, ended.stderr
    rows = [
        json.loads(line)["labels"]["objects"]
        for line in labels.command("export", "--labels", "-f", "jsonl", "-").stdout.splitlines()
        if "labels" in json.loads(line)
    ]
    assert [row["origin"] for row in rows] == ["said.json"]
    file = labels.folder / "labelled.csv"
    labels.command("export", "--labels", "--force", "--where", "labels IS NOT NULL", file)
    [row] = csv.DictReader(file.read_text().splitlines())
    assert json.loads(row["labels"])["objects"]["value"][0]["label"] == "unicorn"
    folder = labels.folder / "corrected"
    labels.command("export", "--labels", "--force", "--format", "coco", "--where", "path = '0.ppm'", folder)
    written = json.loads((folder / "instances.json").read_text())
    tasks = labels.folder / "tasks"
    labels.command("export", "--labels", "--format", "label-studio", "--where", "path = '0.ppm'", tasks)
    [task] = json.loads((tasks / "tasks.json").read_text())
    assert [result["value"]["rectanglelabels"] for result in task["annotations"][0]["result"]] == [
        ["unicorn"]
    ]
    assert "unicorn" not in str(task["predictions"])
    labelled = "json_extract(labels, '$.objects') IS NOT NULL"
    shown = labels.command("export", "--labels", "--where", labelled, "-")
    assert [row["path"] for row in csv.DictReader(shown.stdout.splitlines())] == ["0.ppm"]
    assert "people have labelled 1 of the 1 image that" in shown.stderr
    for format in ("jsonl", "coco"):
        said = labels.command(
            "export", "--labels", "--force", "-f", format, labels.folder / f"all.{format}"
        ).stderr
        assert f"Note: people have labelled 1 of the {IMAGES + 2} images that were chosen." in said
    assert [category["name"] for category in written["categories"]] == ["unicorn"]
    assert '"labels":' not in labels.command("export", "-f", "jsonl", "-").stdout


def test_why_an_import_keeps_nothing_is_the_last_sentence(labels: Place, tmp_path: Path) -> None:
    def last(document: Any, *options: str, place: Place = labels) -> str:
        ended = say(place, document, *options)
        assert ended.returncode == os.EX_NOINPUT
        return " ".join(ended.stderr.split()).rpartition("Nothing is kept: ")[2]

    far = {"x": 300, "y": 1, "width": 9, "height": 9, "rotation": 0, "rectanglelabels": ["cat"]}
    sizes = {"original_width": 64, "original_height": 48}
    outside = [{"type": "rectanglelabels", "value": far, **sizes}]
    assert last([]).endswith("said.json has no labels.")
    assert "no labels that can be taken" in last([{"data": {"image": "0.ppm"}}])
    assert last(tags_of("0.ppm"), "--only", "caption").endswith(
        "/said.json has only labels of other kinds: tags. Leave out --only, or name one of these kinds with it."
    )
    assert last(tags_of("gone.ppm")).startswith(
        f"no name in {labels.folder}/said.json is that of an image that is DONE."
    )
    assert (
        last(tags_of("1.ppm"))
        == "each name can mean several images. Write more of the paths, or the digests."
    )
    assert last([{"data": {"image": "0.ppm"}, "annotations": [{"result": outside}]}]).startswith(
        "1 image found, but no"
    )
    empty = Place(tmp_path)
    assert empty.run_once().returncode == 0
    assert last(tags_of("0.ppm"), place=empty).startswith(
        "no image is DONE, so there is none to label. `visiond run`"
    )


def test_labels_are_listed_by_where_they_are_from_and_forgotten(labels: Place) -> None:
    assert "There are no labels" in labels.command("labels", "list").stderr
    say(labels, tags_of("0.ppm", "2.ppm"), "--origin", "by hand")
    assert "tags by hand 2 0" in " ".join(labels.command("labels", "list").stdout.split())
    refused = labels.command("labels", "forget", "me")
    assert (refused.returncode, "There are labels from: by hand." in refused.stderr) == (os.EX_NOINPUT, True)
    assert labels.command("labels", "forget", "by hand").stdout == "2 labels forgotten\n"
    assert labels.command("score").returncode == os.EX_NOINPUT


def test_labels_of_no_known_image_are_an_error_that_names_one(labels: Place) -> None:
    ended = say(labels, tags_of("gone.ppm"))
    assert ended.returncode == os.EX_NOINPUT
    assert "1 name found at no image that is DONE, such as gone.ppm. --images FOLDER says" in ended.stderr


def test_lines_of_text_of_people_are_shown_on_one_line(labels: Place) -> None:
    file = labels.folder / "text.csv"
    file.write_text('path,text\n0.ppm,"one\ntwo"\n')
    assert labels.command("labels", "import", file).returncode == 0
    assert "text by people (text.csv)  one / two" in labels.command("show", "0.ppm").stdout


def test_labels_of_images_that_wait_are_left_out_with_the_advice_to_import_them_later(labels: Place) -> None:
    (labels.folder / "new").mkdir()
    for number in range(2):
        (labels.folder / f"new/new{number}.ppm").write_bytes(picture(2000 + number))
    ended = say(labels, tags_of("new0.ppm", "new1.ppm"), "--images", str(labels.folder / "new"))
    assert ended.returncode == os.EX_NOINPUT
    assert "such as new0.ppm. Of these, 2 files have no result yet: import the labels again" in ended.stderr
    assert "--by-file-name" not in ended.stderr


def test_boxes_fit_the_image_also_if_it_was_labelled_as_a_smaller_copy() -> None:
    image, left_out = KnownImage(ONE, 400, 300), Counter[str]()
    outside = ObjectLabel("cat", (41.0, 0.0, 50.0, 9.0))
    said = Said("a", Kind.OBJECTS, [ObjectLabel("dog", (1.0, 2.0, 40.5, 4.0))], (40, 30), (40, 30))
    assert in_pixels(said, image, left_out) == [ObjectLabel("dog", (10, 20, 400, 40))]
    assert not left_out
    assert in_pixels(said._replace(size=(30, 40)), image, left_out) is None
    # Some boxes of an image would be a wrong label: right answers for the others would count as wrong.
    assert in_pixels(said._replace(value=[DOG, outside]), image, left_out) is None
    assert [*left_out.values()] == [1, 1]


def test_equal_files_have_the_labels_of_the_first_and_several_rows_of_one_name_are_added() -> None:
    left_out, one = Counter[str](), KnownImage(ONE, 40, 30)
    said = [Said(name, Kind.OBJECTS, [DOG]) for name in ("a", "b", "a")]
    said += [Said("a", Kind.TEXT, text) for text in ("x", "y")]
    kept = keep_known(said, {"a": one, "b": one}, left_out)
    assert {key: each.value for key, each in kept.items()} == {
        (ONE, Kind.OBJECTS): [DOG, DOG],
        (ONE, Kind.TEXT): "x\ny",
    }
    assert sum(left_out.values()) == 1


def test_a_later_label_of_the_same_kind_replaces_the_earlier_one(tmp_path: Path) -> None:
    store = LabelStore(tmp_path)
    assert (
        store.keep([(ONE, Kind.TAGS, ["a"], "x"), (ONE, Kind.TEXT, "", "x"), (TWO, Kind.TAGS, ["b"], "x")])
        == 0
    )
    assert store.keep([(ONE, Kind.TAGS, ["c"], "y")]) == 1
    with store.lookup() as lookup:
        found = {kind: (label.value, label.origin) for kind, label in lookup(ONE).items()}
    assert found == {Kind.TAGS: (["c"], "y"), Kind.TEXT: ("", "x")}
    assert [each[:4] for each in store.tallies()] == [
        ("tags", "x", 1, 0),
        ("tags", "y", 1, 0),
        ("text", "x", 1, 1),
    ]


def test_an_import_that_is_killed_leaves_all_or_nothing(tmp_path: Path) -> None:
    LabelStore(tmp_path).keep([(ONE, Kind.OBJECTS, [DOG], "before")])
    code = (
        "import os, sqlite3, sys\nlabels = sqlite3.connect(sys.argv[1])\nlabels.execute('PRAGMA cache_size = 1')\n"
        "rows = [(b'%32d' % n, 'tags', '[]', 'killed', 0) for n in range(20000)]\n"
        "labels.executemany('INSERT INTO label VALUES (?, ?, ?, ?, ?)', rows)\n"
        f"os.kill(os.getpid(), {signal.SIGKILL})\n"
    )
    assert (
        subprocess.run([sys.executable, "-c", code, tmp_path / LABELS], check=False).returncode
        == -signal.SIGKILL
    )
    assert (tmp_path / f"{LABELS}-journal").exists()
    assert [each.origin for each in LabelStore(tmp_path).tallies()] == ["before"]


def test_others_can_read_while_an_import_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, connect = LabelStore(tmp_path), sqlite3.connect
    store.keep([(ONE, Kind.TAGS, ["a"], "x")])
    read_meanwhile: list[tuple[int]] = []

    class Watched(sqlite3.Connection):
        """Somebody reads when all rows are written, and the transaction is not at its end."""

        def executemany(self, statement: str, rows: Any, /) -> sqlite3.Cursor:
            cursor = super().executemany(statement, rows)
            with contextlib.closing(connect(tmp_path / LABELS, timeout=0)) as other:
                read_meanwhile.append(other.execute("SELECT COUNT(*) FROM label").fetchone())
            return cursor

    monkeypatch.setattr(sqlite3, "connect", partial(connect, factory=Watched))
    # More than SQLite keeps in memory by itself.
    store.keep([(b"%32d" % number, Kind.TAGS, ["x" * 1000], "y") for number in range(5000)])
    assert {*read_meanwhile} == {(1,)}
    assert sum(each.images for each in store.tallies()) == 5001


def test_who_asks_whether_labels_have_changed_leaves_the_locks_of_those_who_read(tmp_path: Path) -> None:
    store = LabelStore(tmp_path)
    store.keep([(b"%32d" % number, Kind.TAGS, ["x"], "x") for number in range(3)])
    before, reading = store.state(), store.of_kind(Kind.TAGS)
    next(reading)
    assert store.state() == before
    write = "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0).execute('BEGIN EXCLUSIVE')"
    told = subprocess.run([sys.executable, "-c", write, tmp_path / LABELS], capture_output=True, text=True)
    assert "database is locked" in told.stderr
    assert len([*reading]) == 2
    store.forget("x")
    assert store.state() != before


def test_a_damaged_file_of_labels_is_named(tmp_path: Path) -> None:
    (tmp_path / LABELS).write_text("this is no database" * 100)
    with pytest.raises(LedgerDamaged, match=f"{LABELS} is damaged: file is not a database"):
        LabelStore(tmp_path).tallies()
    (tmp_path / LABELS).unlink()
    LabelStore(tmp_path).keep([(ONE, Kind.TAGS, ["a"], "x")])
    with sqlite3.connect(tmp_path / LABELS) as connection:
        connection.execute("UPDATE label SET value = '[1]'")
    connection.close()
    with pytest.raises(LedgerDamaged, match="Import the labels again"):
        next(LabelStore(tmp_path).of_kind(Kind.TAGS))
