from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stages.contract.binning import (
    Bin,
    Criterion,
    Thresholds,
    apply_rule,
    describe,
    is_decided,
    judge,
    load_rule,
    measure_dispersion,
    text_of,
)
from stages.registry.registry import ORDER

T = Thresholds()


def write(text: str, score: float = 0.9, height: int = 1) -> dict[str, Any]:
    return {"text": text, "score": score, "box": [[0, 0], [9, 0], [9, height], [0, height]]}


def payloads(
    boxes: int = 0,
    text: float = 0.0,
    objects: int = 0,
    kinds: int = 0,
    dispersion: float = 0.0,
    similarity: float | None = 0.0,
) -> dict[str, bytes]:
    lines = [write("two words")] * boxes
    answers = {
        "ocr": {"lines": lines, "count": boxes, "area_ratio": text},
        "yolo": {"detections": [], "count": objects, "unique": kinds, "dispersion": dispersion},
        "clip": {"embedding": {}, "tags": []},
        "blip": {"text": "a cat", "similarity": similarity},
    }
    return {stage: msgspec.json.encode(answer) for stage, answer in answers.items()}


def name_of(**figures: Any) -> str:
    return judge(payloads(**figures), T).name


@pytest.mark.parametrize(
    ("figures", "name"),
    [
        ({}, "C"),
        ({"boxes": 2, "text": 0.2}, "C"),
        ({"boxes": 3}, "A"),
        ({"boxes": 1, "text": 0.2001}, "A"),
        ({"objects": 5, "kinds": 3, "dispersion": 0.3}, "C"),
        ({"objects": 6}, "B"),
        ({"kinds": 4}, "B"),
        ({"dispersion": 0.3001}, "B"),
        ({"similarity": 0.9}, "C"),
        ({"boxes": 3, "objects": 6}, "A"),
    ],
)
def test_a_threshold_must_be_exceeded_and_text_comes_before_objects(
    figures: dict[str, Any], name: str
) -> None:
    assert name_of(**figures) == name


def test_every_criterion_is_reported_with_its_value_and_threshold() -> None:
    verdict = judge(payloads(boxes=4, text=0.1, objects=1, kinds=1, dispersion=0.5, similarity=0.3), T)
    assert verdict == Bin(
        "A",
        {
            "A": {"text_boxes": Criterion(4, 2, True), "text_area": Criterion(0.1, 0.2, False)},
            "B": {
                "unique_objects": Criterion(1, 3, False),
                "object_count": Criterion(1, 5, False),
                "spatial_dispersion": Criterion(0.5, 0.3, True),
            },
            "C": {"clip_similarity": Criterion(0.3, 0.25, True)},
        },
    )


@pytest.mark.parametrize("text", ["O", "★", "●●", "¥", "合", "+!", "", "7"])
def test_shapes_that_are_read_as_single_characters_are_not_text(text: str) -> None:
    lines = [write(text, 1.0)] * 4
    answers = payloads() | {"ocr": msgspec.json.encode({"lines": lines, "count": 4, "area_ratio": 0.5})}
    verdict = judge(answers, T)
    assert verdict.name == "C"
    assert [criterion.value for criterion in verdict.criteria["A"].values()] == [0, 0]


@pytest.mark.parametrize("text", ["Ok", "出口", "4 7", "a★b", "11"])
def test_two_letters_or_digits_of_any_script_are_text(text: str) -> None:
    lines = [write(text, 0.8)] * 3
    assert judge({"ocr": msgspec.json.encode({"lines": lines, "count": 3, "area_ratio": 0.1})}, T).name == "A"


# Lines that PP-OCR read in pictures: their text and score.
SIGNS = [
    ("中中心", 0.77),  # windows of houses
    ("OVO", 0.58),  # the eyes of an ape
    ("11H1", 0.745),  # lamps, over the whole photograph
    ("OD", 0.654),  # a shoe, over the whole photograph
    ("10", 0.715),  # tools
    ("0000", 0.799),
    ("AAA", 0.623),  # a row of pillars
    ("1000020", 0.566),  # bottles
    ("西美香", 0.565),  # faces
    ("LL", 0.706),  # the corners of a button
]
WORDS = [
    *(
        ("EXIT", 1.0),
        ("OK", 0.999),
        ("5.00", 1.0),
        ("10", 0.998),
        ("100円", 1.0),
        ("大学", 1.0),
        ("出口", 0.999),
    ),
    *(("79p", 0.866), ("48", 0.846), ("XX", 0.885), ("50", 0.81), ("Pi", 0.872), ("45p", 1.0), ("404", 1.0)),
    *(
        ("GORETEX", 0.77),
        ("mrek", 0.79),
        ("VENDES)", 0.71),
        ("DAInESE", 0.73),
        ("By RAlPH KInNey BeNneTT", 0.72),
    ),
]


def test_signs_that_were_read_into_pictures_are_in_no_bin_and_no_text() -> None:
    lines = [write(text, score, height=9) for text, score in SIGNS]
    answer = {"lines": lines, "count": len(lines), "area_ratio": 0.9}
    criteria = judge({"ocr": msgspec.json.encode(answer)}, Thresholds(text_score=0.5)).criteria["A"]
    assert [criterion.value for criterion in criteria.values()] == [0, 0]
    assert text_of(answer) == ""


def test_short_words_and_unsure_long_ones_are_text() -> None:
    lines = [write(text, score) for text, score in WORDS]
    answer = {"lines": lines, "count": len(lines), "area_ratio": 0.1}
    assert judge({"ocr": msgspec.json.encode(answer)}, T).criteria["A"]["text_boxes"].value == len(WORDS)
    assert text_of(answer).split("\n") == [text for text, _ in WORDS]


def test_of_a_page_readers_text_the_lines_count_and_the_area_is_unknown() -> None:
    def judge_text(text: str) -> Bin:
        return judge(
            {"ocr": msgspec.json.encode({"lines": [], "count": 0, "area_ratio": 0.0, "text": text})}, T
        )

    page = judge_text("# Invoice\n\n| a | b |\n| --- | --- |\nTotal 5\n★\n")
    assert page.name == "A"
    assert page.criteria["A"] == {
        "text_boxes": Criterion(3, 2, True),
        "text_area": Criterion(None, 0.2, None),
    }
    assert judge_text("Invoice\nTotal 5").name == "C"
    assert judge_text("10\nOK\n大学").name == "A"
    assert judge_text("").criteria["A"]["text_boxes"] == Criterion(0, 2, False)


def test_only_lines_with_a_high_score_count() -> None:
    lines = [write("sure"), write("doubtful", 0.7), write("O", height=2)]
    answers = {"ocr": msgspec.json.encode({"lines": lines, "count": 3, "area_ratio": 0.8})}
    assert judge(answers, T).criteria["A"]["text_boxes"].value == 1
    assert judge(answers, T).criteria["A"]["text_area"].value == pytest.approx(0.2)
    assert judge(answers, Thresholds(text_score=0.5)).criteria["A"]["text_boxes"].value == 2


def test_thresholds_are_the_configurations() -> None:
    assert judge(payloads(boxes=4), Thresholds(text_boxes=4)).name == "C"
    assert judge(payloads(objects=1), Thresholds(object_count=0)).name == "B"


def test_criteria_of_a_stage_that_did_not_run_do_not_pass() -> None:
    verdict = judge({}, T)
    assert verdict.name == "C"
    assert {
        c
        for rules in verdict.criteria.values()
        for c in rules.values()
        if (c.value, c.passed) != (None, None)
    } == set()


def test_a_caption_without_a_similarity_has_none_compared() -> None:
    assert judge(payloads(similarity=None), T).criteria["C"]["clip_similarity"] == Criterion(None, 0.25, None)


def test_a_bin_is_decided_once_a_or_b_passes() -> None:
    assert is_decided(payloads(boxes=3), T, ORDER)
    assert is_decided(payloads(objects=6), T, ORDER)
    assert not is_decided(payloads(), T, ORDER)


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_rules.py").write_text(
        "LIMIT = 3\ndef by_text(record):\n    return 'Text' if record['ocr']['count'] > LIMIT else record['bin']['name']\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_rules", raising=False)
    return "my_rules"


def test_a_users_rule_is_loaded_by_module_and_function(rules: str) -> None:
    rule = load_rule(f"{rules}:by_text")
    assert apply_rule(rule, {"ocr": {"count": 4}}) == "Text"
    assert apply_rule(rule, {"ocr": {"count": 0}, "bin": {"name": "B"}}) == "B"


@pytest.mark.parametrize(
    "reference", ["no_such_module:rule", "my_rules:missing", "my_rules", ":rule", "", "my_rules:LIMIT"]
)
def test_a_rule_that_cannot_be_loaded_is_refused_with_its_name(rules: str, reference: str) -> None:
    with pytest.raises(ValueError, match=r"\[binning\] rules = ") as caught:
        load_rule(reference)
    assert f'"{reference}"' in str(caught.value)


@pytest.mark.parametrize("name", ["A", "receipts", "2-up", "x" * 64])
def test_a_rules_bin_is_a_plain_name(name: str) -> None:
    assert apply_rule(lambda record: name, {}) == name


@pytest.mark.parametrize("name", ["", "..", "a/b", "-x", "x" * 65, "a b", "A\n", None, 1, b"A"])
def test_a_bin_that_cannot_be_a_folder_name_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="the binning rule returned"):
        apply_rule(lambda record: name, {})


@pytest.mark.parametrize(
    ("boxes", "dispersion"),
    [
        ([], 0.0),
        ([(10, 10, 30, 30)], 0.0),
        ([(0, 0, 20, 20), (80, 40, 100, 60)], 80 * 40 / (100 * 60)),
        ([(0, 0, 20, 20), (40, 0, 60, 20)], 0.0),
    ],
)
def test_dispersion_is_the_area_that_the_centers_span(
    boxes: list[tuple[float, float, float, float]], dispersion: float
) -> None:
    assert measure_dispersion(boxes, 100 * 60) == pytest.approx(dispersion)


def test_a_bin_is_described_in_sentences() -> None:
    seen = payloads(boxes=3, text=0.126, dispersion=0.5, similarity=None)
    rows = describe(msgspec.to_builtins(judge(seen, T)))
    assert rows == [
        ("A", "text boxes 3, more than 2 needed", "yes"),
        ("A", "text on 13% of the image, more than 20% needed", "no"),
        ("B", "kinds of objects 0, more than 3 needed", "no"),
        ("B", "objects 0, more than 5 needed", "no"),
        ("B", "objects spread over 50% of the image, more than 30% needed", "yes"),
        ("C", "clip similarity not measured", "–"),
    ]


def test_a_value_next_to_its_threshold_is_described_with_digits_that_tell_them_apart() -> None:
    seen = payloads(boxes=3, text=0.1996, similarity=0.2489)
    sentences = [sentence for _, sentence, _ in describe(msgspec.to_builtins(judge(seen, T)))]
    assert "text on 19.96% of the image, more than 20.00% needed" in sentences
    assert "likeness of caption and image 0.249, more than 0.250 expected" in sentences
    assert "text boxes 2, more than 2 needed" in [
        sentence for _, sentence, _ in describe(msgspec.to_builtins(judge(payloads(boxes=2), T)))
    ]
