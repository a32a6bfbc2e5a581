"""Head probes: what attention heads know of syntax.

The measure (Clark et al. 2019): how often the strongest link of a head joins a word and its syntactic head. Attention
between tokens becomes attention between words: weights towards the tokens of a word are summed, weights from them are
averaged, and special tokens are left out. A head is right about a word if the word attends most to its syntactic head
or, in the other direction, if the syntactic head attends most to the word. The baseline of a relation is its best
fixed offset, such as "the head is the next word".

Legend: L layers, A heads, W words of a sentence, n its tokens.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from torch import Tensor

from everybert.errors import EverybertError
from everybert.model.engine import Inputs, device_of, run_batches
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.text.tokenizer import Encoding, Tokenizer

PUBLISHED = {"obj": 86.8, "det": 94.3, "nmod:poss": 80.5, "aux:pass": 82.5}
"""The best heads of BERT-base on the Penn Treebank (Clark et al. 2019, table 1: dobj, det, poss, auxpass)."""
OFFSETS = 5
"""Fixed offsets that are tried as baselines: −5 … 5."""
CHUNK = 256
"""Sentences between two progress reports."""

Tree = Sequence[Mapping[str, str]]
"""The words of a sentence with the CoNLL-U fields form, head, deprel."""


@dataclass(frozen=True)
class Sentence:
    """The words of a sentence as tokens."""

    encoding: Encoding
    owner_n: np.ndarray
    """The word of each token; −1 for special tokens."""
    present_W: np.ndarray
    """Whether a word has tokens."""


def sentence_of(tokenizer: Tokenizer, words: Sequence[str]) -> Sentence:
    """Encode the words, joined by spaces, and find the word of each token."""
    encoding = tokenizer.encode(" ".join(words))
    ends = np.cumsum([len(word) + 1 for word in words]) - 1
    starts = np.array([a for a, _ in encoding.offsets])
    owner_n = np.minimum(np.searchsorted(ends, starts, side="right"), len(words) - 1)
    owner_n[np.array(encoding.special)] = -1
    return Sentence(encoding, owner_n, np.isin(np.arange(len(words)), owner_n))


@dataclass(frozen=True)
class Relation:
    """How well heads follow one dependency relation."""

    relation: str
    count: int
    layer: int
    head: int
    direction: str
    """The best head, and whether it attends from a word "to its head" or, to the word, "from its head"."""
    accuracy: float
    """The share of words for which that head is right."""
    offset: int
    """The best fixed offset from a word to its head."""
    baseline: float
    """The share of words for which that offset is right."""
    published: float | None
    right: np.ndarray = field(repr=False)
    """float (2, L, A): the share of words for which each head is right, from dependent to head and back."""


@dataclass(frozen=True)
class HeadProbe:
    """The result for a treebank."""

    relations: dict[str, Relation]
    """By name, the most frequent first; "all" is all of them together."""
    sentences: int
    words: int
    skipped: int
    """Sentences longer than the model's window."""


def _relation(name: str, right: np.ndarray, gap: np.ndarray) -> Relation:
    """The figures of a relation. `gap` counts the offsets of heads from their words, the last all distant ones."""
    count = int(gap.sum())
    back, layer, head = (int(i) for i in np.unravel_index(int(right.argmax()), right.shape))
    direction = "from its head" if back else "to its head"
    offset, baseline = int(gap[:-1].argmax()) - OFFSETS, float(gap[:-1].max()) / count
    share, known = right / count, PUBLISHED.get(name)
    return Relation(name, count, layer, head, direction, float(share.max()), offset, baseline, known, share)


def probe_heads(
    network: Network,
    tokenizer: Tokenizer,
    trees: Iterable[Tree],
    progress: Callable[[int], None] = lambda sentences: None,
) -> HeadProbe:
    """Measure every head on every relation. `progress` is called with the number of sentences so far."""
    shape = (2, len(network.config.layer_order), network.config.heads)
    hits: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(shape))
    gaps: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2 * OFFSETS + 2))
    sentences = words = skipped = 0
    rest = iter(trees)
    while chunk := list(islice(rest, CHUNK)):
        encoded = [(tree, sentence_of(tokenizer, [word["form"] for word in tree])) for tree in chunk]
        fitting = [(tree, s) for tree, s in encoded if len(s.encoding) <= network.config.max_positions]
        skipped += len(encoded) - len(fitting)
        sentences += len(fitting)
        for (tree, sentence), links in zip(fitting, _strongest_links(network, [s for _, s in fitting])):
            words += len(tree)
            for child, parent, name in arcs(tree, sentence):
                right = np.stack((links[:, :, child] == parent, links[:, :, parent] == child))
                for key in ("all", name):
                    hits[key] += right
                    gaps[key][parent - child + OFFSETS if abs(parent - child) <= OFFSETS else -1] += 1
        progress(sentences + skipped)
    if not hits:
        raise EverybertError("no sentence has a word with a syntactic head; give a CoNLL-U file with HEAD and DEPREL")
    order = sorted(hits, key=lambda name: -gaps[name].sum())
    return HeadProbe({n: _relation(n, hits[n], gaps[n]) for n in order}, sentences, words, skipped)


def arcs(tree: Tree, sentence: Sentence) -> Iterator[tuple[int, int, str]]:
    """(dependent, head, relation), counted from 0, without roots and words that have no tokens."""
    for child, word in enumerate(tree):
        head = word["head"]
        if not head.isdigit():
            raise EverybertError(f"the word {word['form']!r} has the head {head!r}, which is no number; fix the file")
        parent = int(head) - 1
        if 0 <= parent < len(tree) and sentence.present_W[child] and sentence.present_W[parent]:
            yield child, parent, word["deprel"]


def _strongest_links(network: Network, sentences: Sequence[Sentence]) -> list[np.ndarray]:
    """Per sentence (L, A, W): the word to which each word attends most, in every head."""
    out: list[list[np.ndarray]] = [[] for _ in sentences]

    def work(which: list[int], batch: Ragged) -> None:
        turn = 0

        def watch(name: str, weights_Ann: Tensor) -> None:
            nonlocal turn
            if name.endswith("attention.weights"):  # called per layer and sequence, in order
                i = which[turn % len(which)]
                out[i].append(strongest(weights_Ann.float().cpu().numpy(), sentences[i]))
                turn += 1

        network.encoder(batch.to(device_of(network.encoder)), watch=watch)

    run_batches(network, Inputs([s.encoding.ids for s in sentences]), work)
    return [np.stack(layers) for layers in out]


def strongest(weights_Ann: np.ndarray, sentence: Sentence) -> np.ndarray:
    """(A, W): the other word to which each word attends most."""
    words = len(sentence.present_W)
    member_nW = (sentence.owner_n[:, None] == np.arange(words)).astype(np.float32)
    mean_Wn = (member_nW / np.maximum(member_nW.sum(0), 1)).T
    between_AWW = mean_Wn @ weights_Ann @ member_nW
    between_AWW[:, :, ~sentence.present_W] = -1
    between_AWW[:, np.arange(words), np.arange(words)] = -2
    return between_AWW.argmax(-1)
