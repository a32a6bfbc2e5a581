"""The bidirectional encoder: embeddings, then L layers of attention and feed-forward with residual connections.

post-norm (BERT):   x ← LN(x + Attn(x));      x ← LN(x + FF(x))
pre-norm:           x ← x + Attn(LN(x));      x ← x + FF(LN(x));      one more LN at the end

Legend: T tokens in the batch, H hidden, I intermediate width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from everybert.errors import EverybertError
from everybert.model.attention import Attention, Rotary, Watch, fused
from everybert.model.config import EncoderConfig
from everybert.model.embeddings import Embeddings, rotary_table, sinusoids
from everybert.model.graphs import Recorder
from everybert.model.ragged import Ragged


def activate(x: Tensor, kind: str) -> Tensor:
    """The non-linearity of the feed-forward block (three forms of GELU: Hendrycks & Gimpel 2016)."""
    if kind == "gelu":
        return F.gelu(x)
    if kind == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if kind == "gelu_sigmoid":
        return x * torch.sigmoid(1.702 * x)
    if kind == "silu":
        return F.silu(x)
    return F.relu(x)


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
        self.gated = config.feed_forward == "glu"
        self.activation = config.activation
        self.fuses = config.activation == "gelu" and config.linear_bias and not self.gated
        inner = config.intermediate_size
        self.input = nn.Linear(config.hidden_size, 2 * inner if self.gated else inner, bias=config.linear_bias)
        self.output = nn.Linear(inner, config.hidden_size, bias=config.linear_bias)
        self.dropout = nn.Dropout(config.feed_forward_dropout)

    def forward(self, x_TH: Tensor, watch: Watch | None = None) -> Tensor:
        """(T, H) → (T, I) → (T, H)."""
        plain = type(self.input) is nn.Linear  # not with adapters
        if self.fuses and plain and watch is None and fused(x_TH):
            if not torch.is_grad_enabled() and not self.training:
                return self.output(product_gelu(x_TH, self.input))
            from everybert.model.kernels import bias_gelu

            active_TI = bias_gelu(F.linear(x_TH, self.input.weight), self.input.bias)
            return self.output(self.dropout(active_TI))
        wide = self.input(x_TH)
        if self.gated:
            wide, gate_TI = wide.chunk(2, dim=-1)
            active_TI = activate(wide, self.activation) * gate_TI
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
        self.attention = Attention(config)
        self.attention_norm: nn.LayerNorm | None = None
        if not (self.pre and first and not config.first_attention_norm):
            self.attention_norm = _norm(config)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = _norm(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x_TH: Tensor,
        batch: Ragged,
        window: int | None,
        rotary: Rotary | None,
        watch: Watch | None = None,
    ) -> Tensor:
        """(T, H) → (T, H)."""
        see = watch if watch is not None else _nothing
        if self.pre:
            ready_TH = x_TH if self.attention_norm is None else self.attention_norm(x_TH)
            see("attention.norm", ready_TH)
            added_TH = self.attention(ready_TH, batch, window, rotary, watch)
            see("attention.output", added_TH)
            x_TH = x_TH + self.dropout(added_TH)
            see("attention.residual", x_TH)
            ready_TH = self.feed_forward_norm(x_TH)
            see("feed_forward.norm", ready_TH)
            added_TH = self.feed_forward(ready_TH, watch)
            see("feed_forward.output", added_TH)
            x_TH = x_TH + self.dropout(added_TH)
        else:
            assert self.attention_norm is not None
            added_TH = self.attention(x_TH, batch, window, rotary, watch)
            see("attention.output", added_TH)
            if watch is None and fused(x_TH) and not torch.is_grad_enabled() and not self.training:
                x_TH = self._normed(x_TH, added_TH, self.attention_norm)
                return self._normed(x_TH, self.feed_forward(x_TH), self.feed_forward_norm)
            x_TH = x_TH + self.dropout(added_TH)
            see("attention.residual", x_TH)
            x_TH = self.attention_norm(x_TH)
            see("attention.norm", x_TH)
            added_TH = self.feed_forward(x_TH, watch)
            see("feed_forward.output", added_TH)
            x_TH = x_TH + self.dropout(added_TH)
            see("feed_forward.residual", x_TH)
            x_TH = self.feed_forward_norm(x_TH)
        see("output", x_TH)
        return x_TH

    @staticmethod
    def _normed(x_TH: Tensor, added_TH: Tensor, norm: nn.LayerNorm) -> Tensor:
        """LN(x + added) in one kernel."""
        from everybert.model.kernels import add_norm

        bias_H = norm.weight if norm.bias is None else norm.bias
        return add_norm(x_TH, added_TH, norm.weight, bias_H, norm.bias is not None, norm.eps)


class Encoder(nn.Module):
    """Token ids to contextual vectors; the configuration says which member of the family it is."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        distinct = max(config.layer_order) + 1
        self.layers = nn.ModuleList(Layer(config, first=i == 0) for i in range(distinct))
        self.norm = _norm(config) if config.norm == "pre" else None
        self.checkpointing = False
        """Recompute each layer in the backward pass instead of keeping its activations (Chen et al. 2016)."""
        self.recorder = Recorder()
        """Forward passes recorded as CUDA graphs, for inference."""

    def forward(
        self,
        batch: Ragged,
        states: list[Tensor] | None = None,
        watch: Watch | None = None,
    ) -> Tensor:
        """(T) ids → (T, H).

        The L + 1 hidden states are appended to `states`, if given: the embeddings, then each layer's output (the
        last one after the final norm, as returned). `watch(name, tensor)` is called with every intermediate.
        """
        config = self.config
        x_TH = self.embeddings(batch, watch)
        rotary = self._rotary(batch)
        if states is not None:
            states.append(x_TH)
        for i, weights in enumerate(config.layer_order):
            layer = self.layers[weights]
            window = config.window(i // config.inner_layers)
            named = _prefixed(watch, f"layers.{i}.") if watch is not None else None
            table = rotary[window is not None] if rotary else None
            if self.checkpointing and torch.is_grad_enabled():
                x_TH = checkpoint(layer, x_TH, batch, window, table, use_reentrant=False)
            else:
                x_TH = layer(x_TH, batch, window, table, named)
            if states is not None:
                states.append(x_TH)
        if self.norm is not None:
            x_TH = self.norm(x_TH)
            if states is not None:
                states[-1] = x_TH
        if watch is not None:
            watch("output", x_TH)
        return x_TH

    def _rotary(self, batch: Ragged) -> tuple[Rotary, Rotary] | None:
        """Rotary tables of the full-attention and of the sliding-window layers, computed once per batch."""
        config = self.config
        if config.positions != "rotary":
            return None
        full = rotary_table(batch.positions_T, config.head_size, config.rotary_theta)
        if config.windows is None:
            return full, full
        return full, rotary_table(batch.positions_T, config.head_size, config.rotary_theta_local)

    def check(self, batch: Ragged) -> None:
        """Raise an error for ids, segments or lengths beyond the tables, before a kernel reads out of bounds."""
        low, high = _extremes(batch.tokens_T)
        if low < 0 or high >= self.config.vocab_size:
            bad = low if low < 0 else high
            raise EverybertError(
                f"token id {bad} is outside the vocabulary of {self.config.vocab_size}; "
                "the ids belong to another tokenizer"
            )
        longest = max(batch.lengths)
        if self.config.positions != "rotary" and longest > self.config.max_positions:
            raise EverybertError(
                f"a sequence of {longest} tokens is longer than this model's {self.config.max_positions} positions; "
                "cut it, or use windows"
            )
        if batch.segments_T is not None and self.config.segments > 1:
            low, high = _extremes(batch.segments_T)
            if low < 0 or high >= self.config.segments:
                bad = low if low < 0 else high
                raise EverybertError(f"segment id {bad} is outside this model's {self.config.segments} segments")


def _extremes(x_T: Tensor) -> tuple[int, int]:
    """Minimum and maximum; on the host by numpy, which needs no other threads."""
    x = x_T.numpy() if x_T.device.type == "cpu" else x_T
    return int(x.min()), int(x.max())


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
    for part in module.modules():  # a fixed table
        if isinstance(part, Embeddings) and part.position is not None and config.positions == "sinusoidal":
            part.position.weight.data.copy_(sinusoids(*part.position.weight.shape))


def _norm(config: EncoderConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)


def _prefixed(watch: Watch, prefix: str) -> Watch:
    return lambda name, value: watch(prefix + name, value)


def _nothing(name: str, value: Tensor) -> None:
    """Used if no `watch` is given."""
