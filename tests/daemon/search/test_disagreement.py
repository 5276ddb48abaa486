"""How much answers disagree: each measure alone, with answers as sidecars have them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from daemon.core.labels import Kind, Label, ObjectLabel
from daemon.core.messages import Output
from daemon.ledger.record import Look
from daemon.search.disagreement import (
    MEASURES,
    doubt_of_caption,
    doubt_of_class,
    doubt_of_objects,
    doubt_of_tags,
    doubt_of_text,
    measure,
    objects_are_others,
    pool,
    tags_are_others,
)
from tests.daemon.search.place import page
from tests.makers import MODELS, make_record

ROOT = Path(__file__).parents[3]
DOG, CAT = (10.0, 10.0, 50.0, 50.0), (60.0, 10.0, 90.0, 50.0)


def objects(*found: tuple[str, float, tuple[float, ...]]) -> dict[str, Any]:
    return {"detections": [{"label": label, "score": score, "box": box} for label, score, box in found]}


def tags(**scores: float) -> dict[str, Any]:
    return {"tags": [{"label": label, "score": score} for label, score in scores.items()]}


def differ(stage: str, first: Any, second: Any) -> float:
    found = MEASURES["looks", stage].function(first, second)
    assert found is not None
    assert found == pytest.approx(MEASURES["models", stage].function(second, first)), "in either order"
    return found


ANSWERS = {
    "ocr": (page("Invoice 17\ntotal 4.50"), page("Invoice 11\ntotal 4.50"), page("")),
    "yolo": (objects(("dog", 0.9, DOG)), objects(("dog", 0.9, (12.0, 10.0, 50.0, 50.0))), objects(("cat", 0.9, DOG))),
    "clip": (tags(dog=0.6, cat=0.3), tags(dog=0.6, cow=0.3), tags(car=0.9)),
    "blip": ({"text": "A dog on a lawn"}, {"text": "a dog on a bed"}, {"text": "the night sky"}),
    "classifier": ({"scores": {"safe": 0.9, "not": 0.1}}, {"scores": {"safe": 0.6, "not": 0.4}}, {"scores": {"not": 1.0}}),
}  # fmt: skip


@pytest.mark.parametrize("stage", ANSWERS)
def test_equal_answers_differ_by_nothing_near_ones_a_little_and_others_much(stage: str) -> None:
    same, near, other = (differ(stage, ANSWERS[stage][0], each) for each in ANSWERS[stage])
    assert same == pytest.approx(0.0)
    assert same < near < other
    assert other > 0.8


def test_letters_and_spaces_that_only_look_different_are_no_difference() -> None:
    assert differ("ocr", page("Total  4.50"), page("total\n4.50")) == 0.0
    assert differ("clip", tags(Dog=0.9), tags(dog=0.9)) == 0.0
    assert 0 < differ("blip", {"text": "一只狗在草地上"}, {"text": "一只猫在草地上"}) < 0.5


def test_a_swapped_label_counts_as_much_among_many_boxes_as_alone() -> None:
    """A person corrects the worst box, not the mean one."""
    many = [("boat", 0.9, (x, 0.0, x + 9.0, 9.0)) for x in range(100, 400, 10)]
    alone = differ("yolo", objects(("dog", 0.9, DOG)), objects(("cat", 0.9, DOG)))
    among = differ("yolo", objects(("dog", 0.9, DOG), *many), objects(("cat", 0.9, DOG), *many))
    assert alone == pytest.approx(0.9)
    assert among > 0.8


def test_a_sure_object_that_nobody_labelled_says_more_than_an_unsure_one() -> None:
    given = [ObjectLabel("dog", DOG)]
    found = [
        objects_are_others(objects(("dog", 0.9, DOG), ("cat", score, CAT)), given) for score in (0.3, 0.95)
    ]
    assert found[0] < 0.35 < 0.9 < found[1]


def test_what_is_found_in_a_crowd_is_no_disagreement() -> None:
    crowd = ObjectLabel("person", (0.0, 0.0, 100.0, 100.0), crowd=True)
    inside = objects(("person", 0.9, (0.0, 0.0, 90.0, 90.0)))
    assert objects_are_others(inside, [crowd]) == 0.0
    assert objects_are_others(inside, []) == pytest.approx(0.9)


def test_a_low_score_a_guessed_line_and_a_small_margin_are_doubts() -> None:
    assert doubt_of_objects(objects(("dog", 0.9, DOG), ("cat", 0.26, CAT))) == pytest.approx(0.74)
    assert doubt_of_tags(tags(dog=0.5, cat=0.4)) == pytest.approx(0.9)
    assert doubt_of_class({"label": "a", "score": 0.6, "scores": {"a": 0.6, "b": 0.4}}) == pytest.approx(0.4)
    assert doubt_of_caption({"text": "a dog", "similarity": 0.3}) == pytest.approx(0.7)
    lines = page("Invoice 17\ntotal 4.50")
    assert doubt_of_text(lines) == pytest.approx(0.1)
    lines["lines"][1]["guessed"] = True
    assert doubt_of_text(lines) == 1.0


def test_without_anything_to_measure_there_is_no_score() -> None:
    assert doubt_of_objects(objects()) is None
    assert doubt_of_tags(tags(dog=0.5)) is None
    assert doubt_of_text(page("")) is None
    assert doubt_of_caption({"text": "a dog", "similarity": None}) is None
    assert doubt_of_class({"label": "age", "score": 31.5, "scores": {"age": 31.5}}) is None


def encode(**answers: Any) -> dict[str, Output]:
    return {stage: Output(msgspec.json.encode(answer), 0.1) for stage, answer in answers.items()}


def test_an_image_has_the_scores_of_all_signals_that_it_has_answers_for(tmp_path: Path) -> None:
    first, near, other = ANSWERS["yolo"]
    record = replace(make_record(tmp_path), outputs=encode(yolo=first, clip=ANSWERS["clip"][0]))
    yolo = next(model for model in MODELS if model.stage == "yolo")
    record.looks = {
        "one": Look(yolo, encode(yolo=near)["yolo"]),
        "two": Look(yolo, encode(yolo=other)["yolo"]),
        "three": Look(yolo, None, "stage", "it failed"),
    }
    labels = {
        Kind.OBJECTS: Label([ObjectLabel("dog", DOG)], "me", 1.0),
        Kind.TEXT: Label("no answer", "me", 1.0),
    }
    found = measure(record, {"clip": msgspec.json.encode(ANSWERS["clip"][2])}, labels)
    assert found == pytest.approx(
        {
            ("scores", "yolo"): 0.1,
            ("scores", "clip"): 0.7,
            ("looks", "yolo"): 0.9,  # of two looks the one that differs more
            ("models", "clip"): 1.0,
            ("labels", "yolo"): 0.0,
        }
    )


def test_an_answer_of_another_form_is_left_out(tmp_path: Path) -> None:
    record = replace(make_record(tmp_path), outputs=encode(yolo={"boxes": []}, clip=ANSWERS["clip"][0]))
    assert [*measure(record, {"yolo": b"[]"}, {})] == [("scores", "clip")]


def test_the_margin_of_labels_is_that_of_cleanlab() -> None:
    rank = pytest.importorskip("cleanlab.rank")
    chance = np.random.default_rng(1)
    probabilities = chance.dirichlet(np.full(7, 0.4), 500)
    given = chance.integers(0, 7, 500)
    expected = rank.get_normalized_margin_for_each_label(given, probabilities)
    found = [
        1 - tags_are_others(tags(**{f"t{at}": score for at, score in enumerate(row)}), [f"t{label}"])
        for row, label in zip(probabilities.tolist(), given, strict=True)
    ]
    assert found == pytest.approx(expected)


def test_parts_are_pooled_as_by_cleanlab() -> None:
    softmin = pytest.importorskip("cleanlab.internal.object_detection_utils").softmin1d
    chance = random.Random(1)
    for _ in range(200):
        parts = [chance.random() for _ in range(chance.randint(1, 20))]
        expected = 1 - softmin(np.array([1 - part for part in parts]), temperature=0.1, axis=0)
        assert pool(parts) == pytest.approx(expected)


def test_the_documentation_has_every_measure_with_its_source() -> None:
    text = " ".join((ROOT / "docs" / "disagreement.md").read_text().split())
    for (signal, stage), each in MEASURES.items():
        assert each.about in text, (signal, stage)
        assert each.source.split(". Two models")[0] in text, (signal, stage)
