"""Model folders as `transformers` reads and writes them: config.json, model.safetensors, tokenizer, everybert.json."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from everybert.errors import EverybertError
from everybert.files import inside, read_json, recover, verify_folder, write_json
from everybert.model.config import EncoderConfig
from everybert.model.encoder import initialise
from everybert.model.heads import Network, Pooler
from everybert.store import config_json, layouts
from everybert.store.layouts import to_transformers
from everybert.store.weights import Weights, open_weights, refuse_tensorflow, save_weights

if TYPE_CHECKING:
    from everybert.text.tokenizer import Tokenizer

EXTRAS = "everybert.json"
EXTRAS_VERSION = 1
LABELLED = ("classify", "tag")
IGNORED = re.compile(r"(position_ids|token_type_ids|inv_freq)$")
"""Buffers of old files that can be computed."""


@dataclass(frozen=True)
class Report:
    """What a folder did not have, and what was not used of it; as a string, one line."""

    missing: tuple[str, ...] = ()
    """Parts that are new: randomly initialised, to be trained."""
    unused: tuple[str, ...] = ()
    """Tensors of the file that no part asked for, by their names there."""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line, or nothing when all is as it should be."""
        parts = [f"new, not in the folder: {', '.join(self.missing)}"] if self.missing else []
        if self.unused:
            more = len(self.unused) - 3
            parts.append(f"not used: {', '.join(self.unused[:3])}" + (f" and {more} more tensors" if more > 0 else ""))
        return "; ".join([*parts, *self.notes])


@dataclass(frozen=True)
class Loaded:
    """A network and what its folder says about it."""

    network: Network
    config: EncoderConfig
    labels: list[str] | None
    """The names of the labels of the classify or tag head, in the order of its outputs."""
    problem_type: str | None
    """`transformers`' word for what classify predicts: single_label_classification, multi_…, regression."""
    report: Report
    raw_config: dict[str, Any]
    """config.json as it was; `save_network` keeps what it need not change."""
    extras: dict[str, Any]
    """everybert.json, less what is in `config`."""


# ── loading ─────────────────────────────────────────────────────────────────────────────────────────────────


def read_config(folder: str | Path) -> tuple[EncoderConfig, dict[str, Any]]:
    """A folder's encoder configuration, and its config.json as it is."""
    folder = Path(folder)
    path = folder / "config.json"
    if not path.exists():
        refuse_tensorflow(folder)
        what = "has no config.json" if folder.is_dir() else "is not a folder"
        raise EverybertError(f"{folder} {what}; give a model's folder, or a hub id")
    inside(folder, path.name)
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise EverybertError(f"{path} is not a JSON object; download the folder again")
    ours = read_extras(folder).get("encoder") or {}
    try:
        config = config_json.read(raw)
        return config.replace(**{k: v for k, v in ours.items() if k in config_json.OURS_ALONE}), raw
    except EverybertError as error:
        raise EverybertError(f"{path}: {error}") from None


def read_extras(folder: str | Path) -> dict[str, Any]:
    """everybert.json without its version; empty where there is none."""
    try:
        path = inside(folder, EXTRAS)
    except FileNotFoundError:
        return {}
    found = read_json(path)
    version = found.pop("version", None) if isinstance(found, dict) else None
    if not isinstance(version, int):
        raise EverybertError(f"{path} has no version; restore or delete it")
    if version > EXTRAS_VERSION:
        raise EverybertError(f"{path} is of version {version}, newer than this everybert reads; upgrade everybert")
    return found


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

    `heads` None takes the heads that the folder has; else exactly those named (head → number of labels), new where
    the folder lacks them. `dtype` None keeps the file's, but widens 16 bits to 32 on the CPU. `verify` compares
    the files' hashes with the folder's list, where it has one.
    """
    folder = recover(folder)
    config, raw = read_config(folder)
    verify_folder(folder, hashes=verify)
    weights, original = _canonical(open_weights(folder, allow_pickle), config.family)
    _check_sizes(config, weights, folder)
    config, notes = _untied_if_apart(config, weights)
    natural = layouts.find_heads(config.family, weights.shapes, _architectures(raw))
    held = {head for head, in_their_names in natural.items() if in_their_names}
    found = {head: rows for head in natural if (rows := _rows(config, head, held, weights))}
    asked = found if heads is None else {h: n for h, n in found.items() if h in heads and heads[h] in (n, None)}

    with torch.device("meta"), Unfilled():
        network = Network(config, dict(asked), pooler=_in_file(config, "pooler.dense.weight", held, weights))
    state, lacking = _gather(network, held, weights, original, folder)
    used = {part for name in state for part in layouts.transformers_names(config, name, held)}
    new = _without(network, lacking, folder)
    state = {name: state[name] for name in network.state_dict()}
    dtype, widened = _choose_dtype(state.values(), dtype, device)
    network.load_state_dict({name: x.to(device, dtype) for name, x in state.items()}, assign=True)
    new += _add_missing(network, heads or {}, "pooler" in new)

    absent = [h for h in natural if heads is None and h not in network.heads]
    notes += [f"config.json names a {h} head, the weights have none" for h in absent] + widened
    labelled = next((h for h in network.heads if h in LABELLED and h in asked), None)
    kind = raw.get("problem_type")
    return Loaded(
        network=network.eval(),
        config=config,
        labels=_labels(raw, asked[labelled], folder) if labelled else None,
        problem_type=kind if isinstance(kind, str) else None,
        report=Report(tuple(new), tuple(original[c] for c in weights.shapes if c not in used), tuple(notes)),
        raw_config=raw,
        extras={k: v for k, v in read_extras(folder).items() if k not in ("encoder", "quantisation")},
    )


class Unfilled(TorchFunctionMode):
    """Parameters without values: the file has them, and to draw random ones for the meta device imports for seconds."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__module__", "") == "torch.nn.init":
            return (kwargs or {}).get("tensor")
        return func(*args, **(kwargs or {}))


def _canonical(weights: Weights, family: str) -> tuple[Weights, dict[str, str]]:
    """The same tensors under today's names without prefixes, and what each was called."""
    original: dict[str, str] = {}
    for name in weights.shapes:
        if not IGNORED.search(name):
            canonical = layouts.canonical(name)
            original[name if canonical in original else canonical] = name
    for second, first in layouts.copies(family).items():
        if second in original:
            original[first] = original.pop(second)
    shapes = {canonical: weights.shapes[name] for canonical, name in original.items()}
    return Weights(shapes, lambda canonical: weights.get(original[canonical])), original


def _architectures(raw: dict[str, Any]) -> list[str]:
    found = raw.get("architectures")
    return [a for a in found if isinstance(a, str)] if isinstance(found, list) else []


def _in_file(config: EncoderConfig, name: str, held: Iterable[str], weights: Weights) -> bool:
    return all(part in weights.shapes for part in layouts.transformers_names(config, name, set(held)))


def _check_sizes(config: EncoderConfig, weights: Weights, folder: Path) -> None:
    """Compare what costs memory or time before anything is built to the configuration's measure."""
    distinct = max(config.layer_order) + 1
    have = 0
    while have < distinct and _in_file(config, f"encoder.layers.{have}.attention.output.weight", (), weights):
        have += 1
    if have == 0:
        first = next(iter(weights.shapes), "nothing")
        raise EverybertError(
            f"{folder}: the weights are not a {config.family} encoder's (they begin with {first}); "
            "config.json and weights belong to different models"
        )
    if have < distinct:
        raise EverybertError(
            f"{folder}: config.json asks for {distinct} layers, the weights have {have}; take both from one source"
        )


def _untied_if_apart(config: EncoderConfig, weights: Weights) -> tuple[EncoderConfig, list[str]]:
    """Older files hold the tied decoder twice; where the two differ, `transformers` keeps them apart, and so do we."""
    (token,) = layouts.transformers_names(config, "encoder.embeddings.token.weight", ())
    second = layouts.decoder(config.family)
    if not config.tied or second not in weights.shapes or token not in weights.shapes:
        return config, []
    if weights.shapes[second] == weights.shapes[token] and torch.equal(weights.get(second), weights.get(token)):
        del weights.shapes[second]
        return config, []
    return config.replace(tied=False), ["the MLM decoder differs from the token embedding and is kept apart"]


def _rows(config: EncoderConfig, head: str, held: set[str], weights: Weights) -> int:
    """How many outputs a head has in the file; 0 where it has none."""
    last = "heads.mlm.bias" if head == "mlm" else f"heads.{head}.output.weight"
    shape = weights.shapes.get(layouts.transformers_names(config, last, held)[0], (0,))
    return shape[0] if shape else 0


def _gather(
    network: Network, held: set[str], weights: Weights, original: dict[str, str], folder: Path
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Our parameters from the file's tensors, and those it lacks (ours → what it would be called there)."""
    state, lacking = {}, {}
    for name, like in network.state_dict().items():
        parts = layouts.transformers_names(network.config, name, held)
        if absent := [part for part in parts if part not in weights.shapes]:
            lacking[name] = absent[0]
            continue
        shape = (like.shape[0] // len(parts), *like.shape[1:])
        for part in parts:
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
        raise EverybertError(f"{folder}: {original} could not be read ({error}); download the folder again") from None
    if not tensor.dtype.is_floating_point or tensor.element_size() < 2:
        raise EverybertError(
            f"{folder}: {original} is stored as {tensor.dtype}; only 16-, 32- and 64-bit floats are read"
        )
    return tensor


def _without(network: Network, lacking: dict[str, str], folder: Path) -> list[str]:
    """Take off what the file lacks, and say what: heads and the pooler may be absent, the encoder may not."""
    body = [name for name in lacking if name.startswith("encoder.")]
    if body:
        raise EverybertError(
            f"{folder}: the weights lack {len(body)} tensors of the encoder ({lacking[body[0]]} …); "
            "take config.json and weights from one source"
        )
    for head in {name.split(".")[1] for name in lacking if layouts.is_head(name)}:
        del network.heads[head]
    if not any(name.startswith("pooler.") for name in lacking):
        return []
    network.pooler = None
    return ["pooler"] if any(network.reads_pooler(head) for head in network.heads) else []


def _add_missing(network: Network, heads: Mapping[str, int | None], pooler: bool) -> list[str]:
    """Put the heads on that were asked for and are not there, freshly initialised."""
    if pooler:
        fresh, like = Pooler(network.config), network.encoder.embeddings.token.weight
        initialise(fresh, network.config)
        network.pooler = fresh.to(like.device, like.dtype)
    missing = [head for head in heads if head not in network.heads]
    pooled = network.pooler is not None
    for head in missing:
        network.add_head(head, heads[head])
    named = [f"{head} head" + (f" ({heads[head]} labels)" if heads[head] else "") for head in missing]
    return named + (["pooler"] if network.pooler is not None and not pooled else [])


def _choose_dtype(
    tensors: Iterable[Tensor], dtype: torch.dtype | None, device: torch.device | str | None
) -> tuple[torch.dtype, list[str]]:
    """The dtype asked for, else the file's widest; half precision is slow and coarse on a CPU, so it is widened."""
    if dtype is not None:
        return dtype, []
    widest = max((x.dtype for x in tensors), key=lambda d: (d.itemsize, d == torch.bfloat16))
    if widest.itemsize == 2 and torch.device(device or "cpu").type == "cpu":
        return torch.float32, [f"the file's {str(widest).removeprefix('torch.')} is widened to float32 on the CPU"]
    return widest, []


def _labels(raw: dict[str, Any], rows: int, folder: Path) -> list[str] | None:
    """The names of a head's outputs, by config.json."""
    named = raw.get("id2label")
    if not isinstance(named, dict) or not named:
        return None
    if len(named) != rows:
        raise EverybertError(
            f"{folder}: config.json names {len(named)} labels, the weights have {rows}; take both from one source"
        )
    return [str(named.get(str(i), f"LABEL_{i}")) for i in range(rows)]


# ── saving ──────────────────────────────────────────────────────────────────────────────────────────────────


def save_network(
    network: Network,
    folder: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    labels: list[str] | None = None,
    problem_type: str | None = None,
    extras: dict[str, Any] | None = None,
    raw_config: dict[str, Any] | None = None,
    int8: bool = False,
) -> None:
    """Write a model into `folder` (from `atomic_folder`, which makes it appear whole).

    The class is the one that holds the first task head, else the pre-training heads; other heads go in under names
    that `transformers` passes over. `raw_config` is the config.json the model came from, if it came from one. `int8`
    stores a byte a parameter, for everybert alone.
    """
    folder = Path(folder)
    config = network.config
    suffix = layouts.class_for(config, network.heads)
    raw, ours_alone = config_json.write(config, raw_config)
    tensors = to_transformers(network, suffix)
    raw["architectures"] = [_stem(raw, config) + suffix]
    raw["dtype"] = str(network.encoder.embeddings.token.weight.dtype).removeprefix("torch.")
    raw |= _token_ids(config, raw, tokenizer)
    labelled = next((h for h in network.heads if h in LABELLED), None)
    if labelled:
        rows = network.state_dict()[f"heads.{labelled}.output.weight"].shape[0]
        raw |= _label_fields(rows, labels, raw)
    if problem_type is not None:
        raw["problem_type"] = problem_type
    extras = (extras or {}) | save_weights(folder, tensors, int8)
    write_json(folder / "config.json", dict(sorted(raw.items())))
    if tokenizer is not None:
        tokenizer.save(folder, max_length=config.max_positions)
    if extras or ours_alone:
        ours = {"encoder": ours_alone} if ours_alone else {}
        write_json(folder / EXTRAS, {"version": EXTRAS_VERSION} | extras | ours)


def _stem(raw: dict[str, Any], config: EncoderConfig) -> str:
    alias = raw.get("model_type")
    return "Camembert" if alias == "camembert" else layouts.LAYOUTS[config.family].stem


def _token_ids(config: EncoderConfig, raw: dict[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The special tokens' ids, in the families whose config.json has them and whose defaults may not fit."""
    keys = {"modernbert": ("bos", "eos", "cls", "sep"), "longformer": ("bos", "eos", "sep")}.get(config.family, ())
    if config.family in config_json.ROBERTA_LIKE or config.family == "albert":
        keys = keys or ("bos", "eos")
    ids: dict[str, Any] = {}
    for key in keys:
        name = f"{key}_token_id"
        if tokenizer is not None:
            ids[name] = tokenizer.cls_id if key in ("bos", "cls") else tokenizer.sep_id
        elif config.family == "modernbert":
            ids[name] = raw.get(name)
    return ids


def _label_fields(rows: int, labels: list[str] | None, raw: dict[str, Any]) -> dict[str, Any]:
    """id2label and label2id for a head of so many outputs."""
    raw.pop("num_labels", None)
    raw.pop("_num_labels", None)
    kept = raw.get("id2label")
    if labels is None and isinstance(kept, dict) and len(kept) == rows:
        return {}
    names = labels if labels is not None else [f"LABEL_{i}" for i in range(rows)]
    if len(names) != rows:
        raise EverybertError(f"{len(names)} label names were given for a head of {rows} outputs; give one for each")
    return {"id2label": {str(i): n for i, n in enumerate(names)}, "label2id": {n: i for i, n in enumerate(names)}}
