"""Triton kernels that images.py, letterbox.py and resize.py start: turning planar uint8 images, and from these to a network's
input.

The images of a batch may have any addresses and sizes; no kernel is compiled again for those.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["height", "width"])
def turn_kernel(
    pixels_ptr,
    out_ptr,
    height,
    width,
    IS_TRANSPOSED: tl.constexpr,
    FLIP_H: tl.constexpr,
    FLIP_W: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """An image transposed, and then mirrored.

    pixels: uint8 [3, height, width], or [3, width, height] if it is to be transposed. out: uint8 [3, height, width].
    Grid: (tiles of BLOCK_W columns of the output, tiles of BLOCK_H rows, 3).
    """
    plane = tl.program_id(2).to(tl.int64) * height * width
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    offs_w = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)[None, :]
    mask = (offs_h < height) & (offs_w < width)
    y = height - 1 - offs_h if FLIP_H else offs_h
    x = width - 1 - offs_w if FLIP_W else offs_w
    source = x * height + y if IS_TRANSPOSED else y * width + x
    value = tl.load(pixels_ptr + plane + source, mask=mask)
    tl.store(out_ptr + plane + offs_h * width + offs_w, value, mask=mask)


@triton.jit(do_not_specialize=["count", "height", "width"])
def letterbox_kernel(
    table_ptr,
    scales_ptr,
    out_ptr,
    count,
    height,
    width,
    WEIGHT_UNIT: tl.constexpr,
    PADDING: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Images resized as by cv2.resize (bilinear, in the same integer arithmetic) onto gray canvases, divided
    by 255.

    table: int64 [7, count], for each image: the address of its uint8 [3, in_height, in_width], that height
        and width, and the top, left, height and width of its place on the canvas.
    scales: float64 [2, count], source pixels for one output pixel, horizontally and vertically.
    out: [count, 3, height, width] of any float dtype, the channels last in memory; PADDING / 255 outside the
        image's place.
    Grid: (tiles of BLOCK_H × BLOCK_W output pixels, count).
    """
    image = tl.program_id(1).to(tl.int64)
    table_ptr += image
    in_height, in_width = tl.load(table_ptr + count).to(tl.int32), tl.load(table_ptr + 2 * count).to(tl.int32)
    tiles_w = tl.cdiv(width, BLOCK_W)
    offs_h = tl.program_id(0) // tiles_w * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_w = tl.program_id(0) % tiles_w * BLOCK_W + tl.arange(0, BLOCK_W)
    y = offs_h - tl.load(table_ptr + 3 * count).to(tl.int32)
    x = offs_w - tl.load(table_ptr + 4 * count).to(tl.int32)
    row_mask = (y >= 0) & (y < tl.load(table_ptr + 5 * count).to(tl.int32))
    column_mask = (x >= 0) & (x < tl.load(table_ptr + 6 * count).to(tl.int32))
    left, left_weight, right_weight = bilinear_tap(
        x, in_width, tl.load(scales_ptr + image), WEIGHT_UNIT, True
    )
    top, upper_weight, lower_weight = bilinear_tap(
        y, in_height, tl.load(scales_ptr + count + image), WEIGHT_UNIT, False
    )
    right = tl.minimum(tl.maximum(left + 1, 0), in_width - 1)
    bottom = tl.minimum(tl.maximum(top + 1, 0), in_height - 1)
    left, top = tl.minimum(tl.maximum(left, 0), in_width - 1), tl.minimum(tl.maximum(top, 0), in_height - 1)
    plane_ptr = tl.load(table_ptr).to(tl.pointer_type(tl.uint8))
    area = in_height.to(tl.int64) * in_width
    out_ptrs = out_ptr + (image * height + offs_h[:, None]) * width * 3 + offs_w[None, :] * 3
    mask = (offs_h < height)[:, None] & (offs_w < width)[None, :]
    for channel in tl.static_range(3):
        upper = blend_columns(plane_ptr + top.to(tl.int64) * in_width, left, right, left_weight, right_weight)
        lower = blend_columns(
            plane_ptr + bottom.to(tl.int64) * in_width, left, right, left_weight, right_weight
        )
        blended = ((upper >> 4) * upper_weight[:, None] >> 16) + ((lower >> 4) * lower_weight[:, None] >> 16)
        value = tl.where(row_mask[:, None] & column_mask[None, :], blended + 2 >> 2, PADDING).to(tl.float32)
        # As torch does on a GPU: it multiplies by the reciprocal, rounded to float32.
        tl.store(out_ptrs + channel, (value * (1 / 255)).to(out_ptr.dtype.element_ty), mask=mask)
        plane_ptr += area


@triton.jit
def blend_columns(row_ptrs, left, right, left_weight, right_weight):
    """x[row, left] · left_weight + x[row, right] · right_weight, int32 [rows,
    columns]: WEIGHT_UNIT times the pixel value.

    row_ptrs: the addresses of the rows.
    """
    left_part = tl.load(row_ptrs[:, None] + left[None, :]).to(tl.int32) * left_weight[None, :]
    return left_part + tl.load(row_ptrs[:, None] + right[None, :]).to(tl.int32) * right_weight[None, :]


@triton.jit(do_not_specialize=["count", "out_width"])
def resize_width_kernel(
    table_ptr,
    out_ptr,
    count,
    out_width,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
):
    """The first of the resize's two passes: the crop of each image that is in use, resized horizontally.

    table: int64 [11, count], for each image: the address of its crop, the bytes from plane to plane and from
        row to row, its number of rows, and its first row in `out`; then of its horizontal and its vertical
        resize.Axis the table's address, taps and shift.
    out: uint8 [rows of all images, out_width], one plane after the other.
    out[y, x] = clamp((sum of x[y, first[x] + tap] · weight[tap, x] + half) >> shift, 0, 255).

    Each tensor is one row of outputs, so that adjacent threads read adjacent bytes. For a tensor of two
    dimensions of which neither is contiguous, as here, Triton may choose either.
    Grid: (tiles of BLOCK_H × BLOCK_W for the tallest image, 3 · count).
    """
    image, channel = tl.program_id(1) // 3, (tl.program_id(1) % 3).to(tl.int64)
    table_ptr += image
    in_height, tiles_w = tl.load(table_ptr + 3 * count).to(tl.int32), tl.cdiv(out_width, BLOCK_W)
    start_h = tl.program_id(0) // tiles_w * BLOCK_H
    if start_h >= in_height:  # other images of the batch are taller
        return
    row_stride = tl.load(table_ptr + 2 * count)
    axis_ptr = tl.load(table_ptr + 5 * count).to(tl.pointer_type(tl.int32))
    taps, shift = tl.load(table_ptr + 6 * count).to(tl.int32), tl.load(table_ptr + 7 * count).to(tl.int32)
    offs_w = tl.program_id(0) % tiles_w * BLOCK_W + tl.arange(0, BLOCK_W)
    mask = offs_w < out_width
    image_ptr = (
        tl.load(table_ptr).to(tl.pointer_type(tl.uint8))
        + channel * tl.load(table_ptr + count)
        + start_h * row_stride
    )
    first = tl.load(axis_ptr + offs_w, mask=mask, other=0)
    weight_ptrs = axis_ptr + out_width + offs_w
    accs = (tl.zeros([BLOCK_W], dtype=tl.int32) + (1 << shift - 1),) * BLOCK_H
    for start_tap in range(0, taps, BLOCK_TAPS):
        for tap in tl.static_range(BLOCK_TAPS):
            weight = tl.load(weight_ptrs + tap * out_width, mask=mask, other=0)
            new_accs = ()
            for row in tl.static_range(BLOCK_H):
                # 32 bits are enough within a program, and cost half the arithmetic of 64.
                row_start = tl.minimum(row, in_height - 1 - start_h) * row_stride.to(tl.int32)
                pixel = tl.load(image_ptr + (first + (row_start + start_tap + tap))).to(tl.int32)
                new_accs += (accs[row] + pixel * weight,)
            accs = new_accs
        weight_ptrs += BLOCK_TAPS * out_width
    out_ptrs = out_ptr + (tl.load(table_ptr + 4 * count) + channel * in_height + start_h) * out_width + offs_w
    rows_left = tl.where(mask, in_height - start_h, 0)
    for row in tl.static_range(BLOCK_H):
        values = tl.minimum(tl.maximum(accs[row] >> shift, 0), 255).to(tl.uint8)
        tl.store(out_ptrs + row * out_width, values, mask=row < rows_left)


@triton.jit(do_not_specialize=["count"])
def resize_height_kernel(
    table_ptr,
    x_ptr,
    mean_ptr,
    std_ptr,
    out_ptr,
    count,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
):
    """The second pass: resize_width_kernel's output resized vertically, and normalized: (value - mean) / std.

    table: as there. x: its output. mean, std: float32 [3]. out: [count, 3, HEIGHT, WIDTH] of any float dtype.
    Grid: (tiles of BLOCK_H × BLOCK_W, 3 · count).
    """
    values, offs, mask = resize_rows(table_ptr, x_ptr, count, HEIGHT, WIDTH, BLOCK_H, BLOCK_W, BLOCK_TAPS)
    channel = tl.program_id(1) % 3
    normalized = tl.div_rn(values.to(tl.float32) - tl.load(mean_ptr + channel), tl.load(std_ptr + channel))
    tl.store(out_ptr + offs, normalized.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count", "height", "width"])
def resize_height_to_bytes_kernel(
    table_ptr,
    x_ptr,
    out_ptr,
    count,
    height,
    width,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
):
    """As resize_height_kernel, to bytes as they are, of any size. out: uint8 [count, 3, height, width]."""
    values, offs, mask = resize_rows(table_ptr, x_ptr, count, height, width, BLOCK_H, BLOCK_W, BLOCK_TAPS)
    tl.store(out_ptr + offs, values.to(tl.uint8), mask=mask)


@triton.jit
def resize_rows(
    table_ptr,
    x_ptr,
    count,
    height,
    width,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
):
    """This program's tile of resize_width_kernel's output resized vertically: int32 values from 0 to 255, their offsets
    in an output [count, 3, height, width], and a mask, each [BLOCK_H, BLOCK_W]. height, width: may be constants."""
    image, channel = tl.program_id(1) // 3, tl.program_id(1) % 3
    table_ptr += image
    axis_ptr = tl.load(table_ptr + 8 * count).to(tl.pointer_type(tl.int32))
    taps, shift = tl.load(table_ptr + 9 * count).to(tl.int32), tl.load(table_ptr + 10 * count).to(tl.int32)
    tiles_w = tl.cdiv(width, BLOCK_W)
    offs_h = tl.program_id(0) // tiles_w * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_w = tl.program_id(0) % tiles_w * BLOCK_W + tl.arange(0, BLOCK_W)
    clamped_h, mask = tl.minimum(offs_h, height - 1), (offs_w < width)[None, :]
    first_row = (
        tl.load(table_ptr + 4 * count)
        + channel * tl.load(table_ptr + 3 * count)
        + tl.load(axis_ptr + clamped_h)
    )
    ptrs = x_ptr + first_row[:, None] * width + offs_w[None, :]
    weight_ptrs = axis_ptr + height + clamped_h
    acc = tl.zeros([BLOCK_H, BLOCK_W], dtype=tl.int32) + (1 << shift - 1)
    for _ in range(0, taps, BLOCK_TAPS):
        for tap in tl.static_range(BLOCK_TAPS):
            weight = tl.load(weight_ptrs + tap * height)
            acc += tl.load(ptrs + tap * width, mask=mask, other=0).to(tl.int32) * weight[:, None]
        ptrs += BLOCK_TAPS * width
        weight_ptrs += BLOCK_TAPS * height
    values = tl.minimum(tl.maximum(acc >> shift, 0), 255)
    offs = (tl.program_id(1).to(tl.int64) * height + offs_h)[:, None] * width + offs_w[None, :]
    return values, offs, (offs_h < height)[:, None] & mask


@triton.jit
def bilinear_tap(index, source_size, scale, WEIGHT_UNIT: tl.constexpr, CLAMP: tl.constexpr):
    """The first of the two inputs that a bilinear resize blends for an output, and both int32 weights;
    see warp.py."""
    position = ((index.to(tl.float64) + 0.5) * scale - 0.5).to(tl.float32)
    first = tl.floor(position)
    fraction = position - first
    if CLAMP:
        fraction = tl.where((first < 0) | (first >= source_size - 1), 0.0, fraction)
    # Ties are rounded to even, as torch and cv2 do.
    return (
        first.to(tl.int32),
        round_half_even((1.0 - fraction) * WEIGHT_UNIT),
        round_half_even(fraction * WEIGHT_UNIT),
    )


@triton.jit
def round_half_even(value):
    """round(value) as int32, for 0 ≤ value < 2²²: a float32 from 2²³ on has no fraction."""
    return (value + 8388608.0 - 8388608.0).to(tl.int32)
