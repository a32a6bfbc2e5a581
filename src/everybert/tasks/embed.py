"""Embedders: texts to vectors whose cosine says how alike they are, learnt from pairs, triplets or scored pairs.

- pairs and triplets: every other text of the batch is a wrong answer (in-batch negatives; Henderson et al. 2017):
  L = −log softmax(s · cos(aᵢ, pⱼ))ᵢ over all positives and hard negatives j, with scale s = 20;
- scored pairs: CoSENT ranks all pairs of the batch (Su 2022):
  L = log(1 + Σ exp(s · (cos_j − cos_i))) over all i, j with score_i > score_j.

Legend: T tokens, B sequences, E examples, H hidden.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from everybert.errors import EverybertError
from everybert.model.config import EncoderConfig
from everybert.model.heads import Network
from everybert.model.pooling import pool
from everybert.model.ragged import Ragged
from everybert.tasks import columns as col
from everybert.tasks import metrics
from everybert.tasks.classify import CHUNK
from everybert.tasks.features import BUDGET, Features, Reading, constant, gather, run, text_features
from everybert.tasks.records import Bad, Examples, Source, read_rows
from everybert.text.tokenizer import Tokenizer

ANCHORS = ("anchor", "query", "question", "sentence1", "text1", "premise", "sentence_A", "a")
POSITIVES = ("positive", "passage", "answer", "sentence2", "text2", "hypothesis", "sentence_B", "b")
NEGATIVES = ("negative", "hard_negative", "negatives")


@dataclass(frozen=True)
class Embed:
    """How texts become vectors."""

    reading: Reading
    pooling: Literal["mean", "cls"] = "mean"
    normalize: bool = True
    """Whether vectors are scaled to length 1."""
    scale: float = 20.0
    """What cosines are multiplied by in the losses."""
    scored: bool = False
    """Whether the examples are pairs with a score (CoSENT), not pairs and triplets (in-batch negatives)."""
    metric: str = "recall@1"

    name = "embed"
    head = None
    outputs = None

    def features(self, tokenizer: Tokenizer, config: EncoderConfig, examples: Examples) -> Features:
        """The two or three texts of an example, one sequence each, cut at the window as at training elsewhere."""
        flat = [text for texts in examples.inputs for text in texts]
        reading = Reading(self.reading.size, self.reading.overlap, "cut")
        each = text_features(tokenizer, config, flat, reading, lambda ids: ())
        number_S = np.repeat(np.arange(len(examples)), [len(texts) for texts in examples.inputs])
        features = replace(each, example_S=number_S, most=None)
        return features.labelled(score_E=np.asarray(examples.targets, dtype=np.float32)) if self.scored else features

    def share(self, features: Features, which: np.ndarray) -> float:
        """The examples' number."""
        return float(len(which))

    def vectors_BH(self, network: Network, batch: Ragged) -> Tensor:
        """(B, H), pooled, not yet normalised."""
        x_TH = network.encoder(batch)
        return pool(x_TH, batch, self.pooling)

    def loss(self, network: Network, batch: Ragged) -> Tensor:
        """In-batch negatives, or CoSENT for scored pairs."""
        counts = batch.extra["counts"]
        unit_BH = F.normalize(self.vectors_BH(network, batch)[: sum(counts)].float(), dim=-1)
        starts = tuple(accumulate(counts, initial=0))[:-1]
        first_E = constant(starts, unit_BH.device)
        if self.scored:
            return cosent_loss((unit_BH[first_E] * unit_BH[first_E + 1]).sum(-1), batch.extra["score_E"], self.scale)
        hard = constant(tuple(i for s, n in zip(starts, counts) for i in range(s + 2, s + n)), unit_BH.device)
        passages = torch.cat((unit_BH[first_E + 1], unit_BH[hard.long()]))  # all positives, then the hard negatives
        return ranking_loss(unit_BH[first_E], passages, self.scale)

    def evaluate(self, network: Network, features: Features, examples: Examples) -> dict[str, float]:
        """Scored pairs: spearman and pearson of the cosine. Others: recall@1 and mrr among all positives given."""
        out = run(network, features, lambda batch: self.vectors_BH(network, batch))
        unit = np.stack(out)
        unit = unit / np.maximum(np.linalg.norm(unit, axis=1, keepdims=True), 1e-12)
        first = features.first_E1[:-1]
        a, b = unit[first], unit[first + 1]
        if self.scored:
            cosine = (a * b).sum(1)
            gold = np.asarray(examples.targets)
            return {"spearman": metrics.spearman(gold, cosine), "pearson": metrics.pearson(gold, cosine)}
        ranks = np.empty(len(a))
        for i in range(0, len(a), 512):
            part = a[i : i + 512]
            right = (part * b[i : i + 512]).sum(1, keepdims=True)
            ranks[i : i + 512] = (part @ b.T > right + 1e-6).sum(1)
        return {"recall@1": float((ranks == 0).mean()), "mrr": float((1 / (1 + ranks)).mean())}

    def tuned(self, network: Network, features: Features, examples: Examples) -> Embed:
        """As it is."""
        return self

    def state(self) -> dict[str, Any]:
        """What the model folder keeps."""
        return {
            "task": self.name,
            "window": self.reading.state(),
            "pooling": self.pooling,
            "normalize": self.normalize,
        }


def ranking_loss(anchors_EH: Tensor, passages_PH: Tensor, scale: float) -> Tensor:
    """Cross-entropy of s · cos(anchor i, passage j) with the right passage at j = i. Both are unit vectors."""
    logits_EP = anchors_EH @ passages_PH.T * scale
    return F.cross_entropy(logits_EP, torch.arange(len(anchors_EH), device=logits_EP.device))


def cosent_loss(cosine_E: Tensor, score_E: Tensor, scale: float) -> Tensor:
    """log(1 + Σ exp(s · (cos_j − cos_i))) over all i, j with score_i > score_j."""
    gap = scale * (cosine_E[None] - cosine_E[:, None])
    gap = gap.masked_fill(score_E[:, None] <= score_E[None], float("-inf")).flatten()
    return torch.logsumexp(torch.cat((gap.new_zeros(1), gap)), dim=0)


# ── examples and settings ────────────────────────────────────────────────────────────────────────────────────


def read(source: Source, columns: Mapping[str, str] | None = None, skip_bad: bool = False) -> Examples:
    """(anchor, positive), (anchor, positive, negative), or (text, text, score) where a score column is there."""
    chosen = columns or {}
    table = read_rows(_named(source), ("anchor", "positive", "negative"), skip_bad)
    first, where = table.rows[0], table.where
    anchor = col.find(first, "text", ANCHORS, chosen, where)
    positive = col.find(first, "pair", POSITIVES, chosen, where)
    negative = col.find(first, "negative", NEGATIVES, chosen, where)
    score = col.find(first, "label", ("score", "similarity", "relatedness_score"), chosen, where)
    score = score or (next((c for c in ("label",) if c in first), None) if negative is None else None)
    if anchor is None or positive is None:
        raise EverybertError(
            f"{where}: embed needs two texts (anchor, positive) and a negative or a score if there is one; "
            f"it has {', '.join(map(str, first))} (columns: text=…, pair=…, negative=…, label=…)"
        )
    names = [anchor, positive] + ([negative] if negative and score is None else [])
    bad = Bad(where, skip_bad, table.bad)
    inputs: list[Any] = []
    targets: list[Any] = []
    for i, row in enumerate(table.rows):
        texts = [row.get(name) for name in names]
        if wrong := [n for n, t in zip(names, texts) if not isinstance(t, str) or not t.strip()]:
            bad(i, f"the text in column {wrong[0]!r} is empty or not text")
            continue
        number = _score(row.get(score)) if score else None
        if score and number is None:
            bad(i, f"the score {row.get(score)!r} is not a number")
            continue
        inputs.append(tuple(texts))
        targets.append(number)
    if not inputs:
        raise EverybertError(f"{where} has no usable row; {bad.found[0]}")
    shown = ", ".join(map(repr, names)) + (f", score from {score!r}" if score else "")
    return Examples(inputs, targets, where, (*table.notes, *bad.notes(), f"{where}: texts read from {shown}"))


def _named(source: Source) -> Source:
    """Tuples with a number last are scored pairs; with two or three texts, pairs and triplets."""
    if not isinstance(source, list) or not source or not isinstance(source[0], tuple | list):
        return source
    size = len(source[0])
    names = ("anchor", "positive", "score" if size == 3 and not isinstance(source[0][2], str) else "negative")
    if size not in (2, 3) or any(len(row) != size for row in source):
        raise EverybertError("embed needs tuples (anchor, positive), (anchor, positive, negative) or (a, b, score)")
    return [dict(zip(names, row)) for row in source]


def _score(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if np.isfinite(number) else None


def begin(
    examples: Examples,
    config: EncoderConfig,
    *,
    reading: Reading | None = None,
    pooling: Literal["mean", "cls"] = "mean",
    normalize: bool = True,
    scale: float = 20.0,
    metric: str | None = None,
) -> Embed:
    """Whether pairs are scored is read off the examples."""
    scored = examples.targets[0] is not None
    known = ("spearman", "pearson") if scored else ("recall@1", "mrr")
    if metric is not None and metric not in known:
        raise EverybertError(f"these embeddings are judged by {' or '.join(known)}, not {metric!r}")
    reading = reading or Reading.of(config, min(256, config.max_positions))
    return Embed(reading, pooling, normalize, scale, scored, metric or known[0])


def of(state: Mapping[str, Any], config: EncoderConfig) -> Embed:
    """From what `state` gave."""
    reading = Reading.from_state(state.get("window"), config)
    return Embed(reading, state.get("pooling", "mean"), bool(state.get("normalize", True)))


def predict(
    network: Network, tokenizer: Tokenizer, task: Embed, texts: Sequence[str], budget: int = BUDGET
) -> Iterator[np.ndarray]:
    """(H) float32 for each text; a long one is the mean over its windows, by the share each owns."""
    for start in range(0, len(texts), CHUNK):
        part = texts[start : start + CHUNK]
        features = text_features(tokenizer, network.config, part, task.reading, lambda ids: ())
        out = gather(run(network, features, lambda batch: task.vectors_BH(network, batch), budget), features)
        if task.normalize:
            out = out / np.maximum(np.linalg.norm(out, axis=1, keepdims=True), 1e-12)
        yield from out.astype(np.float32)


def write_sentence_transformers(folder: str | Path, task: Embed, config: EncoderConfig) -> None:
    """The files by which sentence-transformers opens a model folder: modules, pooling, normalisation, length."""
    folder = Path(folder)
    modules = [("0", "", "Transformer"), ("1", "1_Pooling", "Pooling")]
    if task.normalize:
        modules.append(("2", "2_Normalize", "Normalize"))
    described = [
        {"idx": int(n), "name": n, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, path, kind in modules
    ]
    pooling = {
        "word_embedding_dimension": config.hidden_size,
        **{
            f"pooling_mode_{mode}": mode == {"mean": "mean_tokens", "cls": "cls_token"}[task.pooling]
            for mode in ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens")
        },
        "pooling_mode_lasttoken": False,
        "include_prompt": True,
    }
    files = {
        "modules.json": described,
        "1_Pooling/config.json": pooling,
        "sentence_bert_config.json": {"max_seq_length": task.reading.size, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "prompts": {},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
    }
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
