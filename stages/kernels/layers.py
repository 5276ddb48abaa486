"""The layers of PP-OCRv6 with their weights as the kernels want them; launch.py runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor, nn

LEAST_BLOCK = 16  # of a side of tl.dot
SHORT = 192  # taps: the loads of a convolution of more run ahead of its sums
WIDEST_FUSED = 192  # channels into a Mixer that is one kernel
WIDEST_PART = 128  # channels that a kernel takes at once


@dataclass(frozen=True)
class Convolution:
    """Weights [taps · inputs, outputs], both padded with zeros to what tl.dot takes, and how to lay them over a map."""

    weight: Tensor
    bias: Tensor
    shape: Mapping[str, int]  # the kernel's constants

    @classmethod
    def of(cls, module: nn.Conv2d, padding: tuple[int, int] | None = None) -> Convolution:
        """padding: rows above and columns left of the map, whatever the module's own; below and right follows."""
        outputs, inputs = module.weight.shape[:2]
        taps = module.weight.permute(2, 3, 1, 0).reshape(-1, outputs)
        block = pad_size(outputs)
        step, stages = (32, 1) if len(taps) <= SHORT else (64, 3)
        weight = taps.new_zeros(-(-len(taps) // step) * step, block, dtype=torch.float16)
        weight[: len(taps), :outputs] = taps
        shape = {"INPUTS": inputs, "OUTPUTS": outputs, "STEP": step, "STAGES": stages, **geometry(module)}
        if padding is not None:
            shape |= {"TOP": padding[0], "LEFT": padding[1]}
        return cls(weight, pad_vector(module.bias, outputs, block, weight), shape)


@dataclass(frozen=True)
class Depthwise:
    """Weights [taps, channels]."""

    weight: Tensor
    bias: Tensor
    shape: Mapping[str, int]

    @classmethod
    def of(cls, module: nn.Conv2d) -> Depthwise:
        channels = module.out_channels
        weight = module.weight[:, 0].permute(1, 2, 0).reshape(-1, channels).float().contiguous()
        assert module.bias is not None
        return cls(weight, module.bias.detach().float(), {"CHANNELS": channels, **geometry(module)})


@dataclass(frozen=True)
class Mixer:
    """Two pointwise convolutions with a GELU between them, weights [inputs, hidden] and [hidden, outputs].

    fused: whether one kernel does both. Wide ones do not fit into registers.
    """

    first: Tensor
    first_bias: Tensor
    second: Tensor
    second_bias: Tensor
    shape: Mapping[str, Any]
    fused: bool

    @classmethod
    def of(cls, first: nn.Conv2d, second: nn.Conv2d, *, residual: bool) -> Mixer:
        hidden, inputs = first.weight.shape[:2]
        outputs = second.out_channels
        one, two = (module.weight.detach()[..., 0, 0].T.half().contiguous() for module in (first, second))
        biases = pad_vector(first.bias, hidden, hidden, one), pad_vector(second.bias, outputs, outputs, one)
        shape = {"INPUTS": inputs, "HIDDEN": hidden, "OUTPUTS": outputs, "RESIDUAL": residual}
        return cls(one, biases[0], two, biases[1], shape, inputs <= WIDEST_FUSED)


@dataclass(frozen=True)
class Excitation:
    """Two small layers from the channels' means to their gates; the first [squeezed, channels], so is the second."""

    first: Tensor
    first_bias: Tensor
    second: Tensor
    second_bias: Tensor
    shape: Mapping[str, Any]

    @classmethod
    def of(cls, first: nn.Conv2d, second: nn.Conv2d, slope: float, *, residual: bool = False) -> Excitation:
        """slope: of the gate's hard sigmoid. residual: whether what is gated is then added to what it was."""
        squeezed, channels = first.weight.shape[:2]
        one, two = first.weight.detach()[..., 0, 0].float(), second.weight.detach()[..., 0, 0].T.float()
        assert first.bias is not None
        assert second.bias is not None
        shape = {"CHANNELS": channels, "SQUEEZED": squeezed, "SLOPE": slope, "RESIDUAL": residual}
        return cls(one.contiguous(), first.bias.detach().float(), two.contiguous(), second.bias.detach().float(), shape)


@dataclass(frozen=True)
class Head:
    """Two transposed convolutions of 2×2: the first [4 places, inputs, hidden], padded; the second [4 places, hidden]."""

    first: Tensor
    first_bias: Tensor
    second: Tensor
    second_bias: float

    @classmethod
    def of(cls, first: nn.ConvTranspose2d, second: nn.ConvTranspose2d) -> Head:
        inputs, hidden = first.weight.shape[:2]
        block = pad_size(max(inputs, hidden))
        one = first.weight.new_zeros(4, block, block, dtype=torch.float16)
        one[:, :inputs, :hidden] = first.weight.detach().permute(2, 3, 0, 1).reshape(4, inputs, hidden)
        two = one.new_zeros(4, block, dtype=torch.float32)
        two[:, :hidden] = second.weight.detach()[:, 0].permute(1, 2, 0).reshape(4, hidden)
        assert second.bias is not None
        return cls(one, pad_vector(first.bias, hidden, block, one), two, float(second.bias))


def geometry(module: nn.Conv2d) -> dict[str, int]:
    """How a kernel moves over its map."""
    (tall, wide), (down, across), (top, left) = module.kernel_size, module.stride, cast(tuple[int, int], module.padding)
    return {"TALL": tall, "WIDE": wide, "DOWN": down, "ACROSS": across, "TOP": top, "LEFT": left}


def output_size(shape: Mapping[str, int], height: int, width: int) -> tuple[int, int]:
    """Of a map after a layer. With an even kernel it keeps its size, as the published stem pads below and right."""
    tall, wide = shape["TALL"], shape["WIDE"]
    below, beside = (side - 1 if side % 2 == 0 else 2 * pad for side, pad in ((tall, shape["TOP"]), (wide, shape["LEFT"])))
    return (height + below - tall) // shape["DOWN"] + 1, (width + beside - wide) // shape["ACROSS"] + 1


def pad_size(channels: int) -> int:
    return max(LEAST_BLOCK, int(triton.next_power_of_2(channels)))


def part_size(channels: int) -> int:
    """The widest equal parts of so many channels that are a power of two."""
    return min(channels & -channels, WIDEST_PART)


def pad_vector(bias: Tensor | None, length: int, padded: int, like: Tensor) -> Tensor:
    vector = like.new_zeros(padded, dtype=torch.float32)
    if bias is not None:
        vector[:length] = bias.detach()
    return vector
