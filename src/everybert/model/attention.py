"""Scaled dot-product attention over ragged batches: the only file that depends on the attention backend.

Attention(Q, K, V) = softmax(Q Kᵀ / √D) V, per head and within each sequence (Vaswani et al. 2017, eq. 1).

| case                                    | computation                                                    |
|-----------------------------------------|----------------------------------------------------------------|
| CUDA, bf16 or fp16                      | one kernel for the whole batch: the one in kernels.py if it    |
|                                         | applies, else varlen flash attention                           |
| CPU, or fp32                            | sequences of equal length share one rectangular SDPA call      |
| sliding window (long sequences)         | blocks of queries, each with the keys in its window: O(n·w)    |
| global tokens (Longformer)              | as above, with the global keys, and full rows for global queries |
| `watch` is given                        | the formula written out, one sequence at a time                |
| ONNX export (inference/export.py)        | one rectangle with a mask: all pairs, whatever the pattern     |

Legend: T tokens in the batch, B sequences, A heads, D head size, n tokens of one
sequence, w one-sided window.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from everybert.model.config import EncoderConfig
from everybert.model.ragged import Ragged

Watch = Callable[[str, Tensor], None]
Rotary = tuple[Tensor, Tensor]

HAS_TRITON = find_spec("triton") is not None

QUERY_BLOCK = 128
"""Queries per block of windowed attention: larger blocks mask away more keys, smaller ones need more calls."""


class Attention(nn.Module):
    """Multi-head self-attention: one projection to Q, K and V, attention per head, and an output projection."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = config.heads
        self.dropout = config.attention_dropout
        self.qkv = nn.Linear(width, 3 * width, bias=config.linear_bias)
        self.qkv_global = nn.Linear(width, 3 * width, bias=config.linear_bias) if config.global_attention else None
        self.output = nn.Linear(width, width, bias=config.linear_bias)

    def forward(
        self,
        x_TH: Tensor,
        batch: Ragged,
        window: int | None = None,
        rotary: Rotary | None = None,
        watch: Watch | None = None,
    ) -> Tensor:
        """(T, H) → (T, H)."""
        qkv_T3AD = self.qkv(x_TH).unflatten(-1, (3, self.heads, -1))
        q_TAD, k_TAD, v_TAD = qkv_T3AD.unbind(1)
        if rotary is not None:
            q_TAD, k_TAD = rotate(q_TAD, *rotary), rotate(k_TAD, *rotary)
        own_TAD = None  # Q, K and V of the global tokens (Longformer, §3.1)
        if self.qkv_global is not None and batch.globals_T is not None:
            own_TAD = self.qkv_global(x_TH).unflatten(-1, (3, self.heads, -1)).unbind(1)
        p = self.dropout if self.training else 0.0
        if (
            watch is None
            and own_TAD is None
            and window is None
            and rotary is None
            and p == 0.0
            and has_kernel(qkv_T3AD)
        ):
            from everybert.model.kernels import attention

            mixed_TAD, _ = attention(qkv_T3AD, batch.offsets_B1, batch.max_length)
        elif watch is not None:
            mixed_TAD = watched(q_TAD, k_TAD, v_TAD, batch, window, own_TAD, watch)
        else:
            mixed_TAD = attend(q_TAD, k_TAD, v_TAD, batch, window, own_TAD, p)
        return self.output(mixed_TAD.flatten(1))


def attend(
    q_TAD: Tensor,
    k_TAD: Tensor,
    v_TAD: Tensor,
    batch: Ragged,
    window: int | None = None,
    own_TAD: tuple[Tensor, ...] | None = None,
    p: float = 0.0,
) -> Tensor:
    """Attention within each sequence by the best backend available. `p` is the dropout on the probabilities."""
    if batch.attend is not None:
        return batch.attend(q_TAD, k_TAD, v_TAD, window, own_TAD)
    if own_TAD is None and flashable(q_TAD) and (window is None or _varlen_has_window()):
        return varlen(q_TAD, k_TAD, v_TAD, batch, window, p)
    if own_TAD is None and (window is None or max(batch.lengths) <= window + 1):
        return grouped(q_TAD, k_TAD, v_TAD, batch, p)
    return windowed(q_TAD, k_TAD, v_TAD, batch, window, own_TAD, p)


def rotate(x_TAD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021, eq. 34): rotate each pair of features by an angle ∝ the position."""
    x = x_TAD.float()
    one, two = x.chunk(2, dim=-1)
    return (x * cos_TD[:, None] + torch.cat((-two, one), dim=-1) * sin_TD[:, None]).to(x_TAD.dtype)


def fused(x: Tensor) -> bool:
    """Whether kernels.py can compute on this tensor: CUDA, half precision, Triton installed."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and x.shape[-1] % 16 == 0 and HAS_TRITON


def has_kernel(qkv_T3AD: Tensor) -> bool:
    """Whether the attention of kernels.py supports this head size: Triton's tiles are powers of two."""
    return fused(qkv_T3AD) and qkv_T3AD.shape[-1] in (16, 32, 64, 128)


def flashable(x: Tensor) -> bool:
    """Whether varlen flash attention supports this tensor: CUDA, half precision, a head size that 8 divides."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and x.shape[-1] % 8 == 0


# ── the whole batch in one kernel ────────────────────────────────────────────────────────────────────────────


def varlen(q_TAD: Tensor, k_TAD: Tensor, v_TAD: Tensor, batch: Ragged, window: int | None, p: float) -> Tensor:
    """Flash attention on the ragged batch as it is (CUDA, half precision)."""
    from torch.nn.attention.varlen import varlen_attn

    offsets, longest = batch.offsets_B1, batch.max_length
    side = -1 if window is None else window
    if p > 0.0:
        # varlen_attn has no dropout; the operator below it does.
        out_TAD, *_ = torch.ops.aten._flash_attention_forward(
            q_TAD,
            k_TAD,
            v_TAD,
            offsets,
            offsets,
            longest,
            longest,
            p,
            False,
            False,
            window_size_left=side,
            window_size_right=side,
        )
        return out_TAD
    more: dict[str, Any] = {} if window is None else {"window_size": (side, side)}
    return varlen_attn(q_TAD, k_TAD, v_TAD, offsets, offsets, longest, longest, **more)  # type: ignore[return-value]


@cache
def _varlen_has_window() -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return "window_size" in inspect.signature(varlen_attn).parameters


# ── sequences of equal length together ───────────────────────────────────────────────────────────────────────


def grouped(q_TAD: Tensor, k_TAD: Tensor, v_TAD: Tensor, batch: Ragged, p: float) -> Tensor:
    """One rectangular SDPA call per distinct length; rows of the same length are gathered first if not adjacent."""
    if batch.regroup is not None:
        q_TAD, k_TAD, v_TAD = (x.index_select(0, batch.regroup) for x in (q_TAD, k_TAD, v_TAD))
    sizes = [r.stop - r.start if isinstance(r, slice) else len(r) for _, r in batch.groups]
    pieces = []
    for (n, _), *parts in zip(batch.groups, *(x.split(sizes) for x in (q_TAD, k_TAD, v_TAD))):
        q, k, v = (x.unflatten(0, (-1, n)).transpose(1, 2) for x in parts)
        pieces.append(sdpa(q, k, v, dropout_p=p).transpose(1, 2).flatten(0, 1))
    out_TAD = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return out_TAD if batch.ungroup is None else out_TAD.index_select(0, batch.ungroup)


# ── sliding windows, with or without global tokens ───────────────────────────────────────────────────────────


def windowed(
    q_TAD: Tensor,
    k_TAD: Tensor,
    v_TAD: Tensor,
    batch: Ragged,
    window: int | None,
    own_TAD: tuple[Tensor, ...] | None,
    p: float,
) -> Tensor:
    """Token i attends to |i − j| ≤ w and to global tokens; global tokens attend to all (Beltagy et al. 2020)."""
    split = [batch.split(x) for x in (q_TAD, k_TAD, v_TAD)]
    chosen = batch.split(batch.globals_T) if own_TAD is not None and batch.globals_T is not None else None
    own = [batch.split(x) for x in own_TAD] if own_TAD is not None else None
    out = []
    for b, n in enumerate(batch.lengths):
        q, k, v = (x[b].transpose(0, 1)[None] for x in split)  # (1, A, n, D)
        at = chosen[b].nonzero().flatten() if chosen is not None else None
        mixed = _blocks(q, k, v, n if window is None else window, at if at is not None and len(at) else None, p)
        if own is not None and at is not None and len(at):
            q, k, v = (x[b].transpose(0, 1)[None] for x in own)
            mixed = mixed.index_copy(2, at, sdpa(q[:, :, at], k, v, dropout_p=p).to(mixed.dtype))
        out.append(mixed[0].transpose(0, 1))
    return torch.cat(out) if len(out) > 1 else out[0]


def _blocks(q: Tensor, k: Tensor, v: Tensor, w: int, at: Tensor | None, p: float) -> Tensor:
    """One sequence (1, A, n, D) in blocks of queries: memory grows with n·w, not n²."""
    n = q.shape[2]
    size = min(QUERY_BLOCK, n)
    band = _band(size, w, q.device)
    is_global = torch.zeros(n, dtype=torch.bool, device=q.device)
    if at is not None:
        is_global[at] = True
        k_global, v_global = k[:, :, at], v[:, :, at]
    pieces = []
    for start in range(0, n, size):
        stop = min(start + size, n)
        left, right = max(0, start - w), min(n, stop + w)
        shift = left - (start - w)
        mask = band[: stop - start, shift : shift + right - left]
        keys, values = k[:, :, left:right], v[:, :, left:right]
        if at is not None:  # global keys are appended once, and masked inside the window
            mask = torch.cat((mask & ~is_global[left:right], mask.new_ones(stop - start, len(at))), dim=1)
            keys, values = torch.cat((keys, k_global), dim=2), torch.cat((values, v_global), dim=2)
        pieces.append(sdpa(q[:, :, start:stop], keys, values, attn_mask=mask, dropout_p=p))
    return torch.cat(pieces, dim=2)


def _band(rows: int, w: int, device: torch.device) -> Tensor:
    """bool (rows, rows + 2w): whether query r attends to key c, counted from w before the block: 0 ≤ c − r ≤ 2w."""
    gap = torch.arange(rows + 2 * w, device=device)[None] - torch.arange(rows, device=device)[:, None]
    return (gap >= 0) & (gap <= 2 * w)


# ── the formula written out ──────────────────────────────────────────────────────────────────────────────────


def watched(
    q_TAD: Tensor,
    k_TAD: Tensor,
    v_TAD: Tensor,
    batch: Ragged,
    window: int | None,
    own_TAD: tuple[Tensor, ...] | None,
    watch: Watch,
) -> Tensor:
    """softmax(Q Kᵀ / √D) V step by step, passing each part of each sequence to `watch`. No dropout."""
    out = []
    scale = q_TAD.shape[-1] ** -0.5
    for b, n in enumerate(batch.lengths):
        q, k, v = (batch.split(x)[b].transpose(0, 1) for x in (q_TAD, k_TAD, v_TAD))  # (A, n, D)
        visible = torch.ones(n, n, dtype=torch.bool, device=q.device)
        if window is not None:
            at = torch.arange(n, device=q.device)
            visible = (at[:, None] - at[None]).abs() <= window
        chosen = batch.split(batch.globals_T)[b] if batch.globals_T is not None and own_TAD is not None else None
        if chosen is not None:
            visible = visible | chosen[None]
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(~visible, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        mixed = weights @ v
        if chosen is not None and own_TAD is not None:
            q_own, k_own, v_own = (batch.split(x)[b].transpose(0, 1) for x in own_TAD)
            own_scores = q_own @ k_own.transpose(1, 2) * scale
            own_weights = torch.softmax(own_scores, dim=-1)
            scores = torch.where(chosen[None, :, None], own_scores, scores)
            mixed = torch.where(chosen[None, :, None], own_weights @ v_own, mixed)
            weights = torch.where(chosen[None, :, None], own_weights, weights)
        for name, value in (
            ("q", q),
            ("k", k),
            ("v", v),
            ("scores", scores),
            ("weights", weights),
            ("mixed", mixed),
        ):
            watch(f"attention.{name}", value)
        out.append(mixed.transpose(0, 1))
    return torch.cat(out)
