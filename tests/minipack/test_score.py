"""Scoring distinguishes right answers from wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.blip.descriptor import Caption
from stages.clip.descriptor import Clip, Tag
from stages.clip.embeddings import encode_embedding
from stages.contract.base import UNFAMILIAR
from stages.ocr.descriptor import Line, Ocr
from stages.scenes.photographs import find_photographs
from stages.scenes.truth import Truth
from stages.weights.packs import MINI
from stages.yolo.descriptor import Detection, Objects
from visiond_mini.cache import draw
from visiond_mini.captions import groups_are_true
from visiond_mini.score import (
    choose_bin,
    count_read,
    is_unknown,
    mark,
    pick_captions,
    score_pack,
)

CORNERS = ((0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (0.0, 1.0))


def find_truth(**wanted: object) -> Truth:
    truths = (draw(5, index, ((160, 1.0),))[1] for index in range(400))
    return next(
        truth for truth in truths if all(getattr(truth, name) == value for name, value in wanted.items())
    )


@pytest.fixture(scope="module")
def photo() -> Truth:
    truths = (draw(5, index, ((160, 1.0),))[1] for index in range(400))
    return next(truth for truth in truths if truth.kind == "photo" and len(truth.captions) == 2)


def answer(truth: Truth, caption: str, tag: str) -> dict[str, Any]:
    found = [Detection(thing.label, 0.9, thing.box) for thing in truth.objects]
    unique = len({thing.label for thing in truth.objects})
    return {
        "ocr": Ocr([], 0, 0.0),
        "yolo": Objects(found, len(found), unique, 0.31 if truth.bin == "B" else 0.0),
        "clip": Clip(encode_embedding(torch.ones(4) / 2), [Tag(tag, 0.9)]),
        "blip": Caption(caption, 0.5),
    }


def test_right_answers_are_marked_right(photo: Truth) -> None:
    for caption in photo.captions:
        marks, wrong = mark(photo, answer(photo, caption, photo.tags[0]))
        assert all(marks.values())
        assert wrong == []


def test_a_wrong_place_is_wrong_but_its_groups_are_not(photo: Truth) -> None:
    noun = photo.tags[-1]
    elsewhere = "brick wall" if noun != "brick wall" else "red background"
    said = photo.captions[0].rsplit(" on ", 1)[0].rsplit(" in ", 1)[0] + f" on a {elsewhere}"
    marks, wrong = mark(photo, answer(photo, said, photo.tags[0]))
    assert not marks["captions_true"]
    assert marks["groups_true_of_objects"]
    assert [miss["said"] for miss in wrong] == [said]


@pytest.mark.parametrize(
    "change", [lambda said: said.replace("a ", "nine ", 1), lambda said: "", lambda said: said + " a"]
)
def test_a_wrong_group_or_no_sentence_is_wrong(change: Callable[[str], str], photo: Truth) -> None:
    assert not groups_are_true(change(photo.captions[0]).replace("two", "six"), photo)


def test_a_caption_that_leaves_a_group_out_is_wrong(photo: Truth) -> None:
    first = photo.captions[0].split(" and ")[0]
    place = " on " if " on " in photo.captions[0] else " in "
    assert not groups_are_true(first + place + photo.captions[0].split(place)[-1], photo)


def test_a_tag_that_is_true_but_not_the_main_one_is_distinguished(photo: Truth) -> None:
    marks, _ = mark(photo, answer(photo, photo.captions[0], photo.tags[-1]))
    assert (marks["tag_first"], marks["main_tag_first"]) == (True, False)
    assert not mark(photo, answer(photo, photo.captions[0], "receipt"))[0]["tag_first"]


def test_the_bin_is_that_of_the_daemons_rule(photo: Truth) -> None:
    answers = answer(photo, photo.captions[0], photo.tags[0])
    assert choose_bin(answers) == photo.bin
    assert choose_bin(answers | {"ocr": Ocr([Line("a word", 0.9, CORNERS)] * 3, 3, 0.0)}) == "A"


def test_words_count_as_often_as_they_are_written() -> None:
    page = find_truth(kind="page of text")
    lines = [Line(line.text, 0.9, CORNERS) for line in page.lines]
    words = sum(len(line.text.split()) for line in page.lines)
    assert count_read(page, Ocr(lines, len(lines), 0.5)) == words
    assert count_read(page, Ocr(lines[1:] + lines[1:2], len(lines), 0.5)) < words
    assert count_read(page, Ocr([], 0, 0.0)) == 0


def test_a_caption_is_picked_only_where_it_is_nearest(photo: Truth) -> None:
    other = find_truth(kind="receipt")
    texts = {photo.captions[0]: torch.eye(2)[0], other.captions[0]: torch.eye(2)[1]}
    assert pick_captions(torch.eye(2), texts, [photo, other]) == [True, True]
    assert pick_captions(torch.eye(2).flip(0), texts, [photo, other]) == [False, False]


def test_an_image_is_unknown_only_if_every_stage_says_so(photo: Truth) -> None:
    known = answer(photo, photo.captions[0], photo.tags[0])
    unknown = answer(photo, UNFAMILIAR, UNFAMILIAR) | {"yolo": Objects([], 0, 0, 0.0)}
    assert (is_unknown(known), is_unknown(unknown)) == ({False}, {True})
    for stage in ("yolo", "clip", "blip"):
        assert is_unknown(unknown | {stage: known[stage]}) == {True, False}
    assert mark(photo, unknown)[0]["captions_true"] is False


def test_the_pack_is_scored_on_files_and_read_where_it_is_asked_to(tmp_path: Path) -> None:
    photographs = find_photographs()[:1]
    scores = score_pack(  # on three small scenes, of which the first has seven lines of text
        MINI, 3, seed=90_130, workdir=tmp_path, read=1, photographs=photographs, say=lambda line: None
    )
    assert (scores.photographs, scores.photographs_unknown) == (1, 1.0)
    assert scores.scenes_known is not None
    assert scores.scenes_known > 0.9
    assert (scores.scenes, scores.read) == (3, 1)
    assert scores.map50 > 0.9
    assert scores.captions_true is not None
    assert scores.captions_true > 0.7
    assert scores.words_read is not None
    assert scores.words_read > 0.9
    assert set(scores.seconds) == {"ocr", "yolo", "clip", "blip"}
