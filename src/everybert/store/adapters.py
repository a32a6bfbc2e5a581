"""LoRA adapters in PEFT's format (adapter_config.json, adapter_model.safetensors), and feature-based heads.

The folder of an adapter holds A and B of each adapted matrix and the head of the task; everybert.json holds the
settings of the task and the hash of the base encoder. PEFT loads these folders, and its folders load here.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from everybert.errors import EverybertError
from everybert.files import inside, read_json, verify_folder, write_json
from everybert.model.config import EncoderConfig
from everybert.model.heads import FeatureConfig, FeatureHead, Network, Pooler, add_feature_head, make_head
from everybert.model.lora import QKV, TARGETS, AdapterSet, LoraConfig
from everybert.store import layouts
from everybert.store.huggingface import EXTRAS, EXTRAS_VERSION, read_extras
from everybert.store.weights import open_safetensors

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
HEAD = "head.safetensors"
ROOT = "base_model.model."
TASK_TYPES = {"classify": "SEQ_CLS", "tag": "TOKEN_CLS", "answer": "QUESTION_ANS"}
"""Head → PEFT's task_type."""
UNSUPPORTED = ("use_dora", "use_rslora", "fan_in_fan_out", "rank_pattern", "alpha_pattern")


def encoder_digest(network: Network) -> str:
    """SHA-256 of the encoder's weights in fp32. An adapter fits only the encoder that it was trained on."""
    if network.digest is not None:
        return network.digest
    digest = hashlib.sha256()
    for name, value in sorted(network.encoder.state_dict().items()):
        if ".lora." not in name:
            digest.update(name.encode())
            digest.update(value.detach().to("cpu", torch.float32).contiguous().numpy().data)
    return digest.hexdigest()


def _matrices(config: EncoderConfig, targets: tuple[str, ...]) -> dict[str, str]:
    """The adapted matrices: our name ("encoder.layers.0.attention.qkv.query") → module in the file, without prefix."""
    found: dict[str, str] = {}
    for i in range(max(config.layer_order) + 1):
        at = f"encoder.layers.{i}."
        qkv = layouts.transformers_names(config, f"{at}attention.qkv.weight", ())
        if len(qkv) == 1:  # ModernBERT has one matrix
            found |= {f"{at}attention.qkv": qkv[0]} if set(QKV) & set(targets) else {}
        else:
            found |= {f"{at}attention.qkv.{part}": name for part, name in zip(QKV, qkv) if part in targets}
        for target in [t for t in targets if t not in QKV]:
            (found[at + target],) = layouts.transformers_names(config, f"{at}{target}.weight", ())
    return {ours: name.removesuffix(".weight") for ours, name in found.items()}


# ── saving ──────────────────────────────────────────────────────────────────────────────────────────────────


def save_adapter(
    adapters: AdapterSet, name: str, folder: str | Path, *, base: str, extras: dict[str, Any] | None = None
) -> None:
    """Write an adapter into `folder` (from `atomic_folder`). `base` is the name or path of its base model."""
    folder = Path(folder)
    entry, network = adapters.entries[name], adapters.network
    config, layout = network.config, layouts.LAYOUTS[network.config.family]
    suffix = layouts.class_for(config, entry.heads)
    prefix = "" if suffix == "Model" else layout.prefix
    matrices = _matrices(config, entry.config.targets)
    tensors: dict[str, Tensor] = {}
    for key, value in adapters.state(name).items():
        ours, _, letter = key.rpartition(".")
        tensors[f"{ROOT}{prefix}{matrices[ours]}.lora_{letter}.weight"] = value.cpu().contiguous()
    whole: set[str] = set()
    parts = {f"heads.{head}.{k}": v for head, module in entry.heads.items() for k, v in module.state_dict().items()}
    parts |= {f"pooler.{k}": v for k, v in entry.pooler.state_dict().items()} if entry.pooler is not None else {}
    for key, value in parts.items():
        (theirs,) = layouts.transformers_names(config, key, layout.classes[suffix])
        whole.add(theirs.split(".")[0])
        tensors[ROOT + ("" if layouts.is_head(key) else prefix) + theirs] = value.detach().cpu().contiguous()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    task = next((TASK_TYPES[h] for h in entry.heads if h in TASK_TYPES), None if entry.heads else "FEATURE_EXTRACTION")
    peft = {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base,
        "r": entry.config.rank,
        "lora_alpha": entry.config.alpha,
        "lora_dropout": entry.config.dropout,
        "target_modules": _pattern(matrices),
        "modules_to_save": sorted(whole) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    write_json(folder / CONFIG, peft)
    ours_alone = {"base": encoder_digest(network), "head": next(iter(entry.heads), None), **(extras or {})}
    write_json(folder / EXTRAS, {"version": EXTRAS_VERSION, **ours_alone})


def _pattern(matrices: dict[str, str]) -> str:
    """A regular expression of the adapted modules: short names would match other modules too (output.dense)."""
    names = sorted({re.sub(r"\d+", "#", module) for module in matrices.values()})
    return r"(?:.*\.)?(?:" + "|".join(re.escape(n).replace(r"\#", r"\d+") for n in names) + ")"


# ── loading ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class AdapterFile:
    """The description of an adapter, read from its folder."""

    folder: Path
    base: str
    """The name of its base model."""
    digest: str | None
    """The hash of the base encoder; None in folders from elsewhere."""
    extras: dict[str, Any]
    """everybert.json: the settings of the task."""
    raw: dict[str, Any]
    """adapter_config.json."""


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder holds an adapter rather than a model."""
    return (Path(folder) / CONFIG).is_file()


def read_adapter(folder: str | Path) -> AdapterFile:
    """Read the description of an adapter; `load_adapter` reads its weights."""
    folder = Path(folder)
    verify_folder(folder)
    raw = read_json(inside(folder, CONFIG))
    if not isinstance(raw, dict) or raw.get("peft_type") != "LORA":
        raise EverybertError(f"{folder / CONFIG} is not a LoRA adapter's; only LoRA is read")
    odd = [key for key in UNSUPPORTED if raw.get(key)] + (["bias"] if raw.get("bias", "none") != "none" else [])
    if odd:
        raise EverybertError(f"{folder}: this adapter uses {odd[0]}, which is not read; plain LoRA is")
    extras = read_extras(folder)
    return AdapterFile(folder, str(raw.get("base_model_name_or_path") or ""), extras.pop("base", None), extras, raw)


def load_adapter(adapters: AdapterSet, name: str, file: AdapterFile, verify: bool = True) -> None:
    """Add an adapter under a name. `verify` checks that the encoder is the one it was trained on."""
    network, config = adapters.network, adapters.network.config
    if verify and file.digest is not None and file.digest != encoder_digest(network):
        raise EverybertError(f"{file.folder} was trained on another base ({file.base or 'unnamed'}); load that one")
    tensors = _read_tensors(inside(file.folder, WEIGHTS))
    targets = tuple(
        target
        for target in TARGETS
        if any(f"{module}.lora_A.weight" in tensors for module in _matrices(config, (target,)).values())
    )
    if not targets:
        raise EverybertError(f"{file.folder}: no tensor fits a {config.family} model; is the base another family?")
    lora = _lora_config(file, targets)
    state: dict[str, Tensor] = {}
    for ours, module in _matrices(config, targets).items():
        for letter, rank_axis in (("A", 0), ("B", -1)):
            key = f"{module}.lora_{letter}.weight"
            if key not in tensors:
                raise EverybertError(f"{file.folder} lacks {key}; download it again")
            if tensors[key].shape[rank_axis] != lora.rank:  # before matrices of that rank are allocated
                raise EverybertError(f"{file.folder}: {key} is not of rank {lora.rank}, as {CONFIG} says; restore it")
            state[f"{ours}.{letter}"] = tensors[key]
    adapters.add(name, lora, _head(network, file, tensors), _pooler(network, tensors))
    adapters.load(name, state)


def _lora_config(file: AdapterFile, targets: tuple[str, ...]) -> LoraConfig:
    raw = file.raw
    try:
        return LoraConfig(int(raw["r"]), float(raw["lora_alpha"]), float(raw.get("lora_dropout") or 0), targets)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise EverybertError(f"{file.folder / CONFIG} gives no proper r and lora_alpha ({error}); restore it") from None


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of an adapter file under names without prefixes."""
    file = open_safetensors(path)
    found = {}
    for key in file.keys():  # noqa: SIM118
        bare = key.removeprefix(ROOT).replace(".modules_to_save.default", "").replace(".default.weight", ".weight")
        found[layouts.canonical(bare)] = file.get_tensor(key)
    return found


def _head(network: Network, file: AdapterFile, tensors: dict[str, Tensor]) -> dict[str, nn.Module]:
    """The head in an adapter file, if there is one."""
    head = file.extras.get("head") or {v: k for k, v in TASK_TYPES.items()}.get(str(file.raw.get("task_type")))
    if head is None:
        return {}
    (last,) = layouts.transformers_names(network.config, f"heads.{head}.output.weight", (head,))
    if last not in tensors:
        raise EverybertError(f"{file.folder} has no head: {last} is missing; download it again")
    like = network.encoder.embeddings.token.weight
    module = make_head(network.config, head, tensors[last].shape[0]).to(like.device, like.dtype)
    state = {}
    for key in module.state_dict():
        (name,) = layouts.transformers_names(network.config, f"heads.{head}.{key}", (head,))
        if name not in tensors:
            raise EverybertError(f"{file.folder} lacks {name}; download it again")
        state[key] = tensors[name]
    module.load_state_dict(state)
    return {head: module.train(network.training)}


def _pooler(network: Network, tensors: dict[str, Tensor]) -> Pooler | None:
    """The pooler in an adapter file, if there is one."""
    keys = ("dense.weight", "dense.bias")
    names = {key: layouts.transformers_names(network.config, f"pooler.{key}", ())[0] for key in keys}
    if not all(name in tensors for name in names.values()):
        return None
    like = network.encoder.embeddings.token.weight
    pooler = Pooler(network.config).to(like.device, like.dtype)
    pooler.load_state_dict({key: tensors[name] for key, name in names.items()})
    return pooler


# ── feature-based heads ──────────────────────────────────────────────────────────────────────────────────────


def save_feature_head(head: FeatureHead, folder: str | Path) -> dict[str, Any]:
    """Write the weights of a feature-based head; returns the "feature_head" entry of everybert.json."""
    state = {k: v.detach().cpu().contiguous() for k, v in head.state_dict().items()}
    save_file(state, Path(folder) / HEAD, metadata={"format": "pt"})
    return {"layers": head.features.layers, "pool": head.features.pool, "outputs": head.output.out_features}


def load_feature_head(network: Network, name: str, folder: str | Path, described: dict[str, Any]) -> None:
    """Add the feature-based head of a folder to the network; `described` is the entry of everybert.json."""
    file = open_safetensors(inside(folder, HEAD))
    state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    if "output.weight" not in state or len(state["output.weight"]) != described["outputs"]:
        raise EverybertError(
            f"{Path(folder) / HEAD} has not the {described['outputs']} outputs of {EXTRAS}; restore it"
        )
    features = FeatureConfig(described["layers"], described["pool"])
    head = add_feature_head(network, name, len(state["output.weight"]), features)
    try:
        head.load_state_dict(state)
    except RuntimeError:
        raise EverybertError(f"{Path(folder) / HEAD} does not fit this model; restore the folder") from None
    head.eval()
