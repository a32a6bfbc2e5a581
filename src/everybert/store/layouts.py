"""Reversible name maps: what each family's tensors are called in a `transformers` folder.

A map is by module: `weight` and `bias` keep their names. Three names stand for Q, K and V, which we hold as one
matrix. What a family's classes have no place for (next-sentence on RoBERTa, a second task head) is stored under
`everybert.` and our own name, which `transformers` passes over.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
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
"""The classes every family has, and the heads each holds."""


@dataclass(frozen=True)
class Layout:
    """One family's names."""

    stem: str
    """What its class names begin with."""
    prefix: str
    """What stands before the encoder's names in a class with a head."""
    layer_at: str
    """Where layer i is (ALBERT: inner layer k of group g)."""
    layer: dict[str, Names]
    """A layer's modules: ours → theirs."""
    outside: dict[str, str]
    """The modules outside the layers: ours → theirs."""
    heads: dict[str, dict[str, str]]
    """For each head, its modules: ours → theirs. The key "" is the head itself (its own bias)."""
    classes: dict[str, tuple[str, ...]]
    """Class suffix → the heads that class holds."""


def _qkv(at: str, *names: str) -> tuple[str, ...]:
    return tuple(at + name for name in names)


BERT_LAYER: dict[str, Names] = {
    "attention.qkv": _qkv("attention.self.", "query", "key", "value"),
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
TASKS = {
    "classify": {"output": "classifier"},
    "choose": {"output": "classifier"},
    "tag": {"output": "classifier"},
    "answer": {"output": "qa_outputs"},
}
BERT = Layout(
    stem="Bert",
    prefix="bert.",
    layer_at="encoder.layer.{i}.",
    layer=BERT_LAYER,
    outside=BERT_OUTSIDE,
    heads=TASKS
    | {
        "mlm": {
            "": "cls.predictions",
            "dense": "cls.predictions.transform.dense",
            "norm": "cls.predictions.transform.LayerNorm",
            "decoder": "cls.predictions.decoder",
        },
        "nsp": {"output": "cls.seq_relationship"},
    },
    classes=CLASSES | {"ForPreTraining": ("mlm", "nsp"), "ForNextSentencePrediction": ("nsp",)},
)
ROBERTA_HEADS = TASKS | {
    "classify": {"dense": "classifier.dense", "output": "classifier.out_proj"},
    "mlm": {
        "": "lm_head",
        "dense": "lm_head.dense",
        "norm": "lm_head.layer_norm",
        "decoder": "lm_head.decoder",
    },
}
DISTILBERT_TASK = {"dense": "pre_classifier", "output": "classifier"}
MODERNBERT_TASK = {"dense": "head.dense", "norm": "head.norm", "output": "classifier"}


def _roberta(
    stem: str, prefix: str, layer: dict[str, Names] | None = None, outside: dict[str, str] | None = None
) -> Layout:
    return Layout(
        stem=stem,
        prefix=prefix,
        layer_at="encoder.layer.{i}.",
        layer=BERT_LAYER | (layer or {}),
        outside=BERT_OUTSIDE | (outside or {}),
        heads=ROBERTA_HEADS,
        classes=CLASSES,
    )


LAYOUTS: dict[str, Layout] = {
    "bert": BERT,
    "roberta": _roberta("Roberta", "roberta."),
    "xlm-roberta": _roberta("XLMRoberta", "roberta."),
    "longformer": _roberta(
        "Longformer",
        "longformer.",
        {"attention.qkv_global": _qkv("attention.self.", "query_global", "key_global", "value_global")},
    ),
    "roberta-prelayernorm": _roberta(
        "RobertaPreLayerNorm",
        "roberta_prelayernorm.",
        {"attention_norm": "attention.LayerNorm", "feed_forward_norm": "intermediate.LayerNorm"},
        {"encoder.norm": "LayerNorm"},
    ),
    "megatron-bert": Layout(
        stem="MegatronBert",
        prefix="bert.",
        layer_at="encoder.layer.{i}.",
        layer=BERT_LAYER | {"attention_norm": "attention.ln", "feed_forward_norm": "ln"},
        outside=BERT_OUTSIDE | {"encoder.norm": "encoder.ln"},
        heads=BERT.heads,
        classes=BERT.classes,
    ),
    "distilbert": Layout(
        stem="DistilBert",
        prefix="distilbert.",
        layer_at="transformer.layer.{i}.",
        layer={
            "attention.qkv": _qkv("attention.", "q_lin", "k_lin", "v_lin"),
            "attention.output": "attention.out_lin",
            "attention_norm": "sa_layer_norm",
            "feed_forward.input": "ffn.lin1",
            "feed_forward.output": "ffn.lin2",
            "feed_forward_norm": "output_layer_norm",
        },
        outside={k: v for k, v in BERT_OUTSIDE.items() if "segment" not in k and "pooler" not in k},
        heads=TASKS
        | {
            "classify": DISTILBERT_TASK,
            "choose": DISTILBERT_TASK,
            "mlm": {
                "": "vocab_projector",
                "dense": "vocab_transform",
                "norm": "vocab_layer_norm",
                "decoder": "vocab_projector",
            },
        },
        classes=CLASSES,
    ),
    "albert": Layout(
        stem="Albert",
        prefix="albert.",
        layer_at="encoder.albert_layer_groups.{g}.albert_layers.{k}.",
        layer={
            "attention.qkv": _qkv("attention.", "query", "key", "value"),
            "attention.output": "attention.dense",
            "attention_norm": "attention.LayerNorm",
            "feed_forward.input": "ffn",
            "feed_forward.output": "ffn_output",
            "feed_forward_norm": "full_layer_layer_norm",
        },
        outside=BERT_OUTSIDE
        | {"encoder.embeddings.projection": "encoder.embedding_hidden_mapping_in", "pooler.dense": "pooler"},
        heads=TASKS
        | {
            "mlm": {
                "": "predictions",
                "dense": "predictions.dense",
                "norm": "predictions.LayerNorm",
                "decoder": "predictions.decoder",
            },
            "nsp": {"output": "sop_classifier.classifier"},
        },
        classes=CLASSES | {"ForPreTraining": ("mlm", "nsp")},
    ),
    "modernbert": Layout(
        stem="ModernBert",
        prefix="model.",
        layer_at="layers.{i}.",
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
        heads=dict.fromkeys(TASKS, MODERNBERT_TASK)
        | {"mlm": {"": "decoder", "dense": "head.dense", "norm": "head.norm", "decoder": "decoder"}},
        classes=CLASSES,
    ),
}
BASES = tuple({layout.prefix for layout in LAYOUTS.values()})


# ── our names → theirs ──────────────────────────────────────────────────────────────────────────────────────


def theirs(config: EncoderConfig, name: str, held: Collection[str]) -> tuple[str, ...]:
    """The names in the file, without the encoder's prefix, of one of our parameters.

    `held` are the heads that the folder's class has a place for; the others keep our names.
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


def to_theirs(network: Network, suffix: str) -> dict[str, Tensor]:
    """The network's tensors as the class of that suffix names them."""
    config, layout = network.config, LAYOUTS[network.config.family]
    tensors: dict[str, Tensor] = {}
    for name, value in network.state_dict().items():
        parts = theirs(config, name, layout.classes[suffix])
        bare = is_head(name) or suffix == "Model" or parts[0].startswith(OWN)
        for part, piece in zip(parts, value.detach().cpu().chunk(len(parts))):
            tensors[part if bare else layout.prefix + part] = piece.contiguous()
    if not config.tied:  # an untied class has its bias twice
        for second, first in copies(config.family).items():
            if first in tensors:
                tensors[second] = tensors[first].clone()
    return tensors


def is_head(name: str) -> bool:
    """Whether one of our parameters belongs to a head, so that its name in the file has no prefix."""
    return name.startswith("heads.")


def copies(family: str) -> dict[str, str]:
    """Names under which the MLM bias may stand a second time; `transformers` computes with this second one."""
    mlm = LAYOUTS[family].heads["mlm"]
    return {} if mlm[""] == mlm["decoder"] else {f"{mlm['decoder']}.bias": f"{mlm['']}.bias"}


def decoder(family: str) -> str:
    """The name of the MLM decoder's matrix, present as a copy of the embedding in older files."""
    return LAYOUTS[family].heads["mlm"]["decoder"] + ".weight"


def canonical(name: str) -> str:
    """A tensor's name as today's base class would write it: no prefixes, `weight`/`bias` for `gamma`/`beta`."""
    name = name.removeprefix("module.")
    if name.startswith(OWN):
        return name
    for base in BASES:
        if name.startswith(base):
            name = name.removeprefix(base)
            break
    return re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))


# ── which class, which heads ────────────────────────────────────────────────────────────────────────────────


def class_for(config: EncoderConfig, heads: Iterable[str]) -> str:
    """The class suffix that holds the most telling of these heads: a task before pre-training, the first task."""
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
    """The heads a folder seems to hold, from its class and its (canonical) tensor names: head → in their names?"""
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
    """What a `classifier` is in a folder that does not name its class."""
    dense = [part["dense"] for head, part in LAYOUTS[family].heads.items() if head == "classify" and "dense" in part]
    if dense:
        return "classify" if f"{dense[0]}.weight" in names else "tag"
    return "classify" if any(name.startswith("pooler.") for name in names) else "tag"


def _suffix(architecture: str) -> str:
    """`ForMaskedLM` of `BertForMaskedLM`."""
    match = re.search(r"(For[A-Z]\w*|Model)$", architecture)
    return match[1] if match else ""
