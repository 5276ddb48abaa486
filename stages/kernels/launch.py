"""The kernels' launches: what each takes and gives, and the sizes at which it runs fastest.

The networks of OCR are shallow and wide: run operation by operation they spend their time on moving maps to and from
memory, and cuDNN plans each convolution anew for every shape of input and every thread, seconds for each new size of
page. Here a layer with all that surrounds it (bias, activation, gate, residual) is one kernel that takes any shape.

Sizes are the fastest on an H200 of some that were tried on the networks' own maps.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor, nn

from stages.kernels import convolution as kernels
from stages.kernels import pointwise
from stages.kernels.layers import Convolution, Depthwise, Excitation, Head, Mixer, output_size, part_size

PIXELS = 128  # of an output that one program makes
TILE = {"ROWS": 4, "COLUMNS": 32}  # of them, where a program reads their neighbours too
FILTERED_RUNS, FILTERED_ROWS, RUN, FILTERED_CHANNELS = 16, 4, 8, 32  # runs in all, in so many rows
MIXED_PIXELS, MIXED_UNITS = 64, 32  # small enough for two or three programs on a multiprocessor
GATED_PIXELS, MERGED_PIXELS = 32, 16
PROJECTED_PIXELS, PROJECTED_OUTPUTS, PROJECTED_INPUTS = 128, 128, 64
SUMMED_TILES = 16
NORMED_ROWS = 4
SILU_BLOCK = 2048


def convolve(
    layer: Convolution,
    pixels: Tensor,
    widths: Tensor | None = None,
    *,
    relu: bool = True,
    pooled: Tensor | None = None,
    want_sums: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """A convolution with its bias, and a ReLU; bytes are taken as levels of -1..1.

    pooled: a map of the output's shape, not negative; its greatest of 2×2, at every pixel, become the output's first half of
    channels. want_sums: also the channels' sums over tiles of each image.
    """
    shape, size = layer.shape, pixels.shape[1:3]
    if all(shape[side] == 1 for side in ("TALL", "WIDE", "DOWN", "ACROSS")) and widths is None and pooled is None:
        # No neighbours: all pixels are one row.
        pixels = pixels.flatten(1, 2)[:, None]
    count, height, width, _ = pixels.shape
    rows, columns = output_size(shape, height, width)
    outputs = shape["OUTPUTS"]
    out = pixels.new_empty(count, rows, columns, outputs if pooled is None else 2 * outputs, dtype=torch.float16)
    tile, tiles = tiles_of(rows, columns)
    sums = out.new_empty(count, tiles, outputs, dtype=torch.float32) if want_sums else None
    kernels.convolve_kernel[tiles, count](
        pixels,
        layer.weight,
        layer.bias,
        pooled,
        out,
        sums,
        widths,
        height,
        width,
        rows,
        columns,
        **shape,
        RELU=relu,
        BYTES=pixels.dtype == torch.uint8,
        **tile,
        BLOCK=layer.weight.shape[1],
    )
    return out.view(count, *output_size(shape, *size), out.shape[3]), sums


def filter_channels(
    layer: Depthwise, pixels: Tensor, widths: Tensor | None = None, *, want_sums: bool = False
) -> tuple[Tensor, Tensor | None]:
    """A depthwise convolution with its bias. want_sums: as in convolve, over the columns that `widths` leaves."""
    count, height, width, channels = pixels.shape
    rows, columns = output_size(layer.shape, height, width)
    out = pixels.new_empty(count, rows, columns, channels)
    run = RUN if layer.shape["ACROSS"] == 1 and layer.shape["WIDE"] == 3 else RUN // 2
    high = FILTERED_ROWS if rows > 1 else 1
    tiles = triton.cdiv(rows, high) * triton.cdiv(triton.cdiv(columns, run), FILTERED_RUNS // high)
    sums = out.new_empty(count, tiles, channels, dtype=torch.float32) if want_sums else None
    block = 16 if channels == 48 else FILTERED_CHANNELS
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
        ROWS=high,
        RUNS=FILTERED_RUNS // high,
        RUN=run,
        UNROLLED=layer.shape["TALL"] if layer.shape["TALL"] <= 3 else 1,  # of a 7×7 kernel the code would be too long
        BLOCK=block,
        num_warps=1 if block == 16 else 2,
    )
    return out, sums


def excite(layer: Excitation, sums: Tensor | None, size: tuple[int, int], widths: Tensor | None = None) -> Tensor:
    """The channels' gates [N, channels], float32, from their sums over maps of a size (height, width)."""
    assert sums is not None
    count, tiles, channels = sums.shape
    gates = torch.empty(count, channels, device=sums.device)
    pointwise.excite_kernel[(count,)](
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
    pointwise.mix_kernel[triton.cdiv(rows * columns, MIXED_PIXELS), count](
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
        STEP=MIXED_UNITS,
        PART_IN=part_size(layer.shape["INPUTS"]),
        PART_OUT=part_size(layer.shape["OUTPUTS"]),
        num_warps=4,
    )
    return out


def gate(pixels: Tensor, gates: Tensor) -> None:
    """In place. A pass of its own costs less than gates on the way into a projection, which would then load three times as
    much."""
    count, rows, columns, channels = pixels.shape
    pointwise.gate_kernel[triton.cdiv(rows * columns, GATED_PIXELS), count](
        pixels,
        gates,
        rows * columns,
        CHANNELS=channels,
        PIXELS=GATED_PIXELS,
        BLOCK=triton.next_power_of_2(channels),
    )


def project(weight: Tensor, bias: Tensor, pixels: Tensor, *, gelu: bool = False, residual: Tensor | None = None) -> Tensor:
    """One pointwise layer, with a GELU or something to add behind it; inputs and outputs are multiples of 128."""
    count, rows, columns, inputs = pixels.shape
    outputs = weight.shape[1]
    out = pixels.new_empty(count, rows, columns, outputs)
    total = count * rows * columns
    pointwise.project_kernel[(triton.cdiv(total, PROJECTED_PIXELS) * (outputs // PROJECTED_OUTPUTS),)](
        pixels,
        weight,
        bias,
        residual,
        out,
        total,
        INPUTS=inputs,
        OUTPUTS=outputs,
        GELU=gelu,
        PIXELS=PROJECTED_PIXELS,
        STEP=PROJECTED_INPUTS,
        BLOCK=PROJECTED_OUTPUTS,
        num_warps=8,
        num_stages=3,
    )
    return out


def try_project(device: torch.device) -> None:
    """One of the two kernels that take most of a GPU's shared memory, once. Raises whatever Triton and its compilers do."""
    inputs, outputs = 384, 768
    weight = torch.zeros(inputs, outputs, dtype=torch.float16, device=device)
    project(weight, weight.new_zeros(outputs, dtype=torch.float32), weight.new_zeros(1, 1, 1, inputs), gelu=True)


def tiles_of(rows: int, columns: int) -> tuple[dict[str, int], int]:
    """A kernel's constants for the tiles of a map, and how many there are; a map of one row has flat ones."""
    tile = TILE if rows > 1 else {"ROWS": 1, "COLUMNS": PIXELS}
    return tile, triton.cdiv(rows, tile["ROWS"]) * triton.cdiv(columns, tile["COLUMNS"])


def merge(pixels: Tensor, gates: Tensor, coarser: Tensor | None) -> Tensor:
    """Pixels, gated; `coarser`, of half their size, is repeated and added."""
    count, rows, columns, channels = pixels.shape
    out = torch.empty_like(pixels)
    kernels.merge_kernel[triton.cdiv(rows * columns, MERGED_PIXELS), count](
        pixels,
        gates,
        coarser,
        out,
        rows,
        columns,
        CHANNELS=channels,
        PIXELS=MERGED_PIXELS,
        BLOCK=triton.next_power_of_2(channels),
    )
    return out


def join(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Four maps with their gates, each half the size of the next, side by side at the size of the last."""
    count, rows, columns, channels = parts[-1][0].shape
    out = parts[-1][0].new_empty(count, rows, columns, 4 * channels)
    kernels.join_kernel[triton.cdiv(rows * columns, MERGED_PIXELS), count](
        *itertools.chain.from_iterable(parts),
        out,
        rows,
        columns,
        CHANNELS=channels,
        PIXELS=MERGED_PIXELS,
        BLOCK=triton.next_power_of_2(channels),
    )
    return out


def enlarge(head: Head, pixels: Tensor) -> Tensor:
    """Probabilities as bytes, [N, 4 · height, 4 · width]."""
    count, height, width, channels = pixels.shape
    out = pixels.new_empty(count, 4 * height, width, dtype=torch.int32)  # four bytes of a row
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
    return out.view(torch.uint8)


def choose(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest class of each row and its probability: int64 and float32, [...] of logits [..., classes]."""
    classes = logits.new_empty(logits.shape[:-1], dtype=torch.int64)
    probabilities = logits.new_empty(logits.shape[:-1], dtype=torch.float32)
    pointwise.choose_kernel[(classes.numel(),)](
        logits.contiguous(), classes, probabilities, logits.shape[-1], BLOCK=1024, num_warps=8
    )
    return classes, probabilities


def add_norm(hidden: Tensor, update: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """hidden + update, and that through a layer norm: [..., width] each, contiguous."""
    width = hidden.shape[-1]
    rows = hidden.numel() // width
    total, normed = torch.empty_like(hidden), torch.empty_like(hidden)
    pointwise.add_norm_kernel[(triton.cdiv(rows, NORMED_ROWS),)](
        hidden,
        update,
        norm.weight,
        norm.bias,
        total,
        normed,
        rows,
        EPSILON=norm.eps,
        WIDTH=width,
        ROWS=NORMED_ROWS,
        BLOCK=triton.next_power_of_2(width),
    )
    return total, normed


def add_bias_silu(values: Tensor, bias: Tensor) -> Tensor:
    """In place: values [N, channels, height, width] with the channels last in memory."""
    count = values.numel()
    pointwise.bias_silu_kernel[(triton.cdiv(count, SILU_BLOCK),)](
        values, bias, count, CHANNELS=len(bias), BLOCK=SILU_BLOCK, num_warps=8
    )
    return values
