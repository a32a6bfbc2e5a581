"""Texts to vectors: pooling as the folder's sentence-transformers files say, over windows where a text is long.

Legend: T tokens in the batch, n tokens of one sequence, H hidden.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from everybert.errors import EverybertError
from everybert.files import inside, read_json, write_json
from everybert.model.engine import BUDGET_GPU, Inputs, ahead, device_of, encode, fetched, in_order
from everybert.model.heads import Network
from everybert.model.pooling import MODES, check_mode, pool
from everybert.model.ragged import Ragged
from everybert.text.tokenizer import Tokenizer
from everybert.text.windows import Piece, cover

FLAGS = {mode: f"pooling_mode_{mode}_{'token' if mode == 'cls' else 'tokens'}" for mode in MODES[:3]}
FLAGS["mean_sqrt_len_tokens"] = "pooling_mode_mean_sqrt_len_tokens"
"""What older 1_Pooling/config.json files call the poolings."""
CHARACTERS = {True: 1 << 20, False: 1 << 18}
"""Of texts tokenized at a time, on the CPU and on an accelerator. On the CPU there is nothing to gain by overlap, since
the cores are busy either way, and batches of equal lengths are found more easily among many texts."""
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
    """One vector a text. Of many texts, some are tokenized while those before them are computed."""
    lead, tail = _specials(tokenizer)
    read, cut = [], []

    def tokenized(some: Sequence[str]) -> list[list[int]]:
        return tokenizer.ids_batch(_prepared(some, pooling, tokenizer))

    def sequences() -> Iterator[list[list[int]]]:
        for ids in ahead(tokenized, runs(texts, CHARACTERS[on_cpu(network)])):
            for i, sequence in enumerate(ids):
                lost = max(0, len(sequence) - size) if long == "cut" else 0
                if lost:
                    ids[i] = sequence[: size - tail] + sequence[len(sequence) - tail :]
                read.append(len(sequence) - lost)
                cut.append(lost)
            yield ids

    found = [_finished(x, pooling) for x in pooled_runs(network, sequences(), pooling.modes, lead, tail, size)]
    return Embedded(np.concatenate(found), read, cut)


def runs(texts: Sequence[str], most: int) -> Iterator[Sequence[str]]:
    """Texts next to each other, `most` characters at a time."""
    start = total = 0
    for i, text in enumerate(texts):
        total += len(text) if isinstance(text, str) else 0  # the tokenizer says what is no text
        if total >= most:
            yield texts[start : i + 1]
            start, total = i + 1, 0
    if start < len(texts):
        yield texts[start:]


def on_cpu(network: Network) -> bool:
    """Whether the weights are on the CPU."""
    return device_of(network.encoder).type == "cpu"


def pooled_runs(
    network: Network,
    sequences: Iterable[list[list[int]]],
    modes: tuple[str, ...],
    lead: int,
    tail: int,
    size: int,
) -> Iterator[np.ndarray]:
    """(texts, modes·H) of one run of sequences after another, long ones read in windows.

    On an accelerator a run's last batch waits for the next run, so that batches are full; and a run's vectors are
    asked for when the next run is on its way, so that the device never waits for the host.
    """
    waiting: list[list[Piece]] = []
    sent: deque[Callable[[], np.ndarray]] = deque()

    def send(count: int) -> None:
        if count:
            sent.append(_send(network, waiting[:count], modes))
            del waiting[:count]

    for run in sequences:
        waiting += [cover(ids, lead, tail, size) for ids in run]
        send(len(waiting) if on_cpu(network) else _whole_batches(waiting))
        while len(sent) > 1:
            yield sent.popleft()()
    send(len(waiting))
    while sent:
        yield sent.popleft()()


def _whole_batches(texts: list[list[Piece]]) -> int:
    """How many of the texts, each in its windows, fill batches to the brim."""
    lengths = [len(piece.ids) for text in texts for piece in text]
    owners = [i for i, text in enumerate(texts) for _ in text]
    return owners[in_order(lengths, BUDGET_GPU)[-1][0]]


def _send(network: Network, texts: list[list[Piece]], modes: tuple[str, ...]) -> Callable[[], np.ndarray]:
    """Start on some texts; what comes back waits for their vectors (texts, modes·H)."""
    pieces = [piece for text in texts for piece in text]
    owners = [i for i, text in enumerate(texts) for _ in text]
    pooled = _pooled(network, pieces, modes)
    return lambda: _combined(pooled(), pieces, owners, modes, len(texts))


def _finished(vectors: np.ndarray, pooling: Pooling) -> np.ndarray:
    """(N, modes·H) → (N, out): the folder's further layers, and length 1 where it is asked for."""
    x_NH = torch.from_numpy(vectors)
    for layer in pooling.dense:
        x_NH = layer(x_NH)
    return (F.normalize(x_NH, dim=1) if pooling.normalize else x_NH).numpy()


def _prepared(texts: Sequence[str], pooling: Pooling, tokenizer: Tokenizer) -> Sequence[str]:
    if pooling.prompt:
        texts = [pooling.prompt + text for text in texts]
    return [text.lower() for text in texts] if pooling.lowercase and not tokenizer.lowercase else texts


def _specials(tokenizer: Tokenizer) -> tuple[int, int]:
    """How many special tokens stand before and after a text."""
    ids, _ = tokenizer.build([-1])
    lead = ids.index(-1)
    return lead, len(ids) - 1 - lead


def _pooled(network: Network, pieces: list[Piece], modes: tuple[str, ...]) -> Callable[[], np.ndarray]:
    """Start on pooling each sequence over the tokens it owns; what comes back waits for them (pieces, modes, H)."""
    size = (len(pieces), len(modes), network.config.hidden_size)
    out_PMH = torch.empty(size, dtype=torch.float32, device=device_of(network.encoder))

    def read(which: list[int], batch: Ragged, x_TH: Tensor) -> None:
        own = [pieces[i] for i in which]
        owned_TH, owned = x_TH, batch
        if any(piece.stop - piece.start < len(piece.ids) for piece in own):
            ids_T, owned_TH = (
                torch.cat([part[piece.own] for piece, part in zip(own, batch.split(x))]) for x in (batch.tokens_T, x_TH)
            )
            owned = Ragged.flat(ids_T, [piece.stop - piece.start for piece in own])
        owned_TH = owned_TH.float()
        in_a_row = which[-1] - which[0] == len(which) - 1 and which == sorted(which)
        rows = slice(which[0], which[-1] + 1) if in_a_row else which
        for m, mode in enumerate(modes):
            if mode == "cls":
                out_PMH[rows, m] = pool(x_TH, batch, mode).float()
            else:
                out_PMH[rows, m] = pool(owned_TH, owned, "max" if mode == "max" else "mean")

    encode(network, Inputs([piece.ids for piece in pieces]), read)
    return fetched(out_PMH)


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
        known = {flag: mode for mode, flag in FLAGS.items()}
        flags = [key for key, on in settings.items() if on is True and key.startswith("pooling_mode_")]
        modes = [known.get(flag, flag.removeprefix("pooling_mode_")) for flag in flags]
        modes.sort(key=lambda mode: MODES.index(mode) if mode in MODES else 0)
    check_modes(modes, str(folder))
    return tuple(modes) or ("mean",)


def check_modes(modes: Sequence[str], where: str = "embed") -> None:
    """Refuse poolings that there are none of."""
    for mode in modes:
        check_mode(mode, where)


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
    said: dict[str, Any] = {flag: mode in pooling.modes for mode, flag in FLAGS.items()}
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
