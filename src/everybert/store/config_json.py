"""`config.json` ↔ EncoderConfig, for every family. Settings that this library does not support are refused."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from everybert.errors import EverybertError
from everybert.model.config import FAMILIES, EncoderConfig

ALIASES = {"camembert": "roberta"}
"""Model types that equal another family."""

BERT = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "segments": "type_vocab_size",
    "norm_eps": "layer_norm_eps",
    "activation": "hidden_act",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "classifier_dropout": "classifier_dropout",
    "init_range": "initializer_range",
    "tied": "tie_word_embeddings",
    "pad_id": "pad_token_id",
}
ALBERT = BERT | {
    "embedding_size": "embedding_size",
    "layer_groups": "num_hidden_groups",
    "inner_layers": "inner_group_num",
    "classifier_dropout": "classifier_dropout_prob",
}
DISTILBERT = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "layers": "n_layers",
    "heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "max_positions": "max_position_embeddings",
    "activation": "activation",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "classifier_dropout": "seq_classif_dropout",
    "init_range": "initializer_range",
    "tied": "tie_word_embeddings",
    "pad_id": "pad_token_id",
}
MODERNBERT = {k: v for k, v in BERT.items() if k != "segments"} | {
    "norm_eps": "norm_eps",
    "norm_bias": "norm_bias",
    "linear_bias": "attention_bias",
    "head_bias": "classifier_bias",
    "activation": "hidden_activation",
    "dropout": "embedding_dropout",
    "attention_dropout": "attention_dropout",
    "feed_forward_dropout": "mlp_dropout",
    "classifier_pooling": "classifier_pooling",
}
FIELDS = dict.fromkeys(FAMILIES, BERT) | {"albert": ALBERT, "distilbert": DISTILBERT, "modernbert": MODERNBERT}
"""Family → our field → its name in config.json."""

FIXED: dict[str, dict[str, Any]] = {
    "longformer": {"global_attention": True},
    "megatron-bert": {"norm": "pre", "embedding_norm": False},
    "roberta-prelayernorm": {"norm": "pre"},
    "distilbert": {"segments": 0, "norm_eps": 1e-12},
    "modernbert": {
        "segments": 0,
        "norm": "pre",
        "first_attention_norm": False,
        "feed_forward": "glu",
        "positions": "rotary",
    },
}
"""Family → settings that all its models have."""

_ROBERTA = {"vocab_size": 50265, "pad_id": 1}
DEFAULTS: dict[str, dict[str, Any]] = {
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA | {"vocab_size": 30522},
    "longformer": _ROBERTA | {"vocab_size": 30522},
    "roberta-prelayernorm": _ROBERTA,
    "megatron-bert": {
        "vocab_size": 29056,
        "hidden_size": 1024,
        "layers": 24,
        "heads": 16,
        "intermediate_size": 4096,
    },
    "distilbert": {"layers": 6, "classifier_dropout": 0.2},
    "albert": {
        "vocab_size": 30000,
        "embedding_size": 128,
        "hidden_size": 4096,
        "heads": 64,
        "intermediate_size": 16384,
        "layer_groups": 1,
        "activation": "gelu_new",
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "classifier_dropout": 0.1,
    },
    "modernbert": {
        "vocab_size": 50368,
        "layers": 22,
        "intermediate_size": 1152,
        "max_positions": 8192,
        "norm_eps": 1e-5,
        "norm_bias": False,
        "linear_bias": False,
        "head_bias": False,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "classifier_dropout": 0.0,
        "pad_id": 50283,
    },
}
"""Family → defaults of `transformers` that differ from those of EncoderConfig."""

ROBERTA_LIKE = ("roberta", "xlm-roberta", "longformer", "roberta-prelayernorm")
"""Families whose positions start at pad_token_id + 1."""

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "quick_gelu": "gelu_sigmoid",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
ACTIVATION_NAMES = {
    "gelu": "gelu",
    "gelu_tanh": "gelu_new",
    "gelu_sigmoid": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
}

SIZES = (
    *("vocab_size", "hidden_size", "layers", "heads", "intermediate_size", "max_positions", "segments"),
    *("embedding_size", "layer_groups", "inner_layers", "pad_id"),
)
LIMIT = 1 << 28
LIMITS = dict.fromkeys(SIZES, LIMIT) | {"layers": 1 << 12, "layer_groups": 1 << 12, "inner_layers": 1 << 6}
"""Upper limits of sizes, checked before anything is built."""

EVERYBERT_FIELDS = frozenset(
    (
        "classifier_form",
        "classifier_dropout",
        "classifier_pooling",
        "dropout",
        "attention_dropout",
        "feed_forward_dropout",
    )
)
"""Fields that do not change the shape of tensors; everybert.json holds those that config.json cannot express."""


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────


def family_of(raw: dict[str, Any]) -> str:
    """The family of a config.json; an error lists the supported ones."""
    kind = raw.get("model_type")
    if kind is None:  # files from before 2020, such as Google's, have no model_type
        names = [a for a in _list(raw.get("architectures")) if isinstance(a, str)]
        kind = "bert" if "type_vocab_size" in raw and all(a.startswith("Bert") for a in names) else None
    family = ALIASES.get(kind, kind) if isinstance(kind, str) else None
    if family not in FAMILIES:
        raise EverybertError(
            f"model_type {kind!r} is not an encoder this library knows; it reads {', '.join((*FAMILIES, *ALIASES))}"
        )
    return family


def refuse_unsupported(raw: dict[str, Any]) -> None:
    """Refuse settings that would change the result if they were ignored."""
    for key, why in (
        ("is_decoder", "is a left-to-right decoder"),
        ("add_cross_attention", "has cross-attention"),
        ("is_encoder_decoder", "is an encoder-decoder"),
        ("quantization_config", "has weights quantised by another tool"),
    ):
        if raw.get(key):
            raise EverybertError(f"this model {why} ({key} is set), which is not supported; use an encoder in fp32/16")
    for name in _list(raw.get("architectures")):
        if isinstance(name, str) and name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
            raise EverybertError(f"{name} is a text generator, not an encoder; use a model made for masked words")
    kind = raw.get("position_embedding_type", "absolute")
    if kind not in ("absolute", None):
        raise EverybertError(f"position_embedding_type {kind!r} is not supported; only absolute positions are")


def read(raw: dict[str, Any]) -> EncoderConfig:
    """The encoder configuration of a config.json."""
    family = family_of(raw)
    refuse_unsupported(raw)
    settings: dict[str, Any] = {"family": family} | FIXED.get(family, {})
    for ours, their in FIELDS[family].items():
        value = raw.get(their)
        if value is None:
            value = DEFAULTS.get(family, {}).get(ours, _default(ours))
        settings[ours] = _checked(ours, their, value)
    if family in ROBERTA_LIKE:
        settings["position_offset"] = settings["pad_id"] + 1
        settings["max_positions"] -= settings["position_offset"]
    elif family == "distilbert" and raw.get("sinusoidal_pos_embds"):
        settings["positions"] = "sinusoidal"
    if family == "longformer":
        settings["windows"] = _longformer_windows(raw, settings["layers"])
    elif family == "modernbert":
        settings |= _modernbert_attention(raw, settings)
    if settings["pad_id"] >= settings["vocab_size"]:
        raise EverybertError(f"pad_token_id {settings['pad_id']} is outside the vocabulary of {settings['vocab_size']}")
    return EncoderConfig(**settings)


def _longformer_windows(raw: dict[str, Any], layers: int) -> tuple[int, ...]:
    """One-sided windows; attention_window counts both sides together."""
    sizes = raw.get("attention_window", 512)
    sizes = sizes if isinstance(sizes, list) else [sizes] * layers
    if not all(isinstance(w, int) and 0 < w < LIMIT and w % 2 == 0 for w in sizes):
        raise EverybertError("attention_window must be an even number above 0, or a list with one per layer")
    return tuple(w // 2 for w in sizes)


def _modernbert_attention(raw: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Windows and rotary bases, from the config format of transformers 4 or 5."""
    if bool(raw.get("mlp_bias", False)) != settings["linear_bias"]:
        raise EverybertError("attention_bias and mlp_bias differ, which is not supported; set both alike")
    if raw.get("classifier_activation", "gelu") != "gelu" or raw.get("decoder_bias", True) is not True:
        raise EverybertError("only classifier_activation gelu and decoder_bias true are supported for ModernBERT")
    layers, width = settings["layers"], _checked("max_positions", "local_attention", raw.get("local_attention", 128))
    kinds = raw.get("layer_types")
    if kinds is None:
        every = _checked("layers", "global_attn_every_n_layers", raw.get("global_attn_every_n_layers", 3))
        kinds = ["sliding_attention" if i % every else "full_attention" for i in range(layers)]
    if not isinstance(kinds, list) or not all(k in ("sliding_attention", "full_attention") for k in kinds):
        raise EverybertError("layer_types may only list sliding_attention and full_attention")
    theta = [raw.get("global_rope_theta", 160_000.0), raw.get("local_rope_theta", 10_000.0)]
    ropes = raw.get("rope_parameters") or {}
    for i, kind in enumerate(("full_attention", "sliding_attention")):
        rope = ropes.get(kind) if isinstance(ropes, dict) else None
        if isinstance(rope, dict):
            theta[i] = rope.get("rope_theta", theta[i])
            if rope.get("rope_type", "default") != "default":
                raise EverybertError(f"rope_type {rope['rope_type']!r} is not supported; only the default is")
    if raw.get("rope_scaling"):
        raise EverybertError("rope_scaling is not supported for ModernBERT; only the default rotary positions are")
    local = theta[0] if theta[1] is None else theta[1]
    return {
        "windows": tuple(width // 2 if k.startswith("s") else None for k in kinds)
        if "sliding_attention" in kinds
        else None,
        "rotary_theta": _checked("rotary_theta", "rope_theta", theta[0]),
        "rotary_theta_local": _checked("rotary_theta", "rope_theta", local),
    }


def _checked(ours: str, their: str, value: Any) -> Any:
    """Check the type and range of a value."""
    if ours == "activation":
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise EverybertError(f"{their} {value!r} is not supported; known: {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[value]
    if ours in ("tied", "norm_bias", "linear_bias", "head_bias"):
        good, what = isinstance(value, bool), "true or false"
    elif ours in LIMITS:
        good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LIMITS[ours]
        what = f"a whole number up to {LIMITS[ours]}"
    elif ours == "classifier_pooling":
        good, what = value in ("cls", "mean"), "cls or mean"
    else:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        good = (value is None and ours == "classifier_dropout") or (number and math.isfinite(value) and value >= 0)
        what = "a number"
    if not good:
        raise EverybertError(f"{their} must be {what}, not {str(value)[:40]}")
    return float(value) if isinstance(value, int) and ours not in LIMITS and not isinstance(value, bool) else value


def _default(ours: str) -> Any:
    return next(f.default for f in dataclasses.fields(EncoderConfig) if f.name == ours)


def _list(value: Any) -> list:
    return value if isinstance(value, list) else []


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────


def write(config: EncoderConfig, raw: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json for an encoder, and the settings that only everybert.json can hold.

    `raw` is the config.json that the model was read from, if any. Its other fields are kept, and the whole file if it
    describes the same encoder.
    """
    raw = {k: v for k, v in (raw or {}).items() if k not in DROPPED}
    if ALIASES.get(raw.get("model_type", ""), raw.get("model_type")) != config.family:
        raw = {}
    written = raw if raw and not _differences(config, read(raw)) else raw | _fields(config)
    reread = read(written)
    differ = _differences(config, reread)
    if lost := sorted(set(differ) - EVERYBERT_FIELDS):
        name = lost[0]
        raise EverybertError(
            f"the {config.family} layout has no place for {name} = {differ[name]!r} (it means "
            f"{getattr(reread, name)!r}); choose another family or setting"
        )
    return written, differ


DROPPED = ("_name_or_path", "auto_map", "torch_dtype", "dtype", "architectures", "transformers_version")
"""Fields of a config.json that describe the folder that it was read from."""


def _fields(config: EncoderConfig) -> dict[str, Any]:
    family = config.family
    fields: dict[str, Any] = {"model_type": family}
    for ours, their in FIELDS[family].items():
        fields[their] = getattr(config, ours)
    fields[FIELDS[family]["activation"]] = ACTIVATION_NAMES[config.activation]
    if family in ROBERTA_LIKE:
        fields["max_position_embeddings"] += config.position_offset
    if family == "distilbert":
        fields["sinusoidal_pos_embds"] = config.positions == "sinusoidal"
    if family in ("distilbert", "albert", "modernbert") and config.classifier_dropout is None:
        fields[FIELDS[family]["classifier_dropout"]] = config.dropout  # these families have no "same as dropout"
    if family == "longformer":
        fields["attention_window"] = [2 * (w or 0) for w in config.windows or ()]
    if family == "modernbert":
        fields |= _modernbert_fields(config)
    return fields


def _modernbert_fields(config: EncoderConfig) -> dict[str, Any]:
    windows = config.windows or (None,) * config.layers
    sizes = {w for w in windows if w is not None} or {64}
    if len(sizes) > 1:
        raise EverybertError(f"ModernBERT's layout has one sliding window for all layers, not {sorted(sizes)}")
    fields: dict[str, Any] = {
        "mlp_bias": config.linear_bias,
        "local_attention": 2 * sizes.pop(),
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": config.rotary_theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": config.rotary_theta_local},
        },
        "global_rope_theta": config.rotary_theta,
        "local_rope_theta": config.rotary_theta_local,
    }
    for every in range(1, config.layers + 1):  # transformers 4 supports only "every n-th layer is global"
        if all((w is None) == (i % every == 0) for i, w in enumerate(windows)):
            return fields | {"global_attn_every_n_layers": every}
    return fields


def _differences(config: EncoderConfig, other: EncoderConfig) -> dict[str, Any]:
    """The fields of `config` that differ in `other`. Full attention in all layers equals no windows."""

    def value(of: EncoderConfig, name: str) -> Any:
        found = getattr(of, name)
        return None if isinstance(found, tuple) and not any(found) else found

    names = [f.name for f in dataclasses.fields(config)]
    return {name: getattr(config, name) for name in names if value(config, name) != value(other, name)}
