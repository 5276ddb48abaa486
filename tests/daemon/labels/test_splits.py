"""The split of a data set: what is for validation or tests is never learned from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from daemon.config.loading import load
from daemon.core.errors import WrongArgument
from daemon.core.labels import Kind, ObjectLabel, is_held_out
from daemon.labels.reading import read_labels
from daemon.labels.store import LabelStore
from daemon.ledger.records import open_reader
from tests.daemon_process import Place, picture
from visiond.training.data import check, read_file, read_store

ROBOFLOW = "train: ../train/images\nval: ../valid/images\ntest: ../test/images\nnc: 1\nnames: ['dog']\n"
LAYOUT = ("train/images/1", "train/images/2", "valid/images/3", "test/images/4")
BY_PART = ("images/train/1", "images/val/3", "images/test/4")
AS_NAMED = {"1": False, "2": False, "3": True, "4": True}


def draw_dataset(folder: Path, described: str, images: tuple[str, ...] = LAYOUT) -> Path:
    for name in images:
        for file in (folder / f"{name}.ppm", folder / f"{name.replace('images', 'labels')}.txt"):
            file.parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.ppm").write_bytes(picture(int(name[-1])))
        file.write_text("0 0.5 0.5 0.5 0.5\n")
    (folder / "data.yaml").write_text(described)
    return folder


def held_out_in(folder: Path) -> dict[str, bool | None]:
    return {Path(said.name).stem: said.held_out for said in read_labels(folder, lambda why: None)}


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        (ROBOFLOW, AS_NAMED),
        # As people write them: from the folder above, of another machine, of Windows, with another key, as lists.
        ("names: [dog]\ntrain: x-1/train/images\nval: x-1/valid/images\ntest: x-1/test/images\n", AS_NAMED),
        ("names: [dog]\npath: /content/x\ntrain: train/images\nvalidation: valid\ntest: test\n", AS_NAMED),
        ("names: [dog]\npath: 'C:\\x'\ntrain: train\\images\nval: [valid/images, test/images]\n", AS_NAMED),
        ("names: [dog]\ntrain: train/images\nval: valid/images\n", AS_NAMED),  # test is not named
        ("names: [dog]\ntrain: train/images\nval: train/images\ntest:\n", {"3": True, "4": True}),
        ("names: [dog]\ntest: test/images\n", {"4": True}),
        ("names: [dog]\ntrain: train\n", {}),
        ("names: [dog]\ntrain: [train, valid, test]\nval: [valid, test]\n", {}),
        ("names: [dog]\ntrain: ../elsewhere\nval: null\n", {}),
        ("names: [dog]\n", {}),
    ],
)
def test_images_are_held_out_as_data_yaml_says(
    tmp_path: Path, described: str, expected: dict[str, bool]
) -> None:
    held_out = held_out_in(draw_dataset(tmp_path, described))
    assert {name: said for name, said in held_out.items() if said is not None} == expected


def test_a_split_may_be_a_list_of_images(tmp_path: Path) -> None:
    """As in data.yaml of COCO, and as darknet writes it."""
    draw_dataset(tmp_path, "names: [dog]\npath: ../x\ntrain: train.txt\nval: val.txt\n", BY_PART)
    (tmp_path / "train.txt").write_text("./images/train/1.jpg\n")
    (tmp_path / "val.txt").write_text("data/images/val/3.ppm\n/srv/images/test/4.ppm\n")
    assert held_out_in(tmp_path) == {"1": False, "3": True, "4": True}


@pytest.mark.parametrize(("others", "expected"), [(("valid", "test"), True), ((), None)])
def test_a_folder_with_a_file_of_coco_for_each_part_is_read_whole(
    tmp_path: Path, others: tuple[str, ...], expected: bool | None
) -> None:
    """As Roboflow exports it; with one part alone, it says nothing."""
    for part in ("train", *others):
        (tmp_path / part).mkdir()
        document = {
            "images": [{"id": 0, "file_name": "a.jpg"}],
            "categories": [{"id": 0, "name": "dog"}],
            "annotations": [{"image_id": 0, "category_id": 0, "bbox": [0, 0, 1, 1]}],
        }
        (tmp_path / part / "_annotations.coco.json").write_text(json.dumps(document))
    said = {each.name: each.held_out for each in read_labels(tmp_path, lambda why: None)}
    assert said == {"train/a.jpg": expected and False, **{f"{part}/a.jpg": expected for part in others}}


@pytest.mark.parametrize("imported", [False, True])
def test_a_training_does_not_learn_from_the_validation_or_test_of_a_data_set(
    tmp_path: Path, imported: bool
) -> None:
    if imported:
        place = Place(tmp_path)
        folder = draw_dataset(place.inbox(), ROBOFLOW)
        assert place.run_once().returncode == 0
        told = place.command("labels", "import", folder)
        assert "2 images for validation or tests: a training is scored on these" in told.stderr
        config = load(place.config)
        with open_reader(config) as reader:
            data = read_store(LabelStore(config.state.path), reader, Kind.OBJECTS, 0.1)
    else:
        folder = draw_dataset(tmp_path, ROBOFLOW)
        data = read_file(folder, folder, Kind.OBJECTS, 0.1)
    assert sorted(Path(each.file).stem for each in data.learnt) == ["1", "2"]
    assert sorted(Path(each.file).stem for each in data.held_out) == ["3", "4"]
    assert data.said == 2


def test_a_training_of_an_image_in_two_parts_learns_from_neither(tmp_path: Path) -> None:
    """The same bytes for tests and to learn from."""
    folder = draw_dataset(tmp_path, ROBOFLOW)
    (folder / "train/images/2.ppm").write_bytes((folder / "test/images/4.ppm").read_bytes())
    data = read_file(folder, folder, Kind.OBJECTS, 0)
    assert [Path(each.file).stem for each in data.learnt] == ["1"]


def test_a_data_set_without_anything_to_learn_from_is_refused_with_the_reason(tmp_path: Path) -> None:
    folder = draw_dataset(tmp_path, "names: [dog]\nval: valid\ntest: [train, test]\n")
    with pytest.raises(WrongArgument, match="nothing to learn: all are for validation or tests"):
        check(read_file(folder, folder, Kind.OBJECTS, 0))


def test_the_split_stays_with_the_labels_and_goes_with_the_last(tmp_path: Path) -> None:
    one, store = b"1" * 32, LabelStore(tmp_path)
    dog = [ObjectLabel("dog", (0.0, 0.0, 1.0, 1.0))]

    def held_out() -> bool | None:
        with store.lookup() as find:
            return next((label.held_out for label in find(one).values()), None)

    store.keep([(one, Kind.OBJECTS, dog, "data set"), (one, Kind.TAGS, ["dog"], "tags.csv")], {one: True})
    store.keep([(one, Kind.OBJECTS, dog, "corrected.json")])
    assert held_out() is True
    store.forget("corrected.json")
    assert held_out() is True
    store.forget("tags.csv")
    store.keep([(one, Kind.TAGS, ["dog"], "tags.csv")])
    assert held_out() is None


def test_scores_and_exports_have_the_split_of_the_data_set(tmp_path: Path) -> None:
    place = Place(tmp_path)
    folder = draw_dataset(place.inbox(), ROBOFLOW)
    assert place.run_once().returncode == 0
    assert place.command("labels", "import", folder).returncode == 0
    told = place.command("score", "--only", "objects", "--held-out", "0.1", "--json")
    assert {each["labelled"] for each in json.loads(told.stdout)} == {2}
    made = place.folder / "made"
    assert place.command("export", "--labels", "--format", "yolo", made).returncode == 0
    assert {file.stem[0] for file in (made / "images" / "val").rglob("*.ppm")} == {"3", "4"}
    table = place.folder / "labels.csv"
    assert place.command("export", "--labels", table).returncode == 0
    assert place.command("labels", "forget", "inbox").returncode == 0
    assert json.loads(place.command("labels", "import", table, "--json").stdout)["held_out"] == 2


def test_a_share_of_all_images_has_those_to_learn_from_too() -> None:
    assert is_held_out(b"\xff" * 32, 1, said=False)
    assert not is_held_out(b"\x00" * 32, 0.5, said=False)
    assert is_held_out(b"\xff" * 32, 0, said=True)
