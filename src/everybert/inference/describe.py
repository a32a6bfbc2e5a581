"""The parameters of each part of a model, without loading weights: from a config, or the headers of a folder."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from everybert.model.config import PRESETS, EncoderConfig
from everybert.model.heads import HEADS, Network
from everybert.store.huggingface import SkipInit

OBJECTIVES = {
    "bert": "MLM + next sentence",
    "megatron-bert": "MLM + sentence order",
    "roberta": "MLM, dynamic masks",
    "roberta-prelayernorm": "MLM, dynamic masks",
    "xlm-roberta": "MLM, 100 languages",
    "distilbert": "distilled from BERT",
    "albert": "MLM + sentence order",
    "longformer": "MLM, from RoBERTa",
    "modernbert": "MLM at 30 %",
}
"""The pre-training objective of each family."""
PARTS = {
    "embeddings.token": "token embedding",
    "embeddings.position": "position embedding",
    "embeddings.segment": "segment embedding",
    "embeddings.norm": "embedding norm",
    "embeddings.projection": "embedding projection",
    "attention.": "attention",
    "feed_forward.": "feed-forward",
    "_norm.": "layer norms",
    "encoder.norm": "final norm",
    "pooler": "pooler",
}
"""From a substring of a parameter's name to the part of the model; the first match counts."""
NO_POOLER = ("distilbert", "modernbert")
"""Families whose base model in transformers has no pooler."""
COMPARED = (
    ("bert-base-uncased", "bert-large-uncased"),
    ("roberta-base", "roberta-large"),
    ("xlm-roberta-base", "xlm-roberta-large"),
    ("distilbert-base-uncased", None),
    ("albert-base-v2", "albert-large-v2"),
    ("longformer-base-4096", "longformer-large-4096"),
    ("modernbert-base", "modernbert-large"),
    ("prenorm-bert-base", "prenorm-bert-large"),
)
"""The architectures side by side: base and large."""


def parameters(
    config: EncoderConfig, heads: dict[str, int | None] | None = None, pooler: bool | None = None
) -> dict[str, int]:
    """Parameters of each part; by default of the encoder and, if the base model in transformers has one, the pooler."""
    pooler = config.family not in NO_POOLER if pooler is None else pooler
    with torch.device("meta"), SkipInit():
        network = Network(config, heads, pooler=pooler)
    counts: Counter[str] = Counter()
    for name, value in network.named_parameters():
        part = f"{name.split('.')[1]} head" if name.startswith("heads.") else _part(name)
        counts[part] += value.numel()
    return dict(counts)


def _part(name: str) -> str:
    return next(part for key, part in PARTS.items() if key in name)


def head_parameters(config: EncoderConfig, labels: int = 2) -> dict[str, int]:
    """Parameters that each head adds to the encoder, with a pooler if the head needs one and the base has none."""
    base = sum(parameters(config).values())
    return {head: sum(parameters(config, {head: labels}).values()) - base for head in HEADS}


def describe_preset(name: str, config: EncoderConfig) -> dict[str, Any]:
    """A preset as plain data."""
    counts = parameters(config)
    return {
        "name": name,
        **_shape(config),
        "objective": OBJECTIVES[config.family],
        "parameters": counts,
        "total": sum(counts.values()),
        "heads_would_add": head_parameters(config),
    }


def describe_folder(folder: Path) -> dict[str, Any]:
    """A folder as plain data, from its config.json and the headers of its weights."""
    from everybert.inference.adapters import read_bundle
    from everybert.inference.model import has_tokenizer
    from everybert.store import layouts
    from everybert.store.huggingface import read_config, read_extras
    from everybert.store.sentence_transformers import read_pooling
    from everybert.store.weights import is_quantised, open_weights
    from everybert.text.tokenizer import Tokenizer

    config, raw = read_config(folder)
    shapes = open_weights(folder).shapes
    names = {layouts.canonical(name) for name in shapes}
    found = layouts.find_heads(config.family, names, raw.get("architectures") or [])
    labels = len(raw.get("id2label") or {}) or 2
    heads: dict[str, int | None] = {head: labels for head in found if head in HEADS}
    counts = parameters(config, heads, pooler=any(name.startswith("pooler.") for name in names))
    about: dict[str, Any] = {
        "name": str(folder),
        **_shape(config),
        "parameters": counts,
        "total": sum(counts.values()),
        "heads_would_add": {h: n for h, n in head_parameters(config).items() if h not in heads},
        "heads": list(heads),
        "tensors": len(shapes),
    }
    if is_quantised(folder):
        about["weights"] = "int8, a scale a row"
    if has_tokenizer(folder):
        tokenizer = Tokenizer.load(folder)
        about["tokenizer"] = {"kind": tokenizer.kind, "size": tokenizer.size, "lowercase": tokenizer.lowercase}
    pooling = read_pooling(folder)
    if pooling.published:
        about["embedding"] = {
            "pooling": "+".join(pooling.modes),
            "normalize": pooling.normalize,
            "tokens": pooling.size or config.max_positions,
        }
    bundle = read_bundle(folder, read_extras(folder))
    if bundle.folders:
        about["adapters"] = {
            name: ", ".join(task for task, does in bundle.defaults.items() if does == name) or "by name"
            for name in bundle.folders
        }
    return about


def _shape(config: EncoderConfig) -> dict[str, Any]:
    return {
        "family": config.family,
        "layers": config.layers,
        "hidden": config.hidden_size,
        "heads_per_layer": config.heads,
        "feed_forward": config.intermediate_size,
        "positions": config.max_positions,
        "vocabulary": config.vocab_size,
    }


def compare() -> list[dict[str, Any]]:
    """The families side by side, one row per published size."""
    rows = []
    for name in [name for pair in COMPARED for name in pair if name is not None]:
        config = PRESETS[name]
        total = sum(parameters(config).values())
        rows.append({"name": name, "total": total, **_shape(config), "objective": OBJECTIVES[config.family]})
    return rows
