"""Captions are read by the grammar of the scenes, and judged by what the scenes show."""

from __future__ import annotations

import pytest

from stages.scenes.generator import make_scene
from visiond_mini.captions import caption_is_true, group_objects, parse_caption


def test_every_caption_parses_to_the_truth() -> None:
    for index in range(300):
        truth = make_scene(3, index, max_side=160).truth
        groups = group_objects(truth) if truth.kind == "photo" else set()
        for caption in truth.captions:
            named = parse_caption(caption)
            assert named <= groups, caption
            assert len(named) == min(3, len(groups)), caption
            assert caption.split(" and ")[-1].startswith("more ") == (len(groups) > 3), caption


def test_a_caption_is_judged_by_its_meaning_and_not_by_order_case_or_spacing() -> None:
    truth = next(
        truth for index in range(99) if len(group_objects(truth := make_scene(5, index, 64).truth)) == 3
    )
    for caption in truth.captions:
        assert caption_is_true(caption.replace(",", " ,").upper(), truth)
    main = truth.captions[0]
    color = truth.objects[0].color
    other = "red" if color != "red" else "blue"
    assert not caption_is_true(main.replace(f"{color} ", f"{other} ", 1), truth)
    assert not caption_is_true(main.split(",")[0], truth)
    assert not caption_is_true("", truth)


@pytest.mark.parametrize(
    ("caption", "groups"),
    [
        (
            "two red circles and a blue star on a green background",
            {(2, "red", "circle"), (1, "blue", "star")},
        ),
        ("an orange fish in a night sky", {(1, "orange", "fish")}),
        ("nine red fish on a wooden table", {(9, "red", "fish")}),
        (
            "a red cup, a blue cup, a pink cup and more in a meadow",
            {(1, c, "cup") for c in ("red", "blue", "pink")},
        ),
        ("an empty brick wall", set()),
        ("a receipt", set()),
    ],
)
def test_captions_are_read(caption: str, groups: set[tuple[int, str, str]]) -> None:
    assert parse_caption(caption) == groups


@pytest.mark.parametrize(
    "caption",
    [
        "",
        "two red circle on a green background",
        "a orange fish in a night sky",
        "a red cup a blue cup on a lake",
        "a red cup and on a lake",
        "and more on a lake",
        "a red cup",
        "an empty receipt",
    ],
)
def test_a_sentence_outside_the_grammar_is_refused(caption: str) -> None:
    with pytest.raises(ValueError, match="not a caption"):
        parse_caption(caption)
