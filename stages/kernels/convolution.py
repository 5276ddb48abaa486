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
    pooled,
    out,
    sums,
    widths,
    height,
    width,
    rows,
    columns,
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
    STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """pooled: None, or a map of as many channels, whose greatest of 2×2 come before them: memory takes half a pixel badly."""
    tile, image = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, column = find_pixels(tile, columns, ROWS, COLUMNS)
    inside = (row < rows) & (column < columns)
    limit = find_limit(widths, image, width)
    channel = tl.arange(0, BLOCK)
    taps: tl.constexpr = TALL * WIDE * INPUTS
    source = pixels + image * height * width * INPUTS
    result = tl.zeros([ROWS * COLUMNS, BLOCK], dtype=tl.float32)
    for start in tl.range(0, taps, STEP, num_stages=STAGES):
        tap = start + tl.arange(0, STEP)
        y = row[:, None] * DOWN - TOP + (tap // INPUTS // WIDE)[None, :]
        x = column[:, None] * ACROSS - LEFT + (tap // INPUTS % WIDE)[None, :]
        seen = inside[:, None] & (tap < taps)[None, :] & (y >= 0) & (y < height) & (x >= 0) & (x < limit)
        values = tl.load(source + (y * width + x) * INPUTS + (tap % INPUTS)[None, :], mask=seen, other=0)
        if BYTES:
            values = tl.where(seen, values.to(tl.float32) * (2 / 255) - 1, 0.0)
        result = tl.dot(values.to(tl.float16), tl.load(weight + tap[:, None] * BLOCK + channel[None, :]), result)
    result += tl.load(bias + channel)[None, :]
    if RELU:
        result = tl.maximum(result, 0.0)
    told, kept = channel < OUTPUTS, inside[:, None] & (channel < OUTPUTS)[None, :]
    total: tl.constexpr = OUTPUTS if pooled is None else 2 * OUTPUTS
    target = out + image * rows * columns * total + (row * columns + column)[:, None] * total + channel[None, :]
    tl.store(target + (total - OUTPUTS), result.to(tl.float16), mask=kept)
    if pooled is not None:
        pooled += image * rows * columns * OUTPUTS
        tl.store(target, find_greatest(pooled, row, column, rows, columns, limit, channel, told, OUTPUTS), mask=kept)
    if sums is not None:
        sums += (image * tl.num_programs(0) + tile) * OUTPUTS
        tl.store(sums + channel, tl.sum(tl.where(kept, result, 0.0), axis=0), mask=told)


@triton.jit
def find_greatest(pixels, row, column, rows, columns, limit, channel, told, CHANNELS: tl.constexpr):
    """The greatest of each pixel and its neighbours right and below, of values that are not negative: [pixels, channels]."""
    most = tl.zeros([row.shape[0], channel.shape[0]], dtype=tl.float16)
    for down in tl.static_range(2):
        for across in tl.static_range(2):
            seen = (row + down < rows) & (column + across < limit) & (column + across < columns)
            near = pixels + ((row + down) * columns + column + across)[:, None] * CHANNELS + channel[None, :]
            most = tl.maximum(most, tl.load(near, mask=seen[:, None] & told[None, :], other=0.0))
    return most


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
    ROWS: tl.constexpr,
    RUNS: tl.constexpr,
    RUN: tl.constexpr,
    UNROLLED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile is of RUNS runs of RUN pixels in each of its ROWS. A run's pixels share their loads: the sums of all of them
    are kept in registers, and each value that is read is added to those that it belongs to."""
    tile, image = tl.program_id(0), tl.program_id(2).to(tl.int64)
    row, run = find_pixels(tile, tl.cdiv(columns, RUN), ROWS, RUNS)
    column = run * RUN
    limit = find_limit(widths, image, width)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    told = channel < CHANNELS
    source = pixels + image * height * width * CHANNELS + channel[None, :]
    left = column * ACROSS - LEFT
    start = tl.zeros([ROWS * RUNS, BLOCK], dtype=tl.float32) + tl.load(bias + channel, mask=told, other=0.0)[None, :]
    results = (start,) * RUN
    for down in tl.range(0, TALL, loop_unroll_factor=UNROLLED):
        y = row * DOWN - TOP + down
        seen = (row < rows) & (y >= 0) & (y < height)
        near = source + (y * width + left)[:, None] * CHANNELS
        taps = ()
        for right in tl.static_range(WIDE):
            taps += (tl.load(weight + (down * WIDE + right) * CHANNELS + channel, mask=told, other=0.0)[None, :],)
        for place in tl.static_range((RUN - 1) * ACROSS + WIDE):
            kept = (seen & (left + place >= 0) & (left + place < limit))[:, None] & told[None, :]
            values = tl.load(near + place * CHANNELS, mask=kept, other=0.0).to(tl.float32)
            results = add_taps(results, values, taps, place, WIDE, ACROSS, RUN)
    target = out + image * rows * columns * CHANNELS + (row * columns + column)[:, None] * CHANNELS + channel[None, :]
    total = tl.zeros([ROWS * RUNS, BLOCK], dtype=tl.float32)
    for i in tl.static_range(RUN):
        inside = (row < rows) & (column + i < columns)
        tl.store(target + i * CHANNELS, results[i].to(tl.float16), mask=inside[:, None] & told[None, :])
        if sums is not None:
            if widths is not None:
                inside = inside & (column + i < limit)
            total += tl.where(inside[:, None], results[i], 0.0)
    if sums is not None:
        tl.store(sums + (image * tl.num_programs(0) + tile) * CHANNELS + channel, tl.sum(total, axis=0), mask=told)


@triton.jit
def add_taps(sums, values, taps, place: tl.constexpr, WIDE: tl.constexpr, ACROSS: tl.constexpr, RUN: tl.constexpr):
    """The sums of a run's pixels, and what the values at a place in it, counted from the first that is read, add to each."""
    added = ()
    for i in tl.static_range(RUN):
        if place >= i * ACROSS and place < i * ACROSS + WIDE:
            added += (sums[i] + values * taps[place - i * ACROSS],)
        else:
            added += (sums[i],)
    return added


@triton.jit(do_not_specialize=["rows", "columns"])
def merge_kernel(pixels, gates, coarser, out, rows, columns, CHANNELS: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr):
    """A map, gated, and a coarser one of half its size on top of it."""
    image = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    row, column = place // columns, place % columns
    channel = tl.arange(0, BLOCK)
    kept = (place < rows * columns)[:, None] & (channel < CHANNELS)[None, :]
    target, base = place[:, None] * CHANNELS + channel[None, :], image * rows * columns * CHANNELS
    values = tl.load(pixels + base + target, mask=kept, other=0.0).to(tl.float32)
    values *= tl.load(gates + image * CHANNELS + channel, mask=channel < CHANNELS, other=0.0)[None, :]
    if coarser is not None:
        coarser += image * (rows // 2) * (columns // 2) * CHANNELS
        near = row // 2 * (columns // 2) + column // 2
        values += tl.load(coarser + near[:, None] * CHANNELS + channel[None, :], mask=kept, other=0.0).to(tl.float32)
    tl.store(out + base + target, values.to(tl.float16), mask=kept)


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
        pixels += image * (rows >> 3 - part) * (columns >> 3 - part) * CHANNELS
        near = (row >> 3 - part) * (columns >> 3 - part) + (column >> 3 - part)
        values = tl.load(pixels + near[:, None] * CHANNELS + channel[None, :], mask=kept, other=0.0).to(tl.float32)
        values *= tl.load(gates + image * CHANNELS + channel, mask=told, other=0.0)[None, :]
        target = out + image * rows * columns * 4 * CHANNELS + (place[:, None] * 4 + part) * CHANNELS + channel[None, :]
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
    pixels += image * height * width * CHANNELS
    values = tl.load(pixels + place[:, None] * CHANNELS + channel[None, :], mask=kept, other=0.0)
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
        target = out + image * 4 * height * width + (row * 4 + 2 * half) * width + column
        tl.store(target, upper, mask=inside)
        tl.store(target + width, lower, mask=inside)
