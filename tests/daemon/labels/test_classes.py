"""Labels of people for classifiers, from the file to the score, with a ledger of fakes."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daemon.config.state import LABELS
from daemon.core.labels import Kind
from daemon.labels.metrics import ClassMeasure
from daemon.labels.reading import read_labels
from daemon.labels.store import LabelStore
from daemon.search.disagreement import class_is_other
from tests.daemon_process import Place

IMAGES = 12
SAFETY, RATING = "classifier_safety", "classifier_rating"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Place:
    stages = ["ocr", "yolo", "clip", "blip", SAFETY, RATING]
    place = Place(tmp_path_factory.mktemp("classes"), {"pipeline": {"stages": stages}})
    place.configure({"stages": {name: {"backend": "fake"} for name in stages}})
    place.drop_many(range(IMAGES))
    assert place.run_once().returncode == 0
    return place


@pytest.fixture
def place(made: Place) -> Place:
    """Without labels."""
    (made.folder / "state" / LABELS).unlink(missing_ok=True)
    return made


def answers_of(place: Place) -> list[dict[str, str]]:
    """Digest and the labels of the classifiers of each image."""
    shown = csv.DictReader(place.command("export", "-").stdout.splitlines())
    names = ("digest", f"{SAFETY}_label", f"{RATING}_label")
    return [{name: row[name] for name in names} for row in shown]


def import_table(place: Place, rows: list[dict[str, str]], name: str = "said.csv") -> None:
    with (place.folder / name).open("w", newline="") as file:
        table = csv.DictWriter(file, [*rows[0]])
        table.writeheader()
        table.writerows(rows)
    told = place.command("labels", "import", place.folder / name)
    assert told.returncode == 0, told.stderr
    assert f"classes of {len(rows)} image" in told.stdout


def scores_of(place: Place) -> dict[str, dict[str, Any]]:
    return {each["stage"]: each for each in json.loads(place.command("score", "--json").stdout)}


def test_corrected_columns_of_an_export_are_labels_of_each_classifier(place: Place) -> None:
    rows = answers_of(place)
    for row in rows[:3]:
        row[f"{SAFETY}_label"] = "corrected"
    import_table(place, rows)
    found = scores_of(place)
    assert found.keys() == {SAFETY, RATING}
    assert found[RATING]["figures"]["accuracy"] == [1.0, 1.0, 1.0]
    value, low, high = found[SAFETY]["figures"]["accuracy"]
    assert value == (IMAGES - 3) / IMAGES
    assert 0 < low < value < high <= 1
    assert found[SAFETY]["classes"]["corrected"] == 0.0
    table = place.command("score", "--by-label").stdout
    assert all(each in table for each in (SAFETY, RATING, "accuracy", "macro F1"))


def test_labels_of_one_classifier_leave_those_of_another_and_replace_its_own(place: Place) -> None:
    digests = [row["digest"] for row in answers_of(place)]
    import_table(place, [{"digest": digest, SAFETY: "safe"} for digest in digests])
    import_table(place, [{"digest": digest, RATING: "good"} for digest in digests[:6]], "ratings.csv")
    import_table(place, [{"digest": digests[0], SAFETY: "nsfw"}], "later.csv")
    said = dict(LabelStore(place.folder / "state").of_kind(Kind.CLASSES))
    values = [said[bytes.fromhex(digest.removeprefix("sha256:"))].value for digest in digests]
    assert values[0] == {SAFETY: "nsfw", RATING: "good"}
    assert values[1:6] == [{SAFETY: "safe", RATING: "good"}] * 5
    assert values[6:] == [{SAFETY: "safe"}] * 6


def test_they_are_shown_listed_exported_and_first_where_they_differ_from_the_answers(place: Place) -> None:
    rows = answers_of(place)
    rows[4][f"{SAFETY}_label"] = "corrected"
    import_table(place, rows)
    told = place.command("export", "--order", "disagreement:labels", "--limit", "1", "-")
    [first] = csv.DictReader(told.stdout.splitlines())
    assert first["digest"] == rows[4]["digest"]
    assert f"{SAFETY}: corrected" in place.command("show", first["path"]).stdout
    assert "classes" in place.command("labels", "list").stdout
    told = place.command("export", "--labels", place.folder / "all.csv", "--force")
    assert told.returncode == 0, told.stderr
    store = LabelStore(place.folder / "state")
    before = {digest: label.value for digest, label in store.of_kind(Kind.CLASSES)}
    assert place.command("labels", "forget", "said.csv").returncode == 0
    assert place.command("labels", "import", place.folder / "all.csv").returncode == 0
    assert {digest: label.value for digest, label in store.of_kind(Kind.CLASSES)} == before


def test_a_choice_of_label_studio_in_a_control_named_after_a_classifier_is_its_class(tmp_path: Path) -> None:
    def choose(*classes: str) -> dict[str, Any]:
        return {"type": "choices", "from_name": SAFETY, "value": {"choices": classes}}

    tags = {"type": "choices", "from_name": "tags", "value": {"choices": ["beach"]}}
    results: list[list[Any]] = [[choose("safe"), tags], [choose("safe", "nsfw")], []]
    tasks = [
        {"data": {"image": f"{n}.jpg"}, "annotations": [{"result": each}]} for n, each in enumerate(results)
    ]
    (tmp_path / "a.json").write_text(json.dumps(tasks))
    left_out = list[str]()
    said = [(each.name, each.kind, each.value) for each in read_labels(tmp_path / "a.json", left_out.append)]
    assert [each for each in said if each[1] is Kind.CLASSES] == [("0.jpg", Kind.CLASSES, {SAFETY: "safe"})]
    assert [each[2] for each in said if each[1] is Kind.TAGS] == [["beach"], [], []]
    assert left_out == ["results of the type several classes"]


def test_accuracy_and_f1_are_those_of_their_definitions_also_for_images_drawn_twice() -> None:
    chance = random.Random(5)
    given = [chance.choice("abc") for _ in range(60)]
    said = [each if chance.random() < 0.7 else chance.choice("ABCD") for each in given]
    often = np.array([chance.randrange(3) for _ in given], float)
    pairs = [(g, s.casefold()) for g, s, n in zip(given, said, often, strict=True) for _ in range(int(n))]
    scores = []
    for name in sorted({name for pair in pairs for name in pair}):
        hits = sum(pair == (name, name) for pair in pairs)
        precision = hits / max(1, sum(answer == name for _, answer in pairs))
        recall = hits / max(1, sum(label == name for label, _ in pairs))
        scores.append(2 * precision * recall / (precision + recall) if hits else 0.0)
    expected = {"accuracy": sum(g == s for g, s in pairs) / len(pairs), "macro F1": np.mean(scores)}
    assert ClassMeasure(given, said)(often) == pytest.approx(expected)


def test_a_class_is_the_more_another_the_surer_the_classifier_was() -> None:
    answer = {"label": "safe", "score": 0.75, "scores": {"safe": 0.75, "nsfw": 0.25}}
    assert [class_is_other(answer, each) for each in ("SAFE", "nsfw", "other")] == [0.25, 0.75, 0.875]
