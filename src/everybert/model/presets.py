"""The published members of the family: a name, and the settings that make it."""

from __future__ import annotations

import difflib

from everybert.errors import EverybertError
from everybert.model.config import EncoderConfig

SIZES = {  # (layers, hidden, heads, intermediate)
    "tiny": (2, 128, 2, 512),
    "mini": (4, 256, 4, 1024),
    "small": (4, 512, 8, 2048),
    "medium": (8, 512, 8, 2048),
    "base": (12, 768, 12, 3072),
    "large": (24, 1024, 16, 4096),
}


def _sized(size: str, **settings) -> EncoderConfig:
    layers, hidden, heads, inner = SIZES[size]
    base = {"layers": layers, "hidden_size": hidden, "heads": heads, "intermediate_size": inner}
    return EncoderConfig(**{**base, **settings})


def _roberta(size: str, vocab: int = 50265, **settings) -> EncoderConfig:
    """RoBERTa: BERT with one segment, positions counted from 2, byte-level BPE (Liu et al. 2019)."""
    return _sized(
        size,
        **{
            "family": "roberta",
            "vocab_size": vocab,
            "segments": 1,
            "position_offset": 2,
            "norm_eps": 1e-5,
            "pad_id": 1,
            **settings,
        },
    )


def _albert(layers: int, hidden: int, heads: int, inner: int) -> EncoderConfig:
    """ALBERT v2: one set of layer weights, 128-wide embeddings (Lan et al. 2020)."""
    return EncoderConfig(
        family="albert",
        vocab_size=30000,
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        intermediate_size=inner,
        embedding_size=128,
        layer_groups=1,
        activation="gelu_tanh",
        dropout=0.0,
        attention_dropout=0.0,
        classifier_dropout=0.1,
    )


def _longformer(size: str) -> EncoderConfig:
    """Longformer: RoBERTa with a 512-token sliding window, global tokens and 4,096 positions (Beltagy et al. 2020)."""
    layers = SIZES[size][0]
    return _roberta(
        size,
        family="longformer",
        max_positions=4096,
        windows=(256,) * layers,
        global_attention=True,
        norm_eps=1e-5,
    )


def _modernbert(layers: int, hidden: int, heads: int, inner: int) -> EncoderConfig:
    """ModernBERT: rotary positions, pre-norm, GeGLU, every third layer global (Warner et al. 2024)."""
    return EncoderConfig(
        family="modernbert",
        vocab_size=50368,
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        intermediate_size=inner,
        max_positions=8192,
        positions="rotary",
        segments=0,
        norm="pre",
        first_attention_norm=False,
        norm_eps=1e-5,
        norm_bias=False,
        linear_bias=False,
        head_bias=False,
        feed_forward="glu",
        windows=tuple(None if i % 3 == 0 else 64 for i in range(layers)),
        dropout=0.0,
        attention_dropout=0.0,
        classifier_dropout=0.0,
        pad_id=50283,
    )


def _prenorm(size: str, **settings) -> EncoderConfig:
    """Pre-norm BERT in megatron-bert's layout: no norm after the embeddings, one at the end (Shoeybi et al. 2019)."""
    return _sized(size, **{"family": "megatron-bert", "norm": "pre", "embedding_norm": False, **settings})


PRESETS: dict[str, EncoderConfig] = {
    "bert-tiny": _sized("tiny"),
    "bert-mini": _sized("mini"),
    "bert-small": _sized("small"),
    "bert-medium": _sized("medium"),
    "bert-base-uncased": _sized("base"),
    "bert-base-cased": _sized("base", vocab_size=28996),
    "bert-base-chinese": _sized("base", vocab_size=21128),
    "bert-base-multilingual-cased": _sized("base", vocab_size=119547),
    "bert-base-multilingual-uncased": _sized("base", vocab_size=105879),
    "bert-large-uncased": _sized("large"),
    "bert-large-cased": _sized("large", vocab_size=28996),
    "minilm-l6": EncoderConfig(layers=6, hidden_size=384, heads=12, intermediate_size=1536),
    "roberta-base": _roberta("base"),
    "roberta-large": _roberta("large"),
    "distilroberta-base": _roberta("base", layers=6),
    "xlm-roberta-base": _roberta("base", vocab=250002, family="xlm-roberta"),
    "xlm-roberta-large": _roberta("large", vocab=250002, family="xlm-roberta"),
    "distilbert-base-uncased": _sized("base", family="distilbert", layers=6, segments=0, classifier_dropout=0.2),
    "distilbert-base-cased": _sized(
        "base", family="distilbert", layers=6, segments=0, vocab_size=28996, classifier_dropout=0.2
    ),
    "albert-base-v2": _albert(12, 768, 12, 3072),
    "albert-large-v2": _albert(24, 1024, 16, 4096),
    "albert-xlarge-v2": _albert(24, 2048, 16, 8192),
    "albert-xxlarge-v2": _albert(12, 4096, 64, 16384),
    "longformer-base-4096": _longformer("base"),
    "longformer-large-4096": _longformer("large"),
    "modernbert-base": _modernbert(22, 768, 12, 1152),
    "modernbert-large": _modernbert(28, 1024, 16, 2624),
    "prenorm-bert-base": _prenorm("base"),
    "prenorm-bert-large": _prenorm("large"),
    "prenorm-roberta-large": _roberta("large", family="roberta-prelayernorm", norm="pre"),
}

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
"""What each family was pre-trained to do."""


def preset(name: str) -> EncoderConfig:
    """The configuration of a published model, by name; close names are suggested."""
    if name in PRESETS:
        return PRESETS[name]
    close = difflib.get_close_matches(name, PRESETS, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(PRESETS)}"
    raise EverybertError(f"there is no preset {name!r}; {hint}")
