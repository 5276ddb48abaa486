"""Device code: the fused kernels that launch.py starts. Triton compiles each once, for maps of all shapes.

Maps are contiguous [N, height, width, channels] in float16; sums are taken in float32. A program makes a tile of
ROWS × COLUMNS pixels of one image, or where neighbours do not matter PIXELS of them in rows one behind the other.
`widths` [N], where given, says how many columns of a map belong to each image: what lies right of them counts as zero.
Sizes are not specialised on: Triton would compile each kernel for every mix of sizes that are and are not multiples of
16.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_pixels(tile, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows and columns, each [ROWS · COLUMNS], of the pixels of a tile: tiles lie in rows too. A square tile's neighbours are
    mostly its own pixels, which keeps what is read within the first cache."""
    pixel = tl.arange(0, ROWS * COLUMNS)
    across = tl.cdiv(columns, COLUMNS)
    return tile // across * ROWS + pixel // COLUMNS, tile % across * COLUMNS + pixel % COLUMNS


@triton.jit
def find_limit(widths, image, width):
    """How many columns of a map are an image's."""
    limit = width
    if widths is not None:
        limit = tl.load(widths + image).to(tl.int32)
    return limit


@triton.jit(do_not_specialize=["height", "width", "rows", "columns"])
def convolve_kernel(
    pixels,
    weight,
    bias,
    out,
    sums,
    widths,
    height,
    width,
    rows,
    columns,
    total,
    offset,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    TOP: tl.constexpr,
    LEFT: tl.constexpr,
    RELU: tl.constexpr,
    BYTES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile, image = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, column = find_pixels(tile, columns, ROWS, COLUMNS)
    inside = (row < rows) & (column < columns)
    limit = find_limit(widths, image, width)
    channel = tl.arange(0, BLOCK)
    total_taps: tl.constexpr = TALL * WIDE * INPUTS
    source = pixels + image * height * width * INPUTS
    result = tl.zeros([ROWS * COLUMNS, BLOCK], dtype=tl.float32)
    for start in tl.static_range(0, total_taps, STEP):
        tap = start + tl.arange(0, STEP)
        y = row[:, None] * DOWN - TOP + (tap // INPUTS // WIDE)[None, :]
        x = column[:, None] * ACROSS - LEFT + (tap // INPUTS % WIDE)[None, :]
        seen = inside[:, None] & (tap < total_taps)[None, :] & (y >= 0) & (y < height) & (x >= 0) & (x < limit)
        values = tl.load(source + (y * width + x) * INPUTS + (tap % INPUTS)[None, :], mask=seen, other=0)
        if BYTES:
            values = tl.where(seen, values.to(tl.float32) * (2 / 255) - 1, 0.0)
        weights = tl.load(weight + tap[:, None] * BLOCK + channel[None, :])
        result = tl.dot(values.to(tl.float16), weights, result)
    result += tl.load(bias + channel)[None, :]
    if RELU:
        result = tl.maximum(result, 0.0)
    kept = inside[:, None] & (channel < OUTPUTS)[None, :]
    target = out + (image * rows * columns + row * columns + column)[:, None] * total + offset + channel[None, :]
    tl.store(target, result.to(tl.float16), mask=kept)
    if sums is not None:
        summed = tl.sum(tl.where(kept, result, 0.0), axis=0)
        tl.store(sums + (image * tl.num_programs(0) + tile) * OUTPUTS + channel, summed, mask=channel < OUTPUTS)


@triton.jit(do_not_specialize=["height", "width", "rows", "columns"])
def filter_kernel(
    pixels,
    weight,
    bias,
    out,
    sums,
    widths,
    height,
    width,
    rows,
    columns,
    CHANNELS: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    TOP: tl.constexpr,
    LEFT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program makes a piece of two rows, as most of what one reads the other reads too."""
    tile, image = tl.program_id(0), tl.program_id(2).to(tl.int64)
    row, column = find_pixels(tile, columns, 1, COLUMNS)
    row *= 2
    above, below = column < columns, (column < columns) & (row + 1 < rows)
    limit = find_limit(widths, image, width)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    told = channel < CHANNELS
    source = pixels + image * height * width * CHANNELS + channel[None, :]
    upper = tl.zeros([COLUMNS, BLOCK], dtype=tl.float32) + tl.load(bias + channel, mask=told, other=0.0)[None, :]
    lower = upper
    for down in range(TALL + DOWN):  # not unrolled: a 7×7 kernel's loads would take more registers than there are
        y = row * DOWN - TOP + down
        for right in tl.static_range(WIDE):
            x = column * ACROSS - LEFT + right
            seen = above & (y >= 0) & (y < height) & (x >= 0) & (x < limit)
            values = tl.load(source + (y * width + x)[:, None] * CHANNELS, mask=seen[:, None] & told[None, :], other=0.0)
            values = values.to(tl.float32)
            tap = weight + (down * WIDE + right) * CHANNELS + channel
            upper += values * tl.load(tap, mask=told & (down < TALL), other=0.0)[None, :]
            lower += values * tl.load(tap - DOWN * WIDE * CHANNELS, mask=told & (down >= DOWN), other=0.0)[None, :]
    target = out + (image * rows * columns + row * columns + column)[:, None] * CHANNELS + channel[None, :]
    tl.store(target, upper.to(tl.float16), mask=above[:, None] & told[None, :])
    tl.store(target + columns * CHANNELS, lower.to(tl.float16), mask=below[:, None] & told[None, :])
    if sums is not None:
        if widths is not None:
            above, below = above & (column < limit), below & (column < limit)
        summed = tl.sum(tl.where(above[:, None], upper, 0.0) + tl.where(below[:, None], lower, 0.0), axis=0)
        tl.store(sums + (image * tl.num_programs(0) + tile) * CHANNELS + channel, summed, mask=told)


@triton.jit(do_not_specialize=["height", "width"])
def pool_kernel(
    pixels,
    out,
    widths,
    height,
    width,
    total,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    image = tl.program_id(1).to(tl.int64)
    row, column = find_pixels(tl.program_id(0), width, ROWS, COLUMNS)
    inside = (row < height) & (column < width)
    limit = find_limit(widths, image, width)
    channel = tl.arange(0, BLOCK)
    told = (channel < CHANNELS)[None, :]
    source = pixels + image * height * width * CHANNELS + channel[None, :]
    most = tl.zeros([ROWS * COLUMNS, BLOCK], dtype=tl.float16)
    for down in tl.static_range(2):
        for across in tl.static_range(2):
            seen = inside & (row + down < height) & (column + across < limit)
            near = source + ((row + down) * width + column + across)[:, None] * CHANNELS
            most = tl.maximum(most, tl.load(near, mask=seen[:, None] & told, other=0.0))
    target = out + (image * height * width + row * width + column)[:, None] * total + channel[None, :]
    tl.store(target, most, mask=inside[:, None] & told)


@triton.jit(do_not_specialize=["rows", "columns"])
def merge_kernel(pixels, gates, coarser, out, rows, columns, CHANNELS: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr):
    """A map, gated, and a coarser one of half its size on top of it."""
    image = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    row, column = place // columns, place % columns
    channel = tl.arange(0, BLOCK)
    kept = (place < rows * columns)[:, None] & (channel < CHANNELS)[None, :]
    target = (image * rows * columns + place)[:, None] * CHANNELS + channel[None, :]
    values = tl.load(pixels + target, mask=kept, other=0.0).to(tl.float32)
    values *= tl.load(gates + image * CHANNELS + channel, mask=channel < CHANNELS, other=0.0)[None, :]
    if coarser is not None:
        near = (image * (rows // 2) + row // 2) * (columns // 2) + column // 2
        values += tl.load(coarser + near[:, None] * CHANNELS + channel[None, :], mask=kept, other=0.0).to(tl.float32)
    tl.store(out + target, values.to(tl.float16), mask=kept)


@triton.jit(do_not_specialize=["rows", "columns"])
def join_kernel(
    eighth,
    eighth_gates,
    quarter,
    quarter_gates,
    half,
    half_gates,
    whole,
    whole_gates,
    out,
    rows,
    columns,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Maps of an eighth of the size of `out` up to all of it, gated, side by side in its channels. One program writes all the
    channels of a pixel: memory takes parts of a line as badly as whole ones."""
    image = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    row, column = place // columns, place % columns
    channel = tl.arange(0, BLOCK)
    told = channel < CHANNELS
    kept = (place < rows * columns)[:, None] & told[None, :]
    for part in tl.static_range(4):
        pixels, gates = eighth, eighth_gates
        if part == 1:
            pixels, gates = quarter, quarter_gates
        if part == 2:
            pixels, gates = half, half_gates
        if part == 3:
            pixels, gates = whole, whole_gates
        near = (image * (rows >> 3 - part) + (row >> 3 - part)) * (columns >> 3 - part) + (column >> 3 - part)
        values = tl.load(pixels + near[:, None] * CHANNELS + channel[None, :], mask=kept, other=0.0).to(tl.float32)
        values *= tl.load(gates + image * CHANNELS + channel, mask=told, other=0.0)[None, :]
        target = out + ((image * rows * columns + place)[:, None] * 4 + part) * CHANNELS + channel[None, :]
        tl.store(target, values.to(tl.float16), mask=kept)


@triton.jit(do_not_specialize=["height", "width"])
def enlarge_kernel(
    pixels,
    first,
    first_bias,
    second,
    out,
    height,
    width,
    BIAS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    image = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    inside = place < height * width
    row, column = place // width, place % width
    channel = tl.arange(0, BLOCK)
    kept = inside[:, None] & (channel < CHANNELS)[None, :]
    values = tl.load(pixels + (image * height * width + place)[:, None] * CHANNELS + channel[None, :], mask=kept, other=0.0)
    square = channel[:, None] * BLOCK + channel[None, :]
    for half in tl.static_range(2):  # two rows of four bytes, each a word
        upper, lower = tl.zeros([PIXELS], dtype=tl.int32), tl.zeros([PIXELS], dtype=tl.int32)
        for side in tl.static_range(2):
            weight = tl.load(first + (2 * half + side) * BLOCK * BLOCK + square)
            hidden = tl.maximum(tl.dot(values, weight) + tl.load(first_bias + channel)[None, :], 0.0)
            for near in tl.static_range(4):
                level = tl.sum(hidden * tl.load(second + near * BLOCK + channel)[None, :], axis=1) + BIAS
                byte = (tl.sigmoid(level) * 255 + 0.5).to(tl.int32) << 8 * (2 * side + near % 2)
                if near < 2:
                    upper |= byte
                else:
                    lower |= byte
        target = out + (image * 4 * height + row * 4 + 2 * half) * width + column
        tl.store(target, upper, mask=inside)
        tl.store(target + width, lower, mask=inside)
