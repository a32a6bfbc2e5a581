"""The parameters of each part of a model, without loading weights: from a config, or the headers of a folder."""

import tomllib
from collections import Counter
from collections.abc import Container
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from everybert.errors import EverybertError
from everybert.model.config import PRESETS, EncoderConfig
from everybert.model.heads import HEADS, Network
from everybert.model.lora import AdapterSet, LoraConfig
from everybert.store import config_json, layouts
from everybert.store.adapters import read_bundle
from everybert.store.hub import resolve
from everybert.store.huggingface import SkipInit, read_config, read_extras
from everybert.store.sentence_transformers import encoder_folder, read_pooling
from everybert.store.weights import INT8, open_weights
from everybert.tasks import ADAPTED, TASKS, task_class
from everybert.text.formats import has_tokenizer
from everybert.text.tokenizer import Tokenizer

PUBLISHED_COLUMNS = ("data", "tokens", "hardware", "chip_days", "glue", "squad", "source")
TABLES: dict[str, Any] = tomllib.loads((files("everybert.inference") / "describe.toml").read_text("utf-8"))


def parameters(
    config: EncoderConfig, heads: dict[str, int | None] | None = None, pooler: bool | None = None
) -> dict[str, int]:
    """Parameters of each part; by default of the encoder and, if the base model in transformers has one, the pooler."""
    pooler = config.family not in TABLES["no_pooler"] if pooler is None else pooler
    with torch.device("meta"), SkipInit():
        network = Network(config, heads, pooler=pooler)
    counts: Counter[str] = Counter()
    for name, value in network.named_parameters():
        if not value.requires_grad:  # a fixed table
            continue
        head = f"{name.split('.')[1]} head" if name.startswith("heads.") else None
        part = head or next(part for key, part in TABLES["parts"].items() if key in name)
        counts[part] += value.numel()
    return dict(counts)


def head_parameters(config: EncoderConfig, labels: int = 2) -> dict[str, int]:
    """Parameters that each head adds to the encoder, with a pooler if the head needs one and the base has none."""
    base = sum(parameters(config).values())
    heads = [head for head in HEADS if head != "rtd" or config.family == "electra"]
    return {head: sum(parameters(config, {head: labels}).values()) - base for head in heads}


def describe(model: str, allow_pickle: bool = False) -> dict[str, Any]:
    """A preset, or a model by its name or folder, as plain data."""
    if (config := PRESETS.get(model)) is None:
        return describe_folder(resolve(model, allow_pickle=allow_pickle), allow_pickle)
    return _about(model, config, parameters(config)) | {"objective": TABLES["objectives"][config.family]}


def describe_folder(folder: Path, allow_pickle: bool = False) -> dict[str, Any]:
    """A folder as plain data, from its config.json and the headers of its weights."""
    inner = encoder_folder(folder)
    config, raw = read_config(inner)
    shapes = open_weights(inner, allow_pickle).shapes
    names = {layouts.canonical(name) for name in shapes}
    present = layouts.find_heads(config.family, names, config_json.classes(raw))
    labels = len(raw.get("id2label") or {}) or 2
    heads: dict[str, int | None] = {head: labels for head in present if head in HEADS}
    counts = parameters(config, heads, pooler=any(name.startswith("pooler.") for name in names))
    about = _about(str(folder), config, counts, heads) | {"heads": list(heads), "tensors": len(shapes)}
    if (folder / INT8).exists():
        about["weights"] = "int8, one scale per row"
    if has_tokenizer(inner):
        tokenizer = Tokenizer.load(inner)
        about["tokenizer"] = {"kind": tokenizer.kind, "size": tokenizer.size, "lowercase": tokenizer.lowercase}
    pooling = read_pooling(folder, config.hidden_size, allow_pickle)
    if pooling.published:
        about["embedding"] = {
            "pooling": "+".join(pooling.modes),
            "normalize": pooling.normalize,
            "tokens": pooling.size or config.max_positions,
        }
    bundle = read_bundle(folder, read_extras(folder), ADAPTED)
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


def _about(name: str, config: EncoderConfig, counts: dict[str, int], heads: Container[str] = ()) -> dict[str, Any]:
    """The shape of a model, its parameters by part, and those that further heads would add."""
    more = {head: count for head, count in head_parameters(config).items() if head not in heads}
    sizes = {"parameters": counts, "total": sum(counts.values()), "heads_would_add": more}
    return {"name": name, **_shape(config), **sizes}


def compare() -> list[dict[str, Any]]:
    """The families side by side, one row per published size, with published figures (describe.toml)."""
    rows: list[dict[str, Any]] = []
    for name in TABLES["compared"]:
        config = PRESETS[name]
        total = sum(parameters(config).values())
        share = total / rows[0]["total"] if rows else 1.0  # of BERT-base, the first
        row = {"name": name, "total": total, "share": share, **_shape(config)}
        row["objective"] = TABLES["objectives"][config.family]
        rows.append(row | dict.fromkeys(PUBLISHED_COLUMNS) | TABLES["published"].get(name, {}))
    return rows


def new_parameters(model: str, task: str | None = None, labels: int | None = None) -> list[dict[str, Any]]:
    """What fine-tuning adds for one task or all: the head (with a pooler if the base has none), and with an adapter."""
    chosen = {task: task_class(task)} if task else TASKS
    config, lora = PRESETS.get(model) or read_config(encoder_folder(resolve(model)))[0], LoraConfig()
    with torch.device("meta"), SkipInit():
        network = Network(config)
        AdapterSet(network).add("new", lora)
    adapter = sum(value.numel() for name, value in network.named_parameters() if ".lora." in name)
    total, rows = sum(parameters(config).values()), []
    for name, kind in chosen.items():
        if task and labels and "labels" not in kind.saved:
            raise EverybertError(f"{task} has no labels to count: leave labels out")
        size = (labels or 2) if "labels" in kind.saved else None
        head = head_parameters(config, size or 1)[kind.head] if kind.head else 0
        row = {"task": name, "labels": size, "new": head, "share": head / total}
        rows.append(row | {f"lora_rank_{lora.rank}": head + adapter})
    return rows
