"""LoRA adapters in PEFT's format (adapter_config.json, adapter_model.safetensors), and feature-based heads.

The folder of an adapter holds A and B of each adapted matrix and the head of the task; everybert.json holds the
settings of the task and the hash of the base encoder. PEFT loads these folders, and its folders load here.
"""

import copy
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
from everybert.model.heads import HEADS, FeatureConfig, FeatureHead, Network, Pooler, add_feature_head, make_head
from everybert.model.lora import QKV, TARGETS, AdapterSet, LoraConfig
from everybert.store import layouts
from everybert.store.huggingface import EXTRAS, EXTRAS_VERSION, read_extras
from everybert.store.weights import read_tensors

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
HEAD = "head.safetensors"
ROOT = "base_model.model."
TASK_TYPES = {"classify": "SEQ_CLS", "tag": "TOKEN_CLS", "answer": "QUESTION_ANS"}
"""Head → PEFT's task_type."""
MERGE = "merge it into its base with peft's merge_and_unload(), and load the model that this gives"
UNSUPPORTED = ("use_dora", "use_rslora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "alora_invocation_tokens")
HARMLESS_INITS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights; others (pissa, olora …) change the weights of the base too."""


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
        tensors[ROOT + ("" if key.startswith(layouts.HEADS) else prefix) + theirs] = value.detach().cpu().contiguous()
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
    if not is_adapter(folder):
        raise EverybertError(f"{folder} has no {CONFIG}; give the folder of an adapter")
    verify_folder(folder)
    raw = read_json(inside(folder, CONFIG))
    if raw.get("peft_type") != "LORA":
        raise EverybertError(f"{folder / CONFIG} is not a LoRA adapter's; only LoRA is read")
    odd = [key for key in UNSUPPORTED if raw.get(key)] + (["bias"] if raw.get("bias", "none") != "none" else [])
    if odd or raw.get("init_lora_weights") not in HARMLESS_INITS:
        odd.append("init_lora_weights")
        raise EverybertError(f"{folder}: this adapter uses {odd[0]}, which is not read, only plain LoRA; {MERGE}")
    extras = read_extras(folder)
    return AdapterFile(folder, str(raw.get("base_model_name_or_path") or ""), extras.pop("base", None), extras, raw)


def load_adapter(adapters: AdapterSet, name: str, file: AdapterFile, verify: bool = True) -> None:
    """Add an adapter under a name. `verify` checks that the encoder is the one it was trained on."""
    network, config = adapters.network, adapters.network.config
    if verify and file.digest is not None and file.digest != encoder_digest(network):
        raise EverybertError(f"{file.folder} was trained on another base ({file.base or 'unnamed'}); load that one")
    tensors = {_bare(key): value for key, value in read_tensors(file.folder, WEIGHTS).items()}
    adapted = {name.removesuffix(".lora_A.weight") for name in tensors}
    targets = tuple(target for target in TARGETS if adapted & set(_matrices(config, (target,)).values()))
    if not targets:
        raise EverybertError(f"{file.folder}: no tensor fits a {config.family} model; is the base another family?")
    raw = file.raw
    try:
        lora = LoraConfig(int(raw["r"]), float(raw["lora_alpha"]), float(raw.get("lora_dropout") or 0), targets)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise EverybertError(f"{file.folder / CONFIG} gives no proper r and lora_alpha ({error}); restore it") from None
    state: dict[str, Tensor] = {}
    for ours, module in _matrices(config, targets).items():
        state[f"{ours}.A"], state[f"{ours}.B"] = _take_pair(file, tensors, module, lora.rank)
    head, pooler = _take_head(network, file, tensors), _take_pooler(network, file, tensors, lora)
    if tensors:
        raise EverybertError(f"{file.folder} changes {min(tensors)} too, which is not supported; {MERGE}")
    adapters.add(name, lora, head, pooler)
    adapters.load(name, state)
    adapters.entries[name].extras = file.extras


def _bare(name: str) -> str:
    """The name of a tensor in an adapter file without prefixes."""
    name = name.removeprefix(ROOT).replace(".modules_to_save.default", "").replace(".default.weight", ".weight")
    return layouts.canonical(name)


def _take(file: AdapterFile, tensors: dict[str, Tensor], name: str) -> Tensor:
    """Remove a tensor that must be there from `tensors`."""
    if name not in tensors:
        raise EverybertError(f"{file.folder} has no {name}, which its other tensors and {CONFIG} need; {MERGE}")
    return tensors.pop(name)


def _take_pair(file: AdapterFile, tensors: dict[str, Tensor], module: str, rank: int) -> tuple[Tensor, Tensor]:
    """A and B of a matrix; their rank is checked before matrices of that rank are allocated."""
    a, b = (_take(file, tensors, f"{module}.lora_{letter}.weight") for letter in "AB")
    if a.ndim != 2 or b.ndim != 2 or not a.shape[0] == b.shape[1] == rank:
        raise EverybertError(f"{file.folder}: {module} is not of rank {rank}, as {CONFIG} says; restore it")
    return a, b


def _take_head(network: Network, file: AdapterFile, tensors: dict[str, Tensor]) -> dict[str, nn.Module]:
    """The head in an adapter file, if there is one."""
    head = file.extras.get("head") or {v: k for k, v in TASK_TYPES.items()}.get(str(file.raw.get("task_type")))
    if head is None:
        return {}
    if head not in layouts.LAYOUTS[network.config.family].heads:
        raise EverybertError(f"{file.folder}: a {network.config.family} model has no head {head!r}; restore {EXTRAS}")
    (last,) = layouts.transformers_names(network.config, f"heads.{head}.output.weight", (head,))
    module = make_head(network.config, head, len(tensors[last]) if last in tensors else 1)
    return {head: _filled(network, file, tensors, module, f"heads.{head}.").train(network.training)}


def _take_pooler(network: Network, file: AdapterFile, tensors: dict[str, Tensor], lora: LoraConfig) -> nn.Module | None:
    """The pooler in an adapter file, if there is one: whole, or as A and B to add to the base model's."""
    (weight,) = layouts.transformers_names(network.config, "pooler.dense.weight", ())
    module = weight.removesuffix(".weight")
    if weight in tensors:
        return _filled(network, file, tensors, Pooler(network.config), "pooler.")
    if f"{module}.lora_A.weight" not in tensors or network.pooler is None:
        return None
    a, b = _take_pair(file, tensors, module, lora.rank)
    pooler = copy.deepcopy(network.pooler)
    pooler.dense.weight.data += (lora.alpha / lora.rank * b.float() @ a.float()).to(pooler.dense.weight)
    return pooler


def _filled(network: Network, file: AdapterFile, tensors: dict[str, Tensor], module: nn.Module, at: str) -> nn.Module:
    """A module of ours with the tensors that belong to it; `at` is the beginning of its names."""
    held = (at.split(".")[1],) if at.startswith(layouts.HEADS) else ()
    names = {key: layouts.transformers_names(network.config, at + key, held)[0] for key in module.state_dict()}
    try:
        module.load_state_dict({key: _take(file, tensors, name) for key, name in names.items()})
    except RuntimeError:
        raise EverybertError(
            f"{file.folder}: its {at.rstrip('.')} does not fit this model; load its own base"
        ) from None
    like = network.encoder.embeddings.token.weight
    return module.to(like.device, like.dtype)


# ── feature-based heads ──────────────────────────────────────────────────────────────────────────────────────


def save_feature_head(head: FeatureHead, folder: str | Path) -> dict[str, Any]:
    """Write the weights of a feature-based head; returns the "feature_head" entry of everybert.json."""
    state = {k: v.detach().cpu().contiguous() for k, v in head.state_dict().items()}
    save_file(state, Path(folder) / HEAD, metadata={"format": "pt"})
    return {"layers": head.features.layers, "pool": head.features.pool, "outputs": head.output.out_features}


def load_feature_head(network: Network, name: str, folder: str | Path, described: dict[str, Any]) -> None:
    """Add the feature-based head of a folder to the network; `described` is the entry of everybert.json."""
    state = read_tensors(Path(folder), HEAD)
    try:
        if name not in HEADS or len(state["output.weight"]) != described["outputs"]:
            raise KeyError(name)
        features = FeatureConfig(described["layers"], described["pool"])
        head = add_feature_head(network, name, len(state["output.weight"]), features)
        head.load_state_dict(state)
    except (KeyError, TypeError, ValueError, RuntimeError):
        raise EverybertError(f"{folder}: {HEAD} and {EXTRAS} do not fit this model; restore the folder") from None
    head.eval()
