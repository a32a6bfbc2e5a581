"""The model card of everybert-small: what it is, what it was made from, and its scores, from what the runs left."""

from __future__ import annotations

import json
from pathlib import Path

from small_adapters import JOBS, pick
from small_scores import table

from everybert.tasks.metrics import interval

HEAD = """---
language: en
license: apache-2.0
library_name: everybert
pipeline_tag: fill-mask
tags:
- bert
- megatron-bert
- fill-mask
- sentence-similarity
---

# everybert-small

A BERT for English that comes with the library: six pre-norm layers of width 512 (megatron-bert's layout), an uncased
WordPiece vocabulary of 30,000, masked-word and next-sentence heads, 35.1M parameters in int8 (a byte a weight, one
scale a row), and adapters for eight tasks on the one trunk. Trained from nothing on one H200 by this project's code.

```python
import everybert

model = everybert.load("everybert-small")
print(model.fill("Istanbul is a great [MASK] to visit"))
print(model.classify("rich veins of funny stuff in this movie"))
print(model.classify(("A soccer game with multiple males playing.", "Some men are playing a sport.")))
print(model.tag("John Smith lives in New York"))
print(model.answer("Where does Matt live?", "Matt lives in Canada and Sinan lives in California"))
```
"""

SOURCES = """
## Text it was trained on

83M words of English in 133,000 documents, of which half a percent was held out (whole documents). None of it is part of
this folder.

| source | share of the words | licence |
|---|---|---|
| English Wikipedia: featured articles, core articles 2014 and 2021, new articles 2018 | 58 % | CC BY-SA 3.0 |
| Simple English Wikipedia | 20 % | CC BY-SA |
| public-domain books (238, each cut at 400 kB) | 11 % | public domain (US) |
| OpenStax textbooks | 7 % | CC BY 4.0 |
| Wikinews, MedQuAD | 5 % with those below | CC BY 2.5, CC BY |
| task dialogues, children's stories, World Factbook | | CC BY-SA, CC BY, public domain |

Adapters: SST-2, CoLA, MRPC, STS-B (GLUE), SICK and SNLI's dev and test sets, UD English EWT, WNUT-17, wikigold, the
Broad Twitter Corpus, questions of SQuAD 1.1's dev set, questions made from the text above, and likenesses that
all-MiniLM-L6-v2 (Apache-2.0) gave to its sentences.
"""

RATES = """Its weights are larger than those of other BERTs, so it wants larger learning rates: 1e-4 to 4e-4 in full,
which everybert chooses by itself. Its pooler was made for next sentences; `--new-pooler` or `--reinit 1` begins it
anew."""

LIMITS = """
## What it is not for

It is small and has seen little text, most of it encyclopaedic: it knows few facts, and its fillings repeat the biases
of its sources (a man who wants milk goes to the farm; the store is its seventh guess). Answers to questions may take
too much, or too little; for short texts the adapter was trained on made-up sentences of two or three facts ("Rosa left
school in 1912 and Fatima left school in 2016"; "X lives in A and Y lives in B" is one of their forms, so the example
above shows it at its best), and it is surer of such sentences than of others. Labels are guesses
with a probability; people must decide where decisions matter. English only, lower case only, at most 512 tokens at a
time (longer texts are read in windows).
"""


def write_card(work: Path, out: Path) -> None:
    """README.md beside the weights."""
    parts = [HEAD, training(work), SOURCES, scores(work / "scores"), adapters(work), LIMITS]
    out.write_text("\n".join(part.strip("\n") + "\n" for part in parts if part), "utf-8")


def training(work: Path) -> str:
    """How long, on how much, and what it came to."""
    rows = [json.loads(line) for line in (work / "run" / "log.jsonl").read_text("utf-8").splitlines()]
    last = [row for row in rows if "tokens" in row][-1]
    lines = [
        "## Training",
        "",
        "![loss](loss.png)",
        "",
        f"{last['step']:,} steps, {last['tokens'] / 1e9:.2f}B tokens seen, {last['seconds'] / 60:.1f} minutes on one "
        "NVIDIA H200, the start and the evaluations included. The loss leaps where texts of 512 tokens follow those of "
        "128. `recipes/everybert-small.toml` is the recipe and `recipes/everybert_small.py` runs all of it again.",
        "",
        "Documents that were held out, 15 % of the tokens masked (*full* is running text; of BERT's *pairs* half are "
        "two texts that have nothing to do with each other):",
        "",
        "| weights | examples | tokens | masked tokens right | perplexity | next sentence right |",
        "|---|---|---|---|---|---|",
    ]
    for name, said in json.loads((work / "heldout.json").read_text("utf-8")).items():
        weights, kind, length = name.split()
        pairs = f"{said['pair_accuracy']:.1%}" if "pair_accuracy" in said else "–"
        cells = (weights, kind, length, f"{said['accuracy']:.1%}", f"{said['perplexity']:.2f}", pairs)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def scores(folder: Path) -> str:
    """Full fine-tuning and adapters, means over the seeds."""
    rows = {name: cells for (label, name), cells in table(folder).items() if label == "int8"}
    lines = ["## Fine-tuned (dev sets, the trunk as shipped)", "", RATES, "", "| set | full | lora |", "|---|---|---|"]
    return "\n".join(lines + [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]) if rows else ""


def adapters(work: Path) -> str:
    """What each adapter reached on its held-out data."""
    lines = ["## Adapters", "", "| adapter | task | used by itself for | score |", "|---|---|---|---|"]
    for name, best in pick(work).items():
        job, percent = JOBS[name], interval([100 * value for value in best.scores])
        given = f", {best.settings.replace(',', ', ')}" if best.settings else ""
        score = f"{best.metric} {percent}{given}"
        if best.polished is not None:
            score += f"; as shipped, after short texts, {100 * best.polished:.2f}"
        lines.append(f"| {name} | {job.task} | {', '.join(job.default) or '–'} | {score} |")
    return "\n".join(lines)
