"""The whole story in miniature: text, tokenizer, corpus, pre-training, blanks, fine-tuning, scores, predictions.

Every step calls the function that users call on their own data, and leaves its result in the folder; a run that was
stopped goes on where it was. The text is made by rules (everybert.data), so that there is something to know.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from everybert.corpus.build import build_corpus
from everybert.data.reviews import make_reviews
from everybert.data.tales import BLANKS, documents
from everybert.errors import EverybertError
from everybert.evaluation.evaluate import evaluate
from everybert.files import atomic_folder, is_complete, write_text
from everybert.inference.model import Model, load
from everybert.model.heads import Network
from everybert.plots import draw_curves, text_plot
from everybert.text.tokenizer import Tokenizer
from everybert.text.train_tokenizer import train_tokenizer
from everybert.training.finetune import finetune
from everybert.training.pretrain import fit_config, pretrain
from everybert.training.recipe import Recipe

TEXTS = (
    "The soup was superb.",
    "The film was dull.",
    "The room was not shabby at all, it was lovely.",
)
"""What the fine-tuned model is asked about."""
BOX = "everybert-small"
BERT_LARGE = (
    "BERT-large is really big... it has 24 layers and an embedding size of 1024, for a total of 340M parameters!"
)
QUESTIONS = (
    ("Where does Matt live?", "Matt lives in Canada and Sinan lives in California"),
    ("How many parameters does BERT-large have?", BERT_LARGE),
)
"""What the model in the box is asked."""


@dataclass
class Story:
    """What happened, for the report."""

    seconds: dict[str, float] = field(default_factory=dict)
    blanks: list[dict[str, Any]] = field(default_factory=list)
    """Each blank with its answer, and the best guess before and after pre-training."""
    losses: list[tuple[int, float]] = field(default_factory=list)
    heldout: dict[str, float] = field(default_factory=dict)
    """Pre-training's own figures on documents that were held out."""
    scores: dict[str, float] = field(default_factory=dict)
    """Accuracy on dev and test, of the pre-trained model and of one that was not."""
    predictions: list[dict[str, Any]] = field(default_factory=list)
    box: dict[str, str] = field(default_factory=dict)
    """Commands that take no --model, and what the model in the box says to them."""


class Stopped(Exception):
    """Ctrl-C: what is done is kept."""


def quickstart(
    out: str | Path = "quickstart", *, steps: int | None = None, size: int = 5000, console: Console | None = None
) -> Story:
    """Run the story in a folder. `steps` and `size` (documents) are for a shorter one."""
    out, say, story = Path(out), console or Console(), Story()
    claim(out)
    began = time.perf_counter()
    with part(say, story, 1, "Text: a small world, in which every blank has an answer"):
        write_texts(out, size, say)
    with part(say, story, 2, "Tokenizer: words and pieces of words, learnt from that text"):
        tokenizer = make_tokenizer(out, say)
    with part(say, story, 3, "Corpus: the text as numbers, some of it held out"):
        made = build_corpus([out / "world.txt"], out / "tokenizer", out / "corpus", workers=1, heldout=0.03)
        say.print(f"{made.counts['documents']:,} documents, {made.counts['tokens']:,} tokens: {out / 'corpus'}")
    recipe = Recipe.load(out / "recipe.toml", **({"steps": steps} if steps else {}))
    fresh = untrained(out, recipe, tokenizer)
    with part(say, story, 4, "Pre-training: hide words, guess them, learn from every wrong guess"):
        trained = pre_train(out, recipe, story, say)
    with part(say, story, 5, "Blanks: sentences that are nowhere in the text"):
        fill_blanks(fresh, trained, story, say)
    with part(say, story, 6, "Fine-tuning: 400 labelled sentences, praise or complaint"):
        fine_tune(out, story, say)
    with part(say, story, 7, "Predictions: sentences it has never seen"):
        predict(out, story, say)
    with part(say, story, 8, f"The box: {BOX}, which comes with the library and has read real English"):
        open_box(story, say)
    story.seconds["all"] = time.perf_counter() - began
    report(out, story, say)
    return story


@contextmanager
def part(say: Console, story: Story, number: int, title: str) -> Iterator[None]:
    """A chapter: its title, and the time it took."""
    say.print(f"\n[bold]{number}  {title}[/bold]")
    began = time.perf_counter()
    yield
    story.seconds[title.partition(":")[0].lower()] = time.perf_counter() - began


def claim(out: Path) -> None:
    """Make the folder, or refuse one that holds something else."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / "recipe.toml").exists())):
        raise EverybertError(f"{out} holds something else; give another --out")
    out.mkdir(parents=True, exist_ok=True)
    text = resources.files("everybert.data").joinpath("quickstart.toml").read_text("utf-8")
    _write(out / "recipe.toml", text)


def _write(path: Path, text: str) -> None:
    """Write a file unless it is there already: what was made from it stays valid."""
    if not path.exists() or path.read_text("utf-8") != text:
        write_text(path, text)


def write_texts(out: Path, size: int, say: Console) -> None:
    """world.txt: documents separated by blank lines; and the task's three files."""
    texts = list(documents(size))
    _write(out / "world.txt", "\n\n".join(texts) + "\n")
    reviews = make_reviews()
    for name in ("train", "dev", "test"):
        rows = [("text", "label"), *getattr(reviews, name)]
        _write(out / f"{name}.tsv", "".join(f"{a}\t{b}\n" for a, b in rows))
    say.print(f"{len(texts):,} short documents in {out / 'world.txt'}, for example:")
    for text in texts[1:4]:
        say.print(f"  {text[:110]}{'…' if len(text) > 110 else ''}", style="dim", highlight=False)


def make_tokenizer(out: Path, say: Console) -> Tokenizer:
    """tokenizer/: a WordPiece vocabulary."""
    if not is_complete(out / "tokenizer"):
        made, _ = train_tokenizer((out / "world.txt").read_text("utf-8").split("\n\n"), "wordpiece", 1500)
        with atomic_folder(out / "tokenizer") as draft:
            made.save(draft)
    tokenizer = Tokenizer.load(out / "tokenizer")
    shown = " ".join(tokenizer.encode("Unhappy bakers sing in Paris.").tokens)
    say.print(f'{tokenizer.size:,} pieces. "Unhappy bakers sing in Paris." becomes {shown}', markup=False)
    return tokenizer


def untrained(out: Path, recipe: Recipe, tokenizer: Tokenizer) -> Model:
    """untrained/: the same network before it has learnt anything."""
    if not is_complete(out / "untrained"):
        torch.manual_seed(recipe.seed)
        Model(Network(fit_config(recipe.config, tokenizer), {"mlm": None}), tokenizer).save(out / "untrained")
    return load(out / "untrained", device="cpu")


def pre_train(out: Path, recipe: Recipe, story: Story, say: Console) -> Model:
    """pretrained/: the run and, once finished, its model; loss.png."""
    result = pretrain(recipe, out / "corpus", out / "pretrained", device="cpu")
    if not result.finished:
        raise Stopped
    story.heldout = result.figures
    rows = [json.loads(line) for line in (out / "pretrained" / "log.jsonl").read_text("utf-8").splitlines()]
    story.losses = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    heldout = [(row["step"], row["heldout_loss"]) for row in rows if "heldout_loss" in row]
    say.print(text_plot([loss for _, loss in story.losses], "loss", f"step {result.step:,}"), highlight=False)
    drawn = draw_curves({"training": story.losses, "held-out": heldout}, out / "loss.png", "loss")
    say.print(
        f"On text it never saw it now guesses {result.figures['accuracy']:.0%} of the hidden words"
        + (f"; the curve is in {out / 'loss.png'}" if drawn else "")
    )
    return load(result.model, device="cpu")


def fill_blanks(fresh: Model, trained: Model, story: Story, say: Console) -> None:
    """What both models put into the blanks."""
    table = Table("sentence", "before", "after", "", box=None, header_style="bold")
    for blank in BLANKS:
        before, after = (model.fill(blank.text, top=1)[0][0] for model in (fresh, trained))
        right = after.token == blank.answer.lower()
        entry = {"text": blank.text, "answer": blank.answer, "before": before.token, "after": after.token}
        story.blanks.append(entry | {"probability": after.score, "right": right})
        shown = blank.text.replace("[MASK]", "____")
        table.add_row(shown, before.token, f"{after.token} {after.score:.0%}", "✓" if right else f"({blank.answer})")
    say.print(table)
    say.print(f"{sum(b['right'] for b in story.blanks)} of {len(BLANKS)} right")


def fine_tune(out: Path, story: Story, say: Console) -> None:
    """sentiment/: the pre-trained model on the task; untrained-sentiment/: the same from random weights."""
    settings: dict[str, Any] = {"epochs": 5, "lr": 1e-3, "batch_size": 32, "device": "cpu"}
    for name, base in (("sentiment", out / "pretrained" / "model"), ("untrained-sentiment", out / "untrained")):
        folder = out / name
        if not is_complete(folder):
            tuned = finetune(base, "classify", out / "train.tsv", out / "dev.tsv", folder, quiet=True, **settings)
            if not tuned.runs[0].finished:
                raise Stopped
        for part_ in ("dev", "test"):
            found = evaluate(load(folder, device="cpu"), "classify", out / f"{part_}.tsv")
            story.scores[f"{name} {part_}"] = found.scores["accuracy"]
    table = Table("accuracy", "words it was trained on", "words it knows from reading only", box=None)
    for title, name in (("pre-trained first", "sentiment"), ("from random weights", "untrained-sentiment")):
        table.add_row(title, *(f"{story.scores[f'{name} {p}']:.1%}" for p in ("dev", "test")))
    say.print(table)
    say.print("The last column is what pre-training is for: those words are in no labelled sentence.")


def predict(out: Path, story: Story, say: Console) -> None:
    """Classify a few texts."""
    for text, found in zip(TEXTS, load(out / "sentiment", device="cpu").classify(TEXTS)):
        story.predictions.append({"text": text, "label": found.label, "score": found.score})
        say.print(f"  {found.label:10} {found.score:.0%}  {text}", highlight=False)


def open_box(story: Story, say: Console) -> None:
    """What the commands say when no model is named."""
    model = load(BOX, device="cpu")
    for text in ("Istanbul is a great [MASK] to visit", "the man went to the [MASK] to buy a [MASK] of milk"):
        story.box[f'fill "{text}"'] = ", ".join(blank[0].token for blank in model.fill(text))
    (mood,) = model.classify("rich veins of funny stuff in this movie")
    story.box['classify "rich veins of funny stuff in this movie"'] = f"{mood.label} {mood.score:.0%}"
    pair = ("A soccer game with multiple males playing.", "Some men are playing a sport.")
    (sense,) = model.classify([pair])
    story.box[f'classify "{pair[0]}" --pair "{pair[1]}"'] = f"{sense.label} {sense.score:.0%}"
    names = model.tag("John Smith lives in New York")
    story.box['tag "John Smith lives in New York"'] = ", ".join(f"{name.text} ({name.label})" for name in names)
    for question, context in QUESTIONS:
        story.box[f'answer "{question}" "{context}"'] = model.answer(question, context)[0].text
    first, second = "Istanbul is a great city to visit", "I was just there."
    story.box[f'next "{first}" "{second}"'] = f"{model.next_sentence(first, second):.0%} that it follows"
    for command, said in story.box.items():
        say.print(f"  everybert {command}", highlight=False, markup=False, soft_wrap=True)
        say.print(f"      [bold]{said}[/bold]", highlight=False)


COMMANDS = (
    ("a tokenizer", "everybert tokenizer train mytext.txt --size 30000 --out tokenizer"),
    ("a corpus", "everybert corpus build mytext.txt --tokenizer tokenizer --out corpus"),
    ("pre-training", "everybert pretrain {out}/recipe.toml --corpus corpus --out run"),
    ("blanks", 'everybert fill "The capital of France is [MASK]." --model run/model'),
    ("fine-tuning", "everybert finetune classify --model run/model --train train.tsv --dev dev.tsv --out sentiment"),
    ("scores", "everybert evaluate classify --model sentiment --data test.tsv"),
    ("predictions", "everybert classify texts.csv --text-column text --out scored.csv --model sentiment"),
)


def report(out: Path, story: Story, say: Console) -> None:
    """report.md and report.json, and on the screen how to do each step on one's own data."""
    right = sum(b["right"] for b in story.blanks)
    lines = [
        "# everybert quickstart",
        "",
        f"The whole story took {story.seconds['all']:.0f} seconds:",
        "",
        *(f"- {name}: {seconds:.1f} s" for name, seconds in story.seconds.items() if name != "all"),
        "",
        f"The pre-trained model guesses {story.heldout['accuracy']:.1%} of hidden words in held-out text, and "
        f"fills {right} of {len(story.blanks)} blanks of sentences that are nowhere in its text:",
        "",
        "| sentence | before | after | right |",
        "|---|---|---|---|",
        *(f"| {b['text']} | {b['before']} | {b['after']} | {b['answer']} |" for b in story.blanks),
        "",
        "| praise or complaint | words trained on | words known from reading only |",
        "|---|---|---|",
        *(
            f"| {title} | {story.scores[f'{name} dev']:.1%} | {story.scores[f'{name} test']:.1%} |"
            for title, name in (("pre-trained first", "sentiment"), ("from random weights", "untrained-sentiment"))
        ),
        "",
        "![loss](loss.png)" if (out / "loss.png").exists() else "",
        "",
        "## The same on your own data",
        "",
        *(f"    {command.format(out=out)}" for _, command in COMMANDS),
    ]
    _write(out / "report.md", "\n".join(lines) + "\n")
    _write(out / "report.json", json.dumps(asdict(story), indent=2) + "\n")
    say.print(
        f"\n[bold]Done in {story.seconds['all']:.0f} seconds.[/bold] Everything is in {out}/, see report.md there."
    )
    say.print("The same on your own data:")
    for _, command in COMMANDS:
        say.print(f"  {command.format(out=out)}", highlight=False, markup=False, soft_wrap=True)
    serve = f"everybert serve --model words={out}/pretrained/model --model sentiment={out}/sentiment"
    say.print("A look inside, in the browser at http://127.0.0.1:8000:", highlight=False)
    say.print(f"  {serve}", highlight=False, markup=False, soft_wrap=True)
