"""The plan of the shapes that are recorded."""

from __future__ import annotations

import pytest

from stages.pretrained import keyvalues
from stages.pretrained.keyvalues import plan_lengths, plan_sizes


def test_numbers_of_texts_double_up_to_the_largest_batch() -> None:
    assert plan_sizes(96) == [1, 2, 4, 8, 16, 32, 64, 96]
    assert plan_sizes(1) == [1]


def test_lengths_double_up_to_the_longest_text_or_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyvalues, "LENGTHS_ALIGNED_TO", 8)
    assert plan_lengths(24, 100, most=1000) == [24, 48, 96, 104]
    assert plan_lengths(24, 100, most=55) == [24, 48]
    assert plan_lengths(24, 10, most=1000) == [24], "a large image may have the shorter prompt"
    assert plan_lengths(24, 100, most=23) == []
