"""Triton kernels for convolutions and what surrounds them. launch.py starts them.

Feature maps are contiguous float16 [N, H, W, C] (channels last); sums are accumulated in float32. A program
computes a tile of BLOCK_H × BLOCK_W pixels of one image, or, where neighbors do not matter, BLOCK_M pixels in
row-major order.
widths_ptr: None, or int [N], how many columns of the input belong to each image; columns to the right of them
    count as zero.
Each kernel is compiled once for maps of all sizes: `do_not_specialize` stops Triton from compiling it again
for every mix of sizes that are and are not multiples of 16.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_offsets(pid, width, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr):
    """The row and the column of each pixel of tile `pid`: two int32 [BLOCK_H · BLOCK_W]. Tiles are numbered
    row by row. In a square tile most neighbors of a pixel are in the tile too, so most reads hit the L1
    cache."""
    offs = tl.arange(0, BLOCK_H * BLOCK_W)
    tiles_w = tl.cdiv(width, BLOCK_W)
    return pid // tiles_w * BLOCK_H + offs // BLOCK_W, pid % tiles_w * BLOCK_W + offs % BLOCK_W


@triton.jit
def load_width(widths_ptr, image, width):
    """How many columns of the map belong to an image: widths[image], or the map's width."""
    valid_width = width
    if widths_ptr is not None:
        valid_width = tl.load(widths_ptr + image).to(tl.int32)
    return valid_width


@triton.jit(do_not_specialize=["in_height", "in_width", "out_height", "out_width"])
def conv2d_kernel(
    x_ptr, weight_ptr, bias_ptr, pool_ptr, out_ptr, sums_ptr, widths_ptr,
    in_height, in_width, out_height, out_width,
    IN_CHANNELS: tl.constexpr, OUT_CHANNELS: tl.constexpr,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_TOP: tl.constexpr, PAD_LEFT: tl.constexpr,
    RELU: tl.constexpr, UINT8: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """conv2d with bias, optional ReLU, optional max pooling of a second map, and optional sums.

    x: float16 or uint8 [N, in_height, in_width, IN_CHANNELS]; uint8 is scaled to 2·x/255 - 1 (UINT8).
    weight: float16 [KERNEL_H · KERNEL_W · IN_CHANNELS, BLOCK_C], bias: float32 [BLOCK_C], both padded with
        zeros.
    out: float16 [N, out_height, out_width, OUT_CHANNELS] = relu(F.conv2d(x, weight, bias, stride)).
    pool: None, or a float16 map of out's shape, values ≥ 0; then out = cat([F.max_pool2d(pool, 2, stride=1),
        relu(…)], dim=-1). One program writes both halves of a pixel's channels, because writes of half a
        pixel are slow.
    sums: None, or float32 [N, tiles, OUT_CHANNELS], the sum of each tile's outputs.
    Grid: (tiles, N).
    """
    pid, image = tl.program_id(0), tl.program_id(1).to(tl.int64)
    offs_h, offs_w = tile_offsets(pid, out_width, BLOCK_H, BLOCK_W)
    pixel_mask = (offs_h < out_height) & (offs_w < out_width)
    valid_width = load_width(widths_ptr, image, in_width)
    offs_c = tl.arange(0, BLOCK_C)
    K: tl.constexpr = KERNEL_H * KERNEL_W * IN_CHANNELS
    image_ptr = x_ptr + image * in_height * in_width * IN_CHANNELS
    acc = tl.zeros([BLOCK_H * BLOCK_W, BLOCK_C], dtype=tl.float32)
    for start_k in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        offs_k = start_k + tl.arange(0, BLOCK_K)
        in_h = offs_h[:, None] * STRIDE_H - PAD_TOP + (offs_k // IN_CHANNELS // KERNEL_W)[None, :]
        in_w = offs_w[:, None] * STRIDE_W - PAD_LEFT + (offs_k // IN_CHANNELS % KERNEL_W)[None, :]
        inside = (in_h >= 0) & (in_h < in_height) & (in_w >= 0) & (in_w < valid_width)
        x_mask = pixel_mask[:, None] & (offs_k < K)[None, :] & inside
        x_ptrs = image_ptr + (in_h * in_width + in_w) * IN_CHANNELS + (offs_k % IN_CHANNELS)[None, :]
        x = tl.load(x_ptrs, mask=x_mask, other=0)
        if UINT8:
            x = tl.where(x_mask, x.to(tl.float32) * (2 / 255) - 1, 0.0)
        acc = tl.dot(x.to(tl.float16), tl.load(weight_ptr + offs_k[:, None] * BLOCK_C + offs_c[None, :]), acc)
    acc += tl.load(bias_ptr + offs_c)[None, :]
    if RELU:
        acc = tl.maximum(acc, 0.0)
    c_mask, out_mask = offs_c < OUT_CHANNELS, pixel_mask[:, None] & (offs_c < OUT_CHANNELS)[None, :]
    TOTAL_CHANNELS: tl.constexpr = OUT_CHANNELS if pool_ptr is None else 2 * OUT_CHANNELS
    out_ptrs = (
        out_ptr
        + image * out_height * out_width * TOTAL_CHANNELS
        + (offs_h * out_width + offs_w)[:, None] * TOTAL_CHANNELS
        + offs_c[None, :]
    )
    tl.store(out_ptrs + (TOTAL_CHANNELS - OUT_CHANNELS), acc.to(tl.float16), mask=out_mask)
    if pool_ptr is not None:
        pool_ptr += image * out_height * out_width * OUT_CHANNELS
        tl.store(
            out_ptrs,
            max_pool_2x2(
                pool_ptr, offs_h, offs_w, out_height, out_width, valid_width, offs_c, c_mask, OUT_CHANNELS
            ),
            mask=out_mask,
        )
    if sums_ptr is not None:
        sums_ptr += (image * tl.num_programs(0) + pid) * OUT_CHANNELS
        tl.store(sums_ptr + offs_c, tl.sum(tl.where(out_mask, acc, 0.0), axis=0), mask=c_mask)


@triton.jit
def max_pool_2x2(x_ptr, offs_h, offs_w, height, width, valid_width, offs_c, c_mask, CHANNELS: tl.constexpr):
    """F.max_pool2d(x, 2, stride=1) at the given pixels, with zeros beyond the right and bottom edges;
    x must not be negative.

    x: float16 [height, width, CHANNELS]. Returns float16 [pixels, channels].
    """
    maximum = tl.zeros([offs_h.shape[0], offs_c.shape[0]], dtype=tl.float16)
    for dh in tl.static_range(2):
        for dw in tl.static_range(2):
            mask = (offs_h + dh < height) & (offs_w + dw < valid_width) & (offs_w + dw < width)
            ptrs = x_ptr + ((offs_h + dh) * width + offs_w + dw)[:, None] * CHANNELS + offs_c[None, :]
            maximum = tl.maximum(maximum, tl.load(ptrs, mask=mask[:, None] & c_mask[None, :], other=0.0))
    return maximum


@triton.jit(do_not_specialize=["in_height", "in_width", "out_height", "out_width"])
def depthwise_conv2d_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, sums_ptr, widths_ptr,
    in_height, in_width, out_height, out_width,
    CHANNELS: tl.constexpr,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_TOP: tl.constexpr, PAD_LEFT: tl.constexpr,
    BLOCK_H: tl.constexpr, NUM_RUNS: tl.constexpr, RUN_LENGTH: tl.constexpr, UNROLL: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Depthwise conv2d with bias, and optional sums.

    x: float16 [N, in_height, in_width, CHANNELS].
    weight: float32 [KERNEL_H · KERNEL_W, CHANNELS].
    bias: float32 [CHANNELS].
    out: float16 [N, out_height, out_width, CHANNELS] = F.conv2d(x, weight, bias, stride, groups=CHANNELS).
    sums: None, or float32 [N, tiles, CHANNELS], the sum of each tile's outputs within the image's width.

    One program: BLOCK_C channels of a tile of BLOCK_H rows, each with NUM_RUNS runs of RUN_LENGTH adjacent
    pixels. The pixels of a run share their loads: their accumulators are in registers, and each value that is
    loaded is added to every pixel whose window it is in.
    Grid: (tiles, blocks of channels, N).
    """
    pid, image = tl.program_id(0), tl.program_id(2).to(tl.int64)
    offs_h, offs_run = tile_offsets(pid, tl.cdiv(out_width, RUN_LENGTH), BLOCK_H, NUM_RUNS)
    offs_w = offs_run * RUN_LENGTH
    valid_width = load_width(widths_ptr, image, in_width)
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    c_mask = offs_c < CHANNELS
    image_ptr = x_ptr + image * in_height * in_width * CHANNELS + offs_c[None, :]
    in_w = offs_w * STRIDE_W - PAD_LEFT
    acc = (
        tl.zeros([BLOCK_H * NUM_RUNS, BLOCK_C], dtype=tl.float32)
        + tl.load(bias_ptr + offs_c, mask=c_mask, other=0.0)[None, :]
    )
    accs = (acc,) * RUN_LENGTH
    for kh in tl.range(0, KERNEL_H, loop_unroll_factor=UNROLL):
        in_h = offs_h * STRIDE_H - PAD_TOP + kh
        row_mask = (offs_h < out_height) & (in_h >= 0) & (in_h < in_height)
        row_ptrs = image_ptr + (in_h * in_width + in_w)[:, None] * CHANNELS
        weights = ()
        for kw in tl.static_range(KERNEL_W):
            weight_ptrs = weight_ptr + (kh * KERNEL_W + kw) * CHANNELS + offs_c
            weights += (tl.load(weight_ptrs, mask=c_mask, other=0.0)[None, :],)
        for dw in tl.static_range((RUN_LENGTH - 1) * STRIDE_W + KERNEL_W):
            x_mask = (row_mask & (in_w + dw >= 0) & (in_w + dw < valid_width))[:, None] & c_mask[None, :]
            x = tl.load(row_ptrs + dw * CHANNELS, mask=x_mask, other=0.0).to(tl.float32)
            accs = accumulate_run(accs, x, weights, dw, KERNEL_W, STRIDE_W, RUN_LENGTH)
    out_ptrs = (
        out_ptr
        + image * out_height * out_width * CHANNELS
        + (offs_h * out_width + offs_w)[:, None] * CHANNELS
        + offs_c[None, :]
    )
    tile_sum = tl.zeros([BLOCK_H * NUM_RUNS, BLOCK_C], dtype=tl.float32)
    for i in tl.static_range(RUN_LENGTH):
        pixel_mask = (offs_h < out_height) & (offs_w + i < out_width)
        tl.store(out_ptrs + i * CHANNELS, accs[i].to(tl.float16), mask=pixel_mask[:, None] & c_mask[None, :])
        if sums_ptr is not None:
            if widths_ptr is not None:
                pixel_mask = pixel_mask & (offs_w + i < valid_width)
            tile_sum += tl.where(pixel_mask[:, None], accs[i], 0.0)
    if sums_ptr is not None:
        tl.store(
            sums_ptr + (image * tl.num_programs(0) + pid) * CHANNELS + offs_c,
            tl.sum(tile_sum, axis=0),
            mask=c_mask,
        )


@triton.jit
def accumulate_run(
    accs,
    x,
    weights,
    dw: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_W: tl.constexpr,
    RUN_LENGTH: tl.constexpr,
):
    """Add input column `dw` to the accumulators of a run: accs[i]
    += x · weights[dw - i · STRIDE_W] where that index exists.

    dw: counted from the first column that the run reads.
    """
    updated = ()
    for i in tl.static_range(RUN_LENGTH):
        if dw >= i * STRIDE_W and dw < i * STRIDE_W + KERNEL_W:
            updated += (accs[i] + x * weights[dw - i * STRIDE_W],)
        else:
            updated += (accs[i],)
    return updated


@triton.jit(do_not_specialize=["height", "width"])
def upsample_add_kernel(
    x_ptr,
    gates_ptr,
    coarse_ptr,
    out_ptr,
    height,
    width,
    CHANNELS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """out = x · gates + F.interpolate(coarse, scale_factor=2), with the nearest pixel repeated.

    x, out: float16 [N, height, width, CHANNELS]. gates: float32 [N, CHANNELS]. coarse: None, or float16
    [N, height / 2, width / 2, CHANNELS]. Grid: (blocks of BLOCK_M pixels, N).
    """
    image = tl.program_id(1).to(tl.int64)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_h, offs_w = offs_m // width, offs_m % width
    offs_c = tl.arange(0, BLOCK_C)
    mask = (offs_m < height * width)[:, None] & (offs_c < CHANNELS)[None, :]
    offs, base = offs_m[:, None] * CHANNELS + offs_c[None, :], image * height * width * CHANNELS
    x = tl.load(x_ptr + base + offs, mask=mask, other=0.0).to(tl.float32)
    x *= tl.load(gates_ptr + image * CHANNELS + offs_c, mask=offs_c < CHANNELS, other=0.0)[None, :]
    if coarse_ptr is not None:
        coarse_ptr += image * (height // 2) * (width // 2) * CHANNELS
        coarse_m = offs_h // 2 * (width // 2) + offs_w // 2
        x += tl.load(coarse_ptr + coarse_m[:, None] * CHANNELS + offs_c[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
    tl.store(out_ptr + base + offs, x.to(tl.float16), mask=mask)


@triton.jit(do_not_specialize=["height", "width"])
def upsample_concat_kernel(
    eighth_ptr,
    eighth_gates_ptr,
    quarter_ptr,
    quarter_gates_ptr,
    half_ptr,
    half_gates_ptr,
    whole_ptr,
    whole_gates_ptr,
    out_ptr,
    height,
    width,
    CHANNELS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """out = cat([F.interpolate(x · gates, scale_factor=8 / 2**i) for i, (x, gates) in enumerate(inputs)],
    dim=-1).

    The inputs are float16 maps of 1/8, 1/4, 1/2 and all of the output's height and width with CHANNELS
    channels, and their gates, float32 [N, CHANNELS]. out: float16 [N, height, width, 4 · CHANNELS]. One
    program writes all channels of a pixel, because writing a part of a cache line costs as much as all of it.
    Grid: (blocks of BLOCK_M pixels, N).
    """
    image = tl.program_id(1).to(tl.int64)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_h, offs_w = offs_m // width, offs_m % width
    offs_c = tl.arange(0, BLOCK_C)
    c_mask = offs_c < CHANNELS
    mask = (offs_m < height * width)[:, None] & c_mask[None, :]
    for i in tl.static_range(4):
        x_ptr, gates_ptr = eighth_ptr, eighth_gates_ptr
        if i == 1:
            x_ptr, gates_ptr = quarter_ptr, quarter_gates_ptr
        if i == 2:
            x_ptr, gates_ptr = half_ptr, half_gates_ptr
        if i == 3:
            x_ptr, gates_ptr = whole_ptr, whole_gates_ptr
        x_ptr += image * (height >> 3 - i) * (width >> 3 - i) * CHANNELS
        source_m = (offs_h >> 3 - i) * (width >> 3 - i) + (offs_w >> 3 - i)
        x = tl.load(x_ptr + source_m[:, None] * CHANNELS + offs_c[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        x *= tl.load(gates_ptr + image * CHANNELS + offs_c, mask=c_mask, other=0.0)[None, :]
        out_ptrs = (
            out_ptr
            + image * height * width * 4 * CHANNELS
            + (offs_m[:, None] * 4 + i) * CHANNELS
            + offs_c[None, :]
        )
        tl.store(out_ptrs, x.to(tl.float16), mask=mask)


@triton.jit(do_not_specialize=["height", "width"])
def deconv_head_kernel(
    x_ptr,
    w1_ptr,
    b1_ptr,
    w2_ptr,
    out_ptr,
    height,
    width,
    B2: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Two transposed 2×2 convolutions of stride 2: sigmoid(conv_transpose2d(relu(conv_transpose2d(x, w1,
    b1)), w2, B2)).

    x: float16 [N, height, width, CHANNELS].
    w1: float16 [4, BLOCK_C, BLOCK_C], b1: float32 [BLOCK_C], w2: float32 [4, BLOCK_C], all padded with zeros;
        the first dimension is the position in the 2×2 window.
    out: uint8 [N, 4 · height, 4 · width], probability · 255 rounded; written as int32 words [N, 4 · height,
        width].
    Grid: (blocks of BLOCK_M pixels, N).
    """
    image = tl.program_id(1).to(tl.int64)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    pixel_mask = offs_m < height * width
    offs_h, offs_w = offs_m // width, offs_m % width
    offs_c = tl.arange(0, BLOCK_C)
    mask = pixel_mask[:, None] & (offs_c < CHANNELS)[None, :]
    x_ptr += image * height * width * CHANNELS
    x = tl.load(x_ptr + offs_m[:, None] * CHANNELS + offs_c[None, :], mask=mask, other=0.0)
    w1_offs = offs_c[:, None] * BLOCK_C + offs_c[None, :]
    for dh in tl.static_range(2):  # two rows of the output; a row of four bytes is one word
        upper, lower = tl.zeros([BLOCK_M], dtype=tl.int32), tl.zeros([BLOCK_M], dtype=tl.int32)
        for dw in tl.static_range(2):
            w1 = tl.load(w1_ptr + (2 * dh + dw) * BLOCK_C * BLOCK_C + w1_offs)
            hidden = tl.maximum(tl.dot(x, w1) + tl.load(b1_ptr + offs_c)[None, :], 0.0)
            for i in tl.static_range(4):
                logit = tl.sum(hidden * tl.load(w2_ptr + i * BLOCK_C + offs_c)[None, :], axis=1) + B2
                byte = (tl.sigmoid(logit) * 255 + 0.5).to(tl.int32) << 8 * (2 * dw + i % 2)
                if i < 2:
                    upper |= byte
                else:
                    lower |= byte
        out_ptrs = out_ptr + image * 4 * height * width + (offs_h * 4 + 2 * dh) * width + offs_w
        tl.store(out_ptrs, upper, mask=pixel_mask)
        tl.store(out_ptrs + width, lower, mask=pixel_mask)
