"""Device code: the fused kernels that layers.py starts. Triton compiles each once, for maps of all shapes.

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

GELU_REACH = tl.constexpr(4.2)


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


@triton.jit
def gelu(x):
    """x · Φ(x), Φ the normal distribution's: half of one and an odd polynomial, fitted for the least greatest error of the
    product: 2e-5, and beyond the fit's reach 1e-5 of x. The error function costs twice as much."""
    near = tl.minimum(tl.maximum(x, -GELU_REACH), GELU_REACH)
    square = near * near
    odd = 4.9238127e-11 * square - 4.7956572e-9
    odd = odd * square + 2.0724750e-7
    odd = odd * square - 5.2895621e-6
    odd = odd * square + 8.9835921e-5
    odd = odd * square - 1.0864589e-3
    odd = odd * square + 9.7409403e-3
    odd = odd * square - 6.6222079e-2
    odd = odd * square + 0.39883459
    return x * (0.5 + near * odd)


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
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile, image = tl.program_id(0), tl.program_id(2).to(tl.int64)
    row, column = find_pixels(tile, columns, ROWS, COLUMNS)
    inside = (row < rows) & (column < columns)
    limit = find_limit(widths, image, width)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    told = channel < CHANNELS
    source = pixels + image * height * width * CHANNELS + channel[None, :]
    result = tl.zeros([ROWS * COLUMNS, BLOCK], dtype=tl.float32) + tl.load(bias + channel, mask=told, other=0.0)[None, :]
    for down in tl.static_range(TALL):
        y = row * DOWN - TOP + down
        for across in tl.static_range(WIDE):
            x = column * ACROSS - LEFT + across
            seen = inside & (y >= 0) & (y < height) & (x >= 0) & (x < limit)
            values = tl.load(source + (y * width + x)[:, None] * CHANNELS, mask=seen[:, None] & told[None, :], other=0.0)
            weights = tl.load(weight + (down * WIDE + across) * CHANNELS + channel, mask=told, other=0.0)
            result += values.to(tl.float32) * weights[None, :]
    kept = inside[:, None] & told[None, :]
    target = out + (image * rows * columns + row * columns + column)[:, None] * CHANNELS + channel[None, :]
    tl.store(target, result.to(tl.float16), mask=kept)
    if sums is not None:
        counted = kept
        if widths is not None:
            counted = kept & (column < limit)[:, None]
        summed = tl.sum(tl.where(counted, result, 0.0), axis=0)
        tl.store(sums + (image * tl.num_programs(0) + tile) * CHANNELS + channel, summed, mask=told)


@triton.jit(do_not_specialize=["height", "width", "tiles"])
def excite_kernel(
    sums,
    first,
    first_bias,
    second,
    second_bias,
    gates,
    widths,
    tiles,
    height,
    width,
    CHANNELS: tl.constexpr,
    SQUEEZED: tl.constexpr,
    SLOPE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    image = tl.program_id(0)
    channel = tl.arange(0, BLOCK)
    told = channel < CHANNELS
    total = tl.zeros([TILES, BLOCK], dtype=tl.float32)
    for start in range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)
        kept = (tile < tiles)[:, None] & told[None, :]
        total += tl.load(sums + (image * tiles + tile)[:, None] * CHANNELS + channel[None, :], mask=kept, other=0.0)
    limit = find_limit(widths, image, width)
    mean = tl.sum(total, axis=0) / (height * limit)
    gate = tl.load(second_bias + channel, mask=told, other=0.0)
    for start in range(0, SQUEEZED, ROWS):
        row = start + tl.arange(0, ROWS)
        place = row[:, None] * CHANNELS + channel[None, :]
        kept = (row < SQUEEZED)[:, None] & told[None, :]
        squeezed = tl.sum(tl.load(first + place, mask=kept, other=0.0) * mean[None, :], axis=1)
        squeezed = tl.maximum(squeezed + tl.load(first_bias + row, mask=row < SQUEEZED, other=0.0), 0.0)
        gate += tl.sum(tl.load(second + place, mask=kept, other=0.0) * squeezed[:, None], axis=0)
    gate = tl.minimum(tl.maximum(gate * SLOPE + 0.5, 0.0), 1.0)
    if RESIDUAL:
        gate += 1.0
    tl.store(gates + image * CHANNELS + channel, gate, mask=told)


@triton.jit(do_not_specialize=["places"])
def mix_kernel(
    pixels,
    gates,
    first,
    first_bias,
    second,
    second_bias,
    out,
    places,
    INPUTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    OUTPUTS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PIXELS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    image = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    inside = place < places
    channel, output = tl.arange(0, BLOCK_IN), tl.arange(0, BLOCK_OUT)
    kept = inside[:, None] & (channel < INPUTS)[None, :]
    values = tl.load(pixels + (image * places + place)[:, None] * INPUTS + channel[None, :], mask=kept, other=0.0)
    if gates is not None:
        gate = tl.load(gates + image * INPUTS + channel, mask=channel < INPUTS, other=0.0)
        values = (values.to(tl.float32) * gate[None, :]).to(tl.float16)
    result = tl.zeros([PIXELS, BLOCK_OUT], dtype=tl.float32) + tl.load(second_bias + output)[None, :]
    if RESIDUAL:
        result += values.to(tl.float32)
    for start in range(0, HIDDEN, STEP):
        unit = start + tl.arange(0, STEP)
        hidden = tl.dot(values, tl.load(first + channel[:, None] * HIDDEN + unit[None, :]))
        hidden += tl.load(first_bias + unit)[None, :]
        result = tl.dot(gelu(hidden).to(tl.float16), tl.load(second + unit[:, None] * BLOCK_OUT + output[None, :]), result)
    target = out + (image * places + place)[:, None] * OUTPUTS + output[None, :]
    tl.store(target, result.to(tl.float16), mask=inside[:, None] & (output < OUTPUTS)[None, :])


@triton.jit(do_not_specialize=["places"])
def gate_kernel(pixels, gates, places, CHANNELS: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr):
    """Each channel of an image times its gate, in place."""
    image = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.arange(0, BLOCK)
    kept = (place < places)[:, None] & (channel < CHANNELS)[None, :]
    target = pixels + (image * places + place)[:, None] * CHANNELS + channel[None, :]
    gate = tl.load(gates + image * CHANNELS + channel, mask=channel < CHANNELS, other=0.0)
    values = tl.load(target, mask=kept, other=0.0).to(tl.float32)
    tl.store(target, (values * gate[None, :]).to(tl.float16), mask=kept)


@triton.jit(do_not_specialize=["total"])
def project_kernel(
    pixels,
    weight,
    bias,
    residual,
    out,
    total,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GELU: tl.constexpr,
    PIXELS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One pointwise layer of `total` pixels. residual: None, or what is added. Programs that read the same pixels run side by
    side, so that they are read from memory once."""
    blocks: tl.constexpr = OUTPUTS // BLOCK
    place = (tl.program_id(0) // blocks).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)
    inside = (place < total)[:, None]
    output = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    result = tl.zeros([PIXELS, BLOCK], dtype=tl.float32)
    for start in range(0, INPUTS, STEP):
        unit = start + tl.arange(0, STEP)
        values = tl.load(pixels + place[:, None] * INPUTS + unit[None, :], mask=inside, other=0.0)
        result = tl.dot(values, tl.load(weight + unit[:, None] * OUTPUTS + output[None, :]), result)
    result += tl.load(bias + output)[None, :]
    if GELU:
        result = gelu(result)
    target = place[:, None] * OUTPUTS + output[None, :]
    if residual is not None:
        result += tl.load(residual + target, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + target, result.to(tl.float16), mask=inside)


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


@triton.jit(do_not_specialize=["rows", "columns", "factor"])
def spread_kernel(
    pixels,
    gates,
    coarser,
    out,
    rows,
    columns,
    factor,
    total,
    offset,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    image = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    row, column = place // columns, place % columns
    channel = tl.arange(0, BLOCK)
    kept = (place < rows * columns)[:, None] & (channel < CHANNELS)[None, :]
    near = (image * (rows // factor) + row // factor) * (columns // factor) + column // factor
    values = tl.load(pixels + near[:, None] * CHANNELS + channel[None, :], mask=kept, other=0.0).to(tl.float32)
    values *= tl.load(gates + image * CHANNELS + channel, mask=channel < CHANNELS, other=0.0)[None, :]
    if coarser is not None:
        near = (image * (rows // 2) + row // 2) * (columns // 2) + column // 2
        values += tl.load(coarser + near[:, None] * CHANNELS + channel[None, :], mask=kept, other=0.0).to(tl.float32)
    target = out + (image * rows * columns + place)[:, None] * total + offset + channel[None, :]
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
    for near in tl.static_range(4):
        hidden = tl.dot(values, tl.load(first + near * BLOCK * BLOCK + square)) + tl.load(first_bias + channel)[None, :]
        hidden = tl.maximum(hidden, 0.0)
        for nearer in tl.static_range(4):
            level = tl.sum(hidden * tl.load(second + nearer * BLOCK + channel)[None, :], axis=1) + BIAS
            y = row * 4 + near // 2 * 2 + nearer // 2
            x = column * 4 + near % 2 * 2 + nearer % 2
            target = out + (image * 4 * height + y) * 4 * width + x
            tl.store(target, tl.sigmoid(level).to(tl.float16), mask=inside)


@triton.jit(do_not_specialize=["count"])
def choose_kernel(logits, classes, probabilities, count, BLOCK: tl.constexpr):
    """Twice over a row, the second time from the cache, so that no exponential is taken in vain."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    most = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    where = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, count, BLOCK):
        place = start + lane
        value = tl.load(logits + row * count + place, mask=place < count, other=float("-inf")).to(tl.float32)
        where = tl.where(value > most, place, where)
        most = tl.maximum(most, value)
    best = tl.max(most, axis=0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, count, BLOCK):
        place = start + lane
        value = tl.load(logits + row * count + place, mask=place < count, other=float("-inf")).to(tl.float32)
        total += tl.exp(value - best)
    tl.store(classes + row, tl.min(tl.where(most == best, where, count), axis=0).to(tl.int64))
    tl.store(probabilities + row, 1.0 / tl.sum(total, axis=0))
