"""What heads know of syntax: how often a head's strongest link joins a word and its syntactic head (Clark et al. 2019).

Attention between pieces becomes attention between words (towards a word its pieces' weights are summed, from a word
averaged; special tokens are left out). A head is right about a word where the word it attends to most is the word's
syntactic head, or, read backwards, where the syntactic head attends most to the word. The baseline for a relation is
its best fixed offset: "the head is the next word".

Legend: L layers, A heads, W words of a sentence, n its tokens, R relations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from everybert.errors import EverybertError
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.text.tokenizer import Encoding, Tokenizer

PUBLISHED = {"obj": 86.8, "det": 94.3, "nmod:poss": 80.5, "aux:pass": 82.5}
"""BERT-base's best heads on the Penn Treebank (Clark et al. 2019, table 1: dobj, det, poss, auxpass)."""
SENTENCES = {
    "obj": "direct objects attend to their verbs",
    "det": "determiners attend to their nouns",
    "nmod:poss": "possessives attend to their nouns",
    "aux:pass": "passive auxiliaries attend to their verbs",
}
OFFSETS = 5
"""Fixed offsets tried as baselines: −5 … 5."""
BUDGET = 1024
"""Tokens that are read together."""


@dataclass(frozen=True)
class Relation:
    """How well heads follow one dependency relation."""

    name: str
    count: int
    right: np.ndarray = field(repr=False)
    """float (2, L, A): the share of words for which a head is right; from dependent to head, and back."""
    offset: int
    """The best fixed offset from a word to its head."""
    baseline: float
    """How often that offset is right."""

    @property
    def best(self) -> tuple[int, int, bool, float]:
        """(layer, head, whether it looks from the dependent to its head, share right) of the best head."""
        back, layer, head = np.unravel_index(int(self.right.argmax()), self.right.shape)
        return int(layer), int(head), back == 0, float(self.right.max())


@dataclass(frozen=True)
class HeadProbe:
    """The outcome for a treebank."""

    relations: dict[str, Relation]
    """By name, the most frequent first; "all" is all of them together."""
    sentences: int
    words: int
    skipped: int
    """Sentences longer than the model's window."""

    def rows(self, least: int = 1) -> list[dict[str, object]]:
        """A row a relation: the best head, its accuracy, the baseline, the published value where there is one."""
        out: list[dict[str, object]] = []
        for r in self.relations.values():
            if r.count < least:
                continue
            layer, head, forward, accuracy = r.best
            out.append(
                {
                    "relation": r.name,
                    "count": r.count,
                    "layer": layer,
                    "head": head,
                    "direction": "to its head" if forward else "from its head",
                    "accuracy": accuracy,
                    "offset": r.offset,
                    "baseline": r.baseline,
                    "published": PUBLISHED.get(r.name),
                }
            )
        return out


Tree = Sequence[Mapping[str, str]]
"""A sentence's words with CoNLL-U's fields: form, head, deprel."""


def probe_heads(
    network: Network,
    tokenizer: Tokenizer,
    trees: Iterable[Tree],
    progress: Callable[[int], None] | None = None,
) -> HeadProbe:
    """Measure every head on every relation. `progress` is told how many sentences were read."""
    config = network.config
    shape = (2, len(config.layer_order), config.heads)
    hits: dict[str, np.ndarray] = {}
    gaps: dict[str, np.ndarray] = {}
    sentences = words = skipped = 0
    for chunk in _chunks(tokenizer, trees, config.max_positions):
        for tree, sentence, links in _read(network, chunk):
            if links is None or sentence is None:
                skipped += 1
                continue
            sentences += 1
            words += len(tree)
            for child, parent, name in arcs(tree, sentence):
                right = np.stack((links[:, :, child] == parent, links[:, :, parent] == child))
                for key in ("all", name):
                    hits.setdefault(key, np.zeros(shape))
                    hits[key] += right
                    gap = gaps.setdefault(key, np.zeros(2 * OFFSETS + 2))
                    gap[parent - child + OFFSETS if abs(parent - child) <= OFFSETS else -1] += 1
        if progress is not None:
            progress(sentences + skipped)
    if not hits:
        raise EverybertError("no sentence has a word with a syntactic head; give a CoNLL-U file with HEAD and DEPREL")
    counts = {name: int(gap.sum()) for name, gap in gaps.items()}
    order = sorted(hits, key=lambda name: -counts[name])
    found = {}
    for name in order:
        offset = int(gaps[name][:-1].argmax()) - OFFSETS
        baseline = float(gaps[name][:-1].max()) / counts[name]
        found[name] = Relation(name, counts[name], hits[name] / counts[name], offset, baseline)
    return HeadProbe(found, sentences, words, skipped)


@dataclass(frozen=True)
class Sentence:
    """A tree's words as tokens."""

    encoding: Encoding
    owner_n: np.ndarray
    """Each token's word; −1 for special tokens."""
    present_W: np.ndarray
    """Whether a word has tokens at all."""


def sentence_of(tokenizer: Tokenizer, tree: Tree) -> Sentence:
    """The words joined by spaces, and each token's word."""
    forms = [word["form"] for word in tree]
    encoding = tokenizer.encode(" ".join(forms))
    ends = np.cumsum([len(form) + 1 for form in forms]) - 1
    starts = np.array([a for a, _ in encoding.offsets])
    owner_n = np.minimum(np.searchsorted(ends, starts, side="right"), len(forms) - 1)
    owner_n[np.array(encoding.special)] = -1
    return Sentence(encoding, owner_n, np.isin(np.arange(len(forms)), owner_n))


def arcs(tree: Tree, sentence: Sentence) -> Iterator[tuple[int, int, str]]:
    """(dependent, head, relation), counted from 0; roots and words without tokens have none."""
    for child, word in enumerate(tree):
        head = word["head"]
        if not head.isdigit():
            raise EverybertError(f"the word {word['form']!r} has the head {head!r}, which is no number; mend the file")
        parent = int(head) - 1
        if 0 <= parent < len(tree) and sentence.present_W[child] and sentence.present_W[parent]:
            yield child, parent, word["deprel"]


def _chunks(tokenizer: Tokenizer, trees: Iterable[Tree], size: int) -> Iterator[list[tuple[Tree, Sentence | None]]]:
    """Sentences in groups of some tokens; None for one that is too long."""
    group: list[tuple[Tree, Sentence | None]] = []
    total = 0
    for tree in trees:
        sentence = sentence_of(tokenizer, tree)
        fits = len(sentence.encoding) <= size
        if group and total + len(sentence.encoding) > BUDGET:
            yield group
            group, total = [], 0
        group.append((tree, sentence if fits else None))
        total += len(sentence.encoding) if fits else 0
    if group:
        yield group


@torch.inference_mode()
def _read(
    network: Network, chunk: Sequence[tuple[Tree, Sentence | None]]
) -> Iterator[tuple[Tree, Sentence | None, np.ndarray | None]]:
    """Each sentence with (L, A, W): the word that each word attends to most, in every head."""
    fitting = [sentence for _, sentence in chunk if sentence is not None]
    found: list[list[np.ndarray]] = [[] for _ in fitting]
    turn = 0

    def watch(name: str, weights_Ann: Tensor) -> None:
        nonlocal turn
        if name.endswith("attention.weights"):  # each layer tells of the sequences in their order
            b = turn % len(fitting)
            found[b].append(strongest(weights_Ann.float().cpu().numpy(), fitting[b]))
            turn += 1

    if fitting:
        device = network.encoder.embeddings.token.weight.device
        network.encoder(Ragged.of([s.encoding.ids for s in fitting], device=device), watch=watch)
    links = iter(found)
    for tree, sentence in chunk:
        yield tree, sentence, np.stack(next(links)) if sentence is not None else None


def strongest(weights_Ann: np.ndarray, sentence: Sentence) -> np.ndarray:
    """(A, W): the other word that each word attends to most."""
    words = len(sentence.present_W)
    member_nW = (sentence.owner_n[:, None] == np.arange(words)).astype(np.float32)
    mean_Wn = (member_nW / np.maximum(member_nW.sum(0), 1)).T
    between_AWW = mean_Wn @ weights_Ann @ member_nW
    between_AWW[:, :, ~sentence.present_W] = -1
    between_AWW[:, np.arange(words), np.arange(words)] = -2
    return between_AWW.argmax(-1)
