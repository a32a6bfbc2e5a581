"""`config.json` ↔ EncoderConfig, for every family. Settings that this library does not support are refused."""

import dataclasses
from typing import Any, get_type_hints

from everybert.errors import EverybertError
from everybert.files import as_type
from everybert.model.config import FAMILIES, FAMILY_TABLES, EncoderConfig
from everybert.store.layouts import LAYOUTS

ACTIVATIONS: dict[str, str] = FAMILY_TABLES["activations"]
ACTIVATION_NAMES = {ours: their for their, ours in reversed(ACTIVATIONS.items())}
"""Ours → the first name above."""

LIMIT = 1 << 28
LIMITS = {"layers": 1 << 12, "layer_groups": 1 << 12, "inner_layers": 1 << 6}
"""Upper limits of sizes, checked before anything is built; LIMIT for others."""
KINDS: dict[str, Any] = get_type_hints(EncoderConfig)

EVERYBERT_FIELDS = {
    *("classifier_form", "classifier_dropout", "classifier_pooling", "causal"),
    *("dropout", "attention_dropout", "feed_forward_dropout", "rotary_precision"),
}
"""Fields that do not change the shape of tensors; everybert.json holds those that config.json cannot express."""


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────


def classes(raw: dict[str, Any]) -> list[str]:
    """The class names in a config.json."""
    names = raw.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def family_of(raw: dict[str, Any]) -> str:
    """The family of a config.json; an error lists the supported ones."""
    kind = raw.get("model_type")
    if kind is None:  # files from before 2020, such as Google's, have no model_type
        kind = "bert" if "type_vocab_size" in raw and all(a.startswith("Bert") for a in classes(raw)) else None
    kind = next((name for name, layout in LAYOUTS.items() if layout.hub and layout.hub.items() <= raw.items()), kind)
    if kind not in FAMILIES:
        raise EverybertError(f"model_type {kind!r} is not supported; everybert reads {', '.join(FAMILIES)}")
    return kind


def native(raw: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a model whose code is on the hub, with the names that `transformers` uses; others as it is."""
    family = family_of(raw)
    names, kind = LAYOUTS[family].hub_fields, LAYOUTS[family].model_type or family
    if raw.get("model_type") in (None, kind) and not names.keys() & raw.keys():
        return raw
    return {names.get(key, key): value for key, value in raw.items()} | {"model_type": kind}


def refuse_unsupported(family: str, raw: dict[str, Any]) -> None:
    """Refuse settings that would change the result if they were ignored."""
    causal = bool(raw.get("is_decoder"))
    if causal and not LAYOUTS[family].generator:
        raise EverybertError(f"is_decoder is set, but transformers has no left-to-right {family}; remove it")
    for key, why in (
        ("add_cross_attention", "has cross-attention"),
        ("is_encoder_decoder", "is an encoder-decoder"),
        ("quantization_config", "has weights quantised by another tool"),
    ):
        if raw.get(key):
            raise EverybertError(f"this model {why} ({key} is set), which is not supported; use an encoder in fp32/16")
    for name in classes(raw):
        generator = not causal and name.endswith(("ForCausalLM", "LMHeadModel"))
        if generator or name.endswith("ForConditionalGeneration"):
            raise EverybertError(f"{name} is a text generator, not an encoder; use a model made for masked words")
    layout = LAYOUTS[family]
    for key, only in {**layout.required, **layout.demanded}.items():
        if raw.get(key) != only and not (key in layout.required and raw.get(key) is None):
            raise EverybertError(f"{key} {raw.get(key)!r} is not supported in a {family} model; only {only!r} is")


def read(raw: dict[str, Any], ours_alone: dict[str, Any] | None = None) -> EncoderConfig:
    """The encoder configuration of a config.json, and of the settings that everybert.json adds to it."""
    family, raw = family_of(raw), native(raw)
    refuse_unsupported(family, raw)
    layout = LAYOUTS[family]
    settings: dict[str, Any] = {"family": family, "causal": bool(raw.get("is_decoder")), **layout.fixed}
    for ours, their in layout.config.items():
        value = raw.get(their)
        if value is None:
            value = layout.defaults.get(ours, getattr(EncoderConfig, ours))
        settings[ours] = _checked(ours, their, "cls" if (family, value) == ("eurobert", "bos") else value)
    if layout.positions_after_pad:
        settings["position_offset"] = settings["pad_id"] + 1
        settings["max_positions"] -= settings["position_offset"]
    elif family == "distilbert" and raw.get("sinusoidal_pos_embds"):
        settings["positions"] = "sinusoidal"
    for name, same in (("embedding_size", "hidden_size"), ("key_value_heads", "heads")):
        if settings.get(name) == settings[same] and family != "albert":  # which has a projection all the same
            settings[name] = None
    if family == "esm" and raw.get("token_dropout"):
        settings["mask_id"] = _checked("vocab_size", "mask_token_id", raw.get("mask_token_id"))
    if "rotary_theta" in layout.defaults and "rotary_theta" not in settings:
        settings |= _rotation(raw, settings, layout.defaults["rotary_theta"])
    if family == "deberta-v2":
        settings |= _deberta_attention(raw, settings)
    if family == "ernie" and not raw.get("use_task_id"):
        settings["task_types"] = 0
    if family == "longformer":
        settings["windows"] = _longformer_windows(raw, settings["layers"])
    elif family == "modernbert":
        settings |= _modernbert_attention(raw, settings)
    for name, value in (ours_alone or {}).items():
        if name not in EVERYBERT_FIELDS:
            raise EverybertError(f"everybert.json sets {name[:40]!r}, which it may not; restore it")
        settings[name] = _checked(name, f"{name} in everybert.json", value)
    if settings["pad_id"] >= settings["vocab_size"]:
        raise EverybertError(f"pad_token_id {settings['pad_id']} is outside the vocabulary of {settings['vocab_size']}")
    return EncoderConfig(**settings)


def _rotation(raw: dict[str, Any], settings: dict[str, Any], default: float) -> dict[str, Any]:
    """The rotary base, and by what angles are divided."""
    size = settings["hidden_size"] // max(settings["heads"], 1)
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope = rope if isinstance(rope, dict) else {"rope_type": rope}
    kind = rope.get("rope_type", rope.get("type", "default"))
    odd = rope.get("mixed_b") or rope.get("partial_rotary_factor", 1) != 1 or rope.get("factor") == 0
    if odd or kind not in ("default", "linear", "ntk"):
        raise EverybertError(f"rotary positions of the kind {kind!r} ({rope}) are not supported")
    if raw.get("head_dim") not in (None, size):
        raise EverybertError(f"head_dim {raw['head_dim']} is not supported; only hidden_size / heads is ({size})")
    theta = _checked("rotary_theta", "rope_theta", rope.get("rope_theta", raw.get("rope_theta") or default))
    factor = 1.0 if kind == "default" else _checked("rotary_scale", "factor", rope.get("factor"))
    if kind == "ntk":  # as in the code of gte on the hub
        theta, factor = theta * factor, factor ** (2 / size)
    return {"rotary_theta": theta, "rotary_scale": factor}


def _longformer_windows(raw: dict[str, Any], layers: int) -> tuple[int, ...]:
    """One-sided windows; attention_window counts both sides together."""
    sizes = raw.get("attention_window", 512)
    sizes = sizes if isinstance(sizes, list) else [sizes] * layers
    if not all(isinstance(w, int) and 0 < w < LIMIT and w % 2 == 0 for w in sizes):
        raise EverybertError("attention_window must be an even number above 0, or a list with one per layer")
    return tuple(w // 2 for w in sizes)


def _deberta_attention(raw: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Relative positions, and whether there are absolute ones."""
    kinds = raw.get("pos_att_type") or []
    if sorted(kinds.split("|") if isinstance(kinds, str) else kinds) != ["c2p", "p2c"]:
        raise EverybertError(f"pos_att_type {kinds!r} is not supported; only c2p and p2c together are")
    far = raw.get("max_relative_positions", -1)
    return {
        "positions": "learned" if raw.get("position_biased_input", True) else "none",
        "relative_distance": far if isinstance(far, int) and 1 <= far <= LIMIT else settings["max_positions"],
    }


def _modernbert_attention(raw: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Windows and rotary bases, from the config format of transformers 4 or 5."""
    if bool(raw.get("mlp_bias", False)) != settings["linear_bias"]:
        raise EverybertError("attention_bias and mlp_bias differ, which is not supported; set both alike")
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
    windows = tuple(width // 2 if kind.startswith("s") else None for kind in kinds)
    return {
        "windows": windows if any(windows) else None,
        "rotary_theta": _checked("rotary_theta", "rope_theta", theta[0]),
        "rotary_theta_local": _checked("rotary_theta", "rope_theta", local),
    }


def _checked(ours: str, their: str, value: Any) -> Any:
    """A value of config.json for a field of EncoderConfig, after a check of its type and range."""
    if ours == "activation":
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise EverybertError(f"{their} {value!r} is not supported; known: {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[value]
    limit = LIMITS.get(ours, LIMIT)
    try:
        value = as_type(value, KINDS[ours])
        if type(value) is int and not 0 <= value <= limit:
            raise TypeError(f"a whole number up to {limit}")
        if type(value) is float and value < 0:
            raise TypeError("a number of at least 0")
    except TypeError as wanted:
        raise EverybertError(f"{their} must be {wanted}, not {str(value)[:40]}") from None
    return value


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────


def write(config: EncoderConfig, raw: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json for an encoder, and the settings that only everybert.json can hold.

    `raw` is the config.json it was read from, if any: its other fields are kept; all, if the encoder is the same.
    """
    code = "auto_map" if LAYOUTS[config.family].model_type else ""  # of families that transformers lacks
    known = native(raw) if raw and family_of(raw) == config.family else {}
    same, raw = known is raw, {k: v for k, v in known.items() if k not in DROPPED or k == code}
    if not same or _differences(config, read(raw)):
        raw = {k: v for k, v in raw.items() if k not in ("rope_theta", "rope_scaling")} | _fields(config)
    reread = read(raw)
    differ = _differences(config, reread)
    if lost := sorted(set(differ) - EVERYBERT_FIELDS):
        name = lost[0]
        raise EverybertError(
            f"the {config.family} layout has no place for {name} = {differ[name]!r} (it means "
            f"{getattr(reread, name)!r}); choose another family or setting"
        )
    return raw, differ


DROPPED = ("legacy", "_name_or_path", "auto_map", "torch_dtype", "dtype", "architectures", "transformers_version")
"""Fields of a config.json that describe the folder that it was read from."""


def _fields(config: EncoderConfig) -> dict[str, Any]:
    family, layout = config.family, LAYOUTS[config.family]
    fields: dict[str, Any] = {"model_type": layout.model_type or family, **layout.demanded}
    usual: dict[str, Any] = {"embedding_size": config.hidden_size, "key_value_heads": config.heads}
    if "classifier_dropout" in layout.defaults:  # these have no "same as dropout"
        usual["classifier_dropout"] = config.dropout
    for ours, their in layout.config.items():
        value = getattr(config, ours)
        fields[their] = usual.get(ours) if value is None else value
    if "activation" in layout.config:
        fields[layout.config["activation"]] = ACTIVATION_NAMES[config.activation]
    if layout.positions_after_pad:
        fields["max_position_embeddings"] += config.position_offset
    if family == "distilbert":
        fields["sinusoidal_pos_embds"] = config.positions == "sinusoidal"
    if family == "eurobert":
        fields["classifier_pooling"] = fields["classifier_pooling"].replace("cls", "bos")
    if family == "esm":
        fields["token_dropout"] = config.mask_id is not None
        fields |= {"mask_token_id": config.mask_id} if config.mask_id is not None else {}
    if family == "deberta-v2":
        fields |= {"pos_att_type": ["p2c", "c2p"], "max_relative_positions": config.relative_distance}
        fields["position_biased_input"] = config.positions == "learned"
    if "rotary_theta" in layout.defaults and "rotary_theta" not in layout.config:
        scaled = {"rope_type": "linear", "factor": config.rotary_scale} if config.rotary_scale != 1 else {}
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rotary_theta, **scaled}
    if family == "ernie":
        fields["use_task_id"] = config.task_types > 0
        fields["task_type_vocab_size"] = config.task_types or 3
    if config.causal is True and layout.generator:
        fields["is_decoder"] = True
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
        setting = getattr(of, name)
        return None if isinstance(setting, tuple) and not any(setting) else setting

    names = [f.name for f in dataclasses.fields(config)]
    return {name: getattr(config, name) for name in names if value(config, name) != value(other, name)}
