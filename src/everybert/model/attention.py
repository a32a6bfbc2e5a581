"""Scaled dot-product attention over ragged batches: the only file that depends on the attention backend.

Attention(Q, K, V) = softmax(Q Kᵀ / √D) V, per head and within each sequence (Vaswani et al. 2017, eq. 1).

| case                                      | computation                                                           |
|-------------------------------------------|-----------------------------------------------------------------------|
| CUDA, bf16 or fp16                        | one kernel for the whole batch: the one in kernels.py if it applies,  |
|                                           | else varlen flash attention                                           |
| CPU, or fp32                              | sequences of equal length share one rectangular SDPA call             |
| sliding window (long sequences)           | blocks of queries, each with the keys in its window: O(n·w)           |
| global tokens (Longformer)                | as above, with the global keys, and full rows for global queries      |
| `watch` is given                          | the formula written out, one sequence at a time                       |
| scores with a bias (MPNet, jina, DeBERTa) | on CUDA in bf16 or fp16 one rectangle, if it has little padding or is |
|                                           | recorded; else as on the CPU; SDPA adds the bias                      |
| padded batches (model/padded.py)          | one rectangle with a mask: all pairs, whatever the pattern            |

Legend: T tokens in the batch, B sequences, N the longest length, n tokens of one sequence, H hidden, A heads, D head
size, R relative positions, w one-sided window.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from everybert.model.config import EncoderConfig
from everybert.model.linear import Linear
from everybert.model.ragged import Ragged

QKV = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values: (T, A, D) each."""
Rotary = tuple[Tensor, Tensor]
Bias = Callable[[Tensor, Tensor], Tensor]
"""What is added to the scores of sequences of one length: queries and keys (B, A, n, D) → (B or 1, A, n, n)."""
Watch = Callable[[str, Tensor], None]


class Relative(NamedTuple):
    """The position information of attention: how far tokens are from each other. Computed once per batch."""

    rotary: Rotary | None = None
    bias: Bias | None = None
    table: tuple[Tensor, Callable[[int], Tensor]] | None = None
    """DeBERTa: vectors of relative positions (R, H), and n tokens → the row of each pair (n, n)."""


ABSOLUTE = Relative()
"""No position information in attention: positions are part of the embeddings."""

HAS_TRITON = find_spec("triton") is not None

QUERY_BLOCK = 128
"""Queries per block of windowed attention: larger blocks mask away more keys, smaller ones need more calls."""


@dataclass(frozen=True)
class Pattern:
    """Which tokens of its sequence a token attends to."""

    window: int | None = None
    """Those at most w positions away; None: all."""
    causal: bool | str = False
    """True: no token after it; "reverse": no token before it."""

    @property
    def sides(self) -> tuple[int, int]:
        """How many tokens before it and after it; −1 for all."""
        reach = -1 if self.window is None else self.window
        return 0 if self.causal == "reverse" else reach, 0 if self.causal is True else reach

    def visible(self, rows: Tensor, columns: Tensor) -> Tensor:
        """bool (rows, columns): whether the token at position r attends to the one at position c."""
        gap = columns - rows[:, None]
        before, after = self.sides
        visible = torch.ones_like(gap, dtype=torch.bool) if before < 0 else gap >= -before
        return visible if after < 0 else visible & (gap <= after)


FULL = Pattern()


class SelfAttention(nn.Module):
    """Multi-head self-attention: one projection to Q, K and V, attention per head, and an output projection."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width, rows = config.hidden_size, sum(config.qkv_rows)
        self.heads, self.key_value_heads = config.heads, config.key_value_heads or config.heads
        self.causal = config.causal
        self.dropout = config.attention_dropout
        self.rotary_pairs, self.rotary_value = config.rotary_pairs, config.rotary_value
        self.qkv = Linear(width, rows, bias=config.linear_bias)
        self.qkv_global = Linear(width, rows, bias=config.linear_bias) if config.global_attention else None
        self.output = Linear(width, width, bias=config.linear_bias)
        self.table_dropout = nn.Dropout(config.dropout)

    def forward(
        self, x_TH: Tensor, batch: Ragged, window: int | None, relative: Relative, watch: Watch | None = None
    ) -> Tensor:
        """(T, H) → (T, H)."""
        rotary, bias, table = relative
        qkv_T3AD = self.split(self.qkv(x_TH))
        global_qkv: QKV | None = None  # Q, K and V of the global tokens (Longformer, §3.1)
        if self.qkv_global is not None and batch.globals_T is not None:
            q_TAD, k_TAD, v_TAD = self.split(self.qkv_global(x_TH)).unbind(1)
            global_qkv = q_TAD, k_TAD, v_TAD
        p = self.dropout if self.training else 0.0
        pattern = Pattern(window, self.causal)
        plain = watch is None and global_qkv is None and pattern == FULL and relative == ABSOLUTE and p == 0.0
        if plain and batch.attend is None and has_kernel(qkv_T3AD):
            from everybert.model.kernels import attention

            mixed_TAD, _ = attention(qkv_T3AD, batch.offsets_B1, batch.max_length)
        else:
            q_TAD, k_TAD, v_TAD = qkv_T3AD.unbind(1)
            if rotary is not None:
                q_TAD, k_TAD = (rotate(x, *rotary, self.rotary_pairs) for x in (q_TAD, k_TAD))
                v_TAD = rotate(v_TAD, *rotary, self.rotary_pairs) if self.rotary_value else v_TAD
            if table is not None:
                q_TAD = q_TAD * SCORE_TERMS**-0.5  # scores are divided by √(3·D); the backends divide by √D
                relative_R3AD = self.split(self.qkv(self.table_dropout(table[0])))
                bias = disentangled(relative_R3AD[:, 0], relative_R3AD[:, 1], table[1])
            qkv = q_TAD, k_TAD, v_TAD
            if watch is None:
                mixed_TAD = attend(qkv, batch, pattern, global_qkv, p, bias)
            else:
                mixed_TAD = watched(qkv, batch, pattern, global_qkv, watch, bias)
        return self.output(mixed_TAD.flatten(1))

    def split(self, wide: Tensor) -> Tensor:
        """The projections of T tokens as (T, 3, A, D); keys and values that heads share are repeated."""
        if self.key_value_heads == self.heads:
            return wide.unflatten(-1, (3, self.heads, -1))
        heads = wide.unflatten(-1, (self.heads + 2 * self.key_value_heads, -1))
        q_TAD, kv = heads[:, : self.heads], heads[:, self.heads :].unflatten(1, (2, -1))
        kv_T2AD = kv.repeat_interleave(self.heads // self.key_value_heads, dim=2)
        return torch.cat((q_TAD[:, None], kv_T2AD), dim=1)


def attend(
    qkv: QKV, batch: Ragged, pattern: Pattern, global_qkv: QKV | None = None, p: float = 0.0, bias: Bias | None = None
) -> Tensor:
    """Attention within each sequence by the best backend available. `p` is the dropout on the probabilities."""
    if batch.attend is not None:
        return batch.attend(qkv, pattern, global_qkv, bias)
    if bias is not None:
        little_padding = not batch.lengths or len(batch) * batch.max_length <= 2 * len(batch.tokens_T)
        return (rectangle if little_padding and flashable(qkv[0]) else grouped)(qkv, batch, p, bias, pattern.causal)
    if global_qkv is None and flashable(qkv[0]):
        return varlen(qkv, batch, pattern, p)
    if global_qkv is None and (pattern.window is None or max(batch.lengths) <= pattern.window + 1):
        return grouped(qkv, batch, p, causal=pattern.causal)
    return windowed(qkv, batch, pattern, global_qkv, p)


SCORE_TERMS = 3
"""Terms of DeBERTa's scores: content to content, content to position, position to content."""


def disentangled(q_RAD: Tensor, k_RAD: Tensor, rows: Callable[[int], Tensor]) -> Bias:
    """The scores of contents with relative positions δ, both ways: Qᵢ·K_δ(i,j) + Kⱼ·Q_δ(i,j) (He et al. 2021, eq. 4).

    The products with all R positions are (n, R); the rows of the pairs are then gathered, without an (n, n, D) tensor.
    """

    def bias(q: Tensor, k: Tensor) -> Tensor:
        row_nn = rows(q.shape[2])
        to_position = (q @ k_RAD.permute(1, 2, 0)).gather(-1, row_nn.expand(*q.shape[:2], -1, -1))
        from_position = (k @ q_RAD.permute(1, 2, 0)).gather(-1, row_nn.t().expand(*q.shape[:2], -1, -1))
        return (to_position + from_position.transpose(-1, -2) * SCORE_TERMS**-0.5) * q.shape[-1] ** -0.5

    return bias


def rotate(x_TAD: Tensor, cos_TD: Tensor, sin_TD: Tensor, pairs: bool = False) -> Tensor:
    """Rotary positions (Su et al. 2021, eq. 34): rotate each pair of features by an angle ∝ the position.

    Features 2i and 2i + 1 are a pair if `pairs`, else i and i + D/2.
    """
    x = x_TAD.float()
    if pairs:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    else:
        first_half, second_half = x.chunk(2, dim=-1)
        turned = torch.cat((-second_half, first_half), dim=-1)
    return (x * cos_TD[:, None] + turned * sin_TD[:, None]).to(x_TAD.dtype)


def fused(x: Tensor) -> bool:
    """Whether kernels.py can compute on this tensor: CUDA, half precision, Triton installed."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and x.shape[-1] % 16 == 0 and HAS_TRITON


def has_kernel(qkv_T3AD: Tensor) -> bool:
    """Whether the attention of kernels.py supports this head size: Triton's tiles are powers of two."""
    return fused(qkv_T3AD) and qkv_T3AD.shape[-1] in (16, 32, 64, 128)


def flashable(x: Tensor) -> bool:
    """Whether varlen flash attention supports this tensor: CUDA, half precision, a head size that 8 divides."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and x.shape[-1] % 8 == 0


# ── backends ─────────────────────────────────────────────────────────────────────────────────────────────────


def varlen(qkv: QKV, batch: Ragged, pattern: Pattern, p: float) -> Tensor:
    """Flash attention on the ragged batch as it is (CUDA, half precision)."""
    offsets, longest = batch.offsets_B1, batch.max_length
    left, right = pattern.sides
    # torch's varlen_attn calls this operator, but without dropout.
    flash = torch.ops.aten._flash_attention_forward
    sizes = (offsets, offsets, longest, longest, p, False, False)
    return flash(*qkv, *sizes, window_size_left=left, window_size_right=right)[0]


def grouped(qkv: QKV, batch: Ragged, p: float, bias: Bias | None = None, causal: bool | str = False) -> Tensor:
    """One rectangular SDPA call per distinct length."""
    out = []
    for group in zip(*(batch.by_length(x) for x in qkv)):
        q, k, v = (x.transpose(1, 2) for x in group)
        mask = None if bias is None else bias(q, k).to(q.dtype)
        if causal == "reverse" or (causal and mask is not None):
            at = torch.arange(q.shape[2], device=q.device)
            visible = Pattern(causal=causal).visible(at, at)
            mask = visible if mask is None else mask.masked_fill(~visible, float("-inf"))
        triangle = causal is True and mask is None
        out.append(sdpa(q, k, v, attn_mask=mask, is_causal=triangle, dropout_p=p).transpose(1, 2))
    return batch.from_lengths(out)


def rectangle(qkv: QKV, batch: Ragged, p: float, bias: Bias, causal: bool | str = False) -> Tensor:
    """One SDPA call for all sequences, padded to the longest: few kernels, whose shapes graphs.py can record."""
    from_BN, real_BN, to_T = batch.rectangle
    q, k, v = (x.index_select(0, from_BN.flatten()).unflatten(0, from_BN.shape).transpose(1, 2) for x in qkv)
    visible = real_BN[:, None, None]
    if causal:
        at = torch.arange(from_BN.shape[1], device=q.device)
        visible = visible & Pattern(causal=causal).visible(at, at)
    # the least number in place of −∞: rows of padding see nothing, and would become NaN
    mask = torch.where(visible, bias(q, k).to(q.dtype), torch.finfo(q.dtype).min)
    return sdpa(q, k, v, attn_mask=mask, dropout_p=p).transpose(1, 2).flatten(0, 1).index_select(0, to_T)


def windowed(qkv: QKV, batch: Ragged, pattern: Pattern, global_qkv: QKV | None, p: float) -> Tensor:
    """Token i attends to |i − j| ≤ w and to global tokens; global tokens attend to all (Beltagy et al. 2020).

    Each block of queries reads only the keys of its windows, so memory grows with n·w, not with n².
    """
    out = []
    for b, n in enumerate(batch.lengths):
        q, k, v = (x[None] for x in sequence(qkv, batch, b))  # (1, A, n, D)
        is_global = batch.split(batch.globals_T)[b] if batch.globals_T is not None and global_qkv is not None else None
        chosen = [] if is_global is None else is_global.nonzero().flatten().tolist()
        before, after = (n if side < 0 else side for side in pattern.sides)
        pieces = []
        for start in range(0, n, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, n)
            left, right = max(0, start - before), min(n, stop + after)
            columns = torch.arange(left, right, device=q.device)
            keys, values = k[:, :, left:right], v[:, :, left:right]
            if far := [i for i in chosen if not left <= i < right]:
                columns = torch.cat((columns, columns.new_tensor(far)))
                keys, values = torch.cat((keys, k[:, :, far]), dim=2), torch.cat((values, v[:, :, far]), dim=2)
            mask = pattern.visible(torch.arange(start, stop, device=q.device), columns)
            mask = mask if is_global is None else mask | is_global[columns]
            pieces.append(sdpa(q[:, :, start:stop], keys, values, attn_mask=mask, dropout_p=p))
        mixed = torch.cat(pieces, dim=2)
        if global_qkv is not None and chosen:
            q, k, v = (x[None] for x in sequence(global_qkv, batch, b))
            at = columns.new_tensor(chosen)
            mixed = mixed.index_copy(2, at, sdpa(q[:, :, at], k, v, dropout_p=p).to(mixed.dtype))
        out.append(mixed[0].transpose(0, 1))
    return torch.cat(out)


def watched(
    qkv: QKV, batch: Ragged, pattern: Pattern, global_qkv: QKV | None, watch: Watch, bias: Bias | None = None
) -> Tensor:
    """softmax(Q Kᵀ / √D) V step by step, passing each part of each sequence to `watch`. No dropout."""
    out = []
    for b, n in enumerate(batch.lengths):
        q, k, v = sequence(qkv, batch, b)
        at = torch.arange(n, device=q.device)
        mask = pattern.visible(at, at)
        if global_qkv is None or batch.globals_T is None:
            parts = _formula(q, k, v, mask, None if bias is None else bias(q[None], k[None])[0])
        else:
            is_global = batch.split(batch.globals_T)[b]
            parts, full = _formula(q, k, v, mask | is_global), _formula(*sequence(global_qkv, batch, b))
            parts = {name: torch.where(is_global[:, None], full[name], parts[name]) for name in parts}
        for name, value in {"q": q, "k": k, "v": v, **parts}.items():
            watch(f"attention.{name}", value)
        out.append(parts["mixed"].transpose(0, 1))
    return torch.cat(out)


def _formula(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: Tensor | None = None
) -> dict[str, Tensor]:
    scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    scores = scores if bias is None else scores + bias.to(scores.dtype)
    scores = scores if mask is None else scores.masked_fill(~mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    return {"scores": scores, "weights": weights, "mixed": weights @ v}


def sequence(qkv: QKV, batch: Ragged, b: int) -> list[Tensor]:
    """Q, K and V of sequence b: (A, n, D) each."""
    return [batch.split(x)[b].transpose(0, 1) for x in qkv]
