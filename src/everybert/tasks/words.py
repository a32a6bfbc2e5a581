"""Words of raw text, and the schemes in which entities are written as one tag per word.

CoNLL files come as words: "U.S.", "don't" or "do" + "n't", "10-year" or "10" + "-" + "year", as their makers chose. A
tagger that reads other words than it was trained on sees pieces that were never labelled. So the split is learnt from
the training words, saved in the model folder, and applied to raw text:

1. White space separates. Each Chinese or Japanese character (Han, kana) is a word.
2. Punctuation at either end of a stretch is split off, one word per mark, or per run of one mark ("...").
3. Marks that occur inside training words ("-" in "10-year") stay inside; the others split there. Addresses
   (https://…, a@b.org) stay whole.
4. Endings that were words of their own ("'s", "n't") are split off; words seen whole ("U.S.", ":)") stay whole.

| scheme | an entity of three words, of one word                            |
|--------|------------------------------------------------------------------|
| IOB1   | I-X I-X I-X, I-X; B-X only after another X (CoNLL-2003)          |
| BIO    | B-X I-X I-X, B-X                                                 |
| BIOES  | B-X I-X E-X, S-X (BILOU writes L for E and U for S)              |
| plain  | any label per word (parts of speech): no entities                |
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import NamedTuple

from everybert.errors import EverybertError

KEPT = 4096
"""The most words that are stored as "seen whole"."""
APOSTROPHES = "'’"
RUN = re.compile(r"(.)\1*", re.DOTALL)
"""A run of one character."""
IDEOGRAPH = re.compile("([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff])")
ABBREVIATION = re.compile(r"(?:[^\W\d_]\.){2,}")
ADDRESS = re.compile(r"(?:https?://|www\.)\S*\w/?|[\w.+-]+@[\w-]+(?:\.\w+)+")


class Word(NamedTuple):
    """A word and its place: text[start:end]."""

    text: str
    start: int
    end: int


@dataclass(frozen=True)
class Splitter:
    """How raw text is split into words. The default serves models whose training words are unknown."""

    inside: str = ".,'’-_/&@:+"
    """Punctuation allowed inside a word."""
    digits: str = ".,:/-"
    """Punctuation allowed between two digits."""
    endings: tuple[str, ...] = ()
    """Endings that are words of their own, lower case, longest first."""
    whole: frozenset[str] = frozenset()
    """Words that the rules would split but that stay whole, lower case."""

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.whole), default=0)

    def split(self, text: str) -> list[Word]:
        """The words of a text with their places."""
        words: list[Word] = []
        for stretch in re.finditer(r"\S+", text):
            start = stretch.start()
            for part in IDEOGRAPH.split(stretch.group()):
                work = [(start, start + len(part))] if part else []  # still to be cut, the leftmost last
                start += len(part)
                while work:
                    a, b = work.pop()
                    first, stop = self._part(text, a, b)
                    if (first, stop) == (a, b):
                        words.append(Word(text[a:b], a, b))
                    else:
                        work += [(x, y) for x, y in ((stop, b), (first, stop), (a, first)) if x < y]
        return words

    def _part(self, text: str, a: int, b: int) -> tuple[int, int]:
        """What to split off text[a:b], which has no white space; (a, b) if it is one word.

        One word: seen whole in training, an abbreviation (U.S.), an address, or without marks to split off.
        """
        word = text[a:b] if b - a <= 2048 else ""
        known = word.lower() in self.whole or word.lower() in self.endings
        if b - a == 1 or known or ABBREVIATION.fullmatch(word) or ADDRESS.fullmatch(word):
            return a, b
        if is_mark(text[a]):  # a word kept whole (":)"), else the run of this mark
            sizes = range(min(self._longest, b - a), 1, -1)
            size = next((n for n in sizes if text[a : a + n].lower() in self.whole), 0)
            return a, a + size if size else RUN.match(text, a, b).end()  # type: ignore[union-attr]
        if is_mark(text[b - 1]):
            start = b - 1
            while text[start - 1] == text[b - 1]:
                start -= 1
            return start, b
        for ending in self.endings:
            start = b - len(ending)
            if start > a and text[start:b].lower() == ending:
                return start, b
        for i in range(a + 1, b - 1):
            if is_mark(text[i]) and text[i] not in self.inside:
                if not (text[i] in self.digits and text[i - 1].isdigit() and text[i + 1].isdigit()):
                    return i, RUN.match(text, i, b).end()  # type: ignore[union-attr]
        return a, b

    def state(self) -> dict:
        """JSON values for the model folder."""
        return asdict(self) | {"endings": list(self.endings), "whole": sorted(self.whole)}

    @classmethod
    def from_state(cls, state: dict) -> "Splitter":
        """From the values that `state` returned."""
        endings, whole = (map(str, state[name]) for name in ("endings", "whole"))
        return cls(str(state["inside"]), str(state["digits"]), tuple(endings), frozenset(whole))


def is_mark(character: str) -> bool:
    """Punctuation or a symbol."""
    return unicodedata.category(character)[0] in "PS"


def learn_splitter(sentences: Iterable[Sequence[str]]) -> Splitter:
    """The splitter that splits raw text into words like these.

    A mark stays inside words if more training words contain it than have it as a word of its own between two others
    (counted separately between digits). Words that begin with an apostrophe, and "n't", are endings. Words seen at
    least twice, and more often than split, are kept whole.
    """
    inside, alone = Counter[tuple[str, bool]](), Counter[tuple[str, bool]]()  # (mark, whether between digits)
    endings, whole, joined = Counter[str](), Counter[str](), Counter[str]()
    for sentence in sentences:
        for i, word in enumerate(sentence):
            low = word.lower()
            if ADDRESS.fullmatch(word) or not word:
                continue
            if i and not word.isalnum():
                joined[sentence[i - 1].lower() + low] += 1
            marks = [j for j in range(1, len(word) - 1) if is_mark(word[j])]
            inside.update({(word[j], word[j - 1].isdigit() and word[j + 1].isdigit()) for j in marks})
            if len(set(word)) == 1 and is_mark(word[0]):
                before, after = sentence[i - 1][-1:] if i else "", "".join(sentence[i + 1 : i + 2])[:1]
                if before.isalnum() and after.isalnum():
                    alone[word[0], before.isdigit() and after.isdigit()] += 1
            elif (word[0] in APOSTROPHES and word[1:].isalpha()) or re.fullmatch(f"n[{APOSTROPHES}]t", low):
                endings[low] += 1
            elif marks or is_mark(word[0]) or is_mark(word[-1]):
                whole[low] += 1

    def inner_marks(digits: bool) -> str:
        return "".join(sorted(c for c, d in inside if d == digits and inside[c, d] > alone[c, d]))

    plain = Splitter(inner_marks(False), inner_marks(True), tuple(sorted(endings, key=lambda e: (-len(e), e))))
    odd = [w for w, times in whole.most_common() if times > max(1, joined[w]) and len(plain.split(w)) > 1]
    return replace(plain, whole=frozenset(odd[:KEPT]))


# ── tag schemes ──────────────────────────────────────────────────────────────────────────────────────────────


class Entity(NamedTuple):
    """Words [start, stop) have this label."""

    label: str
    start: int
    stop: int


def split_tag(tag: str) -> tuple[str, str]:
    """("B", "PER") of "B-PER"; ("O", "") of "O". BILOU's L and U become E and S."""
    prefix, _, label = tag.partition("-")
    return {"L": "E", "U": "S"}.get(prefix, prefix), label


def find_scheme(tags: Iterable[str]) -> str:
    """The scheme of these tags: BIOES if one ends an entity or is one by itself, BIO (IOB1 too), or plain."""
    marked = {tag for tag in tags if tag != "O"}
    if not marked or not all(re.match("[BIESLU]-.", tag) for tag in marked):
        return "plain"
    return "BIOES" if any(tag[0] in "ESLU" for tag in marked) else "BIO"


def entities(tags: Sequence[str]) -> list[Entity]:
    """The entities of one sentence as conlleval (and seqeval by default) reads them.

    Lenient: a change of label begins a new entity, and so does an I- or E- after O, E- or S-.
    """
    spans: list[Entity] = []
    start, before = 0, ("O", "")
    for i, tag in enumerate([*map(split_tag, tags), ("O", "")]):
        changed = before[1] != tag[1]
        if before[0] != "O" and (before[0] in "ES" or tag[0] in "BSO" or changed):
            spans.append(Entity(before[1], start, i))
        if tag[0] != "O" and (tag[0] in "BS" or before[0] in "ESO" or changed):
            start = i
        before = tag
    return spans


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


def convert_tags(tags: Sequence[str], scheme: str) -> list[str]:
    """The same entities as well-formed BIO or BIOES tags, whatever scheme they were in."""
    return write_tags(entities(tags), len(tags), scheme)
