"""The layers of PP-OCRv6 for half precision on a GPU: prepared weights, and the kernel that runs each.

The networks are shallow and wide: run operation by operation they spend their time on moving maps to and from memory,
and cuDNN plans each convolution anew for every shape of input and every thread, seconds for each new size of page. Here
a layer with all that surrounds it (bias, activation, gate, residual) is one kernel that takes any shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor, nn

from stages import kernels

PIXELS = 128  # of an output that one program makes
TILE = {"ROWS": 4, "COLUMNS": 32}  # of them, where a program reads their neighbours too
LEAST_BLOCK = 16  # of a side of tl.dot
STEP = 32  # inputs that are summed up at once
WIDEST_FUSED = 128  # channels
MIXED_PIXELS = 64
GATED_PIXELS = 32
# The fastest on an H200 of some that were tried, by the block of outputs.
PROJECT_TUNING = {
    128: {"PIXELS": 128, "num_warps": 8, "num_stages": 3},
    64: {"PIXELS": 64, "num_warps": 4, "num_stages": 4},
}
SUMMED_TILES = 16

# Layers, prepared ------------------------------------------------------------------------------------------------------


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
        weight = taps.new_zeros(-(-len(taps) // STEP) * STEP, block, dtype=torch.float16)
        weight[: len(taps), :outputs] = taps
        shape = {"INPUTS": inputs, "OUTPUTS": outputs, **geometry(module)}
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

    fused: whether one kernel does both; its weights are padded as in Convolution. Wide ones do not fit into registers.
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
        fused = max(inputs, outputs) <= WIDEST_FUSED
        one = first.weight.new_zeros(pad_size(inputs) if fused else inputs, hidden, dtype=torch.float16)
        two = one.new_zeros(hidden, pad_size(outputs) if fused else outputs)
        one[:inputs], two[:, :outputs] = first.weight.detach()[..., 0, 0].T, second.weight.detach()[..., 0, 0].T
        biases = pad_vector(first.bias, hidden, hidden, one), pad_vector(second.bias, outputs, two.shape[1], one)
        shape = {"INPUTS": inputs, "HIDDEN": hidden, "OUTPUTS": outputs, "RESIDUAL": residual}
        return cls(one, biases[0], two, biases[1], shape, fused)


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


def geometry(module: nn.Conv2d) -> dict[str, int]:
    """How a kernel moves over its map."""
    (tall, wide), (down, across), (top, left) = module.kernel_size, module.stride, cast(tuple[int, int], module.padding)
    return {"TALL": tall, "WIDE": wide, "DOWN": down, "ACROSS": across, "TOP": top, "LEFT": left}


def output_size(shape: Mapping[str, int], height: int, width: int) -> tuple[int, int]:
    """Of a map after a layer. With an even kernel it keeps its size, as the published stem pads below and right."""
    tall, wide = shape["TALL"], shape["WIDE"]
    below, beside = (side - 1 if side % 2 == 0 else 2 * pad for side, pad in ((tall, shape["TOP"]), (wide, shape["LEFT"])))
    return (height + below - tall) // shape["DOWN"] + 1, (width + beside - wide) // shape["ACROSS"] + 1


def tiles_of(rows: int, columns: int) -> tuple[dict[str, int], int]:
    """A kernel's constants for the tiles of a map, and how many there are; a map of one row has flat ones."""
    tile = TILE if rows > 1 else {"ROWS": 1, "COLUMNS": PIXELS}
    return tile, triton.cdiv(rows, tile["ROWS"]) * triton.cdiv(columns, tile["COLUMNS"])


def pad_size(channels: int) -> int:
    return max(LEAST_BLOCK, int(triton.next_power_of_2(channels)))


def pad_vector(bias: Tensor | None, length: int, padded: int, like: Tensor) -> Tensor:
    vector = like.new_zeros(padded, dtype=torch.float32)
    if bias is not None:
        vector[:length] = bias.detach()
    return vector


# Calls -----------------------------------------------------------------------------------------------------------------


def convolve(
    layer: Convolution,
    pixels: Tensor,
    widths: Tensor | None = None,
    *,
    relu: bool = True,
    out: Tensor | None = None,
    offset: int = 0,
    want_sums: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """A convolution with its bias, and a ReLU; bytes are taken as levels of -1..1.

    out, offset: a map to write into, from which channel on. want_sums: also the channels' sums over tiles of each image.
    """
    count, height, width, _ = pixels.shape
    rows, columns = output_size(layer.shape, height, width)
    outputs = layer.shape["OUTPUTS"]
    if out is None:
        out = pixels.new_empty(count, rows, columns, outputs, dtype=torch.float16)
    tile, tiles = tiles_of(rows, columns)
    sums = out.new_empty(count, tiles, outputs, dtype=torch.float32) if want_sums else None
    kernels.convolve_kernel[tiles, count](
        pixels,
        layer.weight,
        layer.bias,
        out,
        sums,
        widths,
        height,
        width,
        rows,
        columns,
        out.shape[3],
        offset,
        **layer.shape,
        RELU=relu,
        BYTES=pixels.dtype == torch.uint8,
        **tile,
        STEP=STEP,
        BLOCK=layer.weight.shape[1],
    )
    return out, sums


def filter_channels(
    layer: Depthwise, pixels: Tensor, widths: Tensor | None = None, *, want_sums: bool = False
) -> tuple[Tensor, Tensor | None]:
    """A depthwise convolution with its bias. want_sums: as in convolve, over the columns that `widths` leaves."""
    count, height, width, channels = pixels.shape
    rows, columns = output_size(layer.shape, height, width)
    out = pixels.new_empty(count, rows, columns, channels)
    tile, tiles = tiles_of(rows, columns)
    sums = out.new_empty(count, tiles, channels, dtype=torch.float32) if want_sums else None
    block = 16 if channels == 48 else 32
    kernels.filter_kernel[tiles, triton.cdiv(channels, block), count](
        pixels,
        layer.weight,
        layer.bias,
        out,
        sums,
        widths,
        height,
        width,
        rows,
        columns,
        **layer.shape,
        **tile,
        BLOCK=block,
    )
    return out, sums


def excite(layer: Excitation, sums: Tensor | None, size: tuple[int, int], widths: Tensor | None = None) -> Tensor:
    """The channels' gates [N, channels], float32, from their sums over maps of a size (height, width)."""
    assert sums is not None
    count, tiles, channels = sums.shape
    gates = torch.empty(count, channels, device=sums.device)
    kernels.excite_kernel[(count,)](
        sums,
        layer.first,
        layer.first_bias,
        layer.second,
        layer.second_bias,
        gates,
        widths,
        tiles,
        *size,
        **layer.shape,
        TILES=SUMMED_TILES,
        ROWS=4,
        BLOCK=triton.next_power_of_2(channels),
    )
    return gates


def mix(layer: Mixer, pixels: Tensor, gates: Tensor | None) -> Tensor:
    """Pixels, gated, through the two layers, and with `residual` added to what comes out. May gate them in place."""
    if not layer.fused:
        if gates is not None:
            gate(pixels, gates)
        hidden = project(layer.first, layer.first_bias, pixels, gelu=True)
        return project(layer.second, layer.second_bias, hidden, residual=pixels if layer.shape["RESIDUAL"] else None)
    count, rows, columns, _ = pixels.shape
    out = pixels.new_empty(count, rows, columns, layer.shape["OUTPUTS"])
    kernels.mix_kernel[triton.cdiv(rows * columns, MIXED_PIXELS), count](
        pixels,
        gates,
        layer.first,
        layer.first_bias,
        layer.second,
        layer.second_bias,
        out,
        rows * columns,
        **layer.shape,
        PIXELS=MIXED_PIXELS,
        STEP=STEP,
        BLOCK_IN=len(layer.first),
        BLOCK_OUT=layer.second.shape[1],
        num_warps=4,
        num_stages=2,
    )
    return out


def gate(pixels: Tensor, gates: Tensor) -> None:
    """In place. A pass of its own costs less than gates on the way into a projection, which would then load three times as
    much."""
    count, rows, columns, channels = pixels.shape
    kernels.gate_kernel[triton.cdiv(rows * columns, GATED_PIXELS), count](
        pixels,
        gates,
        rows * columns,
        CHANNELS=channels,
        PIXELS=GATED_PIXELS,
        BLOCK=triton.next_power_of_2(channels),
    )


def project(weight: Tensor, bias: Tensor, pixels: Tensor, *, gelu: bool = False, residual: Tensor | None = None) -> Tensor:
    """One pointwise layer, with a GELU or something to add behind it."""
    count, rows, columns, inputs = pixels.shape
    outputs = weight.shape[1]
    out = pixels.new_empty(count, rows, columns, outputs)
    total, block = count * rows * columns, 128 if outputs % 128 == 0 else 64
    tuning = PROJECT_TUNING[block]
    kernels.project_kernel[(triton.cdiv(total, tuning["PIXELS"]) * (outputs // block),)](
        pixels,
        weight,
        bias,
        residual,
        out,
        total,
        INPUTS=inputs,
        OUTPUTS=outputs,
        GELU=gelu,
        STEP=64 if inputs % 64 == 0 else STEP,
        BLOCK=block,
        **tuning,
    )
    return out


def try_project(device: torch.device) -> None:
    """The kernel that takes most of a GPU's shared memory, once. Raises whatever Triton and its compilers do."""
    inputs, outputs = 64, max(PROJECT_TUNING)
    weight = torch.zeros(inputs, outputs, dtype=torch.float16, device=device)
    project(weight, weight.new_zeros(outputs, dtype=torch.float32), weight.new_zeros(1, 1, 1, inputs), gelu=True)


def pool(pixels: Tensor, out: Tensor, widths: Tensor | None = None) -> None:
    """The greatest of 2×2, at every pixel, into the first channels of `out`. pixels: not negative."""
    count, height, width, channels = pixels.shape
    tile, tiles = tiles_of(height, width)
    kernels.pool_kernel[tiles, count](
        pixels,
        out,
        widths,
        height,
        width,
        out.shape[3],
        CHANNELS=channels,
        **tile,
        BLOCK=triton.next_power_of_2(channels),
    )


def spread(pixels: Tensor, gates: Tensor, out: Tensor, coarser: Tensor | None = None, offset: int = 0) -> Tensor:
    """Pixels, gated and repeated up to the size of `out`, into its channels from `offset` on; `coarser`, of half that size,
    is repeated and added."""
    count, rows, columns, total = out.shape
    channels = pixels.shape[3]
    kernels.spread_kernel[triton.cdiv(rows * columns, PIXELS), count](
        pixels,
        gates,
        coarser,
        out,
        rows,
        columns,
        rows // pixels.shape[1],
        total,
        offset,
        CHANNELS=channels,
        PIXELS=PIXELS,
        BLOCK=triton.next_power_of_2(channels),
    )
    return out


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


def enlarge(head: Head, pixels: Tensor) -> Tensor:
    """Probabilities [N, 4 · height, 4 · width] in float16."""
    count, height, width, channels = pixels.shape
    out = pixels.new_empty(count, 4 * height, 4 * width)
    kernels.enlarge_kernel[triton.cdiv(height * width, PIXELS), count](
        pixels,
        head.first,
        head.first_bias,
        head.second,
        out,
        height,
        width,
        BIAS=head.second_bias,
        CHANNELS=channels,
        PIXELS=PIXELS,
        BLOCK=head.first.shape[1],
    )
    return out


def choose(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest class of each row and its probability: int64 and float32, [...] of logits [..., classes]."""
    classes = logits.new_empty(logits.shape[:-1], dtype=torch.int64)
    probabilities = logits.new_empty(logits.shape[:-1], dtype=torch.float32)
    kernels.choose_kernel[(classes.numel(),)](logits.contiguous(), classes, probabilities, logits.shape[-1], BLOCK=4096)
    return classes, probabilities
