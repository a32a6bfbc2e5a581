"""Words of raw text, split as the tagger's training data was: what is trained is what is predicted.

A tagger labels words, and CoNLL files come as words: "U.S.", "don't" or "do" + "n't", "10-year" or "10" + "-" +
"year", as their makers chose. A tagger that meets other words than it was trained on labels pieces it never saw
labelled. So the split is learnt from the training words, kept in the model folder, and used on raw text:

1. White space separates. Each Chinese or Japanese character (Han, kana) is a word.
2. Punctuation at either end of a stretch is split off, one word a mark, or a run of one mark ("...").
3. Marks that the training words have inside ("-" in "10-year") stay inside; the others split there. Addresses
   (https://…, a@b.org) stay whole.
4. Endings that were words of their own ("'s", "n't") are split off; words seen whole ("U.S.", ":)") stay whole.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

KEPT = 4096
"""How many of the odd words seen in training are kept."""
APOSTROPHES = "'’"
IDEOGRAPH = re.compile("([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff])")
ABBREVIATION = re.compile(r"(?:[^\W\d_]\.){2,}")
ADDRESS = re.compile(r"(?:https?://|www\.)\S*\w/?|[\w.+-]+@[\w-]+(?:\.\w+)+")


class Word(NamedTuple):
    """text[start:end] of the text it was found in."""

    text: str
    start: int
    end: int


@dataclass(frozen=True)
class Splitter:
    """How words are found in raw text. The default is for text whose training words are not known."""

    inside: str = ".,'’-_/&@:+"
    """Punctuation that may stand inside a word."""
    digits: str = ".,:/-"
    """Punctuation that may stand between two digits."""
    endings: tuple[str, ...] = ()
    """Endings that are words of their own, lower case, longest first."""
    whole: frozenset[str] = frozenset()
    """Words that stay whole although the rules would split them, lower case."""

    def split(self, text: str) -> list[Word]:
        """The words of a text with their places."""
        cuts: list[tuple[int, int]] = []
        for stretch in re.finditer(r"\S+", text):
            start = stretch.start()
            for part in IDEOGRAPH.split(stretch.group()):
                cuts += self._cut(text, start, start + len(part)) if part else []
                start += len(part)
        return [Word(text[a:b], a, b) for a, b in cuts]

    def _cut(self, text: str, left: int, right: int) -> list[tuple[int, int]]:
        """The places of the words in a stretch without white space: peeled from both ends, then cut inside."""
        longest = max(map(len, self.whole), default=0)
        found: list[tuple[int, int]] = []
        work = [(left, right)]  # what is still to be cut, the leftmost on top
        while work:
            a, b = work.pop()
            if b - a == 1 or self._stands(text, a, b):
                found.append((a, b))
            elif is_mark(text[a]):  # a word kept whole (":)"), else the run of this mark
                sizes = range(min(longest, b - a), 1, -1)
                size = next((n for n in sizes if text[a : a + n].lower() in self.whole), 0)
                cut = a + size if size else _run(text, a, b)
                found.append((a, cut))
                if cut < b:
                    work.append((cut, b))
            else:
                start, stop = self._inner(text, a, b)
                work += [(x, y) for x, y in ((stop, b), (start, stop), (a, start)) if (a, b) != (x, y) and x < y]
                if (start, stop) == (a, b):
                    found.append((a, b))
        return found

    def _inner(self, text: str, a: int, b: int) -> tuple[int, int]:
        """The first thing to cut out of text[a:b], which begins with no mark; (a, b) when it is one word."""
        if is_mark(text[b - 1]):
            mark, start = text[b - 1], b - 1
            while text[start - 1] == mark:
                start -= 1
            return start, b
        for ending in self.endings:
            start = b - len(ending)
            if start > a and text[start:b].lower() == ending:
                return start, b
        for i in range(a + 1, b - 1):
            if is_mark(text[i]) and text[i] not in self.inside:
                if not (text[i] in self.digits and text[i - 1].isdigit() and text[i + 1].isdigit()):
                    return i, _run(text, i, b)
        return a, b

    def _stands(self, text: str, a: int, b: int) -> bool:
        """Whether a stretch with marks is one word: seen so, an abbreviation (U.S.), an address."""
        if b - a > 2048:
            return False
        word = text[a:b]
        low = word.lower()
        seen = low in self.whole or low in self.endings
        return seen or bool(ABBREVIATION.fullmatch(word) or ADDRESS.fullmatch(word))

    def state(self) -> dict:
        """As JSON keeps it."""
        return {
            "inside": self.inside,
            "digits": self.digits,
            "endings": list(self.endings),
            "whole": sorted(self.whole),
        }

    @classmethod
    def of(cls, state: dict) -> Splitter:
        """From what `state` gave."""
        return cls(state["inside"], state["digits"], tuple(state["endings"]), frozenset(state["whole"]))


def is_mark(character: str) -> bool:
    """Punctuation or a symbol."""
    return unicodedata.category(character)[0] in "PS"


def _run(text: str, a: int, b: int) -> int:
    """The end of the run of equal characters at a."""
    end = a + 1
    while end < b and text[end] == text[a]:
        end += 1
    return end


def learn_splitter(sentences: Iterable[Sequence[str]]) -> Splitter:
    """The splitter under which raw text falls into words like these.

    A mark stays inside words where it stands inside more training words than it is a word between two others
    (counted apart between digits); a word that begins with an apostrophe, and "n't", is an ending; words seen twice
    or more, and more often than apart, that this would still split are kept whole.
    """
    inside, alone, endings, whole = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    digits, alone_digits, joined = Counter[str](), Counter[str](), Counter[str]()
    for sentence in sentences:
        for i, word in enumerate(sentence):
            low = word.lower()
            if ADDRESS.fullmatch(word) or not word:
                continue
            if i and not word.isalnum():
                joined[sentence[i - 1].lower() + low] += 1
            marks = [j for j in range(1, len(word) - 1) if is_mark(word[j])]
            numeric = {word[j] for j in marks if word[j - 1].isdigit() and word[j + 1].isdigit()}
            digits.update(numeric)
            inside.update({word[j] for j in marks} - numeric)
            if len(set(word)) == 1 and is_mark(word[0]):
                before, after = sentence[i - 1][-1:] if i else "", "".join(sentence[i + 1 : i + 2])[:1]
                if before.isdigit() and after.isdigit():
                    alone_digits[word[0]] += 1
                elif before.isalnum() and after.isalnum():
                    alone[word[0]] += 1
            elif (word[0] in APOSTROPHES and word[1:].isalpha()) or re.fullmatch(f"n[{APOSTROPHES}]t", low):
                endings[low] += 1
            elif marks or is_mark(word[0]) or is_mark(word[-1]):
                whole[low] += 1
    plain = Splitter(
        inside="".join(sorted(c for c in inside if inside[c] > alone[c])),
        digits="".join(sorted(c for c in digits if digits[c] > alone_digits[c])),
        endings=tuple(sorted(endings, key=lambda e: (-len(e), e))),
    )
    odd = [w for w, times in whole.most_common() if times > max(1, joined[w]) and len(plain.split(w)) > 1]
    return replace(plain, whole=frozenset(odd[:KEPT]))
