"""Device code for layers that look at one pixel, or one row, at a time; see convolution.py for the form of maps."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from stages.kernels.convolution import find_limit

GELU_REACH = tl.constexpr(4.2)


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
    PART_IN: tl.constexpr,
    PART_OUT: tl.constexpr,
):
    """The channels are taken in parts, as Triton's tensors are powers of two wide and the layers three times that: all inputs
    and all sums stay with the program, and the hidden units pass by STEP at a time."""
    image, start = tl.program_id(1).to(tl.int64), tl.program_id(0) * PIXELS
    place = tl.arange(0, PIXELS)
    inside = (start + place < places)[:, None]
    pixels += (image * places + start) * INPUTS
    out += (image * places + start) * OUTPUTS
    lane, output = tl.arange(0, PART_IN), tl.arange(0, PART_OUT)
    values, results = (), ()
    for part in tl.static_range(INPUTS // PART_IN):
        channel = part * PART_IN + lane
        value = tl.load(pixels + place[:, None] * INPUTS + channel[None, :], mask=inside, other=0.0)
        if gates is not None:
            value = (value.to(tl.float32) * tl.load(gates + image * INPUTS + channel)[None, :]).to(tl.float16)
        values += (value,)
    for part in tl.static_range(OUTPUTS // PART_OUT):
        result = tl.zeros([PIXELS, PART_OUT], dtype=tl.float32) + tl.load(second_bias + part * PART_OUT + output)[None, :]
        if RESIDUAL:  # there are as many outputs as inputs, in the same parts
            result += values[part].to(tl.float32)
        results += (result,)
    for step in tl.range(0, HIDDEN, STEP, num_stages=2):
        unit = step + tl.arange(0, STEP)
        hidden = tl.zeros([PIXELS, STEP], dtype=tl.float32) + tl.load(first_bias + unit)[None, :]
        for part in tl.static_range(INPUTS // PART_IN):
            hidden = tl.dot(values[part], tl.load(first + (part * PART_IN + lane)[:, None] * HIDDEN + unit[None, :]), hidden)
        hidden = gelu(hidden).to(tl.float16)
        summed = ()
        for part in tl.static_range(OUTPUTS // PART_OUT):
            weight = tl.load(second + unit[:, None] * OUTPUTS + (part * PART_OUT + output)[None, :])
            summed += (tl.dot(hidden, weight, results[part]),)
        results = summed
    for part in tl.static_range(OUTPUTS // PART_OUT):
        target = out + place[:, None] * OUTPUTS + (part * PART_OUT + output)[None, :]
        tl.store(target, results[part].to(tl.float16), mask=inside)


@triton.jit(do_not_specialize=["places"])
def gate_kernel(pixels, gates, places, CHANNELS: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr):
    """Each channel of an image times its gate, in place."""
    image = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.arange(0, BLOCK)
    kept = (place < places)[:, None] & (channel < CHANNELS)[None, :]
    target = pixels + image * places * CHANNELS + place[:, None] * CHANNELS + channel[None, :]
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
    start, place = (tl.program_id(0) // blocks).to(tl.int64) * PIXELS, tl.arange(0, PIXELS)
    inside = (place < total - start)[:, None]
    pixels += start * INPUTS
    output = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    result = tl.zeros([PIXELS, BLOCK], dtype=tl.float32)
    for first in range(0, INPUTS, STEP):
        unit = first + tl.arange(0, STEP)
        values = tl.load(pixels + place[:, None] * INPUTS + unit[None, :], mask=inside, other=0.0)
        result = tl.dot(values, tl.load(weight + unit[:, None] * OUTPUTS + output[None, :]), result)
    result += tl.load(bias + output)[None, :]
    if GELU:
        result = gelu(result)
    target = place[:, None] * OUTPUTS + output[None, :]
    if residual is not None:
        result += tl.load(residual + start * OUTPUTS + target, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + start * OUTPUTS + target, result.to(tl.float16), mask=inside)


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


@triton.jit
def add_norm_kernel(
    hidden,
    update,
    weight,
    bias,
    total,
    normed,
    rows,
    EPSILON: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A residual connection and the layer norm behind it. The sum is rounded before it is normed, as torch's is."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK)
    told = lane < WIDTH
    kept = (row < rows)[:, None] & told[None, :]
    place = row[:, None] * WIDTH + lane[None, :]
    value = tl.load(hidden + place, mask=kept, other=0.0).to(tl.float32)
    value += tl.load(update + place, mask=kept, other=0.0).to(tl.float32)
    value = value.to(normed.dtype.element_ty)
    tl.store(total + place, value, mask=kept)
    value = value.to(tl.float32)
    centred = tl.where(kept, value - (tl.sum(value, axis=1) / WIDTH)[:, None], 0.0)
    deviation = tl.sqrt(tl.sum(centred * centred, axis=1) / WIDTH + EPSILON)
    scale, shift = tl.load(weight + lane, mask=told, other=0.0), tl.load(bias + lane, mask=told, other=0.0)
    value = centred / deviation[:, None] * scale[None, :].to(tl.float32) + shift[None, :].to(tl.float32)
    tl.store(normed + place, value.to(normed.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["count"])
def bias_silu_kernel(values, bias, count, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """A convolution's bias and SiLU in place, the channels last. The sum is rounded before the SiLU, as torch's is."""
    start, lane = tl.program_id(0).to(tl.int64) * BLOCK, tl.arange(0, BLOCK)
    place, channel = start + lane, ((start % CHANNELS).to(tl.int32) + lane) % CHANNELS
    value = tl.load(values + place, mask=place < count, other=0.0)
    value = (value.to(tl.float32) + tl.load(bias + channel).to(tl.float32)).to(value.dtype).to(tl.float32)
    tl.store(values + place, (value * tl.sigmoid(value)).to(values.dtype.element_ty), mask=place < count)
