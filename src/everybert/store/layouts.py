"""Reversible name maps: the names of each family's tensors in a `transformers` folder, as listed in families.toml.

A map is per module: `weight` and `bias` keep their names. The query, key and value matrices, which are one matrix
here, have three names there. Modules that the classes of a family do not have (next-sentence on RoBERTa, a second task
head) are stored as `everybert.` and our own name, which `transformers` ignores.
"""

import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from everybert.model.config import EncoderConfig
from everybert.model.embeddings import rotary_rates
from everybert.model.heads import Network

OWN = "everybert."
HEAD_PREFIX = "heads."  # parameters of heads; in a file, their names have no prefix
TASK_HEADS = ("classify", "choose", "tag", "answer")


@dataclass(frozen=True)
class Layout:
    """The entry of a family in families.toml, where the fields are described."""

    stem: str
    prefix: str
    layer_at: str
    config: Mapping[str, str]
    layer: Mapping[str, str | list[str]]
    outside: Mapping[str, str]
    heads: Mapping[str, dict[str, str]]
    classes: Mapping[str, list[str]]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    required: Mapping[str, Any] = field(default_factory=dict)
    demanded: Mapping[str, Any] = field(default_factory=dict)
    positions_after_pad: bool = False
    token_ids: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    rotary_rates: str = ""
    generator: str = ""
    model_type: str = ""
    hub: Mapping[str, Any] = field(default_factory=dict)
    hub_fields: Mapping[str, str] = field(default_factory=dict)


def _read_layouts() -> dict[str, Layout]:
    whole: dict[str, dict[str, Any]] = {}
    tables = tomllib.loads((Path(__file__).parent / "families.toml").read_text(encoding="utf-8"))
    for family, table in tables.items():
        whole[family] = _merged(whole.get(table.pop("like", ""), {}), table)
    return {family: Layout(**table) for family, table in whole.items()}


def _merged(base: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """`base` with changed entries, table by table. An empty string removes an entry."""
    out = dict(base)
    for name, value in changed.items():
        out[name] = _merged(out.get(name, {}), value) if isinstance(value, dict) else value
    return {name: value for name, value in out.items() if value != ""}


LAYOUTS = _read_layouts()
PREFIXES = ("new.", *{layout.prefix for layout in LAYOUTS.values()})  # "new": gte, by its code on the hub


# ── names ───────────────────────────────────────────────────────────────────────────────────────────────────


def transformers_names(config: EncoderConfig, name: str, family_heads: Collection[str]) -> tuple[str, ...]:
    """The names of one of our parameters in a `transformers` file, without the prefix of the encoder.

    `family_heads` are the heads that the class of the folder has; other heads keep our names.
    """
    layout = LAYOUTS[config.family]
    module, _, kind = name.rpartition(".")
    names: str | list[str] | None
    if match := re.fullmatch(r"encoder\.layers\.(\d+)\.(.+)", module):
        i = int(match[1])
        at = layout.layer_at.format(i=i, g=i // config.inner_layers, k=i % config.inner_layers)
        names = layout.layer.get(match[2])
    elif match := re.fullmatch(r"heads\.(\w+)\.?(.*)", module):
        at = ""
        names = layout.heads[match[1]].get(match[2]) if match[1] in family_heads else None
    else:
        at, names = "", layout.outside.get(module)
    if names is None:
        return (OWN + name,)
    return tuple(f"{at}{part}.{kind}" for part in ((names,) if isinstance(names, str) else names))


def to_transformers(network: Network, suffix: str) -> dict[str, Tensor]:
    """The tensors of a network under the names of the `transformers` class with that suffix."""
    config, layout = network.config, LAYOUTS[network.config.family]
    tensors: dict[str, Tensor] = {}
    for name, value in network.state_dict().items():
        parts = transformers_names(config, name, layout.classes[suffix])
        bare = name.startswith(HEAD_PREFIX) or suffix == "Model" or parts[0].startswith(OWN)
        for part, piece in zip(parts, value.detach().cpu().split(part_rows(config, len(parts), len(value)))):
            tensors[part if bare else layout.prefix + part] = piece.contiguous()
    for i in range(config.layers if layout.rotary_rates else 0):
        name = layout.rotary_rates.format(i=i)
        tensors[name if suffix == "Model" else layout.prefix + name] = rotary_rates(config, config.rotary_theta)
    if not config.tied:  # an untied class stores the bias twice
        for second, first in copies(config.family).items():
            if first in tensors:
                tensors[second] = tensors[first].clone()
    return tensors


def part_rows(config: EncoderConfig, parts: int, rows: int) -> tuple[int, ...]:
    """How many of the rows of a matrix each of its parts has."""
    return config.qkv_rows if parts == 3 else (rows // parts,) * parts


def copies(family: str) -> dict[str, str]:
    """Second name of the MLM bias → first name. If a file has both, `transformers` uses the second."""
    mlm = LAYOUTS[family].heads["mlm"]
    once = mlm[""] == mlm["decoder"] or family == "esm"
    return {} if once else {f"{mlm['decoder']}.bias": f"{mlm['']}.bias"}


def canonical(name: str) -> str:
    """The name of a tensor without prefixes, with `weight` and `bias` for the older `gamma` and `beta`."""
    name = name.removeprefix("module.")
    if name.startswith(OWN):
        return name
    name = name.removeprefix(next(filter(name.startswith, PREFIXES), ""))
    name = "embedding.weight" if name in ("embeddings", "weight") else name  # of model2vec, SparseStaticEmbedding
    name = name.replace(".parametrizations.weight.original", ".weight")  # jina v3, below its adapters
    return re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))


# ── classes and heads ───────────────────────────────────────────────────────────────────────────────────────


def class_for(config: EncoderConfig, heads: Iterable[str]) -> str:
    """The suffix of the class to save a network with these heads as: that of the first task, else of pre-training."""
    layout, heads = LAYOUTS[config.family], list(heads)
    odd = "classify" if config.classifier_form != "family" else ""
    pretraining = {name for name in heads if name in ("mlm", "nsp", "rtd")}
    for wanted in (*({name} for name in heads if name in TASK_HEADS and name != odd), pretraining):
        for suffix, class_heads in layout.classes.items():
            if wanted and set(class_heads) == wanted:
                return suffix
    return "ForMaskedLM" if "mlm" in pretraining else "Model"


def find_heads(family: str, names: Collection[str], architectures: Sequence[str]) -> dict[str, bool]:
    """The heads of a folder, by the class in config.json and tensor names: head → stored under the family's names."""
    layout = LAYOUTS[family]
    heads = {m[1]: False for name in names if (m := re.match(rf"{re.escape(OWN)}heads\.(\w+)\.", name))}
    suffixes = [re.sub(".*?(?=For[A-Z]|Model$)", "", name, count=1) for name in architectures]
    classes = [layout.classes[suffix] for suffix in suffixes if suffix in layout.classes]
    for head in [head for class_heads in classes for head in class_heads]:
        heads.setdefault(head, True)
    for head, part in (("mlm", ""), ("nsp", "output"), ("rtd", "dense"), ("answer", "output")):
        module = layout.heads.get(head, {}).get(part, "classifier")
        if module != "classifier" and any(name.startswith(module + ".") for name in names):
            heads.setdefault(head, True)
    tops = {name.split(".")[0] for name in names}
    if not any(architectures) and "classifier" in tops and not any(h in TASK_HEADS for h in heads):
        heads[_guess(family, names)] = True
    return heads


def _guess(family: str, names: Collection[str]) -> str:
    """The head that `classifier` is in a folder without a class name."""
    dense = [part["dense"] for head, part in LAYOUTS[family].heads.items() if head == "classify" and "dense" in part]
    if dense:
        return "classify" if f"{dense[0]}.weight" in names else "tag"
    return "classify" if any(name.startswith("pooler.") for name in names) else "tag"
