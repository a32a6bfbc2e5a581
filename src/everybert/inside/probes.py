"""Head probes: what attention heads know of syntax and of coreference.

The measure (Clark et al. 2019): how often the strongest link of a head joins a word and its syntactic head. Attention
between tokens becomes attention between words: weights towards the tokens of a word are summed, weights from them are
averaged, and special tokens are left out. A head is right about a word if the word attends most to its syntactic head
or, in the other direction, if the syntactic head attends most to the word. The baseline of a relation is its best
fixed offset, such as "the head is the next word".

Of coreference (section 4.3): how often the head word of a mention attends most, of all mentions before, to an
antecedent. Baselines choose the nearest mention, and the nearest with the same head word.

Legend: L layers, A heads, W words of a sentence, n its tokens, M mentions before one.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from everybert.errors import EverybertError
from everybert.inside.attention import read_attention
from everybert.model.heads import Network
from everybert.text.tokenizer import Encoding, Tokenizer

PUBLISHED = {"obj": 0.868, "det": 0.943, "nmod:poss": 0.805, "aux:pass": 0.825}
"""The best heads of BERT-base on the Penn Treebank (Clark et al. 2019, table 1: dobj, det, poss, auxpass)."""
OFFSETS = 5
"""Fixed offsets that are tried as baselines: −5 … 5."""

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


def probe_heads(network: Network, tokenizer: Tokenizer, trees: Iterable[Tree]) -> HeadProbe:
    """Measure every head on every relation."""
    shape = (2, len(network.config.layer_order), network.config.heads)
    hits: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(shape))
    gaps: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2 * OFFSETS + 2))
    sentences = words = skipped = 0
    for tree in trees:
        sentence = sentence_of(tokenizer, [word["form"] for word in tree])
        if len(sentence.encoding) > network.config.max_positions:
            skipped += 1
            continue
        sentences, words = sentences + 1, words + len(tree)
        links = strongest(read_attention(network, sentence.encoding).weights, sentence)
        for child, parent, name in arcs(tree, sentence):
            right = np.stack((links[:, :, child] == parent, links[:, :, parent] == child))
            for key in ("all", name):
                hits[key] += right
                gaps[key][parent - child + OFFSETS if abs(parent - child) <= OFFSETS else -1] += 1
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


def between(weights_nn: np.ndarray, sentence: Sentence) -> np.ndarray:
    """(…, W, W): attention between words: the sum over the tokens of the target, the mean over those of the source."""
    member_nW = (sentence.owner_n[:, None] == np.arange(len(sentence.present_W))).astype(np.float32)
    return (member_nW / np.maximum(member_nW.sum(0), 1)).T @ weights_nn @ member_nW


def strongest(weights_nn: np.ndarray, sentence: Sentence) -> np.ndarray:
    """(…, W): the other word to which each word attends most."""
    between_WW = between(weights_nn, sentence)
    between_WW[..., ~sentence.present_W] = -1
    between_WW[..., np.eye(len(sentence.present_W), dtype=bool)] = -2
    return between_WW.argmax(-1)


def probe_coref(network: Network, tokenizer: Tokenizer, trees: Iterable[Tree]) -> dict[str, Any]:
    """The share of mentions with an antecedent for which the best head, two baselines and every head choose one."""
    right, baselines = [], []
    skipped: list[Tree] = []
    for words in _stretches(tokenizer, trees, network.config.max_positions, skipped):
        text = sentence_of(tokenizer, [word["form"] for word in words])
        weights_LAWW = between(read_attention(network, text.encoding).weights, text)
        mentions = sorted(mention for mention in _mentions(words) if text.present_W[mention[0]])
        for i, (place, form, entity) in enumerate(mentions):
            before = [mention for mention in mentions[:i] if mention[0] < place]
            same_M = np.array([other == entity for *_, other in before])
            if same_M.any():
                right.append(same_M[weights_LAWW[:, :, place, [at for at, *_ in before]].argmax(-1)])
                alike = [other for _, word, other in before if word == form]
                baselines.append((same_M[-1], alike[-1:] == [entity]))
    if not right:
        raise EverybertError("no mention has an antecedent; give CoNLL-U with coreference, Entity=(e1-… in column 10")
    right_LA = np.mean(right, axis=0)
    layer, head = (int(i) for i in np.unravel_index(right_LA.argmax(), right_LA.shape))
    nearest, match = np.mean(baselines, axis=0).tolist()
    best = {"layer": layer, "head": head, "accuracy": float(right_LA.max()), "nearest": nearest, "head_match": match}
    published = {"accuracy": 0.65, "nearest": 0.27, "head_match": 0.52}  # their table 2: CoNLL-2012, head 5-4
    return {"mentions": len(right), "skipped": len(skipped), **best, "published": published, "right": right_LA.tolist()}


def _stretches(
    tokenizer: Tokenizer, trees: Iterable[Tree], most: int, skipped: list[Tree]
) -> Iterator[list[Mapping[str, str]]]:
    """The words of as many sentences of a document as fit, in 128 tokens as in the paper.

    A sentence of more than `most` tokens is added to `skipped`.
    """

    def size(words: Sequence[Mapping[str, str]]) -> int:
        return len(sentence_of(tokenizer, [word["form"] for word in words]).encoding)

    held: list[Mapping[str, str]] = []
    for tree in trees:
        if size(tree) > most:
            skipped.append(tree)
            continue
        if held and (tree[0]["document"] != held[0]["document"] or size([*held, *tree]) > min(128, most)):
            yield held
            held = []
        held = [*held, *tree]
    yield from [held] if held else []


def _mentions(words: Tree) -> Iterator[tuple[int, str, str]]:
    """(place, form, entity) of the head word of each mention: the first whose syntactic head lies outside."""
    begun: dict[str, list[int]] = defaultdict(list)
    for at, word in enumerate(words):
        for mark in re.findall(r"\(?[^()]+\)?", f"|{word['misc']}".partition("|Entity=")[2].partition("|")[0]):
            name = mark.strip("()").partition("-")[0]  # (e1-person begins a mention of e1, e1) ends it
            begun[name] += [at] if mark.startswith("(") else []
            if mark.endswith(")") and begun[name] and ("[" not in name or "[1/" in name):  # of parts, the first counts
                start = begun[name].pop()
                inside = {inner["id"] for inner in words[start : at + 1]}
                top = next((i for i in range(start, at) if words[i]["head"] not in inside), at)
                yield top, words[top]["form"].lower(), name.partition("[")[0]
