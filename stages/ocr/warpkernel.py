"""Triton kernels that warp.py starts: crops of text lines, images from planar to interleaved, and masks of text."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from stages.kernels.resize import bilinear_tap, round_half_even


@triton.jit(do_not_specialize=["out_height", "out_width", "count"])
def crop_lines_kernel(
    table_ptr,
    scales_ptr,
    out_ptr,
    count,
    out_height,
    out_width,
    WEIGHT_UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Crops of axis-aligned lines, resized as by cv2.resize (bilinear), in the same integer arithmetic.

    table: int64 [11, count], for each line: the address of its page, uint8 [height, width, 3]; the page's
        height and width, and its three strides; the line's left, top, width and height there; and 1 if the line
        is vertical and must be turned counterclockwise.
    scales: float64 [2, count], source pixels for one output pixel, horizontally and vertically, after the
        turn.
    out: uint8 [count, out_height, out_width, 3]. Grid: (blocks of BLOCK_M output pixels, count).
    """
    line = tl.program_id(1).to(tl.int64)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_h, offs_w = offs_m // out_width, offs_m % out_width
    table_ptr += line
    page_ptr = tl.load(table_ptr).to(tl.pointer_type(tl.uint8))
    height, width = tl.load(table_ptr + count).to(tl.int32), tl.load(table_ptr + 2 * count).to(tl.int32)
    row_step, column_step = tl.load(table_ptr + 3 * count), tl.load(table_ptr + 4 * count)
    channel_step = tl.load(table_ptr + 5 * count)
    left, top = tl.load(table_ptr + 6 * count).to(tl.int32), tl.load(table_ptr + 7 * count).to(tl.int32)
    line_width = tl.load(table_ptr + 8 * count).to(tl.int32)
    line_height = tl.load(table_ptr + 9 * count).to(tl.int32)
    is_vertical = tl.load(table_ptr + 10 * count) > 0
    source_width = tl.where(is_vertical, line_height, line_width)
    source_height = tl.where(is_vertical, line_width, line_height)
    left_tap, left_weight, right_weight = bilinear_tap(
        offs_w, source_width, tl.load(scales_ptr + line), WEIGHT_UNIT, True
    )
    upper_tap, upper_weight, lower_weight = bilinear_tap(
        offs_h, source_height, tl.load(scales_ptr + count + line), WEIGHT_UNIT, False
    )
    offs_c = tl.arange(0, 4)
    acc = tl.zeros([BLOCK_M, 4], dtype=tl.int32)
    for dy in tl.static_range(2):
        y = tl.minimum(tl.maximum(upper_tap + dy, 0), source_height - 1)
        row_acc = tl.zeros([BLOCK_M, 4], dtype=tl.int32)
        for dx in tl.static_range(2):
            x = tl.minimum(tl.maximum(left_tap + dx, 0), source_width - 1)
            page_x = left + tl.where(is_vertical, line_width - 1 - y, x)
            page_y = top + tl.where(is_vertical, x, y)
            clamped_x = tl.minimum(tl.maximum(page_x, 0), width - 1)
            clamped_y = tl.minimum(tl.maximum(page_y, 0), height - 1)
            starts = clamped_y * row_step + clamped_x * column_step
            ptrs = page_ptr + starts[:, None] + offs_c[None, :] * channel_step
            value = tl.load(ptrs, mask=(offs_c < 3)[None, :], other=0).to(tl.int32)
            weight = right_weight if dx else left_weight
            row_acc += value * weight[:, None]
        weight = lower_weight if dy else upper_weight
        acc += (row_acc >> 4) * weight[:, None] >> 16
    out_ptrs = out_ptr + (line * out_height * out_width + offs_m)[:, None] * 3 + offs_c[None, :]
    tl.store(
        out_ptrs,
        (acc + 2 >> 2).to(tl.uint8),
        mask=(offs_m < out_height * out_width)[:, None] & (offs_c < 3)[None, :],
    )


@triton.jit(do_not_specialize=["count"])
def warp_kernel(table_ptr, matrices_ptr, out_ptr, count, BLOCK_M: tl.constexpr):
    """Crops of quadrilaterals, as by cv2.warpPerspective (bicubic, border replicated).

    table: int64 [6, count], for each line: the address of its page, uint8 [height, width, 3]; the page's
        height and width; the crop's width and height; and the crop's first pixel in `out`.
    matrices: float64 [9, count], perspective transforms from the crop's pixels to the page's.
    out: uint8 [pixels of all crops, 3], one crop after the other.
    Grid: (blocks of BLOCK_M crop pixels, count).
    """
    line = tl.program_id(1).to(tl.int64)
    table_ptr += line
    matrices_ptr += line
    page_ptr = tl.load(table_ptr).to(tl.pointer_type(tl.uint8))
    height, width = tl.load(table_ptr + count).to(tl.int32), tl.load(table_ptr + 2 * count).to(tl.int32)
    crop_width = tl.load(table_ptr + 3 * count).to(tl.int32)
    crop_height = tl.load(table_ptr + 4 * count).to(tl.int32)
    if tl.program_id(0) * BLOCK_M >= crop_width * crop_height:
        return  # most blocks of small crops beside a large one
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    x, y = (offs_m % crop_width).to(tl.float64), (offs_m // crop_width).to(tl.float64)
    page_x = tl.load(matrices_ptr) * x + tl.load(matrices_ptr + count) * y + tl.load(matrices_ptr + 2 * count)
    page_y = (
        tl.load(matrices_ptr + 3 * count) * x
        + tl.load(matrices_ptr + 4 * count) * y
        + tl.load(matrices_ptr + 5 * count)
    )
    w = (
        tl.load(matrices_ptr + 6 * count) * x
        + tl.load(matrices_ptr + 7 * count) * y
        + tl.load(matrices_ptr + 8 * count)
    )
    offs_c = tl.arange(0, 4)
    values = sample_bicubic(page_ptr, height, width, page_x / w, page_y / w, offs_c)
    out_ptrs = out_ptr + (tl.load(table_ptr + 5 * count) + offs_m)[:, None] * 3 + offs_c[None, :]
    tl.store(
        out_ptrs,
        values.to(tl.uint8),
        mask=(offs_m < crop_width * crop_height)[:, None] & (offs_c < 3)[None, :],
    )


@triton.jit
def sample_bicubic(page_ptr, height, width, x, y, offs_c):
    """The page at fractional x, y [pixels]: bicubic (a = -0.75), edges replicated. Returns int32 [pixels, 4],
    0..255."""
    x, y = x.to(tl.float32), y.to(tl.float32)
    left, top = tl.floor(x), tl.floor(y)
    x -= left
    y -= top
    acc = tl.zeros([x.shape[0], 4], dtype=tl.float32)
    for dy in tl.static_range(4):
        row = tl.minimum(tl.maximum(top.to(tl.int32) + (dy - 1), 0), height - 1)
        row_acc = tl.zeros([x.shape[0], 4], dtype=tl.float32)
        for dx in tl.static_range(4):
            column = tl.minimum(tl.maximum(left.to(tl.int32) + (dx - 1), 0), width - 1)
            ptrs = page_ptr + (row * width + column)[:, None] * 3 + offs_c[None, :]
            value = tl.load(ptrs, mask=(offs_c < 3)[None, :], other=0).to(tl.float32)
            row_acc += value * cubic_weight(tl.abs(x - (dx - 1)))[:, None]
        acc += row_acc * cubic_weight(tl.abs(y - (dy - 1)))[:, None]
    return round_half_even(tl.minimum(tl.maximum(acc, 0.0), 255.0))


@triton.jit
def cubic_weight(distance):
    """Keys' cubic convolution kernel with a = -0.75, for distances 0..2."""
    near = (1.25 * distance - 2.25) * distance * distance + 1.0
    far = ((-0.75 * distance + 3.75) * distance - 6.0) * distance + 3.0
    return tl.where(distance <= 1.0, near, far)


@triton.jit(do_not_specialize=["area"])
def interleave_kernel(x_ptr, out_ptr, area, BLOCK_M: tl.constexpr):
    """out = x.permute(1, 2, 0). x: uint8 [3, area]. out: uint8 [area, 3]. Grid: (blocks of BLOCK_M pixels,)."""
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_c = tl.arange(0, 4)
    mask = (offs_m < area)[:, None] & (offs_c < 3)[None, :]
    values = tl.load(x_ptr + offs_c[None, :].to(tl.int64) * area + offs_m[:, None], mask=mask)
    tl.store(out_ptr + offs_m[:, None] * 3 + offs_c[None, :], values, mask=mask)


@triton.jit(do_not_specialize=["level", "height", "words"])
def pack_mask_kernel(x_ptr, out_ptr, level, height, width, words, BITS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Whether x is more than the level.

    x: [count, height, width]. out: int32 [count, height, words], a bit for each of BITS pixels, the first the lowest.
    Grid: (blocks of BLOCK_M words, count).
    """
    map_ = tl.program_id(1).to(tl.int64)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_b = tl.arange(0, BITS)
    row, column = (offs_m // words)[:, None], (offs_m % words)[:, None] * BITS + offs_b[None, :]
    inside = (row < height) & (column < width)
    value = tl.load(x_ptr + map_ * height * width + row * width + column, mask=inside, other=0).to(tl.float32)
    packed = tl.sum(((value > level) & inside).to(tl.int32) << offs_b[None, :], axis=1)
    tl.store(out_ptr + map_ * height * words + offs_m, packed, mask=offs_m < height * words)


@triton.jit(do_not_specialize=["height", "words"])
def mask_text_kernel(x_ptr, out_ptr, height, width, words, BITS: tl.constexpr, BLOCK_M: tl.constexpr):
    """A mask dilated by 2×2 pixels, then without what is alone in a window of 3×3 pixels, and with what is enclosed in a window
    of 2×2 or 3×3 filled.

    x, out: int32 [count, height, words], as from pack_mask_kernel.
    Grid: (blocks of BLOCK_M words, count).
    """
    map_ = tl.program_id(1).to(tl.int64)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row, word = offs_m // words, offs_m % words
    x_ptr += map_ * height * words
    every = tl.full([BLOCK_M], -1, dtype=tl.int64)
    left = width - word * BITS + BITS // 2  # columns of the map from the first bit on
    beyond = tl.where(left < 64, every << tl.minimum(left, 63).to(tl.int64), 0)
    above3 = dilated(x_ptr, row - 3, word, height, words) & ~beyond
    above2 = dilated(x_ptr, row - 2, word, height, words) & ~beyond
    above = dilated(x_ptr, row - 1, word, height, words) & ~beyond
    here = dilated(x_ptr, row, word, height, words) & ~beyond
    below = dilated(x_ptr, row + 1, word, height, words) & ~beyond
    below2 = dilated(x_ptr, row + 2, word, height, words) & ~beyond
    below3 = dilated(x_ptr, row + 3, word, height, words) & ~beyond
    # What is outside the map is no center of a window.
    outside = beyond | tl.where(word > 0, 0, (1 << (BITS // 2)) - 1)
    kept = is_beside(above3, above2, above, here, below) | outside | tl.where(row > 0, 0, every)
    middle = is_beside(above2, above, here, below, below2) | outside
    lower = is_beside(above, here, below, below2, below3) | outside | tl.where(row < height - 1, 0, every)
    kept = spread(kept) & spread(middle) & spread(lower)
    enclosed = is_fenced3(above3, above2, above, here, below) | is_fenced3(above2, above, here, below, below2)
    enclosed |= is_fenced3(above, here, below, below2, below3)
    small = is_fenced2(above2, above, here, below) | is_fenced2(above, here, below, below2)
    filled = enclosed | (enclosed << 1) | (enclosed >> 1) | small | (small << 1)
    packed = (((here & kept) | filled) >> (BITS // 2)).to(tl.int32)
    tl.store(out_ptr + map_ * height * words + offs_m, packed, mask=offs_m < height * words)


@triton.jit
def dilated(x_ptr, row, word, height, words):
    """The pixels of a row, or their neighbors to the left or above, as `with_sides` says; nothing outside the map."""
    x = with_sides(x_ptr, row, word, height, words) | with_sides(x_ptr, row - 1, word, height, words)
    return tl.where((row >= 0) & (row < height), x | (x << 1), 0)


@triton.jit
def with_sides(x_ptr, row, word, height, words):
    """Words of 32 pixels, with the 16 pixels before and after each: int64. Outside the map there are zeros."""
    inside = (row >= 0) & (row < height)
    x_ptr += row * words + word
    before = tl.load(x_ptr - 1, mask=inside & (word > 0), other=0).to(tl.int64) & 0xFFFFFFFF
    here = tl.load(x_ptr, mask=inside, other=0).to(tl.int64) & 0xFFFFFFFF
    after = tl.load(x_ptr + 1, mask=inside & (word < words - 1), other=0).to(tl.int64)
    return (after << 48) | (here << 16) | (before >> 16)


@triton.jit
def is_beside(above2, above, here, below, below2):
    """Whether there is something in the ring of 5×5 pixels around each window of 3×3."""
    ends, sides = above2 | below2, above | here | below
    ends |= (ends << 1) | (ends >> 1)
    return ends | (ends << 1) | (ends >> 1) | (sides << 2) | (sides >> 2)


@triton.jit
def is_fenced3(above2, above, here, below, below2):
    """Whether all beside each window of 3×3 pixels is set, but for what is at its corners."""
    ends, sides = above2 & below2, above & here & below
    return ends & (ends << 1) & (ends >> 1) & (sides << 2) & (sides >> 2)


@triton.jit
def is_fenced2(above, upper, lower, below):
    """The same for windows of 2×2 pixels, of which the first pixel is meant."""
    ends, sides = above & below, upper & lower
    return ends & (ends >> 1) & (sides << 1) & (sides >> 2)


@triton.jit
def spread(x):
    """Whether a pixel and both beside it are set."""
    return x & (x << 1) & (x >> 1)
