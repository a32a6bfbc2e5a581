"""`everybert tokenizer`, `corpus`, `plan`, `pretrain`, `distil`: from text to a pre-trained model."""

import sys
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import everybert
from everybert.cli.common import DEFAULT, Count, Device, ModelOptions, OptionalCount, Pickle, Quiet, pairs_of, report
from everybert.cli.options import Fields, Group, Output, command
from everybert.errors import EverybertError
from everybert.files import atomic_folder, is_model
from everybert.store.hub import bundled
from everybert.text.readers import ReadReport, expand, plain_size, read_documents
from everybert.training.logs import progress_bar

app = typer.Typer()
tokenizer = typer.Typer(cls=Group, help="Train a tokenizer, and compare some.", no_args_is_help=True)
corpus = typer.Typer(cls=Group, help="Build a pre-training corpus from text, and describe one.", no_args_is_help=True)
app.add_typer(tokenizer, name="tokenizer")
app.add_typer(corpus, name="corpus")
TEXTS = "Files or folders: txt, jsonl, json, csv, tsv, parquet, also .gz .xz .zst .bz2; - is standard input."
RecipeName = Annotated[str, "The name of a recipe, or a .toml file."]
Kind = Literal["wordpiece", "bpe", "unigram"]
ExampleKind = Literal["pairs", "order", "full", "document"]
Lines = Annotated[list[str] | None, {"metavar": "TABLE.KEY=VALUE"}]
Languages = Annotated[list[str] | None, {"metavar": "LANGUAGE=FILE"}]
Building = Annotated[dict[str, Any], Fields("", "Documents", "everybert.corpus.build:BuildOptions", "shard_characters")]
SETTINGS = "everybert.training.tuning:FinetuneSettings"
Tuning = Annotated[dict[str, Any], Fields("mode epochs lr batch_size", "Fine-tuning (--then)", SETTINGS)]
Hardware = Annotated[dict[str, Any], Fields("", "Hardware", "everybert.training.plan:Machine")]


@dataclass(frozen=True)
class Changes:
    """Recipe."""

    steps: Annotated[OptionalCount, "Steps, in place of the recipe's."] = None
    budget: Annotated[str | None, "Time, such as 20m or 24h, in place of the recipe's steps."] = None
    set: Annotated[Lines, "Another value for a line of the recipe; repeat."] = None

    def overrides(self) -> dict[str, Any]:
        """The changes as the recipe's reader takes them."""
        from everybert.training.recipe import read_value

        pairs = pairs_of(self.set, "--set", "TABLE.KEY=VALUE, for example schedule.peak=1e-3")
        out = {key.replace(".", "__"): read_value(value) for key, value in pairs}
        if self.steps is not None and self.budget is not None:
            raise EverybertError("give --steps or --budget, not both")
        return out | ({"steps": self.steps} if self.steps else {}) | ({"budget": self.budget} if self.budget else {})


# ── text ─────────────────────────────────────────────────────────────────────────────────────────────────────


@command(tokenizer)
def train(
    files: Annotated[list[Path], TEXTS],
    *,
    out: Annotated[Path, "The tokenizer folder to write."],
    kind: Annotated[Kind, "WordPiece (BERT), byte-level BPE (RoBERTa) or Unigram (ALBERT)."] = "wordpiece",
    size: Annotated[int, "Tokens in the vocabulary, with the special ones.", {"min": 8}] = 30_000,
    cased: Annotated[bool, "Keep capitals and accents.", {"flag": "--cased/--uncased"}] = False,
    min_frequency: Annotated[OptionalCount, "Leave out pieces that occur less often: 2. Not for unigram."] = None,
    max_length: Annotated[Count, "The length to which other libraries truncate."] = 512,
    column: Annotated[str | None, "The text column of records. Guessed if not given."] = None,
    errors: Annotated[Literal["strict", "replace"], "Bytes that are not UTF-8: stop, or replace them."] = "strict",
) -> Output:
    """Train a tokenizer on text, in one pass; the result is always the same. About 1 % of the lines measure it."""
    from everybert.text.train_tokenizer import train_tokenizer

    if is_model(out):
        raise EverybertError(f"{out} holds a model; choose another --out")
    paths = expand(files)
    read = ReadReport()
    with atomic_folder(out) as folder, progress_bar("characters", plain_size(paths)) as tell:
        texts = read_documents(paths, column=column, errors=errors, report=read)
        trained, figures = train_tokenizer(texts, kind, size, not cased, min_frequency, tell)
        trained.save(folder, max_length)
    if read.replaced:
        print(f"{read.replaced:,} bytes that are not UTF-8 were replaced", file=sys.stderr)
    return Output(figures)


@command(tokenizer)
def show(
    texts: Annotated[list[str], "Texts, each in quotes."],
    *,
    tokenizer: Annotated[list[Path] | None, "A folder, a vocab.txt or spiece.model, or a model; repeat."] = None,
) -> Output:
    """Print how tokenizers cut texts, side by side: pieces with their ids, unknown ones, tokens per word."""
    from everybert.text.tokenizer import Tokenizer

    known = {str(name): Tokenizer.load(tokenizer_place(name)) for name in tokenizer or [Path(DEFAULT)]}
    rows = [{"text": text, "tokenizer": name, **each.describe(text)} for text in texts for name, each in known.items()]
    counts = [{key: value for key, value in row.items() if key not in ("pieces", "ids")} for row in rows]
    cuts = (f"{row['tokenizer']}: " + "  ".join(f"{p} {i}" for p, i in zip(row["pieces"], row["ids"])) for row in rows)
    return Output(rows, chain(report(counts), [""], cuts))


def tokenizer_place(name: Path) -> Path:
    """Where a tokenizer is: a folder or file, or a bundled model."""
    return name if name.exists() else bundled(str(name)) or name


@command(corpus)
def build(
    files: Annotated[list[Path] | None, TEXTS] = None,
    *,
    tokenizer: Annotated[Path, "A tokenizer folder or file, or a bundled model."],
    out: Annotated[Path, "The corpus folder to write."],
    language: Annotated[Languages, "Files or folders of one language; repeat."] = None,
    workers: Annotated[OptionalCount, "Processes. If not given: all cores."] = None,
    engine: Annotated[Literal["local", "ray"], "Tokenize on the cores of this machine, or on a Ray cluster."] = "local",
    address: Annotated[str | None, "The Ray cluster; auto finds it. If not given, one is started here."] = None,
    pmi: Annotated[bool, "Also find collocations for PMI masking."] = False,
    fresh: Annotated[bool, "Start again and replace what is there."] = False,
    options: Building,
) -> Output:
    """Tokenize documents into a corpus folder. Run the same command again to resume."""
    from everybert.corpus.build import build_corpus

    languages: dict[str, list[Path]] = {}
    for name, file in pairs_of(language, "--language", "LANGUAGE=FILE, for example de=texts.txt", many=True):
        languages.setdefault(name, []).append(Path(file))
    options |= {"workers": workers, "engine": engine, "address": address, "pmi": pmi, "fresh": fresh}
    try:
        place = tokenizer_place(tokenizer)
        return Output(build_corpus(files, place, out, languages=languages, bar=progress_bar, **options))
    except KeyboardInterrupt:
        print("stopped: finished shards are kept, run the same command again to resume", file=sys.stderr)
        raise typer.Exit(130) from None


@command(corpus)
def info(
    corpus: Annotated[Path, "A corpus folder.", {"metavar": "FOLDER"}],
    *,
    check: Annotated[bool, "Compare every file with its hash."] = False,
) -> Output:
    """Print what a corpus holds."""
    from everybert.corpus.build import summarise, verify

    if check:
        verify(corpus)
    return Output(summarise(corpus))


@command(corpus)
def show_(
    corpus: Annotated[Path, "A corpus folder.", {"metavar": "FOLDER"}],
    *,
    recipe: RecipeName = "bert-base",
    count: Annotated[Count, "Examples, one of each pack in turn."] = 3,
    epochs: Annotated[Count, "Show each example with the masks that so many epochs draw for it."] = 2,
    length: Annotated[int | None, "Most tokens per example, in place of the recipe's.", {"min": 8}] = None,
    changes: Annotated[Changes, Fields("set", "Recipe")],
) -> Output:
    """Print training examples of a recipe: tokens, segments, labels, and the masks of several epochs.

    A predicted token is printed as "what the model reads→what was there"; ⟨ ⟩ join what is masked together: the tokens
    of a word, a span, a collocation. Masks are new in every epoch (dynamic), or repeat after mask.static_duplicates
    epochs (static). Packs and epochs count from 0.
    """
    from everybert.corpus.show import as_lines, show_examples
    from everybert.training.pretrain import preview
    from everybert.training.recipe import Recipe

    stream, tokenizer, rate = preview(Recipe.load(recipe, **changes.overrides()), corpus, length)
    rows = list(show_examples(stream, tokenizer, count, epochs, rate))
    return Output(rows, chain.from_iterable(map(as_lines, rows)))


@command(corpus)
def score(
    corpus: Annotated[Path, "A corpus folder, made with the tokenizer of the model.", {"metavar": "FOLDER"}],
    *,
    examples: Annotated[ExampleKind | None, "If not given: pairs if the model judges them, else running text."] = None,
    length: Annotated[int | None, "Tokens per example. If not given: at most 512.", {"min": 8}] = None,
    tokens: Annotated[Count, "Read at most this many tokens: by default as many as a training run."] = 262_144,
    split: Annotated[Literal["heldout", "train"], "Which documents."] = "heldout",
    use: ModelOptions,
) -> Output:
    """Score a pre-trained model on held-out documents: 15 % of the tokens are masked, always the same."""
    from everybert.training.evaluate import score_corpus

    with progress_bar("packs") as tell:
        return Output(score_corpus(use.load(), corpus, examples, length, tokens, split, tell))


# ── training ─────────────────────────────────────────────────────────────────────────────────────────────────


@command(app)
def pretrain(
    recipe: Annotated[str | None, "The name of a recipe, or a .toml file."] = None,
    *,
    corpus: Annotated[Path | None, "A corpus folder, made by `everybert corpus build`."] = None,
    out: Annotated[Path | None, "The run folder: logs, checkpoints, model."] = None,
    init: Annotated[str | None, "The model to start from: a folder or a bundled name."] = None,
    list_: Annotated[bool, "List the recipes that come with everybert."] = False,
    show: Annotated[bool, "Print the recipe and stop."] = False,
    allow_pickle: Pickle = False,
    device: Device = None,
    quiet: Quiet = False,
    changes: Changes,
) -> Output:
    """Pre-train a model. Run the same command again to resume; Ctrl-C and SIGTERM save first.

    For several GPUs or hosts start it with torchrun.
    """
    from everybert.training import recipe as recipes

    if list_:
        return Output({name: recipes.text(name).splitlines()[0].lstrip("# ") for name in recipes.names()})
    if recipe is None:
        raise EverybertError(f"name a recipe: a .toml file, or one of {', '.join(recipes.names())}")
    if show:
        recipes.Recipe.load(recipe, **(overrides := changes.overrides()))  # a change that cannot be made is an error
        changed = [f"# instead: {key.replace('__', '.')} = {value}" for key, value in overrides.items()]
        shown = "\n".join([recipes.text(recipe).rstrip("\n"), *changed])
        return Output(shown, [shown])
    if corpus is None or out is None:
        raise EverybertError("give --corpus, the folder of `everybert corpus build`, and --out, the folder to write")
    more = changes.overrides() | {"allow_pickle": allow_pickle} | ({"model__init": init} if init else {})
    return _result(everybert.pretrain(recipe, corpus, out, device=device, quiet=quiet, **more))


@command(app)
def distil(
    *,
    teacher: Annotated[Path, "The model folder to learn from."],
    corpus: Annotated[Path, "A corpus folder, made by `everybert corpus build`."],
    out: Annotated[Path, "The run folder: logs, checkpoints, model."],
    student: Annotated[str | None, "A preset, a model folder of the wanted shape, or a .toml file."] = None,
    recipe: RecipeName = "distilbert",
    allow_pickle: Pickle = False,
    device: Device = None,
    quiet: Quiet = False,
    changes: Changes,
) -> Output:
    """Train a small model to imitate a larger one. Run the same command again to resume."""
    from everybert.training.distil import distil as run

    more = {"student": student, "recipe": recipe, "allow_pickle": allow_pickle, **changes.overrides()}
    return _result(run(teacher, corpus, out, device=device, quiet=quiet, **more))


@command(app)
def sweep(
    recipe: RecipeName,
    *,
    corpus: Annotated[Path, "A corpus folder with held-out documents."],
    out: Annotated[Path, "The folder for the runs, sweep.csv and, if matplotlib is installed, sweep.png."],
    vary: Annotated[list[str], "Values of a line of the recipe; repeat for a grid.", {"metavar": "TABLE.KEY=V,V"}],
    seeds: Annotated[Count, "Runs per combination: mean and 95 % interval."] = 1,
    then: Annotated[list[str] | None, "Also fine-tune: GLUE tasks' folders, or NAME=TRAIN,DEV; repeat."] = None,
    device: Device = None,
    quiet: Quiet = False,
    changes: Changes,
    settings: Tuning,
) -> Output:
    """Pre-train a recipe with every combination of some settings, and compare. Run the same command again to resume.

    Keys that change together are joined by a slash; none leaves a line out.
    """
    from everybert.evaluation.sweep import read_values, table
    from everybert.evaluation.sweep import sweep as run

    values = pairs_of(vary, "--vary", "TABLE.KEY=VALUE,VALUE, for example mask.rate=0.15,0.4")
    varied = {key: read_values(key, text) for key, text in values}
    if settings and not then:
        raise EverybertError(f"--{min(settings).replace('_', '-')} is for fine-tuning: name the labelled sets, --then")
    settings |= {"seeds": seeds, "then": then or (), "overrides": changes.overrides(), "device": device, "quiet": quiet}
    cells, finished = run(recipe, corpus, out, varied, **settings)
    scores = [{name: asdict(value) for name, value in cell.intervals().items()} for cell in cells]
    result = [{"settings": cell.settings, "scores": each} for cell, each in zip(cells, scores)]
    return Output({"finished": finished, "cells": result}, report(table(cells)), code=0 if finished else 130)


def _result(result: Any) -> Output:
    model = str(result.model) if result.finished else None
    return Output({"finished": result.finished, "step": result.step, "model": model, **result.figures}, ())


@command(app)
def plan(recipe: RecipeName, *, hardware: Hardware, changes: Changes) -> Output:
    """Estimate memory, time and cost of a recipe. Nothing is run.

    Times follow from the speed of an H200 (docs/LOG.md), within about 15 %; memory (GB per GPU) is counted.
    """
    from everybert.inference.describe import TABLES
    from everybert.training import plan as planner
    from everybert.training.recipe import Recipe

    chosen = Recipe.load(recipe, **changes.overrides())
    estimate = {"recipe": recipe, **planner.plan(chosen, planner.Machine(**hardware))}
    known = {} if chosen.model.changes else TABLES["published"].get(chosen.model.preset, {})
    estimate |= {"published": {key: known[key] for key in ("hardware", "source")}} if "hardware" in known else {}
    notes = [f"note: {note}" for note in estimate["notes"]]
    return Output(estimate, [*report({k: v for k, v in estimate.items() if k != "notes"}), *notes])
