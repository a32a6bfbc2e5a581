"""Reproduce everybert-classic: the BERT of the paper and of lectures, with 4 layers of width 256.

    python recipes/everybert_classic.py train  --work W --text part-*.txt    # corpus, pre-training, held-out scores
    python recipes/everybert_classic.py scores --work W --tasks DIR          # GLUE dev sets, three seeds each
    python recipes/everybert_classic.py folder --work W --out src/everybert/models/everybert-classic

Each step skips work that is already done. The tokenizer is that of the published folder: a WordPiece trained on parts 0
to 2 of the text. DIR contains glue/ as its authors publish it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from everybert_small import plot_loss
from small_scores import kept_runs, scores

from everybert.corpus.build import build_corpus
from everybert.files import atomic_folder
from everybert.inference.model import load
from everybert.store.hub import resolve
from everybert.tasks.metrics import interval
from everybert.training.evaluate import score_corpus
from everybert.training.pretrain import pretrain

RECIPE = Path(__file__).parent / "everybert-classic.toml"
MINI = {"SST-2": 85.9, "CoLA": 0.0, "MRPC": 81.1, "RTE": 57.9, "STS-B": 73.3}
SMALL = {"SST-2": 89.7, "CoLA": 27.8, "MRPC": 83.4, "RTE": 61.8, "STS-B": 77.0}
"""Published test scores of Google's BERT-Mini (4 × 256, as here) and BERT-Small (4 × 512), Turc et al. 2019."""
METRIC = {"SST-2": "accuracy", "CoLA": "Matthews", "MRPC": "F1", "RTE": "accuracy", "STS-B": "Spearman"}
HEAD = """---
language: en
license: apache-2.0
library_name: everybert
pipeline_tag: fill-mask
tags:
- bert
- fill-mask
---

# everybert-classic

BERT as its paper and lectures describe it, small enough to look at: 4 post-norm layers of width 256 with 4 heads;
token, position and segment embeddings that are learned and summed; GELU; an uncased WordPiece vocabulary of 30,000;
[CLS] and [SEP]. 15 % of the tokens are masked (80 % [MASK], 10 % random, 10 % unchanged), and the next-sentence head
learns on the same pairs. AdamW with warm-up and linear decay, dropout 0.1. 11.2M parameters, in int8 with one scale
per row.

Use it with `everybert explain` and `everybert attention`, or in the playground (`--model everybert-classic`): they then
show what lecture slides show. For tasks, everybert-small is the better model.

```python
import everybert

model = everybert.load("everybert-classic")
print(model.fill("Istanbul is a great [MASK] to visit"))
print(model.next_sentence("The man went to the store.", "He bought a gallon of milk."))
```
"""
SOURCES = """
## Training text

94M words of English; half a percent of the documents was held out. None of the text is part of this folder.

| source | share of the words | licence |
|---|---|---|
| English Wikipedia: featured articles, core articles 2014 and 2021, new articles 2018 | 52 % | CC BY-SA 3.0 |
| Simple English Wikipedia | 18 % | CC BY-SA |
| public-domain books (238, each cut at 400 kB) | 9 % | public domain (US) |
| OpenStax textbooks | 6 % | CC BY 4.0 |
| Wikinews, MedQuAD, dialogues, children's stories, World Factbook | 4 % | CC BY (2.5), CC BY-SA, public domain |
| podcasts (Changelog), table talk (CRD3), news at three reading levels | 4 % | CC BY-SA 4.0 |
| self-dialogues about film, music and sport | 3 % | BSD-3 |
| travel guides (OANC), Topical-Chat, Common Voice, CaSiNo, Tatoeba | 3 % | free, CDLA-Sharing, CC0, CC BY |
| DoQA, PIQA, OpenPI, WinoGrande, Social IQa, SWAG (do not evaluate on these) | 1 % | CC BY, CC BY-SA, AFL, MIT |
"""
LIMITS = """
## Limitations

It is for teaching and for experiments on small machines. It knows few facts, and its predictions repeat the biases of
its sources. English only, lower case only, at most 512 tokens per window.
"""


def train(args: argparse.Namespace) -> None:
    """W/corpus, W/run, W/fp32 (the model in fp32) and W/heldout.json."""
    if not (args.work / "corpus").exists():
        build_corpus(args.text, resolve("everybert-classic"), args.work / "corpus")
    if not pretrain(RECIPE, args.work / "corpus", args.work / "run").finished:
        return
    model = load(args.work / "run" / "model")
    if not (args.work / "fp32").exists():
        model.save(args.work / "fp32")
    kinds = (("pairs", 512), ("full", 512), ("full", 128))
    found = {f"{kind} {length}": score_corpus(model, args.work / "corpus", kind, length) for kind, length in kinds}
    (args.work / "heldout.json").write_text(json.dumps(found, indent=1), "utf-8")


def folder(args: argparse.Namespace) -> None:
    """The model in int8, its loss curve and its card, complete or absent."""
    with atomic_folder(args.out) as draft:
        model = load(args.work / "fp32", device="cpu")
        model.extras["embedding"] = {"normalize": True}
        model.write(draft, int8=True)
        plot_loss([args.work / "run" / "log.jsonl"], draft / "loss.png")
        (draft / "README.md").write_text(card(args.work), "utf-8")


def card(work: Path) -> str:
    """The model card."""
    rows = [json.loads(line) for line in (work / "run" / "log.jsonl").read_text("utf-8").splitlines()]
    last = [row for row in rows if "tokens" in row][-1]
    heldout = json.loads((work / "heldout.json").read_text("utf-8"))
    lines = [
        HEAD,
        "## Training\n\n![loss](loss.png)\n",
        f"{last['step']:,} steps, {last['tokens'] / 1e9:.2f}B tokens, {last['seconds'] / 60:.1f} minutes on one NVIDIA "
        "H200.\nThe loss rises where sequences of 512 tokens follow those of 128. Recipe: "
        "`recipes/everybert-classic.toml`; commands:\n`recipes/everybert_classic.py`.\n",
        "Held-out documents, 15 % of the tokens masked:\n",
        "| examples | tokens | masked tokens right | perplexity | next sentence right |\n|---|---|---|---|---|",
    ]
    for name, found in heldout.items():
        kind, length = name.split()
        pairs = f"{found['pair_accuracy']:.1%}" if "pair_accuracy" in found else "–"
        lines.append(f"| {kind} | {length} | {found['accuracy']:.1%} | {found['perplexity']:.2f} | {pairs} |")
    lines.append(
        "\n## Fine-tuned\n\nDev sets, fp32, all layers trained with the library's settings, mean of three seeds; "
        "beside them the published *test*\nscores of Google's BERT-Mini (4 × 256) and BERT-Small (4 × 512).\n\n"
        "| set | score | everybert-classic, dev | BERT-Mini, test | BERT-Small, test |\n|---|---|---|---|---|"
    )
    for (_, name), modes in kept_runs(work / "scores").items():
        (runs,) = modes["full"].values()
        mean = interval(runs)
        lines.append(f"| {name} | {METRIC[name]} | {mean} | {MINI[name]} | {SMALL[name]} |")
    return "\n".join([*lines, SOURCES.rstrip("\n"), LIMITS])


def main() -> None:
    """Read the command line and do one step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = {"train": train, "scores": scores, "folder": folder}
    parser.add_argument("step", choices=steps)
    parser.add_argument("--work", type=Path, required=True, help="the folder of all intermediate results")
    parser.add_argument("--text", type=Path, nargs="*", help="plain text, blank lines between documents")
    parser.add_argument("--tasks", type=Path, help="the folder of labelled sets")
    parser.add_argument("--out", type=Path, help="folder: the model folder to write")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    vars(args).update(models="fp32", modes="full", only=",".join(MINI), seeds=3, first_seed=0, set=[], tiny=False)
    args.minutes = 1e9
    steps[args.step](args)


if __name__ == "__main__":
    main()
