"""The bidirectional encoder: embeddings, then L layers of attention and feed-forward with residual connections.

post-norm (BERT):   x ← LN(x + Attn(x));      x ← LN(x + FF(x))
pre-norm:           x ← x + Attn(LN(x));      x ← x + FF(LN(x));      one more LN at the end

Legend: T tokens in the batch, n tokens of one sequence, H hidden, I intermediate width, A heads, R relative positions.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from everybert.errors import EverybertError
from everybert.model.attention import ABSOLUTE, Relative, SelfAttention, Watch, fused
from everybert.model.config import EncoderConfig
from everybert.model.embeddings import Embeddings, alibi_slopes, bias_rows, gaps, rotary_table, sinusoids, table_rows
from everybert.model.graphs import Recorder
from everybert.model.linear import Linear, exact
from everybert.model.ragged import Ragged

Block = Callable[[Tensor], Tensor]
Norm = nn.LayerNorm | nn.RMSNorm


def activate(x: Tensor, kind: str) -> Tensor:
    """The non-linearity of the feed-forward block (three forms of GELU: Hendrycks & Gimpel 2016)."""
    if kind == "gelu_sigmoid":
        return x * torch.sigmoid(1.702 * x)
    if kind.startswith("gelu"):
        return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")
    return F.silu(x) if kind == "silu" else F.relu(x)


def product_gelu(x_TH: Tensor, linear: nn.Linear) -> Tensor:
    """gelu(W·x + b) in one cuBLAS call, which applies the tanh form of GELU before it rounds the sums.

    In half precision that is as close to fp32 as the exact GELU of rounded sums (docs/LOG.md), and saves a pass over
    memory. It has no gradient.
    """
    return torch._addmm_activation(linear.bias, x_TH, linear.weight.t(), use_gelu=True)


class FeedForward(nn.Module):
    """FF(x) = W₂·act(W₁x + b₁) + b₂, or gated: W₂·(act(W₁x) ⊙ W₃x)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.gated, self.gate_last = config.feed_forward == "glu", config.gate_last
        self.activation = config.activation
        self.fuses = config.activation == "gelu" and config.linear_bias and not self.gated
        inner = config.intermediate_size
        biased = config.linear_bias and (config.gate_bias or not self.gated)
        self.input = Linear(config.hidden_size, 2 * inner if self.gated else inner, bias=biased)
        self.output = Linear(inner, config.hidden_size, bias=config.linear_bias)
        self.dropout = nn.Dropout(config.feed_forward_dropout)

    def forward(self, x_TH: Tensor, watch: Watch | None = None) -> Tensor:
        """(T, H) → (T, I) → (T, H)."""
        plain = type(self.input) is Linear  # not with adapters
        if self.fuses and plain and watch is None and fused(x_TH):
            if not torch.is_grad_enabled() and not self.training:
                return self.output(product_gelu(x_TH, self.input))
            from everybert.model.kernels import bias_gelu

            active_TI = bias_gelu(F.linear(x_TH, self.input.weight), self.input.bias)
            return self.output(self.dropout(active_TI))
        wide = self.input(x_TH)
        if self.gated:
            wide, other_TI = wide.chunk(2, dim=-1)[:: -1 if self.gate_last else 1]
            active_TI = activate(wide, self.activation) * other_TI
        else:
            active_TI = activate(wide, self.activation)
        if watch is not None:
            watch("feed_forward.input", wide)
            watch("feed_forward.active", active_TI)
        return self.output(self.dropout(active_TI))


class Layer(nn.Module):
    """One encoder layer: attention, then feed-forward, each added to its input."""

    def __init__(self, config: EncoderConfig, first: bool = False) -> None:
        super().__init__()
        self.pre = config.norm == "pre"
        self.attention = SelfAttention(config)
        self.attention_norm: Norm | None = None
        if not (self.pre and first and not config.first_attention_norm):
            self.attention_norm = _norm(config)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = _norm(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x_TH: Tensor, batch: Ragged, window: int | None, relative: Relative, watch: Watch | None = None
    ) -> Tensor:
        """(T, H) → (T, H)."""

        def attention(x_TH: Tensor) -> Tensor:
            return self.attention(x_TH, batch, window, relative, watch)

        def feed_forward(x_TH: Tensor) -> Tensor:
            return self.feed_forward(x_TH, watch)

        x_TH = self._add(x_TH, "attention", attention, self.attention_norm, watch)
        return self._add(x_TH, "feed_forward", feed_forward, self.feed_forward_norm, watch, "output")

    def _add(self, x_TH: Tensor, name: str, f: Block, norm: Norm | None, watch: Watch | None, end: str = "") -> Tensor:
        """LN(x + f(x)) or, in pre-norm, x + f(LN(x)), with f one of the two blocks. The result is watched as `end`."""
        report = watch or (lambda name, value: None)
        ready_TH = x_TH
        if self.pre:
            ready_TH = x_TH if norm is None else norm(x_TH)
            report(f"{name}.norm", ready_TH)
        added_TH = f(ready_TH)
        report(f"{name}.output", added_TH)
        plain = watch is None and not torch.is_grad_enabled() and not self.training
        if not self.pre and plain and fused(x_TH) and isinstance(norm, nn.LayerNorm):
            from everybert.model.kernels import add_norm

            return add_norm(x_TH, added_TH, norm.weight, norm.bias, norm.eps)
        x_TH = x_TH + self.dropout(added_TH)
        if not self.pre:
            assert norm is not None
            report(f"{name}.residual", x_TH)
            x_TH = norm(x_TH)
        report(end or f"{name}.{'residual' if self.pre else 'norm'}", x_TH)
        return x_TH


class Encoder(nn.Module):
    """Token ids to contextual vectors; the configuration says which member of the family it is."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        width = config.hidden_size
        self.layers = nn.ModuleList(Layer(config, first=i == 0) for i in range(config.distinct_layers))
        self.norm = _norm(config) if config.norm == "pre" else None
        self.relative_bias = self.relative_table = self.relative_norm = self.rotary = None
        if config.rotary_pairs:
            self.rotary = nn.Embedding(config.max_positions, config.head_size)
            self.rotary.weight.requires_grad_(False)
        if config.relative == "buckets":
            self.relative_bias = nn.Embedding(config.relative_buckets, config.heads)
        elif config.relative == "disentangled":
            self.relative_table = nn.Embedding(2 * (config.relative_buckets or config.relative_distance), width)
            self.relative_norm = _norm(config)
        self.checkpointing = False
        """Recompute each layer in the backward pass instead of keeping its activations (Chen et al. 2016)."""
        self.recorder = Recorder()
        """Forward passes recorded as CUDA graphs, for inference."""

    def forward(self, batch: Ragged, states: list[Tensor] | None = None, watch: Watch | None = None) -> Tensor:
        """(T) ids → (T, H).

        The L + 1 hidden states are appended to `states`, if given: the embeddings, then each layer's output (the
        last one after the final norm, as returned). `watch(name, tensor)` is called with every intermediate.
        """
        config = self.config
        x_TH = self.embeddings(batch, watch)
        full, local = self._relative(batch)
        if states is not None:
            states.append(x_TH)
        for i, number in enumerate(config.layer_order):
            layer = self.layers[number]
            window = config.window(i // config.inner_layers)
            layer_watch = _prefixed(watch, f"layers.{i}.") if watch is not None else None
            relative = full if window is None else local
            if self.checkpointing and torch.is_grad_enabled():
                x_TH = checkpoint(layer, x_TH, batch, window, relative, use_reentrant=False)
            else:
                x_TH = layer(x_TH, batch, window, relative, layer_watch)
            if states is not None:
                states.append(exact(x_TH))
        x_TH = exact(x_TH)  # the layers of fp8.py also pass on a rounded copy
        if self.norm is not None:
            x_TH = self.norm(x_TH)
            if states is not None:
                states[-1] = x_TH
        if watch is not None:
            watch("output", x_TH)
        return x_TH

    def _relative(self, batch: Ragged) -> tuple[Relative, Relative]:
        """The relative positions of the full-attention and of the sliding-window layers, computed once per batch."""
        config, device = self.config, batch.device
        buckets, far = config.relative_buckets, config.relative_distance
        once: Any = cache if batch.attend is None else lambda make: make  # in ONNX export n is a symbol
        both = ABSOLUTE
        if self.relative_bias is not None:
            table_RA = self.relative_bias.weight
            biases = once(lambda n: table_RA[bias_rows(gaps(n, device), buckets, far)].permute(2, 0, 1)[None])
            both = Relative(bias=lambda q, k: biases(q.shape[2]))
        elif config.relative == "alibi":
            distances = once(lambda n: -alibi_slopes(config.heads, device)[None, :, None, None] * gaps(n, device).abs())
            both = Relative(bias=lambda q, k: distances(q.shape[2]))
        elif self.relative_table is not None and self.relative_norm is not None:
            rows = once(lambda n: table_rows(gaps(n, device), buckets, far))
            both = Relative(table=(self.relative_norm(self.relative_table.weight), rows))
        elif self.rotary is not None:
            sin, cos = (x.repeat_interleave(2, dim=-1) for x in self.rotary(batch.positions_T).chunk(2, dim=-1))
            both = Relative((cos, sin))
        elif config.positions == "rotary":
            full = Relative(rotary_table(batch.positions_T, config, config.rotary_theta))
            if config.windows is None:
                return full, full
            return full, Relative(rotary_table(batch.positions_T, config, config.rotary_theta_local))
        return both, both

    def check(self, batch: Ragged) -> None:
        """Raise an error for ids, segments or lengths beyond the tables, before a kernel reads out of bounds."""
        config = self.config
        if (bad := _outside(batch.tokens_T, config.vocab_size)) is not None:
            raise EverybertError(f"token id {bad} is outside the vocabulary of {config.vocab_size}; use its tokenizer")
        longest = max(batch.lengths)
        if (config.positions != "rotary" or config.rotary_pairs) and longest > config.max_positions:
            raise EverybertError(
                f"a sequence of {longest} tokens is longer than this model's {config.max_positions} positions; "
                "cut it, or use windows"
            )
        segments_T = batch.segments_T if config.segments > 1 else None
        if segments_T is not None and (bad := _outside(segments_T, config.segments)) is not None:
            raise EverybertError(f"segment id {bad} is outside this model's {config.segments} segments")


def _outside(x_T: Tensor, size: int) -> int | None:
    """A number that is not in 0 … size − 1, if there is one; on the host by numpy, which needs no other threads."""
    x = x_T.numpy() if x_T.device.type == "cpu" else x_T
    low, high = int(x.min()), int(x.max())
    return low if low < 0 else high if high >= size else None


def initialise(module: nn.Module, config: EncoderConfig) -> None:
    """BERT's initialisation: N(0, 0.02) for matrices and tables, zero biases, unit LayerNorms."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=config.init_range)
            if isinstance(part, nn.Linear) and part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, nn.LayerNorm):
            nn.init.ones_(part.weight)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
    for part in module.modules():  # fixed tables
        if isinstance(part, Embeddings) and part.position is not None and config.positions == "sinusoidal":
            part.position.weight.data.copy_(sinusoids(*part.position.weight.shape))
        elif isinstance(part, Encoder) and part.rotary is not None:
            table = sinusoids(*part.rotary.weight.shape)
            part.rotary.weight.data.copy_(torch.cat((table[:, ::2], table[:, 1::2]), dim=1))


def _norm(config: EncoderConfig) -> Norm:
    if config.norm_kind == "rms":
        return nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)


def _prefixed(watch: Watch, prefix: str) -> Watch:
    return lambda name, value: watch(prefix + name, value)
