"""Triton kernels for layers that need one pixel or one row at a time.
convolution.py explains the layout of maps."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from stages.kernels.convolution import load_width


# CLAMP is not a global constant: with one, Triton's digest of a kernel that calls this depends on which of them
# the process used first (3.6 to 3.9), so other processes compile it again.
@triton.jit
def gelu(x, CLAMP: tl.constexpr = 4.2):
    """F.gelu(x) = x · Φ(x), with Φ(x) ≈ 1/2 + an odd polynomial in x, x clamped to ±CLAMP.

    A minimax fit of the product: its error is at most 2e-5, and 1e-5 · x beyond the clamp.
    erf takes twice as long.
    """
    clamped = tl.minimum(tl.maximum(x, -CLAMP), CLAMP)
    square = clamped * clamped
    polynomial = 4.9238127e-11 * square - 4.7956572e-9
    polynomial = polynomial * square + 2.0724750e-7
    polynomial = polynomial * square - 5.2895621e-6
    polynomial = polynomial * square + 8.9835921e-5
    polynomial = polynomial * square - 1.0864589e-3
    polynomial = polynomial * square + 9.7409403e-3
    polynomial = polynomial * square - 6.6222079e-2
    polynomial = polynomial * square + 0.39883459
    return x * (0.5 + clamped * polynomial)


@triton.jit(do_not_specialize=["height", "width", "num_tiles"])
def squeeze_excitation_kernel(
    sums_ptr,
    w1_ptr,
    b1_ptr,
    w2_ptr,
    b2_ptr,
    gates_ptr,
    widths_ptr,
    num_tiles,
    height,
    width,
    CHANNELS: tl.constexpr,
    SQUEEZED: tl.constexpr,
    SLOPE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The gates of a squeeze-and-excitation block, from the sums over the tiles of each image.

    gates = clamp(SLOPE · (w2 @ relu(w1 @ mean + b1) + b2) + 0.5, 0, 1), + 1 with RESIDUAL (then x · gate is x
    + x · gate), where mean = sums.sum(dim=1) / (height · width), with an image's own width where widths are
    given.

    sums: float32 [N, num_tiles, CHANNELS].
    w1, w2: float32 [SQUEEZED, CHANNELS] (w2 transposed).
    b1: float32 [SQUEEZED], b2: float32 [CHANNELS].
    gates: float32 [N, CHANNELS].
    Grid: (N,).
    """
    image = tl.program_id(0)
    offs_c = tl.arange(0, BLOCK_C)
    c_mask = offs_c < CHANNELS
    total = tl.zeros([BLOCK_T, BLOCK_C], dtype=tl.float32)
    for start in range(0, num_tiles, BLOCK_T):
        offs_t = start + tl.arange(0, BLOCK_T)
        mask = (offs_t < num_tiles)[:, None] & c_mask[None, :]
        total += tl.load(
            sums_ptr + (image * num_tiles + offs_t)[:, None] * CHANNELS + offs_c[None, :],
            mask=mask,
            other=0.0,
        )
    valid_width = load_width(widths_ptr, image, width)
    mean = tl.sum(total, axis=0) / (height * valid_width)
    gate = tl.load(b2_ptr + offs_c, mask=c_mask, other=0.0)
    for start in range(0, SQUEEZED, BLOCK_S):
        offs_s = start + tl.arange(0, BLOCK_S)
        offs = offs_s[:, None] * CHANNELS + offs_c[None, :]
        mask = (offs_s < SQUEEZED)[:, None] & c_mask[None, :]
        hidden = tl.sum(tl.load(w1_ptr + offs, mask=mask, other=0.0) * mean[None, :], axis=1)
        hidden = tl.maximum(hidden + tl.load(b1_ptr + offs_s, mask=offs_s < SQUEEZED, other=0.0), 0.0)
        gate += tl.sum(tl.load(w2_ptr + offs, mask=mask, other=0.0) * hidden[:, None], axis=0)
    gate = tl.minimum(tl.maximum(gate * SLOPE + 0.5, 0.0), 1.0)
    if RESIDUAL:
        gate += 1.0
    tl.store(gates_ptr + image * CHANNELS + offs_c, gate, mask=c_mask)


@triton.jit(do_not_specialize=["num_pixels"])
def pointwise_mlp_kernel(
    x_ptr,
    gates_ptr,
    w1_ptr,
    b1_ptr,
    w2_ptr,
    b2_ptr,
    out_ptr,
    num_pixels,
    IN_CHANNELS: tl.constexpr,
    HIDDEN: tl.constexpr,
    OUT_CHANNELS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """out = w2ᵀ gelu(w1ᵀ (x · gates) + b1) + b2, + x · gates with RESIDUAL, for each pixel.

    x: float16 [N, num_pixels, IN_CHANNELS].
    gates: None, or float32 [N, IN_CHANNELS].
    w1: float16 [IN_CHANNELS, HIDDEN], b1: float32 [HIDDEN], w2: float16 [HIDDEN, OUT_CHANNELS], b2: float32
        [OUT_CHANNELS].
    out: float16 [N, num_pixels, OUT_CHANNELS].

    Triton's tensors have powers of two as their sizes, and the layers are three times a power of two wide, so
    channels are split into blocks of BLOCK_IN and BLOCK_OUT. All inputs and accumulators stay in registers;
    hidden units are computed BLOCK_HIDDEN at a time.
    Grid: (blocks of BLOCK_M pixels, N).
    """
    image, start_m = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK_M
    offs_m = tl.arange(0, BLOCK_M)
    mask = (start_m + offs_m < num_pixels)[:, None]
    x_ptr += (image * num_pixels + start_m) * IN_CHANNELS
    out_ptr += (image * num_pixels + start_m) * OUT_CHANNELS
    offs_in, offs_out = tl.arange(0, BLOCK_IN), tl.arange(0, BLOCK_OUT)
    xs, accs = (), ()
    for i in tl.static_range(IN_CHANNELS // BLOCK_IN):
        offs_c = i * BLOCK_IN + offs_in
        x = tl.load(x_ptr + offs_m[:, None] * IN_CHANNELS + offs_c[None, :], mask=mask, other=0.0)
        if gates_ptr is not None:
            x = (x.to(tl.float32) * tl.load(gates_ptr + image * IN_CHANNELS + offs_c)[None, :]).to(tl.float16)
        xs += (x,)
    for i in tl.static_range(OUT_CHANNELS // BLOCK_OUT):
        acc = (
            tl.zeros([BLOCK_M, BLOCK_OUT], dtype=tl.float32)
            + tl.load(b2_ptr + i * BLOCK_OUT + offs_out)[None, :]
        )
        if RESIDUAL:  # then outputs and inputs have the same blocks
            acc += xs[i].to(tl.float32)
        accs += (acc,)
    for start_hidden in tl.range(0, HIDDEN, BLOCK_HIDDEN, num_stages=2):
        offs_hidden = start_hidden + tl.arange(0, BLOCK_HIDDEN)
        hidden = tl.zeros([BLOCK_M, BLOCK_HIDDEN], dtype=tl.float32) + tl.load(b1_ptr + offs_hidden)[None, :]
        for i in tl.static_range(IN_CHANNELS // BLOCK_IN):
            hidden = tl.dot(
                xs[i],
                tl.load(w1_ptr + (i * BLOCK_IN + offs_in)[:, None] * HIDDEN + offs_hidden[None, :]),
                hidden,
            )
        hidden = gelu(hidden).to(tl.float16)
        updated = ()
        for i in tl.static_range(OUT_CHANNELS // BLOCK_OUT):
            w2 = tl.load(w2_ptr + offs_hidden[:, None] * OUT_CHANNELS + (i * BLOCK_OUT + offs_out)[None, :])
            updated += (tl.dot(hidden, w2, accs[i]),)
        accs = updated
    for i in tl.static_range(OUT_CHANNELS // BLOCK_OUT):
        out_ptrs = out_ptr + offs_m[:, None] * OUT_CHANNELS + (i * BLOCK_OUT + offs_out)[None, :]
        tl.store(out_ptrs, accs[i].to(tl.float16), mask=mask)


@triton.jit(do_not_specialize=["num_pixels"])
def scale_channels_kernel(
    x_ptr, gates_ptr, num_pixels, CHANNELS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr
):
    """x *= gates, in place. x: float16 [N, num_pixels, CHANNELS]. gates: float32 [N, CHANNELS].

    Grid: (blocks of BLOCK_M pixels, N).
    """
    image = tl.program_id(1).to(tl.int64)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_c = tl.arange(0, BLOCK_C)
    mask = (offs_m < num_pixels)[:, None] & (offs_c < CHANNELS)[None, :]
    x_ptrs = x_ptr + image * num_pixels * CHANNELS + offs_m[:, None] * CHANNELS + offs_c[None, :]
    gate = tl.load(gates_ptr + image * CHANNELS + offs_c, mask=offs_c < CHANNELS, other=0.0)
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(x_ptrs, (x * gate[None, :]).to(tl.float16), mask=mask)


@triton.jit(do_not_specialize=["M"])
def pointwise_linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    M,
    K: tl.constexpr,
    N: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out = x @ weight + bias, then gelu with GELU, then + residual.

    x: float16 [M, K]. weight: float16 [K, N]. bias: float32 [N]. residual: None, or float16 [M, N].
    out: float16 [M, N].
    K is a multiple of BLOCK_K, and N of BLOCK_N. Programs that read the same rows of x have adjacent numbers,
    so that x is read from memory once. Grid: (blocks of M · blocks of N,).
    """
    num_pid_n: tl.constexpr = N // BLOCK_N
    start_m, offs_m = (tl.program_id(0) // num_pid_n).to(tl.int64) * BLOCK_M, tl.arange(0, BLOCK_M)
    mask = (offs_m < M - start_m)[:, None]
    x_ptr += start_m * K
    offs_n = tl.program_id(0) % num_pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start_k in range(0, K, BLOCK_K):
        offs_k = start_k + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + offs_m[:, None] * K + offs_k[None, :], mask=mask, other=0.0)
        acc = tl.dot(x, tl.load(weight_ptr + offs_k[:, None] * N + offs_n[None, :]), acc)
    acc += tl.load(bias_ptr + offs_n)[None, :]
    if GELU:
        acc = gelu(acc)
    offs = offs_m[:, None] * N + offs_n[None, :]
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + start_m * N + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + start_m * N + offs, acc.to(tl.float16), mask=mask)


@triton.jit
def argmax_softmax_kernel(logits_ptr, classes_ptr, probabilities_ptr, num_classes, BLOCK: tl.constexpr):
    """classes, probabilities = logits.argmax(dim=-1), logits.float().softmax(dim=-1).amax(dim=-1);
    the first of equal maxima.

    logits: float16 or float32 [rows, num_classes]. classes: int64 [rows]. probabilities: float32 [rows]. The
    row is read twice, the second time from the cache, so that each logit costs one exponential. Grid:
    (rows,).
    """
    # num_classes is specialized: where it is a multiple of 16, a thread reads 16 bytes at a time.
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * num_classes
    lanes = tl.arange(0, BLOCK)
    maxima = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    argmaxima = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, num_classes, BLOCK):
        offs = start + lanes
        logit = tl.load(logits_ptr + offs, mask=offs < num_classes, other=float("-inf")).to(tl.float32)
        argmaxima = tl.where(logit > maxima, offs, argmaxima)
        maxima = tl.maximum(maxima, logit)
    maximum = tl.max(maxima, axis=0)
    exp_sum = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, num_classes, BLOCK):
        offs = start + lanes
        logit = tl.load(logits_ptr + offs, mask=offs < num_classes, other=float("-inf")).to(tl.float32)
        exp_sum += tl.exp(logit - maximum)
    tl.store(
        classes_ptr + row, tl.min(tl.where(maxima == maximum, argmaxima, num_classes), axis=0).to(tl.int64)
    )
    tl.store(probabilities_ptr + row, 1.0 / tl.sum(exp_sum, axis=0))


@triton.jit(do_not_specialize=["steps"])
def attention_kernel(
    qkv_ptr,
    lengths_ptr,
    out_ptr,
    steps,
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out = softmax(q @ k.T · SCALE) @ v for each head of each line, over the line's own steps.

    qkv: float16 [N, steps, 3 · HEADS · HEAD_DIM]: queries, keys and values. lengths: int64 [N], at least 1.
    out: float16 [N, steps, HEADS · HEAD_DIM]. The softmax is computed block by block: Milakov and Gimelshein,
    "Online normalizer calculation for softmax", 2018. Grid: (blocks of BLOCK_M queries, HEADS, N).
    """
    head, line = tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths_ptr + line).to(tl.int32)
    lanes, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    d_mask = (offs_d < HEAD_DIM)[None, :]
    qkv_ptr += line * steps * 3 * HEADS * HEAD_DIM + head * HEAD_DIM
    offs_m = tl.program_id(0) * BLOCK_M + lanes
    mask = (offs_m < steps)[:, None] & d_mask
    q = tl.load(qkv_ptr + offs_m[:, None] * (3 * HEADS * HEAD_DIM) + offs_d[None, :], mask=mask, other=0.0)
    maxima = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    exp_sums = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for start in range(0, length, BLOCK_M):
        offs_n = start + lanes
        n_mask = offs_n < length
        offs = offs_n[:, None] * (3 * HEADS * HEAD_DIM) + offs_d[None, :]
        k = tl.load(qkv_ptr + HEADS * HEAD_DIM + offs, mask=n_mask[:, None] & d_mask, other=0.0)
        v = tl.load(qkv_ptr + 2 * HEADS * HEAD_DIM + offs, mask=n_mask[:, None] & d_mask, other=0.0)
        scores = tl.where(n_mask[None, :], tl.dot(q, k.T) * SCALE, float("-inf"))
        new_maxima = tl.maximum(maxima, tl.max(scores, axis=1))
        decay, weights = tl.exp(maxima - new_maxima), tl.exp(scores - new_maxima[:, None])
        exp_sums = exp_sums * decay + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(tl.float16), v, acc * decay[:, None])
        maxima = new_maxima
    out_ptrs = out_ptr + (line * steps + offs_m)[:, None] * (HEADS * HEAD_DIM) + head * HEAD_DIM
    tl.store(out_ptrs + offs_d[None, :], (acc / exp_sums[:, None]).to(tl.float16), mask=mask)


@triton.jit(do_not_specialize=["M"])
def add_layer_norm_kernel(
    hidden_ptr,
    update_ptr,
    weight_ptr,
    bias_ptr,
    total_ptr,
    normed_ptr,
    M,
    EPS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """total = hidden + update; normed = F.layer_norm(total, [N], weight, bias, EPS).

    hidden, update, total, normed: [M, N] of one dtype; weight, bias: [N]. The arithmetic is in float32, but
    total is rounded to its dtype before it is normalized, as PyTorch does. Grid: (blocks of BLOCK_M rows,).
    """
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    n_mask = offs_n < N
    mask = (offs_m < M)[:, None] & n_mask[None, :]
    offs = offs_m[:, None] * N + offs_n[None, :]
    x = tl.load(hidden_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(update_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    x = x.to(normed_ptr.dtype.element_ty)
    tl.store(total_ptr + offs, x, mask=mask)
    x = x.to(tl.float32)
    centered = tl.where(mask, x - (tl.sum(x, axis=1) / N)[:, None], 0.0)
    std = tl.sqrt(tl.sum(centered * centered, axis=1) / N + EPS)
    scale = tl.load(weight_ptr + offs_n, mask=n_mask, other=0.0)
    shift = tl.load(bias_ptr + offs_n, mask=n_mask, other=0.0)
    x = centered / std[:, None] * scale[None, :].to(tl.float32) + shift[None, :].to(tl.float32)
    tl.store(normed_ptr + offs, x.to(normed_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_elements"])
def add_bias_silu_kernel(x_ptr, bias_ptr, num_elements, CHANNELS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """x = F.silu(x + bias), in place. x: num_elements values with the channels last in memory.
    bias: [CHANNELS].

    x + bias is rounded to x's dtype before the SiLU, as PyTorch does. Grid: (blocks of BLOCK_SIZE elements,).
    """
    start, lanes = tl.program_id(0).to(tl.int64) * BLOCK_SIZE, tl.arange(0, BLOCK_SIZE)
    x_ptr += start
    # Triton reads several values at once only if they are adjacent and masked alike, and it must see that.
    vector: tl.constexpr = 8 if CHANNELS % 8 == 0 else 1
    offs_c = (tl.multiple_of((start % CHANNELS).to(tl.int32), vector) + lanes) % CHANNELS
    mask = lanes // vector < (num_elements - start) // vector
    x = tl.load(x_ptr + lanes, mask=mask, other=0.0)
    x = (x.to(tl.float32) + tl.load(bias_ptr + offs_c).to(tl.float32)).to(x.dtype).to(tl.float32)
    tl.store(x_ptr + lanes, (x * tl.sigmoid(x)).to(x_ptr.dtype.element_ty), mask=mask)
