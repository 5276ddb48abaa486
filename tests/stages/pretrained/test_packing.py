"""Images that a tower puts into one sequence, beside transformers' computation of one after another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from stages.pretrained import packing
from stages.pretrained.fusing import become
from tests.stages.pretrained.models import make_known


@pytest.mark.parametrize("lengths", [[6], [6, 6, 6], [4, 8, 2]], ids=["one", "alike", "mixed"])
def test_patches_attend_to_those_of_their_image(lengths: list[int]) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, sum(lengths), 8)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    ours, _ = packing.attend(
        nn.Module(), query, key, value, None, cu_seq_lens_q=starts, max_length_q=max(lengths), scaling=0.3
    )
    each = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    theirs = torch.cat([F.scaled_dot_product_attention(q, k, v, scale=0.3) for q, k, v in each], dim=2)
    torch.testing.assert_close(ours, theirs.transpose(1, 2))


def draw_texts(*sizes: tuple[int, int]) -> dict[str, Tensor]:
    """Texts about images of these rows and columns of patches, padded on the left."""
    tokens = [rows * columns // 4 for rows, columns in sizes]
    ids, types, mask = (torch.zeros(len(sizes), max(tokens) + 3, dtype=torch.long) for _ in range(3))
    for row, count in enumerate(tokens):
        ids[row, -count - 3 :] = 7
        mask[row, -count - 3 :] = 1
        types[row, -count - 2 : -2] = 1
    grids = torch.tensor([[1, *size] for size in sizes])
    return {"input_ids": ids, "mm_token_type_ids": types, "image_grid_thw": grids, "attention_mask": mask}


@pytest.fixture
def model() -> Any:
    return make_known("qwen3_vl").model


def test_positions_are_those_of_the_model(model: Any) -> None:
    texts = draw_texts((4, 4), (8, 4), (4, 4), (2, 8))  # the last has as many tokens as the first
    expected = Qwen3VLModel.get_rope_index(model, **texts)
    packing.pack_images(model)
    assert isinstance(model, packing.RememberedPositions)
    for _ in range(2):
        for ours, theirs in zip(model.get_rope_index(**texts), expected, strict=True):
            assert torch.equal(ours, theirs)
    assert len(model.known) == 3


def test_positions_of_a_text_are_found_once(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    find = Qwen3VLModel.get_rope_index

    def note(self: Any, ids: Tensor, *given: Any, **named: Any) -> Any:
        calls.append(len(ids))
        return find(self, ids, *given, **named)

    monkeypatch.setattr(Qwen3VLModel, "get_rope_index", note)
    become(model, packing.RememberedPositions)
    model.known = {}
    for _ in range(2):
        model.get_rope_index(**draw_texts((8, 4), (4, 4), (8, 4)))
    assert calls == [1, 1]
    monkeypatch.setattr(packing, "TEXTS_KEPT", 2)
    model.get_rope_index(**draw_texts((8, 4), (4, 4), (8, 4), (2, 4)))
    assert len(model.known) <= 2
