"""Pictures turned as EXIF says, in one pass over memory. torch needs a pass for each flip, and one of bytes that lie far
apart for a quarter turn."""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = {"BLOCK_LINES": 64, "BLOCK": 64}  # of the picture as stored
# For each EXIF orientation: whether rows become columns, and whether the last row and column as stored then come first.
TURNS = {
    2: (False, False, True),
    3: (False, True, True),
    4: (False, True, False),
    5: (True, False, False),
    6: (True, True, False),
    7: (True, True, True),
    8: (True, False, True),
}


@triton.jit(do_not_specialize=["height", "width", "flip_rows", "flip_columns"])
def turn_kernel(
    x_ptr,
    out_ptr,
    height,
    width,
    flip_rows,
    flip_columns,
    SWAP: tl.constexpr,
    BLOCK_LINES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x: uint8 [3, height, width]. flip_rows, flip_columns: 1 for those of x from the last to the first, otherwise 0.
    out: as x, or [3, width, height] if SWAP: what was a column is a row then.
    Grid: (tiles of BLOCK_LINES × BLOCK of x, 3)."""
    tiles = tl.cdiv(width, BLOCK)
    rows = (tl.program_id(0) // tiles * BLOCK_LINES + tl.arange(0, BLOCK_LINES)).to(tl.int64)
    columns = (tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    plane = tl.program_id(1).to(tl.int64) * height * width
    in_rows, in_columns = (rows < height)[:, None], (columns < width)[None, :]
    pixels = tl.load(x_ptr + plane + rows[:, None] * width + columns[None, :], mask=in_rows & in_columns)
    to_rows = tl.where(flip_rows != 0, height - 1 - rows, rows)
    to_columns = tl.where(flip_columns != 0, width - 1 - columns, columns)
    out_ptr += plane
    if SWAP:
        # Turned first, so that adjacent threads write adjacent bytes.
        ptrs = out_ptr + to_columns[:, None] * height + to_rows[None, :]
        tl.store(ptrs, tl.trans(pixels), mask=tl.trans(in_columns) & tl.trans(in_rows))
    else:
        tl.store(out_ptr + to_rows[:, None] * width + to_columns[None, :], pixels, mask=in_rows & in_columns)


def try_turns(device: torch.device | str) -> None:
    """Run each of the kernel's variants once."""
    for orientation in (2, 5):
        turn(torch.zeros(3, 1, 1, dtype=torch.uint8, device=device), orientation)


def turn(pixels: Tensor, orientation: int) -> Tensor:
    """uint8 [3, height, width] as stored, contiguous, turned by an EXIF orientation from 2 to 8."""
    swap, flip_rows, flip_columns = TURNS[orientation]
    _, height, width = pixels.shape
    out = pixels.new_empty(3, width, height) if swap else torch.empty_like(pixels)
    tiles = triton.cdiv(height, TILE["BLOCK_LINES"]) * triton.cdiv(width, TILE["BLOCK"])
    turn_kernel[tiles, 3](pixels, out, height, width, int(flip_rows), int(flip_columns), SWAP=swap, **TILE)
    return out
