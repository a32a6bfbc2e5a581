"""`everybert tokenizer`, `corpus`, `plan`, `pretrain`, `distil`, `extend`: from text to a pre-trained model."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from everybert.cli.common import Count, Device, ModelOptions, OptionalCount, Quiet, pairs_of, report
from everybert.cli.options import Fields, Group, Output, command
from everybert.errors import EverybertError

if TYPE_CHECKING:
    from everybert.training.pretrain import Result

app = typer.Typer()
tokenizer = typer.Typer(cls=Group, help="Train a tokenizer.", no_args_is_help=True)
corpus = typer.Typer(cls=Group, help="Build a pre-training corpus from text, and describe one.", no_args_is_help=True)
app.add_typer(tokenizer, name="tokenizer")
app.add_typer(corpus, name="corpus")
tokenizer.callback()(lambda: None)  # a group although it has one command
TEXTS = "Files or folders: txt, jsonl, json, csv, tsv, parquet, also .gz .xz .zst .bz2; - is standard input."
RecipeName = Annotated[str, "The name of a recipe, or a .toml file."]
Kind = Literal["wordpiece", "bpe", "unigram"]
Layout = Literal["full", "document", "pairs", "order"]
Languages = Annotated[list[str] | None, {"metavar": "LANGUAGE=FILE"}]
Building = Annotated[dict[str, Any], Fields("", "Documents", "everybert.corpus.build:BuildOptions", "shard_characters")]
Hardware = Annotated[dict[str, Any], Fields("", "Hardware", "everybert.training.plan:Machine")]


# ── text ─────────────────────────────────────────────────────────────────────────────────────────────────────


@command(tokenizer)
def train(
    files: Annotated[list[Path], TEXTS],
    *,
    out: Annotated[Path, "The tokenizer folder to write."],
    kind: Annotated[Kind, "WordPiece (BERT), byte-level BPE (RoBERTa) or Unigram (ALBERT)."] = "wordpiece",
    size: Annotated[int, "Tokens in the vocabulary, with the special ones.", {"min": 8}] = 30_000,
    cased: Annotated[bool, "Keep capitals and accents.", {"flag": "--cased/--uncased"}] = False,
    min_frequency: Annotated[Count, "Leave out pieces that occur less often."] = 2,
    max_length: Annotated[Count, "The length to which other libraries truncate."] = 512,
    column: Annotated[str | None, "The text column of records. Guessed if not given."] = None,
    errors: Annotated[Literal["strict", "replace"], "Bytes that are not UTF-8: stop, or replace them."] = "strict",
) -> Output:
    """Train a tokenizer on text, in one pass; the result is always the same. About 1 % of the lines measure it.

    Examples:
        everybert tokenizer train texts.txt --size 30000 --out tokenizer
        everybert tokenizer train texts/ more.jsonl.gz --kind bpe --cased --out bpe
    """
    from everybert.files import atomic_folder
    from everybert.text.readers import ReadReport, expand, read_documents
    from everybert.text.train_tokenizer import train_tokenizer
    from everybert.training.logs import progress_bar

    paths = expand(files)
    seen = ReadReport()
    with atomic_folder(out) as folder, progress_bar("characters", _plain_size(paths)) as tell:
        texts = read_documents(paths, column=column, errors=errors, report=seen)
        made, found = train_tokenizer(texts, kind, size, not cased, min_frequency, lambda stage, done: tell(done))
        made.save(folder, max_length)
    if seen.replaced:
        print(f"{seen.replaced:,} bytes that are not UTF-8 were replaced", file=sys.stderr)
    return Output(found.to_dict())


def _plain_size(paths: list[Path]) -> int | None:
    """Bytes to read, if they tell how far the reader is: of plain files, not of compressed ones."""
    plain = all(path.is_file() and path.suffix not in (".gz", ".xz", ".zst", ".bz2", ".parquet") for path in paths)
    return sum(path.stat().st_size for path in paths) if plain else None


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
    """Tokenize documents into a corpus folder. Run the same command again to resume.

    Examples:
        everybert corpus build texts/ --tokenizer tokenizer --out corpus
        everybert corpus build --language de=de.txt --tokenizer tok --out corpus
    """
    from everybert.corpus.build import build_corpus
    from everybert.store.hub import bundled

    languages: dict[str, list[Path]] = {}
    for name, file in pairs_of(language, "--language", "LANGUAGE=FILE, for example de=texts.txt"):
        languages.setdefault(name, []).append(Path(file))
    where = tokenizer if tokenizer.exists() else bundled(str(tokenizer)) or tokenizer
    options |= {"workers": workers, "engine": engine, "address": address, "pmi": pmi, "fresh": fresh}
    try:
        return Output(build_corpus(files, where, out, languages=languages, progress=True, **options).to_dict())
    except KeyboardInterrupt:
        print("stopped: finished shards are kept, run the same command again to resume", file=sys.stderr)
        raise typer.Exit(130) from None


@command(corpus)
def info(
    corpus: Annotated[Path, "A corpus folder.", {"metavar": "FOLDER"}],
    *,
    check: Annotated[bool, "Compare every file with its hash."] = False,
) -> Output:
    """Print what a corpus holds.

    Examples:
        everybert corpus info corpus --check
    """
    from everybert.corpus.build import summarise, verify

    if check:
        verify(corpus)
    return Output(summarise(corpus).to_dict())


@command(corpus)
def score(
    corpus: Annotated[Path, "A corpus folder, made with the tokenizer of the model.", {"metavar": "FOLDER"}],
    *,
    examples: Annotated[Layout, "Running text, the same within documents, or pairs as in BERT or ALBERT."] = "full",
    length: Annotated[int | None, "Tokens per example. If not given: at most 512.", {"min": 8}] = None,
    tokens: Annotated[Count, "Read at most this many tokens."] = 1_000_000,
    split: Annotated[Literal["heldout", "train"], "Which documents."] = "heldout",
    use: ModelOptions,
) -> Output:
    """Score a pre-trained model on held-out documents: 15 % of the tokens are masked, always the same.

    Examples:
        everybert corpus score corpus --model run/model
        everybert corpus score corpus -m run/model --examples pairs --length 128
    """
    from functools import partial

    from rich.console import Console
    from rich.progress import track

    from everybert.training.evaluate import score_corpus

    shown = partial(track, description="masking", console=Console(stderr=True), transient=True)
    found = score_corpus(use.load(), corpus, examples, length, tokens, split, shown)
    return Output(found)


@command(corpus)
def cloze(
    files: Annotated[list[str], "Files or folders of text."],
    *,
    out: Annotated[Path, "The file of questions to write."],
    count: Annotated[int, "Stop after this many questions."] = 100_000,
    seed: Annotated[int, "Selects the questions."] = 0,
) -> None:
    """Moved to recipes/cloze.py of the repository: make questions from text."""
    options = f"--out {out} --count {count} --seed {seed}"
    raise EverybertError(f"cloze questions are a recipe now: python recipes/cloze.py {' '.join(files)} {options}")


# ── training ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Changes:
    """Recipe."""

    steps: OptionalCount = None
    """Steps, in place of the recipe's."""
    budget: str | None = None
    """Time, such as 20m or 24h, in place of the recipe's steps."""
    set: Annotated[list[str] | None, {"metavar": "TABLE.KEY=VALUE"}] = None
    """Another value for a line of the recipe; repeat."""

    def overrides(self) -> dict[str, Any]:
        """The changes as the recipe's reader takes them."""
        import tomllib

        out: dict[str, Any] = {}
        for key, value in pairs_of(self.set, "--set", "TABLE.KEY=VALUE, for example schedule.peak=1e-3"):
            try:
                read = tomllib.loads(f"x = {value}")["x"]
            except tomllib.TOMLDecodeError:
                read = value.strip()  # a bare word is a string
            out[key.replace(".", "__")] = read
        if self.steps is not None and self.budget is not None:
            raise EverybertError("give --steps or --budget, not both")
        return out | ({"steps": self.steps} if self.steps else {}) | ({"budget": self.budget} if self.budget else {})


@command(app)
def pretrain(
    recipe: Annotated[str | None, "The name of a recipe, or a .toml file."] = None,
    *,
    corpus: Annotated[Path | None, "A corpus folder, made by `everybert corpus build`."] = None,
    out: Annotated[Path | None, "The run folder: logs, checkpoints, model."] = None,
    init: Annotated[str | None, "The model to start from: a folder or a bundled name."] = None,
    list_: Annotated[bool, "List the recipes that come with everybert."] = False,
    show: Annotated[bool, "Print the recipe and stop."] = False,
    device: Device = None,
    quiet: Quiet = False,
    changes: Changes,
) -> Output:
    """Pre-train a model. Run the same command again to resume; Ctrl-C and SIGTERM save first.

    For several GPUs or hosts start it with torchrun; --set run.parallel=sharded shards weights and optimizer too.

    Examples:
        everybert pretrain tiny-cpu --corpus corpus --out run
        everybert pretrain my.toml --corpus corpus --out run --budget 2h
        torchrun --nproc_per_node=8 -m everybert pretrain bert-base --corpus c --out r
    """
    from everybert.training import recipe as recipes

    if list_:
        found = {name: recipes.summary(name) for name in recipes.names()}
        return Output(found, (f"{name:18} {line}" for name, line in found.items()))
    if recipe is None:
        raise EverybertError(f"name a recipe: a .toml file, or one of {', '.join(recipes.names())}")
    if show:
        return Output(recipes.text(recipe), [recipes.text(recipe).rstrip("\n")])
    if corpus is None or out is None:
        raise EverybertError("give --corpus, the folder of `everybert corpus build`, and --out, the folder to write")
    from everybert.training.pretrain import pretrain as run

    more = changes.overrides() | ({"model__init": init} if init else {})
    return _result(run(recipe, corpus, out, device=device, quiet=quiet, **more))


@command(app)
def distil(
    *,
    teacher: Annotated[Path, "The model folder to learn from."],
    corpus: Annotated[Path, "A corpus folder, made by `everybert corpus build`."],
    out: Annotated[Path, "The run folder: logs, checkpoints, model."],
    student: Annotated[str | None, "A preset, a model folder of the wanted shape, or a .toml file."] = None,
    recipe: RecipeName = "distilbert",
    device: Device = None,
    quiet: Quiet = False,
    changes: Changes,
) -> Output:
    """Train a small model to imitate a larger one. Run the same command again to resume.

    Examples:
        everybert distil --teacher base --student bert-mini --corpus c --out r
    """
    from everybert.training.distil import distil as run

    more = {"student": student, "recipe": recipe, "device": device, "quiet": quiet, **changes.overrides()}
    return _result(run(teacher, corpus, out, **more))


def _result(result: Result) -> Output:
    model = str(result.model) if result.finished else None
    return Output({"finished": result.finished, "step": result.step, "model": model, **result.figures}, ())


@command(app)
def extend(
    *,
    model: Annotated[Path, "The model folder."],
    words: Annotated[Path, "A file with one word per line."],
    out: Annotated[Path, "The model folder to write."],
) -> None:
    """Add words to the vocabulary of a model. Each starts as the mean of its pieces.

    Examples:
        everybert extend --model bert-base --words terms.txt --out bert-medical
    """
    from everybert.store.convert import extend_folder
    from everybert.text.readers import lines

    count = extend_folder(model, [line for _, line in lines(words)], out)
    print(f"{count} words added: build a corpus with --tokenizer {out}, then pretrain with --init {out}")


# ── planning ─────────────────────────────────────────────────────────────────────────────────────────────────


@command(app)
def plan(
    recipe: RecipeName,
    *,
    tokens: Annotated[str | None, "Size of the corpus in tokens: 300B, 40M …"] = None,
    words: Annotated[str | None, "Size of the corpus in words, at 1.3 tokens each."] = None,
    hardware: Hardware,
    changes: Changes,
) -> Output:
    """Estimate memory, step time, network, storage, days and cost of a recipe. Nothing is run.

    Times follow measurements on one H200 (docs/LOG.md); memory and network are counted.

    Examples:
        everybert plan bert-base --words 3.3B
        everybert plan xlm-r --gpus 64 --tokens 300B --set batch.pack=32768
        everybert plan my.toml --gpu a100 --gpus 8 --price 1.8 --json
    """
    from everybert.training.plan import TOKENS_PER_WORD, Machine
    from everybert.training.plan import plan as make
    from everybert.training.recipe import Recipe

    if tokens and words:
        raise EverybertError("give --tokens or --words, not both")
    size = read_size(tokens) if tokens else read_size(words) * TOKENS_PER_WORD if words else None
    found = make(Recipe.load(recipe, **changes.overrides()), Machine(**hardware), size)
    return Output({"recipe": recipe, **found}, plan_lines(recipe, found))


def plan_lines(name: str, found: dict[str, Any]) -> Iterator[str]:
    """The plan as tables, with units."""
    one, digits = found["gpus"] == 1, 0 if found["gpu_hours"] >= 10 else 2
    cards = f"{found['gpus']} {found['gpu'].upper()}{'' if one else 's'}{', sharded' if found['sharded'] else ''}"
    yield f"{name} on {cards}: {found['parameters'] / 1e6:.1f}M parameters, {human(found['tokens'])} tokens seen"
    cost = f"${found['dollars']:,.{digits}f} at ${found['price']:g} per GPU hour (assumed)"
    yield f"{duration(found['days'])}, {found['gpu_hours']:,.{digits}f} GPU hours, {cost}"
    phases = [
        {name: phase[name] for name in ("length", "steps", "tokens", "mfu")}
        | {"packs": phase["packs"], "per GPU": phase["a_gpu"], "tokens/s": human(phase["speed"])}
        | {f"{name} ms": 1e3 * phase[name] for name in ("compute", "network")}
        | {"time": duration(phase["days"])}
        for phase in found["phases"]
    ]
    memory = {kind: {part: size / 1e9 for part, size in parts.items()} for kind, parts in found["memory"].items()}
    network = [
        {"GPUs": row["gpus"], "slowest link": f"{human(row['link'], 'B')}/s"}
        | {k: f"{human(row[k]['bytes'], 'B')} in {1e3 * row[k]['seconds']:.1f} ms" for k in memory}
        for row in found["network"]
    ]
    storage = {name: human(size, "B") for name, size in found["storage"].items()}
    if "tokens" in storage:
        storage |= {name: found["storage"][name] for name in ("epochs", "build_core_hours")}
        storage["tokens"] = human(found["storage"]["tokens"])
    title = f"GB of memory per GPU, of {found['memory_of_gpu'] / 1e9:.0f} GB (counted)"
    sent = "sent by each GPU per step (counted)"
    yield from ("", *report({"phases": phases, title: memory, sent: network, "storage": storage}))
    yield from (f"note: {note}" for note in found["notes"])


def read_size(text: str) -> float:
    """A number such as 300B, 3.3b, 40M or 1e9."""
    match = re.fullmatch(r"(\d+\.?\d*(?:e\d+)?)([kmbgt]?)", re.sub(r"[\s,_]", "", text.lower()))
    value = float(match[1]) * {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}[match[2]] if match else 0.0
    if not value:
        raise EverybertError(f"{text!r} is not a size; write it as 300B, 40M or 3300000000")
    return value


def human(number: float, unit: str = "") -> str:
    """A count with three digits: 860k, 1.5M, 128B; in bytes: 1.32 GB."""
    for name, size in (("T", 1e12), ("G" if unit else "B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:
            return f"{number / size:.3g}{' ' if unit else ''}{name}{unit}"
    return f"{number:.0f}{' ' if unit else ''}{unit}"


def duration(days: float) -> str:
    """A length of time in the unit that reads best."""
    if days >= 3:
        return f"{days:,.1f} days"
    return f"{days * 24:.1f} hours" if days * 24 >= 1.5 else f"{days * 1440:.0f} minutes"
