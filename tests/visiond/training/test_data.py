"""Labels become images to learn from, and others that are held out."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from daemon.config.loading import load
from daemon.core.errors import MissingLibrary, ModelsUnusable, WrongArgument
from daemon.core.labels import Kind, ObjectLabel, is_held_out
from daemon.labels.store import LabelStore
from daemon.ledger.records import open_reader
from daemon.terminal import progress
from stages.images.decoder import Decoders
from tests.daemon_process import Place, picture
from tests.stages.captioners import make_blip
from visiond.training import data, job
from visiond.training.command import choose_places, train_app, train_own
from visiond.training.data import LabelledImage, check, read_file, read_store, split
from visiond.training.job import check_base
from visiond.training.launch import describe


def make_samples(count: int) -> list[LabelledImage]:
    digests = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(count)]
    return [LabelledImage(f"{n}.jpg", digest, 10, 10, words=["a"]) for n, digest in enumerate(digests)]


def test_an_image_stays_on_its_side_when_labels_are_added() -> None:
    few, many = (split(Kind.TAGS, make_samples(count), Counter(), 0.2) for count in (200, 400))
    assert {each.file for each in few.held_out} < {each.file for each in many.held_out}
    assert {each.file for each in few.learnt} < {each.file for each in many.learnt}
    assert 50 < len(many.held_out) < 110
    assert few.digest != many.digest
    assert all(is_held_out(bytes.fromhex(each.digest), 0.2) for each in many.held_out), "as scores ask"
    assert not any(is_held_out(bytes.fromhex(each.digest), 0.2) for each in many.learnt)


def test_one_of_a_few_images_is_held_out() -> None:
    data = split(Kind.TAGS, make_samples(3), Counter(), 0.01)
    assert (len(data.learnt), len(data.held_out)) == (2, 1)
    assert not split(Kind.TAGS, make_samples(3), Counter(), 0).held_out


def test_a_training_for_which_all_images_are_held_out_is_refused() -> None:
    with pytest.raises(WrongArgument, match="All labelled images are held out"):
        check(split(Kind.TAGS, make_samples(3), Counter(), 1))


def test_an_image_without_a_tag_teaches_nothing_but_one_without_an_object_does() -> None:
    empty = LabelledImage("a.jpg", "00" * 32, 10, 10)
    tags = split(Kind.TAGS, [empty], Counter(), 0)
    assert (tags.learnt, tags.left_out) == ([], {"images without a tag or caption": 1})
    assert split(Kind.OBJECTS, [empty], Counter(), 0).learnt == [empty]
    with pytest.raises(WrongArgument, match=r"no labels of the kind tags .* without a tag or caption \(1\)"):
        check(tags)


@pytest.mark.parametrize("on_success", ["keep", "move"])
def test_labels_that_were_imported_are_those_of_files_that_are_here(tmp_path: Path, on_success: str) -> None:
    place = Place(tmp_path, {"inbox": [{"settle_seconds": 0.1, "on_success": on_success}]})
    for number in range(4):
        place.drop(f"{number}.ppm", picture(number))
    assert place.run_once().returncode == 0
    boxes = [{"image_id": number, "category_id": 7, "bbox": [1, 1, 2, 2]} for number in range(4)]
    images = [{"id": number, "file_name": f"{number}.ppm"} for number in range(4)]
    said = {"images": images, "annotations": boxes, "categories": [{"id": 7, "name": "dog"}]}
    (tmp_path / "said.json").write_text(json.dumps(said))
    assert place.command("labels", "import", tmp_path / "said.json").returncode == 0
    files = {file.name: file for file in tmp_path.rglob("*.ppm")}
    assert all(place.inbox() in file.parents for file in files.values()) is (on_success == "keep")
    files["1.ppm"].unlink()
    files["2.ppm"].write_bytes(b"cut")
    if on_success == "move":
        os.utime(files["0.ppm"], (1e9, 1e9))  # as on a disk with less exact times
    config = load(place.config)
    with open_reader(config) as reader:
        data = read_store(LabelStore(config.state.path), reader, Kind.OBJECTS, 0)
    assert sorted(Path(each.file).name for each in data.learnt) == ["0.ppm", "3.ppm"]
    assert {each.objects[0] for each in data.learnt} == {ObjectLabel("dog", (1.0, 1.0, 3.0, 3.0))}
    assert data.left_out == {"labels of images whose files are not on this machine, or have changed": 2}
    assert data.names == ["dog"]


def test_names_of_yolo_without_a_suffix_find_their_images(tmp_path: Path) -> None:
    (tmp_path / "said" / "labels").mkdir(parents=True)
    (tmp_path / "photos").mkdir()
    (tmp_path / "said" / "data.yaml").write_text("names: [dog]")
    (tmp_path / "said" / "labels" / "a.txt").write_text("0 0.5 0.5 0.5 0.5")
    (tmp_path / "said" / "labels" / "gone.txt").write_text("0 0.5 0.5 0.5 0.5")
    (tmp_path / "photos" / "a.ppm").write_bytes(picture(1))
    data = read_file(tmp_path / "said", tmp_path / "photos", Kind.OBJECTS, 0)
    [sample] = data.learnt
    assert sample.file == str(tmp_path / "photos" / "a.ppm")
    assert data.left_out == {f"images that are not in {tmp_path / 'photos'}": 1}


def test_an_image_that_cannot_be_decoded_is_left_out_by_its_name(tmp_path: Path) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8)
    for name in ("whole.png", "broken.png"):
        Image.fromarray(noise).save(tmp_path / name)
    with (tmp_path / "broken.png").open("r+b") as file:  # only its pixels: a look at the header finds nothing
        file.seek(4000)
        file.write(bytes(200))
    (tmp_path / "tags.csv").write_text("file_name,tags\nwhole.png,dog\nbroken.png,cat\n")
    data = read_file(tmp_path / "tags.csv", tmp_path, Kind.TAGS, 0)
    assert [Path(each.file).name for each in data.learnt] == ["whole.png"]
    [(why, count)] = [(why, count) for why, count in data.left_out.items() if "no image" in why]
    assert why.endswith(": broken.png")
    assert count == 1


def test_lines_say_how_many_images_are_decoded_and_ctrl_c_ends_that_at_once_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (600, 600, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "0.png")
    for number in range(1, 60):
        os.link(tmp_path / "0.png", tmp_path / f"{number}.png")
    rows = (f"{number}.png,dog\n" for number in range(60))
    (tmp_path / "tags.csv").write_text("file_name,tags\n" + "".join(rows))
    lines, looks, look = list[str](), list[Path](), data._look

    def print_line(text: str) -> None:
        lines.append(text)
        signal.raise_signal(signal.SIGINT)

    def note_look(decoders: Decoders, file: Path) -> object:
        looks.append(file)
        return look(decoders, file)

    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(progress, "print_line", print_line)
    monkeypatch.setattr(data, "_look", note_look)
    monkeypatch.setattr(job, "check_base", lambda *_: None)
    typed = ["tags", "--labels", str(tmp_path / "tags.csv"), "--out", str(tmp_path / "mine")]
    told = CliRunner().invoke(train_app, typed)
    assert told.exit_code == 130
    assert told.output.startswith("Decoding each image once")
    assert "Stopped before the training began; nothing was written." in told.output
    assert [line.partition(",")[0] for line in lines] == ["1 of 60 images"]
    assert len(looks) < 30
    assert not [*tmp_path.glob("mine*")]


def test_a_base_that_cannot_be_trained_is_refused_before_it_is_pulled_and_nothing_is_left(
    tmp_path: Path,
) -> None:
    config, blip = load(Place(tmp_path / "place").config), tmp_path / "blip"
    make_blip(blip)
    with pytest.raises(WrongArgument, match="yolov8n cannot be trained: it is of the backend ultralytics"):
        check_base("detector", "yolov8n", config.models.folder)
    with pytest.raises(ModelsUnusable, match="blip has no weights for yolo"):
        check_base("detector", str(blip), config.models.folder)
    check_base("captions", str(blip), config.models.folder)
    assert not config.models.folder.exists()


def test_a_library_that_a_training_would_miss_is_named_before_labels_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, out = load(Place(tmp_path / "place").config), tmp_path / "out"
    monkeypatch.setattr("visiond.training.command.find_spec", lambda name: name != "scipy" or None)
    options: Any = SimpleNamespace(out=out, work=out, base="", labels=None, trackers=(), resume=False)
    with pytest.raises(MissingLibrary, match=r"needs scipy: pip install 'visiond\[train\]'"):
        train_own("detector", options, config, [], force=False, prepare=True)
    with pytest.raises(WrongArgument, match="--base says which model"):
        train_own("tags", options, config, [], force=False, prepare=True)


def test_a_gpu_that_is_not_there_is_refused_by_its_number() -> None:
    assert choose_places([], "", 2) == [("", "the CPU")] * 2
    with pytest.raises(WrongArgument, match=r"no GPU has the number 3\. There is no GPU here"):
        choose_places([], "3", 1)


@pytest.mark.parametrize(
    ("option", "number", "said"),
    [
        ("--epochs", "0", "must be greater than 0"),
        ("--learning-rate", "0", "must be greater than 0"),
        ("--held-out", "2", "less than or equal to 1"),
    ],
)
def test_a_number_that_no_training_can_have_is_refused(
    tmp_path: Path, option: str, number: str, said: str
) -> None:
    place = Place(tmp_path / "place")
    ended = place.command("train", "detector", "--base", "mini", "--out", "mine", option, number)
    assert (ended.returncode, said in " ".join(ended.stderr.split())) == (os.EX_USAGE, True)
    assert not (tmp_path / "place/mine").exists()


def test_a_line_of_the_log_says_how_long_the_rest_takes() -> None:
    line = {"progress": 0.25, "epoch": 3.0, "loss": 1.5, "images_per_second": 12.0, "memory_bytes": 0}
    assert (
        describe(line | {"elapsed": 100.0}) == " 25%  epoch 3.00  loss 1.5000  12.0 images/s, 0:05:00 to go"
    )


def test_a_training_without_a_base_says_where_the_names_are(tmp_path: Path) -> None:
    with pytest.raises(WrongArgument, match="`visiond models list --stage clip` shows"):
        check_base("tags", "", load(Place(tmp_path / "place").config).models.folder)
