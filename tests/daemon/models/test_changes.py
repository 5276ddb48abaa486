"""How far two answers are apart, held against the libraries of the field; and intervals, held against populations."""

from __future__ import annotations

import contextlib
import io
import random
from typing import Any

import msgspec
import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from rapidfuzz.distance import Levenshtein

from daemon.core.labels import Kind, Label, ObjectLabel
from daemon.models.changes import (
    AnswerChange,
    compare_objects,
    compare_scores,
    compare_text,
    compare_words,
    estimate_share,
    measure_change,
    measure_error,
)
from daemon.models.comparison_page import describe_answer

Objects = list[tuple[str, float, tuple[float, float, float, float]]]
LABELS = ["dog", "cat"]


def draw_objects(chance: random.Random, count: int) -> Objects:
    found = []
    for _ in range(count):
        x, y, w, h = (chance.uniform(10, 40) for _ in range(4))
        found.append((chance.choice(LABELS), chance.random(), (x, y, x + w, y + h)))
    return found


def f1_by_coco(before: Objects, after: Objects) -> float:
    """Of the boxes, by pycocotools' own matching at one IoU."""
    matched = 0
    for label in LABELS:
        truth, said = ([each for each in found if each[0] == label] for found in (before, after))
        if not truth or not said:
            continue
        datasets = []
        for objects in (truth, said):
            coco = COCO()
            coco.dataset = {
                "images": [{"id": 0}],
                "categories": [{"id": 1}],
                "annotations": [
                    {
                        **{"id": n, "image_id": 0, "category_id": 1, "iscrowd": 0, "score": score},
                        **{"bbox": [a, b, c - a, d - b], "area": (c - a) * (d - b)},
                    }
                    for n, (_, score, (a, b, c, d)) in enumerate(objects, 1)
                ],
            }
            coco.createIndex()
            datasets.append(coco)
        evaluation = COCOeval(*datasets, "bbox")
        evaluation.params.iouThrs, evaluation.params.areaRng = np.array([0.5]), [[0, 1e10]]
        evaluation.params.areaRngLbl = ["all"]
        evaluation.evaluate()
        matched += sum(int((each["dtMatches"] > 0).sum()) for each in evaluation.evalImgs if each)
    return 2 * matched / (len(before) + len(after))


@pytest.mark.parametrize("seed", range(40))
def test_a_change_of_objects_is_that_of_pycocotools_matching(seed: int) -> None:
    chance = random.Random(seed)
    before = draw_objects(chance, chance.randrange(1, 8))
    moved: Objects = [
        (label, chance.random(), tuple(edge + chance.gauss(0, 5) for edge in box))  # type: ignore[misc]
        for label, _, box in before
        if chance.random() < 0.8
    ]
    after = [each for each in moved if each[2][0] < each[2][2] and each[2][1] < each[2][3]]
    after += draw_objects(chance, chance.randrange(4))
    with contextlib.redirect_stdout(io.StringIO()):
        expected = 1 - f1_by_coco(before, after)
    assert compare_objects(before, after).amount == pytest.approx(expected, abs=1e-12)


def test_objects_change_by_their_labels_and_not_by_their_scores_or_the_case_of_a_label() -> None:
    box = (0.0, 0.0, 10.0, 10.0)
    assert compare_objects([("dog", 0.9, box)], [("Dog", 0.1, box)]) == AnswerChange(0.0, False)
    assert compare_objects([("dog", 0.9, box)], [("cat", 0.9, box)]) == AnswerChange(1.0, True)
    assert compare_objects([], []) == AnswerChange(0.0, False)
    assert compare_objects([], [("dog", 0.9, box)]) == AnswerChange(1.0, True)


def edits_by_table(one: str, other: str) -> int:
    """Wagner and Fischer (1974)."""
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        before, row = row, [i]
        for j, said in enumerate(other, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (letter != said)))
    return row[-1]


@pytest.mark.parametrize("seed", range(20))
def test_a_change_of_text_is_its_character_error_rate(seed: int) -> None:
    chance = random.Random(seed)
    before = "".join(chance.choices("abc ", k=chance.randrange(1, 30))).strip() or "a"
    after = "".join(chance.choices("abc ", k=chance.randrange(30)))
    plain = [" ".join(text.split()) for text in (before, after)]
    edits = edits_by_table(*plain)
    assert edits == Levenshtein.distance(*plain)
    assert compare_text(before, after).amount == pytest.approx(min(1.0, edits / len(plain[0])))


def test_white_space_is_no_change_of_text_and_text_that_was_not_there_is_a_whole_one() -> None:
    assert compare_text("one  two\n", "one two") == AnswerChange(0.0, False)
    assert compare_text("", "one") == AnswerChange(1.0, True)
    assert compare_text("", "") == AnswerChange(0.0, False)


def test_a_caption_changes_by_its_words() -> None:
    assert compare_words("A dog on a beach", "a cat on a beach") == AnswerChange(0.2, True)


def test_scores_that_add_up_to_1_change_by_their_total_variation_and_the_first_label_decides() -> None:
    before, after = {"cat": 0.75, "dog": 0.25}, {"dog": 0.5, "cup": 0.5}
    assert compare_scores(before, after) == AnswerChange(0.75, True)
    assert compare_scores(before, {"cat": 0.5, "dog": 0.5}) == AnswerChange(0.25, False)
    assert compare_scores({"rating": 4.0}, {"rating": 6.0}) == AnswerChange(0.2, False)
    assert compare_scores({}, {}) == AnswerChange(0.0, False)


def test_each_stage_has_a_measure_and_a_plugin_is_compared_as_a_whole() -> None:
    def measure(stage: str, before: Any, after: Any) -> AnswerChange:
        return measure_change(stage, (100, 100), msgspec.json.encode(before), msgspec.json.encode(after))

    assert (
        measure("blip", {"text": "a b", "similarity": 0.1}, {"text": "a c", "similarity": 0.9}).amount == 0.5
    )
    tags = [[{"label": label, "score": 1.0}] for label in LABELS]
    assert measure("clip", {"tags": tags[0]}, {"tags": tags[1]}) == AnswerChange(1.0, True)
    classes = [{"label": each, "score": 1.0, "scores": {each: 1.0}} for each in LABELS]
    assert measure("classifier_safety", *classes) == AnswerChange(1.0, True)


def test_an_answer_that_is_nearer_to_the_labels_has_a_smaller_error() -> None:
    def error(kind: Kind, value: Any, answer: Any) -> float:
        return measure_error(kind, (100, 100), Label(value, "file", 0.0), msgspec.json.encode(answer))

    detection = {"label": "dog", "score": 0.9, "box": [0, 0, 10, 10]}
    dog = ObjectLabel("dog", (0.0, 0.0, 10.0, 10.0))
    assert error(Kind.OBJECTS, [dog], {"detections": [detection]}) == 0.0
    assert error(Kind.OBJECTS, [dog], {"detections": []}) == 1.0
    assert error(Kind.CAPTION, ["a cat", "a dog"], {"text": "a dog", "similarity": None}) == 0.0
    assert error(Kind.TAGS, ["dog"], {"tags": [{"label": "dog", "score": 0.9}]}) == 0.0
    assert error(Kind.TEXT, "abcd", {"text": "abce", "lines": []}) == 0.25
    assert [error(Kind.CLASSES, "Safe", {"label": each}) for each in ("safe", "nsfw")] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("share", "drawn"), [(0.005, 2000), (0.05, 300), (0.3, 500), (0.97, 400), (0.3, 6000)]
)
def test_an_interval_holds_the_share_of_its_population_95_of_100_times(share: float, drawn: int) -> None:
    """By 1,000 seeded samples of 10,000 images: at least 93 of 100, and not so often that it must be too wide."""
    population, chance = 10_000, np.random.default_rng(int(share * 1000))
    having = round(share * population)
    hits = chance.hypergeometric(having, population - having, drawn, size=1000)
    held = [estimate_share(int(each), drawn, population) for each in hits]
    count = sum(low <= having / population <= high for _, low, high in held)
    assert 930 <= count <= 985


def test_a_share_of_all_images_is_exact_and_of_none_it_may_be_anything() -> None:
    assert estimate_share(3, 24, 24) == (0.125, 0.125, 0.125)
    assert estimate_share(0, 0, 24)[1:] == (0.0, 1.0)


def test_a_page_shows_the_answer_of_a_plug_in_as_it_is_whatever_its_keys_mean() -> None:
    for answer in (b'{"lines":7}', b'{"detections":[{"name":"a"}]}', b'["a"]'):
        assert describe_answer("plugin", answer) == {"text": answer.decode(), "shapes": []}
    shown = describe_answer("yolo", b'{"detections":[{"label":"dog","score":0.9,"box":[0,0,1,1]}]}')
    assert (shown["text"], len(shown["shapes"])) == ("1 × dog", 1)
