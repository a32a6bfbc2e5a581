"""The whole library in miniature: text, tokenizer, corpus, pre-training, masked tokens, fine-tuning, predictions.

Every step calls the function that users call on their own data and leaves its result in the folder. A run that was
stopped resumes when it is started again. The text and the template of the report are bundled (`everybert.data`).
"""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markdown import Markdown

from everybert import data
from everybert.corpus.build import build_corpus
from everybert.errors import EverybertError
from everybert.evaluation.evaluate import evaluate
from everybert.files import atomic_folder, is_complete, write_json, write_text
from everybert.inference.model import Model, load
from everybert.model.heads import Network
from everybert.text.tokenizer import Tokenizer
from everybert.text.train_tokenizer import train_tokenizer
from everybert.training.finetune import finetune
from everybert.training.pretrain import fit_config, pretrain
from everybert.training.recipe import Recipe

TEXTS = ("The soup was superb.", "The film was dull.", "The room was not shabby at all, it was lovely.")
"""Texts that the fine-tuned model classifies."""
MODELS = {"sentiment": "pre-trained first", "untrained-sentiment": "from random weights"}
TUNING: dict[str, Any] = {"epochs": 5, "lr": 1e-3, "batch_size": 32, "device": "cpu", "quiet": True, "overwrite": True}


def quickstart(
    out: str | Path = "quickstart", *, steps: int | None = None, size: int = 5000, console: Console | None = None
) -> dict[str, Any]:
    """Run all steps in a folder; returns the results. `steps` of pre-training and `size` in documents shorten it."""
    out, screen, began = Path(out), console or Console(), time.perf_counter()

    def title(text: str) -> None:
        screen.print(f"\n[bold]{text}[/bold]")

    write_inputs(out, size)
    title("1  Text: documents about a small world of facts")
    screen.print(*(f"  {text[:110]}" for text in data.documents(4)[1:]), sep="\n", style="dim", highlight=False)
    title("2  Tokenizer: words and pieces of words, learnt from that text")
    if not is_complete(out / "tokenizer"):
        learnt, _ = train_tokenizer((out / "world.txt").read_text("utf-8").split("\n\n"), "wordpiece", 1500)
        with atomic_folder(out / "tokenizer") as draft:
            learnt.save(draft)
    tokenizer = Tokenizer.load(out / "tokenizer")
    shown = " ".join(tokenizer.encode("Unhappy bakers sing in Paris.").tokens)
    screen.print(f'{tokenizer.size:,} tokens. "Unhappy bakers sing in Paris." becomes {shown}', markup=False)
    title("3  Corpus: the text as numbers, some of it held out")
    counts = build_corpus([out / "world.txt"], out / "tokenizer", out / "corpus", workers=1, heldout=0.03)["counts"]
    screen.print(f"{counts['documents']:,} documents, {counts['tokens']:,} tokens: {out / 'corpus'}")
    title("4  Pre-training: predict masked tokens")
    recipe = Recipe.load(out / "recipe.toml", **({"steps": steps} if steps else {}))
    if not is_complete(out / "untrained"):  # the same network with random weights
        torch.manual_seed(recipe.seed)
        Model(Network(fit_config(recipe.config, tokenizer), {"mlm": None}), tokenizer).save(out / "untrained")
    result = pretrain(recipe, out / "corpus", out / "pretrained", device="cpu")
    if not result.finished:
        raise KeyboardInterrupt
    title("5  Masked tokens: sentences that are nowhere in the text")
    story: dict[str, Any] = {"heldout": result.figures}
    texts, answers = zip(*data.rows("masked.tsv"))
    models = [load(folder, device="cpu") for folder in (out / "untrained", result.model)]
    before, after = ([model.fill(text, top=1)[0][0].token for text in texts] for model in models)
    columns = zip(texts, before, after, answers)
    story["masked"] = [dict(zip(("text", "before", "after", "answer"), row)) for row in columns]
    title("6  Fine-tuning: 400 labelled sentences, praise or complaint")
    story["scores"] = {}
    for name, base in (("sentiment", "pretrained/model"), ("untrained-sentiment", "untrained")):
        if not is_complete(out / name):
            tuned = finetune(out / base, "classify", out / "train.tsv", out / "dev.tsv", out / name, **TUNING)
            if not tuned.finished:
                raise KeyboardInterrupt
        model = load(out / name, device="cpu")
        parts = {part: evaluate("classify", model, out / f"{part}.tsv") for part in ("dev", "test")}
        story["scores"][name] = {part: result.scores["accuracy"] for part, result in parts.items()}
    title("7  Predictions: sentences it has never seen")
    predictions = load(out / "sentiment", device="cpu").classify(TEXTS)
    story["predictions"] = [{"text": t, "label": p.label, "score": p.score} for t, p in zip(TEXTS, predictions)]
    story["seconds"] = time.perf_counter() - began
    results, heading, commands = write_report(out, story).partition("## The same on your own data\n")
    screen.print("", Markdown(results))
    screen.print(heading[3:] + commands, markup=False, highlight=False, soft_wrap=True)  # lines that can be copied
    return story


def write_inputs(out: Path, size: int) -> None:
    """Write recipe.toml, world.txt, train.tsv, dev.tsv, test.tsv; a folder that holds something else is an error."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / "recipe.toml").exists())):
        raise EverybertError(f"{out} holds something else; give another --out")
    files = {"recipe.toml": data.read("quickstart.toml"), "world.txt": "\n\n".join(data.documents(size)) + "\n"}
    for name, source in (("train", "train"), ("dev", "dev"), ("test", "unseen")):
        files[f"{name}.tsv"] = data.read(f"{source}.tsv")
    out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        if not (out / name).exists() or (out / name).read_text("utf-8") != text:  # what was made from it stays valid
            write_text(out / name, text)


def write_report(out: Path, story: dict[str, Any]) -> str:
    """Write report.md and report.json; returns the text."""

    def table(rows: Iterable[Iterable[str]]) -> str:
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)

    text = data.read("report.md").format(
        out=out,
        seconds=f"{story['seconds']:.0f}",
        accuracy=f"{story['heldout']['accuracy']:.1%}",
        right=sum(one["after"] == one["answer"].lower() for one in story["masked"]),
        masked=len(story["masked"]),
        rows=len(data.rows("train.tsv")),
        sentences=table(one.values() for one in story["masked"]),
        scores=table([MODELS[name], *(f"{x:.1%}" for x in parts.values())] for name, parts in story["scores"].items()),
        predictions=table([one["text"], one["label"], f"{one['score']:.0%}"] for one in story["predictions"]),
    )
    write_text(out / "report.md", text)
    write_json(out / "report.json", story)
    return text
