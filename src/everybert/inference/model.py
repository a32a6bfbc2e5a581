"""The Model that users hold: a network, its tokenizer, and everything that the two can do together.

Legend: N texts, T tokens in the batch, n tokens of one sequence, H hidden, L layers, A heads.
"""

import warnings
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import index
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from everybert.errors import EverybertError
from everybert.files import atomic_folder, verify_folder
from everybert.inference import embedding, multi
from everybert.inside import masked
from everybert.inside.attention import Attention, read_attention
from everybert.inside.attribution import Attribution, attribute
from everybert.inside.masked import Candidate, mask_id, windows_of
from everybert.inside.neighbours import Neighbours, find_neighbours
from everybert.inside.trace import Trace, read_trace
from everybert.model.config import EncoderConfig
from everybert.model.engine import Inputs, device_of, encode, pick_device, run_head
from everybert.model.fp8 import to_fp8
from everybert.model.heads import FeatureHead, Network
from everybert.model.int8 import to_int8
from everybert.model.lora import AdapterSet
from everybert.model.pooling import check_mode
from everybert.model.ragged import Ragged
from everybert.store import adapters
from everybert.store import sentence_transformers as sentences
from everybert.store.hub import resolve
from everybert.store.huggingface import Report, load_network, save_network
from everybert.store.sentence_transformers import Pooling
from everybert.tasks import ADAPTED, TASKS, load_task, trained_task
from everybert.tasks.answer import Answer
from everybert.tasks.choose import Choice
from everybert.tasks.classify import TEMPLATE, Prediction, Text
from everybert.tasks.dataset import as_texts
from everybert.tasks.rank import Ranked, relevance
from everybert.tasks.tag import Span, Words
from everybert.tasks.task import Task
from everybert.text.formats import has_tokenizer
from everybert.text.tokenizer import Encoding, Tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MOST_SCORED = 4096
"""Tokens of a text that `score` takes: each costs a pass through the encoder."""


# ── results ──────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class TokenVectors:
    """The tokens of a text, special tokens included, with one vector for each."""

    tokens: list[str]
    """As the vocabulary spells them."""
    offsets: list[tuple[int, int]]
    """Start and end in the text, in characters; (0, 0) for special tokens."""
    vectors: np.ndarray
    """float32 (n, H)."""
    ids: list[int]
    """Token ids."""
    segments: list[int]
    """0 in the first text and 1 in the second, if the model has segments."""
    layer: int
    """The layer whose output the vectors are; 0 is the embeddings."""

    def rows(self, vectors: Sequence[Any]) -> list[dict[str, Any]]:
        """Each token as plain data; `vectors` has the vector of each in the form to return."""
        each = zip(self.tokens, self.ids, self.segments, self.offsets, vectors)
        return [{"token": t, "id": i, "segment": s, "start": a, "end": b, "vector": v} for t, i, s, (a, b), v in each]


@dataclass(frozen=True)
class TokenScore:
    """How well the model predicts one token of a text."""

    token: str
    score: float
    """ln P(token | all other tokens), in a causal model | those before it (reverse: after it)."""
    start: int
    end: int
    """Where the token is in the text, in characters."""


@dataclass(frozen=True)
class Score:
    """The pseudo-log-probability of a text (Salazar et al. 2020): Σ ln P(token | the others)."""

    total: float
    tokens: list[TokenScore]


# ── loading ──────────────────────────────────────────────────────────────────────────────────────────────────


def load(
    name: str | Path = "everybert-small",
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    *,
    revision: str | None = None,
    allow_pickle: bool = False,
) -> "Model":
    """Load a model: a bundled name, a folder, or a hub id (`org/name`).

    `device` None takes a GPU if there is one. `dtype` None keeps the file's (on the CPU always float32); "int8"
    computes in int8, on the CPU, "fp8" in fp8, on a GPU. The folder of an adapter loads its model and switches to it.
    Pickled weights (.bin) can hide code: they are read with `allow_pickle` only, by torch's restricted reader.
    """
    folder = resolve(name, revision, allow_pickle)
    if adapters.is_adapter(folder):
        model = load(adapters.base_of(folder), device, dtype, allow_pickle=allow_pickle)
        model.use(model.add_adapter(folder))
        model.folder = folder
        return model
    first, *others = sentences.routes_of(folder)
    if others:
        verify_folder(folder)
    model = _load(folder, first, device, dtype, allow_pickle)
    model.routes = {route: _load(folder, route, device, dtype, allow_pickle) for route in others}
    return model


def _load(folder: Path, route: str, device: Any, dtype: Any, allow_pickle: bool) -> "Model":
    """The model of a folder, or of one route of its Router."""
    int8, fp8 = dtype in ("int8", torch.int8), dtype in ("fp8", torch.float8_e4m3fn)
    if int8 and device is not None and not str(device).startswith("cpu"):
        raise EverybertError(f"int8 is computed on the CPU, not on {device}; give device=cpu, or another dtype")
    dtype = torch.float32 if int8 else torch.bfloat16 if fp8 else pick_dtype(dtype, "int8", "fp8")
    inner = sentences.encoder_folder(folder, route)
    loaded = load_network(inner, device=pick_device(device, gpu=not int8), dtype=dtype, allow_pickle=allow_pickle)
    if int8 or fp8:
        loaded.network.digest = adapters.encoder_digest(loaded.network)
        (to_int8 if int8 else to_fp8)(loaded.network.encoder)
    specials = loaded.config.family != "static"
    tokenizer = Tokenizer.load(inner, specials) if has_tokenizer(inner) else None
    about = {name: value for name, value in vars(loaded).items() if name not in ("network", "config")}
    about["pooling"] = sentences.read_pooling(folder, loaded.config.hidden_size, allow_pickle, route)
    model = Model(loaded.network, tokenizer, folder=folder, **about)
    if (activation := model.pooling.activation) is not None:
        model.raw_config = loaded.raw_config | {"sentence_transformers": {"activation_fn": activation}}
    if (head := model.extras.get("feature_head")) is not None:
        adapters.load_feature_head(model.network, str(head.get("name")), inner, head)
    return model


def pick_dtype(dtype: torch.dtype | str | None, *others: str) -> torch.dtype | None:
    """A torch type by name; an error also names the `others` that there are."""
    chosen = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if dtype is not None and chosen not in DTYPES.values():
        raise EverybertError(f"there is no dtype {str(dtype)!r} here; choose one of {', '.join((*DTYPES, *others))}")
    return chosen


class Model:
    """An encoder with its heads and its tokenizer. Made by `everybert.load`, or from a network of your own.

    Threads may share a model as long as none of them switches its adapter.
    """

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
        pooling: Pooling | None = None,
    ) -> None:
        self.network = network.eval()
        self.labels = labels
        self.problem_type = problem_type
        self.raw_config = raw_config
        self.extras = extras or {}
        """The contents of everybert.json."""
        self.report = report or Report()
        """Weights that the folder did not have, and those that were not used."""
        self.folder = folder
        """What `load` reads it from."""
        self.bundle = adapters.read_bundle(folder, self.extras, ADAPTED) if folder else adapters.Bundle()
        self.pooling = pooling or Pooling()
        """How `embed` makes vectors by default: as sentence-transformers files say, else everybert.json."""
        settings = self.extras.get("embedding", {})
        if settings.keys() - {"normalize"} or not isinstance(settings.get("normalize", False), bool):
            raise EverybertError(f'{folder}: "embedding" in everybert.json is not understood; restore it')
        if not self.pooling.published:
            self.pooling = replace(self.pooling, normalize=settings.get("normalize", False))
        self.adapters: AdapterSet | None = None
        self.routes: dict[str | None, Model] = {}
        """The routes of a Router (query, document …) other than this, its default; `embed(prompt=)` chooses."""
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
        return device_of(self.network.encoder)

    @property
    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer. A folder without one takes only ids, through `hidden`."""
        if self._tokenizer is None:
            raise EverybertError("this model has no tokenizer; put one in its folder, or give ids to hidden()")
        return self._tokenizer

    @property
    def window(self) -> int:
        """The longest sequence that the model reads at once, special tokens included."""
        longest = self._tokenizer.max_length if self._tokenizer is not None else None
        return min(self.config.max_positions, longest or self.config.max_positions)

    # ── masked tokens ────────────────────────────────────────────────────────────────────────────────────────

    def fill(self, text: str, top: int = 5, pair: str | None = None) -> list[list[Candidate]]:
        """For each [MASK] of a text or pair, its `top` most probable tokens; with a causal model it ends the text."""
        return self.fill_batch([text if pair is None else (text, pair)], top)[0]

    def fill_batch(self, texts: Sequence[Text], top: int = 5) -> list[list[list[Candidate]]]:
        """For each text or pair and each [MASK] in it, the most probable tokens; the texts share batches.

        In a text longer than the window a [MASK] is predicted in the window that owns it.
        """
        if top < 1:
            raise EverybertError(f"top is the number of candidates and at least 1, not {top}")
        encodings, masks = self.tokenizer.encode_batch(texts), []
        for t, encoding in enumerate(encodings):
            masks.append([i for i, token in enumerate(encoding.ids) if token == mask_id(self.tokenizer)])
            if not masks[t]:
                place = f"text {t}" if len(texts) > 1 else "the text"
                raise EverybertError(f"{place} has no [MASK]; put [MASK] where a word is missing")
            masked.check_sides(self.config.causal, encoding, masks[t])
        read = partial(masked.best, self.tokenizer, top=top)
        return masked.at_masks(self.network, encodings, masks, self.window, read)

    def generate(self, text: str, words: int = 8, seed: int | None = None) -> str:
        """The text with up to `words` more words, by a causal model: the most probable or, with a seed, sampled."""
        if not self.config.causal:
            raise EverybertError("only a causal model ([model] causal = true) continues a text; use fill with [MASK]")
        return masked.continued(self.network, self.tokenizer, self.one_window(text), words, seed, self.window)

    def score(self, text: str) -> Score:
        """The pseudo-log-probability of a text: each token is masked in turn; with a causal model the true one."""
        encoding = self.tokenizer.encode(text)
        scored = [i for i, special in enumerate(encoding.special) if not special]
        if len(scored) > MOST_SCORED:
            raise EverybertError(f"the text has {len(scored)} tokens; score at most {MOST_SCORED} at a time")
        (values,) = masked.pseudo_likelihoods(self.network, self.tokenizer, [encoding], self.window)
        tokens = [TokenScore(encoding.tokens[i], float(v), *encoding.offsets[i]) for i, v in zip(scored, values)]
        return Score(sum(token.score for token in tokens), tokens)

    # ── vectors ──────────────────────────────────────────────────────────────────────────────────────────────

    def embed(
        self,
        texts: Sequence[str],
        pooling: str | None = None,
        normalize: bool | None = None,
        long: Literal["window", "cut"] = "window",
        *,
        prompt: str | None = None,
        dimensions: int | None = None,
    ) -> np.ndarray:
        """float32 (N, H): one vector per text.

        pooling: cls, max, mean, mean_sqrt_len_tokens, weightedmean or lasttoken; None follows the folder's
        sentence-transformers files, or is the mean. A text longer than the window is read in overlapping windows;
        long="cut" truncates it instead, as sentence-transformers does, and warns. `prompt` is the name of one of the
        folder's prompts, `model.pooling.prompts`; it is put before each text, and chooses the route of a Router.
        `dimensions` keeps the first numbers of each vector (Matryoshka embeddings).
        """
        texts = as_texts(texts, pairs=False)
        embedded = self.embedded(texts, pooling, normalize, long, prompt=prompt, dimensions=dimensions)
        warn_of_cuts(embedded.cut)
        return embedded.vectors

    def embedded(
        self,
        texts: Sequence[str],
        pooling: str | None = None,
        normalize: bool | None = None,
        long: Literal["window", "cut"] = "window",
        *,
        prompt: str | None = None,
        dimensions: int | None = None,
    ) -> embedding.Embedded:
        """As `embed`, with the number of tokens of each text that were read, and cut."""
        self = self.routes.get(prompt, self)
        if long not in ("window", "cut"):
            raise EverybertError(f"long texts are read by window or cut, not {long!r}")
        how = self.pooling
        if pooling is not None:
            how = replace(how, modes=(pooling,), modules=(), outer=None, truncate=None, splade=None, multi=None)
        elif how.vectors != "embed":
            raise EverybertError(f"this model makes other vectors: use {how.vectors}(), or name a pooling")
        for mode in how.modes:
            check_mode(mode, "embed")
        if normalize is not None:
            how = replace(how, normalize=normalize)
        width, before = how.width(self.config.hidden_size), how.prompt(prompt)
        if dimensions is not None and not 1 <= dimensions <= width:
            raise EverybertError(f"dimensions is {dimensions}; this model's vectors have {width}, choose 1 to that")
        if shorter := dimensions not in (None, width):
            how = replace(how, truncate=dimensions)
        if not texts:
            return embedding.Embedded(np.empty((0, dimensions or width), dtype=np.float32), [], [])
        size = min(how.size or self.window, self.window)
        with self.using(self.adapter_for("embed")):
            result = embedding.embed(self.network, self.tokenizer, texts, how, size, long, before)
        if (normalize and how.truncate) or (how.normalize and shorter):  # of length 1 again
            result.vectors[:] /= np.maximum(np.linalg.norm(result.vectors, axis=1, keepdims=True), 1e-12)
        return result

    def sparse(
        self,
        texts: Sequence[str],
        top: int | None = None,
        long: Literal["window", "cut"] = "window",
        *,
        prompt: str | None = None,
    ) -> list[embedding.Sparse]:
        """A sparse vector over the vocabulary per text, by a SPLADE model; `top` keeps the largest weights.

        `top` is by default the folder's max_active_dims. A masked language model without sentence-transformers files is
        read as SparseEncoder reads it: by the maximum.
        """
        self = self.routes.get(prompt, self)
        how = self.pooling
        if not how.splade and (how.published or "mlm" not in self.network.heads):
            raise EverybertError("this model makes no sparse vectors: give a SPLADE model")
        how = how if how.splade else replace(how, modes=("max",), splade="relu", normalize=False)
        top, how = how.truncate if top is None else top, replace(how, truncate=None)
        if top is not None and top < 1:
            raise EverybertError(f"top is the number of weights and at least 1, not {top}")
        inputs, size = as_texts(texts, pairs=False), min(how.size or self.window, self.window)
        cut: list[int] = []
        vectors: list[embedding.Sparse] = []
        for i in range(0, len(inputs), 256):  # vectors over the whole vocabulary are large
            part, before = inputs[i : i + 256], how.prompt(prompt)
            rows = embedding.embed(self.network, self.tokenizer, part, how, size, long, before)
            vectors += [embedding.Sparse.of(row, top) for row in rows.vectors]
            cut += rows.cut
        warn_of_cuts(cut)
        return vectors

    def multi(
        self, texts: Sequence[str], task: str = "document", long: Literal["window", "cut"] = "window"
    ) -> list[np.ndarray]:
        """float32 (n, D) per text: a vector per token, by a ColBERT or PyLate model; `task` is query or document.

        A query is cut at the length that the folder gives; a longer document is read in windows, or cut too.
        """
        self = self.routes.get(task, self)
        if self.pooling.multi is None:
            raise EverybertError("this model makes no vectors of tokens for search: give a ColBERT model")
        if task not in ("query", "document"):
            raise EverybertError(f"the task of a text is query or document, not {task!r}")
        size = min(self.pooling.size or self.window, self.window)
        inputs = as_texts(texts, pairs=False)
        vectors, cut = multi.token_vectors(self.network, self.tokenizer, inputs, self.pooling, task, size, long)
        warn_of_cuts(cut)
        return vectors

    def tokens(self, text: str, layer: int | None = None, pair: str | None = None) -> TokenVectors:
        """The text's tokens and their vectors after a layer (None the last, 0 the embeddings, −1 counts back)."""
        count = len(self.config.layer_order)
        if layer is not None and not -count - 1 <= layer <= count:
            raise EverybertError(f"there is no layer {layer}: 0 is the embeddings, {count} the last layer")
        layer = count if layer is None else layer % (count + 1)
        encoding = self.tokenizer.encode(text, pair)
        windows = windows_of(encoding, self.window)
        vectors = np.empty((len(encoding), self.config.hidden_size), dtype=np.float32)

        def read(indices: list[int], batch: Ragged, x_TH: Tensor) -> None:
            for w, x_nH in zip([windows[k] for k in indices], batch.split(x_TH)):
                vectors[w.own_start : w.own_stop] = x_nH[w.own].float().cpu().numpy()

        segments = [encoding.segments] if pair is not None else None
        encode(self.network, Inputs([w.ids for w in windows], segments), read, layer)
        return TokenVectors(encoding.tokens, encoding.offsets, vectors, encoding.ids, encoding.segments, layer)

    def hidden(
        self,
        sequences: Sequence[Sequence[int]],
        segments: Sequence[Sequence[int]] | None = None,
        global_tokens: Sequence[Sequence[int]] | None = None,
    ) -> list[Tensor]:
        """Raw ids to final hidden states, one (n, H) tensor per sequence; `global_tokens` are Longformer's."""
        if not (_are_ids(sequences) and _are_ids(segments or [])):
            raise EverybertError("hidden takes lists of token ids, as [[2, 57, 3]]; for a text, use tokens(text)")
        if global_tokens is not None and not self.config.global_attention:
            raise EverybertError(f"a {self.config.family} model has no global attention; leave global_tokens out")
        if self.config.segments < 2 and any(any(row) for row in segments or []):
            raise EverybertError(f"a {self.config.family} model has no second segment; leave segments out")
        states: dict[int, Tensor] = {}

        def read(indices: list[int], batch: Ragged, x_TH: Tensor) -> None:
            states.update(zip(indices, batch.split(x_TH)))

        encode(self.network, Inputs(sequences, segments, global_tokens), read)
        return [states[i].clone() for i in range(len(states))]  # outside of inference mode: usable for training

    # ── tasks ────────────────────────────────────────────────────────────────────────────────────────────────

    def next_sentence(self, first: str, second: str) -> float:
        """P(the second text follows the first)."""
        if not isinstance(second, str):
            raise EverybertError(f"the second text is a {type(second).__name__}; give two strings")
        encoding = self.one_window(first, second)
        (logits,) = run_head(self.network, Inputs([encoding.ids], [encoding.segments]), "nsp")
        return float(torch.from_numpy(logits).softmax(-1)[0])

    def classify(
        self,
        texts: Text | Sequence[Text],
        adapter: str | None = None,
        *,
        labels: Sequence[str] | None = None,
        template: str = TEMPLATE,
        multi: bool = False,
    ) -> list[Prediction]:
        """A label, and the probability of each label, for every text or (text, text) pair of any length.

        `labels` are any names, for which an entailment model reads each text with `template`; they may be `multi`.
        """
        zero_shot: dict[str, Any] = {} if labels is None else {"labels": labels, "template": template, "multi": multi}
        return list(self.predict("classify", as_texts(texts, pairs=labels is None), adapter, **zero_shot))

    def regress(self, texts: Text | Sequence[Text], adapter: str | None = None) -> list[float]:
        """A number for every text or pair."""
        return list(self.predict("regress", as_texts(texts), adapter))

    def tag(self, texts: str | Sequence[Words], adapter: str | None = None) -> list[Span] | list[list[Span]]:
        """The labelled spans of a text. For several texts (or lists of words): a list of such lists."""
        inputs = list(texts) if isinstance(texts, list | tuple) else as_texts(texts, False)
        for i, text in enumerate(inputs):
            words, kind = [text] if isinstance(text, str) else text, type(text).__name__
            if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
                raise EverybertError(f"text {i + 1} is a {kind} ({str(text)[:40]}); give strings or words")
        spans: list[list[Span]] = list(self.predict("tag", inputs, adapter))
        return spans[0] if isinstance(texts, str) else spans

    def answer(
        self, question: str | Sequence[str], context: str | Sequence[str], top: int = 1, adapter: str | None = None
    ) -> list[Answer] | list[list[Answer]]:
        """The `top` best spans of a context. For several questions: a list of such lists."""
        if top < 1:
            raise EverybertError(f"top is the number of answers and at least 1, not {top}")
        single = isinstance(question, str)
        questions, contexts = as_texts(question, False), as_texts(context, False)
        contexts = contexts * len(questions) if isinstance(context, str) else contexts
        if len(contexts) != len(questions):
            raise EverybertError(f"{len(questions)} questions but {len(contexts)} contexts; give one for each or all")
        answers: list[list[Answer]] = list(self.predict("answer", list(zip(questions, contexts)), adapter, top=top))
        return answers[0] if single else answers

    def choose(self, prompt: str, endings: Sequence[str], adapter: str | None = None) -> Choice:
        """The ending that fits the prompt best."""
        (choice,) = self.predict("choose", [(prompt, as_texts(endings, False))], adapter)
        return choice

    def rank(
        self, query: str, texts: Sequence[str], top: int | None = None, adapter: str | None = None
    ) -> list[Ranked]:
        """The texts by relevance to a query, best first (the `top` best), as a cross-encoder or ColBERT scores them."""
        texts = as_texts(texts, False)
        if not isinstance(query, str) or not query.strip():
            raise EverybertError("the query is empty; give the text that the others are compared with")
        if not texts or (top is not None and top < 1):
            raise EverybertError("there is nothing to rank; give one text or more, and top at least 1")
        if how := self.pooling.multi:
            (query_vectors,), documents = self.multi([query], "query"), self.multi(texts)
            scores = logits = multi.maxsim(query_vectors, documents, how.per_token)
        else:
            logits = np.fromiter(self.predict("rank", [(query, text) for text in texts], adapter), float, len(texts))
            scores = relevance(logits, None if adapter or self.adapter else self.raw_config)
        order = np.argsort(-logits, kind="stable")[:top].tolist()
        return [Ranked(i, float(scores[i])) for i in order]

    def predict(self, name: str, inputs: Sequence[Any], adapter: str | None = None, **options: Any) -> Iterator[Any]:
        """The predictions of a task for any number of inputs, in order, as they are computed."""
        paired = [False] if adapter is not None else [isinstance(x, tuple | list) for x in inputs]
        paired = [True] if options.get("labels") is not None else paired  # each text is read as a pair with each label
        defaults = {pair: self.adapter_for(name, pair) for pair in set(paired)}
        if len(set(defaults.values())) > 1:  # texts and pairs in one list, each with an adapter of its own
            parts = {pair: [x for x, p in zip(inputs, paired) if p == pair] for pair in defaults}
            predictions = {p: iter(list(self.predict(name, parts[p], defaults[p], **options))) for p in defaults}
            yield from (next(predictions[pair]) for pair in paired)
            return
        adapter = adapter or self.adapter_for(name, any(paired))
        with self.using(adapter):
            task = self.task(name)
            compute: Any = partial(task.predict, self.network, self.tokenizer) if task.head else self.embed
            yield from compute(inputs, **options)

    def task(self, name: str) -> Task:
        """The settings of one of the model's tasks, under the adapter in use."""
        extras = self.active_extras
        labels, problem = (self.labels, self.problem_type) if extras is self.extras else (None, None)
        return load_task(name, self.network, labels, problem, extras)

    def answer_tokens(self, question: str, context: str) -> tuple[Encoding, np.ndarray]:
        """The tokens of a context, and (n, 2): the probabilities that an answer begins and ends at each.

        Each token is read in the window that owns it. The rest, up to a sum of 1, is the probability of no answer.
        """
        task: Any = self.task("answer")
        features = task.encode(self.tokenizer, self.config, [(question, context)])
        (p_n2,) = task.token_probabilities(task.run(self.network, features), features)
        return self.tokenizer.encode(context, specials=False), p_n2

    # ── the inside ───────────────────────────────────────────────────────────────────────────────────────────

    def attention(self, text: str, pair: str | None = None) -> Attention:
        """Which tokens attend to which: `.weights` (L, A, n, n), row i what token i reads. Notebooks draw it."""
        encoding = self.one_window(text, pair)
        readable = self.tokenizer.readable(encoding.tokens)
        return read_attention(self.network, encoding, self._global_tokens(encoding), readable)

    def trace(self, text: str, pair: str | None = None, **options: Any) -> Trace:
        """Every intermediate of the forward pass by name: `trace["layers.0.attention.weights"]`."""
        encoding = self.one_window(text, pair)
        return read_trace(self.network, encoding, global_tokens=self._global_tokens(encoding), **options)

    def neighbours(self, word: str, texts: Sequence[str], top: int = 5) -> Neighbours:
        """A word in several texts: its vectors compared at every layer, and the words nearest to them."""
        return find_neighbours(self.network, self.tokenizer, word, as_texts(texts, False), top, self.window)

    def attribution(
        self,
        text: str,
        pair: str | None = None,
        *,
        label: str | None = None,
        task: str | None = None,
        adapter: str | None = None,
    ) -> Attribution:
        """Which tokens a prediction rests on, by integrated gradients; `task` is by default that of the model."""
        example = text if pair is None else (text, pair)
        with self.using(adapter or self.adapter_for(task or "classify", pair is not None)):
            settings, encoding = self.task(task or self.main_task() or "classify"), self.one_window(text, pair)
            predict = partial(settings.predict, self.network, self.tokenizer, [example])
            target, named = settings.explained(predict, encoding, label)
            marked = self._global_tokens(encoding, settings)
            scores, *ends = attribute(self.network, self.tokenizer, encoding, str(settings.head), target, marked)
        return Attribution(text, pair, encoding.tokens, encoding.offsets, encoding.sequence, scores, named, *ends)

    def main_task(self) -> str | None:
        """The task that the model was trained for, else the first that its heads can do; None without such a head."""
        trained = trained_task(self.active_extras, self.problem_type if self.active_extras is self.extras else None)
        for name in (trained, *TASKS):
            if name in TASKS and str(TASKS[name].head) in self.network.heads:
                return name
        return None

    def _global_tokens(self, encoding: Encoding, task: Task | None = None) -> list[int] | None:
        """Longformer's global tokens, as its task has them; None for an encoder alone."""
        name = self.main_task()
        if not self.config.global_attention or name is None:
            return None
        return (task or TASKS[name]).global_tokens(encoding)

    # ── adapters ─────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def adapter(self) -> str | None:
        """The adapter in use."""
        return self.adapters.active if self.adapters is not None else None

    def add_adapter(self, folder: str | Path, name: str | None = None, verify: bool = True) -> str:
        """Put a LoRA adapter on the encoder beside others; returns its name, for `adapter=` and `use`.

        `verify` checks that it was trained on this encoder.
        """
        if self.routes:
            raise EverybertError("an adapter would change one route of this Router; load that encoder's own folder")
        path = resolve(folder)
        name = name or path.name.replace(".", "-")
        file = adapters.read_adapter(path)
        self.adapters = self.adapters or AdapterSet(self.network)
        adapters.load_adapter(self.adapters, name, file, verify)
        self.network.eval()
        return name

    def use(self, adapter: str | None) -> None:
        """Switch to an adapter and its head: one of the model's, or a folder; None is the model without adapters."""
        added = self.adapters.entries if self.adapters is not None else {}
        if adapter is not None and adapter not in added:
            if adapter in self.bundle.folders:  # part of the model's own folder, so it fits
                self.add_adapter(self.bundle.folders[adapter], adapter, verify=False)
            elif "/" in adapter or Path(adapter).is_dir():
                adapter = self.add_adapter(adapter)
            else:
                has = ", ".join({**self.bundle.folders, **added}) or "none"
                raise EverybertError(f"this model has no adapter {adapter!r} (it has {has}); give a name, or a folder")
        if self.adapters is not None:
            self.adapters.use(adapter)

    @contextmanager
    def using(self, adapter: str | None) -> Iterator[None]:
        """Switch to an adapter for a while; None leaves the one in use."""
        before = self.adapter
        if adapter is None or adapter == before:
            yield
            return
        self.use(adapter)
        try:
            yield
        finally:
            self.use(before)

    def adapter_for(self, task: str, pair: bool = False) -> str | None:
        """The adapter to switch to for a task by default; None if one is in use or the model has the head itself."""
        return None if self.adapter is not None else default_adapter(self.bundle, [*self.network.heads], task, pair)

    def merge(self, adapter: str | None = None) -> None:
        """Add an adapter (by default the one in use) to the weights, for `save`; the others are removed."""
        if adapter is not None:
            self.use(adapter)
        if self.adapters is None or self.adapter is None:
            raise EverybertError("no adapter is in use; name the one to merge")
        task = self.active_extras.get("task") or {}
        self.problem_type = self.task(task["task"]).problem_type if task else None
        self.extras = {**self.extras, "task": task}
        self.labels = task.get("labels")
        self.adapters.merge()
        self.adapters, self.bundle = None, adapters.Bundle()

    @property
    def active_extras(self) -> dict[str, Any]:
        """The everybert.json of the adapter in use, or of the model."""
        if self.adapters is None or self.adapters.active is None:
            return self.extras
        return self.adapters.entries[self.adapters.active].extras

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────

    def save(self, folder: str | Path, int8: bool = False) -> None:
        """Write a folder that `everybert.load` and transformers (and sentence-transformers) read.

        `int8` writes one byte per parameter and one scale per row: a quarter of the size, for everybert only.
        """
        with atomic_folder(folder) as draft:
            self.write(draft, int8)

    def write(self, folder: Path, int8: bool = False) -> None:
        """Write the files of `save` into an existing folder. Feature-based heads have a file of their own."""
        if self.adapter is not None:
            raise EverybertError("an adapter is in use: merge() it first, or keep its folder beside the model's")
        for route in self.routes.values():
            route.write(folder, int8)
        inner = folder / self.pooling.place
        inner.mkdir(parents=True, exist_ok=True)
        heads = {name: head for name, head in self.network.heads.items() if isinstance(head, FeatureHead)}
        extras = {key: value for key, value in self.extras.items() if key != "adapters"}  # they keep their own folder
        for name, head in heads.items():
            del self.network.heads[name]
            extras["feature_head"] = {"name": name, **adapters.save_feature_head(head, inner)}
        try:
            about: Any = {name: getattr(self, name) for name in ("labels", "problem_type", "raw_config")}
            save_network(self.network, inner, tokenizer=self._tokenizer, extras=extras, int8=int8, **about)
        finally:
            self.network.heads.update(heads)
        if self.pooling.files:
            sentences.write_pooling(folder, self.pooling, self.config.hidden_size)

    # ── helpers ──────────────────────────────────────────────────────────────────────────────────────────────

    def one_window(self, text: str, pair: str | None = None) -> Encoding:
        """A text or pair as tokens; an error if it does not fit into the window."""
        encoding = self.tokenizer.encode(text, pair)
        if len(windows_of(encoding, self.window)) > 1:
            raise EverybertError(f"the text has {len(encoding):,} tokens, the model reads {self.window:,}; shorten it")
        return encoding


def default_adapter(bundle: adapters.Bundle, heads: Container[str], task: str, pair: bool) -> str | None:
    """The folder's adapter for a task on texts or pairs; None if the model has the head itself, or no such adapter."""
    if task in TASKS and str(TASKS[task].head) in heads:  # embed has no head
        return None
    named = bundle.defaults.get(f"{task} pair") if pair else None
    return named or bundle.defaults.get(task)


def warn_of_cuts(cut: Sequence[int]) -> None:
    """Warn of the tokens of texts that were left out."""
    if lost := [n for n in cut if n]:
        warnings.warn(f"{len(lost)} of {len(cut)} texts were cut: {sum(lost)} tokens were left out", stacklevel=3)


def _are_ids(rows: Any) -> bool:
    """Whether these are sequences of whole numbers. Only the first number of each is looked at."""
    try:
        return not isinstance(rows, str) and all(index(row[0]) is not None for row in rows if len(row))
    except TypeError:
        return False
