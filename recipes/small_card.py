"""The model card of everybert-small: description, training data and scores, from the results of the runs."""

from __future__ import annotations

import json
from pathlib import Path

from small_adapters import ADAPTERS, best_adapters
from small_scores import MODELS, best, kept_runs

from everybert.inference.model import load
from everybert.tasks.metrics import interval

HEAD = """---
language: en
license: apache-2.0
library_name: everybert
pipeline_tag: fill-mask
tags:
- modernbert
- fill-mask
- sentence-similarity
---

# everybert-small, version 2

The default model of everybert: a small English encoder in ModernBERT's layout (rotary positions, GeGLU, pre-norm, no
biases), {layers} layers of width {hidden_size}, {heads} heads, an uncased WordPiece vocabulary of 30,000, a masked
language model head and a next-sentence head. It has {parameters:.1f}M parameters, stored in int8 (one byte per weight,
one scale per row), and adapters for eight tasks. It was trained from scratch on one H200 with this project's code.

`everybert export hf` writes it for `transformers`, which reads it as `ModernBertForMaskedLM`; the next-sentence head
and its pooler are tensors of names of ours (`own_tensors` in everybert.json), which `transformers` passes over.

```python
import everybert

model = everybert.load("everybert-small")
print(model.fill("Istanbul is a great [MASK] to visit"))
print(model.classify("rich veins of funny stuff in this movie"))
print(model.classify(("A soccer game with multiple males playing.", "Some men are playing a sport.")))
print(model.tag("John Smith lives in New York"))
print(model.answer("Where does Matt live?", "Matt lives in Canada and Sinan lives in California"))
```

None of these sentences, nor those of README.md, is in the training data of the adapters, and no sentences from
templates are. Version 1 (six pre-norm layers of width 512, learned positions) came with everybert 1.0; its adapters fit
only that.
"""

SOURCES = """
## Training text

94M words of English, of which half a percent (whole documents) was held out. None of the text is part of this folder.
Everyday text is drawn more often than its share (`alpha = 0.7`: 18 % of the training tokens).

| source | share of the words | licence |
|---|---|---|
| English Wikipedia: featured articles, core articles 2014 and 2021, new articles 2018 | 52 % | CC BY-SA 3.0 |
| Simple English Wikipedia | 18 % | CC BY-SA |
| public-domain books (238, each cut at 400 kB) | 9 % | public domain (US) |
| OpenStax textbooks | 6 % | CC BY 4.0 |
| Wikinews, MedQuAD, task dialogues, children's stories, World Factbook | 4 % | CC BY (2.5), CC BY-SA, public domain |
| everyday: podcasts (Changelog), table talk (CRD3), news at three reading levels | 4 % | CC BY-SA 4.0 |
| everyday: self-dialogues about film, music and sport | 3 % | BSD-3 |
| everyday: travel guides (OANC), Topical-Chat, Common Voice, CaSiNo, Tatoeba | 3 % | free, CDLA-Sharing, CC0, CC BY |
| everyday: DoQA, PIQA, OpenPI, WinoGrande, Social IQa, SWAG (do not evaluate on them) | 1 % | CC BY (SA), AFL, MIT |

The adapters were trained on SST-2, CoLA, MRPC and STS-B (GLUE), SICK, the dev and test sets of SNLI, UD English EWT,
WNUT-17, Wikigold, the Broad Twitter Corpus, questions of SQuAD 1.1's dev set, cloze questions generated from the text
above, and sentence similarities computed by all-MiniLM-L6-v2 (Apache-2.0).
"""

FINE_TUNED = """## Fine-tuning scores

Dev sets, the published int8 model, mean over the seeds with the 95 % interval. *SET+own* was first pre-trained on the
texts of the training set, *SET+cloze* and *SET+nli* were first fine-tuned on cloze questions and on entailment.

The weights are larger than those of other BERT models, so the best learning rates are larger, too: 1e-4 to 4e-4 for
full fine-tuning. everybert chooses such a rate by default.
"""

LIMITS = """
## Limitations

- The model is small and was trained on little text, most of it encyclopaedic. It knows few facts, and its predictions
  repeat the biases of its sources. Do not use it as a source of knowledge.
- Answers to questions may contain too many or too few words, or be about the wrong one of two things.
- Labels are predictions with a probability. Do not use them alone where decisions matter.
- English only, lower case only, at most 512 tokens per window (longer texts are read in several windows).
"""


def write_card(work: Path, out: Path) -> None:
    """Write README.md, to be placed beside the weights."""
    parts = [head(work), training(work), SOURCES, scores(work / "scores"), adapters(work), LIMITS]
    out.write_text("\n".join(part.strip("\n") + "\n" for part in parts if part), "utf-8")


def head(work: Path) -> str:
    """The description, with the sizes of the network."""
    model = load(work / MODELS["int8"], device="cpu")
    return HEAD.format(parameters=sum(p.numel() for p in model.network.parameters()) / 1e6, **vars(model.config))


def training(work: Path) -> str:
    """Duration, number of tokens, and scores on held-out text."""
    lines = [
        "## Training",
        "",
        "![loss and BLiMP over time](loss.png)",
        "",
        "| run | recipe | steps | tokens | minutes on one NVIDIA H200, start-up and evaluation included |",
        "|---|---|---|---|---|",
    ]
    for run, recipe in (("first", "everybert-small"), ("run", "everybert-small-second")):
        rows = [json.loads(line) for line in (work / run / "log.jsonl").read_text("utf-8").splitlines()]
        last = [row for row in rows if "tokens" in row][-1]
        cells = (run, f"`{recipe}`", f"{last['step']:,}", f"{last['tokens'] / 1e9:.2f}B", f"{last['seconds'] / 60:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Each run reads running text first and sentence pairs last. The second starts from the weights of the first, "
        "as they\nare in int8; the learning rate rises again there. Both, and all later steps, by "
        "`recipes/everybert_small.py`:",
        "",
        "```sh",
        "python recipes/everybert_small.py pretrain --work W --text part-[0-2].txt --everyday part-3.txt",
        "python recipes/everybert_small.py quantize --work W --tasks DIR     # then labels … folder, as it says itself",
        "```",
        "",
        "Held-out documents, 15 % of the tokens masked. *full* is running text; in half of the *pairs*, the second "
        "text is\na random one.",
        "",
        "| weights | examples | tokens | masked tokens right | perplexity | next sentence right |",
        "|---|---|---|---|---|---|",
    ]
    known = json.loads((work / "heldout.json").read_text("utf-8"))
    for name, found in known.items():
        if " " in name:
            weights, kind, length = name.split()
            pairs = f"{found['pair_accuracy']:.1%}" if "pair_accuracy" in found else "–"
            cells = (weights, kind, length, f"{found['accuracy']:.1%}", f"{found['perplexity']:.2f}", pairs)
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Without fine-tuning: BLiMP's 67,000 pairs; everyday sentences (`recipes/everyday.tsv`) with a sensible",
    ]
    lines += ["word among the first three guesses.", "", "| weights | BLiMP | everyday |", "|---|---|---|"]
    lines += [f"| {k} | {known[k]['blimp']:.1%} | {known[k]['everyday']:.0%} |" for k in ("fp32", "int8")]
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
