"""The module files of sentence-transformers: how a folder's token vectors become one vector per text.

modules.json lists the modules of a folder: the encoder, 1_Pooling, further Dense layers, Normalize. `read_pooling` and
`write_pooling` are the only code that reads and writes these files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from everybert.errors import EverybertError
from everybert.files import inside, read_json, write_json
from everybert.model.pooling import MODES, check_mode

FLAGS = {"cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens", "mean_sqrt_len_tokens": "mean_sqrt_len_tokens"}
"""pooling_mode_… : the names of the modes in older 1_Pooling/config.json files, which have a flag for each."""
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Tanh": torch.tanh,
    "Identity": lambda x: x,
    "ReLU": torch.relu,
    "GELU": F.gelu,
}
MODULE = "sentence_transformers.models."


@dataclass(frozen=True)
class Dense:
    """A linear layer after the pooling (LaBSE has one)."""

    weight: Tensor
    bias: Tensor | None
    activation: str = "Tanh"

    def __call__(self, x_NH: Tensor) -> Tensor:
        """(N, H) → (N, out)."""
        return ACTIVATIONS[self.activation](F.linear(x_NH, self.weight, self.bias))


@dataclass(frozen=True)
class Pooling:
    """How texts become vectors. Without sentence-transformers files: the mean over all tokens."""

    modes: tuple[str, ...] = ("mean",)
    """Several modes are concatenated."""
    normalize: bool = False
    size: int | None = None
    """The longest sequence, special tokens included; None means the model's window."""
    lowercase: bool = False
    prompt: str = ""
    """Put before every text."""
    dense: tuple[Dense, ...] = field(default=(), repr=False)
    published: bool = False
    """Whether the folder has sentence-transformers files."""

    def width(self, hidden_size: int) -> int:
        """The length of a vector."""
        return len(self.dense[-1].weight) if self.dense else len(self.modes) * hidden_size

    def finish(self, x_NH: Tensor) -> Tensor:
        """(N, modes·H) → (N, width): the Dense layers, and vectors of length 1 if the folder asks for them."""
        for layer in self.dense:
            x_NH = layer(x_NH)
        return F.normalize(x_NH, dim=-1) if self.normalize else x_NH


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────


def read_pooling(folder: Path) -> Pooling:
    """The settings in modules.json and the files it names; the defaults if there is no modules.json."""
    if not (folder / "modules.json").is_file():
        return Pooling()
    found = Pooling(published=True)
    for number, module in enumerate(read_json(inside(folder, "modules.json"))):
        kind, path = str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))
        if kind == "Transformer" and number == 0:
            settings = _settings(folder, "sentence_bert_config.json")
            size = settings.get("max_seq_length")
            size = size if isinstance(size, int) and size > 0 else None
            found = replace(found, size=size, lowercase=bool(settings.get("do_lower_case")))
        elif kind == "Pooling":
            found = replace(found, modes=_modes(_settings(folder, f"{path}/config.json"), folder))
        elif kind == "Dense":
            found = replace(found, dense=(*found.dense, _read_dense(folder, path)))
        elif kind == "Normalize":
            found = replace(found, normalize=True)
        elif kind != "Dropout":
            raise EverybertError(
                f"{folder} has a {kind} module, unknown to everybert; give pooling= (mean, cls or max) yourself"
            )
    more = _settings(folder, "config_sentence_transformers.json")
    prompts, name = more.get("prompts"), more.get("default_prompt_name")
    if name and isinstance(prompts, dict):
        found = replace(found, prompt=str(prompts.get(name) or ""))
    return found


def _settings(folder: Path, name: str) -> dict[str, Any]:
    try:
        found = read_json(inside(folder, name))
    except FileNotFoundError:
        return {}
    return found if isinstance(found, dict) else {}


def _modes(settings: dict[str, Any], folder: Path) -> tuple[str, ...]:
    """The modes in a 1_Pooling/config.json of the new form (pooling_mode) or the old one (a flag for each)."""
    named = settings.get("pooling_mode")
    modes = [named] if isinstance(named, str) else list(named or [])
    if not modes:
        known = {flag: mode for mode, flag in FLAGS.items()}
        flags = [key.removeprefix("pooling_mode_") for key, on in settings.items() if on is True]
        modes = [known.get(flag, flag) for flag in flags if f"pooling_mode_{flag}" in settings]
        modes.sort(key=lambda mode: MODES.index(mode) if mode in MODES else 0)
    for mode in modes:
        check_mode(mode, str(folder))
    return tuple(modes) or ("mean",)


def _read_dense(folder: Path, path: str) -> Dense:
    from safetensors.torch import load_file

    settings = _settings(folder, f"{path}/config.json")
    activation = str(settings.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in ACTIVATIONS or settings.get("use_residual"):
        raise EverybertError(f"{folder}/{path} has an unknown form ({activation}); give pooling= yourself")
    try:
        tensors = load_file(inside(folder, f"{path}/model.safetensors"))
        return Dense(tensors["linear.weight"].float(), tensors.get("linear.bias"), activation)
    except (OSError, KeyError, ValueError) as error:
        raise EverybertError(f"{folder}/{path} has no readable model.safetensors ({error}); restore it") from None


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────


def write_pooling(folder: Path, pooling: Pooling, hidden_size: int) -> None:
    """Write the files from which sentence-transformers and `read_pooling` make the same vectors."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    (folder / "1_Pooling").mkdir()
    modes: dict[str, Any] = {f"pooling_mode_{flag}": mode in pooling.modes for mode, flag in FLAGS.items()}
    if pooling.modes != tuple(mode for mode in MODES if mode in pooling.modes):
        modes = {"pooling_mode": list(pooling.modes)}  # only the new form can name another order
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": hidden_size, **modes})
    for layer in pooling.dense:
        modules.append((f"{len(modules)}_Dense", "Dense"))
        _write_dense(folder / modules[-1][0], layer)
    if pooling.normalize:
        modules.append((f"{len(modules)}_Normalize", "Normalize"))
    listed = [{"idx": i, "name": str(i), "path": p, "type": MODULE + kind} for i, (p, kind) in enumerate(modules)]
    write_json(folder / "modules.json", listed)
    size = {"max_seq_length": pooling.size, "do_lower_case": pooling.lowercase}
    write_json(folder / "sentence_bert_config.json", size)
    if pooling.prompt:
        prompts = {"prompts": {"default": pooling.prompt}, "default_prompt_name": "default"}
        write_json(folder / "config_sentence_transformers.json", prompts)


def _write_dense(folder: Path, layer: Dense) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    tensors = {"linear.weight": layer.weight.contiguous()}
    if layer.bias is not None:
        tensors["linear.bias"] = layer.bias
    save_file(tensors, folder / "model.safetensors")
    module = "linear" if layer.activation == "Identity" else "activation"
    out, inner = layer.weight.shape
    settings = {
        "in_features": inner,
        "out_features": out,
        "bias": layer.bias is not None,
        "activation_function": f"torch.nn.modules.{module}.{layer.activation}",
    }
    write_json(folder / "config.json", settings)
