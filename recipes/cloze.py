"""Cloze questions: question answering examples made from plain text.

    python recipes/cloze.py texts/ --out cloze.jsonl --count 50000
    everybert finetune answer --model MODEL --train cloze.jsonl --out answerer

A name or number of a sentence is replaced by a wh-word and becomes the answer. Span selection (Glass et al. 2020): the
passage does not contain the sentence, so the answer occurs in it once more. Unsupervised question answering (Lewis et
al. 2019): the passage contains the sentence, and the question is a clause of it with words dropped and swapped.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everybert.errors import EverybertError
from everybert.files import atomic_file
from everybert.text.readers import read_documents
from everybert.text.sentences import split_sentences

_NUMBER = r"(?:\d[\d,.]*\d|\d)(?:%|[kKMB]|\s(?:million|billion|thousand|percent))?"
_NAME = r"[A-Z][\w’'-]*(?:\s(?:(?:of|the|de|von|van|and)\s)?[A-Z][\w’'-]*){0,4}"
_SPAN = re.compile(rf"(?<![\w.-])(?:{_NAME}|{_NUMBER})(?![\w-])")
_YEAR = re.compile(r"1\d{3}|20\d{2}")
_PLACE = re.compile(r"\b(?:in|at|near|from|to|of)$", re.IGNORECASE)
"""Words before a name that may be a place."""
_MONTH = re.compile("(January|February|March|April|May|June|July|August|September|October|November|December)")
_STARTERS = re.compile(
    "The|A|An|In|On|At|It|He|She|They|This|That|These|Those|However|Although|After|Before|When|While|As"
    "|For|From|With|But|And|Or|If|There|Since|During|His|Her|Its|Their|I|We|You|One|Some|Many|Most|Other"
    "|Another|Both|By|To|Of"
)
_WH = re.compile("how|many|much|what|when|where|which|who|year|month|number")
LONGEST, SHORTEST = 1200, 200
"""Characters of a passage."""
DROPPED, SWAPPED = 0.15, 0.1
"""Shares of the words of a question that are dropped and swapped, if the passage contains the sentence."""
ALONE = 0.3
"""Share of these passages that consist of that sentence only."""
JOINED, SHORT = 0.5, 120
"""Share of those that are joined by "and" with another sentence of at most so many characters."""


@dataclass(frozen=True)
class Cloze:
    """A question made from a text."""

    question: str
    context: str
    answer: str
    start: int
    """Character at which the answer begins in the context."""

    def row(self, number: int) -> dict[str, Any]:
        """A row in the SQuAD format of `datasets`, which `everybert finetune answer` reads."""
        answers = {"text": [self.answer], "answer_start": [self.start]}
        return {"id": f"cloze-{number}", "question": self.question, "context": self.context, "answers": answers}


def cloze_questions(
    documents: Iterable[str], seed: int = 0, each: int = 2, kept: float = 0.5, alone: float = ALONE
) -> Iterator[Cloze]:
    """Up to `each` questions per passage, in the order of the documents. The seed decides the random choices.

    In a share `kept` of the cases, the passage contains the sentence that the question is made of, and in a share
    `alone` of these it consists of that sentence, or of that and one other.
    """
    for number, document in enumerate(documents):
        rng = random.Random(f"{seed} {number}")
        for sentences in passages(document):
            yield from _of_passage(sentences, rng, each, kept, alone)


def passages(document: str) -> Iterator[list[str]]:
    """The document's sentences in runs of at most LONGEST characters; no run crosses a paragraph's end."""
    for paragraph in document.splitlines():
        run: list[str] = []
        for sentence in split_sentences(paragraph):
            if run and sum(map(len, run)) + len(run) + len(sentence) > LONGEST:
                yield run
                run = []
            run.append(sentence)
        if run:
            yield run


def _of_passage(sentences: list[str], rng: random.Random, each: int, kept: float, alone: float) -> Iterator[Cloze]:
    if len(sentences) < 3 or sum(map(len, sentences)) < SHORTEST:
        return
    found = [(i, span) for i, sentence in enumerate(sentences) for span in spans(sentence)]
    rng.shuffle(found)
    asked: set[str] = set()
    for i, (at, span) in found:
        again = sentences[i].count(span) > 1  # the question would contain its answer
        if again or span in asked or len(sentences[i]) < 30:
            continue
        if rng.random() < kept:
            question = noised(ask(*clause(sentences[i], at, span), rng), rng)
            context, start = " ".join(sentences), sum(len(s) + 1 for s in sentences[:i]) + at
            if rng.random() < alone:
                context, start = shortened(sentences, i, at, rng)
            cloze = Cloze(question, context, span, start)
        else:
            context = " ".join(s for j, s in enumerate(sentences) if j != i)
            elsewhere = re.search(rf"(?<!\w){re.escape(span)}(?!\w)", context)
            if elsewhere is None:
                continue
            cloze = Cloze(ask(sentences[i], at, span, rng), context, span, elsewhere.start())
        asked.add(span)
        yield cloze
        if len(asked) == each:
            return


def shortened(sentences: list[str], i: int, at: int, rng: random.Random) -> tuple[str, int]:
    """A sentence as a passage, or joined with another short one by "and": (passage, start of the span)."""
    sentence = sentences[i]
    others = [s for s in (*sentences[:i], *sentences[i + 1 :]) if len(s) <= SHORT and spans(s)]
    if not others or len(sentence) > SHORT or rng.random() >= JOINED:
        return sentence, at
    other = rng.choice(others)
    if rng.random() < 0.5:
        return f"{sentence.rstrip('.!?')} and {other}", at
    head = f"{other.rstrip('.!?')} and "
    return head + sentence, len(head) + at


def clause(sentence: str, at: int, span: str) -> tuple[str, int, str]:
    """The clause that contains the span, if it has enough other words: (clause, position in it, span)."""
    begin = max((m.end() for m in re.finditer(r"[,;:]\s", sentence[:at])), default=0)
    stop = re.search(r"[,;:]\s", sentence[at + len(span) :])
    end = len(sentence) if stop is None else at + len(span) + stop.start()
    if len(sentence[begin:end].split()) - len(span.split()) < 4:
        return sentence, at, span
    return sentence[begin:end], at - begin, span


def noised(question: str, rng: random.Random) -> str:
    """The question with some words dropped and some neighbours swapped."""
    words = question.rstrip("?").split()
    left = [w for w in words if _WH.fullmatch(w.lower()) or rng.random() >= DROPPED] or words
    for i in range(1, len(left) - 1):
        if rng.random() < SWAPPED:
            left[i], left[i + 1] = left[i + 1], left[i]
    return " ".join(left) + "?"


def spans(sentence: str) -> list[tuple[int, str]]:
    """(start, text) of the names and numbers of a sentence. A single capitalised word at its start does not count."""
    found = []
    for match in _SPAN.finditer(sentence):
        start, text = match.start(), match.group()
        first, _, rest = text.partition(" ")
        if _STARTERS.fullmatch(first):
            if not rest or not (rest[0].isupper() or rest[0].isdigit()):
                continue
            start, text = start + len(first) + 1, rest
        elif start == 0 and not rest and not text[0].isdigit():
            continue
        found.append((start, text))
    return found


def ask(sentence: str, at: int, span: str, rng: random.Random) -> str:
    """The sentence as a question: a wh-word in place of the span, or at the front."""
    before, after = sentence[:at].strip(), sentence[at + len(span) :].strip()
    after = after.rstrip(".!?;: ")
    if _YEAR.fullmatch(span):
        wh = rng.choice(("when", "what year", "in what year"))
        before = re.sub(r"\b[Ii]n$", "", before).strip() if wh != "what year" else before
    elif span[0].isdigit():
        wh = rng.choice(("how many", "how much", "what number of"))
    elif _MONTH.fullmatch(span):
        wh = "what month"
    elif _PLACE.search(before) and rng.random() < 0.6:
        wh = rng.choice(("where", "where", "what place"))
        before = _PLACE.sub("", before).strip() if wh == "where" else before
    else:
        wh = rng.choice(("what", "who", "which", "what"))
    first, _, rest = before.partition(" ")
    before = f"{first.lower()} {rest}".strip() if _STARTERS.fullmatch(first) else before
    parts = (wh, before, after) if rng.random() < 0.5 else (before, wh, after)
    text = " ".join(part for part in parts if part).replace(" ,", ",").strip()
    return text[0].upper() + text[1:] + "?"


def write_cloze(documents: Iterable[str], out: str | Path, count: int, seed: int = 0) -> int:
    """Write up to `count` questions as JSON lines. Returns the number of questions."""
    made = 0
    with atomic_file(out) as draft, draft.open("w", encoding="utf-8") as file:
        for made, cloze in enumerate(cloze_questions(documents, seed), 1):
            file.write(json.dumps(cloze.row(made), ensure_ascii=False) + "\n")
            if made == count:
                break
        if not made:
            raise EverybertError("the text gives no questions: it needs paragraphs of sentences that share names")
    return made


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="files or folders of text")
    parser.add_argument("--out", type=Path, required=True, help="file of questions to write (JSON lines)")
    parser.add_argument("--count", type=int, default=100_000, help="largest number of questions")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choices")
    args = parser.parse_args()
    made = write_cloze(read_documents(args.files), args.out, args.count, args.seed)
    print(f"{made:,} questions in {args.out}")


if __name__ == "__main__":
    main()
