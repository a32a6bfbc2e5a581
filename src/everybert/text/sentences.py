"""Split text into sentences by rules: fast, without a model, deterministic.

A sentence ends at a blank line and at a stop followed by a space (an East Asian stop needs no space), unless the next
word begins with a lower-case letter or the stop belongs to an abbreviation, an initial or a list number. The rules
are made for English and usable for other languages whose sentences end with stops. Time is linear in the length of
the text: the patterns are possessive, and each stop is decided by one word on either side.
"""

import re
import tomllib
from pathlib import Path

_EAST = "。！？｡"
# A character class comes first, so that the search is a fast scan; a match consumes all that it examines.
_STOP = re.compile(
    rf"""
    ([.!?…‼⁇⁈⁉؟۔।॥։።{_EAST}\n])
    (?: (?<=\n) [^\S\n]*+ (\n)?
      | (?<!\n) ([.!?…‼⁇⁈⁉؟۔।॥։።{_EAST}]*+)
        (?: ["'“”‘’«»‹›)\]}}*_」』）】》〉〕］] | \[\d{{1,3}}\] | [ \xa0\u202f]»(?!\w) )*+
        (\s++)?
    )""",
    re.VERBOSE,
)
_NEXT = re.compile(r"""["'“”‘’„«‹»(\[{¿¡*_–—-]{0,4}(\w{0,12})""")
_OPENERS = "\"'“‘„«‹([{¿¡*_"


_LISTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_WORDS = {name: frozenset(words.split()) for name, words in _LISTS.items()}


def split_sentences(text: str) -> list[str]:
    """The sentences of a text in order, without surrounding white space."""
    pieces, start = [], 0
    for match in _STOP.finditer(text):
        if _ends(text, start, match):
            pieces.append(text[start : match.end()].strip())
            start = match.end()
    return [piece for piece in (*pieces, text[start:].strip()) if piece]


def _ends(text: str, start: int, match: re.Match[str]) -> bool:
    """Whether the sentence that began at `start` ends with this stop."""
    stop, blank, more, space = match.groups()
    if stop == "\n":
        return blank is not None
    if stop in _EAST or (more and any(c in _EAST for c in more)):
        return True
    if space is None:
        return False  # 3.14, e.g., everybert.text
    if space != " " and space.count("\n") > 1:
        return True
    following = _NEXT.match(text, match.end())
    word = following[1] if following else ""
    if word[:1].islower():
        return False
    if more or stop != ".":
        return True
    before = text[max(start, match.start() - 24) : match.start()].rsplit(None, 1)
    return _full_stop(before[-1].lstrip(_OPENERS) if before else "", word, len(before) == 1)


def _full_stop(before: str, after: str, first: bool) -> bool:
    """Whether "." between two words ends a sentence; `first` tells that `before` is the first word of the sentence."""
    small = before.lower()
    if small in _WORDS["inside"]:
        return False
    if small in _WORDS["numbered"] and after[:1].isdigit():
        return False
    if first and (before.isdigit() or len(before) == 1):
        return False  # "1. Introduction", "A. Method"
    initial = len(before) == 1 and before.isupper()
    acronym = "." in before and all(len(part) <= 2 for part in before.split("."))
    if initial or acronym or small in _WORDS["either"]:
        return after.lower() in _WORDS["starters"]
    return True
