"""The whole library in miniature: text, tokenizer, corpus, pre-training, masked tokens, fine-tuning, predictions.

Every step calls the function that users call on their own data and leaves its result in the folder. A run that was
stopped resumes when it is started again. The text is bundled (`everybert.data`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from everybert import data
from everybert.corpus.build import build_corpus
from everybert.errors import EverybertError
from everybert.evaluation.evaluate import evaluate
from everybert.files import atomic_folder, is_complete, write_text
from everybert.inference.model import Model, load
from everybert.model.heads import Network
from everybert.text.tokenizer import Tokenizer
from everybert.text.train_tokenizer import train_tokenizer
from everybert.training.finetune import finetune
from everybert.training.pretrain import fit_config, pretrain
from everybert.training.recipe import Recipe

TEXTS = ("The soup was superb.", "The film was dull.", "The room was not shabby at all, it was lovely.")
"""Texts that the fine-tuned model classifies."""
BUNDLED = "everybert-small"
BERT_LARGE = (
    "BERT-large is really big... it has 24 layers and an embedding size of 1024, for a total of 340M parameters!"
)
QUESTIONS = (
    ("Where does Matt live?", "Matt lives in Canada and Sinan lives in California"),
    ("How many parameters does BERT-large have?", BERT_LARGE),
)
"""Questions for the bundled model."""
COMMANDS = (
    "everybert tokenizer train mytext.txt --size 30000 --out tokenizer",
    "everybert corpus build mytext.txt --tokenizer tokenizer --out corpus",
    "everybert pretrain {out}/recipe.toml --corpus corpus --out run",
    'everybert fill "The capital of France is [MASK]." --model run/model',
    "everybert finetune classify --model run/model --train train.tsv --dev dev.tsv --out sentiment",
    "everybert evaluate classify --model sentiment --data test.tsv",
    "everybert classify texts.csv --text-column text --out scored.csv --model sentiment",
)
MODELS = {"sentiment": "pre-trained first", "untrained-sentiment": "from random weights"}


@dataclass
class Story:
    """The results, for the report."""

    seconds: dict[str, float] = field(default_factory=dict)
    blanks: list[dict[str, Any]] = field(default_factory=list)
    """Each masked sentence with its answer, and the best candidate before and after pre-training."""
    losses: list[tuple[int, float]] = field(default_factory=list)
    heldout: dict[str, float] = field(default_factory=dict)
    """Pre-training's evaluation on held-out documents."""
    scores: dict[str, float] = field(default_factory=dict)
    """Accuracy on dev and test, with and without pre-training."""
    predictions: list[dict[str, Any]] = field(default_factory=list)
    box: dict[str, str] = field(default_factory=dict)
    """Commands without --model, and the output of the bundled model."""


class Stopped(Exception):
    """Ctrl-C was pressed. Finished steps are kept."""


def quickstart(
    out: str | Path = "quickstart", *, steps: int | None = None, size: int = 5000, console: Console | None = None
) -> Story:
    """Run all steps in a folder. `steps` of pre-training and `size` in documents make a shorter run."""
    out, screen, story = Path(out), console or Console(), Story()
    _prepare_folder(out)
    began = time.perf_counter()
    with _step(screen, story, 1, "Text: documents about a small world of facts"):
        write_inputs(out, size, screen)
    with _step(screen, story, 2, "Tokenizer: words and pieces of words, learnt from that text"):
        tokenizer = make_tokenizer(out, screen)
    with _step(screen, story, 3, "Corpus: the text as numbers, some of it held out"):
        made = build_corpus([out / "world.txt"], out / "tokenizer", out / "corpus", workers=1, heldout=0.03)
        screen.print(f"{made.counts['documents']:,} documents, {made.counts['tokens']:,} tokens: {out / 'corpus'}")
    recipe = Recipe.load(out / "recipe.toml", **({"steps": steps} if steps else {}))
    untrained = make_untrained(out, recipe, tokenizer)
    with _step(screen, story, 4, "Pre-training: predict masked tokens"):
        trained = pre_train(out, recipe, story, screen)
    with _step(screen, story, 5, "Masked tokens: sentences that are nowhere in the text"):
        fill_masks(untrained, trained, story, screen)
    with _step(screen, story, 6, "Fine-tuning: 400 labelled sentences, praise or complaint"):
        fine_tune(out, story, screen)
    with _step(screen, story, 7, "Predictions: sentences it has never seen"):
        for text, found in zip(TEXTS, load(out / "sentiment", device="cpu").classify(TEXTS)):
            story.predictions.append({"text": text, "label": found.label, "score": found.score})
            screen.print(f"  {found.label:10} {found.score:.0%}  {text}", highlight=False)
    with _step(screen, story, 8, f"Bundled: {BUNDLED}, which comes with the library and has read real English"):
        use_bundled(story, screen)
    story.seconds["all"] = time.perf_counter() - began
    report(out, story, screen)
    return story


@contextmanager
def _step(screen: Console, story: Story, number: int, title: str) -> Iterator[None]:
    """Print the title of a step and record its duration."""
    screen.print(f"\n[bold]{number}  {title}[/bold]")
    began = time.perf_counter()
    yield
    story.seconds[title.partition(":")[0].lower()] = time.perf_counter() - began


def _prepare_folder(out: Path) -> None:
    """Make the folder with its recipe; a folder that holds something else is an error."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / "recipe.toml").exists())):
        raise EverybertError(f"{out} holds something else; give another --out")
    out.mkdir(parents=True, exist_ok=True)
    _write(out / "recipe.toml", data.read("quickstart.toml"))


def _write(path: Path, text: str) -> None:
    """Write a file unless it has this content already: what was made from it stays valid."""
    if not path.exists() or path.read_text("utf-8") != text:
        write_text(path, text)


def write_inputs(out: Path, size: int, screen: Console) -> None:
    """world.txt, train.tsv, dev.tsv, test.tsv."""
    texts = data.documents(size)
    _write(out / "world.txt", "\n\n".join(texts) + "\n")
    for name, source in (("train", "train"), ("dev", "dev"), ("test", "unseen")):
        _write(out / f"{name}.tsv", data.read(f"{source}.tsv"))
    screen.print(f"{len(texts):,} short documents in {out / 'world.txt'}, for example:")
    for text in texts[1:4]:
        screen.print(f"  {text[:110]}{'…' if len(text) > 110 else ''}", style="dim", highlight=False)


def make_tokenizer(out: Path, screen: Console) -> Tokenizer:
    """tokenizer/: a WordPiece vocabulary."""
    if not is_complete(out / "tokenizer"):
        made, _ = train_tokenizer((out / "world.txt").read_text("utf-8").split("\n\n"), "wordpiece", 1500)
        with atomic_folder(out / "tokenizer") as draft:
            made.save(draft)
    tokenizer = Tokenizer.load(out / "tokenizer")
    shown = " ".join(tokenizer.encode("Unhappy bakers sing in Paris.").tokens)
    screen.print(f'{tokenizer.size:,} tokens. "Unhappy bakers sing in Paris." becomes {shown}', markup=False)
    return tokenizer


def make_untrained(out: Path, recipe: Recipe, tokenizer: Tokenizer) -> Model:
    """untrained/: the same network with random weights."""
    if not is_complete(out / "untrained"):
        torch.manual_seed(recipe.seed)
        Model(Network(fit_config(recipe.config, tokenizer), {"mlm": None}), tokenizer).save(out / "untrained")
    return load(out / "untrained", device="cpu")


def pre_train(out: Path, recipe: Recipe, story: Story, screen: Console) -> Model:
    """pretrained/: the run and its model; loss.png."""
    result = pretrain(recipe, out / "corpus", out / "pretrained", device="cpu")
    if not result.finished:
        raise Stopped
    story.heldout = result.figures
    rows = [json.loads(line) for line in (out / "pretrained" / "log.jsonl").read_text("utf-8").splitlines()]
    story.losses = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    heldout = [(row["step"], row["heldout_loss"]) for row in rows if "heldout_loss" in row]
    screen.print(text_plot([loss for _, loss in story.losses], "loss", f"step {result.step:,}"), highlight=False)
    drawn = draw_curves({"training": story.losses, "held-out": heldout}, out / "loss.png", "loss")
    screen.print(
        f"On held-out text it now predicts {result.figures['accuracy']:.0%} of the masked tokens"
        + (f"; the curve is in {out / 'loss.png'}" if drawn else "")
    )
    return load(result.model, device="cpu")


def fill_masks(untrained: Model, trained: Model, story: Story, screen: Console) -> None:
    """The predictions of both models for masked tokens."""
    table = Table("sentence", "before", "after", "", box=None, header_style="bold")
    for text, answer in data.rows("masked.tsv"):
        before, after = (model.fill(text, top=1)[0][0] for model in (untrained, trained))
        right = after.token == answer.lower()
        entry = {"text": text, "answer": answer, "before": before.token, "after": after.token}
        story.blanks.append(entry | {"probability": after.score, "right": right})
        shown = text.replace("[MASK]", "____")
        table.add_row(shown, before.token, f"{after.token} {after.score:.0%}", "✓" if right else f"({answer})")
    screen.print(table)
    screen.print(f"{sum(b['right'] for b in story.blanks)} of {len(story.blanks)} right")


def fine_tune(out: Path, story: Story, screen: Console) -> None:
    """sentiment/: the fine-tuned pre-trained model; untrained-sentiment/: the same from random weights."""
    settings: dict[str, Any] = {"epochs": 5, "lr": 1e-3, "batch_size": 32, "device": "cpu"}
    table = Table("accuracy", "words it was trained on", "words it knows from reading only", box=None)
    for name, base in (("sentiment", out / "pretrained" / "model"), ("untrained-sentiment", out / "untrained")):
        if not is_complete(out / name):
            tuned = finetune(base, "classify", out / "train.tsv", out / "dev.tsv", out / name, quiet=True, **settings)
            if not tuned.runs[0].finished:
                raise Stopped
        for part in ("dev", "test"):
            found = evaluate(load(out / name, device="cpu"), "classify", out / f"{part}.tsv")
            story.scores[f"{name} {part}"] = found.scores["accuracy"]
        table.add_row(MODELS[name], *(f"{story.scores[f'{name} {part}']:.1%}" for part in ("dev", "test")))
    screen.print(table)
    screen.print("The last column shows the effect of pre-training: those words are in no labelled sentence.")


def use_bundled(story: Story, screen: Console) -> None:
    """The output of commands without --model."""
    model = load(BUNDLED, device="cpu")
    for text in ("Istanbul is a great [MASK] to visit", "the man went to the [MASK] to buy a [MASK] of milk"):
        story.box[f'fill "{text}"'] = ", ".join(candidates[0].token for candidates in model.fill(text))
    (mood,) = model.classify("rich veins of funny stuff in this movie")
    story.box['classify "rich veins of funny stuff in this movie"'] = f"{mood.label} {mood.score:.0%}"
    pair = ("A soccer game with multiple males playing.", "Some men are playing a sport.")
    (sense,) = model.classify([pair])
    story.box[f'classify "{pair[0]}" --pair "{pair[1]}"'] = f"{sense.label} {sense.score:.0%}"
    names: list[Any] = model.tag("John Smith lives in New York")
    story.box['tag "John Smith lives in New York"'] = ", ".join(f"{name.text} ({name.label})" for name in names)
    for question, context in QUESTIONS:
        answers: list[Any] = model.answer(question, context)
        story.box[f'answer "{question}" "{context}"'] = answers[0].text
    first, second = "Istanbul is a great city to visit", "I was just there."
    story.box[f'next "{first}" "{second}"'] = f"{model.next_sentence(first, second):.0%} that it follows"
    for command, output in story.box.items():
        screen.print(f"  everybert {command}", highlight=False, markup=False, soft_wrap=True)
        screen.print(f"      [bold]{output}[/bold]", highlight=False)


def report(out: Path, story: Story, screen: Console) -> None:
    """report.md and report.json, and the commands for one's own data on the screen."""
    commands = [command.format(out=out) for command in COMMANDS]
    scores = {name: [f"{story.scores[f'{name} {part}']:.1%}" for part in ("dev", "test")] for name in MODELS}
    text = data.read("report.md").format(
        seconds=f"{story.seconds['all']:.0f}",
        steps="\n".join(f"- {name}: {seconds:.1f} s" for name, seconds in story.seconds.items() if name != "all"),
        accuracy=f"{story.heldout['accuracy']:.1%}",
        right=sum(b["right"] for b in story.blanks),
        masked=len(story.blanks),
        sentences="\n".join("| {text} | {before} | {after} | {answer} |".format(**b) for b in story.blanks),
        scores="\n".join(f"| {title} | {' | '.join(scores[name])} |" for name, title in MODELS.items()),
        picture="![loss](loss.png)" if (out / "loss.png").exists() else "",
        commands="\n".join(f"    {command}" for command in commands),
    )
    _write(out / "report.md", text)
    _write(out / "report.json", json.dumps(asdict(story), indent=2) + "\n")
    serve = f"everybert serve --model words={out}/pretrained/model --model sentiment={out}/sentiment"
    screen.print(f"\n[bold]Done in {story.seconds['all']:.0f} seconds.[/bold] The results are in {out}/report.md.")
    for title, shown in (
        ("The same on your own data:", commands),
        ("A look inside, in the browser at http://127.0.0.1:8000:", [serve]),
    ):
        screen.print(title, highlight=False)
        for command in shown:
            screen.print(f"  {command}", highlight=False, markup=False, soft_wrap=True)


# ── curves ──────────────────────────────────────────────────────────────────────────────────────────────────


def text_plot(values: Sequence[float], name: str, end: str = "", width: int = 64, height: int = 8) -> str:
    """A curve of `height` lines for the terminal. Values are averaged into `width` columns."""
    if not values:
        return ""
    columns = min(width, len(values))
    edges = [i * len(values) // columns for i in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    unit = (high - low) / (height * 8 - 1) or 1.0
    levels = [1 + round((mean - low) / unit) for mean in means]
    lines = []
    for row in reversed(range(height)):
        mark = f"{high:8.2f} ┤" if row == height - 1 else f"{low:8.2f} ┤" if row == 0 else " " * 9 + "│"
        lines.append(mark + "".join(" ▁▂▃▄▅▆▇█"[min(max(level - 8 * row, 0), 8)] for level in levels))
    return "\n".join([*lines, f"{name:>8} └" + "─" * max(columns - len(end) - 1, 0) + f" {end}"])


def draw_curves(curves: Mapping[str, Sequence[tuple[float, float]]], path: Path, name: str) -> bool:
    """Draw (step, value) curves into a PNG. False if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure  # not pyplot: no display, no global state
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for label, points in curves.items():
        axes.plot([x for x, _ in points], [y for _, y in points], label=label, marker="o" if len(points) < 20 else "")
    axes.set(xlabel="step", ylabel=name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return True
