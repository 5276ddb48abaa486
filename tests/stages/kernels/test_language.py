"""Compares the kernels of language models with transformers' own code: compiled on a GPU, otherwise interpreted, where
bfloat16 is rounded in another way. Only a norm's sum may differ, in its last bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLTextRMSNorm,
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_vision,
)

from stages.kernels import language

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]
pytestmark = [*([pytest.mark.gpu] if DEVICE == "cuda" else []), pytest.mark.parametrize("dtype", DTYPES)]
each_size = pytest.mark.parametrize("size", [8, 40, 128])


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@each_size
@torch.inference_mode()
def test_norms_are_transformers_own(size: int, dtype: torch.dtype) -> None:
    norm = Qwen3VLTextRMSNorm(size).to(DEVICE, dtype)
    norm.weight.copy_(draw(size))
    x = 3 * draw(5, 7, size, dtype=dtype, seed=1)
    ours = language.rms_norm(x, norm.weight, norm.variance_epsilon)
    torch.testing.assert_close(ours, norm(x), rtol=torch.finfo(dtype).eps, atol=0)
    assert (ours == norm(x)).float().mean() > 0.99


@each_size
@torch.inference_mode()
def test_layer_norms_are_torchs(size: int, dtype: torch.dtype) -> None:
    x, weight, bias = (
        3 + draw(5, 7, size, dtype=dtype),
        draw(size, dtype=dtype, seed=1),
        draw(size, dtype=dtype),
    )
    theirs = F.layer_norm(x, [size], weight, bias, 1e-5)
    torch.testing.assert_close(
        language.layer_norm(x, weight, bias, 1e-5),
        theirs,
        rtol=torch.finfo(dtype).eps,
        atol=torch.finfo(dtype).eps,
    )


@each_size
@pytest.mark.parametrize("turned", [1, 3], ids=["one for all texts", "one for each"])
def test_queries_of_texts_are_rotated_as_by_transformers(size: int, turned: int, dtype: torch.dtype) -> None:
    query, key = (draw(3, 5, heads, size, dtype=dtype).transpose(1, 2) for heads in (4, 2))
    cos, sin = (draw(turned, 5, size, dtype=dtype, seed=seed) for seed in (1, 2))
    for ours, theirs in zip((query, key), apply_rotary_pos_emb(query, key, cos, sin), strict=True):
        rotated = language.rotate(ours.transpose(1, 2), cos, sin).transpose(1, 2)
        assert torch.equal(rotated, theirs)
        assert rotated.stride() == theirs.stride()


@each_size
def test_queries_of_patches_are_rotated_in_float32(size: int, dtype: torch.dtype) -> None:
    query, key, _ = draw(9, 3, 4, size, dtype=dtype).unbind(1)
    cos, sin = (draw(9, size, seed=seed) for seed in (1, 2))
    for ours, theirs in zip((query, key), apply_rotary_pos_emb_vision(query, key, cos, sin), strict=True):
        assert torch.equal(language.rotate(ours[None], cos[None], sin[None])[0], theirs)


def test_a_gate_is_applied_as_by_torch(dtype: torch.dtype) -> None:
    opened, x = draw(300, 16, dtype=dtype), draw(300, 16, dtype=dtype, seed=1)
    theirs = F.silu(opened) * x
    torch.testing.assert_close(language.gate(opened, x), theirs, rtol=torch.finfo(dtype).eps, atol=1e-6)
