"""Convolutional networks of transformers in the form in which a GPU computes them fastest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

FROZEN_EPS = 1e-5  # of transformers' frozen batch norms
NAMES = (("convolution", "normalization"), ("conv", "norm"))  # of such a pair, in transformers' modules


def speed_up_convolutions(model: nn.Module) -> None:
    """Make each batch norm a part of the convolution before it, and let weights lie with their channels last: the
    order in which tensor cores read them. Inputs must lie so, too."""
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
    """Also of the frozen ones, of which each model of transformers has a class of its own."""
    return "BatchNorm" in type(module).__name__


def fuse(convolution: Any, norm: Any) -> None:
    """Sums are in float32, also of weights in half precision."""
    eps = getattr(norm, "eps", FROZEN_EPS)
    scale = norm.weight.float() * (norm.running_var.float() + eps).rsqrt()
    shift = norm.bias.float() - norm.running_mean.float() * scale
    if convolution.bias is not None:
        shift += convolution.bias.float() * scale
    dtype = convolution.weight.dtype
    weight = (convolution.weight.float() * scale[:, None, None, None]).to(dtype)
    convolution.weight = nn.Parameter(weight, requires_grad=False)
    convolution.bias = nn.Parameter(shift.to(dtype), requires_grad=False)
