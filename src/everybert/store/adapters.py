"""LoRA adapters in PEFT's format (adapter_config.json, adapter_model.safetensors), and feature-based heads.

The folder of an adapter holds A and B of each adapted matrix and the head of the task; everybert.json holds the
settings of the task and the hash of the base encoder. PEFT loads these folders, and its folders load here.
"""

import hashlib
import math
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from everybert.errors import EverybertError
from everybert.files import inside, read_json, verify_folder, write_json
from everybert.model.config import EncoderConfig
from everybert.model.heads import HEADS, FeatureConfig, FeatureHead, Network, Pooler, add_feature_head, make_head
from everybert.model.lora import PART_NAMES, PROJECTION, TARGETS, AdapterSet, LoraConfig, adapted
from everybert.store import layouts
from everybert.store.hub import resolve
from everybert.store.huggingface import EXTRAS, EXTRAS_VERSION, read_extras
from everybert.store.weights import read_tensors

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
HEAD = "head.safetensors"
ROOT = "base_model.model."
TASK_TYPES = {"classify": "SEQ_CLS", "tag": "TOKEN_CLS", "answer": "QUESTION_ANS"}
"""Head → PEFT's task_type."""
MERGE = "merge it into its base with peft's merge_and_unload(), and load the model that this gives"
BUNDLED = "adapters"
"""Where the adapters of a model's own folder are, in the folder and in its everybert.json."""
UNSUPPORTED = ("fan_in_fan_out", "alora_invocation_tokens", "layer_replication", "use_qalora", "use_bdlora")
HARMLESS_INITS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights; others (pissa, olora …) change the weights of the base too."""
EARLIER = {"02ea6cdc40e4540ea9fc402f554a1b173bdee19fc34df1140a357b966384668c": "everybert-small of everybert 1.0"}
"""Bundled encoders of earlier versions by their hash: adapters of theirs are refused with the version to install."""


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
    matrices: dict[str, str] = {}
    for at, parts, _ in adapted(config, targets):
        names = layouts.transformers_names(config, f"{at}.weight", ())
        matrices |= {at + PART_NAMES[len(names)][part]: names[part].removesuffix(".weight") for part in parts}
    return matrices


# ── saving ──────────────────────────────────────────────────────────────────────────────────────────────────


def save_adapter(
    adapters: AdapterSet, name: str, folder: Path, *, base: str, extras: dict[str, Any] | None = None
) -> None:
    """Write an adapter into `folder` (from `atomic_folder`). `base` is the name or path of its base model."""
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
        at = ROOT if key.startswith(layouts.HEAD_PREFIX) else ROOT + prefix
        tensors[at + theirs] = value.detach().cpu().contiguous()
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
        raise EverybertError(f"{folder}: this adapter uses {odd[0]}, which is not read; {MERGE}")
    extras = read_extras(folder)
    return AdapterFile(folder, str(raw.get("base_model_name_or_path") or ""), extras.pop("base", None), extras, raw)


def load_adapter(adapters: AdapterSet, name: str, file: AdapterFile, verify: bool = True) -> None:
    """Add an adapter under a name. `verify` checks that the encoder is the one it was trained on."""
    network, config = adapters.network, adapters.network.config
    if verify and file.digest is not None and file.digest != encoder_digest(network):
        base, again = EARLIER.get(file.digest, file.base or "unnamed"), "or train it again on this one"
        raise EverybertError(f"{file.folder} was trained on another base ({base}); load that one, {again}")
    auto, layout = file.raw.get("auto_mapping"), layouts.LAYOUTS[config.family]
    base = str(auto.get("base_model_class")) if isinstance(auto, dict) else ""
    known = {family.stem + suffix for family in layouts.LAYOUTS.values() for suffix in family.classes}
    if base in known and base.removeprefix(layout.stem) not in layout.classes:
        raise EverybertError(f"{file.folder} is an adapter of a {base}, not of {config.family}; load its own base")
    content = _Content(file, read_tensors(file.folder, WEIGHTS))
    modules = _matrices(config, (*TARGETS, *([PROJECTION] if network.encoder.embeddings.projection else [])))
    pairs = {ours: content.take_pair(at) for ours, at in modules.items() if content.adapts(at)}
    if not pairs:
        raise EverybertError(f"{file.folder}: no tensor fits a {config.family} model; is the base another family?")
    rows = {ours: (modules[ours], len(b)) for ours, (_, b, _) in pairs.items()}
    magnitudes = {ours: m for ours, at in rows.items() if (m := content.take_magnitude(*at)) is not None}
    heads, pooler = _take_heads(network, content)
    if content.tensors:
        raise EverybertError(f"{file.folder} changes {min(content.tensors)} too, which is not supported; {MERGE}")
    rank, scales = max(len(a) for a, _, _ in pairs.values()), {scale for _, _, scale in pairs.values()}
    scale = scales.pop() if len(scales) == 1 else 1.0
    targets = tuple(t for t in (*TARGETS, PROJECTION) if pairs.keys() & _matrices(config, (t,)).keys())
    lora = LoraConfig(rank, scale * rank, float(file.raw.get("lora_dropout") or 0), targets)
    adapters.add(name, lora, heads, pooler)
    state = {key: torch.zeros_like(value) for key, value in adapters.state(name).items()}
    for ours, (a, b, factor) in pairs.items():  # one rank and one scale for all: A and B of a lower rank end in zeros
        state[f"{ours}.A"] = F.pad(a, (0, 0, 0, rank - len(a)))
        state[f"{ours}.B"] = F.pad(b if factor == scale else b * factor, (0, rank - len(a)))
    adapters.load(name, state)
    if magnitudes:
        adapters.load_magnitudes(name, magnitudes)
    adapters.entries[name].extras = file.extras


class _Content:
    """The tensors of an adapter file; those that are taken out of it are used. Names have no prefixes."""

    def __init__(self, file: AdapterFile, tensors: Mapping[str, Tensor]) -> None:
        self.file = file
        # all-linear adapts ESM's head for contacts between residues, too, which nothing here computes
        self.tensors = {_bare(name): value for name, value in tensors.items() if ".contact_head." not in name}
        self.full = {_bare(name): name.removeprefix(ROOT) for name in tensors}
        """As PEFT names them."""

    def adapts(self, module: str) -> bool:
        """Whether there are A and B for a module."""
        return f"{module}.lora_A.weight" in self.tensors

    def take(self, name: str) -> Tensor:
        """A tensor that must be there."""
        if name not in self.tensors:
            raise EverybertError(f"{self.file.folder} has no {name}, which its {CONFIG} needs; {MERGE}")
        return self.tensors.pop(name)

    def take_pair(self, module: str) -> tuple[Tensor, Tensor, float]:
        """A and B of a matrix, and the factor of B·A; their ranks are checked before matrices are allocated."""
        raw, where = self.file.raw, self.file.folder / CONFIG
        name = self.full[f"{module}.lora_A.weight"].partition(".lora_A.")[0]
        a, b = (self.take(f"{module}.lora_{letter}.weight") for letter in "AB")
        try:
            ranks = {int(raw["r"]), *(raw.get("rank_pattern") or {}).values()}
            alpha = float(_by_pattern(raw.get("alpha_pattern") or {}, name, raw["lora_alpha"]))
            scale = alpha / (math.sqrt(len(a)) if raw.get("use_rslora") else len(a))
            float(raw.get("lora_dropout") or 0)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError, ZeroDivisionError, re.error) as error:
            raise EverybertError(f"{where} gives no proper r, lora_alpha, lora_dropout ({error}); restore it") from None
        if a.ndim != 2 or b.ndim != 2 or not a.shape[0] == b.shape[1] or len(a) not in ranks:
            raise EverybertError(f"{where}: {module} is not of rank {raw['r']}, as it says; restore it")
        if not abs(scale) < 1e9:
            raise EverybertError(f"{where}: an adapter needs an alpha below 1e9; restore it")
        return a, b, scale

    def take_magnitude(self, module: str, rows: int) -> Tensor | None:
        """The magnitudes of a matrix's rows, if the adapter is a DoRA."""
        magnitude = self.tensors.pop(f"{module}.lora_magnitude_vector", None)
        if magnitude is not None and magnitude.shape != (rows,):
            raise EverybertError(f"{self.file.folder}: {module} needs {rows} magnitudes; restore {WEIGHTS}")
        return magnitude

    def fold(self, base: Mapping[str, Tensor]) -> None:
        """Replace the additions to parameters of the base's heads and pooler by whole parameters."""
        for name, value in base.items():
            module, _, kind = name.rpartition(".")
            if kind == "weight" and self.adapts(module):
                a, b, scale = self.take_pair(module)
                if (len(b), a.shape[1]) != value.shape:
                    raise EverybertError(f"{self.file.folder}: {module} does not fit this model; load its own base")
                whole, magnitude = value.float() + scale * (b.float() @ a.float()), self.take_magnitude(module, len(b))
                gain = 1.0 if magnitude is None else (magnitude.float() / whole.norm(dim=1))[:, None]
                self.tensors[name] = whole * gain


def _bare(name: str) -> str:
    """The name of a tensor in an adapter file without prefixes."""
    name = name.removeprefix(ROOT).replace(".modules_to_save.default", "").replace(".default.weight", ".weight")
    return layouts.canonical(name)


def _by_pattern(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """The value of the first pattern that fits the end of a module's name, as PEFT matches them."""
    for pattern, value in patterns.items():
        if len(re.findall(r"[*+{]", pattern)) > 3 or re.search(r"\)[*+{]", pattern):  # may take forever
            raise ValueError(f"the pattern {pattern[:40]!r} is not supported")
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default


def _take_heads(network: Network, content: _Content) -> tuple[dict[str, nn.Module], nn.Module | None]:
    """The head of the adapter's task, others that it changes, and the pooler; what they lack is the base model's."""
    file, config, like = content.file, network.config, network.encoder.embeddings.token.weight
    family = layouts.LAYOUTS[config.family].heads
    task = file.extras.get("head") or {v: k for k, v in TASK_TYPES.items()}.get(str(file.raw.get("task_type")))
    if task is not None and task not in family:
        raise EverybertError(f"{file.folder}: a {config.family} model has no head {task!r}; restore {EXTRAS}")
    heads = [head for head in dict.fromkeys([task, *network.heads]) if head in family]
    parts: dict[str, nn.Module] = {f"heads.{head}.": network.heads[head] for head in heads if head in network.heads}
    parts |= {"pooler.": network.pooler} if network.pooler is not None else {}
    base: dict[str, Tensor] = {}
    for at, module in reversed(parts.items()):  # ModernBERT's heads begin with the same layers: the task's are last
        base |= _named(config, module, at)
    content.fold(base)
    modules: dict[str, nn.Module] = {}
    for name in [*heads, "pooler"]:
        at = "pooler." if name == "pooler" else f"heads.{name}."
        (last,) = layouts.transformers_names(config, f"{at}output.weight", _family_heads(config, name))
        rows = len(content.tensors.get(last, base.get(last, torch.empty(1))))
        module = Pooler(config) if name == "pooler" else make_head(config, name, rows)
        names = _named(config, module, at)
        if name == task or names.keys() & content.tensors.keys():
            values = [base[n] if n in base and n not in content.tensors else content.take(n) for n in names]
            try:
                module.load_state_dict(dict(zip(module.state_dict(), values)))
            except RuntimeError:
                raise EverybertError(f"{file.folder}: its {name} does not fit this model; load its own base") from None
            modules[name] = module.to(like.device, like.dtype).train(network.training)
    pooler = modules.pop("pooler", None)
    return modules, pooler


def _family_heads(config: EncoderConfig, head: str) -> list[str]:
    """The heads of the class that has this one; none if no class has it: then its names are ours."""
    return layouts.LAYOUTS[config.family].classes[layouts.class_for(config, [head])]


def _named(config: EncoderConfig, module: nn.Module, at: str) -> dict[str, Tensor]:
    """The parameters of a head or pooler by their names in a file; `at` is the beginning of our names."""
    heads = _family_heads(config, at.split(".")[1]) if at.startswith(layouts.HEAD_PREFIX) else ()
    return {layouts.transformers_names(config, at + key, heads)[0]: value for key, value in module.state_dict().items()}


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


# ── the adapters of a model's own folder ─────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Bundle:
    """The adapters in a model's own folder, each of which is loaded when it is first used."""

    folders: Mapping[str, Path] = field(default_factory=dict)
    """By name."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    """By task ("classify pair" for pairs of texts), the adapter that is used for it."""


def read_bundle(folder: Path, extras: Mapping[str, Any], known: Container[str]) -> Bundle:
    """The adapters that a folder's everybert.json (`extras`) lists, each for `known` tasks: {"ner": ["tag"], …}."""
    listed = extras.get(BUNDLED, {})
    for name, tasks in listed.items():
        if not re.fullmatch(r"\w[\w-]*", name) or not isinstance(tasks, list) or any(t not in known for t in tasks):
            raise EverybertError(f"{folder}: everybert.json has an odd adapter {name[:40]!r}; restore the folder")
    defaults = {task: name for name, tasks in listed.items() for task in tasks}
    return Bundle({name: folder / BUNDLED / name for name in listed}, defaults)


def base_of(folder: Path) -> Path:
    """The folder of the model that an adapter was trained on."""
    base = read_adapter(folder).base
    try:
        return resolve(base)
    except EverybertError as error:
        missing = f"{folder} is an adapter for {base or 'an unnamed model'}, which is not there ({error})"
        raise EverybertError(f"{missing}; load that model, then model.add_adapter(folder)") from None
