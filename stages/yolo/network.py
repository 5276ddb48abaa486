"""What the stage YOLO asks of a network, and a faster way to run its convolutions on a GPU."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class YoloNetwork(nn.Module, ABC):
    """A detector.

    stride: the pixels of a cell of its coarsest feature map; the sides of a canvas are multiples of it.
    is_end_to_end: whether it needs no suppression.
    """

    stride: int
    is_end_to_end: bool

    @property
    def holder(self) -> nn.Module:
        """The module whose weights have the names of the files."""
        return self

    @abstractmethod
    def fold_norms(self) -> None:
        """Fold each batch norm into the convolution before it."""

    @abstractmethod
    def forward(self, pixels: Tensor) -> Tensor:
        """0..1 [images, 3, height, width] to float32 [images, 4 + classes, anchors]: center and sides in pixels of the
        canvas, and a score for each class. If it is end to end: [images, objects, 6], corners, score and class, the
        highest score first."""


def speed_up_convolutions(network: nn.Module) -> None:
    """On a GPU, in half precision, once norms are folded: compute a convolution's bias and SiLU in one pass instead of
    two."""
    for module in convolutions_with_silu(network):
        module.forward = functools.partial(conv2d_silu, module.conv)


def convolutions_with_silu(network: nn.Module) -> list[Any]:
    """The modules, of visiond or of ultralytics, that are a convolution `conv` with the activation `act`."""
    return [
        module
        for module in network.modules()
        if isinstance(getattr(module, "conv", None), nn.Conv2d)
        and isinstance(getattr(module, "act", None), nn.SiLU)
    ]


def conv2d_silu(layer: nn.Conv2d, pixels: Tensor) -> Tensor:
    from stages.kernels.launch import add_bias_silu

    assert layer.bias is not None  # of the norm that was folded into it
    values = F.conv2d(pixels, layer.weight, None, layer.stride, layer.padding, layer.dilation, layer.groups)
    return add_bias_silu(values.contiguous(memory_format=torch.channels_last), layer.bias)
