"""Reversible name maps: the names of each family's tensors in a `transformers` folder.

A map is per module: `weight` and `bias` keep their names. The query, key and value matrices, which are one matrix
here, have three names there. Modules that the classes of a family do not have (next-sentence on RoBERTa, a second task
head) are stored as `everybert.` and our own name, which `transformers` ignores.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from everybert.model.config import EncoderConfig
from everybert.model.heads import Network

OWN = "everybert."
Names = str | tuple[str, ...]

CLASSES: dict[str, tuple[str, ...]] = {
    "Model": (),
    "ForMaskedLM": ("mlm",),
    "ForSequenceClassification": ("classify",),
    "ForTokenClassification": ("tag",),
    "ForQuestionAnswering": ("answer",),
    "ForMultipleChoice": ("choose",),
}
"""The classes that every family has, with the heads of each."""
BERT_CLASSES = CLASSES | {"ForPreTraining": ("mlm", "nsp"), "ForNextSentencePrediction": ("nsp",)}
BERT_LAYER: dict[str, Names] = {
    "attention.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "feed_forward.input": "intermediate.dense",
    "feed_forward.output": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
}
BERT_OUTSIDE = {
    "encoder.embeddings.token": "embeddings.word_embeddings",
    "encoder.embeddings.position": "embeddings.position_embeddings",
    "encoder.embeddings.segment": "embeddings.token_type_embeddings",
    "encoder.embeddings.norm": "embeddings.LayerNorm",
    "pooler.dense": "pooler.dense",
}


def _mlm(bias: str, dense: str, norm: str, decoder: str) -> dict[str, str]:
    return {"": bias, "dense": dense, "norm": norm, "decoder": decoder}


TASKS = {
    "classify": {"output": "classifier"},
    "choose": {"output": "classifier"},
    "tag": {"output": "classifier"},
    "answer": {"output": "qa_outputs"},
}
BERT_HEADS = TASKS | {
    "mlm": _mlm(
        "cls.predictions",
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.decoder",
    ),
    "nsp": {"output": "cls.seq_relationship"},
}
ROBERTA_HEADS = TASKS | {
    "classify": {"dense": "classifier.dense", "output": "classifier.out_proj"},
    "mlm": _mlm("lm_head", "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder"),
}
DISTILBERT_TASK = {"dense": "pre_classifier", "output": "classifier"}
MODERNBERT_TASK = {"dense": "head.dense", "norm": "head.norm", "output": "classifier"}


@dataclass(frozen=True)
class Layout:
    """The names of one family."""

    stem: str
    """Beginning of its class names."""
    prefix: str
    """Prefix of the encoder's names in a class with a head."""
    heads: Mapping[str, dict[str, str]]
    """Head → its modules: ours → theirs. The key "" is the head itself (the bias of mlm)."""
    classes: Mapping[str, tuple[str, ...]]
    """Class suffix → the heads of that class."""
    layer: Mapping[str, Names]
    """Modules of a layer: ours → theirs."""
    outside: Mapping[str, str]
    """Modules outside the layers: ours → theirs."""
    layer_at: str = "encoder.layer.{i}."
    """Prefix of layer i (ALBERT: inner layer k of group g)."""


def _roberta(
    stem: str, prefix: str, layer: dict[str, Names] | None = None, outside: dict[str, str] | None = None
) -> Layout:
    return Layout(stem, prefix, ROBERTA_HEADS, CLASSES, BERT_LAYER | (layer or {}), BERT_OUTSIDE | (outside or {}))


LAYOUTS: dict[str, Layout] = {
    "bert": Layout("Bert", "bert.", BERT_HEADS, BERT_CLASSES, BERT_LAYER, BERT_OUTSIDE),
    "roberta": _roberta("Roberta", "roberta."),
    "xlm-roberta": _roberta("XLMRoberta", "roberta."),
    "longformer": _roberta(
        "Longformer",
        "longformer.",
        {"attention.qkv_global": tuple(f"attention.self.{part}_global" for part in ("query", "key", "value"))},
    ),
    "roberta-prelayernorm": _roberta(
        "RobertaPreLayerNorm",
        "roberta_prelayernorm.",
        {"attention_norm": "attention.LayerNorm", "feed_forward_norm": "intermediate.LayerNorm"},
        {"encoder.norm": "LayerNorm"},
    ),
    "megatron-bert": Layout(
        "MegatronBert",
        "bert.",
        BERT_HEADS,
        BERT_CLASSES,
        BERT_LAYER | {"attention_norm": "attention.ln", "feed_forward_norm": "ln"},
        BERT_OUTSIDE | {"encoder.norm": "encoder.ln"},
    ),
    "distilbert": Layout(
        "DistilBert",
        "distilbert.",
        heads=TASKS
        | {
            "classify": DISTILBERT_TASK,
            "choose": DISTILBERT_TASK,
            "mlm": _mlm("vocab_projector", "vocab_transform", "vocab_layer_norm", "vocab_projector"),
        },
        classes=CLASSES,
        layer={
            "attention.qkv": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
            "attention.output": "attention.out_lin",
            "attention_norm": "sa_layer_norm",
            "feed_forward.input": "ffn.lin1",
            "feed_forward.output": "ffn.lin2",
            "feed_forward_norm": "output_layer_norm",
        },
        outside={k: v for k, v in BERT_OUTSIDE.items() if "segment" not in k and "pooler" not in k},
        layer_at="transformer.layer.{i}.",
    ),
    "albert": Layout(
        "Albert",
        "albert.",
        heads=TASKS
        | {
            "mlm": _mlm("predictions", "predictions.dense", "predictions.LayerNorm", "predictions.decoder"),
            "nsp": {"output": "sop_classifier.classifier"},
        },
        classes=CLASSES | {"ForPreTraining": ("mlm", "nsp")},
        layer={
            "attention.qkv": ("attention.query", "attention.key", "attention.value"),
            "attention.output": "attention.dense",
            "attention_norm": "attention.LayerNorm",
            "feed_forward.input": "ffn",
            "feed_forward.output": "ffn_output",
            "feed_forward_norm": "full_layer_layer_norm",
        },
        outside=BERT_OUTSIDE
        | {"encoder.embeddings.projection": "encoder.embedding_hidden_mapping_in", "pooler.dense": "pooler"},
        layer_at="encoder.albert_layer_groups.{g}.albert_layers.{k}.",
    ),
    "modernbert": Layout(
        "ModernBert",
        "model.",
        heads=dict.fromkeys(TASKS, MODERNBERT_TASK) | {"mlm": _mlm("decoder", "head.dense", "head.norm", "decoder")},
        classes=CLASSES,
        layer={
            "attention.qkv": "attn.Wqkv",
            "attention.output": "attn.Wo",
            "attention_norm": "attn_norm",
            "feed_forward.input": "mlp.Wi",
            "feed_forward.output": "mlp.Wo",
            "feed_forward_norm": "mlp_norm",
        },
        outside={
            "encoder.embeddings.token": "embeddings.tok_embeddings",
            "encoder.embeddings.norm": "embeddings.norm",
            "encoder.norm": "final_norm",
        },
        layer_at="layers.{i}.",
    ),
}
PREFIXES = tuple({layout.prefix for layout in LAYOUTS.values()})


# ── names ───────────────────────────────────────────────────────────────────────────────────────────────────


def transformers_names(config: EncoderConfig, name: str, held: Collection[str]) -> tuple[str, ...]:
    """The names of one of our parameters in a `transformers` file, without the prefix of the encoder.

    `held` are the heads that the class of the folder has; other heads keep our names.
    """
    layout = LAYOUTS[config.family]
    module, _, kind = name.rpartition(".")
    found: Names | None
    if match := re.fullmatch(r"encoder\.layers\.(\d+)\.(.+)", module):
        i = int(match[1])
        at = layout.layer_at.format(i=i, g=i // config.inner_layers, k=i % config.inner_layers)
        found = layout.layer.get(match[2])
    elif match := re.fullmatch(r"heads\.(\w+)\.?(.*)", module):
        at = ""
        found = layout.heads[match[1]].get(match[2]) if match[1] in held else None
    else:
        at, found = "", layout.outside.get(module)
    if found is None:
        return (OWN + name,)
    return tuple(f"{at}{part}.{kind}" for part in ((found,) if isinstance(found, str) else found))


def to_transformers(network: Network, suffix: str) -> dict[str, Tensor]:
    """The tensors of a network under the names of the `transformers` class with that suffix."""
    config, layout = network.config, LAYOUTS[network.config.family]
    tensors: dict[str, Tensor] = {}
    for name, value in network.state_dict().items():
        parts = transformers_names(config, name, layout.classes[suffix])
        bare = is_head(name) or suffix == "Model" or parts[0].startswith(OWN)
        for part, piece in zip(parts, value.detach().cpu().chunk(len(parts))):
            tensors[part if bare else layout.prefix + part] = piece.contiguous()
    if not config.tied:  # an untied class stores the bias twice
        for second, first in copies(config.family).items():
            if first in tensors:
                tensors[second] = tensors[first].clone()
    return tensors


def is_head(name: str) -> bool:
    """Whether one of our parameters belongs to a head; then its name in the file has no prefix."""
    return name.startswith("heads.")


def copies(family: str) -> dict[str, str]:
    """Second name of the MLM bias → first name. If a file has both, `transformers` uses the second."""
    mlm = LAYOUTS[family].heads["mlm"]
    return {} if mlm[""] == mlm["decoder"] else {f"{mlm['decoder']}.bias": f"{mlm['']}.bias"}


def decoder(family: str) -> str:
    """The name of the MLM decoder matrix; older files store it as a copy of the embedding."""
    return LAYOUTS[family].heads["mlm"]["decoder"] + ".weight"


def canonical(name: str) -> str:
    """The name of a tensor without prefixes, with `weight` and `bias` for the older `gamma` and `beta`."""
    name = name.removeprefix("module.")
    if name.startswith(OWN):
        return name
    name = name.removeprefix(next(filter(name.startswith, PREFIXES), ""))
    return re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))


# ── classes and heads ───────────────────────────────────────────────────────────────────────────────────────


def class_for(config: EncoderConfig, heads: Iterable[str]) -> str:
    """The suffix of the class to save a network with these heads as: that of the first task, else of pre-training."""
    layout, heads = LAYOUTS[config.family], list(heads)
    for name in heads:
        fits = name != "classify" or config.classifier_form == "family"
        if name in TASKS and fits:
            return next(suffix for suffix, held in layout.classes.items() if held == (name,))
    kept = {name for name in heads if name in ("mlm", "nsp")}
    for suffix, held in layout.classes.items():
        if kept and set(held) == kept:
            return suffix
    return "ForMaskedLM" if "mlm" in kept else "Model"


def find_heads(family: str, names: Collection[str], architectures: Iterable[str]) -> dict[str, bool]:
    """The heads of a folder, by its class and canonical tensor names: head → stored under the family's names."""
    layout = LAYOUTS[family]
    found = {m[1]: False for name in names if (m := re.match(rf"{re.escape(OWN)}heads\.(\w+)\.", name))}
    classes = [layout.classes[suffix] for a in architectures if (suffix := _suffix(a)) in layout.classes]
    for head in [head for held in classes for head in held]:
        found.setdefault(head, True)
    for head, part in (("mlm", ""), ("nsp", "output"), ("answer", "output")):
        module = layout.heads.get(head, {}).get(part, "classifier")
        if module != "classifier" and any(name.startswith(module + ".") for name in names):
            found.setdefault(head, True)
    tops = {name.split(".")[0] for name in names}
    if not any(architectures) and "classifier" in tops and not any(h in TASKS for h in found):
        found[_guess(family, names)] = True
    return found


def _guess(family: str, names: Collection[str]) -> str:
    """The head that `classifier` is in a folder without a class name."""
    dense = [part["dense"] for head, part in LAYOUTS[family].heads.items() if head == "classify" and "dense" in part]
    if dense:
        return "classify" if f"{dense[0]}.weight" in names else "tag"
    return "classify" if any(name.startswith("pooler.") for name in names) else "tag"


def _suffix(architecture: str) -> str:
    """`BertForMaskedLM` → `ForMaskedLM`."""
    match = re.search(r"(For[A-Z]\w*|Model)$", architecture)
    return match[1] if match else ""
