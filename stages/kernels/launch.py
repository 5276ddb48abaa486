"""Launches of the Triton kernels: a function for each, with the block sizes at which it runs fastest.

The OCR networks are shallow and wide. Run operation by operation they spend their time moving maps to and
from memory, and cuDNN plans each convolution again for every input shape and every thread, which takes
seconds for each new page size. Here a layer is one kernel together with its bias, activation, gate and
residual, and it takes any shape.

Block sizes are the fastest of those tried on an H200 on the networks' own maps. Maps are channels last, [N,
H, W, C].
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor, nn

from stages.kernels import convolution, pointwise
from stages.kernels.layers import (
    Convolution,
    DeconvHead,
    DepthwiseConvolution,
    PointwiseMlp,
    SqueezeExcitation,
    channel_block,
    output_size,
)

# BLOCK_M is a number of pixels (or rows) of the output that one program computes.
BLOCK_M = 128
TILE = {"BLOCK_H": 4, "BLOCK_W": 32}  # the same number, for a convolution
DEPTHWISE_RUNS, DEPTHWISE_BLOCK_H, RUN_LENGTH, DEPTHWISE_BLOCK_C = 16, 4, 8, 32  # 16 runs in 4 rows
MLP_BLOCK_M, MLP_BLOCK_HIDDEN = 64, 32  # small enough for two or three programs on a multiprocessor
SCALE_BLOCK_M, UPSAMPLE_BLOCK_M = 32, 16
LINEAR_BLOCK_M, LINEAR_BLOCK_N, LINEAR_BLOCK_K = 128, 128, 64
SQUEEZE_BLOCK_T, SQUEEZE_BLOCK_S = 16, 4
NORM_BLOCK_M = 4
ATTENTION_BLOCK_M = 64
SILU_BLOCK_SIZE = 2048


def conv2d(
    layer: Convolution,
    pixels: Tensor,
    widths: Tensor | None = None,
    *,
    relu: bool = True,
    pooled: Tensor | None = None,
    return_sums: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """A convolution with its bias, and a ReLU. uint8 pixels are scaled to -1..1.

    widths: int [N], the columns of each image; the rest of its map counts as zero.
    pooled: a map of the output's shape, not negative. Its 2×2 max pooling with stride 1 is put before the
        output's channels.
    return_sums: also return the channels' sums over tiles of each image, float32 [N, tiles, channels].
    """
    shape, size = layer.shape, pixels.shape[1:3]
    is_pointwise = all(shape[side] == 1 for side in ("KERNEL_H", "KERNEL_W", "STRIDE_H", "STRIDE_W"))
    if is_pointwise and widths is None and pooled is None:
        pixels = pixels.flatten(1, 2)[:, None]  # without neighbors, all pixels can be one row
    count, height, width, _ = pixels.shape
    out_height, out_width = output_size(shape, height, width)
    channels = shape["OUT_CHANNELS"]
    out = pixels.new_empty(
        count, out_height, out_width, channels if pooled is None else 2 * channels, dtype=torch.float16
    )
    tile, tiles = tile_constants(out_height, out_width)
    sums = out.new_empty(count, tiles, channels, dtype=torch.float32) if return_sums else None
    convolution.conv2d_kernel[tiles, count](
        pixels,
        layer.weight,
        layer.bias,
        pooled,
        out,
        sums,
        widths,
        height,
        width,
        out_height,
        out_width,
        **shape,
        RELU=relu,
        UINT8=pixels.dtype == torch.uint8,
        **tile,
        BLOCK_C=layer.weight.shape[1],
    )
    return out.view(count, *output_size(shape, *size), out.shape[3]), sums


def depthwise_conv2d(
    layer: DepthwiseConvolution, pixels: Tensor, widths: Tensor | None = None, *, return_sums: bool = False
) -> tuple[Tensor, Tensor | None]:
    """A depthwise convolution with its bias. widths, return_sums: as in conv2d;
    the sums are over each image's own columns."""
    count, height, width, channels = pixels.shape
    out_height, out_width = output_size(layer.shape, height, width)
    out = pixels.new_empty(count, out_height, out_width, channels)
    run_length = (
        RUN_LENGTH if layer.shape["STRIDE_W"] == 1 and layer.shape["KERNEL_W"] == 3 else RUN_LENGTH // 2
    )
    block_h = DEPTHWISE_BLOCK_H if out_height > 1 else 1
    runs = DEPTHWISE_RUNS // block_h
    tiles = triton.cdiv(out_height, block_h) * triton.cdiv(triton.cdiv(out_width, run_length), runs)
    sums = out.new_empty(count, tiles, channels, dtype=torch.float32) if return_sums else None
    block_c = 16 if channels == 48 else DEPTHWISE_BLOCK_C
    convolution.depthwise_conv2d_kernel[tiles, triton.cdiv(channels, block_c), count](
        pixels,
        layer.weight,
        layer.bias,
        out,
        sums,
        widths,
        height,
        width,
        out_height,
        out_width,
        **layer.shape,
        BLOCK_H=block_h,
        NUM_RUNS=runs,
        RUN_LENGTH=run_length,
        # The code for a 7×7 kernel would be too long.
        UNROLL=layer.shape["KERNEL_H"] if layer.shape["KERNEL_H"] <= 3 else 1,
        BLOCK_C=block_c,
        num_warps=1 if block_c == 16 else 2,
    )
    return out, sums


def squeeze_excitation(
    layer: SqueezeExcitation, sums: Tensor | None, size: tuple[int, int], widths: Tensor | None = None
) -> Tensor:
    """The gates, float32 [N, channels], from the sums that a convolution returned.
    size: height and width of its maps."""
    assert sums is not None
    count, tiles, channels = sums.shape
    gates = torch.empty(count, channels, device=sums.device)
    pointwise.squeeze_excitation_kernel[(count,)](
        sums,
        layer.weight1,
        layer.bias1,
        layer.weight2,
        layer.bias2,
        gates,
        widths,
        tiles,
        *size,
        **layer.shape,
        BLOCK_T=SQUEEZE_BLOCK_T,
        BLOCK_S=SQUEEZE_BLOCK_S,
        BLOCK_C=triton.next_power_of_2(channels),
    )
    return gates


def pointwise_mlp(layer: PointwiseMlp, pixels: Tensor, gates: Tensor | None) -> Tensor:
    """The MLP of pixels · gates, with a residual if the layer has one.
    May multiply pixels by the gates in place."""
    if not layer.fused:
        if gates is not None:
            scale_channels(pixels, gates)
        hidden = pointwise_linear(layer.weight1, layer.bias1, pixels, gelu=True)
        residual = pixels if layer.shape["RESIDUAL"] else None
        return pointwise_linear(layer.weight2, layer.bias2, hidden, residual=residual)
    count, height, width, _ = pixels.shape
    out = pixels.new_empty(count, height, width, layer.shape["OUT_CHANNELS"])
    pointwise.pointwise_mlp_kernel[triton.cdiv(height * width, MLP_BLOCK_M), count](
        pixels,
        gates,
        layer.weight1,
        layer.bias1,
        layer.weight2,
        layer.bias2,
        out,
        height * width,
        **layer.shape,
        BLOCK_M=MLP_BLOCK_M,
        BLOCK_HIDDEN=MLP_BLOCK_HIDDEN,
        BLOCK_IN=channel_block(layer.shape["IN_CHANNELS"]),
        BLOCK_OUT=channel_block(layer.shape["OUT_CHANNELS"]),
        num_warps=4,
    )
    return out


def scale_channels(pixels: Tensor, gates: Tensor) -> None:
    """pixels *= gates, in place. A separate pass is faster than gates in pointwise_linear,
    which would then load three times as much."""
    count, height, width, channels = pixels.shape
    pointwise.scale_channels_kernel[triton.cdiv(height * width, SCALE_BLOCK_M), count](
        pixels,
        gates,
        height * width,
        CHANNELS=channels,
        BLOCK_M=SCALE_BLOCK_M,
        BLOCK_C=triton.next_power_of_2(channels),
    )


def pointwise_linear(
    weight: Tensor, bias: Tensor, pixels: Tensor, *, gelu: bool = False, residual: Tensor | None = None
) -> Tensor:
    """pixels @ weight + bias, then a GELU or a residual. The
    numbers of inputs and outputs must be multiples of 128."""
    count, height, width, inputs = pixels.shape
    outputs = weight.shape[1]
    out = pixels.new_empty(count, height, width, outputs)
    total = count * height * width
    pointwise.pointwise_linear_kernel[(triton.cdiv(total, LINEAR_BLOCK_M) * (outputs // LINEAR_BLOCK_N),)](
        pixels,
        weight,
        bias,
        residual,
        out,
        total,
        K=inputs,
        N=outputs,
        GELU=gelu,
        BLOCK_M=LINEAR_BLOCK_M,
        BLOCK_K=LINEAR_BLOCK_K,
        BLOCK_N=LINEAR_BLOCK_N,
        num_warps=8,
        num_stages=3,
    )
    return out


def try_pointwise_linear(device: torch.device | str) -> None:
    """Run once one of the two kernels that need the most shared memory.
    Raises whatever Triton and its compilers raise."""
    inputs, outputs = 384, 768
    weight = torch.zeros(inputs, outputs, dtype=torch.float16, device=device)
    pointwise_linear(
        weight, weight.new_zeros(outputs, dtype=torch.float32), weight.new_zeros(1, 1, 1, inputs), gelu=True
    )


def tile_constants(height: int, width: int) -> tuple[dict[str, int], int]:
    """The tile size for a map as a kernel's constants, and the number of tiles.
    A map of one row has flat tiles."""
    tile = TILE if height > 1 else {"BLOCK_H": 1, "BLOCK_W": BLOCK_M}
    return tile, triton.cdiv(height, tile["BLOCK_H"]) * triton.cdiv(width, tile["BLOCK_W"])


def upsample_add(pixels: Tensor, gates: Tensor, coarser: Tensor | None) -> Tensor:
    """pixels · gates + coarser, which is half their size and is enlarged by repeating pixels."""
    count, height, width, channels = pixels.shape
    out = torch.empty_like(pixels)
    convolution.upsample_add_kernel[triton.cdiv(height * width, UPSAMPLE_BLOCK_M), count](
        pixels,
        gates,
        coarser,
        out,
        height,
        width,
        CHANNELS=channels,
        BLOCK_M=UPSAMPLE_BLOCK_M,
        BLOCK_C=triton.next_power_of_2(channels),
    )
    return out


def upsample_concat(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Four maps times their gates, each half the size of the next,
    enlarged to the last one's size and concatenated."""
    count, height, width, channels = parts[-1][0].shape
    out = parts[-1][0].new_empty(count, height, width, 4 * channels)
    convolution.upsample_concat_kernel[triton.cdiv(height * width, UPSAMPLE_BLOCK_M), count](
        *itertools.chain.from_iterable(parts),
        out,
        height,
        width,
        CHANNELS=channels,
        BLOCK_M=UPSAMPLE_BLOCK_M,
        BLOCK_C=triton.next_power_of_2(channels),
    )
    return out


def deconv_head(head: DeconvHead, pixels: Tensor) -> Tensor:
    """Probabilities as bytes, uint8 [N, 4 · height, 4 · width]."""
    count, height, width, channels = pixels.shape
    out = pixels.new_empty(count, 4 * height, width, dtype=torch.int32)  # four bytes of a row
    convolution.deconv_head_kernel[triton.cdiv(height * width, BLOCK_M), count](
        pixels,
        head.weight1,
        head.bias1,
        head.weight2,
        out,
        height,
        width,
        B2=head.bias2,
        CHANNELS=channels,
        BLOCK_M=BLOCK_M,
        BLOCK_C=head.weight1.shape[1],
    )
    return out.view(torch.uint8)


def attention(qkv: Tensor, lengths: Tensor, heads: int, scale: float) -> Tensor:
    """Self-attention of lines: float16 [N, steps, dim] from queries, keys and values side by side, [N, steps,
    3 · dim]. lengths: int64 [N], at least 1: how many steps of each line are attended to."""
    count, steps, thrice = qkv.shape
    out = qkv.new_empty(count, steps, thrice // 3)
    head_dim = thrice // 3 // heads
    pointwise.attention_kernel[triton.cdiv(steps, ATTENTION_BLOCK_M), heads, count](
        qkv,
        lengths,
        out,
        steps,
        SCALE=scale,
        HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK_M=ATTENTION_BLOCK_M,
        BLOCK_D=triton.next_power_of_2(head_dim),
    )
    return out


def argmax_softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely class of each row and its probability: int64 and float32 [...] for logits [...,
    classes]."""
    classes = logits.new_empty(logits.shape[:-1], dtype=torch.int64)
    probabilities = logits.new_empty(logits.shape[:-1], dtype=torch.float32)
    pointwise.argmax_softmax_kernel[(classes.numel(),)](
        logits.contiguous(), classes, probabilities, logits.shape[-1], BLOCK=2048, num_warps=8
    )
    return classes, probabilities


def add_layer_norm(hidden: Tensor, update: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """hidden + update, and its layer norm. All are contiguous [..., width]."""
    width = hidden.shape[-1]
    rows = hidden.numel() // width
    total, normed = torch.empty_like(hidden), torch.empty_like(hidden)
    pointwise.add_layer_norm_kernel[(triton.cdiv(rows, NORM_BLOCK_M),)](
        hidden,
        update,
        norm.weight,
        norm.bias,
        total,
        normed,
        rows,
        EPS=norm.eps,
        N=width,
        BLOCK_M=NORM_BLOCK_M,
        BLOCK_N=triton.next_power_of_2(width),
    )
    return total, normed


def add_bias_silu(values: Tensor, bias: Tensor) -> Tensor:
    """F.silu(values + bias) in place. values: [N, channels, height, width] with the channels last in memory."""
    count = values.numel()
    pointwise.add_bias_silu_kernel[(triton.cdiv(count, SILU_BLOCK_SIZE),)](
        values, bias, count, CHANNELS=len(bias), BLOCK_SIZE=SILU_BLOCK_SIZE, num_warps=8
    )
    return values
