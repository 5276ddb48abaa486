"""Device code that letterbox.py and resize.py start: pictures from planes of bytes to what a network looks at.

The pictures of a batch may lie anywhere and be of any sizes; nothing is compiled anew for those.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from stages.ocr.warpkernel import find_tap


@triton.jit(do_not_specialize=["count", "height", "width"])
def letterbox_kernel(
    places,
    scales,
    out,
    count,
    height,
    width,
    UNIT: tl.constexpr,
    PADDING: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Pictures by cv2's bilinear resize, in bytes, onto grey canvases of height × width pixels, as 0..1, channels last.

    places: int64 [7, N]; the address of each picture, uint8 [3, height, width], that height and width, and the top, left,
    height and width of its place on the canvas. scales: float64 [2, N]; by what it is shrunk across and down.
    """
    image = tl.program_id(1).to(tl.int64)
    places += image
    tall, wide = tl.load(places + count).to(tl.int32), tl.load(places + 2 * count).to(tl.int32)
    tiles = tl.cdiv(width, COLUMNS)
    row = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    y, x = row - tl.load(places + 3 * count).to(tl.int32), column - tl.load(places + 4 * count).to(tl.int32)
    in_rows = (y >= 0) & (y < tl.load(places + 5 * count).to(tl.int32))
    in_columns = (x >= 0) & (x < tl.load(places + 6 * count).to(tl.int32))
    left, left_weight, right_weight = find_tap(x, wide, tl.load(scales + image), UNIT, True)
    top, upper_weight, lower_weight = find_tap(y, tall, tl.load(scales + count + image), UNIT, False)
    right, bottom = tl.minimum(tl.maximum(left + 1, 0), wide - 1), tl.minimum(tl.maximum(top + 1, 0), tall - 1)
    left, top = tl.minimum(tl.maximum(left, 0), wide - 1), tl.minimum(tl.maximum(top, 0), tall - 1)
    plane = tl.load(places).to(tl.pointer_type(tl.uint8))
    area = tall.to(tl.int64) * wide
    target = out + (image * height + row[:, None]) * width * 3 + column[None, :] * 3
    kept = (row < height)[:, None] & (column < width)[None, :]
    for channel in tl.static_range(3):
        upper = blend_columns(plane + top.to(tl.int64) * wide, left, right, left_weight, right_weight)
        lower = blend_columns(plane + bottom.to(tl.int64) * wide, left, right, left_weight, right_weight)
        total = ((upper >> 4) * upper_weight[:, None] >> 16) + ((lower >> 4) * lower_weight[:, None] >> 16)
        level = tl.where(in_rows[:, None] & in_columns[None, :], total + 2 >> 2, PADDING).to(tl.float32)
        # torch too divides by a number like this on a GPU: its reciprocal is rounded to float32 first.
        tl.store(target + channel, (level * (1 / 255)).to(out.dtype.element_ty), mask=kept)
        plane += area


@triton.jit
def blend_columns(rows, left, right, left_weight, right_weight):
    """Between two columns of each row, of which `rows` holds the addresses: UNIT times too bright, [rows, columns]."""
    first = tl.load(rows[:, None] + left[None, :]).to(tl.int32) * left_weight[None, :]
    return first + tl.load(rows[:, None] + right[None, :]).to(tl.int32) * right_weight[None, :]


@triton.jit(do_not_specialize=["count", "columns"])
def across_kernel(places, out, count, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TAPS: tl.constexpr):
    """What is in use of each picture, resized across: bytes [rows, columns], one plane behind the other.

    places: int64 [11, N]; the address of what is in use of each picture, its bytes from plane to plane and from row to row,
    how many rows it has, with which row of `out` it begins; and of resize.Axis the table's address, taps and shift, across
    and then down. `columns` is no constant, else Triton would give a thread neighbouring outputs for the sake of `out`.
    """
    image, channel = tl.program_id(1) // 3, (tl.program_id(1) % 3).to(tl.int64)
    places += image
    rows, tiles = tl.load(places + 3 * count).to(tl.int32), tl.cdiv(columns, COLUMNS)
    start = tl.program_id(0) // tiles * ROWS
    if start >= rows:  # others of the batch are taller
        return
    pitch = tl.load(places + 2 * count)
    table = tl.load(places + 5 * count).to(tl.pointer_type(tl.int32))
    taps, shift = tl.load(places + 6 * count).to(tl.int32), tl.load(places + 7 * count).to(tl.int32)
    row, column = tl.arange(0, ROWS), tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    kept = column < columns
    corner = tl.load(places).to(tl.pointer_type(tl.uint8)) + channel * tl.load(places + count) + start * pitch
    first = tl.load(table + column, mask=kept, other=0)
    # Within a program 32 bits are enough, and take half the arithmetic.
    sources = corner + (tl.minimum(row, rows - 1 - start)[:, None] * pitch.to(tl.int32) + first[None, :])
    weights = table + columns + column
    sums = tl.zeros([ROWS, COLUMNS], dtype=tl.int32) + (1 << shift - 1)
    for _ in range(0, taps, TAPS):
        for tap in tl.static_range(TAPS):
            weight = tl.load(weights + tap * columns, mask=kept, other=0)
            sums += tl.load(sources + tap).to(tl.int32) * weight[None, :]
        sources += TAPS
        weights += TAPS * columns
    levels = tl.minimum(tl.maximum(sums >> shift, 0), 255).to(tl.uint8)
    target = out + (tl.load(places + 4 * count) + channel * rows + start) * columns
    tl.store(target + (row[:, None] * columns + column[None, :]), levels, mask=(row < rows - start)[:, None] & kept[None, :])


@triton.jit(do_not_specialize=["count"])
def down_kernel(
    places,
    wide,
    mean,
    deviation,
    out,
    count,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TAPS: tl.constexpr,
):
    """across_kernel's bytes, resized down and normalised: [N, 3, HEIGHT, WIDTH]. places: as there."""
    image, channel = tl.program_id(1) // 3, tl.program_id(1) % 3
    places += image
    table = tl.load(places + 8 * count).to(tl.pointer_type(tl.int32))
    taps, shift = tl.load(places + 9 * count).to(tl.int32), tl.load(places + 10 * count).to(tl.int32)
    tiles: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    row = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    inside, kept = tl.minimum(row, HEIGHT - 1), (column < WIDTH)[None, :]
    line = tl.load(places + 4 * count) + channel * tl.load(places + 3 * count) + tl.load(table + inside)
    sources = wide + line[:, None] * WIDTH + column[None, :]
    weights = table + HEIGHT + inside
    sums = tl.zeros([ROWS, COLUMNS], dtype=tl.int32) + (1 << shift - 1)
    for _ in range(0, taps, TAPS):
        for tap in tl.static_range(TAPS):
            weight = tl.load(weights + tap * HEIGHT)
            sums += tl.load(sources + tap * WIDTH, mask=kept, other=0).to(tl.int32) * weight[:, None]
        sources += TAPS * WIDTH
        weights += TAPS * HEIGHT
    levels = tl.minimum(tl.maximum(sums >> shift, 0), 255).to(tl.float32)
    normal = tl.div_rn(levels - tl.load(mean + channel), tl.load(deviation + channel))
    target = (tl.program_id(1).to(tl.int64) * HEIGHT + row)[:, None] * WIDTH + column[None, :]
    tl.store(out + target, normal.to(out.dtype.element_ty), mask=(row < HEIGHT)[:, None] & kept)
