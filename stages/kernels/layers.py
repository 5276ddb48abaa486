"""The layers of PP-OCRv6, with their weights in the layout that the kernels read. launch.py runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor, nn

MIN_DOT_SIZE = 16  # tl.dot takes no smaller dimension
MAX_UNPIPELINED_K = 192  # window size · input channels; the loads of larger convolutions are pipelined
MAX_FUSED_CHANNELS = 192  # inputs of a PointwiseMlp that one kernel computes
MAX_CHANNEL_BLOCK = 128  # channels in one tensor of a kernel


@dataclass(frozen=True)
class Convolution:
    """A convolution. weight: float16 [kernel height · kernel width · inputs, outputs],
    both padded with zeros for tl.dot.

    bias: float32 [padded outputs]. shape: the kernel's constants.
    """

    weight: Tensor
    bias: Tensor
    shape: Mapping[str, int]

    @classmethod
    def of(cls, module: nn.Conv2d, padding: tuple[int, int] | None = None) -> Convolution:
        """padding: rows above and columns left of the map, in place of the module's.
        For the other sides see output_size."""
        outputs, inputs = module.weight.shape[:2]
        matrix = module.weight.permute(2, 3, 1, 0).reshape(-1, outputs)
        padded = padded_size(outputs)
        block_k, stages = (32, 1) if len(matrix) <= MAX_UNPIPELINED_K else (64, 3)
        weight = matrix.new_zeros(-(-len(matrix) // block_k) * block_k, padded, dtype=torch.float16)
        weight[: len(matrix), :outputs] = matrix
        shape = {
            "IN_CHANNELS": inputs,
            "OUT_CHANNELS": outputs,
            "BLOCK_K": block_k,
            "NUM_STAGES": stages,
            **window_of(module),
        }
        if padding is not None:
            shape |= {"PAD_TOP": padding[0], "PAD_LEFT": padding[1]}
        return cls(weight, pad_bias(module.bias, outputs, padded, weight), shape)


@dataclass(frozen=True)
class DepthwiseConvolution:
    """A depthwise convolution. weight: float32 [kernel height · kernel width, channels].
    bias: float32 [channels]."""

    weight: Tensor
    bias: Tensor
    shape: Mapping[str, int]

    @classmethod
    def of(cls, module: nn.Conv2d) -> DepthwiseConvolution:
        channels = module.out_channels
        weight = module.weight[:, 0].permute(1, 2, 0).reshape(-1, channels).float().contiguous()
        assert module.bias is not None
        return cls(weight, module.bias.detach().float(), {"CHANNELS": channels, **window_of(module)})


@dataclass(frozen=True)
class PointwiseMlp:
    """Two pointwise convolutions with a GELU between them.

    weight1: float16 [inputs, hidden]. weight2: float16 [hidden, outputs]. Biases: float32.
    fused: whether one kernel computes both. Wide layers do not fit into registers.
    """

    weight1: Tensor
    bias1: Tensor
    weight2: Tensor
    bias2: Tensor
    shape: Mapping[str, Any]
    fused: bool

    @classmethod
    def of(cls, first: nn.Conv2d, second: nn.Conv2d, *, residual: bool) -> PointwiseMlp:
        hidden, inputs = first.weight.shape[:2]
        outputs = second.out_channels
        weight1, weight2 = (
            module.weight.detach()[..., 0, 0].T.half().contiguous() for module in (first, second)
        )
        biases = (
            pad_bias(first.bias, hidden, hidden, weight1),
            pad_bias(second.bias, outputs, outputs, weight1),
        )
        shape = {"IN_CHANNELS": inputs, "HIDDEN": hidden, "OUT_CHANNELS": outputs, "RESIDUAL": residual}
        return cls(weight1, biases[0], weight2, biases[1], shape, inputs <= MAX_FUSED_CHANNELS)


@dataclass(frozen=True)
class SqueezeExcitation:
    """Two linear layers from the channels' means to their gates. Both weights are float32 [squeezed,
    channels]."""

    weight1: Tensor
    bias1: Tensor
    weight2: Tensor
    bias2: Tensor
    shape: Mapping[str, Any]

    @classmethod
    def of(
        cls, first: nn.Conv2d, second: nn.Conv2d, slope: float, *, residual: bool = False
    ) -> SqueezeExcitation:
        """slope: of the hard sigmoid. residual: add the input to the gated output."""
        squeezed, channels = first.weight.shape[:2]
        weight1 = first.weight.detach()[..., 0, 0].float()
        weight2 = second.weight.detach()[..., 0, 0].T.float()
        assert first.bias is not None
        assert second.bias is not None
        shape = {"CHANNELS": channels, "SQUEEZED": squeezed, "SLOPE": slope, "RESIDUAL": residual}
        return cls(
            weight1.contiguous(),
            first.bias.detach().float(),
            weight2.contiguous(),
            second.bias.detach().float(),
            shape,
        )


@dataclass(frozen=True)
class DeconvHead:
    """Two transposed 2×2 convolutions of stride 2, the second with one output channel.

    weight1: float16 [4, padded inputs, padded hidden]. weight2: float32 [4, padded hidden].
    The first dimension is the position in the 2×2 window.
    """

    weight1: Tensor
    bias1: Tensor
    weight2: Tensor
    bias2: float

    @classmethod
    def of(cls, first: nn.ConvTranspose2d, second: nn.ConvTranspose2d) -> DeconvHead:
        inputs, hidden = first.weight.shape[:2]
        block = padded_size(max(inputs, hidden))
        weight1 = first.weight.new_zeros(4, block, block, dtype=torch.float16)
        weight1[:, :inputs, :hidden] = first.weight.detach().permute(2, 3, 0, 1).reshape(4, inputs, hidden)
        weight2 = weight1.new_zeros(4, block, dtype=torch.float32)
        weight2[:, :hidden] = second.weight.detach()[:, 0].permute(1, 2, 0).reshape(4, hidden)
        assert second.bias is not None
        return cls(weight1, pad_bias(first.bias, hidden, block, weight1), weight2, float(second.bias))


def window_of(module: nn.Conv2d) -> dict[str, int]:
    """A convolution's kernel size, stride and padding as a Triton kernel's constants."""
    (kernel_h, kernel_w), (stride_h, stride_w) = module.kernel_size, module.stride
    top, left = cast(tuple[int, int], module.padding)
    kernel = {"KERNEL_H": kernel_h, "KERNEL_W": kernel_w}
    stride = {"STRIDE_H": stride_h, "STRIDE_W": stride_w}
    return {**kernel, **stride, "PAD_TOP": top, "PAD_LEFT": left}


def output_size(shape: Mapping[str, int], height: int, width: int) -> tuple[int, int]:
    """Height and width of a convolution's output. An even kernel
    keeps the size: the published stem pads below and right."""
    kernel_h, kernel_w = shape["KERNEL_H"], shape["KERNEL_W"]
    sides = (kernel_h, shape["PAD_TOP"]), (kernel_w, shape["PAD_LEFT"])
    padding_h, padding_w = (kernel - 1 if kernel % 2 == 0 else 2 * pad for kernel, pad in sides)
    return (height + padding_h - kernel_h) // shape["STRIDE_H"] + 1, (width + padding_w - kernel_w) // shape[
        "STRIDE_W"
    ] + 1


def padded_size(channels: int) -> int:
    """The next power of two that tl.dot takes."""
    return max(MIN_DOT_SIZE, int(triton.next_power_of_2(channels)))


def channel_block(channels: int) -> int:
    """The largest power of two, up to MAX_CHANNEL_BLOCK, that divides a number of channels."""
    return min(channels & -channels, MAX_CHANNEL_BLOCK)


def pad_bias(bias: Tensor | None, length: int, padded: int, like: Tensor) -> Tensor:
    vector = like.new_zeros(padded, dtype=torch.float32)
    if bias is not None:
        vector[:length] = bias.detach()
    return vector
