"""Device code that letterbox.py starts: pictures from planes of bytes to what a network looks at.

The pictures of a batch may lie anywhere and be of any sizes; nothing is compiled anew for those.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from stages.warpkernel import find_tap


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
