"""Device code: the fused kernels that layers.py and warp.py start. Triton compiles each once, for maps of all shapes.

Maps are contiguous [N, height, width, channels] in float16; sums are taken in float32. A program makes PIXELS pixels of
one image, in rows one behind the other. `widths` [N], where given, says how many columns of a map belong to each image:
what lies right of them counts as zero.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
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
    PIXELS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile, image = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = tile * PIXELS + tl.arange(0, PIXELS)
    inside = place < rows * columns
    row, column = place // columns, place % columns
    limit = width
    if widths is not None:
        limit = tl.load(widths + image).to(tl.int32)
    channel = tl.arange(0, BLOCK)
    total_taps: tl.constexpr = TALL * WIDE * INPUTS
    source = pixels + image * height * width * INPUTS
    result = tl.zeros([PIXELS, BLOCK], dtype=tl.float32)
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
    target = out + (image * rows * columns + place[:, None]) * total + offset + channel[None, :]
    tl.store(target, result.to(tl.float16), mask=kept)
    if sums is not None:
        summed = tl.sum(tl.where(kept, result, 0.0), axis=0)
        tl.store(sums + (image * tl.num_programs(0) + tile) * OUTPUTS + channel, summed, mask=channel < OUTPUTS)


@triton.jit
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
    PIXELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile, image = tl.program_id(0), tl.program_id(2).to(tl.int64)
    place = tile * PIXELS + tl.arange(0, PIXELS)
    inside = place < rows * columns
    row, column = place // columns, place % columns
    limit = width
    if widths is not None:
        limit = tl.load(widths + image).to(tl.int32)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    told = channel < CHANNELS
    source = pixels + image * height * width * CHANNELS + channel[None, :]
    result = tl.zeros([PIXELS, BLOCK], dtype=tl.float32) + tl.load(bias + channel, mask=told, other=0.0)[None, :]
    for down in tl.static_range(TALL):
        y = row * DOWN - TOP + down
        for across in tl.static_range(WIDE):
            x = column * ACROSS - LEFT + across
            seen = inside & (y >= 0) & (y < height) & (x >= 0) & (x < limit)
            values = tl.load(source + (y * width + x)[:, None] * CHANNELS, mask=seen[:, None] & told[None, :], other=0.0)
            weights = tl.load(weight + (down * WIDE + across) * CHANNELS + channel, mask=told, other=0.0)
            result += values.to(tl.float32) * weights[None, :]
    kept = inside[:, None] & told[None, :]
    tl.store(out + (image * rows * columns + place)[:, None] * CHANNELS + channel[None, :], result.to(tl.float16), mask=kept)
    if sums is not None:
        counted = kept
        if widths is not None:
            counted = kept & (column < limit)[:, None]
        summed = tl.sum(tl.where(counted, result, 0.0), axis=0)
        tl.store(sums + (image * tl.num_programs(0) + tile) * CHANNELS + channel, summed, mask=told)


@triton.jit
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
    limit = width
    if widths is not None:
        limit = tl.load(widths + image).to(tl.int32)
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


@triton.jit
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
        hidden = 0.5 * hidden * (1.0 + tl.erf(hidden * 0.7071067811865476))
        result = tl.dot(hidden.to(tl.float16), tl.load(second + unit[:, None] * BLOCK_OUT + output[None, :]), result)
    target = out + (image * places + place)[:, None] * OUTPUTS + output[None, :]
    tl.store(target, result.to(tl.float16), mask=inside[:, None] & (output < OUTPUTS)[None, :])


@triton.jit
def pool_kernel(
    pixels,
    out,
    widths,
    height,
    width,
    total,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    image = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    inside = place < height * width
    row, column = place // width, place % width
    limit = width
    if widths is not None:
        limit = tl.load(widths + image).to(tl.int32)
    channel = tl.arange(0, BLOCK)
    told = (channel < CHANNELS)[None, :]
    source = pixels + image * height * width * CHANNELS + channel[None, :]
    most = tl.zeros([PIXELS, BLOCK], dtype=tl.float16)
    for down in tl.static_range(2):
        for across in tl.static_range(2):
            seen = inside & (row + down < height) & (column + across < limit)
            near = source + ((row + down) * width + column + across)[:, None] * CHANNELS
            most = tl.maximum(most, tl.load(near, mask=seen[:, None] & told, other=0.0))
    tl.store(out + (image * height * width + place)[:, None] * total + channel[None, :], most, mask=inside[:, None] & told)


@triton.jit
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


@triton.jit
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


@triton.jit
def choose_kernel(logits, classes, probabilities, count, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    most = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    where = tl.zeros([BLOCK], dtype=tl.int32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, count, BLOCK):
        value = tl.load(logits + row * count + start + lane, mask=start + lane < count, other=-60000.0).to(tl.float32)
        higher = tl.maximum(most, value)
        total = total * tl.exp(most - higher) + tl.exp(value - higher)
        where = tl.where(value > most, start + lane, where)
        most = higher
    best = tl.max(most, axis=0)
    total_all = tl.sum(total * tl.exp(most - best), axis=0)
    tl.store(classes + row, tl.min(tl.where(most == best, where, count), axis=0).to(tl.int64))
    tl.store(probabilities + row, 1.0 / total_all)


@triton.jit
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
    table: float64 [12, N]; a line's width, height and resized width, and the nine numbers of its perspective.
    """
    line = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    row, column = place // columns, place % columns
    table += line
    wide, tall, resized = tl.load(table), tl.load(table + count), tl.load(table + 2 * count)
    turned = tall >= TALL * wide
    across, down = tl.where(turned, tall, wide), tl.where(turned, wide, tall)  # of the line once it is upright
    left, left_weight, right_weight = find_tap(column, across, resized, UNIT, True)
    upper, upper_weight, lower_weight = find_tap(row, down, rows.to(tl.float64), UNIT, False)
    owner = tl.load(owners + line)
    page = tl.load(pages + owner).to(tl.pointer_type(tl.uint8))
    height, width = tl.load(sizes + 2 * owner), tl.load(sizes + 2 * owner + 1)
    channel = tl.arange(0, 4)
    levels = tl.zeros([PIXELS, 4], dtype=tl.int32)
    for below in tl.static_range(2):
        y = tl.minimum(tl.maximum(upper + below, 0), down.to(tl.int32) - 1)
        blended = tl.zeros([PIXELS, 4], dtype=tl.int32)
        for beside in tl.static_range(2):
            x = tl.minimum(tl.maximum(left + beside, 0), across.to(tl.int32) - 1)
            crop_x = tl.where(turned, wide.to(tl.int32) - 1 - y, x).to(tl.float64)
            crop_y = tl.where(turned, x, y).to(tl.float64)
            depth = tl.load(table + 9 * count) * crop_x + tl.load(table + 10 * count) * crop_y + tl.load(table + 11 * count)
            page_x = tl.load(table + 3 * count) * crop_x + tl.load(table + 4 * count) * crop_y + tl.load(table + 5 * count)
            page_y = tl.load(table + 6 * count) * crop_x + tl.load(table + 7 * count) * crop_y + tl.load(table + 8 * count)
            level = sample_bicubic(page, height, width, page_x / depth, page_y / depth, channel)
            weight = right_weight if beside else left_weight
            blended += level * weight[:, None]
        weight = lower_weight if below else upper_weight
        levels += (blended >> 4) * weight[:, None] >> 16
    target = out + (line * rows * columns + place)[:, None] * 3 + channel[None, :]
    tl.store(target, (levels + 2 >> 2).to(tl.uint8), mask=(place < rows * columns)[:, None] & (channel < 3)[None, :])


@triton.jit
def find_tap(output, source, target, UNIT: tl.constexpr, CLAMP: tl.constexpr):
    """The first of the two inputs that an output of a bilinear resize blends, and both weights; see warp.find_taps."""
    position = ((output.to(tl.float64) + 0.5) * (1.0 / (target / source)) - 0.5).to(tl.float32)
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
