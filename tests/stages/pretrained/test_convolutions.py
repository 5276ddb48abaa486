from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.d_fine.modeling_d_fine import DFineFrozenBatchNorm2d

from stages.pretrained.convolutions import fold_norms


class Named(nn.Module):
    """As layers of transformers are."""

    def __init__(self, norm: nn.Module, *, bias: bool) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, bias=bias)
        self.normalization = norm

    def forward(self, pixels: torch.Tensor) -> Any:
        return self.normalization(self.convolution(pixels))


def with_statistics(norm: Any) -> Any:
    for tensor in (norm.weight, norm.bias, norm.running_mean):
        tensor.data.normal_()
    norm.running_var.uniform_(0.1, 3)
    return norm.eval()


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, DFineFrozenBatchNorm2d])
@pytest.mark.parametrize("bias", [False, True])
def test_a_convolution_with_its_batch_norm_in_it_gives_the_same(
    kind: Callable[[int], nn.Module], bias: bool
) -> None:
    named = Named(with_statistics(kind(8)), bias=bias)
    model = nn.Sequential(named, nn.Conv2d(8, 4, 1, bias=bias), with_statistics(kind(4)), nn.ReLU())
    pixels = torch.randn(2, 3, 16, 20)
    with torch.inference_mode():
        expected = model(pixels)
        fold_norms(model)
        assert torch.allclose(
            model(pixels.contiguous(memory_format=torch.channels_last)), expected, atol=1e-5
        )
    assert [type(module) for module in (named.normalization, model[2])] == [nn.Identity, nn.Identity]
