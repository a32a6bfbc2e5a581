"""Split text into sentences by rules: fast, without a model, deterministic.

A sentence ends at a blank line and at a stop followed by a space (an East Asian stop needs no space), unless the next
word begins with a lower-case letter or the stop belongs to an abbreviation, an initial or a list number. The rules
are made for English and usable for other languages whose sentences end with stops. Time is linear in the length of
the text: the patterns are possessive, and each stop is decided by one word on either side.
"""

import re

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


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Abbreviations that never end a sentence.
_INSIDE = _words("""
    mr mrs ms dr prof st mt ft gen col maj sgt cpl capt lt cmdr adm rev fr hon sen rep gov pres supt messrs mme mlle
    hr e.g i.e eg ie cf v vs viz approx incl resp z.b d.h u.a bzw ca p.ej par.ex t.ex
""")
# Abbreviations that do not end a sentence before a number.
_NUMBERED = _words("""
    no nos nr p pp fig figs vol vols ch chap sec art eq eqs ex ver op bk
    jan feb mar apr jun jul aug sep sept oct nov dec
""")
# Abbreviations that end a sentence only before a word of _STARTERS.
_EITHER = _words("etc al inc ltd co corp bros plc jr sr dept univ est ave blvd rd ph.d")
_STARTERS = _words("""
    a an the this that these those he she it they we you i his her its their our my your there then here now in on
    at by for from to with without of as since when while where after before during until if unless although
    though because but and or nor so yet however also both all some many most much each every one two three
    another other such no not what who which why how is are was were do does did
""")


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
    if small in _INSIDE:
        return False
    if small in _NUMBERED and after[:1].isdigit():
        return False
    if first and (before.isdigit() or len(before) == 1):
        return False  # "1. Introduction", "A. Method"
    initial = len(before) == 1 and before.isupper()
    acronym = "." in before and all(len(part) <= 2 for part in before.split("."))
    if initial or acronym or small in _EITHER:
        return after.lower() in _STARTERS
    return True
