"""Folds the batch norms of networks into their convolutions, which takes less time and rounds less."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

FROZEN_EPS = 1e-5  # of transformers' frozen batch norms
# Of a convolution and of the norm behind it: in transformers' modules, and in YOLO's.
NAMES = (("convolution", "normalization"), ("convolution", "norm"), ("conv", "norm"), ("conv", "bn"))


def fold_norms(network: nn.Module) -> None:
    """Fold each batch norm into the convolution before it."""
    for owner, first, second in list(find_pairs(network)):
        fold(getattr(owner, first), getattr(owner, second))
        setattr(owner, second, nn.Identity())


def find_pairs(network: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """The modules that have a convolution and then its batch norm, with the names of both."""
    for module in network.modules():
        children = dict(module.named_children())
        if isinstance(module, nn.Sequential):
            pairs = list(zip(list(children), list(children)[1:], strict=False))
        else:
            pairs = [pair for pair in NAMES if children.keys() >= {*pair}]
        for first, second in pairs:
            if isinstance(children[first], nn.Conv2d | nn.ConvTranspose2d) and is_batch_norm(
                children[second]
            ):
                yield module, first, second


def is_batch_norm(module: nn.Module) -> bool:
    """True also for frozen batch norms, of which each model of transformers has its own class; not for those of timm that
    also activate."""
    return "BatchNorm" in (name := type(module).__name__) and "Act" not in name


def fold(convolution: Any, norm: Any) -> None:
    """Computes in float32 even if the weights are in half precision."""
    dtype = convolution.weight.dtype
    exact = torch.promote_types(dtype, torch.float32)
    weight, bias = fuse_conv_bn_weights(
        convolution.weight.to(exact),
        None if convolution.bias is None else convolution.bias.to(exact),
        norm.running_mean.to(exact),
        norm.running_var.to(exact),
        getattr(norm, "eps", FROZEN_EPS),
        norm.weight.to(exact),
        norm.bias.to(exact),
        transpose=isinstance(convolution, nn.ConvTranspose2d),
    )
    convolution.weight = nn.Parameter(weight.detach().to(dtype), requires_grad=False)
    convolution.bias = nn.Parameter(bias.detach().to(dtype), requires_grad=False)
