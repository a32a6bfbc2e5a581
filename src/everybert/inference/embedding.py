"""Texts to vectors: tokenize, encode, pool; texts longer than the window are read in overlapping windows.

Of many texts, some are tokenized while those before them are computed; see `pooled_runs` for what an accelerator needs.

Legend: N texts, W windows (sequences, several for a long text), M pooling modes, T tokens in the batch, n tokens of a
window, H hidden.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

import numpy as np
import torch
from torch import Tensor

from everybert.errors import EverybertError
from everybert.model.engine import BUDGET_GPU, Inputs, ahead, device_of, encode, encode_layers, fetched, ordered_batches
from everybert.model.heads import Network
from everybert.model.pooling import pool
from everybert.model.ragged import Ragged
from everybert.store.sentence_transformers import Pooling
from everybert.tasks.features import weighted_mean
from everybert.text.tokenizer import Tokenizer
from everybert.text.windows import TextWindow, cover

CHARACTERS = {True: 1 << 20, False: 1 << 18}
"""Characters of text that are tokenized at a time, on the CPU (True) and on an accelerator (False). On the CPU overlap
gains nothing, since all cores are busy either way, and batches of equal lengths are easier to find among many texts."""
TERMS = 1 << 25
"""Numbers of a batch over the whole vocabulary."""


@dataclass(frozen=True)
class Embedded:
    """Vectors, and how many tokens were read for them."""

    vectors: np.ndarray
    """float32 (N, H): one per text, in order."""
    tokens: list[int]
    """Tokens of each text that were read, special tokens included."""
    cut: list[int]
    """Tokens of each text that were left out because truncation was asked for."""


@dataclass(frozen=True)
class Sparse:
    """A vector over the vocabulary of which few numbers are not 0."""

    indices: np.ndarray
    """int64: the ids of tokens, ascending."""
    weights: np.ndarray
    """float32: the number of each."""

    @classmethod
    def of(cls, row: np.ndarray, top: int | None) -> "Sparse":
        """The numbers of a row that are not 0, or the `top` largest."""
        nonzero = np.flatnonzero(row)
        nonzero = np.sort(nonzero[np.argsort(-row[nonzero], kind="stable")[:top]])
        return cls(nonzero, row[nonzero])


@torch.inference_mode()
def embed(
    network: Network, tokenizer: Tokenizer, texts: Sequence[str], pooling: Pooling, size: int, long: str, prompt: str
) -> Embedded:
    """One vector per text. A text of more than `size` tokens is read in windows, or cut if `long` is "cut"."""
    lead, tail = specials(tokenizer)
    read: list[int] = []
    cut: list[int] = []

    def tokenize(some: Sequence[str]) -> list[list[int]]:
        if prompt:
            some = [prompt + text for text in some]
        if pooling.lowercase and not tokenizer.lowercase:
            some = [text.lower() for text in some]
        return tokenizer.ids_batch(some)

    skip = 0
    if prompt and not pooling.include_prompt:
        (ids,) = tokenize([""])
        skip = len(ids) - (ids[-1] in tokenizer.special_ids)
        if skip >= size:
            raise EverybertError(f"the prompt has {skip} tokens, the model reads {size} at once; use a shorter one")

    def split(ids: list[int]) -> list[TextWindow]:
        lost = max(0, len(ids) - size) if long == "cut" else 0
        if lost:
            ids = ids[: size - tail] + ids[len(ids) - tail :]
        read.append(len(ids))
        cut.append(lost)
        windows = cover(ids or [0], lead, tail, size)  # a model without special tokens has no ids for an empty text
        # no window owns the prompt
        return [replace(w, own_start=max(w.own_start, skip)) for w in windows if w.own_stop > skip] if skip else windows

    runs = ahead(tokenize, _runs(texts, CHARACTERS[on_cpu(network)]))
    vectors = np.concatenate([*pooled_runs(network, (list(map(split, ids)) for ids in runs), pooling)])
    vectors[np.array(read) == 0] = 0
    return Embedded(pooling.finish(torch.from_numpy(vectors)).numpy(), read, cut)


def specials(tokenizer: Tokenizer) -> tuple[int, int]:
    """How many special tokens there are before and after a text."""
    ids, _ = tokenizer.build([-1])
    lead = ids.index(-1)
    return lead, len(ids) - 1 - lead


def _runs(texts: Sequence[str], size: int) -> Iterator[list[str]]:
    """Consecutive texts, about `size` characters at a time."""
    ends = accumulate(len(text) if isinstance(text, str) else 0 for text in texts)  # the tokenizer names other inputs
    for _, run in groupby(zip(ends, texts), key=lambda pair: pair[0] // size):
        yield [text for _, text in run]


def on_cpu(network: Network) -> bool:
    """Whether the weights are on the CPU."""
    return device_of(network.encoder).type == "cpu"


# ── sequences to pooled vectors ──────────────────────────────────────────────────────────────────────────────


def pooled_runs(network: Network, runs: Iterable[list[list[TextWindow]]], pooling: Pooling) -> Iterator[np.ndarray]:
    """(texts, modes·H) of one run of texts, each given as its windows, after another.

    On an accelerator a run's last batch waits for the next run, so that batches are full; and the vectors of a run are
    fetched once the next run has been started, so that the device never waits for the host.
    """
    waiting: list[list[TextWindow]] = []
    started: deque[Callable[[], np.ndarray]] = deque()

    def start(count: int) -> None:
        if count:
            started.append(_start(network, waiting[:count], pooling))
            del waiting[:count]

    for run in runs:
        waiting += run
        start(len(waiting) if on_cpu(network) else _in_full_batches(waiting))
        while len(started) > 1:
            yield started.popleft()()
    start(len(waiting))
    while started:
        yield started.popleft()()


def _in_full_batches(texts: list[list[TextWindow]]) -> int:
    """How many of the texts, each given as its windows, fill whole batches."""
    lengths = [len(window.ids) for text in texts for window in text]
    owners = [i for i, text in enumerate(texts) for _ in text]
    return owners[ordered_batches(lengths, BUDGET_GPU)[-1][0]]


def _start(network: Network, texts: list[list[TextWindow]], pooling: Pooling) -> Callable[[], np.ndarray]:
    """Start to compute some texts; the function returned waits for their vectors (texts, modes·H)."""
    windows = [window for text in texts for window in text]
    owners = [i for i, text in enumerate(texts) for _ in text]
    width = network.config.vocab_size if pooling.splade else network.config.hidden_size
    size = (len(windows), len(pooling.modes), width)
    out_WMH = torch.empty(size, dtype=torch.float32, device=device_of(network.encoder))

    def read(indices: list[int], batch: Ragged, x_TH: Tensor) -> None:
        if pooling.splade == "tokens":
            x_TH = x_TH.new_zeros(len(x_TH), width).scatter_(1, batch.tokens_T[:, None], x_TH)
        elif pooling.splade:  # (T, V): the weight of each word at each token, log(1 + relu(logit)) (Formal et al. 2021)
            x_TH = network.mlm_logits(x_TH).relu_().log1p_()
            x_TH = x_TH.log1p_() if pooling.splade == "log1p_relu" else x_TH
        of_batch = [windows[i] for i in indices]
        owned, owned_TH = batch, x_TH
        if any(w.count < len(w.ids) for w in of_batch):  # of a window, only the tokens that it owns
            at = np.concatenate([np.arange(w.own_start, w.own_stop) for w in of_batch])
            at_T = torch.from_numpy(at).to(batch.device)
            owned = replace(Ragged.flat(at_T, [w.count for w in of_batch]), positions_T=at_T)  # pooling reads no ids
            owned_TH = torch.cat([x_nH[w.own] for w, x_nH in zip(of_batch, batch.split(x_TH))])
        consecutive = indices[-1] - indices[0] == len(indices) - 1 and indices == sorted(indices)
        rows = slice(indices[0], indices[-1] + 1) if consecutive else indices
        skips = any(texts[owners[i]][0].own_start for i in indices)
        for m, mode in enumerate(pooling.modes):
            if mode == "cls" and not skips:
                out_WMH[rows, m] = pool(x_TH, batch, "cls").float()
            else:
                mode = "mean" if mode in ("mean_sqrt_len_tokens", "sum") else mode
                out_WMH[rows, m] = pool(owned_TH.float(), owned, mode)

    inputs = Inputs([window.ids for window in windows])
    if pooling.layers:
        encode_layers(network, inputs, lambda w, batch, x: read(w, batch, pooled_states(x[-1], x, pooling)))
    else:
        encode(network, inputs, read, budget=max(1, TERMS // width) if pooling.splade else None)
    pooled = fetched(out_WMH)
    return lambda: _combined(pooled(), windows, owners, pooling.modes, len(texts))


def pooled_states(x_TH: Tensor, states: list[Tensor], pooling: Pooling) -> Tensor:
    """The vectors that are pooled: those of the last layer, or the weighted mean of the L + 1 hidden states."""
    if not pooling.layers:
        return x_TH
    if len(pooling.layers) != len(states):
        raise EverybertError(f"the folder weighs {len(pooling.layers)} hidden states, the model has {len(states)}")
    weights = torch.tensor(pooling.layers, device=x_TH.device) / sum(pooling.layers)
    return torch.einsum("l,lth->th", weights, torch.stack(states).float()).to(x_TH.dtype)


def _combined(
    pooled_WMH: np.ndarray, windows: list[TextWindow], owners: list[int], modes: tuple[str, ...], texts: int
) -> np.ndarray:
    """(texts, modes·H): the mean over the windows of a text, each with the weight of the tokens that it owns.

    max: the maximum; lasttoken: that of the last window.
    """
    count_W = np.array([w.count for w in windows], dtype=np.float64)
    out_NMH = pooled_WMH if len(windows) == texts else np.zeros((texts, *pooled_WMH.shape[1:]), dtype=np.float32)
    for m, mode in enumerate(modes):
        if mode == "max" and len(windows) > texts:
            out_NMH[:, m] = -np.inf
            np.maximum.at(out_NMH[:, m], owners, pooled_WMH[:, m])
        elif len(windows) > texts:
            share_W = count_W
            if mode == "weightedmean":
                share_W = count_W * (np.array([w.own_start for w in windows]) + (count_W + 1) / 2)
            elif mode == "lasttoken":
                share_W = np.diff(owners, append=texts).astype(np.float64)
            share_W = share_W / np.bincount(owners, share_W, minlength=texts)[owners]
            x_WH, weight_W = torch.from_numpy(pooled_WMH[:, m]), torch.from_numpy(share_W)
            out_NMH[:, m] = weighted_mean(x_WH, torch.tensor(owners), weight_W, texts).numpy()
        if mode in ("mean_sqrt_len_tokens", "sum"):
            counts_N1 = np.bincount(owners, count_W, minlength=texts)[:, None]
            out_NMH[:, m] *= counts_N1 if mode == "sum" else np.sqrt(counts_N1)
    return out_NMH.reshape(texts, -1)
