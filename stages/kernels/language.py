"""Triton kernels for what language models and vision towers do between matrix products, and their launches.

In PyTorch each of these is five to ten passes over memory. All round as transformers' own code does, step by step, so
that answers in half precision are the same; only a norm's sum is in another order.

Sizes that differ from batch to batch are no constants, so a kernel is compiled once for each model.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NORM_BLOCK_SIZE = 4096  # values of a program, or one row if that is longer
ROTATE_BLOCK_SIZE = 2048  # of each half
GATE_BLOCK_SIZE = 4096
GATE_ALIGNED_TO = 16  # so that Triton knows that it can load several values at once


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, rows, EPS: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """out = weight · x / sqrt(mean(x²) + EPS), the mean over each row (Zhang and Sennrich, "Root Mean Square Layer
    Normalization", 2019). x, out: [rows, N]. weight: [N]. Grid: (blocks of BLOCK_M rows)."""
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    mask = (offs_m < rows)[:, None] & (offs_n < N)[None, :]
    offs = offs_m[:, None] * N + offs_n[None, :]
    x = tl.load(x_ptr + offs, mask=mask, other=0.0)
    dtype: tl.constexpr = x.dtype
    exact = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(exact * exact, axis=1) / N + EPS)
    normed = (exact * scale[:, None]).to(dtype).to(tl.float32)
    weight = tl.load(weight_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs, (normed * weight[None, :]).to(dtype), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def layer_norm_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, rows,
    EPS: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out = F.layer_norm(x, [N], weight, bias, EPS). The rest is as in rms_norm_kernel."""
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    columns = (offs_n < N)[None, :]
    mask = (offs_m < rows)[:, None] & columns
    offs = offs_m[:, None] * N + offs_n[None, :]
    x = tl.load(x_ptr + offs, mask=mask, other=0.0)
    exact = x.to(tl.float32)
    centered = tl.where(columns, exact - (tl.sum(exact, axis=1) / N)[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centered * centered, axis=1) / N + EPS)
    weight = tl.load(weight_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
    normed = centered * scale[:, None] * weight[None, :] + bias[None, :]
    tl.store(out_ptr + offs, normed.to(x.dtype), mask=mask)


ROTATE_SIZES = [
    "rows",
    "tokens",
    "heads",
    "x_batch",
    "x_token",
    "x_head",
    "out_batch",
    "out_token",
    "out_head",
]


@triton.jit(do_not_specialize=[*ROTATE_SIZES, "turn_batch", "turn_token"])
def rotate_kernel(
    x_ptr, cos_ptr, sin_ptr, out_ptr,
    rows, tokens, heads,
    x_batch, x_token, x_head, out_batch, out_token, out_head, turn_batch, turn_token,
    HALF: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out = x · cos + turned · sin, where turned is [-second half, first half] of each head (Su et al., "RoFormer:
    Enhanced Transformer with Rotary Position Embedding", 2021). Each product is rounded to the dtype of cos.

    x, out: heads of 2 · HALF values, which are contiguous, with strides in units of a head for batch, token and head.
    cos, sin: [batch, token] of a head's values, likewise. rows: batch · tokens · heads. Grid: (blocks of BLOCK_M rows).
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    mask = (row < rows)[:, None] & (offs_n < HALF)[None, :]
    head, place = row % heads, row // heads
    token, batch = place % tokens, place // tokens
    x_ptrs = (
        x_ptr + (batch * x_batch + token * x_token + head * x_head)[:, None] * (2 * HALF) + offs_n[None, :]
    )
    out_offs = (batch * out_batch + token * out_token + head * out_head)[:, None] * (2 * HALF) + offs_n[
        None, :
    ]
    turn_offs = (batch * turn_batch + token * turn_token)[:, None] * (2 * HALF) + offs_n[None, :]
    first, second = tl.load(x_ptrs, mask=mask, other=0.0), tl.load(x_ptrs + HALF, mask=mask, other=0.0)
    dtype: tl.constexpr = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    blended = blend(first, -second, cos_ptr + turn_offs, sin_ptr + turn_offs, mask)
    tl.store(out_ptr + out_offs, blended.to(dtype), mask=mask)
    blended = blend(second, first, cos_ptr + turn_offs + HALF, sin_ptr + turn_offs + HALF, mask)
    tl.store(out_ptr + out_offs + HALF, blended.to(dtype), mask=mask)


@triton.jit
def blend(x, turned, cos_ptrs, sin_ptrs, mask):
    cos, sin = tl.load(cos_ptrs, mask=mask, other=0.0), tl.load(sin_ptrs, mask=mask, other=0.0)
    dtype: tl.constexpr = cos.dtype
    kept = (x * cos.to(tl.float32)).to(dtype).to(tl.float32)
    return kept + (turned * sin.to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["units"])
def gate_kernel(gate_ptr, x_ptr, units, UNIT: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """gate = silu(gate) · x, in place. gate, x: contiguous, units · UNIT values. Grid: (blocks of BLOCK_SIZE values)."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offs < units.to(tl.int64) * UNIT
    gate = tl.load(gate_ptr + offs, mask=mask, other=0.0)
    dtype: tl.constexpr = gate.dtype
    exact = gate.to(tl.float32)
    opened = (exact / (1 + tl.exp(-exact))).to(dtype).to(tl.float32)
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(gate_ptr + offs, (opened * x).to(dtype), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The RMS norm of the last dimension of a contiguous tensor."""
    out = torch.empty_like(x)
    grid, sizes = divide_rows(x)
    rms_norm_kernel[grid](x, weight, out, x.numel() // sizes["N"], EPS=eps, **sizes)
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The layer norm of the last dimension of a contiguous tensor."""
    out = torch.empty_like(x)
    grid, sizes = divide_rows(x)
    layer_norm_kernel[grid](x, weight, bias, out, x.numel() // sizes["N"], EPS=eps, **sizes)
    return out


def divide_rows(x: Tensor) -> tuple[tuple[int], dict[str, int]]:
    """The grid of a norm's kernel, and its sizes."""
    width = x.shape[-1]
    block_n = triton.next_power_of_2(width)
    block_m = max(NORM_BLOCK_SIZE // block_n, 1)
    sizes = {"N": width, "BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": 8 if block_n > 1024 else 4}
    return (triton.cdiv(x.numel() // width, block_m),), sizes


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [batch, tokens, heads, head size] in any order in memory, in which the result is, too. cos, sin: [batch or 1,
    tokens, head size], in the same order as each other."""
    batch, tokens, heads, size = x.shape
    rows, half, out = batch * tokens * heads, size // 2, torch.empty_like(x)
    block_n = triton.next_power_of_2(half)
    block_m = max(ROTATE_BLOCK_SIZE // block_n, 1)
    turns = [0 if len(cos) == 1 else cos.stride(0), cos.stride(1)]
    strides = [stride // size for stride in (*x.stride()[:3], *out.stride()[:3], *turns)]
    rotate_kernel[(triton.cdiv(rows, block_m),)](
        x, cos, sin, out, rows, tokens, heads, *strides, HALF=half, BLOCK_M=block_m, BLOCK_N=block_n,
        num_warps=4,
        enable_fp_fusion=False,  # each product is rounded by itself
    )  # fmt: skip
    return out


def gate(opened: Tensor, x: Tensor) -> Tensor:
    """F.silu(opened) · x, in the memory of the first. Both are contiguous, and have a multiple of GATE_ALIGNED_TO
    values."""
    count = opened.numel()
    gate_kernel[(triton.cdiv(count, GATE_BLOCK_SIZE),)](
        opened, x, count // GATE_ALIGNED_TO, UNIT=GATE_ALIGNED_TO, BLOCK_SIZE=GATE_BLOCK_SIZE, num_warps=8
    )
    return opened
