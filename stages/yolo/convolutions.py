"""Makes convolutional networks of transformers faster on GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

FROZEN_EPS = 1e-5  # of transformers' frozen batch norms
NAMES = (("convolution", "normalization"), ("conv", "norm"))  # of such a pair, in transformers' modules


def speed_up_convolutions(model: nn.Module) -> None:
    """Fuse each batch norm into the convolution before it, and store weights channels-last, the order that tensor cores
    read. Inputs must be channels-last, too."""
    for owner, first, second in list(find_pairs(model)):
        fuse(getattr(owner, first), getattr(owner, second))
        setattr(owner, second, nn.Identity())
    model.to(memory_format=torch.channels_last)


def find_pairs(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """The modules that have a convolution and then its batch norm, with the names of both."""
    for module in model.modules():
        children = dict(module.named_children())
        if isinstance(module, nn.Sequential):
            pairs = list(zip(list(children), list(children)[1:], strict=False))
        else:
            pairs = [pair for pair in NAMES if children.keys() >= {*pair}]
        for first, second in pairs:
            if isinstance(children[first], nn.Conv2d) and is_batch_norm(children[second]):
                yield module, first, second


def is_batch_norm(module: nn.Module) -> bool:
    """True also for frozen batch norms: each model of transformers has its own class for them."""
    return "BatchNorm" in type(module).__name__


def fuse(convolution: Any, norm: Any) -> None:
    """Fuse a batch norm into its convolution. Computes in float32 even if the weights are in half precision."""
    eps = getattr(norm, "eps", FROZEN_EPS)
    scale = norm.weight.float() * (norm.running_var.float() + eps).rsqrt()
    shift = norm.bias.float() - norm.running_mean.float() * scale
    if convolution.bias is not None:
        shift += convolution.bias.float() * scale
    dtype = convolution.weight.dtype
    weight = (convolution.weight.float() * scale[:, None, None, None]).to(dtype)
    convolution.weight = nn.Parameter(weight, requires_grad=False)
    convolution.bias = nn.Parameter(shift.to(dtype), requires_grad=False)
