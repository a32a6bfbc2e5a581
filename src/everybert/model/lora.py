"""LoRA (Hu et al. 2021): a frozen matrix W acts as W + (α / r)·B·A, with A (r × in) and B (out × r) trained.

An encoder can have many adapters; switching between them moves no weights. Each brings the head of its task. Q, K and
V are one matrix here but have an A and a B each, as in PEFT's files (except in families whose files have them as one).

DoRA (Liu et al. 2024, eq. 5) also scales each row: m · (W + (α / r)·B·A) / ‖W + (α / r)·B·A‖, with m learnt. Such
adapters are loaded and merged; they are not trained here.

Legend: T tokens in the batch, I inputs and O outputs of a matrix, P its adapted parts (Q, K, V are three), r rank.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from everybert.errors import EverybertError
from everybert.model.config import FAMILY_TABLES, EncoderConfig
from everybert.model.heads import Network
from everybert.model.int8 import RoundedLinear
from everybert.model.linear import Linear, linear

QKV = ("query", "key", "value")
PART_NAMES = {1: ("",), 2: (".gate", ".up"), 3: tuple(f".{name}" for name in QKV)}
"""The names of a matrix's parts in the state of an adapter, by their number."""
MATRICES: dict[str, list[str]] = FAMILY_TABLES["matrices"]
"""Families whose files have Q, K and V as one matrix, or the two of a gated block apart."""
TARGETS = (*QKV, "attention.output", "feed_forward.input", "feed_forward.output")
PROJECTION = "embeddings.projection"
"""Of ELECTRA and ALBERT: a target outside the layers."""


@dataclass(frozen=True)
class LoraConfig:
    """The size of an adapter, and the matrices that it changes."""

    rank: int = 4
    """r: the inner width. 4 on all six matrices of a layer is less than 1 % of the model."""
    alpha: float = 8.0
    """B·A is scaled by α / r, so that r can change without the learning rate."""
    dropout: float = 0.0
    """On the adapter's input while training."""
    targets: tuple[str, ...] = TARGETS
    """Which matrices of each layer are adapted."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", tuple(self.targets))
        if self.rank < 1 or not 0 <= self.dropout < 1 or not math.isfinite(self.alpha):
            raise EverybertError("an adapter needs a rank of at least 1, a finite alpha and a dropout in [0, 1)")
        if not self.targets or (unknown := [t for t in self.targets if t not in (*TARGETS, PROJECTION)]):
            raise EverybertError(f"adapter targets are {', '.join(TARGETS)}, not {', '.join(unknown) or 'none'}")


class Lora(nn.Module):
    """The low-rank addition to a matrix whose parts have `rows[i]` rows; the `parts` listed are adapted."""

    def __init__(self, base: "AdaptedLinear", parts: tuple[int, ...], rows: tuple[int, ...], config: LoraConfig):
        super().__init__()
        like = base.weight if base.rounded is None else base.rounded.weight
        self.rank, self.parts, self.rows = config.rank, parts, rows
        self.names = [PART_NAMES[len(rows)][part] for part in parts]
        self.scale = config.alpha / self.rank
        self.dropout = nn.Dropout(config.dropout)
        self.down = nn.Parameter(like.new_empty(len(parts) * self.rank, base.in_features))
        self.up = nn.ParameterList(like.new_zeros(rows[part], self.rank) for part in parts)
        self.gain_O: Tensor | None = None
        """DoRA: m / ‖W + (α / r)·B·A‖ of each row."""
        for a in self.down.detach().split(self.rank):  # A as PEFT draws it; B is zero, so training starts from W
            nn.init.kaiming_uniform_(a, a=math.sqrt(5))

    def forward(self, x_TI: Tensor, y_TO: Tensor, bias_O: Tensor | None) -> Tensor:
        """y + (α / r)·B·A·x, where y = W·x + b; with DoRA scaled, but for b."""
        pieces = list(y_TO.split(self.rows, dim=-1))
        low_TPr = linear(self.dropout(x_TI), self.down).split(self.rank, dim=-1)
        for part, low_Tr, up in zip(self.parts, low_TPr, self.up):
            pieces[part] = pieces[part] + self.scale * linear(low_Tr, up)
        y_TO = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)
        if self.gain_O is None:
            return y_TO
        return y_TO * self.gain_O if bias_O is None else (y_TO - bias_O) * self.gain_O + bias_O

    def merged(self, weight_OI: Tensor) -> Tensor:
        """W as it acts with the adapter, in fp32."""
        whole_OI = weight_OI.float() + self.delta()
        return whole_OI if self.gain_O is None else whole_OI * self.gain_O[:, None]

    def delta(self) -> Tensor:
        """(α / r)·B·A for all rows of the matrix, in fp32."""
        whole_OI = self.down.new_zeros(sum(self.rows), self.down.shape[1], dtype=torch.float32)
        pieces = whole_OI.split(self.rows)
        for part, a, b in zip(self.parts, self.down.detach().split(self.rank), self.up):
            pieces[part].copy_(b.detach().float() @ a.float() * self.scale)
        return whole_OI


class AdaptedLinear(nn.Linear):
    """A linear layer with adapters. It shares weight and bias with the layer that it replaces."""

    def __init__(self, base: nn.Linear | RoundedLinear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.rounded = base if isinstance(base, RoundedLinear) else None
        if isinstance(base, nn.Linear):
            self.weight, self.bias = base.weight, base.bias
        self.lora = nn.ModuleDict()
        self.active: str | None = None

    def forward(self, x_TI: Tensor) -> Tensor:
        """(T, in) → (T, out)."""
        y_TO = linear(x_TI, self.weight, self.bias) if self.rounded is None else self.rounded(x_TI)
        if self.active is None or self.active not in self.lora:
            return y_TO
        return self.lora[self.active](x_TI, y_TO, self.bias if self.rounded is None else self.rounded.bias)


@dataclass
class Adapter:
    """One adapter: its settings, and the task head (and pooler) that belong to it."""

    config: LoraConfig
    heads: dict[str, nn.Module]
    pooler: nn.Module | None = None
    extras: dict[str, Any] = field(default_factory=dict)
    """The contents of its everybert.json."""


class AdapterSet:
    """The adapters of a network. `use` switches to one of them, or to none: the network as it was."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.entries: dict[str, Adapter] = {}
        self.active: str | None = None
        self._heads: dict[str, nn.Module] = dict(network.heads.items())
        self._pooler = network.pooler

    def add(
        self,
        name: str,
        config: LoraConfig,
        heads: Mapping[str, nn.Module] | None = None,
        pooler: nn.Module | None = None,
    ) -> None:
        """Put a new adapter on the encoder; it changes nothing until it is trained or loaded."""
        if not name or "." in name:
            raise EverybertError(f"an adapter's name may not be empty or hold a dot: {name!r}")
        if name in self.entries:
            raise EverybertError(f"there is an adapter {name!r} already; choose another name")
        for at, parts, rows in adapted(self.network.config, config.targets):
            parent, _, last = at.rpartition(".")
            owner = self.network.get_submodule(parent)
            linear = getattr(owner, last)
            if not isinstance(linear, AdaptedLinear):
                linear = AdaptedLinear(linear)
                setattr(owner, last, linear)
            linear.lora[name] = Lora(linear, parts, rows or (linear.out_features,), config)
        self.entries[name] = Adapter(config, dict(heads or {}), pooler)

    def use(self, name: str | None) -> None:
        """Switch to an adapter and its heads, or to none; no weights move."""
        if name is not None and name not in self.entries:
            have = ", ".join(self.entries) or "none"
            raise EverybertError(f"there is no adapter {name!r}; this model has {have}")
        for module in self.network.modules():
            if isinstance(module, AdaptedLinear):
                module.active = name
        entry = self.entries[name] if name is not None else None
        self.network.heads.clear()
        self.network.heads.update({**self._heads, **(entry.heads if entry else {})})
        self.network.pooler = entry.pooler if entry and entry.pooler is not None else self._pooler  # type: ignore[assignment]
        self.active = name

    @torch.no_grad()
    def merge(self) -> None:
        """Add the adapter in use to the weights, and leave a plain network without adapters."""
        if self.active is None:
            raise EverybertError("merge needs an adapter in use")
        if any(isinstance(part, RoundedLinear) for part in self.network.modules()):
            raise EverybertError("int8 and fp8 weights take no additions; load the model without dtype to merge")
        for parent in list(self.network.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, AdaptedLinear):
                    if self.active in child.lora:
                        child.weight.copy_(child.lora[self.active].merged(child.weight))  # type: ignore[operator, union-attr]
                    plain = Linear(child.in_features, child.out_features, child.bias is not None, device="meta")
                    plain.weight, plain.bias = child.weight, child.bias
                    setattr(parent, name, plain)
        self.entries.clear()
        self.active = None
        self._heads, self._pooler = dict(self.network.heads.items()), self.network.pooler

    def state(self, name: str) -> dict[str, Tensor]:
        """Every A (r × in) and B (out × r) by layer, matrix and part: "encoder.layers.0.attention.qkv.query.A"."""
        out: dict[str, Tensor] = {}
        for at, lora in self._adapted(name):
            for part, a, b in zip(lora.names, lora.down.detach().split(lora.rank), lora.up):
                out[f"{at}{part}.A"], out[f"{at}{part}.B"] = a, b.detach()
        return out

    def load(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Copy what `state` returned into the adapter of that name."""
        wanted = self.state(name)
        mine, theirs = ({key: tuple(x.shape) for key, x in tensors.items()} for tensors in (wanted, state))
        if differ := sorted(key for key in mine | theirs if mine.get(key) != theirs.get(key)):
            shapes = f"{theirs.get(differ[0], 'absent')}, not {mine.get(differ[0], 'absent')}"
            raise EverybertError(
                f"the adapter {name!r} does not fit this model: {differ[0]} is {shapes}, and {len(differ) - 1} more"
            )
        for key, tensor in wanted.items():
            tensor.copy_(state[key])

    def load_magnitudes(self, name: str, magnitudes: Mapping[str, Tensor]) -> None:
        """Turn a loaded adapter into a DoRA by the m of each matrix, named as in `state` without .A and .B."""
        for at, lora in self._adapted(name):
            layer: Any = self.network.get_submodule(at)
            weight_OI = layer.weight if layer.rounded is None else layer.rounded.weight
            norms = (weight_OI.detach().float() + lora.delta()).norm(dim=1).split(lora.rows)
            gains = [torch.ones_like(norm) for norm in norms]
            for i, part in zip(lora.parts, lora.names):
                if (magnitude := magnitudes.get(at + part)) is not None:
                    gains[i] = magnitude.to(norms[i]) / norms[i]
            lora.gain_O = torch.cat(gains).to(lora.down.dtype)

    def _adapted(self, name: str) -> Iterator[tuple[str, Lora]]:
        for at, module in self.network.named_modules():
            if isinstance(module, AdaptedLinear) and name in module.lora:
                lora = module.lora[name]
                assert isinstance(lora, Lora)
                yield at, lora


def adapted(config: EncoderConfig, targets: tuple[str, ...]) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """For each adapted matrix: the module, its adapted parts, and the rows of all its parts (empty: it has one)."""
    chosen = tuple(i for i, name in enumerate(QKV) if name in targets)
    for i in range(config.distinct_layers):
        at = f"encoder.layers.{i}."
        if chosen:
            parts = ((0,), ()) if config.family in MATRICES["qkv_in_one"] else (chosen, config.qkv_rows)
            yield f"{at}attention.qkv", *parts
        for target in [target for target in targets if target not in (*QKV, PROJECTION)]:
            apart = target == "feed_forward.input" and config.family in MATRICES["gate_apart"]
            yield at + target, (0, 1) if apart else (0,), (config.intermediate_size,) * 2 if apart else ()
    if PROJECTION in targets:
        yield f"encoder.{PROJECTION}", (0,), ()
