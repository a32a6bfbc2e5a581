"""A model's weights at a byte a parameter, and how far its answers moved.

Legend: N texts, H hidden, T tokens in the batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from everybert.errors import EverybertError
from everybert.inference.model import Model, load
from everybert.model.int8 import supported
from everybert.store.adapters import is_adapter
from everybert.store.hub import resolve
from everybert.store.weights import INT8, SAFE, is_quantised


@dataclass(frozen=True)
class Agreement:
    """A quantised model beside the one it was made from, on a few texts."""

    cosine_mean: float
    cosine_min: float
    """Of the texts' vectors."""
    same_words: float | None
    """How often the same word comes first for a blank, where the model fills blanks."""


@dataclass(frozen=True)
class Quantised:
    """What `quantise` did."""

    out: str
    parameters: int
    bytes_before: int
    bytes_after: int
    """Of the weights, in memory as they were loaded and in the new file."""
    stored: Agreement
    """The new folder, computed in fp32."""
    computed: Agreement | None
    """The new folder, computed in int8; None where this machine cannot."""


def quantise(name: str | Path, out: str | Path, texts: Sequence[str], step: Callable[[str], None] = print) -> Quantised:
    """Write `name`'s model as int8 into the folder `out`, read it back, and compare both on some texts."""
    source, folder = resolve(name), Path(out).expanduser()
    if is_adapter(source):
        raise EverybertError(f"{source} is an adapter; quantise the model it goes on")
    if is_quantised(source) and not (source / SAFE).exists():
        raise EverybertError(f"{source} is quantised already; there is nothing to do")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise EverybertError(f"{folder} exists already; choose another folder, or delete it first")
    step("reading")
    model = load(source, device="cpu", dtype="float32")
    values = model.network.state_dict().values()
    step("writing")
    model.save(folder, int8=True)
    step("comparing")
    return Quantised(
        str(folder),
        sum(value.numel() for value in values),
        sum(value.numel() * value.element_size() for value in values),
        (folder / INT8).stat().st_size,
        compare(model, load(folder, device="cpu"), texts),
        compare(model, load(folder, device="cpu", dtype="int8"), texts) if supported() else None,
    )


def compare(model: Model, other: Model, texts: Sequence[str]) -> Agreement:
    """Two models of one shape on the same texts; those without a tokenizer on the same ids."""
    one_NH, two_NH = (_vectors(m, texts) for m in (model, other))
    lengths = np.linalg.norm(one_NH, axis=1) * np.linalg.norm(two_NH, axis=1)
    cosine_N = (one_NH * two_NH).sum(1) / np.maximum(lengths, 1e-12)
    words = None
    if "mlm" in model.network.heads and model._tokenizer is not None:
        pairs = [(model.fill(blank, 1), other.fill(blank, 1)) for blank in map(_blank, texts)]
        words = float(np.mean([a[0][0].token == b[0][0].token for a, b in pairs]))
    return Agreement(float(cosine_N.mean()), float(cosine_N.min()), words)


def _vectors(model: Model, texts: Sequence[str]) -> np.ndarray:
    """(N, H): the mean of each text's token vectors."""
    if model._tokenizer is not None:
        return model.embed(texts, pooling="mean", normalize=False)
    draw = np.random.default_rng(0)
    longest = min(32, model.window)
    ids = [draw.integers(model.config.vocab_size, size=draw.integers(1, longest + 1)).tolist() for _ in texts]
    return np.stack([x_TH.mean(0).float().numpy() for x_TH in model.hidden(ids)])


def _blank(text: str) -> str:
    """The text with the word in its middle hidden."""
    words = text.split()
    words[len(words) // 2] = "[MASK]"
    return " ".join(words)
