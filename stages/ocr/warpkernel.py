"""Device code that warp.py starts: crops of lines of text, and pictures from planes to pixels."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "columns", "count"])
def cut_kernel(places, scales, out, count, rows, columns, UNIT: tl.constexpr, PIXELS: tl.constexpr):
    """Upright lines from pages that lie anywhere, by cv2's bilinear resize, in bytes.

    places: int64 [8, N]; the address of each line's page, uint8 [height, width, 3], that height and width, the line's left,
    top, width and height there, and 1 where it runs down and is to be turned. scales: float64 [2, N]; by what it is shrunk
    across and down once it is upright.
    """
    line = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    row, column = place // columns, place % columns
    places += line
    page = tl.load(places).to(tl.pointer_type(tl.uint8))
    height, width = tl.load(places + count).to(tl.int32), tl.load(places + 2 * count).to(tl.int32)
    left, top = tl.load(places + 3 * count).to(tl.int32), tl.load(places + 4 * count).to(tl.int32)
    wide, tall = tl.load(places + 5 * count).to(tl.int32), tl.load(places + 6 * count).to(tl.int32)
    turned = tl.load(places + 7 * count) > 0
    across, down = tl.where(turned, tall, wide), tl.where(turned, wide, tall)
    first, first_weight, second_weight = find_tap(column, across, tl.load(scales + line), UNIT, True)
    upper, upper_weight, lower_weight = find_tap(row, down, tl.load(scales + count + line), UNIT, False)
    channel = tl.arange(0, 4)
    levels = tl.zeros([PIXELS, 4], dtype=tl.int32)
    for below in tl.static_range(2):
        y = tl.minimum(tl.maximum(upper + below, 0), down - 1)
        blended = tl.zeros([PIXELS, 4], dtype=tl.int32)
        for beside in tl.static_range(2):
            x = tl.minimum(tl.maximum(first + beside, 0), across - 1)
            page_x, page_y = left + tl.where(turned, wide - 1 - y, x), top + tl.where(turned, x, y)
            inside_x, inside_y = tl.minimum(tl.maximum(page_x, 0), width - 1), tl.minimum(tl.maximum(page_y, 0), height - 1)
            source = page + (inside_y * width + inside_x)[:, None] * 3 + channel[None, :]
            level = tl.load(source, mask=(channel < 3)[None, :], other=0).to(tl.int32)
            weight = second_weight if beside else first_weight
            blended += level * weight[:, None]
        weight = lower_weight if below else upper_weight
        levels += (blended >> 4) * weight[:, None] >> 16
    target = out + (line * rows * columns + place)[:, None] * 3 + channel[None, :]
    tl.store(target, (levels + 2 >> 2).to(tl.uint8), mask=(place < rows * columns)[:, None] & (channel < 3)[None, :])


@triton.jit(do_not_specialize=["count"])
def warp_kernel(places, maps, out, count, PIXELS: tl.constexpr):
    """Lines by cv2's perspective crop, bicubic, in bytes, one behind the other.

    places: int64 [6, N]; the address of each line's page, uint8 [height, width, 3], that height and width, the crop's width and
    height, and where in `out` it begins, in pixels. maps: float64 [9, N]; from the crop's pixels to the page's.
    """
    line = tl.program_id(1).to(tl.int64)
    places += line
    maps += line
    page = tl.load(places).to(tl.pointer_type(tl.uint8))
    height, width = tl.load(places + count).to(tl.int32), tl.load(places + 2 * count).to(tl.int32)
    wide, tall = tl.load(places + 3 * count).to(tl.int32), tl.load(places + 4 * count).to(tl.int32)
    place = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    x, y = (place % wide).to(tl.float64), (place // wide).to(tl.float64)
    across = tl.load(maps) * x + tl.load(maps + count) * y + tl.load(maps + 2 * count)
    down = tl.load(maps + 3 * count) * x + tl.load(maps + 4 * count) * y + tl.load(maps + 5 * count)
    depth = tl.load(maps + 6 * count) * x + tl.load(maps + 7 * count) * y + tl.load(maps + 8 * count)
    channel = tl.arange(0, 4)
    levels = sample_bicubic(page, height, width, across / depth, down / depth, channel)
    target = out + (tl.load(places + 5 * count) + place)[:, None] * 3 + channel[None, :]
    tl.store(target, levels.to(tl.uint8), mask=(place < wide * tall)[:, None] & (channel < 3)[None, :])


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
    place = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.arange(0, 4)
    kept = (place < area)[:, None] & (channel < 3)[None, :]
    levels = tl.load(planes + channel[None, :].to(tl.int64) * area + place[:, None], mask=kept)
    tl.store(out + place[:, None] * 3 + channel[None, :], levels, mask=kept)
