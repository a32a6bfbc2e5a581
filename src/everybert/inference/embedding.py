"""Texts to vectors: pooling as the folder's sentence-transformers files say, over windows where a text is long.

Legend: T tokens in the batch, n tokens of one sequence, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from everybert.errors import EverybertError
from everybert.inference.engine import Inputs, Piece, cover, encode
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.store.folder import inside, read_json, write_json
from everybert.text.tokenizer import Tokenizer

MODES = {"cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens", "mean_sqrt_len_tokens": "mean_sqrt_len_tokens"}
"""Poolings, in the order in which several are concatenated, and what older 1_Pooling/config.json files call them."""
ACTIVATIONS = {"Tanh": torch.tanh, "Identity": lambda x: x, "ReLU": torch.relu, "GELU": F.gelu}


@dataclass(frozen=True)
class Dense:
    """A further linear layer of a sentence-transformers model (LaBSE has one)."""

    weight: Tensor
    bias: Tensor | None
    activation: str = "Tanh"

    def __call__(self, x_NH: Tensor) -> Tensor:
        """(N, H) → (N, out)."""
        return ACTIVATIONS[self.activation](F.linear(x_NH, self.weight, self.bias))


@dataclass(frozen=True)
class Pooling:
    """How a folder's texts become vectors. Without sentence-transformers files: the mean over all tokens."""

    modes: tuple[str, ...] = ("mean",)
    normalize: bool = False
    size: int | None = None
    """Tokens of a sequence, special ones included; None means the model's window."""
    lowercase: bool = False
    prompt: str = ""
    """Put before every text."""
    dense: tuple[Dense, ...] = field(default=(), repr=False)
    published: bool = False
    """Whether the folder has sentence-transformers files."""


@dataclass(frozen=True)
class Embedded:
    """Vectors, and what was read for them."""

    vectors: np.ndarray
    """float32 (N, H): one a text, in order."""
    tokens: list[int]
    """Tokens of each text that were read, special ones included."""
    cut: list[int]
    """Tokens of each text that were left out because truncation was asked for."""


@torch.inference_mode()
def embed(
    network: Network, tokenizer: Tokenizer, texts: Sequence[str], pooling: Pooling, size: int, long: str
) -> Embedded:
    """One vector a text."""
    ids = tokenizer.ids_batch(_prepared(texts, pooling, tokenizer))
    lead, tail = _specials(tokenizer)
    pieces: list[Piece] = []
    owners: list[int] = []
    cut = [0] * len(ids)
    for i, sequence in enumerate(ids):
        if long == "cut" and len(sequence) > size:
            cut[i] = len(sequence) - size
            sequence = sequence[: size - tail] + sequence[len(sequence) - tail :]
        for piece in cover(sequence, lead, tail, size):
            pieces.append(piece)
            owners.append(i)
    pooled = _pooled(network, pieces, pooling.modes)
    vectors = torch.from_numpy(_combined(pooled, pieces, owners, pooling.modes, len(ids)))
    for layer in pooling.dense:
        vectors = layer(vectors)
    if pooling.normalize:
        vectors = F.normalize(vectors, dim=1)
    return Embedded(vectors.numpy(), [len(x) - lost for x, lost in zip(ids, cut)], cut)


def _prepared(texts: Sequence[str], pooling: Pooling, tokenizer: Tokenizer) -> Sequence[str]:
    if pooling.prompt:
        texts = [pooling.prompt + text for text in texts]
    return [text.lower() for text in texts] if pooling.lowercase and not tokenizer.lowercase else texts


def _specials(tokenizer: Tokenizer) -> tuple[int, int]:
    """How many special tokens stand before and after a text."""
    special = tokenizer.encode("a").special
    lead = special.index(False) if False in special else 0
    return lead, tokenizer.single_special - lead


def _pooled(network: Network, pieces: list[Piece], modes: tuple[str, ...]) -> np.ndarray:
    """(pieces, modes, H): each sequence pooled over the tokens it owns."""
    out = np.empty((len(pieces), len(modes), network.config.hidden_size), dtype=np.float32)

    def read(which: list[int], batch: Ragged, x_TH: Tensor) -> None:
        own = [pieces[i] for i in which]
        lengths = [piece.stop - piece.start for piece in own]
        rows_TH = x_TH
        if sum(lengths) < len(x_TH):
            rows_TH = torch.cat([x_nH[piece.own] for piece, x_nH in zip(own, batch.split(x_TH))])
        counts_B = torch.tensor(lengths, device=x_TH.device)
        for m, mode in enumerate(modes):
            if mode == "cls":
                vectors_BH = x_TH[batch.first_B]
            else:
                reduce = "max" if mode == "max" else "mean"
                vectors_BH = torch.segment_reduce(rows_TH.float(), reduce, lengths=counts_B)
            out[which, m] = vectors_BH.float().cpu().numpy()

    encode(network, Inputs([piece.ids for piece in pieces]), read)
    return out


def _combined(
    pooled: np.ndarray, pieces: list[Piece], owners: list[int], modes: tuple[str, ...], texts: int
) -> np.ndarray:
    """(texts, modes·H): the pieces of a text, each weighing as many tokens as it owns (max: the largest of all)."""
    count_P = np.array([piece.stop - piece.start for piece in pieces], dtype=np.float64)
    total_N = np.bincount(owners, count_P, minlength=texts)
    out = np.zeros((texts, *pooled.shape[1:]), dtype=np.float32)
    if len(pieces) == texts:
        out[:] = pooled
    else:
        share_P = count_P / total_N[owners]
        for p, i in enumerate(owners):
            out[i] += pooled[p] * share_P[p]
    for m, mode in enumerate(modes):
        if mode == "max" and len(pieces) > texts:
            out[:, m] = -np.inf
            np.maximum.at(out[:, m], owners, pooled[:, m])
        elif mode == "mean_sqrt_len_tokens":
            out[:, m] *= np.sqrt(total_N)[:, None]
    return out.reshape(texts, -1)


# ── the files of sentence-transformers ───────────────────────────────────────────────────────────────────────


def read_pooling(folder: Path) -> Pooling:
    """What modules.json and the files it names say; the plain mean where there is none."""
    if not (folder / "modules.json").is_file():
        return Pooling()
    found = Pooling(published=True)
    for number, module in enumerate(read_json(inside(folder, "modules.json"))):
        kind, path = str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))
        if kind == "Transformer" and number == 0:
            settings = _settings(folder, "sentence_bert_config.json")
            size = settings.get("max_seq_length")
            found = replace(
                found,
                size=size if isinstance(size, int) and size > 0 else None,
                lowercase=bool(settings.get("do_lower_case")),
            )
        elif kind == "Pooling":
            found = replace(found, modes=_modes(_settings(folder, f"{path}/config.json"), folder))
        elif kind == "Dense":
            found = replace(found, dense=(*found.dense, _dense(folder, path)))
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
    """The poolings a 1_Pooling/config.json asks for, in its new form (pooling_mode) or its old (a flag for each)."""
    named = settings.get("pooling_mode")
    modes = [named] if isinstance(named, str) else list(named or [])
    if not modes:
        known = {old: mode for mode, old in MODES.items()}
        flags = [
            key.removeprefix("pooling_mode_") for key, on in settings.items() if on is True and "pooling_mode_" in key
        ]
        modes = [known.get(flag, flag) for flag in flags]
        modes.sort(key=lambda mode: list(MODES).index(mode) if mode in MODES else 0)
    check_modes(modes, str(folder))
    return tuple(modes) or ("mean",)


def check_modes(modes: Sequence[str], where: str = "embed") -> None:
    """Refuse poolings that there are none of."""
    for mode in modes:
        if mode not in MODES:
            raise EverybertError(f"{where}: there is no pooling {mode!r}; choose one of {', '.join(MODES)}")


def _dense(folder: Path, path: str) -> Dense:
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


def write_pooling(folder: Path, pooling: Pooling, width: int) -> None:
    """Write the files from which sentence-transformers, and `read_pooling`, get the same vectors."""
    at = "sentence_transformers.models."
    modules = [{"path": "", "type": at + "Transformer"}, {"path": "1_Pooling", "type": at + "Pooling"}]
    (folder / "1_Pooling").mkdir()
    said: dict[str, Any] = {f"pooling_mode_{old}": mode in pooling.modes for mode, old in MODES.items()}
    if pooling.modes != tuple(mode for mode in MODES if mode in pooling.modes):
        said = {"pooling_mode": list(pooling.modes)}  # another order, which only the new form can say
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": width, **said})
    for layer in pooling.dense:
        path = f"{len(modules)}_Dense"
        modules.append({"path": path, "type": at + "Dense"})
        _write_dense(folder / path, layer)
    if pooling.normalize:
        modules.append({"path": f"{len(modules)}_Normalize", "type": at + "Normalize"})
    write_json(folder / "modules.json", [{"idx": i, "name": str(i), **m} for i, m in enumerate(modules)])
    write_json(
        folder / "sentence_bert_config.json", {"max_seq_length": pooling.size, "do_lower_case": pooling.lowercase}
    )
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
    write_json(
        folder / "config.json",
        {
            "in_features": inner,
            "out_features": out,
            "bias": layer.bias is not None,
            "activation_function": f"torch.nn.modules.{module}.{layer.activation}",
        },
    )
