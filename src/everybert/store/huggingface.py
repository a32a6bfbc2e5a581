"""Model folders in the format of `transformers`: config.json, model.safetensors, tokenizer; and everybert.json."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from everybert.errors import EverybertError
from everybert.files import inside, read_json, recover, verify_folder, write_json
from everybert.model.config import EncoderConfig
from everybert.model.embeddings import rotary_rates
from everybert.model.heads import Network
from everybert.store import config_json, layouts
from everybert.store.layouts import to_transformers
from everybert.store.weights import SAFE, Weights, check_finite, open_weights, refuse_tensorflow, save_weights
from everybert.text.tokenizer import Tokenizer

EXTRAS = "everybert.json"
EXTRAS_VERSION = 1
OBJECTS = ("encoder", "task", "feature_head", "adapters", "glue", "embedding")
"""Fields of everybert.json that are JSON objects."""
WRITTEN = ("encoder", "quantisation", "own_tensors")
"""Fields of everybert.json that follow from the network; own_tensors are those that `transformers` does not know."""
LABELLED = ("classify", "tag")
IGNORED = re.compile(r"(position_ids|token_type_ids|inv_freq)$")
"""Buffers in older files that are computed instead."""


@dataclass(frozen=True)
class Report:
    """What was missing in a folder and what was not used; as a string, one line."""

    missing: tuple[str, ...] = ()
    """Parts that the folder lacks: they are randomly initialised."""
    unused: tuple[str, ...] = ()
    """Tensors of the file that no part uses, by their names in the file."""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line; empty if the folder fits exactly."""
        parts = [f"new, not in the folder: {', '.join(self.missing)}"] if self.missing else []
        if self.unused:
            more = len(self.unused) - 3
            parts.append(f"not used: {', '.join(self.unused[:3])}" + (f" and {more} more tensors" if more > 0 else ""))
        return "; ".join([*parts, *self.notes])


@dataclass(frozen=True)
class Loaded:
    """A network and the description in its folder."""

    network: Network
    config: EncoderConfig
    labels: list[str] | None
    """The label names of the classify or tag head, in the order of its outputs."""
    problem_type: str | None
    """The kind of a classify head in `transformers`: single_label_classification, multi_label_…, regression."""
    report: Report
    raw_config: dict[str, Any]
    """config.json as read; `save_network` keeps the fields that it need not change."""
    extras: dict[str, Any]
    """everybert.json, without the fields that are part of `config`."""


# ── loading ─────────────────────────────────────────────────────────────────────────────────────────────────


def read_config(folder: str | Path) -> tuple[EncoderConfig, dict[str, Any]]:
    """The encoder configuration of a folder, and its config.json."""
    folder = Path(folder)
    path = folder / "config.json"
    if (static := _static(folder)) is not None:
        return config_json.read(static), static
    if not path.exists():
        refuse_tensorflow(folder)
        what = "has no config.json" if folder.is_dir() else "is not a folder"
        raise EverybertError(f"{folder} {what}; give a model's folder, or a hub id")
    inside(folder, path.name)
    raw = read_json(path)
    ours = read_extras(folder).get("encoder")
    try:
        return config_json.read(raw, ours), raw
    except EverybertError as error:
        raise EverybertError(f"{path}: {error}") from None


def _static(folder: Path) -> dict[str, Any] | None:
    """What replaces config.json for one table of embeddings (StaticEmbedding, model2vec); None for other folders."""
    file = folder / "config.json"
    kind = read_json(file).get("model_type", "model2vec") if file.exists() else "model2vec"
    if kind != "model2vec" or not (folder / SAFE).is_file():
        return None
    (name, shape), *more = [*open_weights(folder).shapes.items()] or [("", ())]
    if more or {"embedding.weight": 2, "embeddings": 2, "weight": 1}.get(name) != len(shape):
        return None
    return {"model_type": "static", "vocab_size": shape[0], "hidden_size": (*shape, 1)[1]}


def read_extras(folder: str | Path) -> dict[str, Any]:
    """everybert.json without its version; empty if there is none."""
    try:
        path = inside(folder, EXTRAS)
    except FileNotFoundError:
        return {}
    extras = read_json(path)
    version = extras.pop("version", None)
    if odd := [key for key in OBJECTS if not isinstance(extras.get(key, {}), dict)]:
        raise EverybertError(f"{path}: {odd[0]} is not a JSON object; restore the file")
    named = [extras.get("head"), extras.get("task", {}).get("task")]
    if not all(isinstance(name, str | None) for name in named):
        raise EverybertError(f"{path}: {named} should be the names of a head and a task; restore the file")
    if not isinstance(version, int):
        raise EverybertError(f"{path} has no version; restore or delete it")
    if version > EXTRAS_VERSION:
        raise EverybertError(f"{path} is of version {version}, newer than this everybert reads; upgrade everybert")
    return extras


def load_network(
    folder: str | Path,
    *,
    heads: Mapping[str, int | None] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    allow_pickle: bool = False,
    verify: bool = True,
) -> Loaded:
    """Load a model folder of any family.

    `heads` None takes the heads of the folder; otherwise exactly those given (head → number of labels), randomly
    initialised if the folder lacks them. `dtype` None keeps that of the file, but converts 16-bit floats to fp32 on the
    CPU. `verify` compares file hashes with the manifest, if there is one.
    """
    folder = recover(folder)
    config, raw = read_config(folder)
    verify_folder(folder, hashes=verify)
    aliases = layouts.LAYOUTS[config.family].aliases if raw.get("legacy") is False else {}
    weights = open_weights(folder, allow_pickle)
    config = _rotary_precision(config, weights, folder)
    weights, original = _canonical(weights, config.family, aliases)
    last = f"encoder.layers.{config.distinct_layers - 1}.attention.output.weight"
    (name,) = layouts.transformers_names(config, last, ())
    if config.layers and name not in weights.shapes:  # before many layers are built
        raise EverybertError(
            f"{folder}: config.json describes a {config.family} encoder of {config.layers} layers, but the weights "
            f"have no {name}; take both from one source"
        )
    config, notes = _untie_if_different(config, weights)
    heads_found = layouts.find_heads(config.family, weights.shapes, config_json.classes(raw))
    family_heads = {head for head, family_names in heads_found.items() if family_names}
    stored = {head: rows for head in heads_found if (rows := _rows(config, head, family_heads, weights))}
    wanted = stored if heads is None else {h: n for h, n in stored.items() if h in heads and heads[h] in (n, None)}

    with torch.device("meta"), SkipInit():
        network = Network(config, dict(wanted), pooler=True)
    state, lacking = _collect(network, family_heads, weights, original, folder)
    used = {part for name in state for part in layouts.transformers_names(config, name, family_heads)}
    _remove_missing(network, lacking, folder)
    state = {name: state[name] for name in network.state_dict()}
    dtype, widened = _choose_dtype(state.values(), dtype, device)
    network.load_state_dict({name: x.to(device, dtype) for name, x in state.items()}, assign=True)
    new = _add_heads(network, heads or {})

    absent = [h for h in heads_found if heads is None and h not in network.heads]
    notes += ["its adapters for tasks are not read: the model is that of no task"] if "lora_adaptations" in raw else []
    notes += [f"config.json names a {h} head, the weights have none" for h in absent] + widened
    labelled = next((h for h in network.heads if h in LABELLED and h in wanted), None)
    kind = raw.get("problem_type")
    return Loaded(
        network=network.eval(),
        config=config,
        labels=_labels(raw, wanted[labelled], folder) if labelled else None,
        problem_type=kind if isinstance(kind, str) else None,
        report=Report(tuple(new), tuple(original[c] for c in weights.shapes if c not in used), tuple(notes)),
        raw_config=raw,
        extras={k: v for k, v in read_extras(folder).items() if k not in WRITTEN},
    )


class SkipInit(TorchFunctionMode):
    """Skip the initialisation of parameters: values come from a file, and random init on the meta device is slow."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__module__", "") == "torch.nn.init":
            return (kwargs or {}).get("tensor")
        return func(*args, **(kwargs or {}))


def _canonical(weights: Weights, family: str, aliases: Mapping[str, str]) -> tuple[Weights, dict[str, str]]:
    """The same tensors under canonical names, and canonical name → name in the file."""
    original: dict[str, str] = {}
    for name in weights.shapes:
        if not IGNORED.search(name):
            canonical = layouts.canonical(name)
            alias = next((a for a in aliases if canonical.startswith(f"{a}.")), "")
            canonical = canonical.replace(alias, aliases[alias], 1) if alias else canonical
            original[name if canonical in original else canonical] = name
    for second, first in layouts.copies(family).items():
        if second in original:
            original[first] = original.pop(second)
    shapes = {canonical: weights.shapes[name] for canonical, name in original.items()}
    if family == "static":  # a SparseStaticEmbedding has a number per token
        shapes = {canonical: (*shape, 1)[:2] for canonical, shape in shapes.items()}
    return Weights(shapes, lambda canonical: weights.get(original[canonical]).view(shapes[canonical])), original


def _untie_if_different(config: EncoderConfig, weights: Weights) -> tuple[EncoderConfig, list[str]]:
    """Older files also store the tied decoder. If it differs from the embedding, it is kept, as in `transformers`."""
    (token,) = layouts.transformers_names(config, "encoder.embeddings.token.weight", ())
    second = layouts.LAYOUTS[config.family].heads["mlm"]["decoder"] + ".weight"
    if not config.tied or second not in weights.shapes or token not in weights.shapes:
        return config, []
    if weights.shapes[second] == weights.shapes[token] and torch.equal(weights.get(second), weights.get(token)):
        del weights.shapes[second]
        return config, []
    return config.replace(tied=False), ["the MLM decoder differs from the token embedding and is kept"]


def _rotary_precision(config: EncoderConfig, weights: Weights, folder: Path) -> EncoderConfig:
    """ESM-2 was trained with rotary rates in half precision, which its files keep."""
    name = next((name for name in weights.shapes if name.endswith("rotary_embeddings.inv_freq")), None)
    if config.family != "esm" or name is None:
        return config
    stored = weights.get(name).float()
    for precision in get_args(get_type_hints(EncoderConfig)["rotary_precision"]):
        config = config.replace(rotary_precision=precision)
        rates = rotary_rates(config, config.rotary_theta)
        if rates.shape == stored.shape and torch.allclose(rates, stored, rtol=1e-6, atol=0):
            return config
    raise EverybertError(f"{folder}: {name} does not follow from rope_theta and the head size; correct config.json")


def _rows(config: EncoderConfig, head: str, family_heads: set[str], weights: Weights) -> int:
    """The number of outputs of a head in the file; 0 if the file lacks it."""
    if head == "mlm":  # EuroBERT's may be the token embedding alone
        return config.vocab_size
    name = layouts.transformers_names(config, f"heads.{head}.output.weight", family_heads)[0]
    shape = weights.shapes.get(name, (0,))
    return shape[0] if shape else 0


def _collect(
    network: Network, family_heads: set[str], weights: Weights, original: dict[str, str], folder: Path
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Our parameters from the tensors of the file, and those that the file lacks (our name → name in the file)."""
    state, lacking = {}, {}
    for name, parameter in network.state_dict().items():
        parts = layouts.transformers_names(network.config, name, family_heads)
        if absent := [part for part in parts if part not in weights.shapes]:
            lacking[name] = absent[0]
            continue
        for part, rows in zip(parts, layouts.part_rows(network.config, len(parts), len(parameter))):
            shape = (rows, *parameter.shape[1:])
            if weights.shapes[part] != shape:
                raise EverybertError(
                    f"{folder}: {original[part]} has the shape {weights.shapes[part]}, config.json asks "
                    f"for {shape}; take both from one source"
                )
        pieces = [_tensor(weights, part, original[part], folder) for part in parts]
        state[name] = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return state, lacking


def _tensor(weights: Weights, name: str, original: str, folder: Path) -> Tensor:
    try:
        tensor = weights.get(name)
    except Exception as error:
        raise EverybertError(f"{folder}: {original} could not be read ({error}); restore the folder") from None
    if not tensor.dtype.is_floating_point or tensor.element_size() < 2:
        raise EverybertError(f"{folder}: {original} is {tensor.dtype}; only 16-, 32- and 64-bit floats are read")
    return check_finite(tensor, f"{folder}: {original}")


def _remove_missing(network: Network, lacking: dict[str, str], folder: Path) -> None:
    """Remove heads and pooler that the file lacks; a part of the encoder may not be missing."""
    body = [name for name in lacking if name.startswith("encoder.")]
    if body:
        raise EverybertError(
            f"{folder}: the weights lack {len(body)} tensors of the encoder ({lacking[body[0]]} …); "
            "take config.json and weights from one source"
        )
    for head in {name.split(".")[1] for name in lacking if name.startswith(layouts.HEAD_PREFIX)}:
        del network.heads[head]
    if any(name.startswith("pooler.") for name in lacking):
        network.pooler = None


def _add_heads(network: Network, heads: Mapping[str, int | None]) -> list[str]:
    """Add new heads for those that the folder lacks, and the pooler that they read; returns what was added."""
    missing = [head for head in heads if head not in network.heads]
    pooled = network.pooler is not None
    for head in missing:
        network.add_head(head, heads[head])
    network.add_pooler()
    added = [f"{head} head" + (f" ({heads[head]} labels)" if heads[head] else "") for head in missing]
    return added + (["pooler"] if network.pooler is not None and not pooled else [])


def _choose_dtype(
    tensors: Iterable[Tensor], dtype: torch.dtype | None, device: torch.device | str | None
) -> tuple[torch.dtype, list[str]]:
    """The given dtype, else the widest in the file; half precision becomes fp32 on a CPU, where it is slow."""
    if dtype is not None:
        return dtype, []
    widest = max((x.dtype for x in tensors), key=lambda d: (d.itemsize, d == torch.bfloat16))
    if widest.itemsize == 2 and torch.device(device or "cpu").type == "cpu":
        return torch.float32, [f"the file's {str(widest).removeprefix('torch.')} is widened to float32 on the CPU"]
    return widest, []


def _labels(raw: dict[str, Any], rows: int, folder: Path) -> list[str] | None:
    """The label names in config.json."""
    named = raw.get("id2label")
    if not isinstance(named, dict) or not named:
        return None
    if len(named) != rows:
        raise EverybertError(f"{folder}: config.json names {len(named)} labels, the weights have {rows}; correct it")
    return [str(named.get(str(i), f"LABEL_{i}")) for i in range(rows)]


# ── saving ──────────────────────────────────────────────────────────────────────────────────────────────────


def save_network(
    network: Network,
    folder: Path,
    *,
    tokenizer: Tokenizer | None = None,
    labels: list[str] | None = None,
    problem_type: str | None = None,
    extras: dict[str, Any] | None = None,
    raw_config: dict[str, Any] | None = None,
    int8: bool = False,
) -> None:
    """Write a model into `folder` (from `atomic_folder`).

    It is saved as the class of its first task head, else of its pre-training heads; other heads get names that
    `transformers` ignores (`own_tensors` in everybert.json). `raw_config` is the config.json that the model was loaded
    from, if any. `int8` stores one byte per parameter, which only everybert reads.
    """
    config = network.config
    suffix = layouts.class_for(config, network.heads)
    raw, ours_alone = config_json.write(config, raw_config)
    tensors = to_transformers(network, suffix)
    layout = layouts.LAYOUTS[config.family]
    generator = layout.generator if config.causal is True and suffix == "ForMaskedLM" else ""
    raw["architectures"] = [layout.stem + (generator or suffix)]
    raw["dtype"] = str(network.encoder.embeddings.token.weight.dtype).removeprefix("torch.")
    raw |= _token_ids(config, raw, tokenizer)
    labelled = next((h for h in network.heads if h in LABELLED), None)
    if labelled:
        raw |= _label_fields(network.state_dict()[f"heads.{labelled}.output.weight"].shape[0], labels, raw)
    if problem_type is not None:
        raw["problem_type"] = problem_type
    extras = (extras or {}) | save_weights(folder, tensors, int8)
    if own_tensors := [name for name in tensors if name.startswith(layouts.OWN)]:
        extras["own_tensors"] = own_tensors
    write_json(folder / "config.json", dict(sorted(raw.items())))
    if tokenizer is not None:
        limit = tokenizer.max_length if raw_config else None  # a limit that the folder had, such as 64 of 512 positions
        longest = min(limit or config.max_positions, config.max_positions)
        tokenizer.save(folder, max_length=longest, segments=config.segments > 1)
    if extras or ours_alone:
        ours = {"encoder": ours_alone} if ours_alone else {}
        write_json(folder / EXTRAS, {"version": EXTRAS_VERSION} | extras | ours)


def _token_ids(config: EncoderConfig, raw: dict[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The ids of special tokens, for families whose config.json has them."""
    ids: dict[str, Any] = {}
    for key in layouts.LAYOUTS[config.family].token_ids:
        name = f"{key}_token_id"
        if tokenizer is not None:
            ids[name] = tokenizer.cls_id if key in ("bos", "cls") else tokenizer.sep_id
        elif config.family == "modernbert":
            ids[name] = raw.get(name)
    return ids


def _label_fields(rows: int, labels: list[str] | None, raw: dict[str, Any]) -> dict[str, Any]:
    """id2label and label2id for a head with `rows` outputs."""
    raw.pop("num_labels", None)
    raw.pop("_num_labels", None)
    previous = raw.get("id2label")
    if labels is None and isinstance(previous, dict) and len(previous) == rows:
        return {}
    names = labels if labels is not None else [f"LABEL_{i}" for i in range(rows)]
    if len(names) != rows:
        raise EverybertError(f"{len(names)} label names were given for a head of {rows} outputs; give one for each")
    return {"id2label": {str(i): n for i, n in enumerate(names)}, "label2id": {n: i for i, n in enumerate(names)}}
