"""Device code: the crop of lines of text, as one kernel that warp.py starts."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "columns", "count"])
def cut_kernel(
    pages,
    sizes,
    owners,
    table,
    out,
    count,
    rows,
    columns,
    TALL: tl.constexpr,
    UNIT: tl.constexpr,
    PIXELS: tl.constexpr,
):
    """Upright lines from pages that lie anywhere: cv2's perspective crop, bicubic, then its bilinear resize, in bytes.

    pages: addresses of uint8 [height, width, 3]. sizes: int32 [pages, 2]. owners: int32 [N], each line's page.
    table: float64 [14, N]; a line's width and height, by what its upright self is shrunk across and down, the nine numbers of
    its perspective, and 1 where that only moves its pixels.
    """
    line = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    row, column = place // columns, place % columns
    table += line
    wide, tall = tl.load(table), tl.load(table + count)
    turned = tall >= TALL * wide
    across, down = tl.where(turned, tall, wide), tl.where(turned, wide, tall)  # of the line once it is upright
    left, left_weight, right_weight = find_tap(column, across, tl.load(table + 2 * count), UNIT, True)
    upper, upper_weight, lower_weight = find_tap(row, down, tl.load(table + 3 * count), UNIT, False)
    owner = tl.load(owners + line)
    page = tl.load(pages + owner).to(tl.pointer_type(tl.uint8))
    height, width = tl.load(sizes + 2 * owner), tl.load(sizes + 2 * owner + 1)
    is_upright = tl.load(table + 13 * count) > 0
    channel = tl.arange(0, 4)
    levels = tl.zeros([PIXELS, 4], dtype=tl.int32)
    for below in tl.static_range(2):
        y = tl.minimum(tl.maximum(upper + below, 0), down.to(tl.int32) - 1)
        blended = tl.zeros([PIXELS, 4], dtype=tl.int32)
        for beside in tl.static_range(2):
            x = tl.minimum(tl.maximum(left + beside, 0), across.to(tl.int32) - 1)
            crop_x, crop_y = tl.where(turned, wide.to(tl.int32) - 1 - y, x), tl.where(turned, x, y)
            if is_upright:  # most lines are: one pixel in place of sixteen, and no arithmetic in float64
                level = sample_moved(page, height, width, table + 4 * count, count, crop_x, crop_y, channel)
            else:
                level = sample_warped(page, height, width, table + 4 * count, count, crop_x, crop_y, channel)
            weight = right_weight if beside else left_weight
            blended += level * weight[:, None]
        weight = lower_weight if below else upper_weight
        levels += (blended >> 4) * weight[:, None] >> 16
    target = out + (line * rows * columns + place)[:, None] * 3 + channel[None, :]
    tl.store(target, (levels + 2 >> 2).to(tl.uint8), mask=(place < rows * columns)[:, None] & (channel < 3)[None, :])


@triton.jit
def find_tap(output, source, scale, UNIT: tl.constexpr, CLAMP: tl.constexpr):
    """The first of the two inputs that an output of a bilinear resize blends, and both weights; see warp.find_taps."""
    position = ((output.to(tl.float64) + 0.5) * scale - 0.5).to(tl.float32)
    first = tl.floor(position)
    fraction = position - first
    if CLAMP:
        fraction = tl.where((first < 0) | (first >= source - 1), 0.0, fraction)
    # Ties are rounded to even, as torch and cv2 do.
    return first.to(tl.int32), round_half_even((1.0 - fraction) * UNIT), round_half_even(fraction * UNIT)


@triton.jit
def round_half_even(value):
    """Of 0 ≤ value < 2²²: float32 has no digits behind the point beyond 2²³."""
    return (value + 8388608.0 - 8388608.0).to(tl.int32)


@triton.jit
def sample_moved(page, height, width, numbers, count, x, y, channel):
    """The page's own pixels, where a perspective only moves them: levels [pixels, 4]."""
    column = x + (tl.load(numbers + 2 * count) + 0.5).to(tl.int32)
    row = y + (tl.load(numbers + 5 * count) + 0.5).to(tl.int32)
    column, row = tl.minimum(tl.maximum(column, 0), width - 1), tl.minimum(tl.maximum(row, 0), height - 1)
    source = page + (row * width + column)[:, None] * 3 + channel[None, :]
    return tl.load(source, mask=(channel < 3)[None, :], other=0).to(tl.int32)


@triton.jit
def sample_warped(page, height, width, numbers, count, x, y, channel):
    """The page where a perspective of nine numbers, `count` apart, takes pixels of the crop: levels [pixels, 4]."""
    x, y = x.to(tl.float64), y.to(tl.float64)
    across = tl.load(numbers) * x + tl.load(numbers + count) * y + tl.load(numbers + 2 * count)
    down = tl.load(numbers + 3 * count) * x + tl.load(numbers + 4 * count) * y + tl.load(numbers + 5 * count)
    depth = tl.load(numbers + 6 * count) * x + tl.load(numbers + 7 * count) * y + tl.load(numbers + 8 * count)
    return sample_bicubic(page, height, width, across / depth, down / depth, channel)


@triton.jit
def sample_bicubic(page, height, width, x, y, channel):
    """The page between its pixels, bicubic (a = -0.75), its edge repeated without end: levels [pixels, 4]."""
    x, y = x.to(tl.float32), y.to(tl.float32)
    left, top = tl.floor(x), tl.floor(y)
    x -= left
    y -= top
    total = tl.zeros([x.shape[0], 4], dtype=tl.float32)
    for down in tl.static_range(4):
        row = tl.minimum(tl.maximum(top.to(tl.int32) + (down - 1), 0), height - 1)
        part = tl.zeros([x.shape[0], 4], dtype=tl.float32)
        for across in tl.static_range(4):
            column = tl.minimum(tl.maximum(left.to(tl.int32) + (across - 1), 0), width - 1)
            source = page + (row * width + column)[:, None] * 3 + channel[None, :]
            level = tl.load(source, mask=(channel < 3)[None, :], other=0).to(tl.float32)
            part += level * weigh(tl.abs(x - (across - 1)))[:, None]
        total += part * weigh(tl.abs(y - (down - 1)))[:, None]
    return round_half_even(tl.minimum(tl.maximum(total, 0.0), 255.0))


@triton.jit
def weigh(distance):
    """Keys' cubic with a = -0.75, of distances up to 2."""
    near = (1.25 * distance - 2.25) * distance * distance + 1.0
    far = ((-0.75 * distance + 3.75) * distance - 6.0) * distance + 3.0
    return tl.where(distance <= 1.0, near, far)


@triton.jit(do_not_specialize=["area"])
def interleave_kernel(planes, out, area, PIXELS: tl.constexpr):
    """A picture's three planes of bytes, one behind the other, as pixels of three bytes."""
    place = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.arange(0, 4)
    kept = (place < area)[:, None] & (channel < 3)[None, :]
    levels = tl.load(planes + channel[None, :] * area + place[:, None], mask=kept)
    tl.store(out + place[:, None] * 3 + channel[None, :], levels, mask=kept)
