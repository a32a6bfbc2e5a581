"""Tag schemes: how entities are written as one tag a word, and read back; decoding that obeys them; entity scores.

| scheme | an entity of three words, of one word                            |
|--------|------------------------------------------------------------------|
| IOB1   | I-X I-X I-X, I-X; B-X only where an X follows an X (CoNLL-2003)  |
| BIO    | B-X I-X I-X, B-X                                                 |
| BIOES  | B-X I-X E-X, S-X (BILOU writes L for E and U for S)              |
| plain  | any label for each word (parts of speech): no entities           |

Legend: n words, C labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from everybert.errors import EverybertError
from everybert.tasks.metrics import ratios


class Entity(NamedTuple):
    """Words [start, stop) bear this label."""

    label: str
    start: int
    stop: int


def split_tag(tag: str) -> tuple[str, str]:
    """("B", "PER") of "B-PER"; ("O", "") of "O". BILOU's L and U become E and S."""
    prefix, _, label = tag.partition("-")
    return {"L": "E", "U": "S"}.get(prefix, prefix), label


def has_prefixes(tags: Iterable[str]) -> bool:
    """Whether these tags mark entities: every one is O or has a scheme's prefix, and some are not O."""
    kinds = set(tags)
    marked = [t for t in kinds if t != "O"]
    return bool(marked) and all(len(t) > 2 and t[1] == "-" and t[0] in "BIESLU" for t in marked)


def find_scheme(sentences: Iterable[Sequence[str]]) -> str:
    """The scheme these sentences are written in: IOB1, BIO, BIOES or plain."""
    sentences = list(sentences)
    tags = {t for s in sentences for t in s}
    if not has_prefixes(tags):
        return "plain"
    if any(t[0] in "ESLU" for t in tags if t != "O"):
        return "BIOES"
    loose_i = stray_b = False  # an I- that begins an entity; a B- where IOB1 would not write one
    for sentence in sentences:
        before = ("O", "")
        for tag in map(split_tag, sentence):
            same = before[0] != "O" and before[1] == tag[1]
            loose_i |= tag[0] == "I" and not same
            stray_b |= tag[0] == "B" and not same
            before = tag
    return "IOB1" if loose_i and not stray_b else "BIO"


def entities(tags: Sequence[str]) -> list[Entity]:
    """The entities of one sentence as conlleval (and seqeval by default) reads them.

    Lenient: a change of label begins a new entity, and so does an I- or E- after O, E- or S-.
    """
    found: list[Entity] = []
    start, before = 0, ("O", "")
    for i, tag in enumerate([*map(split_tag, tags), ("O", "")]):
        changed = before[1] != tag[1]
        if before[0] != "O" and (before[0] in "ES" or tag[0] in "BSO" or changed):
            found.append(Entity(before[1], start, i))
        if tag[0] != "O" and (tag[0] in "BS" or before[0] in "ESO" or changed):
            start = i
        before = tag
    return found


def strict_entities(tags: Sequence[str], scheme: str) -> list[Entity]:
    """Only the entities that are written exactly as the scheme asks (seqeval's strict mode)."""
    found: list[Entity] = []
    start: int | None = None
    for i, (prefix, label) in enumerate([*map(split_tag, tags), ("O", "")]):
        inside = start is not None and prefix in "IE" and split_tag(tags[start])[1] == label
        if start is not None and not inside:
            if scheme == "BIO":
                found.append(Entity(split_tag(tags[start])[1], start, i))
            start = None
        if inside and prefix == "E":
            found.append(Entity(label, start or 0, i + 1))
            start = None
        elif prefix == "S":
            found.append(Entity(label, i, i + 1))
        elif prefix == "B":
            start = i
    return found


def write_tags(spans: Iterable[Entity], n: int, scheme: str = "BIO") -> list[str]:
    """Entities as tags of n words. They must not overlap."""
    if scheme not in ("BIO", "BIOES"):
        raise EverybertError(f"tags are written in BIO or BIOES, not {scheme}")
    tags = ["O"] * n
    for label, start, stop in spans:
        if not 0 <= start < stop <= n or any(t != "O" for t in tags[start:stop]):
            raise EverybertError(f"the entity {label} at words {start}–{stop} overlaps another, or lies outside")
        tags[start:stop] = [f"B-{label}", *[f"I-{label}"] * (stop - start - 1)]
        if scheme == "BIOES":
            tags[stop - 1] = f"E-{label}" if stop - start > 1 else f"S-{label}"
    return tags


def convert(tags: Sequence[str], scheme: str) -> list[str]:
    """The same entities in BIO or BIOES, whatever the tags were in; ill-formed sequences come out well-formed."""
    return write_tags(entities(tags), len(tags), scheme)


# ── decoding ─────────────────────────────────────────────────────────────────────────────────────────────────


def transitions(labels: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which tag may follow which: bool (C, C), row before column; and which may begin, and end, a sentence: (C,).

    Where the labels have E- or S-, an entity must be closed; in BIO it ends by itself.
    """
    closing = any(split_tag(t)[0] in "ES" for t in labels if t != "O")

    def may(before: tuple[str, str], after: tuple[str, str]) -> bool:
        opened = before[0] in "BI"
        if after[0] in "IE":
            return opened and before[1] == after[1]
        return not (closing and opened)

    pairs = [split_tag(t) for t in labels]
    outside = ("O", "")
    follow = np.array([[may(a, b) for b in pairs] for a in pairs], dtype=bool)
    first = np.array([may(outside, b) for b in pairs], dtype=bool)
    last = np.array([may(a, outside) for a in pairs], dtype=bool)
    return follow, first, last


def viterbi(scores_nC: np.ndarray, labels: Sequence[str]) -> np.ndarray:
    """(n,) the best-scoring path among those the scheme allows; greedy where it allows none."""
    scores = np.asarray(scores_nC, dtype=float)
    greedy = scores.argmax(1)
    if not len(scores):
        return greedy
    follow, first, last = transitions(labels)
    if first[greedy[0]] and last[greedy[-1]] and follow[greedy[:-1], greedy[1:]].all():
        return greedy  # the best of all paths is allowed: it is the best allowed one
    wall = np.where(follow, 0.0, -np.inf)
    back = np.zeros(scores.shape, dtype=np.int64)
    best_C = scores[0] + np.where(first, 0.0, -np.inf)
    columns = np.arange(scores.shape[1])
    for i in range(1, len(scores)):
        reach_CC = best_C[:, None] + wall
        back[i] = reach_CC.argmax(0)
        best_C = reach_CC[back[i], columns] + scores[i]
    best_C = best_C + np.where(last, 0.0, -np.inf)
    if not np.isfinite(best_C.max()):
        return greedy
    path = np.empty(len(scores), dtype=np.int64)
    path[-1] = best_C.argmax()
    for i in range(len(scores) - 1, 0, -1):
        path[i - 1] = back[i, path[i]]
    return path


# ── scores ───────────────────────────────────────────────────────────────────────────────────────────────────


def entity_scores(
    gold: Sequence[Sequence[str]], guess: Sequence[Sequence[str]], strict: str | None = None
) -> dict[str, float]:
    """precision, recall, f1 over all entities; f1_macro over labels; f1 of each label as "f1/LABEL"; word accuracy.

    `strict` names the scheme for seqeval's strict mode; None is conlleval's lenient reading.
    """
    hits, guessed, true = Counter[str](), Counter[str](), Counter[str]()
    right = words = 0
    for gold_tags, guess_tags in zip(gold, guess, strict=True):
        if len(gold_tags) != len(guess_tags):
            raise EverybertError(f"a sentence of {len(gold_tags)} words has {len(guess_tags)} predicted tags")
        read = entities if strict is None else lambda tags: strict_entities(tags, strict)
        a, b = set(read(gold_tags)), set(read(guess_tags))
        true.update(e.label for e in a)
        guessed.update(e.label for e in b)
        hits.update(e.label for e in a & b)
        right += sum(x == y for x, y in zip(gold_tags, guess_tags))
        words += len(gold_tags)
    kinds = sorted(true | guessed)
    precision, recall, f1 = ratios(hits.total(), guessed.total(), true.total())
    each = {k: float(ratios(hits[k], guessed[k], true[k])[2]) for k in kinds}
    return {
        "precision": float(precision),
        "recall": float(recall),
        "f1": float(f1),
        "f1_macro": float(np.mean(list(each.values()))) if each else 0.0,
        "accuracy": right / max(words, 1),
        **{f"f1/{k}": value for k, value in each.items()},
    }
