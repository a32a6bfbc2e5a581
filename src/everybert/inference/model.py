"""The Model users hold: a network, its tokenizer, and what they can do together.

Legend: L layers, A heads, H hidden, n tokens of one sequence.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from everybert.errors import EverybertError
from everybert.files import atomic_folder
from everybert.inference import embedding, looking, masks, task_use
from everybert.inference.bundle import Bundle, read_bundle
from everybert.inference.results import Candidate, Score, TokenVectors
from everybert.inside.attention import Attention
from everybert.inside.attribution import Attribution
from everybert.inside.neighbours import Neighbours
from everybert.inside.trace import Trace
from everybert.model.config import EncoderConfig
from everybert.model.device import pick_device
from everybert.model.engine import Inputs, encode
from everybert.model.heads import Network
from everybert.model.int8 import to_int8
from everybert.model.ragged import Ragged
from everybert.store.adapters import encoder_digest, is_adapter
from everybert.store.hub import resolve
from everybert.store.huggingface import Report, load_network, save_network
from everybert.tasks.choose import Choice
from everybert.tasks.classify import Prediction, Text
from everybert.tasks.tag import Words
from everybert.text.tokenizer import Encoding, Tokenizer
from everybert.text.windows import Piece

TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model")


def load(
    name: str | Path = "everybert-small",
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    *,
    revision: str | None = None,
    allow_pickle: bool = False,
) -> Model:
    """Load a model: a bundled name, a folder, or a hub id (`org/name`).

    `device` None takes a GPU where there is one. `dtype` None keeps the file's (on the CPU always float32); "int8"
    computes in int8, on the CPU. An adapter's folder loads the model it was trained on, and switches to the adapter.
    """
    folder = resolve(name, revision, allow_pickle)
    if is_adapter(folder):
        model = load(task_use.base_of(folder), device, dtype, allow_pickle=allow_pickle)
        model.use(model.add_adapter(folder))
        return model
    int8 = dtype in ("int8", torch.int8)
    if int8 and device is not None and not str(device).startswith("cpu"):
        raise EverybertError(f"int8 is computed on the CPU, not on {device}; give device=cpu, or another dtype")
    device = pick_device(device, gpu=not int8)
    found = load_network(
        folder, device=device, dtype=torch.float32 if int8 else _dtype(dtype), allow_pickle=allow_pickle
    )
    if int8:
        found.network.digest = encoder_digest(found.network)
        to_int8(found.network.encoder)
    model = Model(
        found.network,
        Tokenizer.load(folder) if has_tokenizer(folder) else None,
        labels=found.labels,
        problem_type=found.problem_type,
        raw_config=found.raw_config,
        extras=found.extras,
        report=found.report,
        folder=folder,
    )
    task_use.open_feature_head(model, folder)
    return model


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer of any kind."""
    return any((folder / file).is_file() for file in TOKENIZER_FILES)


class Model:
    """An encoder with its tokenizer. Made by `everybert.load`, or from a network of your own."""

    def __init__(
        self,
        network: Network,
        tokenizer: Tokenizer | None = None,
        *,
        labels: list[str] | None = None,
        problem_type: str | None = None,
        raw_config: dict[str, Any] | None = None,
        extras: dict[str, Any] | None = None,
        report: Report | None = None,
        folder: Path | None = None,
    ) -> None:
        self.network = network.eval()
        self.labels = labels
        self.problem_type = problem_type
        self.raw_config = raw_config
        self.extras = extras or {}
        self.report = report or Report()
        """What the folder did not have, and what was not used of it."""
        self.folder = folder
        self.bundle = read_bundle(folder, self.extras) if folder is not None else Bundle()
        """Adapters that came with the folder: put on the trunk when they are first asked for."""
        self.adapters: task_use.Adapters | None = None
        self.views: dict[str | None, Model] = {}
        """Where a model may not be switched, because many threads use it: itself under each of its adapters."""
        self._tokenizer = tokenizer

    def __repr__(self) -> str:
        c = self.config
        heads = ", ".join(self.network.heads) or "none"
        return f"Model({c.family}, {c.layers} layers, hidden {c.hidden_size}, heads: {heads}, on {self.device})"

    @property
    def config(self) -> EncoderConfig:
        """The shape of the encoder."""
        return self.network.config

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.network.encoder.embeddings.token.weight.device

    @property
    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer; a folder without one takes only ids, through `hidden`."""
        if self._tokenizer is None:
            raise EverybertError("this model has no tokenizer; put one in its folder, or give ids to hidden()")
        return self._tokenizer

    @property
    def window(self) -> int:
        """The longest sequence the model reads at once, special tokens included."""
        longest = self._tokenizer.max_length if self._tokenizer is not None else None
        return min(self.config.max_positions, longest or self.config.max_positions)

    # ── blanks ───────────────────────────────────────────────────────────────────────────────────────────────

    def fill(self, text: str, top: int = 5, pair: str | None = None) -> list[list[Candidate]]:
        """For each [MASK] of the text, or of a pair, its `top` most probable tokens."""
        if pair is not None:
            return looking.fill_pair(self, text, pair, top)
        return masks.fill(self.network, self.tokenizer, text, top, self.window)

    def score(self, text: str) -> Score:
        """The text's pseudo-log-probability: each token masked in turn and foreseen from the others."""
        return masks.score(self.network, self.tokenizer, text, self.window)

    # ── vectors ──────────────────────────────────────────────────────────────────────────────────────────────

    def embed(
        self,
        texts: Sequence[str],
        pooling: str | None = None,
        normalize: bool | None = None,
        long: Literal["window", "cut"] = "window",
    ) -> np.ndarray:
        """float32 (N, H): one vector a text.

        pooling: mean, cls, max or mean_sqrt_len_tokens; None follows the folder's sentence-transformers files, or
        is the mean. A text longer than the window is read in overlapping windows; long="cut" truncates it instead,
        as sentence-transformers does, and warns.
        """
        texts = [texts] if isinstance(texts, str) else list(texts)
        found = self.embedded(texts, pooling, normalize, long)
        if lost := [n for n in found.cut if n]:
            warnings.warn(f"{len(lost)} of {len(texts)} texts were cut: {sum(lost)} tokens were left out", stacklevel=2)
        return found.vectors

    def embedded(
        self,
        texts: Sequence[str],
        pooling: str | None = None,
        normalize: bool | None = None,
        long: Literal["window", "cut"] = "window",
    ) -> embedding.Embedded:
        """As `embed`, with the number of tokens that were read, and cut, of each text."""
        if long not in ("window", "cut"):
            raise EverybertError(f"long texts are read by window or cut, not {long!r}")
        how = self.pooling if pooling is None else replace(self._plain_pooling, modes=(pooling,), dense=())
        embedding.check_modes(how.modes)
        if normalize is not None:
            how = replace(how, normalize=normalize)
        if not texts:
            return embedding.Embedded(np.empty((0, self.config.hidden_size), dtype=np.float32), [], [])
        size = min(how.size or self.window, self.window)
        if (adapter := task_use.chosen(self, "embed")) in self.views:
            return self.views[adapter].embedded(texts, pooling, normalize, long)
        with task_use.using(self, adapter):
            return embedding.embed(self.network, self.tokenizer, texts, how, size, long)

    @cached_property
    def pooling(self) -> embedding.Pooling:
        """How `embed` makes vectors unless told otherwise."""
        return embedding.read_pooling(self.folder) if self.folder is not None else embedding.Pooling()

    @property
    def _plain_pooling(self) -> embedding.Pooling:
        """The folder's settings, or none where it asks for more than we know."""
        try:
            return self.pooling
        except EverybertError:
            return embedding.Pooling()

    def tokens(self, text: str, layer: int | None = None, pair: str | None = None) -> TokenVectors:
        """The text's tokens and their vectors after a layer (None the last, 0 the embeddings, −1 counts back)."""
        layer = self._layer(layer)
        encoding, pieces = self._pieces(text, pair)
        vectors = np.empty((len(encoding), self.config.hidden_size), dtype=np.float32)
        segments = [encoding.segments] if pair is not None else None

        def read(which: list[int], batch: Ragged, x_TH: Tensor) -> None:
            for k, x_nH in zip(which, batch.split(x_TH)):
                piece = pieces[k]
                own_nH = x_nH[piece.own].float().cpu().numpy()
                vectors[piece.at : piece.at + len(own_nH)] = own_nH

        encode(self.network, Inputs([p.ids for p in pieces], segments), read, layer)
        return TokenVectors(encoding.tokens, encoding.offsets, vectors, encoding.ids, encoding.segments, layer)

    def hidden(
        self,
        sequences: Sequence[Sequence[int]],
        segments: Sequence[Sequence[int]] | None = None,
        global_tokens: Sequence[Sequence[int]] | None = None,
    ) -> list[Tensor]:
        """Raw ids to final hidden states, one (n, H) tensor a sequence; `global_tokens` are Longformer's."""
        out: dict[int, Tensor] = {}

        def read(which: list[int], batch: Ragged, x_TH: Tensor) -> None:
            out.update(zip(which, batch.split(x_TH)))

        encode(self.network, Inputs(sequences, segments, global_tokens), read)
        return [out[i].clone() for i in range(len(out))]  # outside of inference mode: usable for training

    def attention(self, text: str, pair: str | None = None) -> Attention:
        """Who attends to whom: `.weights` (L, A, n, n), row i what token i draws from. Notebooks draw it."""
        return looking.attention(self, text, pair)

    def trace(self, text: str, pair: str | None = None) -> Trace:
        """Every intermediate of the forward pass by name: `trace["layers.0.attention.weights"]`."""
        return looking.trace(self, text, pair)

    def neighbours(self, word: str, texts: Sequence[str], top: int = 5) -> Neighbours:
        """A word in several texts: its vectors compared at every layer, and the words they lie near."""
        return looking.neighbours(self, word, texts, top)

    def attribution(self, text: str, pair: str | None = None, **options: Any) -> Attribution:
        """Which pieces speak for a prediction. Options: label, task, method (integrated, gradient), adapter."""
        return looking.attribution(self, text, pair, **options)

    def next_sentence(self, first: str, second: str) -> float:
        """P(the second text follows the first)."""
        encoding, _ = self._pieces(first, second)
        logits: list[Tensor] = []

        def read(which: list[int], batch: Ragged, x_TH: Tensor) -> None:
            logits.append(self.network.sequence_logits(x_TH, batch, "nsp")[0].float())

        encode(self.network, Inputs([encoding.ids], [encoding.segments]), read)
        return float(logits[0].softmax(-1)[0])

    # ── tasks ────────────────────────────────────────────────────────────────────────────────────────────────

    def classify(self, texts: Text | Sequence[Text], adapter: str | None = None) -> list[Prediction]:
        """A label and the probability of each, for every text or (text, text) pair, of any length."""
        return task_use.classify(self, texts, adapter)

    def regress(self, texts: Text | Sequence[Text], adapter: str | None = None) -> list[float]:
        """A number for every text or pair."""
        return task_use.regress(self, texts, adapter)

    def tag(self, texts: str | Sequence[Words], adapter: str | None = None) -> Any:
        """The labelled spans of a text: list[Span]. Of several texts (or lists of words): a list of such lists."""
        return task_use.tag(self, texts, adapter)

    def answer(
        self, question: str | Sequence[str], context: str | Sequence[str], top: int = 1, adapter: str | None = None
    ) -> Any:
        """The `top` best spans of a context: list[Answer]. Of several questions: a list of such lists."""
        return task_use.answer(self, question, context, top, adapter)

    def choose(self, prompt: str, endings: Sequence[str], adapter: str | None = None) -> Choice:
        """The ending that fits the prompt best."""
        return task_use.choose(self, prompt, endings, adapter)

    def add_adapter(self, folder: str | Path, name: str | None = None) -> str:
        """Put a LoRA adapter on this trunk beside others; returns its name, for `adapter=` and `use`."""
        return task_use.add_adapter(self, folder, name)

    def use(self, adapter: str | None) -> None:
        """Switch to an adapter and its head; None is the bare trunk."""
        task_use.use(self, adapter)

    def merge(self, adapter: str | None = None) -> None:
        """Make an adapter part of the weights: a plain model, which `save` writes."""
        task_use.merge(self, adapter)

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────

    def save(self, folder: str | Path, int8: bool = False) -> None:
        """Write a folder that `everybert.load` and transformers (and sentence-transformers) read.

        `int8` writes a byte a parameter, a scale a row: a quarter of the size, for everybert alone.
        """
        pooling = self._plain_pooling
        with atomic_folder(folder) as temporary, task_use.saving(self, temporary) as extras:
            save_network(
                self.network,
                temporary,
                tokenizer=self._tokenizer,
                labels=self.labels,
                problem_type=self.problem_type,
                extras=extras,
                raw_config=self.raw_config,
                int8=int8,
            )
            if pooling.published:
                embedding.write_pooling(temporary, pooling, self.config.hidden_size)

    # ── helpers ──────────────────────────────────────────────────────────────────────────────────────────────

    def _pieces(self, text: str, pair: str | None) -> tuple[Encoding, list[Piece]]:
        """A text in windows, or a pair, which must fit one."""
        encoding = self.tokenizer.encode(text, pair)
        if not len(encoding):
            raise EverybertError("the text is empty, and this tokenizer adds no special tokens; give some text")
        if pair is None:
            return encoding, masks.pieces_of(encoding, self.window)
        if len(encoding) > self.window:
            raise EverybertError(
                f"the pair has {len(encoding)} tokens, the model reads {self.window} at once; give shorter texts"
            )
        return encoding, [Piece(encoding.ids, 0, len(encoding), 0)]

    def _layer(self, layer: int | None) -> int:
        count = len(self.config.layer_order)
        if layer is None:
            return count
        if not -count - 1 <= layer <= count:
            raise EverybertError(f"there is no layer {layer}: 0 is the embeddings, {count} the last layer")
        return layer % (count + 1)


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if not isinstance(dtype, str):
        return dtype
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in known:
        raise EverybertError(f"there is no dtype {dtype!r} here; choose one of {', '.join(known)}, int8")
    return known[dtype]
