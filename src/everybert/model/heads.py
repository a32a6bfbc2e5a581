"""Heads, which turn hidden states into predictions, and the network of an encoder with its heads.

Their forms are those of `transformers`, family by family, so that checkpoints and scores carry over:

| head      | reads             | BERT, ALBERT, pre-norm BERT | RoBERTa's family   | DistilBERT     | ModernBERT       |
|-----------|-------------------|-----------------------------|--------------------|----------------|------------------|
| mlm       | masked positions  | dense, act, LN, tied decoder, in all of them                                         |
| nsp       | pooled [CLS]      | linear (ALBERT's sentence order too), in all of them                                |
| classify  | [CLS]             | pooler, linear              | own dense+tanh     | own dense+relu | dense+gelu+LN    |
| choose    | [CLS]             | pooler, linear              | pooler, linear     | own dense+relu | dense+gelu+LN    |
| tag       | every token       | linear                      | linear             | linear         | dense+gelu+LN    |
| answer    | every token       | linear                      | linear             | linear         | dense+gelu+LN    |

The classifiers of ELECTRA and EuroBERT have a dense layer with GELU, RoFormer's has one with
its own activation. ELECTRA's discriminator (rtd) tells for every token whether it was replaced.

Legend: T tokens, B sequences, H hidden, E embedding width, V vocabulary, M masked positions, C labels, F features.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args, get_type_hints

import torch
from torch import Tensor, nn

from everybert.errors import EverybertError
from everybert.model.config import FAMILY_TABLES, EncoderConfig
from everybert.model.encoder import Encoder, activate, initialise
from everybert.model.linear import Linear, linear
from everybert.model.pooling import pool
from everybert.model.ragged import Ragged

HEADS = ("mlm", "nsp", "rtd", "classify", "choose", "tag", "answer")
SEQUENCE_HEADS = ("classify", "choose", "nsp")
"""The heads with one output per sequence; the others have one per token."""
MASKED_LM: dict[str, list[str]] = FAMILY_TABLES["masked_lm"]


class Pooler(nn.Module):
    """tanh(W·x + b) of the first token: BERT's vector of a sequence."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)

    def forward(self, first_BH: Tensor) -> Tensor:
        """(B, H) → (B, H)."""
        return torch.tanh(self.dense(first_BH))


class MaskedLM(nn.Module):
    """logits = LN(act(W·x + b)) · Eᵀ + c, with E the token embedding unless untied (Devlin et al. 2019, §3.1).

    EuroBERT's logits are x · Eᵀ.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width = config.embedding_width
        exact_gelu = {_family(config), config.family}.intersection(MASKED_LM["exact_gelu"])
        self.activation = "gelu" if exact_gelu else config.activation
        self.dense = self.norm = self.bias = None
        if config.family not in MASKED_LM["decoder_alone"]:
            self.dense = Linear(config.hidden_size, width, bias=config.head_bias)
            self.norm = nn.LayerNorm(width, eps=config.norm_eps, bias=config.norm_bias)
            self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.decoder = None if config.tied else Linear(width, config.vocab_size, bias=False)

    def forward(self, x_MH: Tensor, token_VE: Tensor) -> Tensor:
        """(M, H) → (M, V). Pass only the masked positions: the decoder is the largest product of the model."""
        ready_ME = x_MH
        if self.dense is not None and self.norm is not None:
            ready_ME = self.norm(activate(self.dense(x_MH), self.activation))
        return linear(ready_ME, token_VE if self.decoder is None else self.decoder.weight, self.bias)


FORMS: dict[str, str] = FAMILY_TABLES["classifiers"]
"""The form of each family's sequence classifier."""
DENSE: dict[str, tuple[str, bool]] = FAMILY_TABLES["dense"]
"""Forms with a dense layer: its activation ("" is that of the encoder), and whether dropout comes before it."""


class TaskHead(nn.Module):
    """[dropout → dense → act → norm →] dropout → output; the part in brackets in forms with a dense layer."""

    def __init__(
        self, config: EncoderConfig, labels: int, form: str = "linear", drop: bool = True, width: int | None = None
    ) -> None:
        super().__init__()
        width = width or config.hidden_size
        rate = config.classifier_dropout if config.classifier_dropout is not None else config.dropout
        self.activation, self.drops_first = DENSE.get(form, ("", False))
        self.activation = self.activation or config.activation
        self.dense = Linear(width, width, bias=config.head_bias) if form in DENSE else None
        self.norm = nn.LayerNorm(width, eps=config.norm_eps, bias=config.norm_bias) if form == "norm" else None
        self.dropout = nn.Dropout(rate if drop else 0.0)
        self.output = Linear(width, labels)

    def forward(self, x: Tensor) -> Tensor:
        """(…, H) → (…, C)."""
        if self.dense is not None:
            x = self.dense(self.dropout(x) if self.drops_first else x)
            x = torch.tanh(x) if self.activation == "tanh" else activate(x, self.activation)
        if self.norm is not None:
            x = self.norm(x)
        return self.output(self.dropout(x))


def make_head(config: EncoderConfig, name: str, labels: int | None = None) -> nn.Module:
    """A freshly initialised head in the form of the configuration's family."""
    family = _family(config)
    if name not in HEADS:
        raise EverybertError(f"there is no head {name!r}; choose one of {', '.join(HEADS)}")
    if name in ("classify", "tag") and (labels is None or labels < 1):
        raise EverybertError(f"the {name} head needs its number of labels")
    form, token_form = FORMS[family], "norm" if family == "modernbert" else "linear"
    shapes: dict[str, tuple[int, str, bool]] = {  # outputs, form, whether it has dropout
        "nsp": (2, "linear", family == "albert"),
        "classify": (labels or 0, "linear" if config.classifier_form == "cls" else form, True),
        "rtd": (1, "detect", False),
        "choose": (1, {"roberta": "linear", "electra": "summary"}.get(family, form), True),
        "tag": (labels or 0, token_form, True),
        "answer": (2, token_form, family in ("distilbert", "modernbert")),
    }
    head = MaskedLM(config) if name == "mlm" else TaskHead(config, *shapes[name])
    initialise(head, config)
    return head


class Network(nn.Module):
    """An encoder with its heads. `heads` maps the name of a head to its number of labels (None if fixed)."""

    def __init__(self, config: EncoderConfig, heads: dict[str, int | None] | None = None, pooler: bool = False) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.heads = nn.ModuleDict()
        self.pooler: Pooler | None = Pooler(config) if pooler else None
        self.digest: str | None = None
        """The hash of the encoder before it was rounded; adapters are matched by it."""
        initialise(self, config)
        for name, labels in (heads or {}).items():
            self.add_head(name, labels)

    def add_head(self, name: str, labels: int | None = None) -> None:
        """Add a freshly initialised head, and the pooler if the head needs one."""
        self.heads[name] = make_head(self.config, name, labels).to(self.encoder.embeddings.token.weight)
        self.add_pooler()

    def add_pooler(self) -> None:
        """Add a freshly initialised pooler, if a head reads one and there is none."""
        if self.pooler is None and any(map(self.reads_pooler, self.heads)):
            self.pooler = Pooler(self.config)
            initialise(self.pooler, self.config)
            self.pooler.to(self.encoder.embeddings.token.weight)

    def reads_pooler(self, name: str) -> bool:
        """Whether the head of that name reads the pooler's output in this family."""
        family = _family(self.config)
        if name == "classify":
            return self.config.classifier_form == "family" and FORMS[family] == "pooler"
        return name == "nsp" or (name == "choose" and family in ("bert", "albert", "roberta"))

    def forward(self, batch: Ragged) -> Tensor:
        """(T) ids → (T, H): the encoder's output."""
        return self.encoder(batch)

    def mlm_logits(self, x_TH: Tensor, index_M: Tensor | None = None) -> Tensor:
        """(M, V): MLM logits at the given token indices; by default at all tokens."""
        x_MH = x_TH if index_M is None else x_TH[index_M]
        return self.head("mlm")(x_MH, self.encoder.embeddings.token.weight)

    def sequence_logits(self, x_TH: Tensor, batch: Ragged, name: str) -> Tensor:
        """(B, C): logits of nsp or classify; (B, 1) of choose, with one sequence per choice."""
        head, pooling = self.head(name), self.config.classifier_pooling
        if pooling == "late" and name == "classify":
            return pool(head(x_TH), batch, "mean")
        if pooling == "mean":
            return head(pool(x_TH, batch, "mean"))
        first_BH = x_TH[batch.first_B]
        return head(self.pooler(first_BH) if self.pooler is not None and self.reads_pooler(name) else first_BH)

    def token_logits(self, x_TH: Tensor, name: str) -> Tensor:
        """(T, C): logits of tag; (T, 2) start and end logits of answer; (T, 1) of rtd."""
        return self.head(name)(x_TH)

    def head(self, name: str) -> nn.Module:
        """The head of that name; an error names the heads that there are."""
        if name not in self.heads:
            has = ", ".join(self.heads) or "none"
            raise EverybertError(f"this model has no {name} head (it has: {has}); load or fine-tune one that has")
        return self.heads[name]


def _family(config: EncoderConfig) -> str:
    """The family whose head forms this one shares."""
    return FAMILY_TABLES["families"][config.family].get("like", config.family)


# ── feature-based heads ──────────────────────────────────────────────────────────────────────────────────────
# A linear layer on hidden states of the frozen encoder: the rows of Devlin et al. 2019, table 7. transformers has no
# such heads: the everybert.json of a folder says that it has one.

LAST = 4
"""How many layers are summed or concatenated."""


@dataclass(frozen=True)
class FeatureConfig:
    """What a feature-based head reads."""

    layers: Literal["embeddings", "second-to-last", "last", "weighted", "sum", "concat"] = "last"
    """One of the hidden states, the weighted sum of all layers, or the sum or concatenation of the last four."""
    pool: Literal["mean", "cls"] = "mean"
    """For whole sequences: the mean over tokens, or [CLS]."""

    def __post_init__(self) -> None:
        choices = get_args(get_type_hints(FeatureConfig)["layers"])
        if self.layers not in choices or self.pool not in ("mean", "cls"):
            raise EverybertError(f"features are {', '.join(choices)}, pooled by mean or cls")


class FeatureHead(TaskHead):
    """dropout → linear, on features of a frozen encoder; weighted: on Σ softmax(w)ₗ xₗ (Peters et al. 2018, eq. 1)."""

    def __init__(self, config: EncoderConfig, labels: int, features: FeatureConfig, name: str) -> None:
        layers = min(LAST, config.layers) if features.layers == "concat" else 1
        super().__init__(config, labels, width=layers * config.hidden_size)
        self.features = features
        self.pooled = name in SEQUENCE_HEADS
        self.mix = nn.Parameter(torch.zeros(config.layers)) if features.layers == "weighted" else None
        initialise(self, config)

    def read(self, encoder: Encoder, batch: Ragged) -> Tensor:
        """What the head reads of the encoder's hidden states: (B, F) for whole sequences, (T, F) for tokens."""
        states: list[Tensor] = []
        encoder(batch, states)
        single = {"embeddings": 0, "second-to-last": -2, "last": -1}
        last = states[-min(LAST, len(states) - 1) :]
        if self.features.layers in single:
            x = states[single[self.features.layers]]
        elif self.features.layers == "sum":
            x = torch.stack(last).sum(0)
        else:
            x = torch.cat(last if self.features.layers == "concat" else states[1:], dim=-1)
        return pool(x, batch, self.features.pool) if self.pooled else x

    def forward(self, x: Tensor) -> Tensor:
        """(…, F) → (…, C). Stored features are in half precision, on the host."""
        x = x.to(self.output.weight)
        if self.mix is not None:
            x = self.mix.softmax(0) @ x.unflatten(-1, (len(self.mix), -1))
        return super().forward(x)


def add_feature_head(network: Network, name: str, labels: int, features: FeatureConfig) -> FeatureHead:
    """Add a feature-based head in place of the family's own."""
    head = FeatureHead(network.config, labels, features, name).to(network.encoder.embeddings.token.weight)
    network.heads[name] = head
    return head


def head_logits(network: Network, batch: Ragged, name: str, encode: Callable[[Ragged], Tensor] | None = None) -> Tensor:
    """Encoder and head: (B, C) for whole sequences, (T, C) for tokens, for every kind of head.

    `encode` computes the hidden states in place of the encoder's own forward pass.
    """
    head = network.head(name)
    if isinstance(head, FeatureHead):
        return head(head.read(network.encoder, batch))
    x_TH = (encode or network.encoder)(batch)
    if name in SEQUENCE_HEADS:
        return network.sequence_logits(x_TH, batch, name)
    return network.token_logits(x_TH, name)
