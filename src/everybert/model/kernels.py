"""Fused kernels for CUDA in half precision: attention over ragged batches, bias + GELU, and residual + LayerNorm.

Written in Triton and used only if it is installed; the same in plain torch is in attention.py, encoder.py and fp8.py.
Library attention reads and writes Q, K, V and their gradients several times, and the exact GELU is limited by the
arithmetic of erf. Here both cost one pass over memory (figures for one H200 and BERT-base: docs/LOG.md).

Legend: T tokens, B sequences, H hidden, A heads, D head size, n length of a sequence, I inner width, N row width.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from everybert.model.graphs import on_device
from everybert.model.linear import Rounded

LOG2E = 1.4426950408889634
TILE = 64
"""Tokens in a tile of attention: with the warps and stages below, the fastest of a dozen on an H200."""


def _launch(kernel: Any, grid: tuple[int, ...], tensors: Sequence[Any], numbers: Sequence[Any], **options: int) -> None:
    """Start a kernel on the device of its tensors: Triton takes the current device, which may be another."""
    with on_device(tensors[0].device):
        kernel[grid](*tensors, *numbers, **options)


# ── attention ────────────────────────────────────────────────────────────────────────────────────────────────
# One program computes a tile of queries (or keys) of one head of one sequence. Scores are in base 2, since exp2 is a
# machine instruction. Q, K and V are read from the projection's output, (T, 3, A, D), and their gradient is written in
# that layout, so nothing is copied.


@triton.jit
def _tile(start, head, at, n, base, stride, D: constexpr):
    """Rows `at` of one sequence and head: (rows, D), zeros beyond its end."""
    d = tl.arange(0, D)
    where = (start + at).to(tl.int64)[:, None] * stride + head * D + d[None]
    return tl.load(base + where, mask=(at < n)[:, None], other=0.0)


@triton.jit
def _put(x, start, head, at, n, base, stride, D: constexpr):
    d = tl.arange(0, D)
    where = (start + at).to(tl.int64)[:, None] * stride + head * D + d[None]
    tl.store(base + where, x.to(base.dtype.element_ty), mask=(at < n)[:, None])


@triton.jit
def _attention_forward(qkv, out, lse, offsets, scale, T, A: constexpr, D: constexpr, R: constexpr, S: constexpr):
    b, head = tl.program_id(1), tl.program_id(2)
    start = tl.load(offsets + b)
    n = tl.load(offsets + b + 1) - start
    at = tl.program_id(0) * R + tl.arange(0, R)
    if tl.program_id(0) * R >= n:
        return
    W = A * D
    q = _tile(start, head, at, n, qkv, 3 * W, D)
    peak = tl.full((R,), float("-inf"), tl.float32)
    total = tl.zeros((R,), tl.float32)
    mixed = tl.zeros((R, D), tl.float32)
    for first in range(0, n, S):  # online softmax (Milakov & Gimelshein 2018; Dao et al. 2022)
        seen = first + tl.arange(0, S)
        k = _tile(start, head, seen, n, qkv + W, 3 * W, D)
        v = _tile(start, head, seen, n, qkv + 2 * W, 3 * W, D)
        s = tl.where((seen < n)[None], tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        higher = tl.maximum(peak, tl.max(s, 1))
        p = tl.exp2(s - higher[:, None])
        shrink = tl.exp2(peak - higher)
        total = total * shrink + tl.sum(p, 1)
        mixed = tl.dot(p.to(v.dtype), v, mixed * shrink[:, None])
        peak = higher
    _put(mixed / total[:, None], start, head, at, n, out, W, D)
    tl.store(lse + head * T + start + at, peak + tl.log2(total), mask=at < n)


@triton.jit
def _attention_backward_q(
    qkv, out, lse, grad, dqkv, delta, offsets, scale, T, A: constexpr, D: constexpr, R: constexpr, S: constexpr
):
    b, head = tl.program_id(1), tl.program_id(2)
    start = tl.load(offsets + b)
    n = tl.load(offsets + b + 1) - start
    at = tl.program_id(0) * R + tl.arange(0, R)
    if tl.program_id(0) * R >= n:
        return
    W = A * D
    q = _tile(start, head, at, n, qkv, 3 * W, D)
    g = _tile(start, head, at, n, grad, W, D)
    o = _tile(start, head, at, n, out, W, D)
    own = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    tl.store(delta + head * T + start + at, own, mask=at < n)
    level = tl.load(lse + head * T + start + at, mask=at < n, other=float("inf"))
    dq = tl.zeros((R, D), tl.float32)
    for first in range(0, n, S):
        seen = first + tl.arange(0, S)
        k = _tile(start, head, seen, n, qkv + W, 3 * W, D)
        v = _tile(start, head, seen, n, qkv + 2 * W, 3 * W, D)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * scale - level[:, None])
        ds = p * (tl.dot(g, tl.trans(v)) - own[:, None])
        dq = tl.dot(tl.where((seen < n)[None], ds, 0.0).to(k.dtype), k, dq)
    _put(dq * (scale * 0.6931471805599453), start, head, at, n, dqkv, 3 * W, D)


@triton.jit
def _attention_backward_kv(
    qkv, lse, grad, dqkv, delta, offsets, scale, T, A: constexpr, D: constexpr, R: constexpr, S: constexpr
):
    b, head = tl.program_id(1), tl.program_id(2)
    start = tl.load(offsets + b)
    n = tl.load(offsets + b + 1) - start
    at = tl.program_id(0) * R + tl.arange(0, R)
    if tl.program_id(0) * R >= n:
        return
    W = A * D
    k = _tile(start, head, at, n, qkv + W, 3 * W, D)
    v = _tile(start, head, at, n, qkv + 2 * W, 3 * W, D)
    dk = tl.zeros((R, D), tl.float32)
    dv = tl.zeros((R, D), tl.float32)
    for first in range(0, n, S):
        seen = first + tl.arange(0, S)
        q = _tile(start, head, seen, n, qkv, 3 * W, D)
        g = _tile(start, head, seen, n, grad, W, D)
        level = tl.load(lse + head * T + start + seen, mask=seen < n, other=float("inf"))
        own = tl.load(delta + head * T + start + seen, mask=seen < n, other=0.0)
        p = tl.exp2(tl.dot(k, tl.trans(q)) * scale - level[None])  # (keys, queries)
        dv = tl.dot(p.to(g.dtype), g, dv)
        ds = p * (tl.dot(v, tl.trans(g)) - own[None])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    _put(dk * (scale * 0.6931471805599453), start, head, at, n, dqkv + W, 3 * W, D)
    _put(dv, start, head, at, n, dqkv + 2 * W, 3 * W, D)


@torch.library.custom_op("everybert::attention", mutates_args=())
def attention(qkv_T3AD: Tensor, offsets_B1: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """softmax(Q Kᵀ / √D) V within each sequence: (T, A, D), and the log₂-sum (A, T) that the backward pass needs."""
    T, _, A, D = qkv_T3AD.shape
    out_TAD = qkv_T3AD.new_empty(T, A, D)
    lse_AT = torch.empty(A, T, device=qkv_T3AD.device, dtype=torch.float32)
    grid = (triton.cdiv(longest, TILE), len(offsets_B1) - 1, A)
    scale = D**-0.5 * LOG2E
    tensors, numbers = (qkv_T3AD, out_TAD, lse_AT, offsets_B1), (scale, T, A, D, TILE, TILE)
    _launch(_attention_forward, grid, tensors, numbers, num_warps=4, num_stages=3)
    return out_TAD, lse_AT


@attention.register_fake
def _(qkv_T3AD, offsets_B1, longest):
    T, _, A, D = qkv_T3AD.shape
    return qkv_T3AD.new_empty(T, A, D), qkv_T3AD.new_empty(A, T, dtype=torch.float32)


@torch.library.custom_op("everybert::attention_backward", mutates_args=())
def attention_backward(
    grad_TAD: Tensor, qkv_T3AD: Tensor, out_TAD: Tensor, lse_AT: Tensor, offsets_B1: Tensor, longest: int
) -> Tensor:
    """The gradient of Q, K and V together, (T, 3, A, D)."""
    T, _, A, D = qkv_T3AD.shape
    dqkv = torch.empty_like(qkv_T3AD)
    grad_TAD = grad_TAD.contiguous()
    delta_AT = torch.empty_like(lse_AT)
    grid = (triton.cdiv(longest, TILE), len(offsets_B1) - 1, A)
    scale = D**-0.5 * LOG2E
    tensors = (qkv_T3AD, out_TAD, lse_AT, grad_TAD, dqkv, delta_AT, offsets_B1)
    _launch(_attention_backward_q, grid, tensors, (scale, T, A, D, TILE, TILE), num_warps=4, num_stages=3)
    inputs = (qkv_T3AD, lse_AT, grad_TAD, dqkv, delta_AT, offsets_B1)
    _launch(_attention_backward_kv, grid, inputs, (scale, T, A, D, TILE, TILE // 2), num_warps=4, num_stages=3)
    return dqkv


@attention_backward.register_fake
def _(grad_TAD, qkv_T3AD, out_TAD, lse_AT, offsets_B1, longest):
    return torch.empty_like(qkv_T3AD)


def _keep_attention(ctx, inputs, output):
    qkv_T3AD, offsets_B1, longest = inputs
    ctx.save_for_backward(qkv_T3AD, offsets_B1, *output)
    ctx.longest = longest


def _attention_gradient(ctx, grad_TAD, _):
    qkv_T3AD, offsets_B1, out_TAD, lse_AT = ctx.saved_tensors
    return attention_backward(grad_TAD, qkv_T3AD, out_TAD, lse_AT, offsets_B1, ctx.longest), None, None


attention.register_autograd(_attention_gradient, setup_context=_keep_attention)


# ── bias + GELU ──────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _normal(x):
    """Φ(x), and √(2π)·φ(x) = exp(−x²/2): erf by Abramowitz & Stegun 7.1.26, absolute error below 1.5e-7."""
    a = tl.abs(x) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.3275911 * a)
    e = tl.exp(-a * a)
    tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    half = 0.5 * tail * e
    return tl.where(x >= 0, 1.0 - half, half), e


@triton.jit
def _gelu_forward(x, bias, y, T, N, R: constexpr, C: constexpr):
    r = tl.program_id(0) * R + tl.arange(0, R)
    c = tl.program_id(1) * C + tl.arange(0, C)
    inside = (r < T)[:, None] & (c < N)[None]
    at = r.to(tl.int64)[:, None] * N + c[None]
    b = tl.load(bias + c, mask=c < N, other=0.0).to(tl.float32)
    z = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + b[None]
    below, _ = _normal(z)
    tl.store(y + at, (z * below).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _gelu_backward(x, bias, grad, dx, dbias, T, N, STEPS: constexpr, R: constexpr, C: constexpr):
    """d/dz z·Φ(z) = Φ(z) + z·φ(z); each program also sums its rows for the bias."""
    c = tl.program_id(1) * C + tl.arange(0, C)
    b = tl.load(bias + c, mask=c < N, other=0.0).to(tl.float32)
    total = tl.zeros((C,), tl.float32)
    for i in range(STEPS):
        r = (tl.program_id(0) * STEPS + i) * R + tl.arange(0, R)
        inside = (r < T)[:, None] & (c < N)[None]
        at = r.to(tl.int64)[:, None] * N + c[None]
        z = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + b[None]
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        below, e = _normal(z)
        d = g * (below + z * e * 0.3989422804014327)
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask=inside)
        total += tl.sum(d, 0)
    tl.store(dbias + tl.program_id(0).to(tl.int64) * N + c, total, mask=c < N)


@torch.library.custom_op("everybert::bias_gelu", mutates_args=())
def bias_gelu(x_TI: Tensor, bias_I: Tensor) -> Tensor:
    """gelu(x + bias), exact, in one pass over memory."""
    T, N = x_TI.shape
    y_TI = torch.empty_like(x_TI)
    grid = (triton.cdiv(T, 2), triton.cdiv(N, 1024))
    _launch(_gelu_forward, grid, (x_TI, bias_I, y_TI), (T, N, 2, 1024), num_warps=4)
    return y_TI


@bias_gelu.register_fake
def _(x_TI, bias_I):
    return torch.empty_like(x_TI)


@torch.library.custom_op("everybert::bias_gelu_backward", mutates_args=())
def bias_gelu_backward(grad_TI: Tensor, x_TI: Tensor, bias_I: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the bias."""
    T, N = x_TI.shape
    dx_TI = torch.empty_like(x_TI)
    steps, rows, columns = 32, 4, 1024
    grid = (triton.cdiv(T, steps * rows), triton.cdiv(N, columns))
    partial = torch.empty(grid[0], N, device=x_TI.device, dtype=torch.float32)
    tensors = (x_TI, bias_I, grad_TI.contiguous(), dx_TI, partial)
    _launch(_gelu_backward, grid, tensors, (T, N, steps, rows, columns), num_warps=4)
    return dx_TI, partial.sum(0).to(bias_I.dtype)


@bias_gelu_backward.register_fake
def _(grad_TI, x_TI, bias_I):
    return torch.empty_like(x_TI), torch.empty_like(bias_I)


bias_gelu.register_autograd(
    lambda ctx, grad_TI: bias_gelu_backward(grad_TI, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


# ── residual + LayerNorm, and rounding for fp8; for inference ────────────────────────────────────────────────


@triton.jit
def _put_row(z, rows, scale, at, inside):
    """Store a row as E4M3 numbers, whose largest is 448, and its scale."""
    peak = tl.maximum(tl.max(tl.abs(tl.where(inside, z, 0.0)), 0), 1e-20)
    tl.store(scale + tl.program_id(0), peak / 448.0)
    tl.store(rows + at, (z * (448.0 / peak)).to(rows.dtype.element_ty), mask=inside)


@triton.jit
def _add_norm(x, added, weight, bias, y, rows, scale, H, eps, C: constexpr):
    """A row per program: the sum is rounded to the stored type, then normalised in fp32. Bias and rows may be None."""
    c = tl.arange(0, C)
    inside = c < H
    at = tl.program_id(0).to(tl.int64) * H + c
    z = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    z += tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
    z = z.to(y.dtype.element_ty).to(tl.float32)
    mean = tl.sum(z, 0) / H
    off = tl.where(inside, z - mean, 0.0)
    z = off * tl.rsqrt(tl.sum(off * off, 0) / H + eps)
    z *= tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        z += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, z.to(y.dtype.element_ty), mask=inside)
    if rows is not None:
        _put_row(z, rows, scale, at, inside)


@torch.library.custom_op("everybert::add_norm", mutates_args=())
def add_norm(x_TH: Tensor, added_TH: Tensor, weight_H: Tensor, bias_H: Tensor | None, eps: float) -> Tensor:
    """LN(x + added) in one pass over memory; it has no gradient."""
    y_TH = torch.empty_like(x_TH)
    _by_row(_add_norm, (x_TH, added_TH, weight_H, bias_H, y_TH, None, None), eps)
    return y_TH


@add_norm.register_fake
def _(x_TH, added_TH, weight_H, bias_H, eps):
    return torch.empty_like(x_TH)


@triton.jit
def _round_row(x, rows, scale, N, GELU: constexpr, C: constexpr):
    c = tl.arange(0, C)
    inside = c < N
    at = tl.program_id(0).to(tl.int64) * N + c
    z = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if GELU:  # the tanh form, as x·σ: half the arithmetic of erf
        z /= 1.0 + tl.exp2(-2.302208198 * z * (1.0 + 0.044715 * z * z))
    _put_row(z, rows, scale, at, inside)


def round_rows(x_TN: Tensor, gelu: bool = False) -> Rounded:
    """x or gelu(x), rounded."""
    rows_TN = torch.empty_like(x_TN, dtype=torch.float8_e4m3fn)
    scale_T1 = x_TN.new_empty(len(x_TN), 1, dtype=torch.float32)
    _by_row(_round_row, (x_TN, rows_TN, scale_T1), gelu)
    return Rounded(rows_TN, scale_T1)


def add_norm_rows(x_TH: Tensor, added_TH: Tensor, norm: Any) -> Rounded:
    """LN(x + added), as it is and rounded."""
    y_TH, rows_TH = torch.empty_like(x_TH), torch.empty_like(x_TH, dtype=torch.float8_e4m3fn)
    scale_T1 = x_TH.new_empty(len(x_TH), 1, dtype=torch.float32)
    _by_row(_add_norm, (x_TH, added_TH, norm.weight, norm.bias, y_TH, rows_TH, scale_T1), norm.eps)
    return Rounded(rows_TH, scale_T1, y_TH)


def _by_row(kernel: Any, tensors: Sequence[Any], *numbers: Any) -> None:
    """Start a kernel with one program per row."""
    T, N = tensors[0].shape
    columns = triton.next_power_of_2(N)
    _launch(kernel, (T,), tensors, (N, *numbers, columns), num_warps=4 if columns <= 2048 else 8)
