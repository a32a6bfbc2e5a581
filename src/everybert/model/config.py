"""One frozen configuration for the whole family: a variant is a set of values, not a copy of a file.

The fields of `EncoderConfig` are all that differs between BERT, RoBERTa, XLM-R, DistilBERT, ALBERT, Longformer,
ModernBERT, DeBERTa, EuroBERT and the others. `PRESETS` has the published models, from presets.toml.
"""

import dataclasses
import difflib
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal, get_args, get_origin

from everybert.errors import EverybertError

FAMILY_TABLES = tomllib.loads((files("everybert.model") / "presets.toml").read_text("utf-8"))
FAMILIES: tuple[str, ...] = tuple(FAMILY_TABLES["families"])

Activation = Literal["gelu", "gelu_tanh", "gelu_sigmoid", "relu", "silu"]


@dataclass(frozen=True)
class EncoderConfig:
    """The shape of an encoder. Sizes are counts; probabilities lie in [0, 1)."""

    family: str = "bert"
    """The `transformers` model type whose folder layout and head forms this encoder has."""
    vocab_size: int = 30522
    """V: rows of the token embedding."""
    hidden_size: int = 768
    """H: width of the residual stream."""
    layers: int = 12
    """L: the layers that are applied (ALBERT: groups of `inner_layers`); 0 (static): the output is the embeddings."""
    heads: int = 12
    """A: attention heads; the head size D is H / A."""
    key_value_heads: int | None = None
    """Heads of keys and values, each shared by a group of A / this many heads (EuroBERT); None: A."""
    intermediate_size: int = 3072
    """Width inside the feed-forward block."""
    embedding_size: int | None = None
    """E: width of the embedding tables when it differs from H (ALBERT's factorisation); None means H."""
    max_positions: int = 512
    """The window: the longest sequence, special tokens included."""
    positions: Literal["learned", "sinusoidal", "rotary", "none"] = "learned"
    """How positions are encoded in the input, if at all. Sinusoidal is a fixed table (Vaswani et al. 2017, §3.5)."""
    relative: Literal["none", "buckets", "alibi", "disentangled"] = "none"
    """What is added to attention scores: a number per head and distance, learnt (buckets, MPNet) or fixed (alibi,
    jina), or products of contents with positions (disentangled, DeBERTa)."""
    relative_buckets: int = 32
    """Number of distance buckets: in total (MPNet) or per direction (DeBERTa; 0: one for each distance)."""
    relative_distance: int = 128
    """Larger distances share the last bucket."""
    position_offset: int = 0
    """Unused rows at the start of the position table (RoBERTa counts from padding_idx + 1 = 2)."""
    segments: int = 2
    """Rows of the segment table: 2 (BERT), 1 (RoBERTa) or 0 (DistilBERT, ModernBERT: no table)."""
    task_types: int = 0
    """ERNIE: rows of its table of tasks; row 0 is added to every token."""
    embedding_norm: bool = True
    """LayerNorm after the embedding sum (megatron-bert has none)."""
    norm: Literal["post", "pre"] = "post"
    """LayerNorm after each residual sum (BERT) or before each block, with one more at the end (pre-norm)."""
    first_attention_norm: bool = True
    """Pre-norm only: whether layer 0 normalises before attention (not in ModernBERT, after its embedding norm)."""
    norm_eps: float = 1e-12
    """LayerNorm's epsilon."""
    norm_bias: bool = True
    """Whether LayerNorm has a bias."""
    norm_kind: Literal["layer", "rms"] = "layer"
    """LayerNorm, or RMSNorm: x / √mean(x²), scaled (EuroBERT)."""
    linear_bias: bool = True
    """Whether the layers' matrices have biases."""
    gate_bias: bool = True
    """With `linear_bias`: whether the first matrix of a gated block has a bias as well (not in gte and jina)."""
    activation: Activation = "gelu"
    """gelu: x·Φ(x) exactly; gelu_tanh: its tanh form (ALBERT); gelu_sigmoid: x·σ(1.702x); relu; silu."""
    feed_forward: Literal["mlp", "glu"] = "mlp"
    """mlp: W₂·act(W₁x). glu: W₂·(act(W₁x) ⊙ W₃x), GeGLU in ModernBERT."""
    gate_last: bool = False
    """glu: whether W₁ follows W₃ in the matrix that holds both (gte)."""
    layer_groups: int | None = None
    """ALBERT: the number of groups that have weights of their own; None: every layer has its own."""
    inner_layers: int = 1
    """ALBERT: layers per group, which are applied one after the other."""
    windows: tuple[int | None, ...] | None = None
    """Per layer, the one-sided sliding window w: token i attends to j if |i − j| ≤ w; None or 0: to all tokens."""
    causal: Literal[False, True, "reverse"] = False
    """True: tokens attend to themselves and those before, and predict the next; "reverse": the same from the right."""
    global_attention: bool = False
    """Longformer: chosen tokens attend to all tokens and all attend to them, with projections of their own."""
    rotary_theta: float = 160_000.0
    """Rotary base of the full-attention layers."""
    rotary_theta_local: float = 10_000.0
    """Rotary base of the sliding-window layers."""
    rotary_scale: float = 1.0
    """Rotary angles are divided by it (linear scaling; NTK scaling is this and a larger base)."""
    rotary_precision: Literal["float32", "float16", "bfloat16"] = "float32"
    """What the rotary rates θ^(−2i/D) are rounded to (ESM-2: float16, in which it was trained)."""
    rotary_pairs: bool = False
    """RoFormer: features 2i and 2i + 1 are rotated together, by a stored table of sines and cosines."""
    rotary_value: bool = False
    """Whether the values are rotated as well."""
    mask_id: int | None = None
    """ESM-2: the id of the mask token, if its embedding is replaced by zero and the others are scaled up."""
    dropout: float = 0.1
    """On the embeddings and on each block's output, while training."""
    attention_dropout: float = 0.1
    """On the attention probabilities, while training, on every backend."""
    feed_forward_dropout: float = 0.0
    """Inside the feed-forward block, before its second matrix (ModernBERT's mlp_dropout)."""
    classifier_dropout: float | None = None
    """Before a task head's output layer; None means `dropout`."""
    classifier_pooling: Literal["cls", "mean", "late"] = "cls"
    """ModernBERT, EuroBERT: what their sequence classifier reads; late: each token, and the logits are averaged."""
    classifier_form: Literal["family", "cls"] = "family"
    """family: the sequence classifier `transformers` gives this family; cls: one matrix on the raw [CLS] vector."""
    head_bias: bool = True
    """Whether the dense layer inside the MLM and task heads has a bias (ModernBERT: no)."""
    init_range: float = 0.02
    """Standard deviation of fresh weights."""
    tied: bool = True
    """Whether the MLM decoder is the token embedding transposed."""
    pad_id: int = 0
    """Id of the padding token, which fills batches of constant size."""

    def __post_init__(self) -> None:
        def refuse(why: str) -> None:
            raise EverybertError(f"encoder configuration: {why}")

        choices = {f.name: get_args(f.type) for f in dataclasses.fields(self) if get_origin(f.type) is Literal}
        for name, allowed in (choices | {"family": FAMILIES}).items():
            if (value := getattr(self, name)) not in allowed:
                refuse(f"{name} {value!r} is not known; choose one of {', '.join(map(str, allowed))}")
        poolings = FAMILY_TABLES["poolings"].get(self.family, ["cls"])
        if self.classifier_pooling not in poolings:
            refuse(f"classifier_pooling {self.classifier_pooling!r} is not for {self.family}: {' or '.join(poolings)}")
        sizes = ("vocab_size", "hidden_size", "layers", "inner_layers", "heads", "intermediate_size", "max_positions")
        for name in sizes:
            value = getattr(self, name)
            least = 0 if name == "layers" and self.family == "static" else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                refuse(f"{name} must be a whole number of at least {least}, not {value!r}")
        if self.hidden_size % self.heads:
            refuse(f"hidden_size {self.hidden_size} is not a multiple of heads {self.heads}")
        if self.key_value_heads is not None and (self.key_value_heads < 1 or self.heads % self.key_value_heads):
            refuse(f"heads {self.heads} is not a multiple of key_value_heads {self.key_value_heads}")
        for name in ("dropout", "attention_dropout", "feed_forward_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                refuse(f"{name} must lie in [0, 1), not {getattr(self, name)!r}")
        if self.layer_groups is not None and not 1 <= self.layer_groups <= self.layers:
            refuse(f"layer_groups must lie in 1…{self.layers}, not {self.layer_groups}")
        object.__setattr__(self, "windows", tuple(w or None for w in self.windows or ()) or None)
        if self.windows is not None:
            if len(self.windows) != self.layers:
                refuse(f"windows has {len(self.windows)} entries for {self.layers} layers")
            if any(w is not None and w < 1 for w in self.windows):
                refuse("a sliding window must be at least 1")
        if self.causal and self.global_attention:
            refuse("causal attention has no global tokens: leave global_attention out")
        if self.positions == "rotary" and self.head_size % 2:
            refuse(f"rotary positions need an even head size, not {self.head_size}")

    @property
    def head_size(self) -> int:
        """D = H / A."""
        return self.hidden_size // self.heads

    @property
    def qkv_rows(self) -> tuple[int, int, int]:
        """The rows of Q, K and V in the matrix that holds all three."""
        shared = (self.key_value_heads or self.heads) * self.head_size
        return self.hidden_size, shared, shared

    @property
    def embedding_width(self) -> int:
        """E, which is H unless the embeddings are factorised."""
        return self.embedding_size or self.hidden_size

    @property
    def layer_order(self) -> tuple[int, ...]:
        """Which set of weights each applied layer uses: (0, 1, …) or, for ALBERT, the groups repeated."""
        if self.layer_groups is None:
            return tuple(range(self.layers))
        groups, inner = [i * self.layer_groups // self.layers for i in range(self.layers)], self.inner_layers
        return tuple(group * inner + k for group in groups for k in range(inner))

    @property
    def distinct_layers(self) -> int:
        """How many layers have weights of their own."""
        return max(self.layer_order, default=-1) + 1

    def window(self, layer: int) -> int | None:
        """The one-sided sliding window of an applied layer, or None for full attention."""
        return self.windows[layer] if self.windows is not None else None

    def replace(self, **changes: Any) -> "EncoderConfig":
        """A copy with some fields changed; unknown names are an error."""
        known = {f.name for f in dataclasses.fields(self)}
        for name in changes:
            if name not in known:
                raise EverybertError(f"encoder configuration has no field {name!r}")
        if self.windows and "layers" in changes and "windows" not in changes:  # the pattern of the layers continues
            size = len(self.windows)
            period = next(p for p in range(1, size + 1) if self.windows[p:] == self.windows[: size - p])
            changes["windows"] = tuple(self.windows[i % period] for i in range(changes["layers"]))
        return dataclasses.replace(self, **changes)


def padded_vocabulary(size: int) -> int:
    """A vocabulary size rounded up to a multiple of 64, for fast matrix products."""
    return -(-size // 64) * 64


# ── published models ─────────────────────────────────────────────────────────────────────────────────────────


def _read_presets() -> dict[str, EncoderConfig]:
    """The models of presets.toml."""
    presets = {}
    for name, row in FAMILY_TABLES["presets"].items():
        size, family = FAMILY_TABLES["sizes"][row["size"]], FAMILY_TABLES["families"][row["family"]]
        shape = dict(zip(("layers", "hidden_size", "heads", "intermediate_size"), size))
        values = {**FAMILY_TABLES["families"].get(family.get("like"), {}), **family, **shape, **row}
        if pattern := values.get("windows"):
            values["windows"] = tuple(pattern[i % len(pattern)] for i in range(shape["layers"]))
        presets[name] = EncoderConfig(**{key: value for key, value in values.items() if key not in ("like", "size")})
    return presets


PRESETS = _read_presets()


def preset(name: str) -> EncoderConfig:
    """The configuration of a published model, by name; similar names are suggested."""
    if name in PRESETS:
        return PRESETS[name]
    close = [known for known in PRESETS if known.startswith(name)][:3] or difflib.get_close_matches(name, PRESETS, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(PRESETS)}"
    raise EverybertError(f"there is no preset {name!r}; {hint}")
