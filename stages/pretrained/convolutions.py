"""Folds the batch norms of transformers' networks into their convolutions, which takes less time and rounds less."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

FROZEN_EPS = 1e-5  # of transformers' frozen batch norms
# Of a convolution and of the norm behind it, in transformers' modules.
NAMES = (("convolution", "normalization"), ("convolution", "norm"), ("conv", "norm"))


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
    """True also for frozen batch norms: each model of transformers has its own class for them."""
    return "BatchNorm" in type(module).__name__


def fold(convolution: Any, norm: Any) -> None:
    """Computes in float32 even if the weights are in half precision."""
    weight, bias = fuse_conv_bn_weights(
        convolution.weight.float(),
        None if convolution.bias is None else convolution.bias.float(),
        norm.running_mean.float(),
        norm.running_var.float(),
        getattr(norm, "eps", FROZEN_EPS),
        norm.weight.float(),
        norm.bias.float(),
        transpose=isinstance(convolution, nn.ConvTranspose2d),
    )
    dtype = convolution.weight.dtype
    convolution.weight = nn.Parameter(weight.detach().to(dtype), requires_grad=False)
    convolution.bias = nn.Parameter(bias.detach().to(dtype), requires_grad=False)
