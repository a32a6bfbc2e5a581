"""Adapters in PEFT's format (adapter_config.json, adapter_model.safetensors), and heads that `transformers` has not.

An adapter's folder is a few hundred kilobytes: A and B of each adapted matrix, the task's head, and in everybert.json
the task's settings and the hash of the base it was trained on. PEFT loads the same folder, and its folders load here.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from everybert.errors import EverybertError
from everybert.files import inside, read_json, verify_folder, write_json
from everybert.model.adapters import QKV, TARGETS, AdapterSet, LoraConfig
from everybert.model.config import EncoderConfig
from everybert.model.features import FeatureConfig, FeatureHead, add_feature_head
from everybert.model.heads import Network, Pooler
from everybert.store import layouts
from everybert.store.huggingface import EXTRAS, EXTRAS_VERSION, read_extras
from everybert.store.weights import open_safetensors

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
HEAD = "head.safetensors"
ROOT = "base_model.model."
KINDS = {"classify": "SEQ_CLS", "tag": "TOKEN_CLS", "answer": "QUESTION_ANS"}
"""PEFT's word for the class of each head."""


def trunk_digest(network: Network) -> str:
    """SHA-256 of the encoder's weights in fp32: an adapter fits the trunk it was trained on and no other."""
    if network.digest is not None:
        return network.digest
    digest = hashlib.sha256()
    for name, value in sorted(network.encoder.state_dict().items()):
        if ".lora." not in name:
            digest.update(name.encode())
            digest.update(value.detach().to("cpu", torch.float32).contiguous().numpy().data)
    return digest.hexdigest()


# ── adapters ─────────────────────────────────────────────────────────────────────────────────────────────────


def save_adapter(
    adapters: AdapterSet, name: str, folder: str | Path, *, base: str, extras: dict[str, Any] | None = None
) -> None:
    """Write an adapter into `folder` (from `atomic_folder`). `base` is the name or path of the model it goes on."""
    folder = Path(folder)
    entry, network = adapters.entries[name], adapters.network
    config = network.config
    layout = layouts.LAYOUTS[config.family]
    suffix = layouts.class_for(config, entry.heads)
    prefix = "" if suffix == "Model" else layout.prefix
    tensors: dict[str, Tensor] = {}
    for key, value in adapters.state(name).items():
        at, letter = _split(config, key)
        tensors[f"{ROOT}{prefix}{at}.lora_{letter}.weight"] = value.cpu().contiguous()
    whole: set[str] = set()
    parts = {f"heads.{h}.{k}": v for h, m in entry.heads.items() for k, v in m.state_dict().items()}
    parts |= {f"pooler.{k}": v for k, v in entry.pooler.state_dict().items()} if entry.pooler is not None else {}
    for key, value in parts.items():
        (theirs,) = layouts.theirs(config, key, layout.classes[suffix])
        whole.add(theirs.split(".")[0])
        bare = layouts.is_head(key)
        tensors[ROOT + ("" if bare else prefix) + theirs] = value.detach().cpu().contiguous()
    task = next((KINDS[h] for h in entry.heads if h in KINDS), None if entry.heads else "FEATURE_EXTRACTION")
    write_json(folder / CONFIG, _peft_config(config, entry.config, task, sorted(whole), base))
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    ours = {"base": trunk_digest(network), "head": next(iter(entry.heads), None), **(extras or {})}
    write_json(folder / EXTRAS, {"version": EXTRAS_VERSION, **ours})


def _peft_config(
    config: EncoderConfig, lora: LoraConfig, kind: str | None, whole: list[str], base: str
) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": kind,
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": _pattern(config, lora),
        "modules_to_save": whole or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _pattern(config: EncoderConfig, lora: LoraConfig) -> str:
    """A regular expression of the adapted modules: short names would match others too (output.dense)."""
    names = sorted({re.sub(r"\d+", "#", _split(config, ours)[0]) for ours in _expected(config, lora.targets)})
    return r"(?:.*\.)?(?:" + "|".join(re.escape(n).replace(r"\#", r"\d+") for n in names) + ")"


def _expected(config: EncoderConfig, targets: tuple[str, ...]) -> list[str]:
    """Our names of all A matrices of an adapter with these targets."""
    one = config.family == "modernbert"
    names = []
    for i in range(max(config.layer_order) + 1):
        at = f"encoder.layers.{i}."
        if any(t in QKV for t in targets):
            names += [f"{at}attention.qkv.A"] if one else [f"{at}attention.qkv.{q}.A" for q in QKV if q in targets]
        names += [f"{at}{t}.A" for t in targets if t not in QKV]
    return names


def _split(config: EncoderConfig, ours: str) -> tuple[str, str]:
    """Their module (without prefix) and the letter A or B, of "encoder.layers.0.attention.qkv.query.A"."""
    module, _, kind = ours.rpartition(".")
    part = next((q for q in QKV if module.endswith(f".{q}")), None)
    names = layouts.theirs(config, f"{module.removesuffix(f'.{part}')}.weight", ())
    return names[QKV.index(part) if part else 0].removesuffix(".weight"), kind


@dataclass(frozen=True)
class AdapterFile:
    """What an adapter's folder says, before it is put on a trunk."""

    folder: Path
    base: str
    """The model it goes on, as it was called."""
    digest: str | None
    """The hash of that model's encoder; None in folders from elsewhere."""
    extras: dict[str, Any]
    """everybert.json: the task's settings."""
    raw: dict[str, Any]


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder holds an adapter rather than a model."""
    return (Path(folder) / CONFIG).is_file()


def read_adapter(folder: str | Path) -> AdapterFile:
    """Read what the folder says; its weights are read when it is put on a trunk."""
    folder = Path(folder)
    verify_folder(folder)
    raw = read_json(inside(folder, CONFIG))
    if not isinstance(raw, dict) or raw.get("peft_type") != "LORA":
        raise EverybertError(f"{folder / CONFIG} is not a LoRA adapter's; only LoRA is read")
    odd = [k for k in ("use_dora", "use_rslora", "fan_in_fan_out", "rank_pattern", "alpha_pattern") if raw.get(k)]
    if odd or raw.get("bias", "none") != "none":
        raise EverybertError(f"{folder}: this adapter uses {(odd or ['bias'])[0]}, which is not read; plain LoRA is")
    extras = read_extras(folder)
    return AdapterFile(folder, str(raw.get("base_model_name_or_path") or ""), extras.pop("base", None), extras, raw)


def load_adapter(adapters: AdapterSet, name: str, file: AdapterFile, verify: bool = True) -> None:
    """Put an adapter on the trunk under a name. `verify` compares the trunk with the one it was trained on."""
    network, config = adapters.network, adapters.network.config
    if verify and file.digest is not None and file.digest != trunk_digest(network):
        raise EverybertError(f"{file.folder} was trained on another base ({file.base or 'unnamed'}); load that one")
    tensors = _read_tensors(inside(file.folder, WEIGHTS))
    found = {target for target in TARGETS if _keys(config, target) & tensors.keys()}
    targets = tuple(t for t in TARGETS if t in found)
    if not targets:
        raise EverybertError(f"{file.folder}: no tensor fits a {config.family} model; is the base another family?")
    lora = _lora_config(file, targets)
    state: dict[str, Tensor] = {}
    for ours in [n for a in _expected(config, targets) for n in (a, a[:-1] + "B")]:
        at, kind = _split(config, ours)
        key = f"{at}.lora_{kind}.weight"
        if key not in tensors:
            raise EverybertError(f"{file.folder} lacks {key}; download it again")
        state[ours] = tensors.pop(key)
        if state[ours].shape[0 if kind == "A" else -1] != lora.rank:  # before matrices of that rank are made
            raise EverybertError(f"{file.folder}: {key} is not of rank {lora.rank}, as {CONFIG} says; restore it")
    heads, pooler = _rest(network, file, tensors)
    adapters.add(name, lora, heads, pooler)
    adapters.load(name, state)


def _lora_config(file: AdapterFile, targets: tuple[str, ...]) -> LoraConfig:
    raw = file.raw
    try:
        return LoraConfig(int(raw["r"]), float(raw["lora_alpha"]), float(raw.get("lora_dropout") or 0), targets)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise EverybertError(f"{file.folder / CONFIG} gives no proper r and lora_alpha ({error}); restore it") from None


def _keys(config: EncoderConfig, target: str) -> set[str]:
    return {f"{_split(config, ours)[0]}.lora_A.weight" for ours in _expected(config, (target,))}


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """The file's tensors under names without prefixes."""
    file = open_safetensors(path)
    return {layouts.canonical(_bare(key)): file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def _bare(key: str) -> str:
    return key.removeprefix(ROOT).replace(".modules_to_save.default", "").replace(".default.weight", ".weight")


def _rest(
    network: Network, file: AdapterFile, tensors: dict[str, Tensor]
) -> tuple[dict[str, torch.nn.Module], Pooler | None]:
    """The head and pooler that come with an adapter, from the tensors that are not A or B."""
    head = file.extras.get("head") or {v: k for k, v in KINDS.items()}.get(str(file.raw.get("task_type")))
    like = network.encoder.embeddings.token.weight
    heads: dict[str, torch.nn.Module] = {}
    if head is not None:
        last = layouts.theirs(network.config, f"heads.{head}.output.weight", (head,))[0]
        if last not in tensors:
            raise EverybertError(f"{file.folder} has no head: {last} is missing; download it again")
        bare = Network.__new__(Network)
        torch.nn.Module.__init__(bare)
        bare.config, bare.encoder, bare.heads, bare.pooler = (
            network.config,
            network.encoder,
            torch.nn.ModuleDict(),
            None,
        )
        bare.add_head(head, tensors[last].shape[0])
        module = bare.heads[head]
        names = {k: layouts.theirs(network.config, f"heads.{head}.{k}", (head,))[0] for k in module.state_dict()}
        if lacking := [n for n in names.values() if n not in tensors]:
            raise EverybertError(f"{file.folder} lacks {lacking[0]}; download it again")
        module.load_state_dict({k: tensors[n] for k, n in names.items()})
        heads[head] = module.train(network.training)
    if "pooler.dense.weight" not in tensors:
        return heads, None
    pooler = Pooler(network.config).to(like.device, like.dtype)
    pooler.load_state_dict({f"dense.{k}": tensors[f"pooler.dense.{k}"] for k in ("weight", "bias")})
    return heads, pooler


def _fresh_head(network: Network, name: str, outputs: int) -> torch.nn.Module:
    """A head of the network's family that is not on it."""
    before, pooler = dict(network.heads.items()), network.pooler
    network.add_head(name, outputs)
    head = network.heads[name]
    network.heads.clear()
    network.heads.update(before)
    network.pooler = pooler
    return head


# ── feature-based heads ──────────────────────────────────────────────────────────────────────────────────────


def save_feature_head(head: FeatureHead, folder: str | Path) -> dict[str, Any]:
    """Write the head's weights; returns what everybert.json should say under "feature_head"."""
    state = {k: v.detach().cpu().contiguous() for k, v in head.state_dict().items()}
    save_file(state, Path(folder) / HEAD, metadata={"format": "pt"})
    return {"layers": head.features.layers, "pool": head.features.pool, "outputs": head.output.out_features}


def load_feature_head(network: Network, name: str, folder: str | Path, described: dict[str, Any]) -> None:
    """Put a folder's feature-based head on the network, as everybert.json's "feature_head" describes it."""
    features = FeatureConfig(described["layers"], described["pool"])
    file = open_safetensors(inside(folder, HEAD))
    state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    if "output.weight" not in state or len(state["output.weight"]) != described["outputs"]:
        raise EverybertError(
            f"{Path(folder) / HEAD} has not the {described['outputs']} outputs of {EXTRAS}; restore it"
        )
    head = add_feature_head(network, name, len(state["output.weight"]), features)
    try:
        head.load_state_dict(state)
    except RuntimeError:
        raise EverybertError(f"{Path(folder) / HEAD} does not fit this model; restore the folder") from None
    head.eval()
