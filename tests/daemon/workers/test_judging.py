"""The rules by which answers to known images are wrong, one by one; and what healthy models may do."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
import torch

from daemon.core.messages import Outcome, Output
from daemon.workers.judging import find_faults
from stages.blip.descriptor import Caption
from stages.clip.descriptor import Clip
from stages.clip.embeddings import encode_embedding
from stages.contract.base import Result, StageSpec
from stages.ocr.descriptor import Line, Ocr
from stages.yolo.descriptor import Detection, Objects

SIDE = 100
SILENT = "it finds no words for an image that it had words for"


def judge(stage: str, now: Sequence[Result], before: Sequence[Result] = (), **options: float) -> str:
    """What is wrong, if anything."""
    answers, known = ([{stage: msgspec.json.encode(each)} for each in side] for side in (now, before))
    return find_faults([StageSpec(stage, "any", options=options)], outcomes(answers), known).get(stage, "")


def outcomes(answers: Sequence[dict[str, bytes]]) -> list[Outcome]:
    outputs = [{stage: Output(payload, 0.0) for stage, payload in each.items()} for each in answers]
    return [Outcome("PNG", SIDE, SIDE, each) for each in outputs]


def objects(*found: tuple[str, float, float]) -> Objects:
    """Of label, score and left edge."""
    detections = [Detection(label, score, (left, 10, left + 40, 50)) for label, score, left in found]
    return Objects(detections, len(detections), 1, 0.0)


def lines(*texts: str) -> Ocr:
    boxes = [((0, 10 * n), (80, 10 * n), (80, 10 * n + 8), (0, 10 * n + 8)) for n in range(len(texts))]
    return Ocr([Line(t, 0.9, box) for t, box in zip(texts, boxes, strict=True)], len(texts), 0.1)


def page(text: str) -> Ocr:
    return Ocr([], 0, 0.0, text)


def captions(*texts: str) -> list[Result]:
    return [Caption(text, None) for text in texts]


STOP, CLOCK, NOTHING = objects(("stop sign", 0.9, 0)), objects(("clock", 0.8, 50)), objects()


@pytest.mark.parametrize(
    ("stage", "before", "now", "wrong"),
    [
        ("yolo", [], [objects(("clock", 1.7, 0)), NOTHING], "a score is 1.7"),
        ("yolo", [], [objects(("clock", 0.9, 900)), NOTHING], "a box is outside of its image, which is 100×100"),
        ("yolo", [STOP, NOTHING], [objects(*[("dog", 0.6, 0)] * 30), STOP], "it finds 0 of 1 known things again"),
        ("yolo", [NOTHING, NOTHING], [objects(*[("dog", 0.6, 0)] * 30), NOTHING], "it finds 30 things where it found 0"),
        ("yolo", [STOP, CLOCK], [objects(("stop sign", 0.9, 50)), CLOCK, ][::-1], "it finds 0 of 2 known things again"),
        ("ocr", [lines("STOP", "EXIT"), lines()], [lines("XQ", "ZW"), lines()], "it finds 0 of 2 known things again"),
        ("ocr", [page("a page to read"), page("")], [page("!!!!!!!!"), page("")], "1 of 1 known texts are others"),
        ("ocr", [page("a page to read"), page("")], [page(""), page("")], SILENT),
        ("blip", captions("a page", "a sign"), captions("a page", "a page"), "it gives the same answer for different images"),
        ("blip", captions("a page", "a sign"), captions("a sign", "a page"), "it gives the answers of other images"),
        ("blip", captions("a page", "a page"), captions("a page", ""), SILENT),
    ],
)  # fmt: skip
def test_a_gross_difference_is_wrong(stage: str, before: list[Result], now: list[Result], wrong: str) -> None:
    assert judge(stage, now, before) == wrong


@pytest.mark.parametrize(
    ("stage", "before", "now"),
    [
        ("yolo", [objects(("dog", 0.51, 0)), NOTHING], [NOTHING, NOTHING]),  # at the threshold of score
        ("yolo", [objects(("stop sign", 0.95, 0)), CLOCK], [objects(("stop sign", 0.75, 4)), CLOCK]),
        ("yolo", [NOTHING, NOTHING], [NOTHING, objects(("dog", 0.5, 0))]),
        ("ocr", [lines("STOP", "EXIT 24", "11"), lines()], [lines("STOP", "EXlT 24"), lines()]),
        ("ocr", [page("a page to read"), page("")], [page("a page to read."), page("")]),
        ("blip", captions("yes", "yes", "no"), captions("yes", "yes", "yes")),  # the answers to a question
        ("blip", captions("a page", "a sign", "a star"), captions("a page", "a road sign", "stars")),
    ],
)
def test_a_small_difference_is_not(stage: str, before: list[Result], now: list[Result]) -> None:
    assert judge(stage, now, before) == ""


def test_an_object_is_sure_by_its_distance_from_the_lowest_score_of_the_options() -> None:
    once, now = [objects(("dog", 0.75, 0)), NOTHING], [NOTHING, NOTHING]
    assert judge("yolo", now, once) == "it finds 0 of 1 known things again"
    assert judge("yolo", now, once, conf=0.7) == ""


def test_a_picture_that_a_stage_cannot_process_hides_no_fault_in_the_others() -> None:
    """As a PNG where the library for it is missing."""
    spec = StageSpec("yolo", "any")

    def say(*answers: Objects) -> list[dict[str, bytes]]:
        return [{}, *({"yolo": msgspec.json.encode(answer)} for answer in answers)]

    assert find_faults([spec], outcomes(say(NOTHING, CLOCK)), say(STOP, CLOCK)) == {}
    assert find_faults([spec], outcomes(say(NOTHING, NOTHING)), say(STOP, CLOCK)) == {
        "yolo": "it finds 0 of 2 known things again"
    }
    assert find_faults([spec], outcomes([{}] * 3), [{}] * 3) == {}


def test_one_embedding_is_not_the_same_for_different_images() -> None:
    spec, clip = StageSpec("clip", "any"), Clip(encode_embedding(torch.tensor([0.6, 0.8])), [])
    now = [{"clip": msgspec.json.encode(clip)}]
    assert find_faults([spec], outcomes(now), []) == {}
    assert find_faults([spec], outcomes(now * 2), []).keys() == {"clip"}
