"""Texts that are kept by the size of an image, beside those of transformers' processors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from stages.pretrained import questions
from stages.pretrained.questions import Questions
from tests.stages.pretrained.models import KINDS, make_stage

SIZES = [(90, 120), (64, 48), (90, 120), (33, 57)]
ASKED = [kind for kind in KINDS if kind != "blip-2"]  # which has the same prompt for all images
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def draw() -> list[Tensor]:
    return [torch.randint(0, 255, (3, *size), dtype=torch.uint8) for size in SIZES]


@pytest.mark.parametrize("kind", ASKED)
def test_a_model_gets_what_its_processor_makes(kind: str) -> None:
    asked: Any = make_stage(kind).questions
    pixels = draw()
    theirs = asked._process(pixels, asked.question)
    for _ in range(2):
        ours = asked(pixels)
        assert ours.keys() == theirs.keys()
        for name, values in theirs.items():
            assert torch.equal(ours[name], values), name


def test_each_size_is_tokenized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Questions = make_stage("qwen3_vl").questions
    sizes: list[int] = []
    process = questions.Questions._process

    def note(self: Questions, pixels: list[Tensor], question: str = "") -> Any:
        if question:
            sizes.append(len(pixels))
        return process(self, pixels, question)

    monkeypatch.setattr(questions.Questions, "_process", note)
    for _ in range(2):
        asked(draw())
    assert sizes == [1, 1, 1]
