"""The model card of everybert-small: description, training data and scores, from the results of the runs."""

from __future__ import annotations

import json
from pathlib import Path

from small_adapters import ADAPTERS, best_adapters
from small_scores import best, kept_runs

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

The default model of everybert: an English BERT with six pre-norm layers of width 512 (the layout of megatron-bert), an
uncased WordPiece vocabulary of 30,000, a masked language model head and a next-sentence head. It has 35.1M parameters,
stored in int8 (one byte per weight, one scale per row), and adapters for eight tasks. It was trained from scratch on
one H200 with this project's code.

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
## Training text

83M words of English in 133,000 documents, of which half a percent (whole documents) was held out. None of the text is
part of this folder.

| source | share of the words | licence |
|---|---|---|
| English Wikipedia: featured articles, core articles 2014 and 2021, new articles 2018 | 58 % | CC BY-SA 3.0 |
| Simple English Wikipedia | 20 % | CC BY-SA |
| public-domain books (238, each cut at 400 kB) | 11 % | public domain (US) |
| OpenStax textbooks | 7 % | CC BY 4.0 |
| Wikinews, MedQuAD | 5 %, including the next row | CC BY 2.5, CC BY |
| task dialogues, children's stories, World Factbook | | CC BY-SA, CC BY, public domain |

The adapters were trained on SST-2, CoLA, MRPC and STS-B (GLUE), SICK, the dev and test sets of SNLI, UD English EWT,
WNUT-17, Wikigold, the Broad Twitter Corpus, questions of SQuAD 1.1's dev set, cloze questions generated from the text
above, and sentence similarities computed by all-MiniLM-L6-v2 (Apache-2.0).
"""

FINE_TUNED = """## Fine-tuning scores

Dev sets, the published int8 model, mean over the seeds with the 95 % interval. *SET+own* was first pre-trained on the
texts of the training set, *SET+cloze* and *SET+nli* were first fine-tuned on cloze questions and on entailment.

The weights are larger than those of other BERT models, so the best learning rates are larger, too: 1e-4 to 4e-4 for
full fine-tuning. everybert chooses such a rate by default. The pooler was trained for next-sentence prediction;
fine-tuning initialises it again by default (`--new-pooler`).
"""

LIMITS = """
## Limitations

- The model is small and was trained on little text, most of it encyclopaedic. It knows few facts, and its predictions
  repeat the biases of its sources. For "the man went to the [MASK] to buy a [MASK] of milk" it prefers "farm"; "store"
  is its seventh candidate.
- Answers to questions may contain too many or too few words. For short texts, the qa adapter was trained on sentences
  from templates that state two or three facts ("Rosa left school in 1912 and Fatima left school in 2016"). It is more
  reliable on such sentences than on others. "X lives in A and Y lives in B" is one of the templates, so the example
  above shows the adapter at its best.
- Labels are predictions with a probability. Do not use them alone where decisions matter.
- English only, lower case only, at most 512 tokens per window (longer texts are read in several windows).
"""


def write_card(work: Path, out: Path) -> None:
    """Write README.md, to be placed beside the weights."""
    parts = [HEAD, training(work), SOURCES, scores(work / "scores"), adapters(work), LIMITS]
    out.write_text("\n".join(part.strip("\n") + "\n" for part in parts if part), "utf-8")


def training(work: Path) -> str:
    """Duration, number of tokens, and scores on held-out text."""
    rows = [json.loads(line) for line in (work / "run" / "log.jsonl").read_text("utf-8").splitlines()]
    last = [row for row in rows if "tokens" in row][-1]
    lines = [
        "## Training",
        "",
        "![loss](loss.png)",
        "",
        f"{last['step']:,} steps, {last['tokens'] / 1e9:.2f}B tokens, {last['seconds'] / 60:.1f} minutes on one "
        "NVIDIA H200, including start-up and evaluation.\nThe loss rises where sequences of 512 tokens follow those of "
        "128. Recipe: `recipes/everybert-small.toml`; commands:\n`recipes/everybert_small.py`.",
        "",
        "Held-out documents, 15 % of the tokens masked. *full* is running text; in half of the *pairs*, the second "
        "text is\na random one.",
        "",
        "| weights | examples | tokens | masked tokens right | perplexity | next sentence right |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in json.loads((work / "heldout.json").read_text("utf-8")).items():
        weights, kind, length = name.split()
        pairs = f"{found['pair_accuracy']:.1%}" if "pair_accuracy" in found else "–"
        cells = (weights, kind, length, f"{found['accuracy']:.1%}", f"{found['perplexity']:.2f}", pairs)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def scores(folder: Path) -> str:
    """Scores of full fine-tuning and LoRA with the best settings, one row per set and mode."""
    lines = [FINE_TUNED, "| set | mode | score | settings |", "|---|---|---|---|"]
    for (label, name), modes in kept_runs(folder).items():
        for mode, runs in modes.items() if label == "int8" else ():
            settings, found = best(runs)
            lines.append(f"| {name} | {mode} | {found} | {settings.replace(',', ', ')} |")
    return "\n".join(lines) if len(lines) > 3 else ""


def adapters(work: Path) -> str:
    """The score of each adapter on its dev set."""
    lines = ["## Adapters", "", "| adapter | task | default for | score | settings |", "|---|---|---|---|---|"]
    for name, found in best_adapters(work).items():
        adapter, score = ADAPTERS[name], f"{found.metric} {interval([100 * value for value in found.scores])}"
        if found.polished is not None:
            score += f"; as published {100 * found.polished:.2f}"
        cells = (name, adapter.task, ", ".join(adapter.default) or "–", score, found.settings.replace(",", ", "))
        lines.append(f"| {' | '.join(cells)} |")
    polished = any(found.polished is not None for found in best_adapters(work).values())
    note = "*As published*: after further training on short texts (`everybert_small.py polish`)."
    return "\n".join(lines + (["", note] if polished else []))
