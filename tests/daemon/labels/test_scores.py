"""Scores, held against the libraries of the field."""

from __future__ import annotations

import contextlib
import io
import math
import random

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from daemon.cli.labels import explain_nothing, name_apart
from daemon.core.labels import Box, Kind, ObjectLabel
from daemon.labels.metrics import (
    ObjectMeasure,
    difference,
    interval,
    measure_captions,
    measure_tags,
    measure_text,
)
from daemon.labels.scoring import Estimate, Score
from daemon.ledger.record import Model
from stages.contract.base import Provenance

WORDS = "a the dog cat man woman rides holds red blue car street on in beach ball with small large two"


def make_boxes(chance: random.Random) -> tuple[list[ObjectLabel], list[tuple[str, float, Box]]]:
    labels, answers = [], []
    for _ in range(chance.randrange(6)):
        x, y, w, h = (chance.uniform(5, 60) for _ in range(4))
        name = chance.choice(["dog", "cat", "car"])
        labels.append(ObjectLabel(name, (x, y, x + w, y + h), crowd=chance.random() < 0.1))
        for _ in range(chance.randrange(3)):
            a, b, c, d = (value + chance.gauss(0, 4) for value in (x, y, x + w, y + h))
            answers.append(
                (chance.choice([name, name, "dog"]), chance.random(), (a, b, max(a, c), max(b, d)))
            )
    return labels, answers


def score_by_coco(
    labels: list[list[ObjectLabel]], answers: list[list[tuple[str, float, Box]]]
) -> tuple[float, float]:
    """mAP and AP50, as pycocotools alone has them."""
    numbers = {"dog": 1, "cat": 2, "car": 3}
    images = [{"id": number} for number in range(len(labels))]

    def annotation(image: int, name: str, box: Box, number: int, **fields: float) -> dict[str, object]:
        x0, y0, x1, y1 = box
        size = {"bbox": [x0, y0, x1 - x0, y1 - y0], "area": (x1 - x0) * (y1 - y0), "iscrowd": 0}
        return {"id": number, "image_id": image, "category_id": numbers[name]} | size | fields

    truth = [(image, each) for image, found in enumerate(labels) for each in found]
    said = [(image, *each) for image, found in enumerate(answers) for each in found]
    known, guessed = COCO(), COCO()
    with contextlib.redirect_stdout(io.StringIO()):
        shared = {"images": images, "categories": [{"id": number} for number in numbers.values()]}
        known.dataset = shared | {
            "annotations": [
                annotation(i, o.label, o.box, n + 1, iscrowd=int(o.crowd)) for n, (i, o) in enumerate(truth)
            ]
        }
        guessed.dataset = shared | {
            "annotations": [
                annotation(i, name, box, n + 1, score=s) for n, (i, name, s, box) in enumerate(said)
            ]
        }
        known.createIndex()
        guessed.createIndex()
        evaluation = COCOeval(known, guessed, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation.stats[0], evaluation.stats[1]


@pytest.mark.parametrize("seed", range(5))
def test_the_precision_of_objects_is_that_of_pycocotools(seed: int) -> None:
    chance = random.Random(seed)
    labels, answers = zip(*[make_boxes(chance) for _ in range(60)], strict=True)
    figures = ObjectMeasure(labels, answers)(np.ones(60))
    assert (figures["mAP"], figures["AP50"]) == pytest.approx(score_by_coco([*labels], [*answers]))


def test_an_overlap_of_exactly_a_threshold_counts_as_it_does_there() -> None:
    """Of 100 × 100 pixels, so many columns: an IoU of 0.60, 0.65 and so on."""
    for columns in range(60, 100, 5):
        labels = [[ObjectLabel("dog", (0, 0, 100, 100))]]
        answers: list[list[tuple[str, float, Box]]] = [[("dog", 0.9, (0, 0, columns, 100))]]
        assert ObjectMeasure(labels, answers)(np.ones(1))["mAP"] == pytest.approx(
            score_by_coco(labels, answers)[0]
        )


@pytest.mark.parametrize("seed", range(3))
def test_an_image_that_is_drawn_twice_counts_as_two(seed: int) -> None:
    chance = random.Random(seed)
    made = [make_boxes(chance) for _ in range(20)]
    often = np.array([chance.randrange(3) for _ in made], float)
    labels, answers = zip(*made, strict=True)
    repeated = [each for each, times in zip(made, often, strict=True) for _ in range(int(times))]
    more_labels, more_answers = zip(*repeated, strict=True)
    expected = ObjectMeasure(more_labels, more_answers)(np.ones(len(repeated)))
    assert ObjectMeasure(labels, answers)(often) == pytest.approx(
        expected, abs=0.02
    )  # equal scores have another order


def test_captions_have_the_score_that_the_code_of_its_authors_gives() -> None:
    """3.2276 is what CiderScorer(n=4, sigma=6.0) of pycocoevalcap 1.2 gives for these."""
    chance = random.Random(1)

    def sentence() -> str:
        return " ".join(chance.choice(WORDS.split()) for _ in range(chance.randint(1, 12)))

    labels = [[sentence() for _ in range(chance.randint(1, 5))] for _ in range(200)]
    answers = [
        chance.choice(given)
        if chance.random() < 0.3
        else (" ".join(word for word in chance.choice(given).split() if chance.random() < 0.8) or "a")
        for given in labels
    ]
    assert measure_captions(labels, answers)(np.ones(200))["CIDEr"] == pytest.approx(3.2276050433959655)


def test_errors_of_text_are_shares_of_what_the_labels_have() -> None:
    measure = measure_text(["two  words\nhere", "", "é"], ["two words her", "x", "e\u0301"])
    assert measure(np.ones(3)) == {"CER": 2 / 15, "WER": 2 / 4}
    assert measure(np.array([0, 0, 1])) == {"CER": 0, "WER": 0}
    assert all(map(math.isnan, measure(np.array([0, 1, 0])).values()))


def test_tags_have_recall_and_precision_over_all_images() -> None:
    measure = measure_tags([["Dog", "cat"], ["car"]], [["dog"], ["bus", "car"]])
    assert measure(np.ones(2)) == {"recall": 2 / 3, "precision": 2 / 3, "F1": 2 / 3}


def test_an_interval_holds_the_true_value_about_as_often_as_it_says() -> None:
    """Recall of 0.7, in 100 samples of 200 images: at least 90 of them, where 95 are expected (p < 0.02 for fewer)."""
    chance, held = random.Random(0), 0
    for trial in range(100):
        answers = [["dog"] if chance.random() < 0.7 else [] for _ in range(200)]
        low, high = interval(measure_tags([["dog"]] * 200, answers), 200, seed=trial, resamples=200)["recall"]
        held += low <= 0.7 <= high
    assert held >= 90


def test_two_models_are_compared_on_the_same_images() -> None:
    """Each range is wide, that of the difference is not: the second is right wherever the first is, and once more."""
    labels = [["dog"]] * 100
    before = [["dog"] if number % 2 else [] for number in range(100)]
    after = [["dog"] if number % 2 or number < 20 else [] for number in range(100)]
    measures = measure_tags(labels, before), measure_tags(labels, after)
    low, high = interval(difference(*measures), 100)["recall"]
    assert 0 < low < 0.1 < high < 0.2
    assert interval(measures[0], 100)["recall"][1] > interval(measures[1], 100)["recall"][0]


def test_a_score_of_nothing_says_why() -> None:
    model = Model("yolo", "sha256:1", "", Provenance(name="mine"))

    def explain(kind: Kind, answered: set[str]) -> str:
        figures = {"mAP": Estimate(0.0, 0.0, 0.0)}
        found = Score(
            kind, model, True, 1, 1, figures, given=frozenset({"car", "dog"}), answered=frozenset(answered)
        )
        return " ".join(explain_nothing(found))

    assert "mine found no object" in explain(Kind.OBJECTS, set())
    assert "`conf` under [stages.yolo.options]" in explain(Kind.OBJECTS, set())
    assert 'names that people gave ("car", "dog"), but "a", "b", "c" and 1 more;' in explain(
        Kind.OBJECTS, {"a", "b", "c", "d"}
    )
    assert explain(Kind.OBJECTS, {"dog"}) == explain(Kind.TAGS, {"dog"}) == ""


def test_two_models_of_one_title_have_different_names_in_the_table() -> None:
    def score_of(fingerprint: str, title: str, **options: float) -> Score:
        model = Model("yolo", fingerprint, "", Provenance(name=title, options=options))
        return Score(Kind.OBJECTS, model, True, 1, 1, {})

    one, other, again = (
        score_of("1", "mine"),
        score_of("2", "mine", conf=0.1),
        score_of("3", "mine", conf=0.1),
    )
    assert name_apart([score_of("0", "mini"), one]) == ["mini", "mine"]
    assert name_apart([score_of("0", "mini"), one, other]) == ["mini", "mine", "mine (conf = 0.1)"]
    assert len({*name_apart([one, other, again])}) == 3
